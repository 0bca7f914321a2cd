"""What a step of DP-SGD costs over a plain step of the same model: both in one run, in turns, medians of the steps.

The plain step is the ordinary one, by the same optimiser over all the model's parameters, for a batch of as many
examples as the private step's lot (which is drawn, so that it has as many on average). Modes:

    ours            `edge_client.training.private`: one backward pass, norms layer by layer, cryptographic noise
    opacus-ghost    Opacus' ghost clipping
    opacus-hooks    Opacus' gradients for each example; both in one piece, as its optimisers take a batch, and with
                    torch's own generator for the noise
    narrowed        a plain step that holds only the rows of the embedding which the member's texts use, as training
                    without noise does: below 1, and what a member without privacy would wait for

What a training pays once is left out of the steps and stands beside them (`once_seconds`): trying the module.

The model is the one there is: TextCNN as in Zhu et al. 2020 (embedding 128, filters 2 to 5 of 400 maps), over a
vocabulary of TREC's size and over BERT's. The texts are made up, with lengths like TREC's questions. The lot is 64, a
small one: noise weighs most where a step has few examples. One thread.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import Figure, open_results, parser

BENCH = "dp_cost"
MODULES = ("dp_cost.py",)

TARGET = 3.0
VOCABULARIES = (9_600, 30_522)
OPTIMISERS = ("sgd", "adam")
LOT = 64
EXAMPLES = 1_363  # A quarter of TREC's training questions.
LABELS = 6
PAD = 0
MEAN_LENGTH, LONGEST = 12, 40
# Steps of a training, of which the first is left out, and how often the sides take turns.
STEPS, TURNS = 16, 6

Ids = NDArray[np.int64]
# Some steps of one side: the seconds of each but the first, and of all that is not a step.
Side = Callable[[int], tuple[list[float], float]]


def texts(vocabulary: int) -> tuple[Ids, Ids]:
    """Made-up questions: ids (N, S) by a law like that of words (Zipf), and labels (N,)."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, vocabulary) ** 1.0
    ids = random.choice(np.arange(1, vocabulary), size=(EXAMPLES, LONGEST), p=weights / weights.sum())
    lengths = np.clip(random.poisson(MEAN_LENGTH, size=EXAMPLES), 3, LONGEST)
    ids[np.arange(LONGEST) >= lengths[:, None]] = PAD
    return ids.astype(np.int64), random.integers(LABELS, size=EXAMPLES).astype(np.int64)


