"""A frozen embedding gets no step and no noise: its change is exactly zero, in training and in the decoded sum."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from coordinator.rounds.publish import next_version
from export.bundle import JobBundle, make_job_bundle, read_job_bundle
from learning.mechanisms.protection import protection_of
from learning.models import build, shared_parameters
from learning.text.corpus import EncodedExamples
from learning.text.data import Example
from learning.training.update import train_update
from tacit.job import JobSpec
from tacit.model import TextCNNModel
from tacit.vector import layout_of
from tests.support.sum_fleet import SeededRandom

torch.set_num_threads(1)
WORDS = ["what", "who", "where", "is", "the", "city", "man", "river", "name", "unused"]
EXAMPLES = [
    Example(text, label)
    for text, label in (("what is the city", "a"), ("who is the man", "b"), ("where is the river", "a"))
] * 8
DP_SGD = {"name": "dp-sgd", "noise_multiplier": 1.5, "clip": 0.5, "lot": 12, "steps": 3}
OTHERS: list[dict[str, Any]] = [
    {"name": "gaussian-update", "noise_multiplier": 2.0},
    {"name": "laplace-update", "epsilon": 2.0},
    {"name": "distributed-gaussian", "noise_multiplier": 1.0},
]
MODEL = {"embedding": 5, "widths": [1, 2], "maps": 4, "max_tokens": 8}


def spec(mechanism: Any, *, frozen: bool, optimiser: str = "adam") -> JobSpec:
    return JobSpec.model_validate(
        {
            "schema": 1,
            "name": "questions",
            "labels": ["a", "b"],
            "mechanism": mechanism,
            "model": {**MODEL, "freeze_embedding": frozen},
            "training": {"optimiser": optimiser, "learning_rate": 0.05, "batch": 8},
            "vocabulary": {"kind": "words", "file": "words.txt"},
        }
    )


def bundle_of(folder: Path, mechanism: Any, **more: Any) -> JobBundle:
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n")
    make_job_bundle(spec(mechanism, **more), folder, folder / "bundle")
    return read_job_bundle(folder / "bundle")


def round_of(bundle: JobBundle) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """One round of three members: (a member's own change, the whole version's), by tensor."""
    job, manifest = bundle.document, bundle.manifest
    base = manifest.decode(bundle.weights)
    total = np.zeros(layout_of(job, 3).values, np.uint32)
    for number in range(3):
        random = SeededRandom(f"member {number}")
        protection = protection_of(job, len(EXAMPLES))
        update = train_update(
            job=job,
            manifest=manifest,
            corpus=EncodedExamples(EXAMPLES, job, bundle.tokenizer),
            base=bundle.weights,
            protection=protection,
            random=random,
            seed=number,
            device="cpu",
            progress=lambda *_: None,
            cancelled=lambda: False,
        )
        total += protection.encode(job, update, 3, random)
    values = next_version(job, 3, 3, total, base).values
    return manifest.unflatten(update.change), manifest.unflatten(values - base)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("mechanism", ["none", DP_SGD])
def test_only_a_frozen_embedding_changes_by_exactly_zero(tmp_path, mechanism, optimiser):
    for change in round_of(bundle_of(tmp_path, mechanism, frozen=True, optimiser=optimiser)):
        assert not change.pop("embedding.weight").any()
        assert all(tensor.any() for tensor in change.values())


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("mechanism", ["none", DP_SGD])
def test_an_embedding_that_is_not_frozen_is_trained(tmp_path, mechanism, optimiser):
    for change in round_of(bundle_of(tmp_path, mechanism, frozen=False, optimiser=optimiser)):
        moved = change["embedding.weight"].any(axis=1)
        assert not moved[0], "the padding"
        # Without noise only rows of used words move; under dp-sgd every row does.
        assert moved[-1] == (mechanism is DP_SGD)
        assert moved[2]


@pytest.mark.parametrize("mechanism", OTHERS, ids=lambda mechanism: mechanism["name"])
def test_mechanisms_that_would_noise_a_frozen_embedding_are_refused(mechanism):
    with pytest.raises(ValidationError, match=rf"freeze_embedding: {mechanism['name']} adds noise .* dp-sgd or none"):
        spec(mechanism, frozen=True)
    assert not spec(mechanism, frozen=False).model.freeze_embedding


@pytest.mark.parametrize("frozen", [True, False])
def test_narrowing_keeps_which_parameters_are_trained(frozen):
    model = TextCNNModel.model_validate({**MODEL, "freeze_embedding": frozen})
    module = build(model, len(WORDS), 2, 0, seed=1)
    before = shared_parameters(module)
    with module.narrowed(np.array([[1, 2, 3]])):
        assert module.embedding.weight.requires_grad is not frozen
        assert all(parameter.requires_grad for parameter in module.filters.parameters())
    assert module.embedding.weight.requires_grad is not frozen
    after = shared_parameters(module)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_frozen_embedding_is_still_sent_and_changes_the_digest(tmp_path):
    frozen = bundle_of(tmp_path, DP_SGD, frozen=True)
    (tmp_path / "other").mkdir()
    trained = bundle_of(tmp_path / "other", DP_SGD, frozen=False)
    assert frozen.weights == trained.weights
    assert frozen.document.values == frozen.manifest.values == trained.document.values
    assert frozen.document.digest() != trained.document.digest()
