"""Tries a job whose members keep a part of the model: what the private part is worth to each member.

Virtual members play the job as written, and beside it what it is measured against: the same job over the base model's
own word pieces, the same job with everything shared, and each member alone. Every member is measured on rows of its own
that it did not train on, and on the test rows, with the model that `edge_client export` would make of the last version.

Guarantees: rows are dealt once, so a member is the same in all variants and seeds. In a seed all variants train on and
are measured on the same rows of it, and a seed that the time limit cut counts for none. So a gain is a difference
within each member, whatever the others are like. No choice depends on a figure: nothing is tuned. A variant whose
training fails on any seed is left out of all of them.
"""

import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning.text.examples import Example
from learning.training.outcome import TrainingDiverged, TrainingLost
from simulation.alone import alone_recipes
from simulation.server import Server
from simulation.suggestion import changed
from simulation.trial import Divided, RowsUnfit
from tacit.job import JobSpec
from tacit.mechanism import DpSgd
from tacit.method import FedAvg, private_parts
from tacit.model import TransformerModel

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from simulation.virtual_members import World

__all__ = ["Accuracy", "Compared", "Gain", "OwnReport", "gains", "own_rows", "try_own", "unknown_words", "variants"]

# Texts of each attacked member.
_TEXTS = 8
# Members below which an interval says nothing.
_MIN_TOLD = 5
# Share of a member's rows that only measure it.
_OWN_TEST = 0.25
_WRITTEN, _SAME, _SHARED, _ALONE = (
    "the job as written",
    "the base's word pieces",
    "everything shared",
    "each member alone",
)
# Differences of accuracies below this are rounding.
_LEVEL = 1e-9


@dataclass(frozen=True)
class Accuracy:
    """A member's accuracies under one variant: on its own rows and on the test rows, means over the seeds."""

    own: float
    common: float


@dataclass(frozen=True)
class Compared:
    """A member that is compared with itself.

    Attributes:
        rows: how many it has.
        unknown: share of its words that the public list does not have whole, in [0, 1]; None: there is no public list.
    """

    rows: int
    unknown: float | None = None


@dataclass(frozen=True)
class Gain:
    """How much better members are with the job as written than with another variant, each on its own rows.

    Attributes:
        against: the other variant.
        of: which members, as a sentence names them.
        members: how many.
        gain: mean over the members of each one's difference, in [-1, 1].
        interval: 95 % confidence interval of that mean over the members (Student's t); None: there is one member.
        better, worse: how many members are better, and worse, with the job as written.
    """

    against: str
    of: str
    members: int
    gain: float
    interval: tuple[float, float] | None
    better: int
    worse: int

    @property
    def sentence(self) -> str:
        """The gain in points, and whether its interval leaves it to chance."""
        width = ""
        if self.interval is None:
            told = "one member says nothing of others"
        elif self.members < _MIN_TOLD:
            told = "too few members to tell"
        else:
            low, high = self.interval
            told = "helps" if low > 0 else "costs" if high < 0 else "cannot be told from chance"
            width = f", 95 % interval {100 * low:+.1f} to {100 * high:+.1f}"
        counts = f"{self.better} better, {self.worse} worse"
        part = "own vocabulary" if self.against == _SAME else "private part"
        return f"The {part} against {self.against}, {self.of}: {told} ({100 * self.gain:+.1f} points{width}; {counts})."


@dataclass(frozen=True)
class OwnReport:
    """What a trial found.

    Attributes:
        variants: members' mean accuracies by variant.
        own: each member's accuracy on its own rows by variant, the mean over the seeds.
        gains: over all members, and by their size and their share of unknown words.
        members: who is compared.
        measured: the fewest and the most rows of a member that it is measured on.
        rows: rows for training and test.
        seeds: the seeds that were played by all of these variants.
        cut: the time limit left seeds or variants out.
        ungrouped: sentences on groups that these members do not have.
        attacked: sentences on what an attacker with the public table reads in one member's step.
        failed: sentences on variants and seeds that are left out because a training failed.
    """

    variants: Mapping[str, Accuracy]
    own: Mapping[str, tuple[float, ...]]
    gains: tuple[Gain, ...]
    members: tuple[Compared, ...]
    measured: tuple[int, int]
    rows: tuple[int, int]
    seeds: tuple[int, ...]
    cut: bool
    ungrouped: tuple[str, ...] = ()
    attacked: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "variants": {name: vars(each) for name, each in self.variants.items()},
            "own_by_member": {name: list(each) for name, each in self.own.items()},
            "gains": [{**vars(each), "sentence": each.sentence} for each in self.gains],
            "members": [vars(each) for each in self.members],
            "measured_on": list(self.measured),
            "rows": dict(zip(("training", "test"), self.rows, strict=True)),
            "seeds": list(self.seeds),
            "cut_by_time": self.cut,
            "ungrouped": list(self.ungrouped),
            "attacked": list(self.attacked),
            "failed": list(self.failed),
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


