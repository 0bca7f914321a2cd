"""Sampling repeats with a seed, follows the scores' distribution, and never writes special tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learning.synthesis import sampling
from learning.synthesis.model import Rvae
from learning.synthesis.sampling import Sampling, draw_words, sample
from learning.synthesis.training import train_plain
from learning.synthesis.words import PAD_ID, UNKNOWN_ID
from secure_agg import SystemRandom
from tacit.corpus import MAX_GUIDED_LABELS
from tacit.job import Training
from tests.support.toy_texts import FEELINGS, SMALL, Seeded, toy_model, toy_texts, toy_words

torch.set_num_threads(1)
EVEN = np.array([1, 1])


@pytest.fixture(scope="module")
def learnt():
    texts, labels = toy_texts(200)
    module = toy_model(replace(SMALL, free_bits=1.0))
    recipe = Training(epochs=15, batch=32, optimiser="adam", learning_rate=0.03)
    train_plain(module, toy_words().encode(texts, labels), recipe, seed=2)
    return module


def test_a_seed_gives_the_same_texts_and_the_systems_source_does_not(learnt):
    words = toy_words()
    first = sample(learnt, words, EVEN, 40, Seeded("a"))
    assert first == sample(learnt, words, EVEN, 40, Seeded("a"))
    assert first != sample(learnt, words, EVEN, 40, Seeded("b"))
    assert sample(learnt, words, EVEN, 40, SystemRandom()) != sample(learnt, words, EVEN, 40, SystemRandom())


def test_labels_follow_the_histogram_and_texts_follow_labels(learnt):
    found = sample(learnt, toy_words(), np.array([30, 90]), 200, Seeded("labels"))
    assert [sum(each.label == place for each in found) for place in (0, 1)] == [50, 150]
    # In random order, so a prefix has both.
    assert {each.label for each in found[:20]} == {0, 1}
    right = sum(any(word in each.text.split() for word in FEELINGS[each.label]) for each in found)
    wrong = sum(any(word in each.text.split() for word in FEELINGS[1 - each.label]) for each in found)
    # By chance both would be equally many.
    assert right > 160
    assert wrong < 30


def test_the_length_is_bounded_and_special_tokens_are_never_written():
    # With initial weights, all words are about equally likely, as are [UNK], labels and padding.
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
    for drawing, shares in (
        (Sampling(), (1 / 6, 2 / 6, 3 / 6)),
        (Sampling(temperature=0.5), (1 / 14, 4 / 14, 9 / 14)),
        (Sampling(top_k=2), (0.0, 2 / 5, 3 / 5)),
        (Sampling(top_k=1), (0.0, 0.0, 1.0)),
    ):
        drawn = draw_words(scores, words, Seeded("shares"), drawing)
        for word, share in zip((2, 3, words.end_id), shares, strict=True):
            assert float((drawn == word).double().mean()) == pytest.approx(share, abs=0.016)


@pytest.mark.parametrize("guidance", [0.0, 1.0, 3.0])
def test_guidance_strengthens_a_texts_label(guidance):
    """By hand, with a decoder that knows only the label bias, so the first word's scores are known."""
    words = toy_words()
    module = Rvae(SMALL, len(words.entries), words.labels, None)
    with torch.no_grad():
        module.label_bias.weight[:, 0] = torch.tensor([1.0, -0.5])
        module.output.weight[:, 0] = 0.1 * torch.arange(words.rows) / SMALL.label_weight
    drawn = sample(module, words, EVEN, 6000, Seeded("guided"), Sampling(max_tokens=1, guidance=guidance))
    usable = [each for each in range(words.end_id + 1) if each not in (PAD_ID, UNKNOWN_ID)]
    leans = np.array([1.0, -0.5])
    for label in (0, 1):
        leaning = leans[label] + guidance * (leans[label] - leans.mean())
        shares = np.exp(0.1 * leaning * np.array(usable))
        expected = dict(zip(usable, shares / shares.sum(), strict=True))
        texts = [each.text for each in drawn if each.label == label]
        assert len(texts) == 3000
        for place in (2, words.end_id - 1):
            found = sum(text == words.entries[place] for text in texts) / len(texts)
            assert found == pytest.approx(expected[place], abs=4 * (expected[place] / 3000) ** 0.5 + 1e-9), place


