"""Measures classifiers trained on synthetic text beside private training.

As in section 5.4 of DP-RVAE, ten members with equal parts take part in every round, delta is 1e-5, and the comparison
is with the same classifier trained federatedly under DP-SGD. Different are the data (SST-2's 6,920 training sentences
and TREC's questions; the paper's tweets and reviews are not available), the classifier (a BiLSTM over GloVe instead of
DistilBERT), and the epsilon, which is that of each member's ledger for every use of its texts.

Methods, by `epsilon` (none: without noise):

    majority    the most common label for every text
    raw         the classifier trained centrally on all members' texts: the ceiling
    dp-sgd      the classifier trained federatedly on the members' own texts
    synthetic   an autoencoder trained federatedly (variant sound), then texts from its prior, then the classifier
                trained centrally. `members`: a thousand texts of each member, from the model that it sent last, with
                labels by its noisy histogram. `operator`: as many in all from the last global model, with equally many
                of each label
    published   the paper's own variant, texts rewritten one by one. No differential privacy guarantee

Both methods have the same budget: `synthetic` spends it on the histogram and all steps, `dp-sgd` on all steps. If an
autoencoder trains, each member's part has one of ten planted texts of random words. Validation rows (SST-2's dev set,
500 of TREC's training questions) choose recipes and the epoch or round that counts. No member has them, and choosing is
not accounted for.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.record import Case, Figure, Results, open_results, parser, summarise
from benchmarks.synthesis.cells import BY_ROUND, CELLS, DATASETS, KEPT, METHODS, SEEDS, Cell, Plan, quick_plan
from benchmarks.synthesis.judge import (
    Fitted,
    Judge,
    classifier_bundle,
    distance_of,
    fit_centrally,
    fit_federatedly,
    majority_accuracy,
    shortened,
    with_planted,
)
from benchmarks.synthesis.setup import (
    CACHE,
    Task,
    Trained,
    canaries,
    corpora_of_members,
    corpus_of_operator,
    dealt,
    exposures,
    perplexity,
    public_words_file,
    read_task,
    rewritten,
    rvae_bundle,
    spent_of,
    train_rvae,
)
from learning.synthesis.setting import NO_GUARANTEE
from learning.text.data import read_examples
from learning.text.examples import Example

__all__ = ["BENCH", "main", "measure", "released", "run"]

BENCH = "synthesis"
_ROUND_TEXTS = 3000
_SAMPLES = 2

Vector = NDArray[np.float32]
Measured = tuple[Case, list[Figure]]


# ---- one cell -------------------------------------------------------------------------------------------------------


def measure(
    cell: Cell, task: Task, plan: Plan, seed: int, folder: Path, keep: Path | None = None
) -> Iterator[Measured]:
    """Train a cell, and yield the figures of each of its cases. keep: file for the classifier that it releases."""
    began = time.process_time()
    if cell.method == "majority":
        yield cell.case(), [Figure("test_accuracy", round(majority_accuracy(task), 5))]
        return
    if cell.method in ("synthetic", "published"):
        yield from _measure_synthetic(cell, task, plan, seed, folder, keep)
        return
    if cell.method == "raw":
        judge = _judge(task, plan, seed, folder)
        fitted = fit_centrally(judge, task.train, plan.classifier, seed)
        figures = [_accuracy(fitted)]
    else:
        parts = dealt(task, plan.rvae.members, seed)
        fitted, judge = fit_federatedly(task, parts, plan.classifier, cell.epsilon, seed, folder)
        figures = [_accuracy(fitted, recipe=plan.classifier.as_json()), _by_round(fitted)]
        figures += _of_epsilon(cell, fitted.events, judge)
    _keep(keep, fitted)
    yield cell.case(), [*figures, _seconds(began)]


def _measure_synthetic(
    cell: Cell, task: Task, plan: Plan, seed: int, folder: Path, keep: Path | None
) -> Iterator[Measured]:
    began = time.process_time()
    recipe, published = plan.rvae, cell.method == "published"
    if published:
        # The paper's decoder gets the label only through its input.
        paper = {"variant": "published", "label_weight": 0.0}
        recipe = replace(recipe, model=recipe.model.model_copy(update=paper))
    lists = public_words_file(recipe.model.words - 2, plan.cache).read_text(encoding="utf-8").split("\n")
    planted, *others = _portions(canaries(recipe.members + plan.candidates, lists), recipe.members)
    parts = with_planted(dealt(task, recipe.members, seed), planted, task.labels)
    bundle = rvae_bundle(task, recipe, cell.epsilon, min(map(len, parts)), seed, folder / "rvae", plan.cache)
    trained = train_rvae(bundle, parts)
    trained_as = recipe.as_json(noised=cell.epsilon is not None)
    # Two classifiers: one is trained on the synthetic texts, one on the real ones.
    judge = _judge(task, plan, seed, folder / "classifier")
    real = fit_centrally(judge, task.train, plan.classifier, seed)
    if published:
        files = rewritten(trained, folder / "made", recipe.published)
    else:
        files = corpora_of_members(trained, folder / "made")
    made = [example for path in files for example in read_examples(path)]
    fitted = fit_centrally(judge, made, plan.classifier, seed)
    figures = [_accuracy(fitted, recipe=trained_as), *_of_texts(made, trained, planted, judge, real)]
    found = exposures(trained, planted, others[0])
    figures.append(Figure("exposure", round(statistics.mean(found), 3), "bits", more={"values": _rounded(found)}))
    if published:
        formula = round(recipe.published.formula_epsilon, 2)
        figures.append(Figure("formula_epsilon", formula, more={"promise": NO_GUARANTEE}))
    figures += _of_epsilon(cell, trained.events, trained)
    figures.append(Figure("perplexity", round(perplexity(trained, trained.versions[-1], task.validation), 2)))
    _keep(keep, fitted)
    yield cell.cases[0], [*figures, _seconds(began)]
    if published:
        return
    texts = recipe.texts * recipe.members
    path = corpus_of_operator(trained, trained.versions[-1], folder / "made", texts)
    made = list(read_examples(path))
    fitted = fit_centrally(judge, made, plan.classifier, seed)
    figures = [_accuracy(fitted, recipe=trained_as), *_of_texts(made, trained, planted, judge, real)]
    if (cell.dataset, cell.epsilon) == BY_ROUND:
        figures.append(_made_by_round(trained, judge, plan, seed, folder))
    yield cell.cases[1], figures


def _portions(rows: Sequence[str], first: int) -> tuple[list[str], list[str]]:
    return list(rows[:first]), list(rows[first:])


def _judge(task: Task, plan: Plan, seed: int, folder: Path) -> Judge:
    return Judge(classifier_bundle(task, plan.classifier, seed, folder, members=plan.rvae.members), task)


def _accuracy(fitted: Fitted, **more: Any) -> Figure:
    curve = [[number, round(test, 4)] for number, _, test in fitted.curve]
    more = {"validation": round(fitted.validation, 5), "best": fitted.best, "curve": curve, **more}
    return Figure("test_accuracy", round(fitted.test, 5), more=more)


def _by_round(fitted: Fitted) -> Figure:
    """Return the accuracy after the last round, with all rounds in the curve."""
    curve = [[number, round(test, 4)] for number, _, test in fitted.curve]
    return Figure("accuracy_by_round", curve[-1][1], more={"curve": curve})


def _made_by_round(trained: Trained, judge: Judge, plan: Plan, seed: int, folder: Path) -> Figure:
    curve = []
    for number, values in enumerate(trained.versions, start=1):
        path = corpus_of_operator(trained, values, folder / f"round-{number}", _ROUND_TEXTS)
        fitted = fit_centrally(judge, list(read_examples(path)), plan.classifier, seed)
        curve.append([number, round(fitted.test, 4)])
    return Figure("accuracy_by_round", curve[-1][1], more={"curve": curve, "texts": _ROUND_TEXTS})


def _of_texts(
    made: Sequence[Example], trained: Trained, planted: Sequence[str], judge: Judge, real: Fitted
) -> list[Figure]:
    """Measure how near synthetic texts are to the real ones, and how reliable their labels are."""
    texts = [example.text for example in made]
    training = [example.text for part in trained.parts for example in part]
    found = distance_of(texts, training, planted)
    samples = [
        {"label": label, "text": example.text}
        for label in trained.bundle.document.labels
        for example in [each for each in made if each.label == label][:_SAMPLES]
    ]
    counts = {label: sum(each.label == label for each in made) for label in trained.bundle.document.labels}
    return [
        Figure("rows", len(made), more={"labels": counts, "samples": samples}),
        Figure("label_agreement", round(judge.agreement(real.values, made), 5)),
        Figure("four_gram_overlap", round(found.overlap[3], 5), more={"ngrams": _rounded(found.overlap)}),
        Figure("longest_verbatim", found.longest, "words", more={"whole_texts": round(found.verbatim, 5)}),
        Figure("planted_reproduced", found.planted, "texts", more={"planted": len(planted)}),
    ]


def _of_epsilon(cell: Cell, events: Sequence[Any], trained: Trained | Judge) -> list[Figure]:
    """Return the epsilon in the report of a member's ledger. The gate's epsilon is the case's."""
    if cell.epsilon is None:
        return []
    multiplier = getattr(trained.bundle.document.mechanism, "noise_multiplier", None)
    spent = spent_of(events, cell.epsilon)
    return [Figure("epsilon_reported", round(spent, 4), more={"noise_multiplier": multiplier})]