def unknown_words(texts: Sequence[str], tokenizer_json: bytes) -> float:
    """The share of the words of these texts that a public list does not have as one entry, in [0, 1]."""
    import re

    from tokenizers import Tokenizer

    from learning.text.encoder import UNKNOWN

    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    words = Counter(word for text in texts for word in re.findall(r"\w+", text))
    unknown = 0
    for times, read in zip(words.values(), tokenizer.encode_batch([*words], add_special_tokens=False), strict=True):
        unknown += times if len(read.tokens) != 1 or read.tokens[0] == UNKNOWN else 0
    return unknown / words.total() if words else 0.0


def gains(
    written: Sequence[Accuracy], other: Sequence[Accuracy], against: str, members: Sequence[Compared]
) -> list[Gain]:
    """Compare each member with itself: over all members, and in halves by size and by share of unknown words.

    Args:
        written, other: accuracies by member, in the order of `members`.
        against: the other variant.
        members: who they are.
    """
    apart = [one.own - two.own for one, two, _ in zip(written, other, members, strict=True)]
    return [_gain([apart[at] for at in places], against, named) for named, places in _groups(members)[0]]


def _groups(members: Sequence[Compared]) -> tuple[list[tuple[str, Sequence[int]]], tuple[str, ...]]:
    """Return the groups of members, named as a sentence names them, and sentences on those that there are not."""
    every = range(len(members))
    found: list[tuple[str, Sequence[int]]] = [(f"all {len(members)} members{_who(members)}", every)]
    lacking = []
    sizes = _halves([float(each.rows) for each in members])
    if sizes is None:
        lacking.append(f"All members have {members[0].rows} rows, so nothing is said by their size.")
    else:
        found += zip(("smaller members", "larger members"), sizes, strict=True)
    shares = [each.unknown for each in members if each.unknown is not None]
    words = _halves(shares) if len(shares) == len(members) else None
    if not shares:
        lacking.append("There is no public list of words, so nothing is said by members' share of unknown words.")
    elif words is None:
        lacking.append(
            f"All members have {100 * shares[0]:.0f} % unknown words, so nothing is said by their share of them."
        )
    else:
        found += zip(("members with fewer unknown words", "members with more unknown words"), words, strict=True)
    named = [(who if places is every else _counted(who, members, places), places) for who, places in found]
    return named, tuple(lacking)


def _counted(who: str, members: Sequence[Compared], places: Sequence[int]) -> str:
    who = who if len(places) > 1 else who.replace("members", "member")
    return f"the {len(places)} {who}{_who([members[at] for at in places])}"


def _who(members: Sequence[Compared]) -> str:
    rows, shares = [each.rows for each in members], [each.unknown for each in members if each.unknown is not None]
    said = f"{_range(min(rows), max(rows))} rows"
    if shares:
        said += f", {_range(round(100 * min(shares)), round(100 * max(shares)))} % unknown words"
    return f" ({said})"


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def _halves(values: Sequence[float]) -> tuple[list[int], list[int]] | None:
    """Divide places at the median, equal values on one side; None if all values are equal."""
    middle = statistics.median(values)
    # If nothing is above the median, those at the median are the upper half.
    upper = [value > middle for value in values]
    upper = upper if any(upper) else [value == middle for value in values]
    if all(upper):
        return None
    return [at for at, high in enumerate(upper) if not high], [at for at, high in enumerate(upper) if high]


def _gain(apart: Sequence[float], against: str, of: str) -> Gain:
    mean, interval = statistics.mean(apart), None
    if len(apart) > 1:
        from scipy.stats import t

        reach = float(t.ppf(0.975, len(apart) - 1)) * statistics.stdev(apart) / math.sqrt(len(apart))
        interval = max(mean - reach, -1.0), min(mean + reach, 1.0)
    # The mean over seeds of equal accuracies may differ by rounding.
    better, worse = sum(each > _LEVEL for each in apart), sum(each < -_LEVEL for each in apart)
    return Gain(against, of, len(apart), mean, interval, better, worse)


