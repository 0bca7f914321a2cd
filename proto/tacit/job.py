"""Jobs: what the operator writes (`JobSpec`, TOML) and what everyone trains under (`JobDocument`, canonical JSON).

`coordinator job bundle` turns the first into the second: files become digests, a seed becomes weights. A member
trains under a job document and nothing else; its digest is part of every round's context.
"""

import hashlib
import math
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from secure_agg import (
    COMPLETE_GRAPH_LIMIT,
    ContextInvalid,
    Graph,
    Grid,
    Layout,
    RoundContext,
    Segment,
    SparseGraph,
    thresholds_for,
)
from tacit.documents import Digest, Document, Part
from tacit.limits import MOST_MEMBERS
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
    "context_of",
    "grid_of",
    "largest_cohort",
    "layout_of",
    "promise_of",
    "thresholds_of",
]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]

# Sums over the members' examples that travel in the masked vector, in this order.
METRICS: tuple[str, ...] = ("loss_sum", "correct", "count")

# A member may add up to so many times the noise that the job asks for: the ring has room for it.
NOISE_ROOM = 4.0

_WIDEST_RING = 32
# The ring's step: of the deviation of noise that is added before encoding, or of the bound on a coordinate.
_STEP_OF_DEVIATION = 2.0**-6
_STEP_OF_BOUND = 2.0**-24
_FINEST, _COARSEST_SCALE = 40, 2.0**-128
# No magnitude of `edge_client.privacy.noise`'s Laplace is larger, in scales: -ln 2^-64.
_LARGEST_LAPLACE = 64 * math.log(2)


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
    min_members: int = Field(default=3, ge=2, le=MOST_MEMBERS)
    # A round opens its aggregation as soon as this many are ready.
    target_members: int = Field(default=200, ge=2, le=MOST_MEMBERS)
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

    # Width of the ring, and of every value on the wire; none = the least that holds a cohort's sum at a step far finer
    # than the noise, or than what training leaves (`layout_of`).
    bits: int | None = Field(default=None, ge=8, le=32)
    # Members the coordinator may run itself (n_C); none = the protocol's default for the cohort's size.
    assumed_corrupt: int | None = Field(default=None, ge=0)
    # Of cohorts above 200, which have a sparse graph: the share that the coordinator may run itself where no number of
    # members is given (gamma), and the share that may be lost (delta).
    corrupt_share: float = Field(default=0.1, ge=0, lt=1)
    lost_share: float = Field(default=0.1, ge=0, lt=1)
    # Every coordinate of an update lies within +- this; what lies beyond is clipped.
    coordinate_bound: float = Field(default=1.0, ge=1e-12, le=1e6)
    # L2 norm an update is clipped to before that; none = as it is.
    clip: float | None = Field(default=None, gt=0)
    # A member's weight is its number of examples, at most this.
    max_weight: int = Field(default=100_000, ge=1, le=4_000_000)
    # Bound on one example's loss in the metrics; what lies beyond counts as this.
    loss_bound: float = Field(default=20.0, gt=0, le=1000)

    @model_validator(mode="after")
    def _shares(self) -> Self:
        for name, share in (("corrupt_share", self.corrupt_share), ("lost_share", self.lost_share)):
            if round(share, 6) != share:
                raise ValueError(f"{name} has at most six decimals, got {share!r}")
        # U3 must be able to bring more confirmations than two lists of survivors could share.
        if 2 * self.lost_share + self.corrupt_share >= 1:
            raise ValueError(
                f"twice the lost_share ({self.lost_share:g}) and the corrupt_share ({self.corrupt_share:g}) together "
                "must stay below 1: those who are left must be a majority of the honest members; lower one of them"
            )
        return self


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
        honest, weakest = self._least_honest()
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
            case DistributedGaussian(honest=counted) if counted > honest:
                raise ValueError(
                    f"mechanism.honest: a cohort of {weakest} guarantees {honest} honest inputs, the noise counts on "
                    f"{counted}; lower it, or {self._more_honest(weakest)}"
                )
        return self

    def _least_honest(self) -> tuple[int, int]:
        """(h, n): the fewest honest inputs that any cohort of this job guarantees, and of which size it is.

        Looked at where it is least: the smallest cohort, the first that is too large for the complete graph, and (as h
        of a sparse graph falls and rises by one between) the largest.

        Raises:
            ValueError: a cohort of the job has no threshold.
        """
        least, most = self.rounds.min_members, self.rounds.target_members
        sizes = {least, most, min(max(least, COMPLETE_GRAPH_LIMIT + 1), most)}
        return min((self._honest_of(size), size) for size in sorted(sizes))

    def _honest_of(self, cohort: int) -> int:
        try:
            return _promised(self.aggregation, cohort).honest
        except ContextInvalid as error:
            raise ValueError(f"{self._keys_of_thresholds(cohort)}: {error}") from error

    def _keys_of_thresholds(self, cohort: int) -> str:
        """The keys that the thresholds of a cohort of this size follow from."""
        size = "rounds.min_members" if cohort == self.rounds.min_members else "rounds.target_members"
        if cohort <= COMPLETE_GRAPH_LIMIT:
            return f"aggregation.assumed_corrupt or {size}"
        corrupt = "corrupt_share" if self.aggregation.assumed_corrupt is None else "assumed_corrupt"
        return f"aggregation.{corrupt}, aggregation.lost_share or {size}"

    def _more_honest(self, weakest: int) -> str:
        """What gives the weakest cohort more honest inputs: on a sparse graph a larger one gives few more, and one that
        may lose more members has more neighbours.
        """
        if weakest <= COMPLETE_GRAPH_LIMIT:
            return "raise rounds.min_members"
        more = "raise aggregation.lost_share"
        if self.rounds.min_members > COMPLETE_GRAPH_LIMIT:
            return more
        return f"{more}, or lower rounds.target_members to {COMPLETE_GRAPH_LIMIT}"


