"""Measures accuracy on TREC under differential privacy.

Two parts, both through the product's own training, noise, ring and averaging in one process (`simulation`).

`grid`: the paper's Algorithm 1 (`gaussian-update`) with its TextCNN, which has 4.6 million parameters here: H = 50
epochs, E = 4, batches of 64, Adam 0.001, dropout 0.5, delta 1e-5. The paper does not say its C; it is 1 here, fixed
before anything was run. Each member accounts for itself, the paper's way, and sends while what it has spent is below E
(Algorithm 1 asks before each lot); it ends after H epochs of its own lots. The training ends when fewer than two
members send. A run with E = 4 goes through the versions where one with E = 1 or 2 would have stopped, so their
accuracies are taken from the same run. No figure is a target: noise of length sigma C sqrt(d) on a change of length C
at most leaves nothing to learn from, and a result near the paper's would mean that noise is missing.

Two epsilons stand side by side. The paper's: noise multiplier sigma, with the moments accountant's own conversion
(Abadi et al. 2016, theorem 2), which gives
the paper's numbers of rounds to within one (117 and 475 for E = 1 and 2 where it has 117 and 476; 109 and 28 for lots
of 512 and 1,024 where it has 108 and 27). The sound one: changes of neighbouring data sets lie up to 2 C apart, so the
multiplier is sigma / 2 (`Protection.event`), by PLD. Both are for add-remove neighbours and the member that spent most.

`dp-sgd`: what can be had at a true epsilon of 1, 2, 4, 8 with three equal members. The noise multiplier is the
smallest with which a member's empty ledger admits all rounds (`calibration`). Everything else is chosen on 500
questions of the training data that nobody trains on: axis by axis at epsilon 4 (`AXES`, each around the best so far),
then the best three at every epsilon. Only then are the chosen recipes tested, with three seeds. The
search itself is not accounted for: its epsilon is that of each training, as is usual in this field.
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
from learning.accounting.filter import Limit
from learning.accounting.planning import noise_to_signal
from learning.accounting.renyi import ORDERS, renyi
from learning.accounting.spend import epsilon_pld
from learning.mechanisms.protection import OwnNumbers, protection_of
from learning.text.data import Example, read_examples
from tacit.job import Aggregation, JobSpec, Rounds, Training, VocabularyFile
from tacit.mechanism import DpSgd, GaussianUpdate, NoMechanism
from tacit.model import TextCNNModel

__all__ = ["AXES", "Data", "GridCell", "Recipe", "abadi_epsilon", "deal_by", "max_releases", "measure_grid", "search"]

BENCH, SEARCH = "institutional_dp", "institutional_dp_search"

DELTA = 1e-5
EPOCHS = 50  # H of the paper.
LIMITS = (1.0, 2.0, 4.0)  # E of the paper.
CLIP = 1.0  # C, which the paper does not say.
POINTS = 24  # Of a learning curve.

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
# Beside a mean over seeds, as of the first.
_KEPT = ("paper", "recipe", "planned")


class OutOfTime(Exception):
    """The minutes that were given are over; what was measured stands."""


@dataclass(frozen=True)
class Data:
    """Training examples, in the file's order; what versions are tested on; the labels."""

    train: Sequence[Example]
    test: Sequence[Example]
    labels: tuple[str, ...]

    @classmethod
    def trec(cls, rows: int | None = None) -> "Data":
        """TREC's own split, or its first `rows` training questions."""
        train = read_examples(TREC / "train.jsonl.gz")[:rows]
        return cls(
            train, read_examples(TREC / "test.jsonl.gz"), tuple(sorted({str(example.label) for example in train}))
        )

    def without(self, held_back: int) -> tuple["Data", "Data"]:
        """The same data less a validation part, drawn from a fixed seed: (tested on the test set, on that part)."""
        order = list(range(len(self.train)))
        random.Random(SPLIT_SEED).shuffle(order)
        part = [self.train[place] for place in order[:held_back]]
        rest = [self.train[place] for place in order[held_back:]]
        return replace(self, train=rest), replace(self, train=rest, test=part)


def deal_by(examples: Sequence[Example], shares: Sequence[int], seed: int) -> list[list[Example]]:
    """Parts in the proportion of `shares`, in an order drawn from the seed; equal shares as `institutional.deal`."""
    if len(set(shares)) == 1:
        order = deal([str(place) for place in range(len(examples))], len(shares), seed)
        return [[examples[int(place)] for place in part] for part in order]
    places = list(range(len(examples)))
    random.Random(seed).shuffle(places)
    ends = [round(len(places) * sum(shares[: number + 1]) / sum(shares)) for number in range(len(shares))]
    return [[examples[place] for place in places[first:end]] for first, end in zip([0, *ends[:-1]], ends, strict=True)]


# ---- accounting as the paper does -----------------------------------------------------------------------------------


