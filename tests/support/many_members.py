"""Many members in one process, for tests of large cohorts: enrolled with tokens, real agents, no training.

    python -m tests.support.many_members FOLDER < TOKENS

Reads lines `NAME TOKEN` until its input ends, enrols each member into FOLDER/home-NAME, logs `enrolled` with their
number, and runs them all until SIGTERM. Everything except training is a member's own code: an update follows from the
member's name (`benchmarks.library.members.synthetic_update`).
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from toolkit.tls import tls_13_only

POLICY = 'schema = 1\nmechanisms = ["none"]\n'


def main() -> None:
    """Command line."""
    tls_13_only()
    from toolkit.logs import configure

    configure("json", "info")
    members = dict(line.split() for line in sys.stdin if line.strip())
    asyncio.run(_all(Path(sys.argv[1]), members))
    # Do not wait for the threads of interrupted transfers.
    os._exit(0)


async def _all(folder: Path, tokens: dict[str, str]) -> None:
    import structlog

    from edge_client.identity.enrolment import enrol

    for name, token in tokens.items():
        await enrol(folder / f"home-{name}", token)
    structlog.get_logger("many_members").info("enrolled", members=len(tokens))
    task = asyncio.ensure_future(asyncio.gather(*(_member(folder / f"home-{name}") for name in tokens)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _member(home: Path) -> None:
    from benchmarks.library.members import run_member

    (home / "policy.toml").write_text(POLICY)
    await run_member(home)


if __name__ == "__main__":
    main()
