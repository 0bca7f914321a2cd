"""A job that trains an autoencoder on the toy language, its bundle, and a member's training for it."""

import functools
import tempfile
from pathlib import Path

import numpy as np

from export.bundle import JobBundle, make_job_bundle, read_job_bundle
from learning.mechanisms.protection import protection_of
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.training.update import train_update
from tacit.job import JobSpec
from tests.support.toy_texts import LABELS, LIST, Seeded, toy_texts

__all__ = ["DP_SGD", "MODEL", "bundle_of", "examples_of", "spec_of", "trained"]

MODEL = {
    "architecture": "rvae",
    "embedding": 12,
    "hidden": 20,
    "latent": 4,
    "max_tokens": 10,
    "free_bits": 0.5,
}
DP_SGD = {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 32, "steps": 4}


def spec_of(mechanism=None, model=None, corpus=None, **changes) -> JobSpec:
    """A job as its operator writes it, by default with mechanism `none`."""
    whole = {
        "schema": 1,
        "name": "stories",
        "labels": list(LABELS),
        "vocabulary": {"kind": "words", "file": "words.txt"},
        "mechanism": mechanism or "none",
        "model": MODEL | (model or {}),
        "corpus": {"texts": 40} | (corpus or {}),
        "training": {"learning_rate": 0.02},
    }
    return JobSpec.model_validate(whole | changes)


@functools.cache
def _bundle(spec: JobSpec) -> JobBundle:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "words.txt").write_text("\n".join(LIST) + "\n")
        make_job_bundle(spec, Path(folder), Path(folder) / "bundle")
        return read_job_bundle(Path(folder) / "bundle")


def bundle_of(**changes) -> JobBundle:
    """The bundle of `spec_of(**changes)`, made once."""
    return _bundle(spec_of(**changes))


def examples_of(count=160, seed=0):
    """Labelled texts of the toy language."""
    texts, labels = toy_texts(count, seed)
    return [Example(text, LABELS[label]) for text, label in zip(texts, labels, strict=True)]


def trained(
    bundle: JobBundle,
    examples,
    *,
    base=None,
    random=None,
    progress=lambda *_: None,
    cancelled=lambda: False,
    warn=lambda _: None,
):
    """The member's update for one round, by default from version 0."""
    job = bundle.document
    return train_update(
        job=job,
        manifest=bundle.manifest,
        corpus=EncodedExamples(examples, job, bundle.public_tokenizer),
        base=bundle.weights if base is None else np.asarray(base, dtype="<f4").tobytes(),
        protection=protection_of(job, len(examples)),
        random=random or Seeded("training"),
        seed=1,
        device="cpu",
        progress=progress,
        cancelled=cancelled,
        warn=warn,
    )
