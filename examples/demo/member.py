"""Runs one member of the demonstration: `edge_client run` with a `Recorder`."""

import argparse
from pathlib import Path

from toolkit.console import run_app
from toolkit.tls import tls_13_only


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--member", required=True)
    options = parser.parse_args()
    # gRPC reads this when it is first imported.
    tls_13_only()

    from edge_client.session import agent

    # A head's vector has 23 kB, a tenth of a chunk. Smaller chunks have a half-way point, at which a member is killed.
    agent.CHUNK = 4096

    from edge_client.agent.runner import RunOptions, run_member
    from examples.demo.recorder import Recorder

    run_member(
        RunOptions(data=options.data, home=options.home, until_finished=True, log_format="json"),
        Recorder(options.records, options.member),
    )


if __name__ == "__main__":
    run_app(main)
