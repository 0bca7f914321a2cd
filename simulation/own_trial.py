"""Tries a job whose members keep a part of the model: what the private part is worth to each member.

Virtual members play the job as written, and beside it what it is measured against: the same job over the base model's
own word pieces, the same job with everything shared, and each member alone. Every member is measured on rows of its own
that it did not train on, and on the test rows, with the model that `edge_client export` would make of the last version.

Guarantees: all variants have the same members, rows and seeds, so a gain is a difference within each member. No choice
depends on a figure: nothing is tuned.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning.text.data import Example
from simulation.server import Server
from simulation.suggestion import changed
from simulation.trial import Divided, RowsUnfit
from tacit.job import JobSpec
from tacit.method import FedAvg, private_parts
from tacit.model import TransformerModel

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from simulation.virtual_members import World

__all__ = ["Accuracy", "Gain", "OwnReport", "gains", "own_rows", "try_own", "variants", "whole_words"]

# Members whose steps are attacked, and texts of each.
_ATTACKED, _TEXTS = 2, 8
# Members below which a standard error says nothing.
_MIN_TOLD = 5
# Share of a member's rows that only measure it.
_OWN_TEST = 0.25
_WRITTEN, _SAME, _SHARED, _ALONE = (
    "the job as written",
    "the base's word pieces",
    "everything shared",
    "each member alone",
)


@dataclass(frozen=True)
class Accuracy:
    """A member's accuracies under one variant: on its own rows and on the test rows, means over the seeds."""

    own: float
    common: float


@dataclass(frozen=True)
class Gain:
    """How much better members are with the job as written than with another variant, on their own rows.

    Attributes:
        against: the other variant.
        of: which members, as a sentence names them.
        members: how many.
        gain: mean of the differences, in [-1, 1].
        error: its standard error over the members.
    """

    against: str
    of: str
    members: int
    gain: float
    error: float

    @property
    def sentence(self) -> str:
        """The gain in points, and whether it is more than its error leaves to chance."""
        points, error = 100 * self.gain, 100 * self.error
        if self.members < _MIN_TOLD:
            said = "too few members to tell"
        elif abs(points) <= 2 * error or not points:
            said = "makes no difference that these members show"
        else:
            said = "helps" if points > 0 else "costs"
        return f"against {self.against}, {self.of}: {said} ({points:+.1f} points, standard error {error:.1f})"


@dataclass(frozen=True)
class OwnReport:
    """What a trial found.

    Attributes:
        variants: members' mean accuracies by variant.
        gains: over all members, and by their size and their share of unknown words.
        members: rows of each member on the first seed.
        unknown: share of each member's words that the public list does not have, if there is a public list.
        rows: rows for training and test.
        seeds: the seeds that were played.
        cut: the time limit left seeds or variants out.
        attacked: sentences on what an attacker with the public table reads in one member's step.
    """

    variants: Mapping[str, Accuracy]
    gains: tuple[Gain, ...]
    members: tuple[int, ...]
    unknown: tuple[float, ...]
    rows: tuple[int, int]
    seeds: tuple[int, ...]
    cut: bool
    attacked: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "variants": {name: vars(each) for name, each in self.variants.items()},
            "gains": [{**vars(each), "sentence": each.sentence} for each in self.gains],
            "members": list(self.members),
            "unknown": list(self.unknown),
            "rows": dict(zip(("training", "test"), self.rows, strict=True)),
            "seeds": list(self.seeds),
            "cut_by_time": self.cut,
            "attacked": list(self.attacked),
        }


