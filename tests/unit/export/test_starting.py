"""The starting weights of an autoencoder's job, learnt from public text when the job is bundled."""

import gzip
import json

import numpy as np
import pytest
import torch

from export.bundle import make_job_bundle, read_job_bundle
from learning.models import build
from learning.synthesis.training import measure
from learning.synthesis.words import public_words
from tacit.documents import DocumentInvalid
from tacit.job import JobSpec
from tests.support.processes import EXAMPLES

PUBLIC = (EXAMPLES / "public.txt").read_text()
LINES = PUBLIC.splitlines()
SIZES = {"architecture": "rvae", "embedding": 16, "hidden": 16, "latent": 4, "words": 4000, "max_tokens": 16}


def spec_of(**more):
    return JobSpec(
        name="start",
        labels=("yes", "no"),
        model=SIZES,
        vocabulary={"kind": "words", "file": str(EXAMPLES / "words.txt")},
        **more,
    )


def made(folder, name, **start):
    said = []
    spec = spec_of(start=start) if start else spec_of()
    make_job_bundle(spec, folder, folder / name, report=said.append)
    return read_job_bundle(folder / name), said


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "public.txt").write_text("\n\n".join(LINES[:80]))
    return tmp_path


def module_of(bundle):
    job = bundle.document
    words = public_words(bundle.tokenizer, bytes(job.tokenizer), labels=2, max_tokens=16)
    module = build(job.model, len(words.entries), 2, 0, seed=0)
    values = bundle.manifest.unflatten(bundle.manifest.decode(bundle.weights))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(values[name])))
    return module, words


def test_the_bundle_has_what_was_learnt_but_not_the_public_text(folder):
    bare, _ = made(folder, "bare")
    begun, said = made(folder, "begun", file="public.txt", epochs=12)
    assert begun.document.manifest == bare.document.manifest
    assert begun.weights != bare.weights
    # Lines that the model was not trained on, under both labels.
    worth = []
    for bundle in (bare, begun):
        module, words = module_of(bundle)
        ids = words.encode(LINES[80:], np.arange(20) % 2)
        # Labels were drawn at random, so nothing is learnt about them.
        assert not module.label_bias.weight.any()
        worth.append(measure(module, ids, seed=1).prior_perplexity)
    assert worth[1] < worth[0] / 3
    assert any("80 public texts" in line for line in said)
    # Only the operator has the text, or knows where it was.
    assert b"public.txt" not in begun.document.canonical()
    assert "start" not in json.loads(begun.document.canonical())


def test_the_same_text_and_seed_give_the_same_weights(folder):
    (folder / "public.txt.gz").write_bytes(gzip.compress((folder / "public.txt").read_bytes()))
    plain, _ = made(folder, "plain", file="public.txt", epochs=1)
    packed, _ = made(folder, "packed", file="public.txt.gz", epochs=1)
    fewer, said = made(folder, "fewer", file="public.txt", epochs=1, texts=10)
    assert plain.weights == packed.weights
    assert plain.weights != fewer.weights
    assert any("10 public texts" in line for line in said)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no line of text"),
        (b"\n \n", "no line of text"),
        (b"\xff\xfe\x00", "cannot be read as lines of UTF-8"),
        ("Ξεσκεπάζω την ψυχοφθόρα βδελυγμία".encode(), "no word of the job's list"),
        (None, "cannot be read as lines of UTF-8"),
    ],
)
def test_a_file_without_usable_text_is_refused(folder, content, words):
    if content is None:
        (folder / "public.txt").unlink()
    else:
        (folder / "public.txt").write_bytes(content)
    with pytest.raises(DocumentInvalid, match=words):
        made(folder, "none", file="public.txt")
    assert not (folder / "none").exists()


def test_only_a_job_that_generates_text_has_a_start():
    with pytest.raises(ValueError, match="start: only an rvae learns"):
        JobSpec(
            name="start",
            labels=("yes", "no"),
            vocabulary={"kind": "words", "file": "words.txt"},
            start={"file": "public.txt"},
        )
