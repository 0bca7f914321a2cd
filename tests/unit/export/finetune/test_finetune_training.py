"""A classifier's training on synthetic texts: the split, early stopping, the head, the words and the figures."""

import numpy as np
import pytest
import torch

from export.finetune.scores import scores_of
from export.finetune.training import fit, validation_rows, with_two_layers
from export.finetune.words import base_pieces, read_words, words_of_corpora, words_of_tokenizer
from learning.models import build
from learning.text.encoder import TextEncoder, VocabularyInvalid, word_tokenizer
from learning.training.local import TrainingDiverged, evaluate
from tacit.job import Training
from tacit.model import BiLSTMModel, TransformerModel

torch.set_num_threads(1)

WORDS = ["good", "bad", "the", "a", "film", "play", "day", "was", "it", "and"]
ENCODER = TextEncoder(word_tokenizer(WORDS), 8, 1)


def texts_of(count, seed, told=True):
    """Texts with "good" have label 1, texts with "bad" label 0. Without `told`, labels have nothing to do with them."""
    random = np.random.default_rng(seed)
    labels = random.integers(2, size=count)
    texts = [" ".join([*random.choice(WORDS[2:], size=4), WORDS[1 - label]]) for label in labels]
    return texts, (labels if told else random.integers(2, size=count))


def module_of(seed=1, dropout=0.3):
    return build(
        BiLSTMModel(embedding=8, hidden=8, dropout=dropout), ENCODER.vocabulary_size, 2, ENCODER.pad_id, seed=seed
    )


def weights(module):
    return {name: each.detach().clone() for name, each in module.named_parameters()}


# ---- the validation split


def test_a_tenth_of_each_labels_texts_is_validated_on():
    texts = [f"text {at}" for at in range(100)] + ["text 3"] * 5 + [f"text {at}" for at in range(100, 130)]
    labels = np.array([0] * 105 + [1] * 30)
    held = validation_rows(texts, labels, 5)
    inside = {text for text, mark in zip(texts, held, strict=True) if mark}
    assert not inside & {text for text, mark in zip(texts, held, strict=True) if not mark}
    assert len(inside & set(texts[:100])) == 10
    assert len(inside & set(texts[105:])) == 3
    assert (validation_rows(texts, labels, 5) == held).all()
    assert (validation_rows(texts, labels, 6) != held).any()


def test_a_text_with_two_labels_is_on_one_side_of_the_split():
    texts = [f"text {at % 40}" for at in range(80)]
    for seed in range(5):
        held = validation_rows(texts, np.array([0] * 40 + [1] * 40), seed)
        assert held.sum() == 8
        assert (held[:40] == held[40:]).all()


def test_few_rows_leave_none_to_validate_on():
    assert not validation_rows(["a", "b", "c"] * 3, np.array([0, 1, 0] * 3), 0).any()


# ---- training


def fitted(module, texts, labels, *, seed=3, **how):
    recipe = Training(epochs=how.pop("epochs", 12), batch=16, learning_rate=how.pop("rate", 0.02))
    held = how.pop("held", validation_rows(texts, labels, 0))
    return fit(module, ENCODER.encode(texts), labels, held, recipe, patience=how.pop("patience", 3), seed=seed, **how)


def test_training_learns_and_reports_each_epoch():
    texts, labels = texts_of(200, 1)
    module, told = module_of(), []
    found = fitted(module, texts, labels, report=told.append)
    assert tuple(told) == found.epochs
    other, expected = texts_of(100, 2)
    assert evaluate(module, ENCODER.encode(other), expected).accuracy > 0.95
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())


def test_training_stops_early_and_keeps_the_best_epoch():
    texts, labels = texts_of(120, 1, told=False)
    module = module_of(dropout=0)
    held = validation_rows(texts, labels, 0)
    found = fitted(module, texts, labels, epochs=40, patience=2, held=held)
    losses = [epoch.validation_loss for epoch in found.epochs]
    assert len(found.epochs) < 40
    assert found.best.validation_loss == min(losses)
    assert found.best.number == len(losses) - 2
    kept = evaluate(module, ENCODER.encode(texts)[held], labels[held])
    assert (kept.loss, kept.accuracy) == pytest.approx((min(losses), found.best.validation_accuracy), abs=1e-6)


def test_validation_rows_are_not_trained_on():
    texts, labels = texts_of(120, 1)
    held = np.arange(120) >= 100
    one, other = module_of(), module_of()
    fitted(one, texts, labels, held=held, epochs=1)
    # Other labels there change the measured figures, but no weight.
    fitted(other, texts, np.where(held, 1 - labels, labels), held=held, epochs=1)
    for name, each in weights(one).items():
        assert torch.equal(each, weights(other)[name])


def test_without_validation_rows_the_last_epoch_is_kept():
    texts, labels = texts_of(40, 1)
    found = fitted(module_of(), texts, labels, held=np.zeros(40, dtype=np.bool_), epochs=5, patience=1)
    assert (len(found.epochs), found.best.number, found.best.validation_loss) == (5, 5, None)


