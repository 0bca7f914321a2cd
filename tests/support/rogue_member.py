"""An enrolled member that breaks rules or halts on order. Without an order it is honest, except that it does not train.
In jobs whose names begin with `beside`, which go on beside others, training takes a quarter of a second, in which the
processor is idle.

    python -m tests.support.rogue_member HOME ORDERS [JOB ...]

ORDERS is a file that a test writes and removes while the member runs. It holds one of these orders:

    halt PHASE   halts before it answers in PHASE (advertise, share, mask, confirm, unmask) while the order exists
    digest       sends another vector than the one whose digest it signed
    garbage NAME KEY
                 deals NAME a key that does not open. On NAME's complaint it opens the right key ("right"), another one
                 ("wrong"), or none ("none")
    twice        sends every message twice
    other        sends a second, different advertisement after the first
    endless      sends vectors without end
    trickle      begins its vector and then sends nothing more
    flood        once, sends Ready and refuses attempts that never existed, FLOOD times each

It logs `broke` with the order when it breaks a rule, and `halted` when it halts.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.tls import tls_13_only

FLOOD = 1000


def main() -> None:
    """Command line: runs until SIGTERM, or until the coordinator sends it away."""
    tls_13_only()
    from toolkit.logs import configure

    configure("json", "info")
    asyncio.run(_run(Path(sys.argv[1]), Path(sys.argv[2]), tuple(sys.argv[3:])))


async def _run(home: Path, orders: Path, jobs: tuple[str, ...]) -> None:
    from benchmarks.library.members import run_member

    task = asyncio.ensure_future(run_member(home, kind=_rogue(orders), admits=jobs, training_seconds=_training_seconds))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with suppress(asyncio.CancelledError):
        await task


def _training_seconds(job: str) -> float:
    """A job that tests only see going on would take the processor from what they test."""
    return 0.25 if job.startswith("beside") else 0.0


def _rogue(orders: Path) -> Any:
    import structlog

    import secure_agg
    from edge_client.session import states
    from edge_client.session.agent import Agent
    from tacit.attempt import AttemptId
    from tacit.messages import AttemptMessage, AttemptRefusal, Ready
    from tacit.reason import Reason
    from tacit.v1 import federation_pb2 as pb
    from tests.support.crooked import opened_by, resigned

    log = structlog.get_logger("rogue_member")
    phases = {
        secure_agg.Advertisement: "advertise",
        secure_agg.Dealing: "share",
        secure_agg.Confirmation: "confirm",
        secure_agg.Unmasking: "unmask",
    }

    def order() -> list[str]:
        try:
            return orders.read_text().split() or [""]
        except FileNotFoundError:
            return [""]

    async def while_halted(phase: str) -> None:
        if order() == ["halt", phase]:
            log.info("halted", phase=phase)
        # Another process removes the order, so there is no event to wait for.
        while order() == ["halt", phase]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    class Rogue(Agent):
        """An agent that reads its orders before it acts."""

        _flooded = False

        async def _carry_out(self, effect: states.Effect) -> None:
            carry_out = super()._carry_out
            payload = getattr(getattr(effect, "message", None), "payload", None)
            phase = phases.get(type(payload))
            match order():
                case ["halt", where] if where == phase:

                    async def later() -> None:
                        await while_halted(where)
                        await carry_out(effect)

                    # A reference, so that the task is not collected.
                    self._later = asyncio.ensure_future(later())
                    return
                case ["garbage", victim, _] if isinstance(payload, secure_agg.Dealing):
                    log.info("broke", order="garbage")
                    effect = states.Say(AttemptMessage(effect.message.attempt, self._garbled(effect.message, victim)))
                case ["twice"] if isinstance(effect, states.Say):
                    log.info("broke", order="twice", said=type(effect.message).__name__)
                    await carry_out(effect)
                case ["other"] if isinstance(payload, secure_agg.Advertisement):
                    await carry_out(effect)
                    log.info("broke", order="other")
                    changed = replace(payload, signature=bytes(len(payload.signature)))
                    effect = states.Say(AttemptMessage(effect.message.attempt, changed))
                case ["flood"] if not self._flooded and isinstance(getattr(effect, "message", None), Ready):
                    # Flood once, or every answer would begin another flood.
                    self._flooded = True
                    log.info("broke", order="flood")
                    job, round_ = effect.message.job, effect.message.round
                    refusal = AttemptRefusal(Reason.REASON_INTERNAL, "a flood")
                    for number in range(FLOOD):
                        await carry_out(states.Say(Ready(job, round_ + 1 + number, bytes(32))))
                        await carry_out(states.Say(AttemptMessage(AttemptId(job, round_, 10**6 + number), refusal)))
            await carry_out(effect)

        def _garbled(self, message: Any, victim: str) -> secure_agg.Dealing:
            stage = self._state.phase(message.attempt.job).stage
            return resigned(
                stage.seat.session,
                stage.seat.identity,
                message.payload,
                victim,
                lambda share: replace(share, sealed_key=bytes(len(share.sealed_key))),
            )

        async def _work(self, event: states.Event) -> None:
            payload = getattr(getattr(event, "message", None), "payload", None)
            match order():
                case ["garbage", _, answer] if isinstance(payload, secure_agg.Complaint):
                    # Its own software would refuse to open what it did not deal.
                    stage = self._state.phase(event.message.attempt.job).stage
                    key = stage._openable._secrets[payload.complainant, payload.part].reveal()
                    if answer != "none":
                        opened = key if answer == "right" else bytes(32)
                        opening = opened_by(stage.seat.session, stage.seat.identity, payload, opened)
                        await self._carry_out(states.Say(AttemptMessage(event.message.attempt, opening)))
                case _:
                    await super()._work(event)

        async def _upload(self, attempt: AttemptId, packed: memoryview, message: secure_agg.MaskedInput) -> None:
            if order() == ["digest"]:
                log.info("broke", order="digest")
                packed[len(packed) // 2] ^= 1
            await super()._upload(attempt, packed, message)

        async def _parts(self, *of: Any) -> AsyncIterator[pb.MaskedUpload]:
            sent = 0
            async for part in super()._parts(*of):
                yield part
                sent += 1
                if sent == 2:
                    await while_halted("mask")
                    if order() == ["trickle"]:
                        log.info("broke", order="trickle")
                        await asyncio.Event().wait()
            if order() == ["endless"]:
                log.info("broke", order="endless")
            while order() == ["endless"]:
                yield pb.MaskedUpload(data=bytes(64 * 1024))

    return Rogue


if __name__ == "__main__":
    main()
