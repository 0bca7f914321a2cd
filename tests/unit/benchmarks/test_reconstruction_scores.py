"""What counts as recovered, what leaves a member, and the defences: the parts of the attack that decide its figures."""

import numpy as np
import pytest
import torch

from benchmarks.reconstruction import cells, figures
from benchmarks.reconstruction_attack import (
    Batch,
    NoSpan,
    Table,
    Tally,
    has_digit,
    nearest_words,
    noised,
    shared_gradient,
    shared_words,
    summed,
    tally,
    tokens_by_positions,
    tokens_by_rows,
    tokens_by_span,
    tokens_by_states,
)
from edge_client.models import build, division_of
from tacit.method import FedAvg, FedRecon, FedVocab
from tacit.model import BiLSTMModel, TextCNNModel

torch.set_num_threads(1)
WORDS = ("[PAD]", "[UNK]", "the", "room", "12", "b7", "at", "noon")
BATCH = Batch(np.array([[2, 3, 4, 0], [2, 5, 6, 7]]), np.array([0, 1]), WORDS, 0)


def module(**changes):
    return build(BiLSTMModel(embedding=6, hidden=5, **changes), len(WORDS), 2, 0, seed=1)


def test_a_reference_token_counts_once_however_often_it_is_said():
    assert tally(["a", "b"], ["a", "a", "a"]) == Tally(matched=1, recovered=3, reference=2)


def test_a_token_that_stands_twice_has_to_be_said_twice():
    once, twice = tally(["a", "a", "b"], ["a"]), tally(["a", "a", "b"], ["a", "a"])
    assert (once.matched, twice.matched) == (1, 2)


def test_special_tokens_count_on_neither_side():
    assert tally(["[CLS]", "a", "[UNK]", "[PAD]"], ["[SEP]", "[UNK]", "a", "[PAD]"]) == Tally(1, 1, 1)


def test_the_four_figures():
    found = tally(["10", "b2", "x", "y"], ["10", "x", "z", "99", "98"])
    assert found.precision == 2 / 5
    assert found.recall == 2 / 4
    assert found.f1 == pytest.approx(2 * 0.4 * 0.5 / 0.9)
    assert found.digit_leakage == 1 / 2


def test_counts_of_batches_add_up():
    assert tally(["1"], ["1"]) + tally(["x", "2"], ["x"]) == Tally(2, 2, 3, 1, 2)


def test_an_attacker_who_says_nothing_scores_nothing():
    found = tally(["1"], [])
    assert (found.precision, found.recall, found.f1, found.digit_leakage) == (0, 0, 0, 0)
    assert Tally().recall == 0


@pytest.mark.parametrize(("token", "expected"), [("2004", True), ("b7", True), ("##9", True), ("two", False), ("", 0)])
def test_a_digit_token_holds_a_digit(token, expected):
    assert has_digit(token) == expected


def test_a_table_needs_a_vector_for_each_word():
    with pytest.raises(ValueError, match="2 words need as many vectors"):
        Table(("a", "b"), np.zeros((3, 4), np.float32))


def test_an_unrelated_table_keeps_the_words_and_no_vector():
    rows = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    table = Table(tuple(map(str, range(400))), rows)
    other = table.unrelated(3)
    assert other.words == table.words
    assert abs(np.corrcoef(other.rows.ravel(), rows.ravel())[0, 1]) < 0.1
    assert other.rows.std() == pytest.approx(rows.std(), rel=0.05)
    assert (other.rows == table.unrelated(3).rows).all()


