"""Measures a step of prompt tuning in bfloat16 beside float32.

Both take turns in one process on one thread, and medians of the steps count. The case is 20 vectors before a frozen
backbone of MiniLM's shape with random values, a cloze, 16 texts of 48 tokens, Adam, and no noise. Each line is a
process whose matrix library (oneDNN) may use at most these instructions (`ONEDNN_MAX_CPU_ISA`), on the processor named
under the table. That estimates other processors, but measures none. `any` means all instructions of this processor,
and instructions that it lacks are not measured.

`products: widened` is what a member does without matrix units: matrices are kept in bfloat16 and multiply in float32
(`learning.models.widened`). The others multiply in bfloat16.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.library.record import ROOT, Figure, open_results, parser

BENCH = "precision"

# From most to least, beside what torch calls the first of them: with matrix units (AMX) if there are any, with bfloat16
# dot products, and with neither.
INSTRUCTIONS = {"any": None, "avx512_core_bf16": "avx512_bf16", "avx512_core": "avx512_f", "avx2": "avx2"}
STEPS, TURNS = 12, 3


def measured(steps: int, turns: int, *, widened: bool) -> Figure:
    """Measure in the present process, with the instructions that it may use.

    Args:
        widened: bfloat16 matrices multiply in float32.
    """
    from benchmarks.privacy.step_cost import (
        LABEL_WORDS,
        MASK,
        PAD,
        PROMPT_LOT,
        Sides,
        injection_of,
        measure,
        minilm,
        plain,
        prompt_texts,
    )
    from learning.prompts import Cloze
    from learning.prompts.model import PromptedModel
    from tacit.job import Precision, Training

    ids, labels = prompt_texts()

    def side(precision: Precision, steps: int) -> tuple[list[float], float]:
        prompt = injection_of("prompt-tuning")
        made = PromptedModel(minilm(), prompt, Cloze(LABEL_WORDS), len(LABEL_WORDS), PAD, MASK, seed=1, dropout=0.0)
        recipe = Training(learning_rate=0.01, batch=PROMPT_LOT, precision=precision)
        return plain(made, ids, labels, recipe, steps)

    def sides() -> Sides:
        return {"plain": partial(side, "float32"), "bfloat16": partial(side, "bfloat16")}

    with patch("learning.models.widened.has_matrix_units", lambda: not widened):
        return measure(sides, steps, turns, {})["bfloat16"]


def measured_apart(instructions: str, steps: int, turns: int, *, widened: bool) -> Figure:
    """Measure in a process that may use at most these instructions."""
    limit = {} if instructions == "any" else {"ONEDNN_MAX_CPU_ISA": instructions.upper()}
    call = [sys.executable, "-m", "benchmarks.privacy.precision", "--child", str(steps), str(turns), str(int(widened))]
    done = subprocess.run(call, cwd=ROOT, env={**os.environ, **limit}, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = {"float32_seconds": found["plain_seconds"], "bfloat16_seconds": found["step_seconds"]}
    return Figure("step_ratio", found["value"], more=seconds)


def cases() -> list[tuple[str, bool]]:
    """Return the instructions that this processor has, each with products in bfloat16 and widened ones.

    `any` stands for matrix units: a processor without them has its best instructions under their own name.
    """
    import torch

    from learning.models.widened import has_matrix_units

    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    names = [
        name
        for name, first in INSTRUCTIONS.items()
        if (has_matrix_units() if first is None else known.get(first, False))
    ]
    return [(name, widened) for name in names for widened in (False, True) if name != "any" or not widened]


def main() -> None:
    """Command line."""
    options = parser("privacy.precision")
    options.add_argument(
        "--child", type=int, nargs=3, metavar=("STEPS", "TURNS", "WIDENED"), help="measure in this process (internal)"
    )
    chosen = options.parse_args()
    if chosen.child is not None:
        steps, turns, widened = chosen.child
        figure = measured(steps, turns, widened=bool(widened))
        print(json.dumps({"value": figure.value, **figure.more}))
        return
    results = open_results(BENCH, quick=chosen.quick)
    steps, turns = (4, 1) if chosen.quick else (STEPS, TURNS)
    for instructions, widened in cases():
        case: dict[str, Any] = {"model": "minilm-prompt-tuning", "instructions": instructions}
        if widened:
            case["products"] = "widened"
        if not results.done(case):
            results.open([0])
            results.add(case, [measured_apart(instructions, steps, turns, widened=widened)])


if __name__ == "__main__":
    main()