class JobSpec(_JobBody):
    """A job as the operator writes it: `coordinator job bundle job.toml`."""

    vocabulary: VocabularyFile

    @model_validator(mode="after")
    def _layout(self) -> Self:
        # How many values the model has shows when the bundle is made; what one of them has no room for, none has.
        _check_layout(self, values=1)
        return self


class JobDocument(_JobBody):
    """A job as it is run: digests in place of files."""

    manifest: Digest
    tokenizer: Digest
    weights: Digest
    values: int = Field(ge=1)

    @model_validator(mode="after")
    def _layout(self) -> Self:
        _check_layout(self, self.values)
        return self

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
    return _grid(job, job.mechanism, job.values)


def _grid(job: _JobBody, mechanism: DistributedGaussian, values: int) -> Grid:
    return Grid(
        clip=mechanism.clip,
        noise_multiplier=mechanism.noise_multiplier,
        honest=mechanism.honest,
        values=values,
        members=job.rounds.target_members,
    )


def layout_of(job: JobDocument, members: int) -> Layout:
    """The segments of the masked vector for a cohort of `members` (n, which sets scales and the ring's width).

    Without a mechanism `update` is the change times w / max_weight, so its bound is the coordinate bound, and weight
    and metrics follow. Under a mechanism every member weighs the same and nothing but the change travels, since weights
    and metrics depend on the data too.

    A step of the ring is at most 2^-6 of the noise's deviation (rounding then adds at most 2^-14 of its variance), or
    2^-24 of the coordinate bound where the noise is in the training or nowhere. The ring is the narrowest that holds n
    times the largest value, at most 32 bits wide; steps grow where that does not do, and shrink where there is room.

    Raises:
        LayoutInvalid: the sum could wrap.
    """
    layout = Layout(*_fitted(job, job.values, members))
    layout.check_no_wrap(members)
    return layout


def _check_layout(job: _JobBody, values: int) -> None:
    """That a sum of the largest cohort has room: smaller ones then have it, since a sum needs more bits the more there
    are.

    Raises:
        ValueError: with the keys to change.
    """
    members = job.rounds.target_members
    try:
        segments, bits = _fitted(job, values, members)
    except (ValueError, OverflowError) as error:
        # No grid, or numbers that a float does not hold.
        raise ValueError(f"mechanism, rounds.target_members: {error}") from error
    needed = max(_bits_needed(segment, members) for segment in segments)
    if needed <= bits:
        return
    each, lower = "", ["rounds.target_members"]
    match job.mechanism:
        case NoMechanism():
            each = f" with weights up to {job.aggregation.max_weight} (aggregation.max_weight)"
            lower.insert(0, "aggregation.max_weight")
        case DistributedGaussian():
            each = " with this noise"
    given = job.aggregation.bits
    key = lower[0] if given is None else "aggregation.bits"
    widen = "" if given is None else ("leave bits out, or " if needed > _WIDEST_RING else f"raise it to {needed}, or ")
    raise ValueError(
        f"{key}: the sum of {members} members (rounds.target_members){each} needs {needed} bits and has {bits}; "
        f"{widen}lower {' or '.join(lower)}"
    )


def _fitted(job: _JobBody, values: int, members: int) -> tuple[tuple[Segment, ...], int]:
    """Segments and bits of `layout_of`, whether the sum fits or not. Raises LayoutInvalid: there is no grid."""
    wanted = _segments(job, values)
    bits = job.aggregation.bits or min(_WIDEST_RING, max(_bits_needed(segment, members) for segment, _ in wanted))
    segments = (
        segment if finest is None else _as_fine_as_fits(segment, members, bits, finest) for segment, finest in wanted
    )
    return tuple(segments), bits


