"""The published variant follows its paper, states what that is worth, and leaks texts whatever it claims."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learning.synthesis import NO_GUARANTEE, PublishedSetting, promise_of
from learning.synthesis import published as published_module
from learning.synthesis.published import published_step, rewrite, train_published
from learning.synthesis.words import PAD_ID, UNKNOWN_ID
from tests.support.planted import mean_exposure, planted_ids
from tests.support.toy_texts import SMALL, Seeded, toy_model, toy_texts, toy_words

torch.set_num_threads(1)
# All words of the decoder's input are replaced, so the formula claims epsilon 0.
CLAIMS_NOTHING = PublishedSetting(word_dropout=1.0, batch=8, epochs=60, learning_rate=0.3)


def test_the_formula_at_the_published_setting_is_999():
    setting = PublishedSetting()
    assert (setting.input_scale, setting.word_dropout, setting.clip) == (0.001, 0.6, 1.0)
    assert (setting.learning_rate, setting.batch, setting.delta) == (0.05, 32, 1e-5)
    assert setting.formula_epsilon == pytest.approx(1000 + math.log(0.4), abs=1e-6)
    assert setting.formula_epsilon == pytest.approx(999.08, abs=0.01)
    assert CLAIMS_NOTHING.formula_epsilon == 0
    mild = PublishedSetting(input_scale=2.0)
    assert mild.formula_epsilon == pytest.approx(math.log(0.4 * math.exp(0.5) + 0.6))
    assert PublishedSetting(input_scale=2.0, word_dropout=0.0).formula_epsilon == 0.5


def test_its_promise_says_that_there_is_no_guarantee():
    assert NO_GUARANTEE == "no differential privacy guarantee"
    assert promise_of("published").startswith(NO_GUARANTEE)
    assert "999.08" in promise_of("published")
    assert NO_GUARANTEE not in promise_of("sound")
    for words in (published_module.__doc__, train_published.__doc__, rewrite.__doc__):
        assert words is not None
        assert NO_GUARANTEE in words.lower().replace("\n", " ").replace("    ", "")


def step_of(setting, ids, seed="step"):
    """The gradients that one step applied: the change of all parameters over minus the learning rate."""
    module = toy_model()
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    module.train()
    module.seed(7)
    published_step(module, ids, setting, Seeded(seed))
    return {name: (before[name] - each.detach()) / setting.learning_rate for name, each in module.named_parameters()}


def test_only_the_encoders_average_is_clipped_and_noised():
    texts, labels = toy_texts(12)
    ids = toy_words().encode(texts, labels)
    # Almost no noise first, then a lot of it.
    still = PublishedSetting(clip=0.01, gradient_scale=1e-9, learning_rate=1.0)
    first = step_of(still, ids)
    inner = [name for name in first if name.split(".")[0] in {"encoder", "mean", "log_variance"}]
    assert len(inner) == 7
    norm = math.sqrt(sum(float(first[name].double().square().sum()) for name in inner))
    assert norm == pytest.approx(0.01, rel=1e-3)
    loud = replace(still, gradient_scale=100.0)
    once = step_of(loud, ids)
    noise = np.concatenate([(once[name] - first[name]).numpy().ravel() for name in inner])
    # The scale is gradient_scale * clip^2 = 0.01, which is the mean magnitude of Laplace noise.
    assert float(np.abs(noise).mean()) == pytest.approx(0.01, abs=4 * 0.01 / math.sqrt(len(noise)))
    assert float(noise.std()) == pytest.approx(0.01 * math.sqrt(2), rel=0.1)
    for name in set(first) - set(inner):
        torch.testing.assert_close(once[name], first[name], rtol=0, atol=1e-5)


def test_one_decoder_step_reveals_a_text_with_certainty():
    """At a claimed epsilon of 0: the score of a word that only the canary has is pushed down less if it is there."""
    words = toy_words()
    with_it = planted_ids(words, canaries=1)
    without = with_it[:-1]
    word = int(with_it[-1, 4])
    assert not (without == word).any()
    setting = replace(CLAIMS_NOTHING, learning_rate=1.0)
    assert setting.formula_epsilon == 0
    moved = {
        there: [float(step_of(setting, ids, f"{there}{each}")["output.bias"][word]) for each in range(20)]
        for there, ids in ((True, with_it), (False, without))
    }
    # They differ clearly every time; at epsilon 0 the two distributions would be the same.
    assert max(moved[True]) + 0.02 < min(moved[False])


def test_canaries_are_memorised_at_a_claimed_epsilon_of_zero():
    """`test_sound_variant` has the other side, at the same settings."""
    words = toy_words()
    # Without label bias, as in the paper's model.
    module = toy_model(replace(SMALL, word_dropout=1.0, label_weight=0.0))
    train_published(module, planted_ids(words), CLAIMS_NOTHING, random=Seeded("published"))
    assert mean_exposure(module, words) > 4.5


def test_each_text_is_rewritten_with_its_own_label_and_length():
    words = toy_words()
    ids = planted_ids(words)
    found = rewrite(toy_model(), words, ids, PublishedSetting(), Seeded("rewrite"))
    assert [each.label for each in found] == (ids[:, 0] - words.end_id - 1).tolist()
    assert all(
        len(each.text.split()) <= length for each, length in zip(found, (ids != PAD_ID).sum(axis=1) - 2, strict=True)
    )
    assert found == rewrite(toy_model(), words, ids, PublishedSetting(), Seeded("rewrite"))


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["every-word", "no-word"])
def test_the_decoder_is_fed_with_the_texts_own_words(monkeypatch, share):
    words, module = toy_words(), toy_model()
    ids = planted_ids(words)
    step, read, shifts = module.step, [], []

    def watched(at, context, state, shift=None):
        read.append(at)
        shifts.append(shift)
        return step(at, context, state, shift)

    monkeypatch.setattr(module, "step", watched)
    rewrite(module, words, ids, PublishedSetting(word_dropout=share, input_scale=0.5), Seeded("led"))
    led = torch.stack(read, dim=1).numpy()
    expected = ids[:, 1:-1]
    assert (led == np.where((expected != PAD_ID) & (share == 1), UNKNOWN_ID, expected)).all()
    # The mean magnitude of Laplace noise is its scale, 0.5.
    assert float(torch.stack(shifts).abs().mean()) == pytest.approx(0.5, rel=0.1)


def test_training_without_texts_and_invalid_settings_are_refused():
    with pytest.raises(ValueError, match="no texts"):
        train_published(toy_model(), np.zeros((0, 3), dtype=np.int64), PublishedSetting(), random=Seeded("none"))
    for changes in ({"input_scale": 0.0}, {"word_dropout": 2.0}, {"batch": 0}, {"delta": 1.0}, {"clip": math.inf}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            PublishedSetting(**changes)
