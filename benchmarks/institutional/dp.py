"""Measures accuracy on TREC under differential privacy.

Both parts use the product's own training, noise, ring and averaging in one process (`simulation`).

`grid`: the paper's Algorithm 1 (`gaussian-update`) with its TextCNN, which has 4.6 million parameters here: H = 50
epochs, E = 4, batches of 64, Adam 0.001, dropout 0.5, delta 1e-5. The paper does not give its C; here it is 1, fixed
before the first run. Each member counts its own epsilon the paper's way, and sends while it has spent less than E
(Algorithm 1 asks before each lot), for at most H epochs of its own lots. The training ends when fewer than two members
send. A run with E = 4 passes the versions at which E = 1 or 2 would have stopped, so their accuracies come from the
same run. No figure is a target: noise of length sigma C sqrt(d) on an update of length at most C leaves nothing to
learn from, and a result near the paper's would mean that noise is missing.

Two epsilons are given. The paper's: noise multiplier sigma, with the moments accountant's own conversion (Abadi et al.
2016, theorem 2), which gives the paper's numbers of rounds to within one (117 and 475 for E = 1 and 2 against its 117
and 476; 109 and 28 for lots of 512 and 1,024 against its 108 and 27). The sound one: updates from neighbouring data
sets differ by up to 2 C, so the multiplier is sigma / 2 (`Protection.event`), by PLD. Both are for add-remove
neighbours and the member that spent most.

`dp-sgd`: the best accuracy found at a true epsilon of 1, 2, 4 and 8 with three equal members. The noise multiplier is
the smallest with which a member's empty ledger admits all rounds (`calibration`). Everything else is chosen on 500
training questions that nobody trains on: axis by axis at epsilon 4 (`AXES`, each around the best so far), then the best
three at every epsilon. Only then are the chosen recipes tested, with three seeds. The search itself is not accounted
for: the epsilon is that of each training, as is usual in this field.

`suggested`: what the written rules of `simulation.suggestion` propose for these cells, on the same questions, beside
the best recipe of the search. Both have two seeds and the noise of the present gate: the best of many recipes on one
seed is partly luck, and the search's rows have the noise of the gate before decision 45.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.institutional.setup import GLOVE, PIECES, TREC, Tester, Vocabulary, check_data, deal
from benchmarks.library.record import Case, Figure, Results, open_results, parser, summarise
from benchmarks.library.simulation import MIN_COHORT, Member, Round, federate
from export.bundle import JobBundle, make_job_bundle, read_job_bundle
from learning.accounting.calibration import calibrate
from learning.accounting.events import SampledGaussian
from learning.accounting.expected_noise import Values, values_of_file
from learning.accounting.filter import Limit
from learning.accounting.planning import noise_to_signal
from learning.accounting.renyi import ORDERS, renyi
from learning.accounting.spend import epsilon_pld
from learning.mechanisms.protection import OwnNumbers, protection_of
from learning.text.data import read_examples
from learning.text.examples import Example
from simulation.suggestion import Situation, suggest
from tacit.job import Aggregation, JobSpec, Rounds, Training, VocabularyFile
from tacit.mechanism import DpSgd, GaussianUpdate, NoMechanism
from tacit.model import TextCNNModel

__all__ = ["AXES", "Data", "GridCell", "Recipe", "abadi_epsilon", "deal_by", "max_releases", "measure_grid", "search"]

BENCH, SEARCH = "institutional_dp", "institutional_dp_search"
# Of the lines of `suggested`. Raised for the noise of decision 45.
SUGGESTED_REVISION = 2
SUGGESTED_SEEDS = (0, 1)

DELTA = 1e-5
EPOCHS = 50  # H of the paper.
LIMITS = (1.0, 2.0, 4.0)  # E of the paper.
CLIP = 1.0  # C, which the paper does not give.
POINTS = 24  # Number of points of a learning curve.

# Table 2 (lot 128), table 3 (3 members, sigma 4), by (members, sigma, lot); all with E = 4 and equal loads.
PAPER = {
    (2, 2.0, 128): 0.872,
    (2, 4.0, 128): 0.872,
    (2, 8.0, 128): 0.876,
    (3, 2.0, 128): 0.818,
    (3, 4.0, 128): 0.840,
    (3, 8.0, 128): 0.836,
    (4, 2.0, 128): 0.796,
    (4, 4.0, 128): 0.794,
    (4, 8.0, 128): 0.768,
    (3, 4.0, 256): 0.882,
    (3, 4.0, 512): 0.502,
    (3, 4.0, 1024): 0.456,
}

MEMBERS = 3
EPSILONS = (1.0, 2.0, 4.0, 8.0)
TUNED_AT = 4.0
HELD_BACK = 500
SPLIT_SEED = 20200
FEW = 3
SEEDS = (0, 1, 2)
# Fields of a mean over seeds that are taken from the first seed.
_KEPT = ("paper", "recipe", "planned")


# Training questions of a member of the search: TREC has 5,452.
SEARCH_ROWS = (5452 - HELD_BACK) // MEMBERS


class OutOfTime(Exception):
    """The given minutes are over. Measured cells are kept."""


@dataclass(frozen=True)
class Data:
    """Training examples in the file's order, test examples, and labels."""

    train: Sequence[Example]
    test: Sequence[Example]
    labels: tuple[str, ...]

    @classmethod
    def trec(cls, rows: int | None = None) -> "Data":
        """Read TREC's own split, or only its first `rows` training questions."""
        train = read_examples(TREC / "train.jsonl.gz")[:rows]
        return cls(
            train, read_examples(TREC / "test.jsonl.gz"), tuple(sorted({str(example.label) for example in train}))
        )

    def without(self, held_back: int) -> tuple["Data", "Data"]:
        """Hold back a validation part, drawn from a fixed seed.

        Returns:
            The remaining data with the test set, and the remaining data with the validation part as its test.
        """
        order = list(range(len(self.train)))
        random.Random(SPLIT_SEED).shuffle(order)
        part = [self.train[place] for place in order[:held_back]]
        rest = [self.train[place] for place in order[held_back:]]
        return replace(self, train=rest), replace(self, train=rest, test=part)


