"""Measuring a version on rows that are kept back: each row by itself, and no training ever uses one of them."""

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learning.mechanisms.protection import protection_of
from learning.models import build, shared_parameters
from learning.models.assembly import assembled
from learning.text.corpus import EncodedExamples
from learning.text.encoder import word_tokenizer
from learning.text.examples import Example
from learning.training import flushing
from learning.training.local import TrainingCancelled, logits_of
from learning.training.update import train_update
from learning.validation import measuring
from learning.validation.contribution import metrics_of
from learning.validation.measuring import ValidationData, measure
from learning.validation.split import Split, unit_of
from tacit.manifest import Manifest
from tacit.validation import HALF, NoisedMetrics
from tests.support.random_sources import Seeded
from tests.unit.learning.mechanisms.test_mechanisms import DP_SGD, GAUSSIAN, LAPLACE, RING, job

torch.set_num_threads(1)
WORDS = ["good", "bad", "film", "movie", "plot", "the", "a", "very"]
TOKENIZER = word_tokenizer(WORDS)
# So little noise that nearly every draw is 0.
SILENT = NoisedMetrics(noise_multiplier=0.0025, max_units=200)
ROWS = 60


def rows_of(seed=1, count=ROWS):
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS, size=random.integers(1, 6))) for _ in range(count)]
    return [Example(f"{text} {number % 7}", "ab"[number % 2]) for number, text in enumerate(texts)]


def prepared(mechanism, examples, kept_back=None):
    document = job(mechanism, metrics=SILENT.model_dump(), values=1)
    corpus = EncodedExamples(examples, document, TOKENIZER, kept_back=kept_back)
    arrays = shared_parameters(build(document.model, corpus.vocabulary_size, 2, corpus.pad_id, seed=3))
    manifest = Manifest.of(arrays)
    document = document.model_copy(update={"values": manifest.values})
    return document, corpus, manifest, manifest.encode(manifest.flatten(arrays))


def updated(mechanism, examples, kept_back=None, validation=None, seed="update", progress=lambda *_: None):
    document, corpus, manifest, base = prepared(mechanism, examples, kept_back)
    return train_update(
        job=document,
        manifest=manifest,
        corpus=corpus,
        base=base,
        protection=protection_of(document, len(examples)),
        validation=validation,
        random=Seeded(seed),
        seed=5,
        device="cpu",
        progress=progress,
        cancelled=lambda: False,
    )


def version(examples):
    document, corpus, manifest, base = prepared(GAUSSIAN, examples)
    module, _ = assembled(document, corpus, manifest, manifest.decode(base), {}, None, {})
    return corpus, module


def alone(examples):
    """Losses and answers, one row at a time through a corpus that holds nothing else."""
    losses, correct = [], []
    for example in examples:
        corpus, module = version([example])
        read = corpus.read()
        with torch.no_grad():
            logits = module(torch.tensor(read.ids)).double()
        losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(read.labels))))
        correct.append(int(logits.argmax()) == int(read.labels[0]))
    return np.array(losses), np.array(correct)


def test_a_row_contributes_the_same_whatever_rows_are_beside_it():
    examples = rows_of()
    corpus, module = version(examples)
    read, bound = corpus.read(), 5.0
    each = []
    for at in range(ROWS):
        one = replace(read, ids=read.ids[at : at + 1], labels=read.labels[at : at + 1], usable=read.usable[at : at + 1])
        each.append(measuring._measured(module, one.ids, one.labels, "cpu"))
    losses, correct = measuring._measured(module, read.ids, read.labels, "cpu")
    # To the last bit: a difference could move another row's step.
    assert [float(loss[0]) for loss, _ in each] == losses.tolist()
    assert [bool(right[0]) for _, right in each] == correct.tolist()
    expected = alone(examples)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert correct.tolist() == expected[1].tolist()
    units = list(range(ROWS))
    found = measure(module, read, units, bound, Seeded("r"), device="cpu", cancelled=lambda: False)
    assert found.tolist() == metrics_of(losses, correct, units, bound, Seeded("r")).tolist()


def test_a_row_that_cannot_be_computed_counts_as_wrong_and_moves_no_other(monkeypatch):
    examples = rows_of(count=5)
    corpus, module = version(examples)
    read = corpus.read()
    expected = measuring._measured(module, read.ids, read.labels, "cpu")

    def fails(module, ids, **more):
        if any((ids == read.ids[2]).all(axis=1)):
            raise RuntimeError("out of memory")
        return logits_of(module, ids, **more)

    monkeypatch.setattr("learning.training.local.logits_of", fails)
    losses, correct = measuring._measured(module, read.ids, read.labels, "cpu")
    assert math.isinf(losses[2])
    assert not correct[2]
    others = [0, 1, 3, 4]
    assert losses[others].tolist() == expected[0][others].tolist()
    assert correct[others].tolist() == expected[1][others].tolist()


def test_a_row_that_fails_a_check_of_the_module_looks_like_any_other():
    corpus, module = version(rows_of(count=5))
    read = corpus.read()
    losses, correct = measuring._measured(module, read.ids, read.labels, "cpu")

    def check(_, inputs):
        # As a plugin's module may: a version can be made in which one word alone leads to it.
        if (inputs[0][:, 0] == read.ids[2, 0]).any():
            raise ValueError("a state is not finite")

    module.register_forward_pre_hook(check)
    failed = read.ids[:, 0] == read.ids[2, 0]
    assert 0 < failed.sum() < len(failed)
    found, right = measuring._measured(module, read.ids, read.labels, "cpu")
    assert np.isinf(found[failed]).all()
    assert not right[failed].any()
    assert found[~failed].tolist() == losses[~failed].tolist()
    assert right[~failed].tolist() == correct[~failed].tolist()