def own_rows(rows: Sequence[Example], seed: int) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Divide a member's rows into those that it trains on and those that only measure it. A text is in one part only.

    Raises:
        RowsUnfit: the member has fewer than two different texts.
    """
    import random

    texts = sorted({repr(each.texts) for each in rows})
    if len(texts) < 2:
        raise RowsUnfit(
            "a member has one text only, and needs others to be measured on; give more rows or fewer members"
        )
    random.Random(f"own rows/{seed}").shuffle(texts)
    apart = set(texts[: max(1, round(_OWN_TEST * len(texts)))])
    train = tuple(each for each in rows if repr(each.texts) not in apart)
    return train, tuple(each for each in rows if repr(each.texts) in apart)


def variants(job: JobSpec) -> dict[str, JobSpec]:
    """The jobs that are played, by name. What a variant's checks refuse is left out."""
    found = {_WRITTEN: job}
    based = isinstance(job.model, TransformerModel) and job.model.base is not None
    public: dict[str, object] = {"vocabulary": None} if job.own_vocabulary else {}
    with suppress(ValueError):
        if job.own_vocabulary and based:
            found[_SAME] = changed(job, **public)
        if not job.own_vocabulary or based:
            found[_SHARED] = changed(job, method=FedAvg(), **public)
    return found


def whole_words(texts: Sequence[str], entries: Mapping[str, int]) -> float:
    """The share of the words of these texts that a public list does not have as one entry, in [0, 1]."""
    import re

    words = [word for text in texts for word in re.findall(r"\w+", text.lower())]
    return sum(word not in entries for word in words) / len(words) if words else 0.0


def gains(
    written: Sequence[Accuracy], other: Sequence[Accuracy], against: str, sizes: Sequence[int], unknown: Sequence[float]
) -> list[Gain]:
    """Compare a variant with the job as written: over all members, and in halves by size and by unknown words.

    Args:
        written, other: accuracies by member, in the same order.
        against: the other variant.
        sizes: rows of each member.
        unknown: share of unknown words of each member; empty if there is no public list.
    """
    apart = [one.own - two.own for one, two in zip(written, other, strict=True)]
    found = [_gain(apart, range(len(apart)), against, f"all {len(apart)} members")]
    halves: list[tuple[Sequence[float], Callable[[float], str], str]] = [
        (sizes, lambda value: f"{value:.0f} rows", "rows")
    ]
    if unknown:
        halves.append((unknown, lambda value: f"{100 * value:.0f} % unknown words", "unknown words"))
    for values, said, _ in halves:
        middle = statistics.median(values)
        low = [at for at, value in enumerate(values) if value <= middle]
        high = [at for at, value in enumerate(values) if value > middle]
        if low and high:
            found.append(_gain(apart, low, against, f"{len(low)} members with at most {said(middle)}"))
            found.append(_gain(apart, high, against, f"{len(high)} members with more"))
    return found


def _gain(apart: Sequence[float], places: Sequence[int], against: str, of: str) -> Gain:
    chosen = [apart[place] for place in places]
    error = statistics.stdev(chosen) / math.sqrt(len(chosen)) if len(chosen) > 1 else math.inf
    return Gain(against, of, len(chosen), statistics.mean(chosen), error)


def try_own(
    job: JobSpec,
    divided: Divided,
    dealt: Sequence[Sequence[Sequence[Example]]],
    seeds: Sequence[int],
    made: Callable[[JobSpec, Path], "JobBundle"],
    server: Server,
    *,
    until: float,
    cores: int = 1,
    report: Callable[[str], None] = lambda _: None,
) -> OwnReport:
    """Play the variants of a job whose members keep a part of the model.

    Args:
        job: the operator's job.
        divided: rows; the test part is common to all members, and the validation part is not used.
        dealt: by seed, each member's rows.
        seeds: of training.
        made: makes a job's bundle in a folder, and reads it.
        server: the coordinator's arithmetic.
        until: when no further variant or seed begins, on the clock of time.time(). The first seed of the job as written
            and of each member alone is always played.
        cores: processes that train.
        report: called with sentences about what was found on the way.

    Raises:
        RowsUnfit: a member has too few rows.
        ValueError: a bundle cannot be made.
    """
    from learning.text.tables import entries_of

    found: dict[str, list[list[Accuracy]]] = {}
    cut, played, attacked = False, list[int](), tuple[str, ...]()
    with tempfile.TemporaryDirectory(prefix="tacit-try-") as scratch:
        bundles = {
            name: made(spec, Path(scratch) / f"bundle {at}") for at, (name, spec) in enumerate(variants(job).items())
        }
        parted = [[own_rows(rows, seed) for rows in crew] for crew, seed in zip(dealt, seeds, strict=True)]
        for at, seed in enumerate(seeds):
            for name in (*bundles, _ALONE):
                if time.time() > until and (at or name not in (_WRITTEN, _ALONE)):
                    cut = True
                    continue
                report(f"seed {seed}: {name}")
                states = Path(scratch) / f"states {at} {name}"
                bundle = bundles[_WRITTEN if name == _ALONE else name]
                scores, world, version = _played(
                    bundle, parted[at], divided.test, seed, states, server, cores, alone=name == _ALONE
                )
                found.setdefault(name, []).append(scores)
                if name == _WRITTEN:
                    played.append(seed)
                    attacked = attacked or _attacked(world, version)
        public = next((each.tokenizer for each in bundles.values() if each.tokenizer is not None), None)
    known = {} if public is None else entries_of(public)
    unknown = tuple(whole_words([each.text for each in train], known) for train, _ in parted[0]) if known else ()
    sizes = tuple(len(train) for train, _ in parted[0])
    means = {name: [_mean(each) for each in zip(*runs, strict=True)] for name, runs in found.items()}
    compared = [
        gain
        for name, scores in means.items()
        if name != _WRITTEN
        for gain in gains(means[_WRITTEN], scores, name, sizes, unknown)
    ]
    rows = (len(divided.train.examples), len(divided.test))
    return OwnReport(
        {name: _mean(scores) for name, scores in means.items()},
        tuple(compared),
        sizes,
        unknown,
        rows,
        tuple(played),
        cut,
        attacked,
    )


