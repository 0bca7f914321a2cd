"""Small jobs of several architectures to audit, and the defects that an audit must notice."""

import functools
import json
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from export.bundle import make_job_bundle, read_job_bundle
from learning.auditing.subject import Subject
from learning.text.examples import Example
from simulation.rounds import backbone_of
from tacit.job import JobSpec
from tests.support.tiny_models import saved

__all__ = ["KINDS", "LABELS", "NOISED", "WORDS", "broken", "rows_of", "subject_of"]

LABELS = ("day", "night")
# Whole words of letters, a quarter of which says the label.
WORDS = [f"{first}{middle}{last}" for first in "bdfgklmnprst" for middle in "aeiou" for last in ("l", "ma", "ro", "s")]
# All rows in every step, so that a row that is in is in the update. Gradients are far longer than the clip.
NOISED = {"name": "dp-sgd", "noise_multiplier": 6.0, "lot": 1000, "steps": 2, "clip": 0.001}
MODELS = {
    "textcnn": {"embedding": 8, "maps": 8, "widths": [1, 2], "max_tokens": 16},
    "bilstm": {"architecture": "bilstm", "embedding": 8, "hidden": 16, "max_tokens": 16},
    "rvae": {"architecture": "rvae", "embedding": 8, "hidden": 12, "latent": 4, "max_tokens": 16},
}
KINDS = ("textcnn", "bilstm", "head", "rvae")


def spec_of(kind: str, mechanism: dict | str, **changes) -> dict:
    """A job file of this kind."""
    whole: dict = {"schema": 1, "name": kind, "labels": list(LABELS), "seed": 1, "mechanism": mechanism}
    whole["training"] = {"optimiser": "sgd", "learning_rate": 0.5, "batch": 64}
    if kind in ("head", "prompt"):
        injection = "none" if kind == "head" else {"name": "prompt-tuning", "tokens": 3}
        task = {"name": "head"}
        whole["model"] = {
            "architecture": "prompted",
            "base": "base",
            "max_tokens": 24,
            "injection": injection,
            "task": task,
        }
    else:
        whole |= {"model": MODELS[kind], "vocabulary": {"kind": "words", "file": "words.txt"}}
    if kind == "rvae":
        whole["corpus"] = {"texts": 10}
    return whole | changes


@functools.cache
def _bundle(kind: str, changes: str):
    # The folder outlives the tests of the process: a backbone is read from it.
    place = Path(tempfile.mkdtemp())
    (place / "words.txt").write_text("\n".join(WORDS) + "\n")
    if kind in ("head", "prompt"):
        saved(place / "base", "bert")
    make_job_bundle(JobSpec.model_validate(json.loads(changes)), place, place / "bundle")
    return read_job_bundle(place / "bundle")


def subject_of(kind: str, mechanism: dict | str, **changes) -> Subject:
    """A job of this kind at version 0."""
    bundle = _bundle(kind, json.dumps(spec_of(kind, mechanism, **changes)))
    return Subject(
        bundle.document,
        bundle.manifest,
        bundle.weights,
        bundle.tokenizer if kind in ("head", "prompt") else bundle.public_tokenizer,
        frozen=bundle.frozen,
        backbone=backbone_of(bundle),
    )


def rows_of(count: int, seed: int = 0) -> list[Example]:
    """Rows whose label depends on which half of the words they use."""
    random = np.random.Generator(np.random.Philox(seed))
    found = []
    for _ in range(count):
        label = int(random.integers(2))
        half = WORDS[: len(WORDS) // 2] if label else WORDS[len(WORDS) // 2 :]
        found.append(Example(" ".join(random.choice(half, 8)), LABELS[label]))
    return found


@contextmanager
def broken(part: str):
    """The member's own code with one part of dp-sgd silently removed: `noise`, `clipping`, or nothing."""
    from learning.training import head, private
    from learning.training.clipping import ClippedGradients

    with ExitStack() as stack:
        if part == "noise":
            stack.enter_context(mock.patch.object(private, "fill_gaussian", lambda tensor, *_: tensor.zero_()))
            stack.enter_context(
                mock.patch.object(head, "noised_on_lattice", lambda sums, unit, *_: _silent(sums, unit))
            )
        if part == "clipping":
            stack.enter_context(mock.patch.object(ClippedGradients, "add", _unclipped))
            stack.enter_context(mock.patch.object(private, "check_examples_apart", return_value=None))
            stack.enter_context(mock.patch.object(head, "clip_factors", lambda norms, _: norms * 0 + 1))
        yield


def _silent(sums, unit):
    """The sum without its noise."""
    return (sums * unit).astype(np.float32)


def _unclipped(self, losses, clip, groups=None):
    """Replaces `ClippedGradients.add`: adds every gradient as it is, as if a parameter had been forgotten."""
    import torch

    self._calls.clear()
    trained = [parameter for layer in self._layers.values() for parameter in layer.parameters(recurse=False)]
    for total, gradient in zip(self.sums.values(), torch.autograd.grad(losses.sum(), trained), strict=True):
        total.add_(gradient, alpha=1 / clip)
