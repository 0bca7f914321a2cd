"""`edge_client run` whose training takes three quarters of a second more, in which the processor is idle.

For a job that must go on for a minute while something else is tested: its rounds would take the processor.

    python -m tests.support.unhurried_member run --data FILE ...
"""

import asyncio
from typing import Any

from toolkit.console import run_app
from toolkit.tls import tls_13_only

_SECONDS = 0.75


def main() -> None:
    """Command line."""
    tls_13_only()

    from edge_client.cli import app
    from edge_client.session.preparation import Preparer

    prepare = Preparer.prepare

    async def unhurried(self: Preparer, assignment: Any, fetch: Any) -> Any:
        await asyncio.sleep(_SECONDS)
        return await prepare(self, assignment, fetch)

    Preparer.prepare = unhurried
    run_app(app)


if __name__ == "__main__":
    main()
