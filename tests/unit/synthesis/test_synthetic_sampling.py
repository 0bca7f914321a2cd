"""Sampling: by seed the same, by the scores' distribution, and never what must not be written."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_client.synthesis.sampling import Sampling, draw_words, sample
from edge_client.synthesis.training import train_plain
from edge_client.synthesis.words import PAD_ID, UNKNOWN_ID
from secure_agg import SystemRandom
from tacit.job import Training
from tests.unit.synthesis.toy_texts import FEELINGS, SMALL, Seeded, toy_model, toy_texts, toy_words

torch.set_num_threads(1)
EVEN = np.array([1, 1])


@pytest.fixture(scope="module")
def learnt():
    texts, labels = toy_texts(300)
    module = toy_model(replace(SMALL, free_bits=1.0))
    recipe = Training(epochs=25, batch=32, optimiser="adam", learning_rate=0.01)
    train_plain(module, toy_words().encode(texts, labels), recipe, seed=2)
    return module


def test_a_seed_gives_the_same_texts_and_the_system_others(learnt):
    words = toy_words()
    first = sample(learnt, words, EVEN, 40, Seeded("a"))
    assert first == sample(learnt, words, EVEN, 40, Seeded("a"))
    assert first != sample(learnt, words, EVEN, 40, Seeded("b"))
    assert sample(learnt, words, EVEN, 40, SystemRandom()) != sample(learnt, words, EVEN, 40, SystemRandom())


def test_labels_follow_the_histogram_and_texts_follow_labels(learnt):
    found = sample(learnt, toy_words(), np.array([30, 90]), 200, Seeded("labels"))
    assert [sum(each.label == place for each in found) for place in (0, 1)] == [50, 150]
    # In random order: a prefix has both.
    assert {each.label for each in found[:20]} == {0, 1}
    right = sum(any(word in each.text.split() for word in FEELINGS[each.label]) for each in found)
    wrong = sum(any(word in each.text.split() for word in FEELINGS[1 - each.label]) for each in found)
    # By chance it would be as many of the one as of the other.
    assert right > 160
    assert wrong < 30


def test_the_length_is_bounded_and_marks_of_the_model_are_never_written():
    # Weights as they are drawn: every word about as likely as any other, the unknown, labels and padding, too.
    words = toy_words()
    found = sample(toy_model(), words, EVEN, 300, Seeded("untrained"), Sampling(max_tokens=7, batch=64))
    assert max(len(each.text.split()) for each in found) <= 7
    assert not any("[" in each.text for each in found)
    assert any(not each.text for each in found)


def test_words_are_drawn_as_often_as_their_scores_say():
    words = toy_words()
    scores = torch.full((20_000, words.rows), -100.0)
    scores[:, [PAD_ID, UNKNOWN_ID, words.end_id + 1]] = 50.0  # Never drawn, however high.
    scores[:, 2], scores[:, 3], scores[:, words.end_id] = 0.0, float(np.log(2)), float(np.log(3))
    for sampling, shares in (
        (Sampling(), (1 / 6, 2 / 6, 3 / 6)),
        (Sampling(temperature=0.5), (1 / 14, 4 / 14, 9 / 14)),
        (Sampling(top_k=2), (0.0, 2 / 5, 3 / 5)),
        (Sampling(top_k=1), (0.0, 0.0, 1.0)),
    ):
        drawn = draw_words(scores, words, Seeded("shares"), sampling)
        for word, share in zip((2, 3, words.end_id), shares, strict=True):
            assert float((drawn == word).double().mean()) == pytest.approx(share, abs=0.016)


def test_scores_that_are_not_finite_are_refused():
    scores = torch.zeros(2, toy_words().rows)
    scores[1, 4] = torch.nan
    with pytest.raises(ValueError, match="spoilt"):
        draw_words(scores, toy_words(), Seeded("nan"), Sampling())


def test_a_histogram_of_other_labels_is_refused(learnt):
    with pytest.raises(ValueError, match="2 labels"):
        sample(learnt, toy_words(), np.array([1, 1, 1]), 5, Seeded("three"))
    assert sample(learnt, toy_words(), EVEN, 0, Seeded("none")) == []


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.0}, {"temperature": float("nan")}, {"top_k": 0}, {"max_tokens": 0}, {"batch": 0}],
    ids=["cold", "nan", "no-words", "no-length", "no-batch"],
)
def test_samplings_that_cannot_be_are_refused(changes):
    with pytest.raises(ValueError, match=r"1 at least|between"):
        Sampling(**changes)