def test_other_random_draws_do_not_change_the_weights():
    texts, labels = texts_of(60, 1)
    one, other, third = module_of(), module_of(), module_of()
    fitted(one, texts, labels, epochs=2)
    torch.manual_seed(99)
    fitted(other, texts, labels, epochs=2)
    fitted(third, texts, labels, epochs=2, seed=4)
    assert all(torch.equal(each, weights(other)[name]) for name, each in weights(one).items())
    assert any(not torch.equal(each, weights(third)[name]) for name, each in weights(one).items())


def test_a_loss_that_is_not_finite_stops_training():
    texts, labels = texts_of(40, 1)
    module = module_of()
    with torch.no_grad():
        module.output.bias.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match="lower --learning-rate"):
        fitted(module, texts, labels)
    with pytest.raises(ValueError, match="no examples"):
        fitted(module_of(), texts, labels, held=np.ones(40, dtype=np.bool_))
    with pytest.raises(ValueError, match="a mark for each of 40 rows"):
        fitted(module_of(), texts, labels, held=np.ones(4, dtype=np.bool_))


# ---- the head


TINY = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"intermediate_size": 12, "max_position_embeddings": 16}


def test_the_head_of_a_transformer_is_two_layers_with_tanh_between():
    model = TransformerModel(config=TINY, max_tokens=8)
    module = build(model, 20, 3, 0, seed=1)
    state = torch.random.get_rng_state()
    with_two_layers(module, 7)
    assert torch.equal(torch.random.get_rng_state(), state)
    first, between, last = module.output
    assert (first.weight.shape, last.weight.shape) == ((8, 8), (3, 8))
    rows = torch.linspace(-1, 1, 16).reshape(2, 8)
    by_hand = torch.tanh(rows @ first.weight.T + first.bias) @ last.weight.T + last.bias
    assert torch.allclose(module.output(rows), by_hand, atol=1e-6)
    assert isinstance(between, torch.nn.Tanh)
    again = build(model, 20, 3, 0, seed=1)
    with_two_layers(again, 7)
    assert all(torch.equal(each, weights(again)[name]) for name, each in weights(module).items())
    assert {module.part_of(name) for name in weights(module) if name.startswith("output")} == {"head"}
    with pytest.raises(TypeError, match="is not a linear layer"):
        with_two_layers(module, 7)


# ---- words


def test_words_that_occur_twice_come_before_public_ones():
    texts = ["The film was good", "the film, was bad", "a day"]
    assert words_of_corpora(texts) == ["film", "the", "was"]
    assert words_of_corpora(texts, ["Film", "actor", "stage"]) == ["film", "the", "was", "actor", "stage"]
    assert words_of_corpora(texts, ["actor"], most=2) == ["film", "the"]
    with pytest.raises(VocabularyInvalid, match="no word occurs twice in the corpora"):
        words_of_corpora(["one two", "three"])


def test_public_words_are_read_from_lists_tables_and_tokenizers(tmp_path):
    (tmp_path / "words.txt").write_text("good 0.1 0.2\nbad\n\n", encoding="utf-8")
    assert read_words(tmp_path / "words.txt") == ["good", "bad"]
    assert words_of_tokenizer(word_tokenizer(WORDS)) == WORDS
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nre\n##d\n", encoding="utf-8")
    assert base_pieces(str(tmp_path)) == ["[PAD]", "[UNK]", "re", "##d"]
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(VocabularyInvalid, match="has no word pieces"):
        base_pieces(str(tmp_path))


# ---- figures


def test_scores_agree_with_a_calculation_by_hand():
    expected = np.array([0, 0, 0, 0, 1, 1, 1, 2])
    predicted = np.array([0, 0, 1, 2, 1, 1, 0, 0])
    found = scores_of(expected, predicted, ("a", "b", "c", "d"))
    assert (found.rows, found.accuracy) == (8, 0.5)
    assert found.standard_error == pytest.approx((0.25 / 8) ** 0.5)
    assert (found.majority, found.majority_label) == (0.5, "a")
    rows = {each.label: (each.rows, each.precision, each.recall, each.f1) for each in found.labels}
    assert rows == {
        "a": (4, 0.5, 0.5, 0.5),
        "b": (3, pytest.approx(2 / 3), pytest.approx(2 / 3), pytest.approx(2 / 3)),
        "c": (1, 0, 0, 0),
        "d": (0, 0, 0, 0),
    }
    # No row has label d.
    assert found.macro_f1 == pytest.approx((0.5 + 2 / 3 + 0) / 3)


def test_scores_need_a_prediction_for_each_row():
    with pytest.raises(ValueError, match="at least one row"):
        scores_of(np.array([], dtype=np.int64), np.array([], dtype=np.int64), ("a", "b"))
    with pytest.raises(ValueError, match="one prediction for each row"):
        scores_of(np.array([0, 1]), np.array([0]), ("a", "b"))