def _mean(scores: Sequence[Accuracy]) -> Accuracy:
    return Accuracy(statistics.mean(each.own for each in scores), statistics.mean(each.common for each in scores))


def _played(
    bundle: "JobBundle",
    members: Sequence[tuple[tuple[Example, ...], tuple[Example, ...]]],
    common: Sequence[Example],
    seed: int,
    states: Path,
    server: Server,
    cores: int,
    *,
    alone: bool,
) -> "tuple[list[Accuracy], World, bytes]":
    """Play all rounds, or train each member alone for as many epochs as it would in them, and measure all members.

    Returns:
        The members' accuracies, and what played them: the world with its states, and the last version.
    """
    from simulation.virtual_members import (
        COMMON,
        PRIOR_ADDED,
        Held,
        Part,
        Reading,
        World,
        cohort_of,
        crew_of,
        play_round,
    )

    document = bundle.document.model_copy(update={"seed": seed})
    bundle, rounds = replace(bundle, document=document), document.rounds
    held = [Held(train, (), test) for train, test in members]
    world = World(bundle=bundle, members=held, common=common, states=states, alone=alone)
    size = min(rounds.target_members, len(members))
    own: Part = PRIOR_ADDED if document.training.logit_adjustment and not alone else "test"
    with crew_of(world, cores) as crew:
        version = bundle.weights
        if alone:
            crew.train_alone(max(1, round(rounds.count * size / len(members) * document.training.epochs)))
        else:
            values, state = bundle.manifest.decode(version), server.state(document)
            for number in range(1, rounds.count + 1):
                places = cohort_of(len(members), size, seed, number)
                values = play_round(crew, values, number, places, server=server, state=state)
                state = server.state(document, state)
            version = bundle.manifest.encode(values)
        reading: Reading = "left" if alone or document.complete else "adapted"
        scores = crew.score(version, (reading,), (COMMON, own))
    accuracies = [Accuracy(each[reading, own].accuracy, each[reading, COMMON].accuracy) for each in scores]
    return accuracies, world, version


def _attacked(world: "World", version: bytes) -> tuple[str, ...]:
    """Say what an attacker with the public table reads in the steps of the first members."""
    from learning.auditing.spans import NoSpan
    from simulation.table_attack import read_by_tables, sentences
    from simulation.virtual_members import Worker

    if "embedding" not in private_parts(world.bundle.document.method):
        return ()
    worker = Worker(world)
    try:
        return sentences(read_by_tables([worker.step(place, version, _TEXTS) for place in range(_ATTACKED)]))
    except NoSpan:
        return (
            "What an attacker with the public table reads is measured for transformers only; "
            "docs/private-parameters.md has the figures of other models.",
        )