def abadi_epsilon(multiplier: float, rate: float, releases: int, delta: float = DELTA) -> float:
    """The moments accountant's epsilon of so many sampled Gaussians: min over alpha of divergence + ln(1 / delta) /
    (alpha - 1) (Abadi et al. 2016, theorem 2), with this project's divergences and orders.
    """
    if not releases:
        return 0.0
    above = np.array(ORDERS) - 1
    return float((releases * _divergence(multiplier, rate) - math.log(delta) / above).min())


@cache
def _divergence(multiplier: float, rate: float) -> Any:
    return renyi(SampledGaussian(multiplier=multiplier, rate=rate), "add-remove")


def max_releases(multiplier: float, rate: float, limit: float) -> int:
    """Releases of a member that sends while its epsilon, the paper's, is below the limit. At most 50 / rate: H = 50."""
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
    """The job's bundle, made in `folder` once and read back."""
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
    """One training of the paper's. lot: the same for all; none: `rate` of each member's own part."""

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
        """As a case names it: `equal`, or the shares."""
        return ":".join(map(str, self.shares)) or "equal"

    def case(self, limit: float) -> dict[str, Any]:
        """The keys that name the training up to this limit."""
        return {
            "members": self.members,
            "mechanism": "gaussian-update",
            "sigma": self.sigma,
            "lot": self.lot or f"{self.rate:g} N",
            "load": self.load,
            "limit": limit,
        }

    def lot_of(self, examples: int) -> int:
        """A member's lot."""
        return self.lot or round(self.rate * examples)

    def spec(self, labels: Sequence[str], smallest: int) -> JobSpec:
        """The job; members with other lots than the smallest one's set their own."""
        return JobSpec(
            name="trec",
            labels=tuple(labels),
            model=self.model,
            training=Training(epochs=1, batch=64, optimiser="adam", learning_rate=0.001),
            mechanism=GaussianUpdate(noise_multiplier=self.sigma, clip=CLIP, lot=self.lot_of(smallest)),
            rounds=Rounds(min_members=MIN_COHORT, target_members=self.members),
            # Two members that go on when the third has stopped: n_C = 0, as their policies would have to say.
            aggregation=Aggregation(assumed_corrupt=0),
            seed=self.seed,
            vocabulary=_files(self.vocabulary),
        )

    def parts(self, data: Data) -> list[list[Example]]:
        """Each member's examples."""
        return deal_by(data.train, self.shares or (1,) * self.members, self.seed)

    def releases(self, examples: int, limit: float) -> int:
        """Of a member with so many examples, under a limit."""
        return max_releases(self.sigma, self.lot_of(examples) / examples, limit)


# In the order of what they tell for their time: the few rounds of great lots, then the core cell.
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
    # The same lot whatever the load (section 3.3's first way): the smallest member stops while the others go on.
    GridCell(3, 4.0, 256, shares=(1, 2, 4)),
    *(GridCell(members, sigma) for sigma in (2.0, 8.0) for members in (2, 4)),
)


def measure_grid(
    cell: GridCell, data: Data, folder: Path, *, until: float = math.inf
) -> Iterator[tuple[Case, list[Figure]]]:
    """Trains a cell and yields its figures at each limit, as soon as that is reached.

    until: on time.monotonic()'s clock. Raises: OutOfTime: it came before the last limit.
    """
    parts = cell.parts(data)
    smallest = min(map(len, parts))
    bundle = bundle_of(cell.spec(data.labels, smallest), folder)
    tester = Tester(folder / "bundle", data.test)
    # A lower limit is a point of the same run only where all members would have stopped there together.
    stops = {limit: [cell.releases(len(part), limit) for part in parts] for limit in LIMITS}
    limits = [limit for limit, counts in stops.items() if limit == LIMITS[-1] or max(counts) - min(counts) <= 1]
    final = limits[-1]
    members = [
        Member(part, OwnNumbers(lot=cell.lot_of(len(part))), releases)
        for part, releases in zip(parts, stops[final], strict=True)
    ]
    # The training ends when the last but one stops.
    whole = sorted(stops[final])[-MIN_COHORT]
    ends = {limit: min(*stops[limit], whole) if limit != final else whole for limit in limits}
    looked_at = {1, *ends.values(), *(math.ceil(whole * number / POINTS) for number in range(1, POINTS + 1))}
    curve: list[list[float]] = []
    seen: list[Round] = []
    began = time.monotonic()
    for done in federate(bundle, members, whole):
        if done.number in looked_at:
            curve.append([done.number, tester.accuracy(bundle.manifest.encode(done.values))])
        # Without the version: a view, even of nothing, would keep all of it.
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
    """Length of the noise over the clipped change's, median of what was sent, in the mean of so many updates."""
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
    """What is tuned. lot: none is all of a member's data, each step. Defaults are where the search begins: at a third
    of a member's data a step costs a third of what it does at all of it, and needs little more noise for its signal.
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
        """As it stands in results."""
        return {**asdict(self), "widths": list(self.widths)}

    def model(self, vocabulary: Vocabulary) -> TextCNNModel:
        """The job's model table."""
        return TextCNNModel(
            embedding=vocabulary.embedding,
            widths=self.widths,
            maps=self.maps,
            dropout=self.dropout,
            freeze_embedding=self.frozen,
        )

    def multiplier(self, epsilon: float, examples: int) -> float:
        """The smallest with which the empty ledger of a member with so many examples admits all rounds."""
        lot = min(self.lot or examples, examples)

        def event(multiplier: float) -> SampledGaussian:
            return SampledGaussian(multiplier=multiplier, rate=lot / examples, steps=self.steps)

        return calibrate(event, self.rounds, Limit(epsilon, DELTA))