def test_every_labels_decoder_reads_the_words_of_its_own_text(learnt, monkeypatch):
    """The scores of all drawn words, against each text decoded alone under each label."""
    words, given, draws, points = toy_words(), [], [], []
    draw, gaussian = sampling.draw_words, sampling.gaussian_like  # type: ignore[attr-defined]

    def drawing(scores, *others):
        given.append(scores)
        draws.append(draw(scores, *others))
        return draws[-1]

    def prior(*arguments):
        points.append(gaussian(*arguments))
        return points[-1]

    monkeypatch.setattr(sampling, "draw_words", drawing)
    monkeypatch.setattr(sampling, "gaussian_like", prior)
    made = sample(learnt, words, EVEN, 6, Seeded("streams"), Sampling(guidance=2.0, max_tokens=4))
    assert len(given) > 2
    for place, text in enumerate(made):
        alone = []
        for label in (0, 1):
            ids = torch.from_numpy(words.label_ids(np.array([label])))
            scores, told, state = learnt.begin(points[0][place : place + 1], ids)
            seen = [scores]
            for drawn in draws[:-1]:
                scores, state = learnt.step(drawn[place : place + 1], told, state)
                seen.append(scores)
            alone.append(torch.cat(seen))
        own = alone[text.label]
        expected = own + 2.0 * (own - (alone[0] + alone[1]) / 2)
        assert torch.allclose(torch.stack([each[place] for each in given]), expected, atol=1e-5)


def test_guidance_by_too_many_labels_is_refused(learnt):
    many = replace(toy_words(), labels=MAX_GUIDED_LABELS + 1)
    with pytest.raises(ValueError, match="guidance by 257 labels"):
        sample(learnt, many, np.ones(many.labels, dtype=np.int64), 1, Seeded("many"), Sampling(guidance=1.0))
    found = sample(learnt, toy_words(), EVEN, 5, Seeded("few"), Sampling(guidance=1.0, batch=1))
    assert len(found) == 5


def test_progress_is_reported_before_every_word(learnt):
    said = []
    sample(
        learnt, toy_words(), EVEN, 3, Seeded("told"), Sampling(max_tokens=4, batch=2), lambda *told: said.append(told)
    )
    assert said[0] == (0, 3)
    assert said[-1] == (3, 3)
    assert said.count((0, 3)) > 1
    assert {made for made, _ in said} == {0, 2, 3}


def test_label_bias_acts_on_every_text_of_its_label_and_no_other():
    module, ids = toy_model().eval(), toy_words().encode(*toy_texts(6))
    before = module.losses(torch.from_numpy(ids)).reconstruction
    with torch.no_grad():
        module.label_bias.weight[1] = 0.3
    after = module.losses(torch.from_numpy(ids)).reconstruction
    of_it = torch.from_numpy(ids[:, 0] == toy_words().label_ids(np.array([1]))[0])
    assert 0 < int(of_it.sum()) < 6
    assert torch.equal(before != after, of_it)
    module.setting = replace(module.setting, label_weight=0.0)
    assert torch.equal(module.losses(torch.from_numpy(ids)).reconstruction, before)


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
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"max_tokens": 0},
        {"batch": 0},
        {"guidance": -1.0},
    ],
    ids=["cold", "nan", "no-words", "no-length", "no-batch", "against"],
)
def test_invalid_samplings_are_refused(changes):
    with pytest.raises(ValueError, match=r"at least 1|between"):
        Sampling(**changes)