class Clock:
    """Seconds between calls. The first interval, which holds what comes before the first step, is kept apart."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.at = [self.began]

    def __call__(self, _: object = None) -> None:
        self.at.append(time.perf_counter())

    def read(self) -> tuple[list[float], float]:
        """The steps but the first; and all the time that was in no step, taking the first for a median one."""
        steps = [after - before for before, after in zip(self.at[1:], self.at[2:], strict=False)]
        whole = time.perf_counter() - self.began
        return steps, whole - sum(steps) - statistics.median(steps)


def sides(vocabulary: int, optimiser: str) -> dict[str, Side]:
    """All that is measured for a model and an optimiser, by its mode; `plain` is what the others are divided by."""
    from edge_client.models import TextClassifier, build
    from edge_client.training.local import train
    from edge_client.training.private import train_private
    from secure_agg import SystemRandom
    from tacit.job import TextCNNModel, Training
    from tacit.mechanism import DpSgd

    ids, labels = texts(vocabulary)
    recipe = Training.model_validate({"optimiser": optimiser, "learning_rate": 0.001, "batch": LOT})

    def module() -> TextClassifier:
        return build(TextCNNModel(), vocabulary, LABELS, PAD, seed=1)

    def plain(steps: int, made: TextClassifier) -> tuple[list[float], float]:
        clock = Clock()
        rows = np.random.default_rng(steps).choice(EXAMPLES, steps * LOT, replace=steps * LOT > EXAMPLES)
        train(made, ids[rows], labels[rows], recipe, seed=0, progress=clock)
        return clock.read()

    def whole(steps: int) -> tuple[list[float], float]:
        made = module()
        # The ordinary step has no narrowed embedding.
        made.narrowed = nullcontext  # type: ignore[assignment]
        return plain(steps, made)

    def ours(steps: int) -> tuple[list[float], float]:
        made, clock = module(), Clock()
        mechanism = DpSgd(noise_multiplier=1.0, lot=LOT, steps=steps)
        train_private(made, ids, labels, recipe, mechanism, random=SystemRandom(), seed=0, progress=clock)
        return clock.read()

    return {
        "plain": whole,
        "ours": ours,
        "narrowed": lambda steps: plain(steps, module()),
        "opacus-ghost": lambda steps: opacus(module(), ids, labels, recipe, steps, ghost=True),
        "opacus-hooks": lambda steps: opacus(module(), ids, labels, recipe, steps, ghost=False),
    }


def opacus(made: Any, ids: Ids, labels: Ids, recipe: Any, steps: int, *, ghost: bool) -> tuple[list[float], float]:
    """DP-SGD steps as Opacus makes them, on batches of the lot's size, each padded to its longest text."""
    import torch
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    from edge_client.training.local import forward_rows, make_optimiser

    random = np.random.default_rng(steps)
    made.train()
    lengths = (ids != PAD).sum(axis=1)
    inner = make_optimiser(made, recipe)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": LOT, "loss_reduction": "mean"}
    criterion: Any = torch.nn.CrossEntropyLoss()
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(made, max_grad_norm=1.0)
        optimiser = DPOptimizerFastGradientClipping(inner, **options)
        criterion = DPLossFastGradientClipping(wrapped, optimiser, criterion)
    else:
        wrapped, optimiser = GradSampleModule(made), DPOptimizer(inner, **options)
    wrapped.pad_id, wrapped.min_tokens = made.pad_id, made.min_tokens
    clock = Clock()
    for _ in range(steps):
        rows = random.choice(len(ids), LOT, replace=False)
        optimiser.zero_grad()
        logits, target = forward_rows(wrapped, ids, labels, lengths=lengths, rows=rows, device="cpu")
        criterion(logits, target).backward()
        optimiser.step()
        clock()
    return clock.read()


def measure(vocabulary: int, optimiser: str, steps: int, turns: int) -> dict[str, list[Figure]]:
    """All modes of one model and optimiser, in turns."""
    import torch

    torch.set_num_threads(1)
    times: dict[str, list[float]] = {}
    once: dict[str, list[float]] = {}
    for _ in range(turns):
        for mode, side in sides(vocabulary, optimiser).items():
            each, rest = side(steps)
            times.setdefault(mode, []).extend(each)
            once.setdefault(mode, []).append(rest)
    plain = statistics.median(times["plain"])
    used = len(np.unique(texts(vocabulary)[0])) - 1
    found = {}
    for mode in times.keys() - {"plain"}:
        seconds = statistics.median(times[mode])
        more: dict[str, Any] = {"target": TARGET} if mode == "ours" else {}
        more |= {
            "step_seconds": round(seconds, 5),
            "plain_seconds": round(plain, 5),
            "once_seconds": round(statistics.median(once[mode]), 4),
            "used_rows": used,
        }
        found[mode] = [Figure("step_ratio", round(seconds / plain, 3), more=more)]
    return found


def main() -> None:
    """Command line."""
    options = parser(BENCH, __doc__)
    options.add_argument("--vocabulary", type=int, nargs="*", default=VOCABULARIES)
    chosen = options.parse_args()
    results = open_results(BENCH, MODULES, quick=chosen.quick)
    steps, turns = (6, 2) if chosen.quick else (STEPS, TURNS)
    for vocabulary in (9_600,) if chosen.quick else chosen.vocabulary:
        for optimiser in OPTIMISERS:
            cases = {
                mode: {"model": f"textcnn-{vocabulary}", "mode": f"{mode}-{optimiser}"}
                for mode in ("ours", "narrowed", "opacus-ghost", "opacus-hooks")
            }
            if all(results.done(case) for case in cases.values()):
                continue
            results.open([0])
            figures = measure(vocabulary, optimiser, steps, turns)
            for mode, case in cases.items():
                if not results.done(case):
                    results.add(case, figures[mode])


if __name__ == "__main__":
    main()
