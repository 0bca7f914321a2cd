"""A federation in one process: rounds of the product's own code, without the wire between its sides.

What a member does is `train_update` and its `Protection` (lot, local steps, clipping, noise, encoding into the ring);
what the coordinator does is to add the encoded vectors in the ring and `next_version`, or of a job in groups to split
the cohort by `draw_groups`, add up each group and `next_version_of_groups`. Left out are masks (the sum of masked
vectors is this same sum: tests/unit/secure_agg), TLS, phases and dropouts. A benchmark may import both sides.

Order of a round: the cohort is those who send, and its groups are drawn anew; every member trains from the same
version; the vectors are added as they come, so that memory is three vectors whatever the number of members, and one
more for every further group.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import secure_agg
from learning.accounting.events import PrivacyEvent
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import OwnNumbers, Protection, protection_of
from learning.text.corpus import EncodedExamples
from learning.text.data import Example
from learning.training.task import LocalTraining
from secure_agg import RandomSource
from secure_agg.groups import draw_groups
from secure_agg.session import NONCE_BYTES
from tacit.context import thresholds_of
from tacit.job import JobDocument
from tacit.model import PromptedModel
from tacit.vector import layout_of

if TYPE_CHECKING:
    from coordinator.domain.jobs import GroupsSeen
    from coordinator.rounds.optimiser import StateVectors
    from coordinator.rounds.publish import Step
    from export.bundle import JobBundle
    from learning.backbones.stored import StoredBackbone
    from learning.training.local import TrainingResult

__all__ = [
    "MIN_COHORT",
    "Groups",
    "Lengths",
    "Member",
    "Round",
    "backbone_of",
    "corpora_of",
    "draw",
    "federate",
    "play_round",
    "stepped",
]

Vector = NDArray[np.float32]
# Who is summed together, by place in the cohort; each group ascending.
Groups = tuple[tuple[int, ...], ...]

# A sum of one member's vector is no sum: the product opens no attempt for it.
MIN_COHORT = 2


@dataclass(frozen=True)
class Member:
    """A member's data, its own numbers, and how many releases its limit lets pass (none: as many as there are).

    software: what runs on its machine in place of the product's protection, which it is handed; none: that itself.
    """

    examples: Sequence[Example]
    own: OwnNumbers = field(default_factory=OwnNumbers)
    max_releases: int | None = None
    software: Callable[[Protection], Protection] | None = None

    def sends(self, round_number: int) -> bool:
        """Whether it takes part in this round (from 1). It was in all before, so that they are its releases."""
        return self.max_releases is None or round_number <= self.max_releases


@dataclass(frozen=True)
class Lengths:
    """L2 lengths of one member's change: as trained, and as it was sent (clipped, with its noise)."""

    trained: float
    sent: float


@dataclass(frozen=True)
class Round:
    """What a round left. senders: places of the members that took part. values: the next version, (d,). groups: who of
    them were summed together, by place among all members, and what became of the groups; of a job with one sum neither.
    """

    number: int
    senders: tuple[int, ...]
    lengths: tuple[Lengths, ...]
    values: Vector
    groups: Groups = ()
    seen: "GroupsSeen | None" = None


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


def corpora_of(bundle: "JobBundle", members: Sequence[Member]) -> list[EncodedExamples]:
    """The members' examples as the job reads them, for all rounds."""
    return [EncodedExamples(member.examples, bundle.document, bundle.public_tokenizer) for member in members]


def backbone_of(bundle: "JobBundle") -> "StoredBackbone | None":
    """A prompted job's backbone as its members have it, read once for as long as no other is asked for; else None."""
    model = bundle.document.model
    if not isinstance(model, PromptedModel) or model.backbone is None or bundle.backbone is None:
        return None
    return _stored(bundle.backbone, model.backbone, json.dumps(model.config))


@lru_cache(maxsize=1)
def _stored(path: Path, digest: bytes, config: str) -> "StoredBackbone":
    from learning.backbones.stored import digest_of, read_backbone

    if digest_of(path) != digest:
        raise ValueError(f"{path} is not the backbone that the job names; make the bundle again")
    return read_backbone(path, json.loads(config))


def draw(job: JobDocument, cohort: int, random: RandomSource) -> Groups:
    """The groups of a cohort of so many, as its members draw them from everybody's nonces; without groups all in one.

    Raises:
        ContextInvalid: a cohort of this size has no such split.
    """
    if job.aggregation.groups is None:
        return (tuple(range(cohort)),)
    # No attempt is opened under numbers that promise nothing.
    thresholds_of(job, cohort)
    names = [f"{place:06d}" for place in range(cohort)]
    nonces = [random.bytes(NONCE_BYTES) for _ in names]
    # Over keys and signatures too, which nobody makes here.
    root = random.bytes(32)
    drawn = draw_groups(root, nonces, names, job.aggregation.groups)
    return tuple(tuple(int(name) for name in group) for group in drawn)