def _segments(job: _JobBody, values: int) -> tuple[tuple[Segment, float | None], ...]:
    """Each segment with the scale it should have at least, and the finest it may have; None where it is fixed."""

    def update(bound: float, step: float) -> tuple[Segment, float]:
        # A power of two, so that scaling itself is exact.
        scale = 2.0 ** min(-math.floor(math.log2(step)), _FINEST)
        return Segment("update", values, scale, bound), 2.0**_FINEST

    match job.mechanism:
        case NoMechanism():
            numbers = job.aggregation
            weight, loss = float(numbers.max_weight), numbers.loss_bound
            return (
                update(numbers.coordinate_bound, numbers.coordinate_bound * _STEP_OF_BOUND),
                (Segment("weight", 1, 1.0, weight), None),
                (Segment("loss_sum", 1, 1.0, weight * loss), 1024.0),
                (Segment("correct", 1, 1.0, weight), None),
                (Segment("count", 1, 1.0, weight), None),
            )
        case DpSgd():
            bound = job.aggregation.coordinate_bound
            return (update(bound, bound * _STEP_OF_BOUND),)
        case GaussianUpdate(noise_multiplier=multiplier, clip=clip):
            # Ten deviations of the most noise that a member may add (NOISE_ROOM times the job's). What is cut beyond
            # that was noised before, so cutting it costs no privacy.
            return (update(clip * (1 + 10 * NOISE_ROOM * multiplier), multiplier * clip * _STEP_OF_DEVIATION),)
        case LaplaceUpdate(bound=bound, epsilon=epsilon):
            scale = 2 * bound / epsilon
            return (update(bound + _LARGEST_LAPLACE * scale, scale * _STEP_OF_DEVIATION),)
        case DistributedGaussian() as mechanism:
            return ((_grid(job, mechanism, values).segment("update"), None),)


def _bits_needed(segment: Segment, members: int) -> int:
    """The narrowest ring in which no sum of so many can wrap: members * (bound * scale + 1) <= 2^(bits - 1) - 1."""
    return math.ceil(members * segment.largest).bit_length() + 1


def _as_fine_as_fits(segment: Segment, members: int, bits: int, finest: float) -> Segment:
    while _bits_needed(segment, members) > bits and segment.scale > _COARSEST_SCALE:
        segment = replace(segment, scale=segment.scale / 2)
    while segment.scale < finest:
        finer = replace(segment, scale=segment.scale * 2)
        if _bits_needed(finer, members) > bits:
            break
        segment = finer
    return segment


def thresholds_of(job: JobDocument | JobSpec, members: int) -> tuple[Graph | SparseGraph, int, int]:
    """(graph, t, n_C) of an attempt of this job over a cohort of `members`.

    Raises:
        ContextInvalid: there are none for so many.
    """
    return _thresholds(job.aggregation, members)


def _thresholds(numbers: Aggregation, members: int) -> tuple[Graph | SparseGraph, int, int]:
    return thresholds_for(
        members, assumed_corrupt=numbers.assumed_corrupt, corrupt=numbers.corrupt_share, lost=numbers.lost_share
    )


def promise_of(job: JobDocument | JobSpec, members: int) -> RoundContext:
    """A context with the numbers that a cohort of `members` gets, and of no attempt: for what those numbers promise.

    Raises:
        ContextInvalid: there are none for so many.
    """
    return _promised(job.aggregation, members)


def _promised(numbers: Aggregation, members: int) -> RoundContext:
    graph, threshold, corrupt = _thresholds(numbers, members)
    return RoundContext(
        federation=bytes(32),
        job="none",
        round=0,
        attempt=0,
        application=bytes(32),
        model=bytes(32),
        cohort=members,
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=1,
        bits=_WIDEST_RING,
        graph=graph,
    )


def largest_cohort(job: JobDocument, members: int) -> int:
    """The most of so many members that make a cohort whose sum holds the honest inputs that the noise counts on; 0
    where no cohort of this job does. All of them but for `distributed-gaussian` on sparse graphs, where h falls and
    rises by one from size to size: a few members then wait for the next attempt.
    """
    if not isinstance(job.mechanism, DistributedGaussian):
        return members
    for size in range(members, job.rounds.min_members - 1, -1):
        if promise_of(job, size).honest >= job.mechanism.honest:
            return size
    return 0


def context_of(
    job: JobDocument, *, federation: bytes, round: int, attempt: int, model: bytes, members: int
) -> RoundContext:
    """The context of an attempt of this job: what the coordinator opens, and what a member expects.

    federation: 32 bytes, the fingerprint of its root; model: 32 bytes, the starting version's digest; members: n.

    Raises:
        ContextInvalid: there are no thresholds for so many members.
        LayoutInvalid: their sum could wrap.
    """
    layout = layout_of(job, members)
    graph, threshold, corrupt = thresholds_of(job, members)
    return RoundContext(
        federation=federation,
        job=job.name,
        round=round,
        attempt=attempt,
        application=application_digest(job, layout),
        model=model,
        cohort=members,
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=layout.values,
        bits=layout.bits,
        graph=graph,
    )


def application_digest(job: JobDocument, layout: Layout) -> bytes:
    """Digest of all that an update depends on besides the starting version: 32 bytes for the round's context."""
    return hashlib.sha256(b"tacit/application/v1" + job.digest() + layout.digest()).digest()
