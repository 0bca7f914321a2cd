"""`edge_client run` that halts at a chosen moment of an attempt, so that a test can kill a process at that moment.

    python -m tests.support.halting_member PHASE HALT -- OPTIONS OF edge_client run

While the file HALT exists, the member halts before it answers in PHASE (advertise, share, confirm, unmask), or half-way
through its upload in phase mask. It logs `halted`, and continues when the file is gone.
"""

import asyncio
import sys
from pathlib import Path

from toolkit.console import run_app
from toolkit.tls import tls_13_only


def main() -> None:
    """Command line."""
    phase, halt = sys.argv[1], Path(sys.argv[2])
    sys.argv = ["edge_client", *sys.argv[4:]]
    tls_13_only()

    import structlog

    import secure_agg
    from edge_client.cli import app
    from edge_client.session import states
    from edge_client.session.agent import Agent

    kinds = {
        "advertise": secure_agg.Advertisement,
        "share": secure_agg.Dealing,
        "confirm": secure_agg.Confirmation,
        "unmask": secure_agg.Unmasking,
    }
    log = structlog.get_logger("halting_member")
    carry_out, parts = Agent._carry_out, Agent._parts

    async def until_gone() -> None:
        # Another process removes the file, so there is no event to wait for.
        while halt.exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)

    async def halting_carry_out(self: Agent, effect: states.Effect) -> None:
        payload = getattr(getattr(effect, "message", None), "payload", None)
        if isinstance(effect, states.Say) and phase in kinds and isinstance(payload, kinds[phase]) and halt.exists():  # noqa: ASYNC240
            log.info("halted", phase=phase)

            async def later() -> None:
                await until_gone()
                await carry_out(self, effect)

            self._halted = asyncio.ensure_future(later())  # type: ignore[attr-defined]
            return
        await carry_out(self, effect)

    async def halting_parts(self: Agent, *of: object) -> object:
        sent = 0
        async for part in parts(self, *of):
            yield part
            sent += 1
            if phase == "mask" and sent == 3 and halt.exists():  # noqa: ASYNC240
                log.info("halted", phase=phase)
                await until_gone()

    Agent._carry_out = halting_carry_out
    Agent._parts = halting_parts  # type: ignore[assignment]
    run_app(app)


if __name__ == "__main__":
    main()