def deal_by(examples: Sequence[Example], shares: Sequence[int], seed: int) -> list[list[Example]]:
    """Deal parts in the proportion of `shares`, in an order drawn from the seed. Equal shares are dealt by `deal`."""
    if len(set(shares)) == 1:
        order = deal([str(place) for place in range(len(examples))], len(shares), seed)
        return [[examples[int(place)] for place in part] for part in order]
    places = list(range(len(examples)))
    random.Random(seed).shuffle(places)
    ends = [round(len(places) * sum(shares[: number + 1]) / sum(shares)) for number in range(len(shares))]
    return [[examples[place] for place in places[first:end]] for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# ---- accounting as the paper does -----------------------------------------------------------------------------------


def abadi_epsilon(multiplier: float, rate: float, releases: int, delta: float = DELTA) -> float:
    """Return the moments accountant's epsilon of some sampled Gaussians.

    It is the minimum over alpha of divergence + ln(1 / delta) / (alpha - 1), with this project's divergences and
    orders.

    Source: Abadi et al. 2016, theorem 2.
    """
    if not releases:
        return 0.0
    above = np.array(ORDERS) - 1
    return float((releases * _divergence(multiplier, rate) - math.log(delta) / above).min())


@cache
def _divergence(multiplier: float, rate: float) -> Any:
    return renyi(SampledGaussian(multiplier=multiplier, rate=rate), "add-remove")


def max_releases(multiplier: float, rate: float, limit: float) -> int:
    """Return the releases of a member that sends while its epsilon, by the paper, is below the limit.

    There are at most 50 / rate, because H = 50.
    """
    most = math.floor(EPOCHS / rate + 1e-9)
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if abadi_epsilon(multiplier, rate, middle - 1) < limit:
            low = middle
        else:
            high = middle
    return low


# ---- jobs -----------------------------------------------------------------------------------------------------------


def bundle_of(spec: JobSpec, folder: Path) -> JobBundle:
    """Make the job's bundle in `folder` once, and read it."""
    if not (folder / "bundle").exists():
        make_job_bundle(spec, folder, folder / "bundle")
    return read_job_bundle(folder / "bundle")


def _files(vocabulary: Vocabulary) -> VocabularyFile:
    file = str(vocabulary.file)
    pretrained = file if vocabulary.pretrained else None
    return VocabularyFile.model_validate({"kind": vocabulary.kind, "file": file, "pretrained": pretrained})


# ---- the paper's grid -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridCell:
    """One training of the paper's grid. lot: of all members; None takes `rate` of each member's own part."""

    members: int
    sigma: float
    lot: int | None = 128
    rate: float = 0.14
    shares: tuple[int, ...] = ()
    seed: int = 0
    model: TextCNNModel = field(default_factory=TextCNNModel)
    vocabulary: Vocabulary = PIECES

    @property
    def load(self) -> str:
        """The load in a case's keys: `equal`, or the shares."""
        return ":".join(map(str, self.shares)) or "equal"

    def case(self, limit: float) -> dict[str, Any]:
        """Return the keys of the training up to this limit."""
        return {
            "members": self.members,
            "mechanism": "gaussian-update",
            "sigma": self.sigma,
            "lot": self.lot or f"{self.rate:g} N",
            "load": self.load,
            "limit": limit,
        }

    def lot_of(self, examples: int) -> int:
        """Return a member's lot."""
        return self.lot or round(self.rate * examples)

    def spec(self, labels: Sequence[str], smallest: int) -> JobSpec:
        """Return the job. Members with another lot than the smallest member's set their own."""
        return JobSpec(
            name="trec",
            labels=tuple(labels),
            model=self.model,
            training=Training(epochs=1, batch=64, optimiser="adam", learning_rate=0.001),
            mechanism=GaussianUpdate(noise_multiplier=self.sigma, clip=CLIP, lot=self.lot_of(smallest)),
            rounds=Rounds(min_members=MIN_COHORT, target_members=self.members),
            # Two members continue after the third has stopped. That needs n_C = 0, also in their policies.
            aggregation=Aggregation(assumed_corrupt=0),
            seed=self.seed,
            vocabulary=_files(self.vocabulary),
        )

    def parts(self, data: Data) -> list[list[Example]]:
        """Return each member's examples."""
        return deal_by(data.train, self.shares or (1,) * self.members, self.seed)

    def releases(self, examples: int, limit: float) -> int:
        """Return the releases of a member with this many examples, under a limit."""
        return max_releases(self.sigma, self.lot_of(examples) / examples, limit)


# Ordered by information for their time: the few rounds of large lots first, then the core cell.
FEW_ROUNDS = 2
GRID = (
    GridCell(3, 4.0, 1024),
    GridCell(3, 4.0, 512),
    GridCell(3, 4.0),
    GridCell(3, 4.0, None, shares=(1, 2, 4)),
    GridCell(3, 4.0, None, shares=(1, 1, 3)),
    GridCell(3, 2.0),
    GridCell(3, 4.0, 256),
    GridCell(3, 4.0, seed=1),
    GridCell(3, 4.0, seed=2),
    GridCell(4, 4.0),
    GridCell(2, 4.0),
    GridCell(3, 8.0),
    # The same lot for unequal loads (the first way of section 3.3): the smallest member stops and the others continue.
    GridCell(3, 4.0, 256, shares=(1, 2, 4)),
    *(GridCell(members, sigma) for sigma in (2.0, 8.0) for members in (2, 4)),
)


def measure_grid(
    cell: GridCell, data: Data, folder: Path, *, until: float = math.inf
) -> Iterator[tuple[Case, list[Figure]]]:
    """Train a cell, and yield its figures at each limit as soon as it is reached.

    Args:
        until: latest time, on the clock of time.monotonic().

    Raises:
        OutOfTime: the time ended before the last limit.
    """
    parts = cell.parts(data)
    smallest = min(map(len, parts))
    bundle = bundle_of(cell.spec(data.labels, smallest), folder)
    tester = Tester(folder / "bundle", data.test)
    # A lower limit is a point of the same run only if all members would have stopped there together.
    stops = {limit: [cell.releases(len(part), limit) for part in parts] for limit in LIMITS}
    limits = [limit for limit, counts in stops.items() if limit == LIMITS[-1] or max(counts) - min(counts) <= 1]
    final = limits[-1]
    members = [
        Member(part, OwnNumbers(lot=cell.lot_of(len(part))), releases)
        for part, releases in zip(parts, stops[final], strict=True)
    ]
    # The training ends when the last member but one stops.
    whole = sorted(stops[final])[-MIN_COHORT]
    ends = {limit: min(*stops[limit], whole) if limit != final else whole for limit in limits}
    looked_at = {1, *ends.values(), *(math.ceil(whole * number / POINTS) for number in range(1, POINTS + 1))}
    curve: list[list[float]] = []
    seen: list[Round] = []
    began = time.monotonic()
    for done in federate(bundle, members, whole):
        if done.number in looked_at:
            curve.append([done.number, tester.accuracy(bundle.manifest.encode(done.values))])
        # Drops the version; even an empty view would keep its memory.
        seen.append(replace(done, values=np.zeros(0, np.float32)))
        for limit in limits:
            if ends[limit] == done.number:
                paper = PAPER.get((cell.members, cell.sigma, cell.lot or 0)) if cell.load == "equal" else None
                beside = {} if paper is None or limit != LIMITS[-1] else {"paper": paper}
                figures = _grid_figures(cell, bundle, members, seen, curve, beside)
                figures.append(Figure("seconds", round(time.monotonic() - began, 1), "s"))
                yield cell.case(limit), figures
        if time.monotonic() > until and done.number < whole:
            raise OutOfTime(f"{cell.case(final)} at round {done.number} of {whole}")


def _grid_figures(
    cell: GridCell,
    bundle: JobBundle,
    members: Sequence[Member],
    seen: Sequence[Round],
    curve: Sequence[list[float]],
    beside: Mapping[str, Any],
) -> list[Figure]:
    released = [sum(place in done.senders for done in seen) for place in range(len(members))]
    paper: list[float] = []
    sound: list[float] = []
    paper_pld: list[float] = []
    for member, count in zip(members, released, strict=True):
        examples = len(member.examples)
        event = protection_of(bundle.document, examples, own=member.own).event
        if not isinstance(event, SampledGaussian):
            raise TypeError("the grid's mechanism is a sampled Gaussian")
        paper.append(abadi_epsilon(cell.sigma, event.rate, count))
        for multiplier, into in ((event.multiplier, sound), (cell.sigma, paper_pld)):
            whole = event.model_copy(update={"multiplier": multiplier, "steps": count})
            into.append(_pld(whole))
    more = {**beside, "curve": [[number, round(value, 4)] for number, value in curve]}
    mechanism = GaussianUpdate(noise_multiplier=cell.sigma, clip=CLIP)
    planned = noise_to_signal(mechanism, bundle.manifest.values, len(members[0].examples), len(members))
    lengths = [each for done in seen for each in done.lengths]
    return [
        Figure("test_accuracy", curve[-1][1], more=more),
        Figure("rounds", len(seen), more={"releases": released}),
        Figure("epsilon_paper", round(max(paper), 4), more={"pld": round(max(paper_pld), 4)}),
        Figure("epsilon_sound", round(max(sound), 4), more={"members": [round(each, 4) for each in sound]}),
        Figure(
            "noise_to_signal",
            round(_measured_ratio(lengths, len(members)), 1),
            more={"planned": round(planned, 1), "trained": round(statistics.median(e.trained for e in lengths), 4)},
        ),
    ]


def _measured_ratio(lengths: Sequence[Any], members: int) -> float:
    """Return the norm of the noise over that of the clipped update: the median of the sent ones, for their mean."""
    ratios = []
    for each in lengths:
        clipped = min(each.trained, CLIP)
        if clipped:
            ratios.append(math.sqrt(max(each.sent**2 - clipped**2, 0.0)) / clipped)
    return statistics.median(ratios) / math.sqrt(members) if ratios else math.inf


@cache
def _pld(event: SampledGaussian) -> float:
    found = epsilon_pld([event], DELTA, "add-remove")
    if found is None:
        raise TypeError("a sampled Gaussian has a privacy loss distribution")
    return found


# ---- dp-sgd at a true epsilon ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """The tuned options. The defaults are the start of the search.

    Args:
        lot: None takes all of a member's data in each step. With a third of the data a step costs a third, and needs
            little more noise for its signal.
    """

    frozen: bool = True
    widths: tuple[int, ...] = (1, 2, 3)
    maps: int = 32
    dropout: float = 0.0
    lot: int | None = 512
    steps: int = 10
    rounds: int = 10
    clip: float = 0.5
    optimiser: str = "sgd"
    learning_rate: float = 1.0

    def as_json(self) -> dict[str, Any]:
        """Return the recipe as it is written in results."""
        return {**asdict(self), "widths": list(self.widths)}

    def model(self, vocabulary: Vocabulary) -> TextCNNModel:
        """Return the job's model."""
        return TextCNNModel(
            embedding=vocabulary.embedding,
            widths=self.widths,
            maps=self.maps,
            dropout=self.dropout,
            freeze_embedding=self.frozen,
        )

    def multiplier(self, epsilon: float, examples: int) -> float:
        """Return the smallest noise multiplier with which a member's empty ledger admits all rounds."""
        lot = min(self.lot or examples, examples)

        def event(multiplier: float) -> SampledGaussian:
            return SampledGaussian(multiplier=multiplier, rate=lot / examples, steps=self.steps)

        return calibrate(event, self.rounds, Limit(epsilon, DELTA))


def _step_axis(best: Recipe) -> list[Recipe]:
    """Vary optimiser, clip and rate. If every gradient is clipped, a step of plain SGD depends on clip times rate."""
    steps = ((0.1, (3.0, 10.0)), (0.5, (3.0, 8.0)), (2.0, (0.3, 1.0, 3.0)))
    found = [replace(best, clip=clip, learning_rate=rate) for clip, rates in steps for rate in rates]
    adam = ((0.1, 0.01), (0.5, 0.003), (0.5, 0.01))
    return found + [replace(best, optimiser="adam", clip=clip, learning_rate=rate) for clip, rate in adam]


def _model_axis(best: Recipe) -> list[Recipe]:
    changes: list[dict[str, Any]] = [{"maps": maps} for maps in (16, 64, 100)]
    changes += [{"widths": widths} for widths in ((1, 2), (2, 3, 4, 5))]
    changes += [{"dropout": 0.5}, {"frozen": False}]
    return [replace(best, **change) for change in changes]


def _work_axis(best: Recipe) -> list[Recipe]:
    """Vary the steps in a round, the rounds, and the lot."""
    found = [replace(best, steps=steps, rounds=rounds) for steps, rounds in ((2, 50), (20, 5), (10, 30))]
    return found + [replace(best, lot=lot) for lot in (128, 1024, None)]


def _rate_axis(best: Recipe) -> list[Recipe]:
    return [replace(best, learning_rate=min(10.0, round(best.learning_rate * by, 6))) for by in (0.4, 0.63, 1.6)]


# Searched one after another, each around the best so far: at most 27 trainings.
AXES: tuple[Callable[[Recipe], list[Recipe]], ...] = (_step_axis, _model_axis, _work_axis, _rate_axis)


def measure_recipe(
    recipe: Recipe, epsilon: float | None, data: Data, folder: Path, seed: int, vocabulary: Vocabulary = GLOVE
) -> list[Figure]:
    """Train a recipe with three equal members, and test its last version on `data.test`.

    Args:
        epsilon: None trains the recipe's model without noise, with the default training options.
    """
    parts = deal_by(data.train, (1,) * MEMBERS, seed)
    smallest = min(map(len, parts))
    noised = None
    training, rounds = Training(), Rounds()
    if epsilon is not None:
        noised = DpSgd(
            noise_multiplier=recipe.multiplier(epsilon, smallest),
            clip=recipe.clip,
            lot=min(recipe.lot or smallest, smallest),
            steps=recipe.steps,
        )
        training = Training.model_validate(
            # The batch only decides how much is in memory at a time.
            {"batch": 256, "optimiser": recipe.optimiser, "learning_rate": recipe.learning_rate}
        )
        rounds = Rounds(count=recipe.rounds)
    spec = JobSpec(
        name="trec",
        labels=data.labels,
        model=recipe.model(vocabulary),
        training=training,
        mechanism=noised or NoMechanism(),
        rounds=rounds,
        seed=seed,
        vocabulary=_files(vocabulary),
    )
    bundle = bundle_of(spec, folder)
    tester = Tester(folder / "bundle", data.test)
    began = time.monotonic()
    *_, last = federate(bundle, [Member(part) for part in parts], rounds.count)
    accuracy = tester.accuracy(bundle.manifest.encode(last.values))
    seconds = round(time.monotonic() - began, 1)
    trained = sum(parameter.numel() for parameter in tester.module.parameters() if parameter.requires_grad)
    more: dict[str, Any] = {"recipe": recipe.as_json(), "trained_values": trained, "seconds": seconds}
    figures = [Figure("test_accuracy", accuracy, more=more), Figure("rounds", rounds.count)]
    if noised is not None:
        event = protection_of(bundle.document, smallest).event
        if not isinstance(event, SampledGaussian):
            raise TypeError("dp-sgd is a sampled Gaussian")
        whole = event.model_copy(update={"steps": event.steps * rounds.count})
        more["noise_multiplier"] = noised.noise_multiplier
        ratio = noise_to_signal(noised, trained, smallest, MEMBERS)
        figures += [Figure("epsilon_sound", round(_pld(whole), 4)), Figure("noise_to_signal", round(ratio, 3))]
    return figures


Run = Callable[[Recipe, float, int], float]


def search(run: Run) -> dict[float, Recipe]:
    """Return the best recipe for each epsilon. run: returns the validation accuracy of (recipe, epsilon, seed)."""
    first = Recipe()
    scores = {first: run(first, TUNED_AT, 0)}
    for axis in AXES:
        for recipe in axis(_best(scores)):
            if recipe not in scores:
                scores[recipe] = run(recipe, TUNED_AT, 0)
    few = sorted(scores, key=lambda recipe: -scores[recipe])[:FEW]
    return {
        epsilon: _best({recipe: scores[recipe] if epsilon == TUNED_AT else run(recipe, epsilon, 0) for recipe in few})
        for epsilon in EPSILONS
    }


def suggested(epsilon: float, entries: int, examples: int = SEARCH_ROWS) -> Recipe:
    """Return the recipe that the written rules propose for the search's cell (`simulation.suggestion`).

    Args:
        epsilon: of the cell.
        entries: rows of the embedding.
        examples: rows of the smallest member.
    """
    model = Recipe(frozen=False).model(GLOVE)
    labels = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
    spec = JobSpec(name="trec", labels=labels, model=model, vocabulary=_files(GLOVE))
    values = Values(model.values(entries, len(labels)), entries * model.embedding)
    job = suggest(spec, Situation(examples, MEMBERS, epsilon, values, DELTA)).job
    if not isinstance(job.mechanism, DpSgd) or not isinstance(job.model, TextCNNModel):
        raise TypeError("the rules propose dp-sgd, and keep the architecture")
    return Recipe(
        frozen=job.model.freeze_embedding,
        widths=job.model.widths,
        lot=job.mechanism.lot,
        steps=job.mechanism.steps,
        rounds=job.rounds.count,
        clip=job.mechanism.clip,
        optimiser=job.training.optimiser,
        learning_rate=job.training.learning_rate,
    )


def winner(searched: Results, epsilon: float, proposed: Recipe) -> Recipe:
    """Return the best measured recipe of a cell on the first seed, apart from the proposed one."""
    lines = [
        line
        for line in searched.lines
        if line["case"]["epsilon"] == epsilon and line.get("seed") == 0 and line["recipe"] != proposed.as_json()
    ]
    recipe = max(lines, key=lambda line: float(line["value"]))["recipe"]
    return Recipe(**{**recipe, "widths": tuple(recipe["widths"])})


def entries_of(vocabulary: Vocabulary) -> int:
    """Return the rows of an embedding for a vocabulary of words."""
    model = TextCNNModel(embedding=1)
    spec = JobSpec(
        name="words", labels=("a", "b"), model=model, vocabulary=_files(replace(vocabulary, pretrained=False))
    )
    found = values_of_file(spec, vocabulary.file.parent)
    if found is None:
        raise TypeError("the entries of a word list can be counted")
    return found.embedding


def _best(scores: Mapping[Recipe, float]) -> Recipe:
    """Return the first recipe with the highest score, so that ties depend on nothing else."""
    return max(scores, key=lambda recipe: scores[recipe])


def tested_case(epsilon: float | None) -> dict[str, Any]:
    """Return the keys of a tested recipe, or without epsilon those of the model without noise."""
    case = {"members": MEMBERS, "mechanism": "none" if epsilon is None else "dp-sgd", "load": "equal"}
    return case if epsilon is None else {**case, "epsilon": epsilon}


# ---- running --------------------------------------------------------------------------------------------------------


def run_grid(results: Results, cells: Sequence[GridCell], data: Data, until: float) -> None:
    """Measure the cells that are not measured yet, one after another. Raises: OutOfTime."""
    for cell in cells:
        if not results.done(cell.case(LIMITS[-1]), cell.seed):
            if time.monotonic() > until:
                raise OutOfTime(f"before {cell.case(LIMITS[-1])}")
            results.open(SEEDS)
            with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
                for case, figures in measure_grid(cell, data, Path(scratch), until=until):
                    if not results.done(case, cell.seed):
                        results.add(case, figures, seed=cell.seed)
        for limit in LIMITS:
            summarise(results, cell.case(limit), SEEDS, keep=_KEPT)


def run_suggested(searched: Results, compared: Results, validated: Data, until: float) -> None:
    """Measure what the written rules propose beside the best recipe of the search. Raises: OutOfTime.

    Args:
        searched: lines of the search.
        compared: lines of this part, which are added to.
        validated: has the validation rows as its test.
    """
    # All epsilons of a seed come before the next seed, so that a run that ends early has a figure for each epsilon.
    for seed in SUGGESTED_SEEDS:
        for epsilon in EPSILONS:
            proposed = suggested(epsilon, entries_of(GLOVE))
            for recipe in (proposed, winner(searched, epsilon, proposed)):
                case = {**tested_case(epsilon), "recipe": recipe.as_json()}
                if compared.done(case, seed):
                    continue
                if time.monotonic() > until:
                    raise OutOfTime(f"before {case}")
                compared.open(SUGGESTED_SEEDS)
                with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
                    first, *_ = measure_recipe(recipe, epsilon, validated, Path(scratch), seed)
                compared.add(case, [replace(first, name="validation_accuracy")], seed=seed)


def run_dp_sgd(results: Results, searched: Results, data: Data, until: float) -> None:
    """Search recipes, choose, and test. Raises: OutOfTime."""
    tested, validated = data.without(HELD_BACK)

    def measured(into: Results, case: Case, seed: int, figures: Callable[[Path], list[Figure]]) -> float:
        if not into.done(case, seed):
            if time.monotonic() > until:
                raise OutOfTime(f"before {dict(case)}")
            into.open(SEEDS)
            with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
                into.add(case, figures(Path(scratch)), seed=seed)
        return float(into.done(case, seed)[0]["value"])

    def run(recipe: Recipe, epsilon: float, seed: int) -> float:
        def figures(folder: Path) -> list[Figure]:
            first, *_ = measure_recipe(recipe, epsilon, validated, folder, seed)
            return [replace(first, name="validation_accuracy")]

        return measured(searched, {**tested_case(epsilon), "recipe": recipe.as_json()}, seed, figures)

    chosen = search(run)
    cases = [(epsilon, chosen[EPSILONS[-1] if epsilon is None else epsilon]) for epsilon in (*EPSILONS, None)]
    # All epsilons of a seed come before the next seed, so that a run that ends early has a figure for each epsilon.
    for seed in SEEDS:
        for epsilon, recipe in cases:

            def figures(folder: Path, recipe: Recipe = recipe, at: float | None = epsilon, s: int = seed) -> Any:
                return measure_recipe(recipe, at, tested, folder, s)

            measured(results, tested_case(epsilon), seed, figures)
            summarise(results, tested_case(epsilon), SEEDS, keep=_KEPT)


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options: argparse.ArgumentParser = parser("institutional.dp")
    options.add_argument("--part", nargs="*", default=["dp-sgd", "grid"], choices=["dp-sgd", "grid", "suggested"])
    options.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="after this many minutes, end the present cell and start no other",
    )
    chosen = options.parse_args(words)
    for vocabulary in (PIECES, GLOVE):
        check_data(vocabulary)
    results = open_results(BENCH, quick=chosen.quick)
    until = time.monotonic() + 60 * chosen.minutes
    if chosen.quick:
        _quick(results)
        return
    data = Data.trec()
    try:
        if "grid" in chosen.part:
            run_grid(results, GRID[:FEW_ROUNDS], data, until)
        if "suggested" in chosen.part:
            _, validated = data.without(HELD_BACK)
            run_suggested(open_results(SEARCH), open_results(SEARCH, revision=SUGGESTED_REVISION), validated, until)
        if "dp-sgd" in chosen.part:
            run_dp_sgd(results, open_results(SEARCH), data, until)
        if "grid" in chosen.part:
            run_grid(results, GRID, data, until)
    except OutOfTime as reached:
        print(json.dumps({"bench": BENCH, "out_of_time": str(reached)}), file=sys.stderr)


def _quick(results: Results) -> None:
    """Run a small model on few questions, with lots that reach the limit within a few rounds."""
    data = Data.trec(600)
    small = TextCNNModel(embedding=GLOVE.embedding, maps=8)
    cell = GridCell(3, 3.0, 128, model=small, vocabulary=GLOVE)
    run_grid(results, [cell], data, math.inf)
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        recipe = Recipe(maps=8, rounds=2, steps=5)
        results.add(tested_case(8.0), measure_recipe(recipe, 8.0, data, Path(scratch), 0), seed=0)


if __name__ == "__main__":
    main()
