"""Runs several members in one process, to measure the cost of the coordinator and the protocol.

Each is a real agent, with its own key, session, state machine, journal and secure aggregation. Only training is left
out: the update is synthetic. With `--clear` the agents send their encoded vectors unmasked to a coordinator that adds
them in the clear (`benchmarks.secure_aggregation.clear`). Channel, session, downloads, encoding and upload are the
same, and the protocol is left out.
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import serialization

import secure_agg
from edge_client.agent.watching import LogWatcher
from edge_client.downloads.cache import BlobCache
from edge_client.identity.home import MemberIdentity
from edge_client.ledger.budget import Budget
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore
from edge_client.session import agent as real
from edge_client.session import states as m
from edge_client.session.journal import Journal
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import Fetch, Preparation, Preparer
from learning.artifacts import fetch_job
from learning.mechanisms.contribution import Update
from learning.text.examples import Example
from tacit.attempt import AttemptId
from tacit.job import JobDocument
from tacit.messages import (
    Assignment,
    AttemptEnded,
    AttemptMessage,
    AttemptOpened,
    JobEnded,
    Ready,
)
from tacit.vector import layout_of
from tacit.verification import Verification
from toolkit.logs import configure

__all__ = ["ClearAgent", "SyntheticPreparer", "clear_input", "main", "met", "run_member", "synthetic_update"]

# (member, round, number of values) to the update that a member would have trained.
SyntheticCorpus = Callable[[str, int, int], Update]

_EXAMPLES = 100


def synthetic_update(member: str, values: int) -> Update:
    """Return an update that follows from the member's name: float32 (values,), small against the coordinate bound."""
    seed = int.from_bytes(hashlib.sha256(member.encode()).digest()[:8], "big")
    change = np.random.default_rng(seed).standard_normal(values, dtype=np.float32) * np.float32(0.01)
    return Update(change, _EXAMPLES, 50.0, 80, _EXAMPLES)


def same_update(member: str, _round: int, values: int) -> Update:
    """Return the same update in every round."""
    return synthetic_update(member, values)