def try_own(
    job: JobSpec,
    divided: Divided,
    dealt: Sequence[Sequence[Example]],
    seeds: Sequence[int],
    made: Callable[[JobSpec, Path], "JobBundle"],
    server: Server,
    *,
    late: Callable[[], bool],
    cores: int = 1,
    report: Callable[[str], None] = lambda _: None,
) -> OwnReport:
    """Play the variants of a job whose members keep a part of the model.

    Args:
        job: the operator's job.
        divided: rows; the test part is common to all members, and the validation part is not used.
        dealt: each member's rows.
        seeds: of training, and of which rows only measure a member.
        made: makes a job's bundle in a folder, and reads it.
        server: the coordinator's arithmetic.
        late: whether the time is over, so that no further variant or seed begins. On the first seed, the job as written
            and each member alone are always played.
        cores: processes that train.
        report: called with sentences about what was found on the way.

    Raises:
        RowsUnfit: a member has too few rows.
        TrainingDiverged, TrainingLost: the job as written failed on the first seed. What fails otherwise is left out.
        ValueError: a bundle cannot be made.
    """
    found: dict[str, list[list[Accuracy]]] = {}
    failed: list[str] = []
    cut, played, attacked = False, list[int](), tuple[str, ...]()
    with tempfile.TemporaryDirectory(prefix="tacit-try-") as scratch:
        bundles = {
            name: made(spec, Path(scratch) / f"bundle {at}") for at, (name, spec) in enumerate(variants(job).items())
        }
        public = next((each.tokenizer for each in bundles.values() if each.tokenizer is not None), None)
        members = [_compared(rows, public) for rows in dealt]
        parted = [[own_rows(rows, seed) for rows in dealt] for seed in seeds]
        names = (_WRITTEN, _ALONE, *(name for name in bundles if name != _WRITTEN))
        for at, seed in enumerate(seeds):
            scores: dict[str, list[Accuracy]] = {}
            whole = True
            for name in names if not at else [*found]:
                if late() and (at or name not in (_WRITTEN, _ALONE)):
                    cut = True
                    break
                report(f"seed {seed}: {name}")
                states = Path(scratch) / f"states {at} {name}"
                bundle = bundles[_WRITTEN if name == _ALONE else name]
                try:
                    scores[name], world, version = _played(
                        bundle, parted[at], divided.test, seed, states, server, cores, alone=name == _ALONE
                    )
                except (TrainingDiverged, TrainingLost) as error:
                    if name == _WRITTEN and not at:
                        raise
                    failed.append(_left_out(name, seed, error, job))
                    report(failed[-1])
                    if name == _WRITTEN:
                        whole = False
                        break
                    # Its means would be of other seeds than the job's.
                    found.pop(name, None)
                    continue
                if not at and name == _WRITTEN:
                    attacked = _attacked(world, version, members, seed)
            if at and cut:
                # Means over other seeds than the other variants' would not be of the same rows.
                break
            if not whole:
                continue
            for name, each in scores.items():
                found.setdefault(name, []).append(each)
            played.append(seed)
            if cut:
                break
    means = {
        name: [_mean(each) for each in zip(*found[name], strict=True)] for name in (*bundles, _ALONE) if name in found
    }
    compared = [
        gain
        for name, accuracies in means.items()
        if name != _WRITTEN
        for gain in gains(means[_WRITTEN], accuracies, name, members)
    ]
    tested = [len(test) for seed, crew in zip(seeds, parted, strict=True) if seed in played for _, test in crew]
    return OwnReport(
        variants={name: _mean(accuracies) for name, accuracies in means.items()},
        own={name: tuple(each.own for each in accuracies) for name, accuracies in means.items()},
        gains=tuple(compared),
        members=tuple(members),
        measured=(min(tested), max(tested)),
        rows=(len(divided.train.examples), len(divided.test)),
        seeds=tuple(played),
        cut=cut,
        ungrouped=_groups(members)[1],
        attacked=attacked,
        failed=tuple(failed),
    )


def _left_out(name: str, seed: int, error: Exception, job: JobSpec) -> str:
    """Say what a failed training leaves out."""
    if name == _WRITTEN:
        return f"Seed {seed} is left out, because {name} failed on it: {error}."
    # The rate of this recipe is not the job's, so lowering that would change nothing.
    own = name == _ALONE and isinstance(job.mechanism, DpSgd)
    why = str(error).partition("; lower ")[0] if own else str(error)
    return f'"{name}" is left out, because it failed on seed {seed}: {why}.'


def _compared(rows: Sequence[Example], public: bytes | None) -> Compared:
    return Compared(len(rows), None if public is None else unknown_words([each.text for each in rows], public))


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
    """Play all rounds, or train each member alone (`simulation.alone`), and measure all members.

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
            crew.train_alone([alone_recipes(document, len(train), size / len(members)) for train, _ in members])
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


def _attacked(world: "World", version: bytes, members: Sequence[Compared], seed: int) -> tuple[str, ...]:
    """Say what an attacker with the public table reads in steps of the members with the fewest and most unknown words.

    Without a public list, they are the smallest and the largest member.
    """
    from learning.auditing.spans import NoSpan
    from simulation.table_attack import read_by_tables, sentences
    from simulation.virtual_members import Worker

    if "embedding" not in private_parts(world.bundle.document.method):
        return ()
    worker = Worker(world)
    ordered = sorted(range(len(members)), key=lambda at: (members[at].unknown or 0.0, members[at].rows))
    places = sorted({ordered[0], ordered[-1]})
    numbers = " and ".join(f"{place + 1}{_who([members[place]])}" for place in places)
    whose = (
        f"the first {_TEXTS} training rows of members {numbers}, on the last version of the job as written, seed {seed}"
    )
    try:
        return sentences(read_by_tables([worker.step(place, version, _TEXTS) for place in places]), whose)
    except NoSpan:
        return (
            "What an attacker with the public table reads is measured for transformers only; "
            "docs/private-parameters.md has the figures of other models.",
        )
