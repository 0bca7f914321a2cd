"""A federation in one process: rounds of the product's own code, without the wire between its sides.

What a member does is `train_update` and its `Protection` (lot, local steps, clipping, noise, encoding into the ring);
what the coordinator does is to add the encoded vectors in the ring and `next_version`. Left out are masks (the sum of
masked vectors is this same sum: tests/unit/secure_agg), TLS, phases and dropouts. A benchmark may import both sides.

Order of a round: every member that sends trains from the same version; the cohort is those who send; the vectors are
added as they come, so that memory is three vectors whatever the number of members.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import secure_agg
from edge_client.contribution import Update
from edge_client.corpus import Corpus
from edge_client.data import Example
from edge_client.privacy.events import PrivacyEvent
from edge_client.privacy.mechanisms import LocalTraining, OwnNumbers, Protection, protection_of
from secure_agg import RandomSource
from tacit.job import JobDocument, layout_of

if TYPE_CHECKING:
    from edge_client.training.local import TrainingResult
    from export.bundle import JobBundle

__all__ = ["LEAST_COHORT", "Lengths", "Member", "Round", "corpora_of", "federate", "play_round"]

Vector = NDArray[np.float32]

# A sum of one member's vector is no sum: the product opens no attempt for it.
LEAST_COHORT = 2


@dataclass(frozen=True)
class Member:
    """A member's data, its own numbers, and how many releases its limit lets pass (none: as many as there are)."""

    examples: Sequence[Example]
    own: OwnNumbers = field(default_factory=OwnNumbers)
    most_releases: int | None = None

    def sends(self, round_number: int) -> bool:
        """Whether it takes part in this round (from 1). It was in all before, so that they are its releases."""
        return self.most_releases is None or round_number <= self.most_releases


@dataclass(frozen=True)
class Lengths:
    """L2 lengths of one member's change: as trained, and as it was sent (clipped, with its noise)."""

    trained: float
    sent: float


@dataclass(frozen=True)
class Round:
    """What a round left. senders: places of the members that took part. values: the next version, (d,)."""

    number: int
    senders: tuple[int, ...]
    lengths: tuple[Lengths, ...]
    values: Vector


@dataclass
class _Watched:
    """A protection as it is, that remembers how long the change was when it came and when it went."""

    inner: Protection
    seen: list[Lengths] = field(default_factory=list)

    @property
    def event(self) -> PrivacyEvent | None:
        return self.inner.event

    @property
    def each_attempt(self) -> bool:
        return self.inner.each_attempt

    def train(self, task: LocalTraining, random: RandomSource) -> "TrainingResult | None":
        return self.inner.train(task, random)

    def protect(self, change: Vector, random: RandomSource) -> Vector:
        trained = float(np.linalg.norm(change))
        sent = self.inner.protect(change, random)
        self.seen.append(Lengths(trained, float(np.linalg.norm(sent))))
        return sent

    def encode(self, job: JobDocument, update: Update, cohort: int, random: RandomSource) -> NDArray[np.uint32]:
        return self.inner.encode(job, update, cohort, random)


def corpora_of(bundle: "JobBundle", members: Sequence[Member]) -> list[Corpus]:
    """The members' examples as the job reads them, for all rounds."""
    return [Corpus(member.examples, bundle.document, bundle.tokenizer) for member in members]


def play_round(
    bundle: "JobBundle",
    base: Vector,
    members: Sequence[Member],
    corpora: Sequence[Corpus],
    number: int,
    random: RandomSource,
) -> Round:
    """One round from the version `base`, (d,), with every member that still sends. corpora: the members' examples.

    Raises:
        ValueError: fewer than LEAST_COHORT members send.
    """
    from coordinator.rounds.publish import next_version
    from edge_client.training.update import train_update

    job, manifest = bundle.document, bundle.manifest
    senders = tuple(place for place, member in enumerate(members) if member.sends(number))
    if len(senders) < LEAST_COHORT:
        raise ValueError(f"round {number} has {len(senders)} senders; a sum needs {LEAST_COHORT}: end the training")
    version = manifest.encode(base)
    total = np.zeros(layout_of(job, len(senders)).values, np.uint32)
    lengths = []
    for place in senders:
        member = members[place]
        watched = _Watched(protection_of(job, len(member.examples), own=member.own))
        update = train_update(
            job=job,
            manifest=manifest,
            corpus=corpora[place],
            base=version,
            protection=watched,
            random=random,
            seed=_seed(job, number, place),
            device="cpu",
            progress=lambda _step, _steps, _loss: None,
            cancelled=lambda: False,
        )
        total += watched.encode(job, update, len(senders), random)
        lengths += watched.seen
    # The sum's memory becomes the version's, whose base must then be another.
    step = next_version(job, len(senders), len(senders), total, base)
    return Round(number, senders, tuple(lengths), step.values)


def federate(
    bundle: "JobBundle", members: Sequence[Member], rounds: int, random: RandomSource | None = None
) -> Iterator[Round]:
    """Rounds from the bundle's weights: `rounds` of them, or until fewer than LEAST_COHORT members send.

    random: what all draws and noise come from; the system's own if not given.
    """
    source = secure_agg.SystemRandom() if random is None else random
    values = bundle.manifest.decode(bundle.weights)
    corpora = corpora_of(bundle, members)
    for number in range(1, rounds + 1):
        if sum(member.sends(number) for member in members) < LEAST_COHORT:
            return
        done = play_round(bundle, values, members, corpora, number, source)
        values = done.values
        yield done


def _seed(job: JobDocument, number: int, place: int) -> int:
    """Of a member's training in a round, which orders batches and drops units: public numbers, as in the product."""
    return int.from_bytes(hashlib.sha256(f"{job.seed}/{job.name}/{number}/{place}".encode()).digest()[:8]) >> 1