def stepped(
    job: JobDocument,
    groups: Groups,
    vectors: Iterable[NDArray[np.uint32]],
    base: Vector,
    random: RandomSource,
    state: "StateVectors | None" = None,
) -> "Step":
    """The next version from the cohort's vectors in the ring, in the order of places; summed by group.

    groups: as `draw` gives them. base: (d,). random: for what the job has the coordinator add. state: of the server's
    optimiser, where it has one; what it is afterwards stands in its `after`.

    Raises:
        ResultInvalid: sums that the coordinator does not publish.
    """
    from coordinator.rounds.publish import GroupSum, next_version, next_version_of_groups

    cohort = sum(map(len, groups))
    group_of = {place: number for number, group in enumerate(groups) for place in group}
    totals = [np.zeros(layout_of(job, cohort).values, np.uint32) for _ in groups]
    for place, vector in zip(range(cohort), vectors, strict=True):
        totals[group_of[place]] += vector
    # The first sum's memory becomes the version's, whose base must then be another.
    if job.aggregation.groups is None:
        return next_version(job, cohort, cohort, totals[0], base, random, state)
    sums = [GroupSum(len(group), total) for group, total in zip(groups, totals, strict=True)]
    return next_version_of_groups(job, cohort, sums, base, random, state)


def play_round(
    bundle: "JobBundle",
    base: Vector,
    members: Sequence[Member],
    corpora: Sequence[EncodedExamples],
    number: int,
    random: RandomSource,
    state: "StateVectors | None" = None,
) -> Round:
    """One round from the version `base`, (d,), with every member that still sends. corpora: the members' examples.

    Raises:
        ValueError: fewer than MIN_COHORT members send, or so many have no split into the job's groups.
        ResultInvalid: sums that the coordinator does not publish.
    """
    from learning.training.update import train_update

    job, manifest = bundle.document, bundle.manifest
    senders = tuple(place for place, member in enumerate(members) if member.sends(number))
    if len(senders) < MIN_COHORT:
        raise ValueError(f"round {number} has {len(senders)} senders; a sum needs {MIN_COHORT}: end the training")
    groups = draw(job, len(senders), random)
    version, backbone = manifest.encode(base), backbone_of(bundle)
    lengths: list[Lengths] = []

    def vectors() -> Iterator[NDArray[np.uint32]]:
        for place in senders:
            member = members[place]
            protection = protection_of(job, len(member.examples), own=member.own)
            watched = _Watched(protection if member.software is None else member.software(protection))
            update = train_update(
                job=job,
                manifest=manifest,
                corpus=corpora[place],
                base=version,
                protection=watched,
                frozen=bundle.frozen,
                backbone=backbone,
                random=random,
                seed=_seed(job, number, place),
                device="cpu",
                progress=lambda _step, _steps, _loss: None,
                cancelled=lambda: False,
            )
            yield watched.encode(job, update, len(senders), random)
            lengths.extend(watched.seen)

    step = stepped(job, groups, vectors(), base, random, state)
    if job.aggregation.groups is None:
        return Round(number, senders, tuple(lengths), step.values)
    drawn = tuple(tuple(senders[place] for place in group) for group in groups)
    return Round(number, senders, tuple(lengths), step.values, drawn, step.groups)


def federate(
    bundle: "JobBundle", members: Sequence[Member], rounds: int, random: RandomSource | None = None
) -> Iterator[Round]:
    """Rounds from the bundle's weights: `rounds` of them, or until fewer than MIN_COHORT members send.

    random: what all draws and noise come from; the system's own if not given.
    """
    from coordinator.rounds.optimiser import StateVectors

    source = secure_agg.SystemRandom() if random is None else random
    values = bundle.manifest.decode(bundle.weights)
    corpora = corpora_of(bundle, members)
    job = bundle.document
    state = StateVectors(job.server, job.values)
    for number in range(1, rounds + 1):
        if sum(member.sends(number) for member in members) < MIN_COHORT:
            return
        done = play_round(bundle, values, members, corpora, number, source, state)
        values, state = done.values, StateVectors(job.server, job.values, state.after)
        yield done


def _seed(job: JobDocument, number: int, place: int) -> int:
    """Of a member's training in a round, which orders batches and drops units: public numbers, as in the product."""
    return int.from_bytes(hashlib.sha256(f"{job.seed}/{job.name}/{number}/{place}".encode()).digest()[:8]) >> 1
