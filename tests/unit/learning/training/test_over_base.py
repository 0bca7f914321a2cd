"""Updates over a frozen pretrained encoder: what a job does not train stays as the base has it, to the bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from export.bundle import JobBundle, make_job_bundle, read_job_bundle
from learning.mechanisms.protection import protection_of
from learning.models.assembly import assembled
from learning.models.division import EMBEDDING
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.training.update import train_update
from tacit.job import JobSpec
from tests.support.sum_fleet import SeededRandom
from tests.support.tiny_models import saved, tokenizer_of

RATE = 0.5
EXAMPLES = [Example(text, label) for text, label in [("a great film", "good"), ("the movie is bad", "bad")] * 4]
GAUSSIAN = {"name": "gaussian-update", "noise_multiplier": 2.0, "clip": 0.5, "lot": 1000}
DP_SGD = {"name": "dp-sgd", "noise_multiplier": 2.0, "clip": 0.5, "lot": 8, "steps": 2}
INJECTIONS = {
    "head alone": ("none", {"output"}),
    "lora": ({"name": "lora", "rank": 2, "train": "both"}, {"down", "up", "output"}),
    "one matrix": ({"name": "lora", "rank": 2, "train": "up"}, {"up", "output"}),
}
Arrays = dict[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("over a base")
    saved(made / "base", "bert", bare=True, words=len(json.loads(tokenizer_of("bert"))["model"]["vocab"]))
    return made


def bundled(folder: Path, out: Path, injection: object, mechanism: object = "none") -> JobBundle:
    model = {"architecture": "transformer", "base": "base", "injection": injection, "dropout": 0.0, "max_tokens": 24}
    training = {"optimiser": "sgd", "learning_rate": RATE} | ({} if mechanism == DP_SGD else {"epochs": 2, "batch": 64})
    spec = {"schema": 1, "name": "desk", "labels": ["good", "bad"], "method": "fedvocab", "seed": 3}
    whole = spec | {"model": model, "training": training, "mechanism": mechanism}
    make_job_bundle(JobSpec.model_validate(whole), folder, out)
    return read_job_bundle(out)


def start_of(bundle: JobBundle) -> Arrays:
    assert bundle.private is not None
    manifest, data = bundle.private
    return {name: each.copy() for name, each in manifest.unflatten(manifest.decode(data)).items()}


def updated(bundle: JobBundle, corpus: EncodedExamples) -> Any:
    return train_update(
        job=bundle.document,
        manifest=bundle.manifest,
        corpus=corpus,
        base=bundle.weights,
        protection=protection_of(bundle.document, len(EXAMPLES)),
        private=start_of(bundle),
        frozen=bundle.frozen,
        random=SeededRandom("over a base"),
        seed=4,
        device="cpu",
        progress=lambda *_: None,
        cancelled=lambda: False,
    )


def by_hand(bundle: JobBundle, corpus: EncodedExamples, parts: set[str]) -> Arrays:
    """The parameters after a step on the embedding alone and two on all that is trained, each on all examples."""
    module, _ = assembled(
        bundle.document,
        corpus,
        bundle.manifest,
        bundle.manifest.decode(bundle.weights),
        start_of(bundle),
        frozen=bundle.frozen,
    )
    read, named = corpus.read(), dict(module.named_parameters())
    ids, labels = torch.tensor(read.ids), torch.tensor(read.labels)
    trained = [name for name in named if name.split(".")[-2] in parts]
    for names in ([EMBEDDING], [EMBEDDING, *trained], [EMBEDDING, *trained]):
        loss = functional.cross_entropy(module(ids), labels)
        found = torch.autograd.grad(loss, [named[name] for name in names])
        with torch.no_grad():
            for name, gradient in zip(names, found, strict=True):
                named[name] -= RATE * gradient
    return {name: each.detach().numpy() for name, each in named.items()}


@pytest.mark.parametrize(("injection", "parts"), INJECTIONS.values(), ids=INJECTIONS)
def test_only_what_the_job_trains_moves(folder: Path, tmp_path: Path, injection: object, parts: set[str]) -> None:
    """Had the encoder moved too, the head and the rows would end elsewhere."""
    bundle = bundled(folder, tmp_path / "bundle", injection)
    assert {each.name.split(".")[-2] for each in bundle.manifest.tensors} == parts
    corpus = EncodedExamples(EXAMPLES, bundle.document, bundle.public_tokenizer)
    update, expected, before = updated(bundle, corpus), by_hand(bundle, corpus, parts), start_of(bundle)[EMBEDDING]
    start = bundle.manifest.decode(bundle.weights)
    found = bundle.manifest.unflatten(start + update.change)
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], atol=1e-5, err_msg=name)
    assert np.count_nonzero(update.change) > 0.9 * update.change.size
    np.testing.assert_allclose(update.private[EMBEDDING], expected[EMBEDDING], atol=1e-5)
    # The words of the texts moved, and no others.
    used = np.unique(corpus.read().ids)
    moved = np.flatnonzero((update.private[EMBEDDING] != before).any(axis=1))
    assert set(moved) == set(used) - {corpus.pad_id}


@pytest.mark.parametrize(("mechanism", "keeps"), [(DP_SGD, False), (GAUSSIAN, True)], ids=["dp-sgd", "gaussian-update"])
@pytest.mark.parametrize(("injection", "parts"), INJECTIONS.values(), ids=INJECTIONS)
def test_under_noise_every_shared_value_moves_and_nothing_else_travels(
    folder: Path, tmp_path: Path, injection: object, parts: set[str], mechanism: object, keeps: bool
) -> None:
    bundle = bundled(folder, tmp_path / "bundle", injection, mechanism)
    corpus = EncodedExamples(EXAMPLES, bundle.document, bundle.public_tokenizer)
    update = updated(bundle, corpus)
    assert {each.name.split(".")[-2] for each in bundle.manifest.tensors} == parts
    assert update.change.shape == (bundle.document.values,)
    assert np.count_nonzero(update.change) > 0.99 * update.change.size
    # Under dp-sgd the table is frozen; a mechanism on whole updates lets it move here.
    assert (update.private is not None) == keeps
    if keeps:
        assert update.private.keys() == {EMBEDDING}
        assert not np.array_equal(update.private[EMBEDDING], start_of(bundle)[EMBEDDING])
