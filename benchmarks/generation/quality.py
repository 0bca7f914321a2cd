"""Measures language models that write, trained with federated LoRA, with and without noise.

SmolLM2-135M-Instruct learns to describe restaurants (E2E NLG, ten equal members) and to answer medical questions
(MedQuAD, nine members by source). Virtual members train one after another, by the product's code. A cell is a data set,
a method, an epsilon of each member's gate and a number of members. A training takes some two minutes of a GPU
(`--device cuda`), and hours of a core; rows and draws are fixed by seeds (`data`, `training`).

Several trainings at a time fill a GPU, best beside NVIDIA's multi-process service: `--processes`.

figure             what it is
loss_per_token     nats on test responses, with its 95 % interval over prompts
exposure           mean bits of the planted canaries, with the 95 % range of as many that were never planted
extracted          planted canaries whose secret the most likely answer to their prompt says; cells that were measured
                   before this figure existed lack it
bleu, rouge_l      greedy answers of the exported version against all references
tokens_per_second  of these answers, by one thread's processor time
seconds            beside a loss: of its training, by the clock, beside other cells on the same device
upload_bytes       of a member's vector in a round, packed for ten members; `generation.wire` measures real ones
"""

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.generation.backbone import add_backbone, base_of
from benchmarks.generation.bench import BENCH, REVISION, SEARCH, Bench, Cell, cells_of
from benchmarks.generation.data import DATASETS
from benchmarks.generation.sharing import run_shared
from benchmarks.generation.training import METHODS, Recipe
from benchmarks.library.processes import count
from benchmarks.library.record import RESULTS, open_results, parser
from learning.training.device import pick_device

__all__ = ["main", "run"]


def run(bench: Bench, cells: Sequence[Cell], *, answers: bool = True) -> None:
    """Measure the cells one after another.

    Args:
        answers: whether exported versions answer prompts, which takes a core longer than a GPU takes for all else.
    """
    for cell in cells:
        if bench.out_of_time():
            return
        bench.measure(cell)
        if answers:
            bench.answer(cell)


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    import torch

    options: argparse.ArgumentParser = parser("generation.quality")
    add_backbone(options)
    options.add_argument("--dataset", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    options.add_argument("--method", nargs="+", default=list(METHODS), choices=METHODS)
    options.add_argument("--epsilon", nargs="+", type=_epsilon, default=[None, 8.0, 3.0], help="numbers, or none")
    options.add_argument("--minutes", type=float, default=math.inf, help="start no training after this many minutes")
    options.add_argument("--versions", type=Path, help="folder that keeps trained versions")
    options.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"), help="where members train")
    options.add_argument(
        "--no-answers", action="store_true", help="measure losses alone; a later run with the same --versions answers"
    )
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines")
    options.add_argument(
        "--processes", type=count, default=1, help="train so many cells at a time, on one device; each has one thread"
    )
    chosen = options.parse_args(words)
    torch.set_num_threads(1)
    results, searched = (
        open_results(name, quick=chosen.quick, revision=REVISION, folder=chosen.results) for name in (BENCH, SEARCH)
    )
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        until = time.monotonic() + 60 * chosen.minutes
        folder = Path(scratch)
        versions = chosen.versions or folder / "versions"
        device = pick_device(chosen.device)
        bench = Bench(results, searched, base_of(chosen.backbone), folder, versions, until, device=device)
        if chosen.quick:
            small = Recipe(1e-3, rank=2, last_layers=1, rounds=1, rows=4, batch=4)
            run(replace(bench, rows=8, quick=(small,)), [Cell("e2e_nlg", "ffa-lora")])
            return
        cells = cells_of(chosen.dataset, chosen.method, chosen.epsilon)
        if chosen.processes > 1 and (failed := run_shared(bench, cells, chosen.processes)):
            raise SystemExit(f"{len(failed)} tasks failed; the others' cells are recorded")
        if chosen.processes == 1 or not chosen.no_answers:
            run(bench, cells, answers=not chosen.no_answers)


def _epsilon(word: str) -> float | None:
    return None if word == "none" else float(word)


if __name__ == "__main__":
    main()
