"""One trial of a job: virtual members train it on public rows, and its last version is measured on rows held apart.

Guarantees: rows are divided once into training, validation and test; members get training rows only. A trial is a
function of the job, the rows and the seed, up to the noise's own source, which also follows from the seed here: such
noise protects nobody, and the rows are public.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from learning.text.examples import DataInvalid, Example
from simulation.partitions import Partition, by_column, by_label, by_ratios
from simulation.server import Server
from tacit.job import JobSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from export.bundle import JobBundle
    from learning.prompts.features import FeatureStore

__all__ = [
    "Divided",
    "Outcome",
    "PartitionKind",
    "Rows",
    "RowsUnfit",
    "column_of",
    "deal",
    "divide",
    "majority",
    "run_trial",
]

PartitionKind = Literal["even", "label", "column"]

# Rows of a member from which something can be learnt; a lot has more.
MIN_ROWS = 2


class RowsUnfit(ValueError):
    """The rows cannot be used for a trial; the text says why and what to do."""


@dataclass(frozen=True)
class Rows:
    """Labelled rows. column: a value for each row (an author, a hospital), if members are made of them."""

    examples: tuple[Example, ...]
    column: tuple[str, ...] = ()


def column_of(examples: Iterable[Example], column: str) -> tuple[str, ...]:
    """The values of a column that was read as the rows' label.

    Raises:
        DataInvalid: a row has none.
    """
    values = [each.label for each in examples]
    if lacking := values.count(None):
        raise DataInvalid(f"{lacking} of {len(values)} rows have no {column}; fill the column")
    return tuple(map(str, values))


@dataclass(frozen=True)
class Divided:
    """Rows for training, with their column, and rows that no member has: to choose by, and to report at the end."""

    train: Rows
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


@dataclass(frozen=True)
class Outcome:
    """Right answers of a trial's last version, and how long it took.

    The test part is measured here, because the version is dropped afterwards. Nothing chooses by it.
    """

    validation: int
    test: int
    seconds: float


def divide(rows: Rows, *, validation: float, test: float, seed: int) -> Divided:
    """Divide rows at random. A text is in one part only, however often it occurs; if rows have persons, a person is.

    Args:
        rows: all rows.
        validation, test: shares of the texts or persons, with a sum below 1. test is above 0; with a validation of 0
            there is no such part.
        seed: of the draw.

    Raises:
        RowsUnfit: there is one label only, or a part would be empty or have one label.
    """
    labels = {example.label for example in rows.examples}
    # Rows without labels are dialogues.
    least = 1 if labels == {None} else 2
    if len(labels) < least:
        raise RowsUnfit(
            f"all {len(rows.examples)} rows have the label {next(iter(labels), None)!r}; give rows of at least two "
            "labels"
        )
    keys = [_key(each) for each in rows.examples]
    whole = sorted(set(keys))
    random.Random(f"divide/{seed}").shuffle(whole)
    tested, chosen = round(test * len(whole)), round(validation * len(whole))
    part_of = {key: (place >= tested) + (place >= tested + chosen) for place, key in enumerate(whole)}
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    for place, key in enumerate(keys):
        parts[part_of[key]].append(place)
    names = ("test", "validation", "training")
    for name, part in zip(names, parts, strict=True):
        if name == "validation" and not validation:
            continue
        if len({rows.examples[place].label for place in part}) < least:
            needs = "rows of two labels" if least == 2 else "at least one"
            raise RowsUnfit(
                f"{len(rows.examples)} rows are too few: the {name} part would have {len(part)} of them, and it needs "
                f"{needs}; give more rows"
            )
    apart, by, train = parts
    column = tuple(rows.column[place] for place in train) if rows.column else ()
    return Divided(
        Rows(tuple(rows.examples[place] for place in train), column),
        tuple(rows.examples[place] for place in by),
        tuple(rows.examples[place] for place in apart),
    )


def _key(row: Example) -> str:
    """What keeps rows in one part: their person, or their text; a dialogue's prompts are its text."""
    if row.person is not None:
        return f"person/{row.person}"
    return repr(row.texts if row.label is not None or row.dialogue is None else row.dialogue.prompts)