def _seconds(began: float) -> Figure:
    return Figure("seconds", round(time.process_time() - began, 1), "CPU s")


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _keep(path: Path | None, fitted: Fitted) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.save(file, fitted.values)


# ---- running --------------------------------------------------------------------------------------------------------


def released_path(cell: Cell, seed: int, code: str, cache: Path = CACHE) -> Path:
    """Return the path of the classifier that a cell releases."""
    epsilon = "none" if cell.epsilon is None else f"{cell.epsilon:g}"
    return cache / f"synthesis-released-{code}-{cell.dataset}-{cell.method}-{epsilon}-{seed}.npy"


def released(results: Results, cell: Cell, task: Task, plan: Plan, seed: int) -> Vector:
    """Return the classifier that a cell releases, (d,), from the file of this code's measurement or trained now."""
    path = released_path(cell, seed, results.code, plan.cache)
    if not path.exists():
        _measured(results, cell, task, plan, seed, path)
    values: Vector = np.load(path, allow_pickle=False)
    return values


def _measured(results: Results, cell: Cell, task: Task, plan: Plan, seed: int, keep: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        for case, figures in measure(cell, task, plan, seed, Path(scratch), keep):
            if not results.done(case, seed):
                results.add(case, figures, seed=seed)


def run(results: Results, cells: Sequence[Cell], plan: Plan, seeds: Sequence[int], until: float) -> bool:
    """Measure the cells that are not measured yet, all of a seed before the next seed.

    Args:
        until: latest start of a cell, on the clock of time.monotonic().

    Returns:
        False if time ran out before the end.
    """
    for seed in seeds:
        for cell in cells:
            if not all(results.done(case, seed) for case in cell.cases):
                if time.monotonic() > until:
                    return False
                results.open(seeds)
                keep = released_path(cell, seed, results.code, plan.cache)
                _measured(results, cell, read_task(cell.dataset), plan, seed, keep)
            for case in cell.cases:
                summarise(results, case, SEEDS, keep=KEPT)
    return True


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options: argparse.ArgumentParser = parser("synthesis.quality")
    options.add_argument("--dataset", nargs="*", default=list(DATASETS), choices=DATASETS)
    options.add_argument("--method", nargs="*", default=list(METHODS), choices=METHODS)
    options.add_argument("--epsilon", type=float, nargs="*", help="only these epsilons; inf means without noise")
    options.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), choices=SEEDS)
    options.add_argument("--minutes", type=float, default=math.inf, help="start no cell after this many minutes")
    chosen = options.parse_args(words)
    import torch

    # Seconds are those of one core.
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * chosen.minutes
    results = open_results(BENCH, quick=chosen.quick)
    if chosen.quick:
        _quick(results)
        return
    cells = [
        cell
        for cell in CELLS
        if cell.dataset in chosen.dataset
        and cell.method in chosen.method
        and (chosen.epsilon is None or (cell.epsilon or math.inf) in chosen.epsilon)
    ]
    run(results, cells, Plan(), chosen.seeds, until)


def _quick(results: Results) -> None:
    """Measure every kind of cell once, with three members of 60 questions each, small models, and few rounds."""
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        plan = quick_plan(Path(scratch))
        task = shortened(read_task("trec"), 180)
        for cell in (
            Cell("trec", "majority"),
            Cell("trec", "raw"),
            Cell("trec", "dp-sgd", 5.0),
            Cell("trec", "synthetic", 5.0),
            Cell("trec", "synthetic"),
            Cell("trec", "published"),
        ):
            _measured(results, cell, task, plan, 0, released_path(cell, 0, results.code, plan.cache))


if __name__ == "__main__":
    main()
