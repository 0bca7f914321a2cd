"""Plays rounds of the product's own code in one process, without the wire.

A member runs `train_update` and its `Protection` (lot, local steps, clipping, noise, encoding into the ring). The
encoded vectors are added in the ring, for a job in groups by the groups that `draw_groups` draws, and the
coordinator's own arithmetic (`server`) makes the next version. The simulation leaves out masks (the sum of masked
vectors is the same: tests/unit/secure_agg), TLS, phases and dropouts.

In a round, the cohort is the members that send, and its groups are drawn anew. Every member trains from the same
version. Vectors are added as they come, so memory is three vectors for any number of members, and one more for every
further group.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import secure_agg
from learning.accounting.events import PrivacyEvent, SampledGaussian
from learning.mechanisms.contribution import Update
from learning.mechanisms.correlated import CorrelatedSteps
from learning.mechanisms.protection import OwnNumbers, Protection, protection_of
from learning.prompts.features import FeatureStore
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.text.persons import population_of, unit_of_job
from learning.training.task import Task
from secure_agg import RandomSource
from secure_agg.groups import draw_groups
from simulation.server import Server, Stepped
from tacit.context import thresholds_of
from tacit.job import JobDocument
from tacit.mechanism import DpSgd
from tacit.model import PromptedModel
from tacit.vector import layout_of

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.backbones.stored import StoredBackbone
    from learning.training.kept import Kept
    from learning.training.outcome import TrainingResult

__all__ = [
    "MIN_COHORT",
    "Groups",
    "Lengths",
    "Member",
    "Round",
    "alone",
    "backbone_of",
    "corpora_of",
    "correlated_steps",
    "draw",
    "federate",
    "play_round",
    "stepped",
]

Vector = NDArray[np.float32]
# Places in the cohort that are summed together; each group is ascending.
Groups = tuple[tuple[int, ...], ...]

# The product opens no attempt with one member, whose sum would be its own vector.
MIN_COHORT = 2


@dataclass(frozen=True)
class Member:
    """One member of a simulation.

    Args:
        examples: its data.
        own: its own numbers.
        max_releases: releases that its limit allows; None means any number.
        software: replaces the product's protection, which it is given; None keeps it.
    """

    examples: Sequence[Example]
    own: OwnNumbers = field(default_factory=OwnNumbers)
    max_releases: int | None = None
    software: Callable[[Protection], Protection] | None = None

    def sends(self, round_number: int) -> bool:
        """Tell whether it takes part in this round (from 1). Each earlier round was one of its releases."""
        return self.max_releases is None or round_number <= self.max_releases


@dataclass(frozen=True)
class Lengths:
    """L2 norms of one member's update: as trained, and as sent (clipped, with its noise)."""

    trained: float
    sent: float


@dataclass(frozen=True)
class Round:
    """The result of a round.

    Args:
        number: of the round, from 1.
        senders: places of the members that took part.
        lengths: norms of the senders' updates.
        values: the next version, (d,).
        groups: places among all members that were summed together; empty for a job with one sum.
        seen: what became of the groups; None for a job with one sum.
    """

    number: int
    senders: tuple[int, ...]
    lengths: tuple[Lengths, ...]
    values: Vector
    groups: Groups = ()
    seen: Any = None


@dataclass
class _Watched:
    """A protection that records the update's norm before and after it was protected."""

    inner: Protection
    seen: list[Lengths] = field(default_factory=list)

    @property
    def event(self) -> PrivacyEvent | None:
        return self.inner.event

    @property
    def each_attempt(self) -> bool:
        return self.inner.each_attempt

    def train(self, task: Task, random: RandomSource) -> "TrainingResult | None":
        return self.inner.train(task, random)

    def protect(self, change: Vector, random: RandomSource) -> Vector:
        trained = float(np.linalg.norm(change))
        sent = self.inner.protect(change, random)
        self.seen.append(Lengths(trained, float(np.linalg.norm(sent))))
        return sent

    def encode(self, job: JobDocument, update: Update, cohort: int, random: RandomSource) -> NDArray[np.uint32]:
        return self.inner.encode(job, update, cohort, random)


def corpora_of(
    bundle: "JobBundle", members: Sequence[Member], features: FeatureStore | None = None
) -> list[EncodedExamples]:
    """Return the members' examples as the job reads them, for all rounds.

    Args:
        features: keeps what a frozen backbone computes of them; by default each member has its own.
    """
    read = partial(EncodedExamples, job=bundle.document, tokenizer=bundle.public_tokenizer, features=features)
    return [read(member.examples) for member in members]