def deal(rows: Rows, kind: PartitionKind, members: int, alpha: float, seed: int) -> tuple[tuple[Example, ...], ...]:
    """Deal rows to members.

    Args:
        rows: the training rows.
        kind: `even` deals at random; `label` in label proportions drawn from Dir(alpha); `column` makes a member of
            each value of the rows' column, and ignores `members`.
        members: number of members.
        alpha: of `label`.
        seed: of the draw.

    Raises:
        RowsUnfit: there are fewer rows than members need, or the column has one value.
    """
    examples = rows.examples
    try:
        dealt: Partition
        match kind:
            case "even":
                dealt = by_ratios(len(examples), (1,) * members, seed, least=MIN_ROWS)
            case "label":
                labels = [str(example.label) for example in examples]
                dealt = by_label(labels, members, alpha, seed, least=MIN_ROWS)
            case "column":
                dealt = by_column(rows.column, least=MIN_ROWS)
    except ValueError as error:
        raise RowsUnfit(f"{len(examples)} training rows cannot be dealt to {members} members: {error}") from error
    if len(dealt.members) < 2:
        raise RowsUnfit("the column has one value, so there would be one member; name another column")
    return tuple(tuple(examples[place] for place in part) for part in dealt.members)


def majority(train: Sequence[Example], asked: Sequence[Example]) -> int:
    """Return how many of the asked rows have the most frequent label of the training rows."""
    counts = Counter(str(example.label) for example in train)
    # Equally frequent labels: the first by name, so that nothing depends on the order of rows.
    label = min(counts, key=lambda name: (-counts[name], name))
    return sum(example.label == label for example in asked)


def run_trial(
    folder: Path,
    spec: JobSpec,
    members: Sequence[Sequence[Example]],
    divided: Divided,
    seed: int,
    server: Server,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    round_done: Callable[[int], None] = lambda _: None,
    features: "FeatureStore | None" = None,
) -> Outcome:
    """Train a job with virtual members, and measure its last version.

    Args:
        folder: a bundle of a job with the same model, vocabulary and labels.
        spec: the job; its method, mechanism, training, rounds and aggregation are used.
        members: each member's rows.
        divided: has the rows to measure on.
        seed: of training and noise.
        server: the coordinator's arithmetic.
        cancelled: asked before every step, and while a frozen backbone computes features.
        round_done: called with the number of each finished round.
        features: keeps what a frozen backbone computes of the rows, for the next trials.

    Raises:
        TrainingCancelled: `cancelled` returned True.
        VersionDiverged, ModelUnsuitable, TrainingDiverged, TrainingLost: the numbers do not work.
        ValueError: the coordinator would not publish a sum.
    """
    import time

    from export.bundle import read_job_bundle
    from simulation.kept_features import SharedFeatures
    from simulation.rounds import Member, federate
    from simulation.virtual_members import SeededRandom

    began = time.monotonic()
    bundle = read_job_bundle(folder)
    numbers = {name: getattr(spec, name) for name in ("method", "mechanism", "training", "rounds", "aggregation")}
    bundle = replace(bundle, document=bundle.document.model_copy(update={**numbers, "seed": seed}))
    crew = [Member(rows) for rows in members]
    source = SeededRandom(f"trial/{spec.name}/{seed}")
    values = bundle.manifest.decode(bundle.weights)
    store = SharedFeatures() if features is None else features
    for done in federate(bundle, crew, spec.rounds.count, source, server=server, cancelled=cancelled, features=store):
        values = done.values
        round_done(done.number)
    validation, test = (_correct(bundle, values, part, store, cancelled) for part in (divided.validation, divided.test))
    return Outcome(validation, test, time.monotonic() - began)


def _correct(
    bundle: "JobBundle",
    values: "NDArray[np.float32]",
    examples: Sequence[Example],
    store: "FeatureStore",
    cancelled: Callable[[], bool],
) -> int:
    """Return how many rows a version labels rightly."""
    from simulation.scoring import answers_of

    logits, labels = answers_of(bundle, values, examples, store, cancelled)
    return int((logits.argmax(axis=1) == labels).sum())