def _step_axis(best: Recipe) -> list[Recipe]:
    """Optimiser, clip and rate. Where every gradient is clipped, clip times rate is what plain SGD goes by."""
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
    """Steps a round, rounds, lots."""
    found = [replace(best, steps=steps, rounds=rounds) for steps, rounds in ((2, 50), (20, 5), (10, 30))]
    return found + [replace(best, lot=lot) for lot in (128, 1024, None)]


def _rate_axis(best: Recipe) -> list[Recipe]:
    return [replace(best, learning_rate=min(10.0, round(best.learning_rate * by, 6))) for by in (0.4, 0.63, 1.6)]


# One after another, each around the best of all before: 27 trainings at most.
AXES: tuple[Callable[[Recipe], list[Recipe]], ...] = (_step_axis, _model_axis, _work_axis, _rate_axis)


def measure_recipe(
    recipe: Recipe, epsilon: float | None, data: Data, folder: Path, seed: int, vocabulary: Vocabulary = GLOVE
) -> list[Figure]:
    """Trains a recipe with three equal members and tests its last version on `data.test`.

    epsilon: none is the recipe's model without noise, trained as the jobs' defaults have it.
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
            # The batch is only how much is in memory at a time.
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
    """The recipe of each epsilon. run: validation accuracy of (recipe, epsilon, seed)."""
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


def _best(scores: Mapping[Recipe, float]) -> Recipe:
    """The first of the highest: equal scores do not depend on anything else."""
    return max(scores, key=lambda recipe: scores[recipe])


def tested_case(epsilon: float | None) -> dict[str, Any]:
    """The keys of a tested recipe; without epsilon, of the model without noise."""
    case = {"members": MEMBERS, "mechanism": "none" if epsilon is None else "dp-sgd", "load": "equal"}
    return case if epsilon is None else {**case, "epsilon": epsilon}


# ---- running --------------------------------------------------------------------------------------------------------


def run_grid(results: Results, cells: Sequence[GridCell], data: Data, until: float) -> None:
    """The cells that this code has not measured, one after another. Raises: OutOfTime."""
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


def run_dp_sgd(results: Results, searched: Results, data: Data, until: float) -> None:
    """Search, choice, test. Raises: OutOfTime."""
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
    # All of a seed before the next one: a run that ends early has a figure for each epsilon.
    for seed in SEEDS:
        for epsilon, recipe in cases:

            def figures(folder: Path, recipe: Recipe = recipe, at: float | None = epsilon, s: int = seed) -> Any:
                return measure_recipe(recipe, at, tested, folder, s)

            measured(results, tested_case(epsilon), seed, figures)
            summarise(results, tested_case(epsilon), SEEDS, keep=_KEPT)


def main(words: Sequence[str] | None = None) -> None:
    """Command line; `words` without the program's name."""
    options: argparse.ArgumentParser = parser("institutional.dp")
    options.add_argument("--part", nargs="*", default=["dp-sgd", "grid"], choices=["dp-sgd", "grid"])
    options.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="start no cell, and end the present one, after this many minutes",
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
        if "dp-sgd" in chosen.part:
            run_dp_sgd(results, open_results(SEARCH), data, until)
        if "grid" in chosen.part:
            run_grid(results, GRID, data, until)
    except OutOfTime as reached:
        print(json.dumps({"bench": BENCH, "out_of_time": str(reached)}), file=sys.stderr)


def _quick(results: Results) -> None:
    """A small model, few questions, lots that reach the limit within rounds."""
    data = Data.trec(600)
    small = TextCNNModel(embedding=GLOVE.embedding, maps=8)
    cell = GridCell(3, 3.0, 128, model=small, vocabulary=GLOVE)
    run_grid(results, [cell], data, math.inf)
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        recipe = Recipe(maps=8, rounds=2, steps=5)
        results.add(tested_case(8.0), measure_recipe(recipe, 8.0, data, Path(scratch), 0), seed=0)


if __name__ == "__main__":
    main()
