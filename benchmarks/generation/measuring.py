"""Measures a trained version: its loss on test rows, what it remembers of canaries, and the answers that it writes.

Losses are computed by the product's module in float32, whatever it was trained in. Answers are written by the exported
version, as `coordinator evaluate --generate` does.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.generation.data import Pair, Tested
from benchmarks.library.simulation import backbone_of
from export.answer_figures import AnswerFigures, TokenFigures, answer_figures, token_figures
from learning.auditing.exposure import Canary, Exposure, candidates_of, exposures_of
from learning.auditing.extraction import greedy, says
from learning.text.turns import Dialogue
from simulation.virtual_members import SeededRandom

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.causal.model import CausalModel
    from learning.text.dialogue import DialogueEncoder

__all__ = ["CANDIDATES", "Scored", "answers_of", "exposure_of", "extracted_of", "scored", "token_figures_of"]

# Never planted secrets for each canary.
CANDIDATES = 120
_BATCH = 16


@dataclass(frozen=True)
class Scored:
    """Sums over the response tokens of N rows: losses in nats (N,), most likely tokens (N,), and tokens (N,)."""

    losses: NDArray[np.float64]
    correct: NDArray[np.int64]
    counts: NDArray[np.int64]


def scored(bundle: "JobBundle", values: NDArray[np.float32], rows: Sequence[Pair], device: str = "cpu") -> Scored:
    """Score rows under a version of a job.

    Args:
        values: the version, (d,).
        device: where they are scored, from `pick_device`.
    """
    import torch

    module, encoder = _writer_of(bundle, values, device)
    order = sorted(range(len(rows)), key=lambda at: len(rows[at].prompt) + len(rows[at].response))
    losses, correct, counts = np.zeros(len(rows)), np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for first in range(0, len(order), _BATCH):
        places = order[first : first + _BATCH]
        ids, targets = encoder.encode([Dialogue.of(rows[at].prompt, rows[at].response) for at in places])
        with torch.no_grad():
            found = module.token_scores(torch.from_numpy(ids).to(device), torch.from_numpy(targets).to(device))
        losses[places], correct[places], counts[places] = (each.double().cpu().numpy() for each in found)
    return Scored(losses, correct, counts)


def _writer_of(bundle: "JobBundle", values: NDArray[np.float32], device: str) -> "tuple[CausalModel, DialogueEncoder]":
    from learning.models.assembly import whole_writer

    module, encoder = whole_writer(
        bundle.document,
        bundle.manifest,
        bundle.manifest.encode(values),
        bundle.public_tokenizer,
        backbone=backbone_of(bundle),
        frozen=bundle.frozen,
    )
    return module.to(device), encoder


def token_figures_of(
    bundle: "JobBundle", values: NDArray[np.float32], rows: Sequence[Pair], device: str = "cpu"
) -> TokenFigures:
    """Return loss, perplexity and accuracy of rows, one a prompt. Arguments are those of `scored`."""
    found = scored(bundle, values, rows, device)
    return token_figures(found.losses, found.correct, found.counts)


def exposure_of(
    bundle: "JobBundle",
    values: NDArray[np.float32],
    canaries: Sequence[Canary],
    *,
    candidates: int = CANDIDATES,
    device: str = "cpu",
) -> Exposure:
    """Return the exposure of canaries, each among secrets that were never planted.

    Args:
        candidates: of each canary. They are the same for every version.
        device: as of `scored`.
    """
    others = [candidates_of(each, candidates, SeededRandom(f"candidates/{each.prompt}")) for each in canaries]
    rows = [Pair(each.prompt, each.response) for each in [*canaries, *(one for more in others for one in more)]]
    losses = scored(bundle, values, rows, device).losses
    return exposures_of(losses[: len(canaries)], losses[len(canaries) :].reshape(len(canaries), candidates))


def extracted_of(
    bundle: "JobBundle", values: NDArray[np.float32], canaries: Sequence[Canary], *, device: str = "cpu"
) -> list[bool]:
    """Tell for each canary whether the most likely answer to its prompt says its secret. Arguments: `scored`'s."""
    module, encoder = _writer_of(bundle, values, device)
    return [says(greedy(module, encoder, each.prompt), each) for each in canaries]


def answers_of(
    bundle: "JobBundle", values: NDArray[np.float32], asked: Sequence[Tested], folder: Path
) -> tuple[AnswerFigures, float]:
    """Export a version, and let it answer prompts with the most likely tokens.

    Args:
        values: the version, (d,).
        folder: where the exported version goes; it must not exist.

    Returns:
        The figures, and tokens a second of one thread's processor time.
    """
    from export.generating import Generator, Sampling
    from export.generator import export_generator

    prompts = [Dialogue.of(each.prompt) for each in asked]
    samples = [Dialogue.of(each.prompt, each.references[0]) for each in asked[:2]]
    export_generator(
        bundle.document,
        bundle.manifest,
        bundle.manifest.encode(values),
        bundle.public_tokenizer,
        folder,
        samples,
        backbone=backbone_of(bundle),
        frozen=bundle.frozen,
    )
    generator = Generator.load(folder, threads=1)
    began = time.process_time()
    written = list(generator.write_all(prompts, Sampling()))
    spent = time.process_time() - began
    figures = answer_figures([each.text.strip() for each in written], [each.references for each in asked])
    return figures, sum(each.tokens for each in written) / spent
