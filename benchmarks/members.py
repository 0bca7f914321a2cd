"""Several members in one process, for measurements of what the coordinator and the protocol cost.

Each is a real agent: its own key and session, the real machine, journal and secure aggregation. Only training is left
out: the update is made up once. With `--clear` the agents send their encoded vectors as they are, to a coordinator that
adds them up in the clear (`benchmarks.clear`): same channel, session, fetching, encoding and upload, and none of the
protocol.
"""

import argparse
import asyncio
import contextlib
import hashlib
import os
import signal
from pathlib import Path

import numpy as np

import secure_agg
from edge_client.cache import BlobCache
from edge_client.contribution import Update
from edge_client.data import Example
from edge_client.home import MemberIdentity
from edge_client.journal import Journal
from edge_client.privacy.budget import Budget, open_budget
from edge_client.privacy.policy import Policy
from edge_client.session import agent as real
from edge_client.session import states as m
from edge_client.session.preparation import Fetch, Preparation, Preparer
from edge_client.watching import LogWatcher
from tacit.attempt import AttemptId
from tacit.job import JobDocument, layout_of
from tacit.logs import configure
from tacit.messages import (
    Assignment,
    AttemptEnded,
    AttemptMessage,
    AttemptOpened,
    JobEnded,
    Ready,
)
from tacit.verification import verifiers

__all__ = ["ClearAgent", "MadeUpPreparer", "clear_input", "made_up_update", "main"]

_EXAMPLES = 100


def made_up_update(member: str, values: int) -> Update:
    """An update that follows from the member's name, float32 (values,), small against the coordinate bound."""
    seed = int.from_bytes(hashlib.sha256(member.encode()).digest()[:8], "big")
    change = np.random.default_rng(seed).standard_normal(values, dtype=np.float32) * np.float32(0.01)
    return Update(change, _EXAMPLES, 50.0, 80, _EXAMPLES)


def clear_input(member: str, vector: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> secure_agg.MaskedInput:
    """The header of an upload in the clear: nothing is signed, as nothing rests on it."""
    return secure_agg.MaskedInput(member, bytes(32), vector.size, bytes(64))


class MadeUpPreparer(Preparer):
    """Fetches the job and the version as a member does, and trains nothing."""

    def __init__(self, member: str, policy: Policy, budget: Budget, cache: BlobCache, watcher: LogWatcher) -> None:
        random = secure_agg.SystemRandom()
        super().__init__([Example("", "")], bytes(32), member, policy, budget, random, cache, "cpu", watcher)
        self._update: Update | None = None

    async def prepare(self, assignment: Assignment, fetch: Fetch) -> Preparation:
        """The same update for every assignment."""
        job = await self._job(assignment, fetch)
        self._policy.check_job(job)
        await self._blob(assignment.version, fetch, 4 * job.values)
        if self._update is None or self._update.change.size != job.values:
            self._update = made_up_update(self._member, job.values)
        protection = self._budget.protection(job, _EXAMPLES)
        return Preparation(job, self._update, protection, self._budget.reserve(assignment, job, protection))


class ClearAgent(real.Agent):
    """The agent with the protocol left out: on an attempt it encodes and uploads."""

    async def _work_events(self) -> None:
        prepared: dict[str, JobDocument] = {}
        while True:
            match await self._events.get():
                case m.Received(Assignment() as assignment):
                    self._carry_out(m.Prepare(assignment))
                case m.Prepared(assignment=assignment, job=job):
                    prepared[job.name] = job
                    self._carry_out(m.Say(Ready(job.name, assignment.round, assignment.version)))
                case m.Received(AttemptMessage(attempt, AttemptOpened(context))):
                    task = asyncio.create_task(self._send_clear(attempt, prepared[attempt.job], context.cohort))
                    self._uploads[attempt] = real._Upload(task)
                case m.Received(AttemptMessage(attempt, AttemptEnded())):
                    self._uploads.pop(attempt, None)
                    self._held.pop(attempt.job, None)
                case m.Received(JobEnded() as ended):
                    self._carry_out(m.JobOver(ended))
                case other:
                    raise RuntimeError(f"nobody says {type(other).__name__} in the clear")

    async def _send_clear(self, attempt: AttemptId, job: JobDocument, cohort: int) -> None:
        held = self._held[attempt.job]
        encode = held.protection.encode
        vector = await asyncio.to_thread(encode, job, held.update, cohort, self._environment.random)
        packed = secure_agg.pack_in_place(vector, layout_of(job, cohort).bits)
        await self._upload(attempt, packed, clear_input(self._identity.member, vector))


async def _member(home: Path, *, clear: bool) -> None:
    identity = MemberIdentity.load(home)
    policy = Policy.from_toml(home / "policy.toml")
    verify, key_of = verifiers(identity.root)
    environment = m.Environment(
        identity=identity,
        federation=identity.federation,
        verify=verify,
        key_of=key_of,
        random=secure_agg.SystemRandom(),
        policy=policy,
    )
    watcher = LogWatcher()
    kind = ClearAgent if clear else real.Agent
    with (
        contextlib.closing(Journal(home / "journal.db", identity.federation)) as journal,
        open_budget(home, identity, policy, [""]) as budget,
    ):
        preparer = MadeUpPreparer(identity.member, policy, budget, BlobCache(home / "cache"), watcher)
        await kind(identity, environment, journal, preparer, budget, watcher).run()


async def _all(homes: list[Path], *, clear: bool) -> None:
    task = asyncio.ensure_future(asyncio.gather(*(_member(home, clear=clear) for home in homes)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main() -> None:
    """Command line: runs until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.members", description=__doc__)
    parser.add_argument("homes", type=Path, nargs="+", help="members' folders, enrolled")
    parser.add_argument("--clear", action="store_true", help="send vectors without masks")
    options = parser.parse_args()
    configure("json", "warning")
    asyncio.run(_all(options.homes, clear=options.clear))
    # Threads of a transfer that was cut off need not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
