"""Runs one member of the demonstration: `edge_client run` with a `Recorder`."""

import argparse
import sys
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
    parser.add_argument("--chunk", type=int, help="bytes of a chunk of the upload")
    parser.add_argument("--wait", action="store_true", help="connect once standard input is closed")
    options = parser.parse_args()
    # gRPC reads this when it is first imported.
    tls_13_only()

    from edge_client.session import agent

    if options.chunk is not None:
        agent.CHUNK = options.chunk

    from edge_client.agent.dry_run import describing
    from edge_client.agent.runner import RunOptions, run_member
    from examples.demo.recorder import Recorder

    if options.wait:
        # A round takes a second, and starting torch several. So it starts before it is late.
        import learning.training.update  # noqa: F401

        sys.stdin.read()
    told = RunOptions(data=options.data, home=options.home, until_finished=True, log_format="json")
    run_member(told, Recorder(options.records, options.member), describe=describing(told))


if __name__ == "__main__":
    run_app(main)