def test_some_rows_of_another_table():
    one = Table(("a", "7"), np.zeros((2, 3), np.float32))
    other = Table(("a", "7"), np.ones((2, 3), np.float32))
    assert one.with_rows_of(other, frozenset({"7"})).rows.tolist() == [[0, 0, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="different words"):
        one.with_rows_of(Table(("7", "a"), other.rows), frozenset({"7"}))


def test_a_batch_knows_its_tokens_and_lengths():
    assert BATCH.lengths == (3, 4)
    assert BATCH.tokens() == ["the", "room", "12", "the", "b7", "at", "noon"]


def test_what_leaves_is_what_the_division_shares():
    made = module()
    everything = shared_gradient(made, BATCH, division_of(FedAvg(), made))
    shared = shared_gradient(made, BATCH, division_of(FedVocab(), made))
    assert everything.keys() - shared.keys() == {"embedding.weight"}
    assert all(torch.equal(everything[name], value) for name, value in shared.items())


def test_of_private_rows_no_gradient_leaves():
    made = module()
    division = division_of(FedRecon(), made, WORDS)
    gradient = shared_gradient(made, BATCH, division)
    assert gradient["embedding.weight"].shape == (6, 6)
    said = tokens_by_rows(gradient, shared_words(division, WORDS))
    assert set(said) == {"the", "room", "at", "noon"}


def test_of_a_private_embedding_no_word_is_shared():
    made = module()
    assert shared_words(division_of(FedVocab(), made), WORDS) == []
    assert shared_words(division_of(FedAvg(), made), WORDS) == list(WORDS)


def test_a_frozen_embedding_has_no_gradient():
    made = module(freeze_embedding=True)
    assert "embedding.weight" not in shared_gradient(made, BATCH, division_of(FedAvg(), made))


def test_noise_is_added_to_a_clipped_gradient():
    gradient = {"a": torch.full((300, 100), 3.0), "b": torch.zeros(100)}
    clipped = noised(gradient, 0.5, 0.0, seed=1)
    assert sum(float(value.square().sum()) for value in clipped.values()) == pytest.approx(0.25, rel=1e-5)
    noisy = noised(gradient, 0.5, 2.0, seed=1)
    assert float((noisy["a"] - clipped["a"]).std()) == pytest.approx(1.0, rel=0.02)
    # A short one is not made longer.
    assert torch.equal(noised({"a": torch.ones(1)}, 2.0, 0.0, seed=1)["a"], torch.ones(1))


def test_a_sum_is_taken_name_by_name():
    found = summed([{"a": torch.ones(2), "b": torch.zeros(1)}, {"a": torch.ones(2), "b": torch.ones(1)}])
    assert found["a"].tolist() == [2, 2]
    assert found["b"].tolist() == [1]


def test_the_nearest_word_is_the_one_in_the_same_direction():
    table = Table(("[PAD]", "east", "north"), np.array([[0, 0], [1, 0], [0, 9]], np.float32))
    vectors = np.array([[[5, 1], [1, 2], [7, 7]]], np.float32)
    assert nearest_words(vectors, np.array([[True, True, False]]), table) == ["east", "north"]


def test_attacks_on_an_lstm_say_so_of_another_model():
    cnn = build(TextCNNModel(embedding=6, widths=(2,), maps=3), len(WORDS), 2, 0, seed=1)
    gradient = shared_gradient(cnn, BATCH, division_of(FedVocab(), cnn))
    table = Table(WORDS, cnn.embedding.weight.detach().numpy())
    parameters = {name: value.detach() for name, value in cnn.named_parameters()}
    with pytest.raises(NoSpan, match="no LSTM"):
        tokens_by_span(gradient, table, BATCH.lengths)
    with pytest.raises(NoSpan, match="no LSTM"):
        tokens_by_states(gradient, parameters, table, BATCH.lengths)
    with pytest.raises(NoSpan, match="no attention"):
        tokens_by_positions(cnn, gradient, table, BATCH.lengths)


def test_every_cell_of_the_benchmark_has_a_name_of_its_own():
    named = [str(cell.case) for cell in cells()]
    assert len(named) == len(set(named)) > 100


def test_the_benchmark_asks_what_was_promised():
    made = list(cells())
    assert {cell.attacker for cell in made} == {"true", "public", "unrelated"}
    assert {cell.batch for cell in made if cell.attack == "span"} == {1, 2, 4, 8, 16, 32, 64}
    assert {cell.defence for cell in made} >= {"frozen", "own-vocabulary", "noise-1", "secure-aggregation"}
    assert {cell.method for cell in made} == {"fedavg", "fedrecon", "fedvocab"}


def test_the_papers_figure_stands_beside_the_papers_attack_only():
    beside = {(cell.method, cell.model, cell.attacker): cell.paper for cell in cells() if cell.paper is not None}
    assert beside == {
        ("fedavg", "bilstm-50", "true"): 0.876,
        ("fedrecon", "bilstm-50", "unrelated"): 0.021,
        ("fedvocab", "bilstm-50", "unrelated"): 0.012,
        ("fedavg", "bert-2x128", "true"): 0.882,
        ("fedrecon", "bert-2x128", "unrelated"): 0.024,
        ("fedvocab", "bert-2x128", "unrelated"): 0.013,
    }


def test_a_cells_figures_are_means_over_seeds():
    (cell,) = [each for each in cells() if each.attack == "dlg" and each.paper == 0.876]
    lines = {figure.name: figure for figure in figures(cell, [Tally(1, 2, 4, 1, 2), Tally(3, 3, 4, 2, 2)])}
    assert lines.keys() == {"token_precision", "token_recall", "token_f1", "digit_leakage"}
    assert lines["token_precision"].value == 0.75
    assert lines["token_recall"].value == 0.5
    assert lines["digit_leakage"].value == 0.75
    assert lines["digit_leakage"].more == {"spread": 0.5, "values": [0.5, 1.0], "digits": 4, "paper": 0.876}