def backbone_of(bundle: "JobBundle") -> "StoredBackbone | None":
    """Return a prompted job's backbone as its members have it; None for other jobs. The last one stays in memory."""
    model = bundle.document.model
    if not isinstance(model, PromptedModel) or model.backbone is None or bundle.backbone is None:
        return None
    return _stored(bundle.backbone, model.backbone, json.dumps(model.config))


@lru_cache(maxsize=1)
def _stored(path: Path, digest: bytes, config: str) -> "StoredBackbone":
    from learning.backbones.stored import digest_of, read_backbone

    if digest_of(path) != digest:
        raise ValueError(f"{path} is not the job's backbone; make the bundle again")
    return read_backbone(path, json.loads(config))


def draw(job: JobDocument, cohort: int, random: RandomSource) -> Groups:
    """Draw the groups of a cohort as its members do, from the roster's root. Without groups it is one group.

    Args:
        cohort: number of members.

    Raises:
        ContextInvalid: a cohort of this size cannot be split into the job's groups.
    """
    if job.aggregation.groups is None:
        return (tuple(range(cohort)),)
    # Fails where the product would open no attempt.
    thresholds_of(job, cohort)
    names = [f"{place:06d}" for place in range(cohort)]
    # In the product the root covers keys and signatures, which the simulation does not make, and the members' nonces.
    drawn = draw_groups(random.bytes(32), names, job.aggregation.groups)
    return tuple(tuple(int(name) for name in group) for group in drawn)


def stepped(
    job: JobDocument,
    groups: Groups,
    vectors: Iterable[NDArray[np.uint32]],
    base: Vector,
    random: RandomSource,
    state: Any = None,
    *,
    server: Server,
) -> Stepped:
    """Return the next version from the cohort's vectors, summed by group.

    Args:
        groups: as returned by `draw`.
        vectors: in the ring, in the order of places.
        base: the version trained from, (d,).
        random: for the noise that the coordinator adds, if the job has any.
        state: of the server's optimiser, from `server.state`; plain averaging needs none.
        server: makes the version.

    Raises:
        ValueError: the coordinator would not publish these sums.
    """
    cohort = sum(map(len, groups))
    group_of = {place: number for number, group in enumerate(groups) for place in group}
    totals = [np.zeros(layout_of(job, cohort).values, np.uint32) for _ in groups]
    for place, vector in zip(range(cohort), vectors, strict=True):
        totals[group_of[place]] += vector
    # The version reuses the memory of the first sum, so `base` must not share it.
    sums = [(len(group), total) for group, total in zip(groups, totals, strict=True)]
    return server.publish(job, sums, base, random, state)


def correlated_steps(
    job: JobDocument, examples: int, random: RandomSource, own: OwnNumbers | None = None
) -> CorrelatedSteps | None:
    """Return the steps of one member in a job that begins, as its budget makes them; None for independent noise.

    Args:
        examples: N, the member's.
        random: source of the key of its classes.
        own: the member's own numbers.
    """
    event, mechanism = protection_of(job, examples, own=own).event, job.mechanism
    if not isinstance(mechanism, DpSgd) or mechanism.band == 1 or not isinstance(event, SampledGaussian):
        return None
    return CorrelatedSteps.begun(mechanism.coefficients, event.multiplier, event.rate, random.bytes(32), job.values)


