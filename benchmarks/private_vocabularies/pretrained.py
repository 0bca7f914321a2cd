"""Measures FedVocab and its peers over the pretrained encoder MiniLM.

It is the paper's main table (table 3 and, for adaptive updating, table 5) with MiniLM in place of DistilBERT: a BERT
of six layers, 384 wide, under a linear layer. 100 members hold equally many rows, 54 of TREC, 250 of SST-2, 222 of AG
News and 113 of 20 Newsgroups, with labels by Dirichlet 1.0. Ten take part in each of 20 rounds with one local epoch.
`private_vocabularies.quality` explains parts of a member's rows, readings and figures.

`same`: the encoder's word pieces, whose rows every member starts from. `own`: each member trains word pieces on its own
training texts, and a row starts at the mean of the rows of the encoder's pieces that the entry consists of.

`whole`: members train the encoder, by Adam at 0.0001. `lora`: the encoder is frozen, and members train rank-8 changes
of its queries and values, and the head, at 0.001, and the embedding at 0.0001. No rate was searched.

Every fourth member is tested, on 250 common rows and on its own. A cell of 20 rounds takes minutes on a GPU and up to
half an hour on two cores.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from benchmarks.library.record import Results, open_results, parser
from benchmarks.private_vocabularies.quality import (
    DATASETS,
    SEEDS,
    SMALL_BATCH,
    Cell,
    Data,
    Recipe,
    measure,
    read_data,
    recipe_of,
)
from learning.training.device import pick_device
from tacit.method import FedAvg, FedProx, FedRecon, FedVocab, LgFedAvg, Method

__all__ = ["CELLS", "Shared", "cells_of", "main", "recipe_for", "run", "shared_of"]

BENCH = "fedvocab_pretrained"
Shared = Literal["whole", "lora"]
LORA_RATE, EMBEDDING_RATE = 0.001, 0.0001

# In the order in which they decide the question.
_SAME: tuple[Method | None, ...] = (
    FedVocab(),
    FedAvg(),
    None,
    FedVocab(adaptive=False),
    LgFedAvg(),
    FedRecon(),
    FedProx(),
)
_OWN: tuple[Method | None, ...] = (FedVocab(), None, FedVocab(adaptive=False), LgFedAvg())


def cells_of(dataset: str) -> list[Cell]:
    """Return all cells of a data set."""
    kinds: tuple[tuple[Literal["same", "own"], tuple[Method | None, ...]], ...] = (("same", _SAME), ("own", _OWN))
    injections: tuple[Literal["lora"] | None, ...] = (None, "lora")
    return [
        Cell(dataset, method, vocabulary, model="minilm", injection=injection)
        for injection in injections
        for vocabulary, methods in kinds
        for method in methods
    ]


CELLS = [cell for dataset in DATASETS for cell in cells_of(dataset)]


def shared_of(cell: Cell) -> Shared:
    """Return what is shared of the encoder."""
    return "whole" if cell.injection is None else "lora"


def recipe_for(cell: Cell) -> Recipe:
    """Return the recipe of a cell."""
    common = replace(recipe_of(cell.dataset, "minilm"), batch=SMALL_BATCH.get(cell.dataset, Recipe.batch))
    if cell.injection is None:
        return common
    return replace(common, learning_rate=LORA_RATE, embedding_learning_rate=EMBEDDING_RATE)


def run(
    results: Results, cells: Sequence[Cell], seeds: Sequence[int], workers: int, until: float, device: str = "cpu"
) -> bool:
    """Measure the cells that are not measured yet, all of a seed before the next seed.

    Args:
        until: latest start of a cell, on the clock of time.monotonic().
        device: where members train and are tested.

    Returns:
        False if time ran out before the end.
    """
    for seed in seeds:
        for cell in cells:
            if results.done(cell.case, seed):
                continue
            if time.monotonic() > until:
                return False
            results.open(seeds)
            _add(results, cell, read_data(cell.dataset), recipe_for(cell), seed, workers, device)
    return True


def _add(results: Results, cell: Cell, data: Data, recipe: Recipe, seed: int, workers: int, device: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        results.add(cell.case, measure(cell, data, recipe, seed, Path(scratch), workers, device=device), seed=seed)


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options = parser("private_vocabularies.pretrained")
    options.add_argument("--dataset", nargs="*", default=list(DATASETS), choices=DATASETS)
    options.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), choices=SEEDS)
    options.add_argument("--method", nargs="*", choices=sorted({cell.name for cell in CELLS}))
    options.add_argument("--vocabulary", nargs="*", default=["same", "own"], choices=["same", "own"])
    options.add_argument("--shared", nargs="*", default=list(get_args(Shared)), choices=get_args(Shared))
    options.add_argument("--workers", type=int, default=1, help="number of processes; figures do not depend on it")
    options.add_argument("--minutes", type=float, default=math.inf, help="start no cell after this many minutes")
    options.add_argument("--device", default="cpu", help="where members train: auto, cpu, cuda or mps")
    chosen = options.parse_args(words)
    results, device = open_results(BENCH, quick=chosen.quick), pick_device(chosen.device)
    if chosen.quick:
        _quick(results, chosen.workers, device)
        return
    cells = [
        cell
        for cell in CELLS
        if cell.dataset in chosen.dataset
        and (chosen.method is None or cell.name in chosen.method)
        and cell.vocabulary in chosen.vocabulary
        and shared_of(cell) in chosen.shared
    ]
    run(results, cells, chosen.seeds, chosen.workers, time.monotonic() + 60 * chosen.minutes, device)


def _quick(results: Results, workers: int, device: str) -> None:
    """Run four members with 25 questions each for two rounds: fedvocab in all four forms, beside fedavg."""
    whole = read_data("trec")
    data = Data("trec", whole.train[:100], whole.common[:20])
    results.open([0])
    for cell in cells_of("trec"):
        if cell.adaptive or cell.name == "fedavg":
            recipe = replace(recipe_for(cell), members=4, cohort=3, rounds=2, rows=None, tested=2)
            _add(results, cell, data, recipe, 0, workers, device)


if __name__ == "__main__":
    main()