def test_measuring_stops_when_told():
    corpus, module = version(rows_of())
    with pytest.raises(TrainingCancelled):
        measure(module, corpus.read(), range(ROWS), 5.0, Seeded("r"), device="cpu", cancelled=lambda: True)


@pytest.mark.parametrize("mechanism", [DP_SGD, GAUSSIAN, LAPLACE, RING], ids=lambda each: each["name"])
def test_the_update_carries_the_metrics_of_the_version_it_started_from(mechanism):
    examples = rows_of()
    units = [unit_of(each) for each in examples]
    split = Split(b"k" * 32, 0.4)
    kept_back = split.kept_back(units)
    assert 10 < kept_back.sum() < 40
    update = updated(mechanism, examples, kept_back, ValidationData(kept_back, units))
    losses, correct = alone([each for each, kept in zip(examples, kept_back, strict=True) if kept])
    found = update.measured / (2 * HALF)
    count = len({unit for unit, kept in zip(units, kept_back, strict=True) if kept})
    assert found[2] * 2 == pytest.approx(count, abs=0.2)
    expected = metrics_of(
        losses, correct, [u for u, kept in zip(units, kept_back, strict=True) if kept], 5.0, Seeded("x")
    )
    assert update.measured == pytest.approx(expected, abs=12)
    # Nothing is measured without the rows: noise alone, which is nothing here.
    assert np.abs(updated(mechanism, examples, kept_back).measured).max() <= 5


@pytest.mark.parametrize("mechanism", [DP_SGD, GAUSSIAN, LAPLACE, RING], ids=lambda each: each["name"])
def test_no_training_depends_on_a_row_that_is_kept_back(mechanism):
    """Its label is turned and its text replaced. N stays, and so do draws and lots; only other rows move the update."""
    examples = rows_of()
    kept_back = np.arange(ROWS) % 3 == 0
    other = [
        Example("very bad plot", "b" if each.label == "a" else "a") if kept else each
        for each, kept in zip(examples, kept_back, strict=True)
    ]
    before, after = (updated(mechanism, each, kept_back) for each in (examples, other))
    assert before.examples == after.examples == ROWS
    assert before.change.tobytes() == after.change.tobytes()
    # Without the division the same change shows.
    bare = [updated(mechanism, each) for each in (examples, other)]
    assert bare[0].change.tobytes() != bare[1].change.tobytes()


def test_a_member_that_is_protected_as_a_whole_is_one_unit():
    examples = rows_of()
    everything = np.ones(ROWS, dtype=np.bool_)
    ring = {**RING, "unit": "member"}
    update = updated(ring, examples, everything, ValidationData(everything, [unit_of(each) for each in examples]))
    assert np.abs(update.measured).max() <= HALF + 5
    assert update.measured[2] == pytest.approx(HALF, abs=5)


def test_rows_with_a_label_that_is_not_the_jobs_are_not_measured():
    examples = [Example("good film", "a"), Example("bad film", "b"), Example("the plot", "c")]
    everything = np.ones(3, dtype=np.bool_)
    update = updated(GAUSSIAN, examples, everything, ValidationData(everything, [b"1", b"2", b"3"]))
    assert update.measured[2] == pytest.approx(2 * HALF, abs=5)


def test_another_job_that_measures_fewer_rows_of_the_same_data_measures_those():
    """Jobs that read the data alike share what was encoded."""
    corpus, _ = version(rows_of())
    many, few = np.arange(ROWS) % 2 == 0, np.arange(ROWS) % 6 == 0
    for mask in (many, few, many):
        assert corpus.read_validation(mask).usable.tolist() == np.flatnonzero(mask).tolist()
    assert corpus.read_validation(many) is corpus.read_validation(many)


def test_no_row_takes_longer_for_subnormal_products_and_trainings_are_as_before(monkeypatch):
    """A version could be made so that one word alone has them. The time until READY would tell who has the word."""
    tiny = torch.full((8,), 2.0e-39)
    seen = []

    def watched(module, ids, **more):
        seen.append(float((tiny * 0.5).sum()))
        return logits_of(module, ids, **more)

    monkeypatch.setattr("learning.training.local.logits_of", watched)
    corpus, module = version(rows_of(count=5))
    before = float((tiny * 0.5).sum())
    assert before > 0
    measure(module, corpus.read(), range(5), 5.0, Seeded("r"), device="cpu", cancelled=lambda: False)
    assert set(seen) == {0.0}
    assert float((tiny * 0.5).sum()) == before


@pytest.mark.parametrize("known", [True, False], ids=["the register is known", "torch alone has a switch"])
@pytest.mark.parametrize("mechanism", [DP_SGD, GAUSSIAN, LAPLACE, RING], ids=lambda each: each["name"])
def test_the_steps_of_a_member_that_measures_take_no_longer_for_subnormal_products(monkeypatch, mechanism, known):
    if not known:
        monkeypatch.setattr(flushing, "flushed", contextlib.nullcontext)
    tiny = torch.full((8,), 2.0e-39)
    examples, seen = rows_of(count=20), []
    kept_back = np.arange(20) % 4 == 0
    units = [unit_of(each) for each in examples]
    for validation in (None, ValidationData(kept_back, units)):
        seen.clear()
        updated(mechanism, examples, kept_back, validation, progress=lambda *_: seen.append(float((tiny * 0.5).sum())))
        assert seen
        assert set(seen) == {0.0}
        assert float((tiny * 0.5).sum()) > 0
