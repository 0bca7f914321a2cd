"""A prompted model is measured like any other: its backbone, its template, and its frozen values."""

import hashlib
import threading

import numpy as np
import pytest

from edge_client.policy.policy import Policy
from edge_client.session.kept_back import KeptBack
from edge_client.session.measuring import Measurer, Parts
from learning.backbones.stored import read_backbone
from learning.models.assembly import whole_model
from learning.text.examples import Example
from learning.training.local import logits_of
from tacit.documents import DocumentInvalid
from tests.support.measurements import measuring
from tests.support.random_sources import Seeded
from tests.support.tiny_jobs import LABELS, TinyJob, random_texts


@pytest.mark.parametrize("kind", ["lora-bert", "none-layers", "cloze-pairs"])
def test_the_rows_of_each_label_are_measured_by_the_prompted_model(kind, tmp_path):
    tiny = TinyJob(kind, tmp_path)
    job, bundle = tiny.document, tiny.job
    # `tiny` loads the bundle's weights; any version has as many values.
    draw = np.random.default_rng(4)
    version = (bundle.manifest.decode(bundle.weights) + draw.normal(0, 0.5, job.values)).astype("<f4").tobytes()
    asked, _ = measuring(job, hashlib.sha256(version).digest(), rows="all", by="label")
    assert asked.model.backbone in asked.blobs
    pairs = kind == "cloze-pairs"
    texts = sorted(set(random_texts(pairs)))
    split = [each if pairs else (each, None) for each in texts]
    rows = [Example(first, LABELS[at % 3], text_b=second) for at, (first, second) in enumerate(split)]
    backbone = read_backbone(bundle.backbone, job.model.config)
    parts = Parts(bundle.manifest, version, bundle.tokenizer, bundle.frozen)
    kept = KeptBack.of(tmp_path / "home", Policy(metrics_epsilon=1.0), rows)
    measurer = Measurer.of(asked, asked.question, asked.mechanism, parts, backbone, rows, kept, "cpu")
    found = measurer(Seeded("coins"), threading.Event())
    assert found.shape == (9,)

    module, encoder = whole_model(
        job, bundle.manifest, version, bundle.tokenizer, backbone=backbone, frozen=bundle.frozen
    )
    for place, label in enumerate(LABELS):
        here = [at for at, row in enumerate(rows) if row.label == label]
        right = 0
        for at in here:
            ids = encoder.encode([texts[at]])
            right += int(logits_of(module, ids, batch=1)[0].argmax()) == place
        assert found[3 * place + 2] == 32 * len(here)
        assert found[3 * place + 1] == 64 * right - 32 * len(here)


def test_a_version_of_another_model_is_refused_before_any_row_is_read(tmp_path):
    tiny = TinyJob("bert", tmp_path)
    job, bundle = tiny.document, tiny.job
    asked, _ = measuring(job, hashlib.sha256(bundle.weights).digest())
    smaller = asked.model_copy(update={"labels": tuple(LABELS[:2])})
    parts = Parts(bundle.manifest, bundle.weights, bundle.tokenizer, bundle.frozen)
    with pytest.raises(DocumentInvalid):
        Measurer.of(smaller, smaller.question, smaller.mechanism, parts, None, [], None, "cpu")
