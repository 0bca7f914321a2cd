"""Jobs: what the operator writes (`JobSpec`, TOML) and what everyone trains under (`JobDocument`, canonical JSON).

`coordinator job bundle` turns the first into the second: files become digests, a seed becomes weights. A member
trains under a job document and nothing else; its digest is part of every round's context.
"""

import hashlib
import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from secure_agg import Grid, Layout, Segment, default_thresholds
from tacit.documents import Digest, Document, Part
from tacit.mechanism import (
    DistributedGaussian,
    DpSgd,
    GaussianUpdate,
    LaplaceUpdate,
    Mechanism,
    NoMechanism,
)

__all__ = [
    "METRICS",
    "NOISE_ROOM",
    "Aggregation",
    "Deadlines",
    "JobDocument",
    "JobSpec",
    "Rounds",
    "ServerOptimiser",
    "TextCNNModel",
    "Training",
    "VocabularyFile",
    "application_digest",
    "grid_of",
    "layout_of",
]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]

# Sums over the members' examples that travel in the masked vector, in this order.
METRICS: tuple[str, ...] = ("loss_sum", "correct", "count")

# A member may add up to so many times the noise that the job asks for: the ring has room for it.
NOISE_ROOM = 4.0


class TextCNNModel(Part):
    """TextCNN with parallel filters (Zhang and Wallace 2015), sized after Zhu et al. 2020, section 4.1."""

    architecture: Literal["textcnn"] = "textcnn"
    embedding: int = Field(default=128, ge=1, le=4096)
    widths: tuple[int, ...] = Field(default=(2, 3, 4, 5), min_length=1, max_length=16)
    maps: int = Field(default=400, ge=1, le=8192)
    dropout: float = Field(default=0.5, ge=0, lt=1)
    # Deviation of the embedding at the start, where no table is named.
    embedding_deviation: float = Field(default=0.15, gt=0)
    # The embedding stays as version 0 has it: training leaves it alone, and its change is exactly zero.
    freeze_embedding: bool = False
    # Longer texts are cut; shorter ones padded to the widest filter at least.
    max_tokens: int = Field(default=64, ge=1, le=4096)

    @model_validator(mode="after")
    def _widths(self) -> Self:
        if any(not 1 <= width <= self.max_tokens for width in self.widths):
            raise ValueError("every width must lie between 1 and max_tokens")
        if len(set(self.widths)) != len(self.widths):
            raise ValueError("a width stands twice")
        return self


class VocabularyFile(Part):
    """A public vocabulary: BERT word pieces or a word list, one entry a line, plain or .gz."""

    kind: Literal["wordpiece", "words"]
    file: str
    # A table in GloVe's text form (word, then numbers) to start the embedding from; its width must be the model's.
    pretrained: str | None = None


class Training(Part):
    """What a member does with its own data in a round."""

    epochs: int = Field(default=1, ge=1, le=1000)
    batch: int = Field(default=64, ge=1, le=65536)
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(default=0.001, gt=0, le=10)


class Deadlines(Part):
    """Seconds. Each phase has one deadline."""

    training: Seconds = 600
    advertise: Seconds = 60
    share: Seconds = 60
    mask: Seconds = 300
    confirm: Seconds = 60
    unmask: Seconds = 60
    # How long a member of a cohort may be gone before it counts as a dropout of the present phase.
    reconnect: Seconds = 20


class Rounds(Part):
    """How many rounds, and who makes one."""

    count: int = Field(default=20, ge=1, le=1_000_000)
    min_members: int = Field(default=3, ge=2, le=200)
    # A round opens its aggregation as soon as this many are ready.
    target_members: int = Field(default=200, ge=2, le=200)
    # Aggregations tried in one round before it is abandoned.
    attempts: int = Field(default=3, ge=1, le=100)
    # Abandoned rounds in a row before the job pauses itself.
    failures: int = Field(default=5, ge=1, le=1000)
    deadlines: Deadlines = Deadlines()

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.target_members < self.min_members:
            raise ValueError("target_members must not be less than min_members")
        return self


class Aggregation(Part):
    """Numbers in the ring."""

    bits: Literal[32] = 32
    # Members the coordinator may run itself (n_C); none = the protocol's default for the cohort's size.
    assumed_corrupt: int | None = Field(default=None, ge=0)
    # Every coordinate of an update lies within +- this; what lies beyond is clipped.
    coordinate_bound: float = Field(default=1.0, gt=0, le=1e6)
    # L2 norm an update is clipped to before that; none = as it is.
    clip: float | None = Field(default=None, gt=0)
    # A member's weight is its number of examples, at most this.
    max_weight: int = Field(default=100_000, ge=1, le=4_000_000)
    # Bound on one example's loss in the metrics; what lies beyond counts as this.
    loss_bound: float = Field(default=20.0, gt=0, le=1000)


class ServerOptimiser(Part):
    """What the coordinator does with the mean update."""

    name: Literal["fedavg"] = "fedavg"
    learning_rate: float = Field(default=1.0, gt=0, le=10)


def _named(value: object) -> object:
    # `mechanism = "none"` is short for a table with nothing but the name.
    return {"name": value} if isinstance(value, str) else value