def clear_input(member: str, vector: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> secure_agg.MaskedInput:
    """Return the header of an upload in the clear. It is not signed, because nothing depends on it."""
    return secure_agg.MaskedInput(member, bytes(32), vector.size, bytes(64))


class SyntheticPreparer(Preparer):
    """Fetches the job and the version as a member does, and trains nothing."""

    def __init__(
        self,
        member: str,
        policy: Policy,
        budget: Budget,
        cache: BlobCache,
        watcher: LogWatcher,
        keeper: Keeper,
        synthetic: SyntheticCorpus = same_update,
        training_seconds: Callable[[str], float] = lambda _job: 0.0,
    ) -> None:
        random = secure_agg.SystemRandom()
        super().__init__([Example("", "")], bytes(32), member, policy, budget, random, cache, "cpu", watcher, keeper)
        self._synthetic = synthetic
        self._training_seconds = training_seconds
        self._update: tuple[tuple[int, int], Update] | None = None

    async def prepare(self, assignment: Assignment, fetch: Fetch) -> Preparation:
        """Return a synthetic update, without training, after the time that training is said to take."""
        blob = functools.partial(self._blob, fetch)
        job = await fetch_job(blob, assignment.job, assignment.job_document)
        self._policy.check_job(job)
        await blob(assignment.version, 4 * job.values)
        await asyncio.sleep(self._training_seconds(job.name))
        # One update a version, as in training: without noise a member sends no second update for a version.
        round_ = 0 if self._synthetic is same_update else assignment.version_number + 1
        if self._update is None or self._update[0] != (round_, job.values):
            self._update = (round_, job.values), self._synthetic(self._member, round_, job.values)
        # Another job may be prepared while this one waits for the ledger.
        update = self._update[1]
        protection = await self._budget.writer.run(self._budget.protection, job, _EXAMPLES)
        reserved = await self._budget.writer.run(self._budget.reserve, assignment, job, protection)
        return Preparation(job, update, protection, reserved)


class ClearAgent(real.Agent):
    """An agent without the protocol: in an attempt it only encodes and uploads."""

    def __init__(self, *of: Any, **more: Any) -> None:
        super().__init__(*of, **more)
        self._prepared: dict[str, JobDocument] = {}

    async def _work(self, event: m.Event) -> None:
        match event:
            case m.Received(Assignment() as assignment):
                await self._carry_out(m.Prepare(assignment))
            case m.Prepared(assignment=assignment, job=job):
                self._prepared[job.name] = job
                await self._carry_out(m.Say(Ready(job.name, assignment.round, assignment.version)))
            case m.Received(AttemptMessage(attempt, AttemptOpened(context))):
                task = asyncio.create_task(self._send_clear(attempt, self._prepared[attempt.job], context.cohort))
                self._uploads[attempt] = task
            case m.Received(AttemptMessage(attempt, AttemptEnded())):
                self._uploads.pop(attempt, None)
                self._held.pop(attempt.job, None)
            case m.Received(JobEnded() as ended):
                await self._carry_out(m.JobOver(ended))
            case other:
                raise RuntimeError(f"a round in the clear has no event {type(other).__name__}")

    async def _send_clear(self, attempt: AttemptId, job: JobDocument, cohort: int) -> None:
        held = self._held[attempt.job]
        encode = held.protection.encode
        vector = await asyncio.to_thread(encode, job, held.update, cohort, self._environment.random)
        packed = secure_agg.pack_in_place(vector, layout_of(job, cohort).bits)
        await self._upload(attempt, packed, clear_input(self._link.identity.member, vector))


async def run_member(
    home: Path,
    *,
    kind: type[real.Agent] = real.Agent,
    verification: Verification | None = None,
    watcher: LogWatcher | None = None,
    synthetic: SyntheticCorpus = same_update,
    training_seconds: Callable[[str], float] = lambda _job: 0.0,
    admits: tuple[str, ...] = (),
    until_finished: bool = False,
) -> None:
    """Run an enrolled member, with all of its code except training, until it is cancelled.

    Args:
        home: the member's folder.
        kind: class of the agent.
        verification: shared by the members of a process, so that each certificate is verified once for all of them.
            Without it the member has its own, as a real one.
        watcher: told what happens.
        synthetic: makes the updates.
        training_seconds: how long training takes in a job of this name. The processor is idle meanwhile.
        admits, until_finished: as of the agent.

    Raises:
        AgentStopped: the coordinator refuses this member for good.
    """
    identity = MemberIdentity.load(home)
    policy = Policy.from_toml(home / "policy.toml")
    known = verification or Verification(identity.root)
    environment = m.Environment(
        identity=identity,
        federation=identity.federation,
        verify=known.verify,
        key_of=known.key_of,
        random=secure_agg.SystemRandom(),
        policy=policy,
        certificate_of=known.certificate_of,
    )
    seen = watcher or LogWatcher()
    with (
        contextlib.closing(Journal(home / "journal.db", identity.federation)) as journal,
        open_budget(home, identity, policy, [""]) as budget,
    ):
        keeper = Keeper(PrivateStore(home, identity.federation, "data"), [])
        preparer = SyntheticPreparer(
            identity.member, policy, budget, BlobCache(home / "cache"), seen, keeper, synthetic, training_seconds
        )
        agent = kind(
            identity,
            environment,
            journal,
            preparer,
            budget,
            seen,
            keeper,
            admits=admits,
            until_finished=until_finished,
        )
        await agent.run()


def met(homes: list[Path]) -> Verification:
    """Return a verification that already knows all members enrolled beside these, as after a first round together."""
    verification = Verification(MemberIdentity.load(homes[0]).root)
    for path in sorted(homes[0].parent.glob("home-*/identity/cert.pem")):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        verification.key_of(certificate.public_bytes(serialization.Encoding.DER))
    return verification


async def _all(homes: list[Path], *, clear: bool, all_met: bool) -> None:
    kind = ClearAgent if clear else real.Agent
    known = met(homes) if all_met else None
    members = (run_member(home, kind=kind, verification=known) for home in homes)
    task = asyncio.ensure_future(asyncio.gather(*members))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main() -> None:
    """Command line: runs until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.library.members", description=__doc__)
    parser.add_argument("homes", type=Path, nargs="+", help="folders of enrolled members")
    parser.add_argument("--clear", action="store_true", help="send vectors without masks")
    parser.add_argument("--met", action="store_true", help="members know each other's certificates")
    options = parser.parse_args()
    configure("json", "warning")
    asyncio.run(_all(options.homes, clear=options.clear, all_met=options.met))
    # Does not wait for threads of an interrupted transfer.
    os._exit(0)


if __name__ == "__main__":
    main()
