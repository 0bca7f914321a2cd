"""Trains and measures cells in several processes. They may share a GPU, which one training does not fill.

A recipe that a cell may choose is a task. The one that is tried last leads to another, which measures the cell.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.generation.bench import SEED, Bench, Cell
from benchmarks.generation.training import Recipe
from benchmarks.library.processes import run_in_processes

__all__ = ["Task", "run_shared"]

# A cell and the recipe to try; without one, the cell is measured.
Task = tuple[Cell, Recipe | None]

_IMPORTED = ("torch", "transformers", "export.bundle", "learning.models.assembly", "benchmarks.generation.bench")

# One for each process.
_bench: Bench | None = None


def run_shared(bench: Bench, cells: Sequence[Cell], processes: int) -> list[Task]:
    """Measure the cells that are not measured yet, without answers.

    Args:
        bench: its results must be files. What the processes add to them is read at the end.

    Returns:
        The tasks that failed.
    """
    tasks: list[Task] = []
    for cell in cells:
        if not bench.results.done(cell.case, SEED):
            recipes = bench.recipes(cell)
            tasks += [(cell, recipe) for recipe in recipes] if len(recipes) > 1 else [(cell, None)]
    failed = run_in_processes(
        tasks, _act, processes, begin=_begin, given=(bench,), until=bench.until, imports=_IMPORTED
    )
    for lines in (bench.results, bench.searched):
        lines.read()
    return failed


def _begin(bench: Bench) -> None:
    global _bench  # noqa: PLW0603  one for each process
    import torch

    torch.set_num_threads(1)
    # Each process makes bundles of its own.
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    _bench = replace(bench, folder=folder, until=float("inf"))


def _act(task: Task) -> list[Task]:
    if _bench is None:
        raise RuntimeError("a process has no bench")
    (cell, recipe), bench = task, _bench
    for lines in (bench.results, bench.searched):
        lines.read()
    if recipe is None:
        bench.measure(cell)
        return []
    bench.tried(cell, recipe)
    # Others try this cell's recipes at the same time.
    bench.searched.read()
    return [(cell, None)] if all(bench.is_tried(cell, each) for each in bench.recipes(cell)) else []
