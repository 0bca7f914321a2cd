"""How the recipes of `benchmarks.synthesis` were chosen: other ones on SST-2's validation rows, one seed, no test.

Of the autoencoder, at epsilon 5: the perplexity of validation sentences with z from the prior, under FedAvg and FedAdam
on the server (FedOpt, Reddi et al. 2021) with rates of their own. Of the classifier under DP-SGD: its accuracy on them.
The best of each is what `RvaeRecipe` and `ClassifierRecipe` are to have.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import Figure, Results
from benchmarks.synthesis_quality import ClassifierRecipe, fit_federatedly
from benchmarks.synthesis_setup import RvaeRecipe, Task, dealt, perplexity, read_task, rvae_bundle, train_rvae
from tacit.server_optimiser import FedAdamServer, FedAvgServer

__all__ = ["CLASSIFIERS", "RVAES", "search"]

DATASET = "sst2"
EPSILON = 5.0

# The same steps in all, so the same noise: local Adam and an average; or plain sums, which a server's Adam scales.
RVAES = (
    RvaeRecipe(learning_rate=0.01, server=FedAvgServer()),
    RvaeRecipe(learning_rate=0.02, server=FedAvgServer()),
    RvaeRecipe(
        rounds=10,
        steps=2,
        optimiser="sgd",
        learning_rate=1.0,
        server=FedAdamServer(learning_rate=0.01, beta_2=0.9, tau=1e-4),
    ),
    RvaeRecipe(
        rounds=20,
        steps=1,
        optimiser="sgd",
        learning_rate=1.0,
        server=FedAdamServer(learning_rate=0.01, beta_2=0.9, tau=1e-4),
    ),
)
CLASSIFIERS = (
    *(ClassifierRecipe(optimiser="sgd", private_rate=rate) for rate in (1.5, 4.0, 8.0)),
    ClassifierRecipe(optimiser="adam", private_rate=0.01),
)


def search(results: Results, until: float) -> None:
    """What was not tried yet, the autoencoder's recipes first. until: on time.monotonic()'s clock."""
    task = read_task(DATASET)
    for recipe in RVAES:
        _try(results, "rvae", recipe.as_json(), until, partial(rvae_figure, task, recipe))
    for tried in CLASSIFIERS:
        _try(results, "classifier", tried.as_json(), until, partial(classifier_figure, task, tried))


def _try(results: Results, model: str, recipe: dict[str, Any], until: float, figure: Callable[[Path], Figure]) -> None:
    case = {"dataset": DATASET, "model": model, "epsilon": EPSILON, "recipe": recipe}
    if results.done(case, 0) or time.monotonic() > until:
        return
    results.open([0])
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        results.add(case, [figure(Path(scratch))], seed=0)


def rvae_figure(task: Task, recipe: RvaeRecipe, folder: Path, **where: Any) -> Figure:
    """Perplexity of validation sentences under the last global model; by round beside it, the start's first."""
    parts = dealt(task, recipe.members, 0)
    bundle = rvae_bundle(task, recipe, EPSILON, min(map(len, parts)), 0, folder, **where)
    trained = train_rvae(bundle, parts)
    start = bundle.manifest.decode(bundle.weights)
    curve = [
        [number, round(perplexity(trained, values, task.validation), 2)]
        for number, values in enumerate((start, *trained.versions))
    ]
    return Figure("validation_perplexity", curve[-1][1], more={"curve": curve})


def classifier_figure(task: Task, recipe: ClassifierRecipe, folder: Path) -> Figure:
    """Validation accuracy of the best round, all rounds beside it."""
    fitted, _ = fit_federatedly(task, dealt(task, 10, 0), recipe, EPSILON, 0, folder)
    curve = [[number, round(validation, 4)] for number, validation, _ in fitted.curve]
    return Figure("validation_accuracy", round(fitted.validation, 5), more={"curve": curve})
