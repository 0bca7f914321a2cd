"""The other side of a comparison: a coordinator that adds vectors in the clear. It protects nobody.

It is the real coordinator (services, TLS, sessions, spooled uploads, hashing, database, store) with one part replaced:
the job's driver runs no protocol. In a round it asks everyone for an update, opens uploads once all are ready, adds the
vectors, steps the version, and writes the same records at the same points. So the times of a round on the two sides
differ only by the cost of secure aggregation.

    python -m benchmarks.secure_aggregation.clear --dir FEDERATION
"""

import argparse
import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.domain.jobs import EndAttempt, JobStatus
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.driver import JobDriver, Ports
from coordinator.rounds.publish import Step, next_version, norms_of
from coordinator.rounds.state import JobState
from tacit.context import context_of
from tacit.messages import Assignment, AttemptEnded, AttemptMessage, AttemptOpened, JobEnded
from tacit.reason import Reason

__all__ = ["ClearDriver", "main"]


class ClearDriver(JobDriver):
    """Drives one job with exactly `rounds.min_members` members, all of which must stay."""

    def __init__(self, state: JobState, ports: Ports) -> None:
        if (groups := state.parameters.job.aggregation.groups) is not None:
            raise ValueError(f"job {state.name} asks for {groups} groups, but the clear sum has one; leave groups out")
        super().__init__(state, ports)
        self._here: set[str] = set()
        self._ready: set[str] = set()
        self._added: set[str] = set()

    @property
    def _members(self) -> int:
        return self._state.parameters.job.rounds.min_members

    async def _step(self, event: ev.Event) -> None:
        if self._state.status is not JobStatus.RUNNING:
            return
        match event:
            case ev.Connected():
                self._here.add(event.member)
                if len(self._here) == self._members and not self._state.round_open:
                    await self._open_round()
            case ev.SaidReady():
                self._ready.add(event.member)
                if len(self._ready) == self._members:
                    await self._open_uploads()
            case ev.Uploaded():
                await self._ports.uploads.accept(event.attempt, event.member)
                self._added.add(event.member)
                if len(self._added) == self._members:
                    await self._publish()
            case ev.Disconnected() if self._state.round_open:
                raise RuntimeError(f"{event.member} left, and the clear sum cannot go on without it")

    async def _open_round(self) -> None:
        self._ready, self._added = set(), set()
        state = self._state = replace(self._state, round=self._state.round + 1, round_open=True)
        await self._persist((fx.OpenRound(state.round),))
        job, document = state.parameters.job, state.parameters.document
        window = int(1000 * job.rounds.deadlines.training)
        for member in sorted(self._here):
            assignment = Assignment(state.name, state.round, document, state.version, state.version_number, window)
            self._ports.sessions.send(member, assignment)

    async def _open_uploads(self) -> None:
        state = self._state = replace(self._state, attempt=self._state.attempt + 1)
        job, attempt, cohort = state.parameters.job, state.attempt_id(), tuple(sorted(self._ready))
        context = context_of(
            job,
            federation=state.parameters.federation,
            round=state.round,
            attempt=state.attempt,
            model=state.version,
            members=len(cohort),
        )
        await self._persist((fx.OpenAttempt(attempt, cohort),))
        self._ports.uploads.open(attempt, frozenset(cohort), context.values, context.bits)
        for member in cohort:
            self._ports.sessions.send(member, AttemptMessage(attempt, AttemptOpened(context)))

    async def _publish(self) -> None:
        ports, state = self._ports, self._state
        attempt, cohort = state.attempt_id(), tuple(sorted(self._added))
        ports.uploads.close(attempt, keep_sum=True)
        base = await asyncio.to_thread(ports.store.get, state.version)
        result, step = await asyncio.to_thread(_open, state, len(cohort), ports.uploads.total(attempt), base)
        version = await asyncio.to_thread(ports.store.put, step.values.tobytes())
        norms = await asyncio.to_thread(norms_of, np.frombuffer(base, "<f4"), step.values)
        number = state.version_number + 1
        end = EndAttempt(attempt, True, Reason.REASON_UNSPECIFIED, "", cohort, (), result, version, step.training)
        await self._persist(
            (
                end,
                fx.PublishVersion(number, version, state.round, norms),
                fx.EndRound(state.round, True, Reason.REASON_UNSPECIFIED),
            )
        )
        ports.uploads.close(attempt, keep_sum=False)
        self._state = replace(state, version=version, version_number=number, round_open=False)
        ended = AttemptEnded(True, Reason.REASON_UNSPECIFIED, "", result, version)
        for member in cohort:
            ports.sessions.send(member, AttemptMessage(attempt, ended))
        if number < state.parameters.job.rounds.count:
            await self._open_round()
            return
        await self._persist((fx.SetStatus(JobStatus.FINISHED, Reason.REASON_JOB_FINISHED),))
        self._state = replace(self._state, status=JobStatus.FINISHED)
        for member in cohort:
            ports.sessions.send(member, JobEnded(state.name, Reason.REASON_JOB_FINISHED, version))


def _open(state: JobState, cohort: int, total: NDArray[np.uint32], base: bytes) -> tuple[bytes, Step]:
    result = hashlib.sha256(total.tobytes()).digest()
    return result, next_version(state.parameters.job, cohort, cohort, total, np.frombuffer(base, dtype="<f4"))


def main() -> None:
    """Command line: serves until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.secure_aggregation.clear", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="folder made by `coordinator init`")
    options = parser.parse_args()
    from toolkit.tls import tls_13_only

    # Set before gRPC is imported, as in `coordinator serve`.
    tls_13_only()
    from coordinator import runtime
    from coordinator.config import load_config
    from coordinator.server import serve
    from toolkit.logs import configure

    config = load_config(options.dir)
    configure(config.log_format)
    # Replaces the only part that differs.
    setattr(runtime, "JobDriver", ClearDriver)  # noqa: B010
    asyncio.run(serve(options.dir, config))


if __name__ == "__main__":
    main()
