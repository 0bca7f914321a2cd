"""Tries recipes for synthetic text on validation rows.

For the autoencoder it measures the validation accuracy of a classifier trained on texts that the operator generated
from the last global model. It varies the guidance by the label, the server optimiser (FedAvg and FedAdam: FedOpt, Reddi
et al. 2021) and the weight of the label. For the classifier under DP-SGD it measures its accuracy. `RvaeRecipe` and
`ClassifierRecipe` should have the best of each. Differences below two points are within the error of 872 rows.
"""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.library.record import Figure, Results, open_results, parser
from benchmarks.synthesis.judge import ClassifierRecipe, Judge, classifier_bundle, fit_centrally, fit_federatedly
from benchmarks.synthesis.setup import (
    RvaeRecipe,
    Task,
    corpus_of_operator,
    dealt,
    perplexity,
    read_task,
    rvae_bundle,
    train_rvae,
)
from learning.text.data import read_examples
from tacit.server_optimiser import FedAdamServer

__all__ = ["CLASSIFIERS", "RVAES", "main", "search"]

DATASET = "sst2"
EPSILON = 5.0
GUIDANCES = (0.0, 1.0, 3.0)
TEXTS = 6000


def _weighing(label_weight: float, recipe: RvaeRecipe | None = None) -> RvaeRecipe:
    chosen = recipe or RvaeRecipe()
    return replace(chosen, model=chosen.model.model_copy(update={"label_weight": label_weight}))


# The same number of steps, so the same noise: local Adam with an average, or plain sums that the server's Adam scales.
_ADAM = FedAdamServer(learning_rate=0.01, beta_2=0.9, tau=1e-4)
_SERVER_ADAM = RvaeRecipe(rounds=20, steps=1, optimiser="sgd", learning_rate=1.0, server=_ADAM)
RVAES = (
    (RvaeRecipe(), 5.0),
    (_weighing(0.0), 5.0),
    (_SERVER_ADAM, 5.0),
    (RvaeRecipe(), 1.0),
    (_SERVER_ADAM, 1.0),
    (_weighing(16.0), 5.0),
    (_weighing(16.0, _SERVER_ADAM), 5.0),
)
CLASSIFIERS = (
    *(ClassifierRecipe(optimiser="sgd", private_rate=rate) for rate in (1.5, 4.0, 8.0)),
    ClassifierRecipe(optimiser="adam", private_rate=0.01),
)


def search(results: Results, until: float) -> None:
    """Try what is not tried yet, the autoencoder's recipes first. until: on the clock of time.monotonic()."""
    task = read_task(DATASET)
    for recipe, epsilon in RVAES:
        _try(results, "rvae", epsilon, recipe.as_json(), until, partial(rvae_figure, task, recipe, epsilon))
    for tried in CLASSIFIERS:
        _try(results, "classifier", EPSILON, tried.as_json(), until, partial(classifier_figure, task, tried))


def _try(
    results: Results, model: str, epsilon: float, recipe: dict[str, Any], until: float, figure: Callable[[Path], Figure]
) -> None:
    case = {"dataset": DATASET, "model": model, "epsilon": epsilon, "recipe": recipe}
    if results.done(case, 0) or time.monotonic() > until:
        return
    results.open([0])
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        results.add(case, [figure(Path(scratch))], seed=0)


def rvae_figure(
    task: Task, recipe: RvaeRecipe, epsilon: float, folder: Path, texts: int = TEXTS, **where: Any
) -> Figure:
    """Measure the validation accuracy after training on the operator's texts, at the recipe's guidance.

    Further fields give it at other guidances, and the perplexity of validation sentences by round, from the start on.
    """
    parts = dealt(task, recipe.members, 0)
    bundle = rvae_bundle(task, recipe, epsilon, min(map(len, parts)), 0, folder / "rvae", **where)
    trained = train_rvae(bundle, parts)
    start = bundle.manifest.decode(bundle.weights)
    curve = [
        [number, round(perplexity(trained, values, task.validation), 2)]
        for number, values in enumerate((start, *trained.versions))
    ]
    classifier = ClassifierRecipe()
    # A judge also scores test rows; here validation rows replace them.
    task = replace(task, test=task.validation)
    judge = Judge(classifier_bundle(task, classifier, 0, folder / "classifier", members=recipe.members), task)
    found = {}
    for guidance in sorted({*GUIDANCES, recipe.guidance}):
        place = folder / f"made-{guidance:g}"
        path = corpus_of_operator(trained, trained.versions[-1], place, texts, guidance=guidance)
        found[guidance] = round(fit_centrally(judge, list(read_examples(path)), classifier, 0).validation, 5)
    more = {"by_guidance": [list(each) for each in found.items()], "perplexity": curve[-1][1], "curve": curve}
    return Figure("validation_accuracy", found[recipe.guidance], more=more)


def classifier_figure(task: Task, recipe: ClassifierRecipe, folder: Path) -> Figure:
    """Measure the validation accuracy of the best round; further fields give all rounds."""
    fitted, _ = fit_federatedly(task, dealt(task, 10, 0), recipe, EPSILON, 0, folder)
    curve = [[number, round(validation, 4)] for number, validation, _ in fitted.curve]
    return Figure("validation_accuracy", round(fitted.validation, 5), more={"curve": curve})


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options = parser("synthesis.search")
    options.add_argument("--minutes", type=float, default=math.inf, help="start no trial after this many minutes")
    chosen = options.parse_args(words)
    until = time.monotonic() + (0 if chosen.quick else 60 * chosen.minutes)
    search(open_results("synthesis_search", quick=chosen.quick), until)


if __name__ == "__main__":
    main()
