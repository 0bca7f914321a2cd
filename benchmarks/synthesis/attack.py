"""Attacks released classifiers with keyword inference.

Raw text, DP-SGD and synthetic text give one classifier each, with the same layers over the same word table. The
attacker's own texts are the members' whole training part, the most that it can know. It is asked about validation and
test rows, on which no weight of these models was trained. The classifier before any training, which is public, and
chance are given beside them. The attacked text is an input, not a training text, so differential privacy promises none
of these figures.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.library.record import Figure, Results, open_results, parser, summarise
from benchmarks.synthesis.cells import KEPT, SEEDS, Cell, Plan, quick_plan
from benchmarks.synthesis.judge import Judge, classifier_bundle
from benchmarks.synthesis.keywords import CHANCE, Attacker, choose_keywords, embedder, infer_keywords
from benchmarks.synthesis.quality import BENCH, released
from benchmarks.synthesis.setup import Task, read_task

__all__ = ["attack_all", "attack_figures", "attacked_texts", "main"]

DATASET = "sst2"
EPSILON = 5.0
ATTACKERS: tuple[Attacker, ...] = ("linear", "deep")


def attacked_texts(task: Task) -> tuple[list[str], list[str]]:
    """Return the attacker's texts, and those that it is asked about: validation and test rows without duplicates."""
    auxiliary = list(dict.fromkeys(each.text for each in task.train))
    known = set(auxiliary)
    held_back = dict.fromkeys(each.text for each in (*task.validation, *task.test) if each.text not in known)
    return auxiliary, list(held_back)


def attack_figures(judge: Judge, task: Task, keywords: Sequence[str], seed: int) -> list[Figure]:
    """Attack the judge's present classifier with both attackers.

    Returns:
        The mean accuracy over the keywords, with each keyword's accuracy, and the mean with the keyword removed from
        the texts, in further fields.
    """
    from learning.text.encoder import TextEncoder

    encoder = judge.corpus([]).encoder
    if not isinstance(encoder, TextEncoder):
        raise TypeError("a classifier of this benchmark reads words")
    embed = embedder(judge.module, encoder)
    auxiliary, held_back = attacked_texts(task)
    figures = []
    for attacker in ATTACKERS:
        found = infer_keywords(embed, auxiliary, held_back, keywords, attacker, seed=seed)
        hidden = infer_keywords(embed, auxiliary, held_back, keywords, attacker, seed=seed, hidden_words=True)
        more: dict[str, Any] = {
            "chance": CHANCE,
            "chance_error": round(found.chance_error, 4),
            "hidden_words": round(hidden.accuracy, 4),
            "keywords": {score.keyword: round(score.accuracy, 4) for score in found.scores},
        }
        figures.append(Figure(f"attack_accuracy_{attacker}", round(found.accuracy, 5), more=more))
    return figures


def attack_all(results: Results, plan: Plan, seeds: Sequence[int], until: float) -> None:
    """Attack every model that is not attacked yet, for each seed. Classifiers that are not stored are trained again."""
    task = read_task(DATASET)
    keywords = choose_keywords(attacked_texts(task)[0])
    cells = {
        "untrained": None,
        "raw": Cell(DATASET, "raw"),
        "dp-sgd": Cell(DATASET, "dp-sgd", EPSILON),
        "synthetic": Cell(DATASET, "synthetic", EPSILON),
    }
    for seed in seeds:
        for model, cell in cells.items():
            case = {
                "part": "attack",
                "dataset": DATASET,
                "model": model,
                "epsilon": None if cell is None else cell.epsilon,
            }
            if not results.done(case, seed):
                if time.monotonic() > until:
                    return
                results.open(seeds)
                with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
                    bundle = classifier_bundle(task, plan.classifier, seed, Path(scratch), members=plan.rvae.members)
                    judge = Judge(bundle, task)
                    start = bundle.manifest.decode(bundle.weights)
                    judge.load(start if cell is None else released(results, cell, task, plan, seed))
                    results.add(case, attack_figures(judge, task, keywords, seed), seed=seed)
            summarise(results, case, SEEDS, keep=KEPT)


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options = parser("synthesis.attack")
    options.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), choices=SEEDS)
    options.add_argument("--minutes", type=float, default=math.inf, help="start no cell after this many minutes")
    chosen = options.parse_args(words)
    until = time.monotonic() + 60 * chosen.minutes
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        plan, seeds = (quick_plan(Path(scratch)), [0]) if chosen.quick else (Plan(), chosen.seeds)
        attack_all(open_results(BENCH, quick=chosen.quick), plan, seeds, until)


if __name__ == "__main__":
    main()
