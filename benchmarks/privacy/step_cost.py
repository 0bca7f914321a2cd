"""Measures the time of a DP-SGD step beside a plain step, and beside Opacus.

The plain step uses the same optimiser over all of the model's parameters, and a batch as large as the private step's
lot (which is drawn, so it has that size on average). Modes:

    ours            `learning.training.private`: one backward pass, norms layer by layer, cryptographic noise
    opacus-ghost    Opacus' ghost clipping
    opacus-hooks    Opacus' per-example gradients. Both Opacus modes take the batch in one piece, as its optimisers do,
                    and draw noise from torch's own generator
    narrowed        a plain step on only those rows of the embedding that the member's texts use, as in training
                    without noise. It is below 1: the time that a member without privacy needs

The steps exclude the one-time cost of a training, trying the module, which is given beside them (`once_seconds`).

The goal is for TextCNN as in Zhu et al. 2020 (embedding 128, filters 2 to 5 of 400 maps), over a vocabulary of TREC's
size and over BERT's. BiLSTM (embedding and hidden 300, FedVocab's sizes) and a BERT of two layers, 128 wide, are listed
without a goal and without Opacus, which does not support our LSTM. Texts are synthetic, with lengths like TREC's
questions. The lot is 64, a small one, because noise costs most if a step has few examples. One thread.

`--only prompts` measures only prompts and the other modules trained before a frozen model: a backbone of MiniLM's shape
(six layers, 384 wide, 30,522 words, random values), a cloze, texts of exactly 48 tokens, Adam, and a lot of 16. The
word table is frozen, so plain training has nothing to narrow, and there is no such mode. The goal is for prompt tuning;
the others are listed without one. All have 20 tokens, and encoders are as wide as the vectors.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.record import Figure, Results, open_results, parser

if TYPE_CHECKING:
    from learning.models import TextClassifier
    from learning.prompts import Injection
    from learning.prompts.backbone import Backbone
    from tacit.job import Training
    from tacit.model import Model

BENCH = "dp_cost"

TARGET = 3.0
VOCABULARIES = (9_600, 30_522)
# Beside TextCNN, over the smaller vocabulary.
OTHERS = ("bilstm", "bert-2x128")
OURS = ("ours", "narrowed")
MODES = (*OURS, "opacus-ghost", "opacus-hooks")
OPTIMISERS = ("sgd", "adam")
LOT = 64
EXAMPLES = 1_363  # A quarter of TREC's training questions.
LABELS = 6
PAD = 0
MEAN_LENGTH, LONGEST = 12, 40
# For prompts. Backbones have MiniLM's shape.
PROMPT_TARGET = 1.2
PROMPTS = ("prompt-tuning", "p-tuning-mlp", "p-tuning-lstm", "prefix-tuning", "lora")
WIDTH = 384
MINILM = {
    "model_type": "bert",
    "hidden_size": WIDTH,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
PROMPT_WORDS, PROMPT_LOT, PROMPT_LENGTH, PROMPT_EXAMPLES = 30_522, 16, 48, 400
MASK, LABEL_WORDS = 103, ((2307,), (6659,))

# Steps of a training, of which the first does not count, and the number of turns of each side.
STEPS, TURNS = 16, 6

Ids = NDArray[np.int64]
# Runs some steps of one side, and returns the seconds of each but the first, and of everything outside steps.
Side = Callable[[int], tuple[list[float], float]]
Sides = dict[str, Side]


def texts(vocabulary: int) -> tuple[Ids, Ids]:
    """Return synthetic questions: ids (N, S), distributed like words (Zipf's law), and labels (N,)."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, vocabulary) ** 1.0
    ids = random.choice(np.arange(1, vocabulary), size=(EXAMPLES, LONGEST), p=weights / weights.sum())
    lengths = np.clip(random.poisson(MEAN_LENGTH, size=EXAMPLES), 3, LONGEST)
    ids[np.arange(LONGEST) >= lengths[:, None]] = PAD
    return ids.astype(np.int64), random.integers(LABELS, size=EXAMPLES).astype(np.int64)


class Clock:
    """Measures the seconds between calls. The first interval includes the time before the first step."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.at = [self.began]

    def __call__(self, _: object = None) -> None:
        self.at.append(time.perf_counter())

    def read(self) -> tuple[list[float], float]:
        """Return the seconds of the steps but the first, and of everything else, taking the first as a median step."""
        steps = [after - before for before, after in zip(self.at[1:], self.at[2:], strict=False)]
        whole = time.perf_counter() - self.began
        return steps, whole - sum(steps) - statistics.median(steps)


def model_of(architecture: str) -> "Model":
    """Return the model described in the module's docstring."""
    from tacit.model import BiLSTMModel, TextCNNModel, TransformerModel

    if architecture == "textcnn":
        return TextCNNModel()
    if architecture == "bilstm":
        return BiLSTMModel()
    config = {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return TransformerModel(config=config | {"intermediate_size": 512, "max_position_embeddings": 128})


def sides(architecture: str, vocabulary: int, optimiser: str) -> Sides:
    """Return the sides to measure for a model and an optimiser, by mode. The others are divided by `plain`."""
    from learning.models import build
    from tacit.job import Training

    ids, labels = texts(vocabulary)
    recipe = Training.model_validate({"optimiser": optimiser, "learning_rate": 0.001, "batch": LOT})

    def module() -> "TextClassifier":
        return build(model_of(architecture), vocabulary, LABELS, PAD, seed=1)

    def whole() -> "TextClassifier":
        made = module()
        # The plain step does not narrow the embedding.
        made.narrowed = nullcontext  # type: ignore[assignment]
        return made

    found: Sides = {
        "plain": lambda steps: plain(whole(), ids, labels, recipe, steps),
        "ours": lambda steps: ours(module(), ids, labels, recipe, steps),
        "narrowed": lambda steps: plain(module(), ids, labels, recipe, steps),
    }
    if architecture != "textcnn":
        return found
    return found | {
        "opacus-ghost": lambda steps: opacus(module(), ids, labels, recipe, steps, ghost=True),
        "opacus-hooks": lambda steps: opacus(module(), ids, labels, recipe, steps, ghost=False),
    }


def plain(made: "TextClassifier", ids: Ids, labels: Ids, recipe: "Training", steps: int) -> tuple[list[float], float]:
    """Run the product's steps without noise, on batches of `recipe.batch`."""
    from learning.training.local import train

    clock = Clock()
    rows = np.random.default_rng(steps).choice(len(ids), steps * recipe.batch, replace=steps * recipe.batch > len(ids))
    train(made, ids[rows], labels[rows], recipe, seed=0, progress=clock)
    return clock.read()


def ours(made: "TextClassifier", ids: Ids, labels: Ids, recipe: "Training", steps: int) -> tuple[list[float], float]:
    """Run the product's DP-SGD steps, on lots of `recipe.batch`."""
    from learning.training.private import train_private
    from secure_agg import SystemRandom
    from tacit.mechanism import DpSgd

    clock = Clock()
    mechanism = DpSgd(noise_multiplier=1.0, lot=recipe.batch, steps=steps)
    train_private(made, ids, labels, recipe, mechanism, random=SystemRandom(), seed=0, progress=clock)
    return clock.read()


# ---- prompts ----------------------------------------------------------------------------------------------------


def prompt_texts() -> tuple[Ids, Ids]:
    """Return synthetic texts of equal length with a mask before the last token: ids (N, S), labels (N,)."""
    random = np.random.default_rng(0)
    ids = random.integers(1000, PROMPT_WORDS, size=(PROMPT_EXAMPLES, PROMPT_LENGTH))
    ids[:, -2] = MASK
    return ids.astype(np.int64), random.integers(len(LABEL_WORDS), size=PROMPT_EXAMPLES).astype(np.int64)


def injection_of(name: str) -> "Injection":
    """Return the trained module, by its name in this benchmark."""
    from learning.prompts import LoRA, PrefixTuning, PromptTuning, PTuning

    found: dict[str, Injection] = {
        "prompt-tuning": PromptTuning(20),
        "p-tuning-mlp": PTuning(20, "mlp", WIDTH),
        "p-tuning-lstm": PTuning(20, "lstm", WIDTH),
        "prefix-tuning": PrefixTuning(20),
        "lora": LoRA(8, 16),
    }
    return found[name]


@cache
def minilm() -> "Backbone":
    """Return a frozen model of MiniLM's shape, with a masked-word head and random values."""
    from learning.prompts.backbone import Backbone, check_backbone, tensor_shapes

    shapes = tensor_shapes(check_backbone(MINILM), PROMPT_WORDS)
    random = np.random.default_rng(0)
    tensors = {}
    for name, shape in {**shapes.body, **shapes.head}.items():
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        # Normalisation layers start at one.
        tensors[name] = values + np.float32(name.endswith("orm.weight"))
    return Backbone(MINILM, tensors)


def prompt_sides(injection: str, optimiser: str) -> Sides:
    """Return the sides for a module trained before a frozen model."""
    from learning.prompts import Cloze
    from learning.prompts.model import PromptedModel
    from tacit.job import Training

    ids, labels = prompt_texts()
    recipe = Training.model_validate({"optimiser": optimiser, "learning_rate": 0.01, "batch": PROMPT_LOT})

    def module() -> "TextClassifier":
        made = injection_of(injection)
        return PromptedModel(minilm(), made, Cloze(LABEL_WORDS), len(LABEL_WORDS), PAD, MASK, seed=1, dropout=0.1)

    return {
        "plain": lambda steps: plain(module(), ids, labels, recipe, steps),
        "ours": lambda steps: ours(module(), ids, labels, recipe, steps),
    }


# ---- Opacus -----------------------------------------------------------------------------------------------------


def opacus(made: Any, ids: Ids, labels: Ids, recipe: Any, steps: int, *, ghost: bool) -> tuple[list[float], float]:
    """Run Opacus' DP-SGD steps, on batches of the lot's size, each padded to its longest text."""
    import torch
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    from learning.training.local import make_optimiser, rows_at

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
    clock = Clock()
    for _ in range(steps):
        rows = random.choice(len(ids), LOT, replace=False)
        optimiser.zero_grad()
        inputs, target = rows_at(made, ids, labels, lengths=lengths, rows=rows, device="cpu")
        criterion(wrapped(inputs), target).backward()
        optimiser.step()
        clock()
    return clock.read()


def measure(made: Callable[[], Sides], steps: int, turns: int, more: dict[str, dict[str, Any]]) -> dict[str, Figure]:
    """Measure all modes of one model and optimiser, in turns.

    Args:
        made: makes the sides anew for each turn.
        more: further fields of the figure, by mode.
    """
    import torch

    torch.set_num_threads(1)
    times: dict[str, list[float]] = {}
    once: dict[str, list[float]] = {}
    for _ in range(turns):
        for mode, side in made().items():
            each, rest = side(steps)
            times.setdefault(mode, []).extend(each)
            once.setdefault(mode, []).append(rest)
    base = statistics.median(times["plain"])
    found = {}
    for mode in times.keys() - {"plain"}:
        seconds = statistics.median(times[mode])
        beside = {
            "step_seconds": round(seconds, 5),
            "plain_seconds": round(base, 5),
            "once_seconds": round(statistics.median(once[mode]), 4),
        }
        found[mode] = Figure("step_ratio", round(seconds / base, 3), more=more.get(mode, {}) | beside)
    return found


def measure_whole(results: Results, architecture: str, vocabulary: int, steps: int, turns: int) -> None:
    """Measure a model of which all parameters are trained, with both optimisers."""
    modes = MODES if architecture == "textcnn" else OURS
    used = {"used_rows": len(np.unique(texts(vocabulary)[0])) - 1}
    more: dict[str, dict[str, Any]] = dict.fromkeys(modes, used)
    if architecture == "textcnn":
        more["ours"] = {"target": TARGET} | used
    for optimiser in OPTIMISERS:
        cases = {mode: {"model": f"{architecture}-{vocabulary}", "mode": f"{mode}-{optimiser}"} for mode in modes}
        if all(results.done(case) for case in cases.values()):
            continue
        results.open([0])
        figures = measure(partial(sides, architecture, vocabulary, optimiser), steps, turns, more)
        for mode, case in cases.items():
            if not results.done(case):
                results.add(case, [figures[mode]])


def measure_prompts(results: Results, names: Sequence[str], steps: int, turns: int) -> None:
    """Measure the modules trained before a frozen model."""
    from learning.prompts import Cloze, trained_values

    for name in names:
        case = {"model": f"minilm-{name}", "mode": "ours-adam"}
        if results.done(case):
            continue
        results.open([0])
        values = trained_values(MINILM, injection_of(name), Cloze(LABEL_WORDS), len(LABEL_WORDS))
        more: dict[str, Any] = {"target": PROMPT_TARGET} if name == "prompt-tuning" else {}
        figures = measure(partial(prompt_sides, name, "adam"), steps, turns, {"ours": more | {"values": values}})
        results.add(case, [figures["ours"]])


def main() -> None:
    """Command line."""
    options = parser("privacy.step_cost")
    options.add_argument("--vocabulary", type=int, nargs="*", default=VOCABULARIES)
    options.add_argument(
        "--only", choices=("whole", "prompts"), help="measure only models trained as a whole, or only prompts"
    )
    chosen = options.parse_args()
    results = open_results(BENCH, quick=chosen.quick)
    steps, turns = (6, 2) if chosen.quick else (STEPS, TURNS)
    if chosen.only != "prompts":
        models = [("textcnn", size) for size in (VOCABULARIES[:1] if chosen.quick else chosen.vocabulary)]
        models += [] if chosen.quick else [(name, VOCABULARIES[0]) for name in OTHERS]
        for architecture, vocabulary in models:
            measure_whole(results, architecture, vocabulary, steps, turns)
    if chosen.only != "whole":
        measure_prompts(results, PROMPTS[:1] if chosen.quick else PROMPTS, steps, turns)


if __name__ == "__main__":
    main()