def play_round(
    bundle: "JobBundle",
    base: Vector,
    members: Sequence[Member],
    corpora: Sequence[EncodedExamples],
    number: int,
    random: RandomSource,
    state: Any = None,
    *,
    server: Server,
    device: str = "cpu",
    cancelled: Callable[[], bool] = lambda: False,
    steps: Sequence[CorrelatedSteps | None] | None = None,
    kept: "Kept | None" = None,
) -> Round:
    """Play one round with every member that still sends.

    Args:
        base: the version trained from, (d,).
        corpora: the members' examples.
        number: of the round, from 1.
        server: makes the next version, with `state`.
        device: where members train, from `pick_device`.
        cancelled: asked before every step of a member.
        steps: the members' steps (`correlated_steps`), which go on; None if the job's noise is independent.
        kept: what members of this job leave for the next one. It changes no bit.

    Raises:
        TrainingCancelled: `cancelled` returned True.
        ValueError: fewer than MIN_COHORT members send, their number cannot be split into the job's groups, or the
            coordinator would not publish the sums.
    """
    job = bundle.document
    senders = tuple(place for place, member in enumerate(members) if member.sends(number))
    if len(senders) < MIN_COHORT:
        raise ValueError(f"round {number} has {len(senders)} senders; a sum needs {MIN_COHORT}: end the training")
    groups = draw(job, len(senders), random)
    version = bundle.manifest.encode(base)
    lengths: list[Lengths] = []

    def vectors() -> Iterator[NDArray[np.uint32]]:
        for place in senders:
            member, correlated = members[place], None if steps is None else steps[place]
            watched, update = _updated(
                bundle,
                version,
                member,
                corpora[place],
                number,
                random,
                _seed(job, number, place),
                device,
                cancelled,
                correlated,
                kept,
            )
            yield watched.encode(job, update, len(senders), random)
            lengths.extend(watched.seen)

    step = stepped(job, groups, vectors(), base, random, state, server=server)
    if job.aggregation.groups is None:
        return Round(number, senders, tuple(lengths), step.values)
    drawn = tuple(tuple(senders[place] for place in group) for group in groups)
    return Round(number, senders, tuple(lengths), step.values, drawn, step.groups)


def alone(
    bundle: "JobBundle",
    base: Vector,
    member: Member,
    corpus: EncodedExamples,
    number: int,
    random: RandomSource,
    *,
    seed: int,
    device: str = "cpu",
    correlated: CorrelatedSteps | None = None,
    kept: "Kept | None" = None,
) -> Vector:
    """Return the version after a round of one member without a sum: training in one place, with its noise if any.

    Args:
        seed: orders batches.
        base, corpus, number, random, device, correlated, kept: as in `play_round`.
    """
    version = bundle.manifest.encode(base)
    _, update = _updated(bundle, version, member, corpus, number, random, seed, device, lambda: False, correlated, kept)
    found: Vector = base + update.change
    return found


def _updated(
    bundle: "JobBundle",
    version: bytes,
    member: Member,
    corpus: EncodedExamples,
    number: int,
    random: RandomSource,
    seed: int,
    device: str,
    cancelled: Callable[[], bool],
    correlated: CorrelatedSteps | None,
    kept: "Kept | None",
) -> tuple[_Watched, Update]:
    """Train a member in a round, and return its protection and its update."""
    from learning.training.update import train_update

    job = bundle.document
    protection = protection_of(job, population_of(member.examples, unit_of_job(job)), own=member.own)
    watched = _Watched(protection if member.software is None else member.software(protection))
    update = train_update(
        job=job,
        round=number,
        manifest=bundle.manifest,
        corpus=corpus,
        base=version,
        protection=watched,
        frozen=bundle.frozen,
        backbone=backbone_of(bundle),
        correlated=correlated,
        random=random,
        seed=seed,
        device=device,
        progress=lambda _step, _steps, _loss: None,
        cancelled=cancelled,
        kept=kept,
    )
    return watched, update


def federate(
    bundle: "JobBundle",
    members: Sequence[Member],
    rounds: int,
    random: RandomSource | None = None,
    *,
    server: Server,
    cancelled: Callable[[], bool] = lambda: False,
    features: FeatureStore | None = None,
) -> Iterator[Round]:
    """Play `rounds` rounds from the bundle's weights, or until fewer than MIN_COHORT members send.

    Args:
        random: source of all draws and noise; the operating system's if it is not given.
        server: makes the versions.
        cancelled: asked before every step of a member; TrainingCancelled is raised once it returns True.
        features: as in `corpora_of`.
    """
    source = secure_agg.SystemRandom() if random is None else random
    values = bundle.manifest.decode(bundle.weights)
    corpora = corpora_of(bundle, members, features)
    state = server.state(bundle.document)
    steps = [correlated_steps(bundle.document, len(member.examples), source, member.own) for member in members]
    for number in range(1, rounds + 1):
        if sum(member.sends(number) for member in members) < MIN_COHORT:
            return
        done = play_round(
            bundle, values, members, corpora, number, source, state, server=server, cancelled=cancelled, steps=steps
        )
        values, state = done.values, server.state(bundle.document, state)
        yield done


def _seed(job: JobDocument, number: int, place: int) -> int:
    """Return the seed of a member's training in a round (batches, dropout), from public numbers as in the product."""
    return int.from_bytes(hashlib.sha256(f"{job.seed}/{job.name}/{number}/{place}".encode()).digest()[:8]) >> 1