class _JobBody(Document):
    name: Name
    labels: tuple[Annotated[str, StringConstraints(min_length=1, max_length=200)], ...] = Field(min_length=2)
    model: TextCNNModel = TextCNNModel()
    training: Training = Training()
    mechanism: Annotated[Mechanism, BeforeValidator(_named)] = NoMechanism()
    rounds: Rounds = Rounds()
    aggregation: Aggregation = Aggregation()
    server: ServerOptimiser = ServerOptimiser()
    # Everything random in the starting weights and in local training comes from this and public numbers.
    seed: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _checks(self) -> Self:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("labels: a label stands twice")
        # Raises where no threshold exists for the smallest cohort.
        threshold, corrupt = default_thresholds(self.rounds.min_members, self.aggregation.assumed_corrupt)
        match self.mechanism:
            case GaussianUpdate() | LaplaceUpdate() | DistributedGaussian() if self.model.freeze_embedding:
                raise ValueError(
                    f"model.freeze_embedding: {self.mechanism.name} adds noise to every coordinate of the change, also "
                    "of what is frozen; take dp-sgd or none, or leave freeze_embedding out"
                )
            case DpSgd() if self.training.epochs != 1:
                raise ValueError("training.epochs: dp-sgd counts its work in mechanism.steps; leave epochs out")
            case GaussianUpdate() | LaplaceUpdate() | DistributedGaussian() if self.aggregation.clip is not None:
                raise ValueError(f"aggregation.clip: {self.mechanism.name} clips by its own number; leave it out")
            case DistributedGaussian(honest=honest) if honest > threshold - corrupt:
                raise ValueError(
                    f"mechanism.honest: a cohort of {self.rounds.min_members} guarantees {threshold - corrupt} honest "
                    f"inputs, the noise counts on {honest}; lower it, or raise rounds.min_members"
                )
        return self


class JobSpec(_JobBody):
    """A job as the operator writes it: `coordinator job bundle job.toml`."""

    vocabulary: VocabularyFile


class JobDocument(_JobBody):
    """A job as it is run: digests in place of files."""

    manifest: Digest
    tokenizer: Digest
    weights: Digest
    values: int = Field(ge=1)

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """Digests of everything a member fetches besides the document itself."""
        return (self.manifest, self.tokenizer, self.weights)


def grid_of(job: JobDocument) -> Grid:
    """The grid of a `distributed-gaussian` job; of no attempt, so that what one costs is known before it is opened.

    Raises:
        ValueError: the job has another mechanism.
    """
    if not isinstance(job.mechanism, DistributedGaussian):
        raise ValueError(f"job {job.name} has no noise in the ring; its mechanism is {job.mechanism.name}")
    return Grid(
        clip=job.mechanism.clip,
        noise_multiplier=job.mechanism.noise_multiplier,
        honest=job.mechanism.honest,
        values=job.values,
        members=job.rounds.target_members,
    )


def layout_of(job: JobDocument, members: int) -> Layout:
    """The segments of the masked vector for a cohort of `members` (n, which sets the scales).

    Without a mechanism `update` is the change times w / max_weight, so its bound is the coordinate bound, and weight
    and metrics follow. Under a mechanism every member weighs the same and nothing but the change travels, since weights
    and metrics depend on the data too. Scales use what the ring leaves: members * (bound * scale + 1) must stay below
    2^(bits - 1).
    """
    room = 2.0 ** (job.aggregation.bits - 1) / members - 2

    def widest(bound: float, most: float = 2.0**40) -> float:
        # A power of two, so that scaling itself is exact.
        return 2.0 ** math.floor(math.log2(min(room / bound, most)))

    def update(bound: float) -> Segment:
        return Segment("update", job.values, widest(bound), bound)

    segments: tuple[Segment, ...]
    match job.mechanism:
        case NoMechanism():
            weight, loss = float(job.aggregation.max_weight), job.aggregation.loss_bound
            segments = (
                update(job.aggregation.coordinate_bound),
                Segment("weight", 1, 1.0, weight),
                Segment("loss_sum", 1, widest(weight * loss, 1024.0), weight * loss),
                Segment("correct", 1, 1.0, weight),
                Segment("count", 1, 1.0, weight),
            )
        case DpSgd():
            segments = (update(job.aggregation.coordinate_bound),)
        case GaussianUpdate(noise_multiplier=multiplier, clip=clip):
            # Ten deviations of the most noise that a member may add (NOISE_ROOM times the job's). What is cut beyond
            # that was noised before, so cutting it costs no privacy.
            segments = (update(clip * (1 + 10 * NOISE_ROOM * multiplier)),)
        case LaplaceUpdate(bound=bound, epsilon=epsilon):
            segments = (update(bound * (1 + 60 * NOISE_ROOM * 2 / epsilon)),)
        case DistributedGaussian():
            segments = (grid_of(job).segment("update"),)
    layout = Layout(segments, job.aggregation.bits)
    layout.check_no_wrap(members)
    return layout


def application_digest(job: JobDocument, layout: Layout) -> bytes:
    """Digest of all that an update depends on besides the starting version: 32 bytes for the round's context."""
    return hashlib.sha256(b"tacit/application/v1" + job.digest() + layout.digest()).digest()
