"""Measures the trained quality of FedPrompt: searches rates, trains cells, and records the figures.

Guarantees: only rates are chosen, by `--search` on validation rows. The test rows are scored after every round, and no
choice uses the scores. Accuracies are those of the last round.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.library.record import RESULTS, Figure, Results, read_lines, summarise
from benchmarks.library.simulation import Member, corpora_of
from benchmarks.prompts.cells import (
    SEEDS,
    Cell,
    Rate,
    Recipe,
    SearchUnfinished,
    cells_of,
    choices_of,
    rate_of,
    rate_with,
    searched_as,
)
from benchmarks.prompts.setup import (
    BATCH,
    LABELS,
    HeadRecipe,
    accuracy,
    backbone_folder,
    head_facts,
    prompted_bundle,
    sst2,
)
from benchmarks.prompts.training import begun

__all__ = ["BENCH", "SEARCH", "measure", "run", "search"]

BENCH, SEARCH = "fedprompt", "fedprompt_search"
# Goal: prompts are at most this much below centralised prompt tuning.
POINTS = 0.03
# Fields of a mean over seeds: those that all seeds share, and those that are averaged too.
_KEPT = ("paper", "recipe", "rounds", "pld", "delta")
_AVERAGED = ("validation", "late", "centralised", "centralised_late", "target", "cpu")


# ---- one cell -------------------------------------------------------------------------------------------------------


# Last rounds whose mean score is given beside the last one's: a federated version is a mean of ten, while a centralised
# one is a single point of a path that Adam's constant rate keeps moving.
LATE = 5


def measure(cell: Cell, recipe: Recipe, rate: Rate, seed: int) -> list[Figure]:
    """Train a cell and score it after every round."""
    began, spent = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        trained = begun(cell, recipe, rate, seed, Path(scratch))
        curve: list[list[float]] = []
        for number, score in enumerate(trained.rounds, start=1):
            curve.append([number, round(score("test"), 5)])
        validation = score("validation")
    late = statistics.mean(score for _, score in curve[-LATE:])
    more: dict[str, Any] = {
        "validation": round(validation, 5),
        "late": round(late, 5),
        "recipe": {
            **rate.stated,
            "tried": rate.tried,
            "rounds": recipe.rounds,
            "members": recipe.members,
            "batch": BATCH,
            "precision": _precision(cell, recipe),
        },
        "curve": curve,
    }
    if trained.backbone is not None:
        more["digest"] = trained.backbone
    if cell.paper is not None:
        more["paper"] = round(cell.paper / 100, 4)
    figures = [Figure("test_accuracy", curve[-1][1], more=more), Figure("values_per_round", trained.values)]
    if trained.sent is not None:
        figures.append(Figure("bytes_per_round", trained.sent, "B"))
    seconds = {"cpu": round(time.process_time() - spent, 1)}
    return [*figures, *trained.promised, Figure("seconds", round(time.monotonic() - began, 1), "s", more=seconds)]


# ---- running --------------------------------------------------------------------------------------------------------


def run(
    results: Results,
    *,
    seeds: Sequence[int],
    quick: bool,
    until: float | None,
    parts: Sequence[str] = ("quality",),
    workers: int = 1,
    wanted: Callable[[Cell], bool] = lambda _: True,
) -> None:
    """Measure the cells of these parts that the results lack, all of a seed before the next seed.

    Args:
        until: latest start of a cell, by `time.monotonic()`.
        workers: number of processes, each with its own cell.
        wanted: selects cells of these parts.
    """
    tried = [] if quick else searched()
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        recipe = _quick(Path(scratch)) if quick else Recipe()
        if "head" in parts:
            fit(results, recipe)
        found = (cell for part in parts if part != "head" for cell in (_QUICK if quick else cells_of(part)))
        cells = list(dict.fromkeys(filter(wanted, found)))
        # Made here, so that several processes do not make it at once.
        if any(cell.task == "cloze" for cell in cells):
            backbone_folder("mlm", recipe.cache, recipe.head)
        backbone_folder("plain", recipe.cache)
        for seed in seeds:
            left = [cell for cell in cells if not results.done(cell.case, seed)]
            for cell, figures in _measured(left, recipe, tried, seed, until, workers):
                results.open(seeds)
                results.add(cell.case, [_against(results, cell, each, seed) for each in figures], seed=seed)
            for cell in cells:
                summarise(results, cell.case, SEEDS, keep=_KEPT, averaged=_AVERAGED)


def _measured(
    cells: Sequence[Cell],
    recipe: Recipe,
    tried: Sequence[Mapping[str, Any]],
    seed: int,
    until: float | None,
    workers: int,
) -> Iterator[tuple[Cell, list[Figure]]]:
    """Yield each cell as soon as it is measured. A failure is raised after all other cells."""
    limit = math.inf if until is None else until
    if workers == 1:
        for cell in cells:
            if time.monotonic() > limit:
                return
            yield cell, measure(cell, recipe, rate_of(cell, tried), seed)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(_unless_late, cell, recipe, rate_of(cell, tried), seed, limit): cell for cell in cells}
        failed: list[BaseException] = []
        for job in as_completed(jobs):
            if (error := job.exception()) is not None:
                # Raised later, so that the other cells' hours are not lost.
                print(f"failed: {jobs[job]}: {error!r}", flush=True)
                failed.append(error)
            elif (figures := job.result()) is not None:
                yield jobs[job], figures
        if failed:
            raise failed[0]


def _unless_late(cell: Cell, recipe: Recipe, rate: Rate, seed: int, until: float) -> list[Figure] | None:
    return None if time.monotonic() > until else measure(cell, recipe, rate, seed)


def _against(results: Results, cell: Cell, figure: Figure, seed: int) -> Figure:
    """Add the centralised accuracy of the same seed to a figure, if it was measured, and the target.

    The last measured line counts; another process may have written it.
    """
    if figure.name != "test_accuracy" or cell.method != "prompt-tuning" or cell.epsilon is not None:
        return figure
    lines = results.lines if results.path is None else read_lines(results.path)
    wanted = {"case": cell.beside.case, "seed": seed, "figure": "test_accuracy"}
    found = [line for line in lines if all(line.get(key) == value for key, value in wanted.items())]
    if not found:
        return figure
    value, late = found[-1]["value"], found[-1]["late"]
    beside = {"centralised": value, "centralised_late": late, "target": round(max(value, late) - POINTS, 5)}
    return replace(figure, more={**figure.more, **beside})


def fit(results: Results, recipe: Recipe) -> None:
    """Fit the masked-word head if it is missing, and record its accuracy."""
    case = {"method": "head", "backbone": "minilm"}
    if results.done(case, recipe.head.seed):
        return
    facts = head_facts(backbone_folder("mlm", recipe.cache, recipe.head))
    results.open([recipe.head.seed])
    more = {key: facts[key] for key in ("masked_loss", "commonest_word", "steps", "curve", "places", "recipe")}
    figures = [
        Figure("masked_accuracy", facts["masked_accuracy"], more=more),
        Figure("seconds", facts["seconds"], "s", more={"cpu": facts["cpu_seconds"]}),
    ]
    results.add(case, figures, seed=recipe.head.seed)


# ---- the search -----------------------------------------------------------------------------------------------------

# A trial is a fraction of a cell, and compares how rates start. A cloze starts on a plateau of more than a hundred
# steps at any rate, so its trial is longer, with fewer members.
_TRIAL = Recipe(members=4, rounds=3)
_CLOZE_TRIAL = Recipe(members=3, rounds=6)
# Momentum works over rounds: six of them would show its start, but not where it leads.
_MOMENTUM_TRIAL = Recipe(members=3)
_TEMPLATES = ("{text} It was {mask}.", "{text} is {mask}.")
_WORDS = (("terrible", "great"), ("bad", "good"))


def searched() -> list[dict[str, Any]]:
    """Return all trials, by any version of the code, because a choice stays made. To choose again, delete the file."""
    lines = read_lines(RESULTS / f"{SEARCH}.jsonl")
    return [line for line in lines if line.get("figure") == "validation_accuracy" and "rate" in line["case"]]


def search(
    results: Results, parts: Sequence[str], *, until: float | None, wanted: Callable[[Cell], bool] = lambda _: True
) -> None:
    """Measure validation accuracies of other rates, and of other words before any training. It uses no test row.

    Raises:
        SearchUnfinished: a bound or momentum needs a rate that is not chosen yet.
    """
    limit = math.inf if until is None else until
    cells = list(dict.fromkeys(searched_as(cell) for part in parts for cell in cells_of(part) if wanted(cell)))
    if any(cell.task == "cloze" for cell in cells):
        _search_words(results)
    for cell in cells:
        for rate in choices_of(cell):
            case = {**cell.case, "rate": rate}
            if results.done(case, 0):
                continue
            if time.monotonic() > limit:
                return
            tried = rate_with(cell, rate, searched())
            if tried.rates_tried == 0:
                raise SearchUnfinished("a bound or a momentum needs a chosen rate; run --search for the rate first")
            results.open([0])
            results.add(case, [_trial(cell, _recipe_of_trial(cell), tried)], seed=0)


def _recipe_of_trial(cell: Cell) -> Recipe:
    if cell.server != "fedavg":
        return _MOMENTUM_TRIAL
    return _CLOZE_TRIAL if cell.task == "cloze" else _TRIAL


def _trial(cell: Cell, recipe: Recipe, rate: Rate) -> Figure:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        *_, score = begun(cell, recipe, rate, 0, Path(scratch)).rounds
        value = score("validation")
    more = {**rate.stated, "rounds": recipe.rounds, "members": recipe.members, "precision": _precision(cell, recipe)}
    more["seconds"] = round(time.monotonic() - began, 1)
    return Figure("validation_accuracy", round(value, 5), more=more)


def _precision(cell: Cell, recipe: Recipe) -> str:
    return recipe.precision if cell.prompted else "float32"


def _search_words(results: Results) -> None:
    """Measure how a cloze answers with the prompt that every job starts from."""
    backbone = backbone_folder("mlm")
    for template in _TEMPLATES:
        for words in _WORDS:
            case = {"method": "untrained", "task": "cloze", "template": template, "words": list(words)}
            if results.done(case, 0):
                continue
            spoken = {label: (word,) for label, word in zip(LABELS, words, strict=True)}
            bundle = prompted_bundle(backbone, task="cloze", learning_rate=0.3, template=template, words=spoken)
            (corpus,) = corpora_of(bundle, [Member(sst2(0).validation)])
            value = accuracy(bundle, bundle.manifest.decode(bundle.weights), corpus)
            results.open([0])
            results.add(case, [Figure("validation_accuracy", round(value, 5))], seed=0)


# ---- a small case ---------------------------------------------------------------------------------------------------

_SMALL: Mapping[str, Any] = {"tokens": 4, "steps": 2}
_QUICK = (
    Cell("centralised", partition="pooled", **_SMALL),
    Cell("prompt-tuning", partition="dirichlet", **_SMALL),
    Cell("prompt-tuning", "cloze", epsilon=1000.0, **_SMALL),
    Cell("frozen", tokens=None, steps=2),
    Cell("fine-tuning", tokens=None, steps=2),
)


def _quick(folder: Path) -> Recipe:
    """Return a recipe of four members with few rows, and a head that has read almost nothing."""
    head = HeadRecipe(rows=40, held=8, batch=32, steps=4, look=2)
    return Recipe(members=4, rounds=2, rows=400, scored=48, head=head, cache=folder)
