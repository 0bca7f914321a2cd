"""The parts of the attack that decide its figures: what counts as recovered, what leaves a member, and the defences."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.reconstruction.attack import (
    Batch,
    Matching,
    NoSpan,
    Observed,
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
    vectors_by_matching,
)
from benchmarks.reconstruction.attack import _Watched as Watched
from benchmarks.reconstruction.tables import found_rows
from benchmarks.reconstruction.tokens import average_shared, cells, figures, measured_before
from learning.models import build, division_of
from tacit.method import FedAvg, FedRecon, FedVocab
from tacit.model import BiLSTMModel, TextCNNModel, TransformerModel

torch.set_num_threads(1)
WORDS = ("[PAD]", "[UNK]", "the", "room", "12", "b7", "at", "noon")
BATCH = Batch(np.array([[2, 3, 4, 0], [2, 5, 6, 7]]), np.array([0, 1]), WORDS, 0)


def module(**changes):
    return build(BiLSTMModel(embedding=6, hidden=5, **changes), len(WORDS), 2, 0, seed=1)


def test_a_reference_token_named_several_times_counts_once():
    assert tally(["a", "b"], ["a", "a", "a"]) == Tally(matched=1, recovered=3, reference=2)


def test_a_token_that_occurs_twice_must_be_named_twice():
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


def test_an_attacker_that_names_no_token_scores_zero():
    found = tally(["1"], [])
    assert (found.precision, found.recall, found.f1, found.digit_leakage) == (0, 0, 0, 0)
    assert Tally().recall == 0


@pytest.mark.parametrize(("token", "expected"), [("2004", True), ("b7", True), ("##9", True), ("two", False), ("", 0)])
def test_a_digit_token_has_a_digit(token, expected):
    assert has_digit(token) == expected


def test_a_table_needs_a_vector_for_each_word():
    with pytest.raises(ValueError, match="2 words need as many vectors"):
        Table(("a", "b"), np.zeros((3, 4), np.float32))


def test_an_unrelated_table_keeps_the_words_but_no_vector():
    rows = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    table = Table(tuple(map(str, range(400))), rows)
    other = table.unrelated(3)
    assert other.words == table.words
    assert abs(np.corrcoef(other.rows.ravel(), rows.ravel())[0, 1]) < 0.1
    assert other.rows.std() == pytest.approx(rows.std(), rel=0.05)
    assert (other.rows == table.unrelated(3).rows).all()


def test_a_table_can_take_rows_of_another():
    one = Table(("a", "7"), np.zeros((2, 3), np.float32))
    other = Table(("a", "7"), np.ones((2, 3), np.float32))
    assert one.with_rows_of(other, frozenset({"7"})).rows.tolist() == [[0, 0, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="different words"):
        one.with_rows_of(Table(("7", "a"), other.rows), frozenset({"7"}))


def test_a_batch_knows_its_tokens_and_lengths():
    assert BATCH.lengths == (3, 4)
    assert BATCH.tokens() == ["the", "room", "12", "the", "b7", "at", "noon"]


def test_only_shared_gradients_leave():
    made = module()
    everything = shared_gradient(made, BATCH, division_of(FedAvg(), made))
    shared = shared_gradient(made, BATCH, division_of(FedVocab(), made))
    assert everything.keys() - shared.keys() == {"embedding.weight"}
    assert all(torch.equal(everything[name], value) for name, value in shared.items())


def test_gradients_of_private_rows_do_not_leave():
    made = module()
    division = division_of(FedRecon(), made, WORDS)
    gradient = shared_gradient(made, BATCH, division)
    assert gradient["embedding.weight"].shape == (6, 6)
    said = tokens_by_rows(gradient, shared_words(division, WORDS))
    assert set(said) == {"the", "room", "at", "noon"}


def test_a_private_embedding_shares_no_word():
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
    # A short gradient is not scaled up.
    assert torch.equal(noised({"a": torch.ones(1)}, 2.0, 0.0, seed=1)["a"], torch.ones(1))


def test_a_sum_is_taken_name_by_name():
    found = summed([{"a": torch.ones(2), "b": torch.zeros(1)}, {"a": torch.ones(2), "b": torch.ones(1)}])
    assert found["a"].tolist() == [2, 2]
    assert found["b"].tolist() == [1]


def test_the_nearest_word_is_the_one_in_the_same_direction():
    table = Table(("[PAD]", "east", "north"), np.array([[0, 0], [1, 0], [0, 9]], np.float32))
    vectors = np.array([[[5, 1], [1, 2], [7, 7]]], np.float32)
    assert nearest_words(vectors, np.array([[True, True, False]]), table) == ["east", "north"]


def bert():
    config = {
        "model_type": "bert",
        "hidden_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 5,
        "max_position_embeddings": 16,
    }
    return build(TransformerModel(config=config, max_tokens=16), len(WORDS), 2, 0, seed=1)


@pytest.mark.parametrize("make", [module, bert])
def test_batches_in_parallel_have_the_same_gradients_as_alone(make):
    made = make()
    batches = [BATCH, Batch(BATCH.ids[::-1].copy(), np.array([0, 0]), WORDS, 0)]
    ids = torch.from_numpy(np.stack([batch.ids for batch in batches]))
    vectors = made.embedding(ids).detach().requires_grad_()
    labels = torch.from_numpy(np.stack([batch.labels for batch in batches]))
    made.eval()
    with Watched(made) as watched, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = watched.gradients(vectors, ids != 0, labels, None)
    for at, batch in enumerate(batches):
        alone = shared_gradient(made, batch, division_of(FedVocab(), made))
        assert {name for name in alone if "LayerNorm" not in name and "embeddings" not in name} == found.keys()
        for name, value in found.items():
            torch.testing.assert_close(value[at], alone[name], rtol=1e-4, atol=1e-7)


def test_a_cold_softmax_equals_the_maximum():
    made = module()
    ids, labels = torch.from_numpy(BATCH.ids)[None], torch.from_numpy(BATCH.labels)[None]
    vectors = made.embedding(ids).detach().requires_grad_()
    made.eval()
    with Watched(made) as watched:
        hard, cold, warm = (watched.gradients(vectors, ids != 0, labels, each) for each in (None, 1e-6, 1.0))
    for name, value in hard.items():
        torch.testing.assert_close(cold[name], value, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(warm["encoder.onward.weight_ih"], hard["encoder.onward.weight_ih"], rtol=0.1)


def test_a_search_leaves_the_model_unchanged():
    made = module()
    before = made(torch.from_numpy(BATCH.ids))
    gradient = shared_gradient(made, BATCH, division_of(FedVocab(), made))
    (found,) = vectors_by_matching(made, [Observed(gradient, BATCH.labels, BATCH.seen)], Matching(3, starts=2))
    assert found.shape == (2, 4, 6)
    assert torch.equal(made(torch.from_numpy(BATCH.ids)), before)
    assert not any(layer._forward_hooks for layer in made.modules())


def test_the_start_with_the_nearest_gradient_counts():
    made = module()
    case = Observed(shared_gradient(made, BATCH, division_of(FedVocab(), made)), BATCH.labels, BATCH.seen)

    def distance(vectors):
        there, labels = torch.from_numpy(BATCH.seen)[None], torch.from_numpy(BATCH.labels)[None]
        with Watched(made) as watched:
            found = watched.gradients(torch.from_numpy(vectors)[None].requires_grad_(), there, labels, None)
        wanted = case.gradient
        shares = [(value[0] - wanted[name]).abs().sum() / wanted[name].abs().sum() for name, value in found.items()]
        return torch.stack(shares).sum().item()

    chosen, *_ = vectors_by_matching(made, [case], Matching(10, starts=6, seed=3))
    # Each of as many cases is one of those starts.
    each = [distance(vectors) for vectors in vectors_by_matching(made, [case] * 6, Matching(10, seed=3))]
    assert distance(chosen) == pytest.approx(min(each), rel=1e-4)
    assert min(each) < 0.99 * each[0]


def test_batches_of_different_sizes_are_refused():
    made = module()
    gradient = shared_gradient(made, BATCH, division_of(FedVocab(), made))
    cases = [Observed(gradient, BATCH.labels[:size], BATCH.seen[:size]) for size in (1, 2)]
    with pytest.raises(ValueError, match="batches of one size"):
        vectors_by_matching(made, cases, Matching(2))


def test_shared_parameters_are_averaged_but_not_tables():
    modules = [module(), build(BiLSTMModel(embedding=6, hidden=5), len(WORDS), 2, 0, seed=2)]
    tables = [made.embedding.weight.detach().clone() for made in modules]
    mean = sum(made.output.weight.detach() for made in modules) / 2
    average_shared(modules, division_of(FedVocab(), modules[0]))
    for made, table in zip(modules, tables, strict=True):
        torch.testing.assert_close(made.output.weight.detach(), mean)
        assert torch.equal(made.embedding.weight, table)


def test_attacks_refuse_another_architecture():
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


def test_every_cell_has_its_own_case():
    named = [str(cell.case) for cell in cells()]
    assert len(named) == len(set(named)) > 100


def test_the_benchmark_covers_the_planned_cells():
    made = list(cells())
    assert {cell.attacker for cell in made} == {"true", "public", "unrelated"}
    assert {cell.batch for cell in made if cell.attack == "span"} == {1, 2, 4, 8, 16, 32, 64}
    assert {cell.batch for cell in made if cell.attack == "positions"} == {1, 2, 4, 8, 16, 32, 64}
    own = {"own-vocabulary", "own-vocabulary-random"}
    assert {cell.defence for cell in made} >= {"frozen", "noise-1", "secure-aggregation"} | own
    assert {cell.method for cell in made} == {"fedavg", "fedrecon", "fedvocab"}


# The paper's attack in the paper's form, on the smaller model.
PAPERS = next(each for each in cells() if each.attack == "dlg" and each.paper == 0.876)


def test_the_papers_attack_is_also_run_with_the_true_table():
    asked = [cell for cell in cells() if cell.attack == "dlg" and cell.method == "fedvocab"]
    with_table = {
        who: {(cell.model, cell.batch, cell.rounds) for cell in asked if cell.attacker == who}
        for who in ("true", "public", "unrelated")
    }
    assert with_table["unrelated"] == with_table["true"]
    # The realistic attacker, after some rounds, when its table differs from the present one.
    assert with_table["public"] == {each for each in with_table["true"] if each[2]}
    assert {model for model, *_ in with_table["public"]} == {"bilstm-50", "bilstm-300", "bert-2x128"}


def test_lines_of_an_older_version_are_measured_again():
    cell = PAPERS
    assert not measured_before([], cell)
    assert not measured_before([{"value": 0.5}], cell)
    assert not measured_before([{"value": 0.5, "version": 1}], cell)
    assert measured_before([{"value": 0.5, "version": cell.version}], cell)
    (plain,) = [each for each in cells() if each.attack == "rows" and each.model == "bilstm-50" and each.batch == 64]
    assert measured_before([{"value": 0.5}], plain)


def test_a_row_of_the_report_has_its_counts():
    cell = PAPERS
    lines = [
        {"case": cell.case, "figure": figure.name, "value": figure.value, **figure.more}
        for figure in figures(cell, [Tally(1, 2, 40, 1, 2)])
    ]
    head, row = found_rows(lines)
    said = dict(zip(head, row, strict=True))
    assert (said["sentences"], said["seeds"], said["tokens"], said["digit tokens"]) == ("8", "1", "40", "2")
    assert (said["precision"], said["digit leakage"]) == ("0.5", "0.5")


@pytest.mark.parametrize(("true", "note"), [(0.05, "fails with the true table too"), (0.7, "")])
def test_a_row_notes_an_attack_that_fails_with_the_true_table(true, note):
    pair = {
        cell.attacker: cell
        for cell in cells()
        if (cell.attack, cell.model, cell.batch, cell.method) == ("dlg", "bert-2x128", 8, "fedvocab")
    }
    lines = [
        {"case": pair[attacker].case, "figure": "token_f1", "value": value}
        for attacker, value in (("true", true), ("unrelated", 0.01))
    ]
    head, *rows = found_rows(lines)
    notes = {row[head.index("attacker")]: row[head.index("note")] for row in rows}
    assert notes == {"true": "", "unrelated": note}


def test_a_row_notes_that_the_public_table_is_the_present_one():
    line = {"case": replace(PAPERS, method="fedvocab", attacker="public").case, "figure": "token_f1", "value": 0.7}
    later = {**line, "case": {**line["case"], "rounds": 5}}
    head, *rows = found_rows([line, later])
    assert [row[head.index("note")] for row in rows] == ["the same table as true", ""]


def test_the_recipe_gives_the_sentences_of_an_older_line():
    (cell,) = [
        each
        for each in cells()
        if each.attack == "span" and each.batch == 64 and each.attacker == "true" and each.model == "bilstm-300"
    ]
    line = {"case": cell.case, "figure": "token_f1", "value": 0.5, "values": [0.4, 0.5, 0.6], "tokens": 7}
    head, row = found_rows([line])
    said = dict(zip(head, row, strict=True))
    assert (said["sentences"], said["seeds"], said["tokens"], said["digit tokens"]) == ("64", "3", "7", "")


def test_only_the_papers_attack_has_the_papers_figure():
    beside = {(cell.method, cell.model, cell.attacker): cell.paper for cell in cells() if cell.paper is not None}
    assert beside == {
        ("fedavg", "bilstm-50", "true"): 0.876,
        ("fedrecon", "bilstm-50", "unrelated"): 0.021,
        ("fedvocab", "bilstm-50", "unrelated"): 0.012,
        ("fedavg", "bilstm-300", "true"): 0.876,
        ("fedrecon", "bilstm-300", "unrelated"): 0.021,
        ("fedvocab", "bilstm-300", "unrelated"): 0.012,
        ("fedavg", "bert-2x128", "true"): 0.882,
        ("fedrecon", "bert-2x128", "unrelated"): 0.024,
        ("fedvocab", "bert-2x128", "unrelated"): 0.013,
    }


def test_a_cells_figures_are_means_over_seeds():
    cell = PAPERS
    lines = {figure.name: figure for figure in figures(cell, [Tally(1, 2, 4, 1, 2), Tally(3, 3, 4, 2, 2)])}
    assert lines.keys() == {"token_precision", "token_recall", "token_f1", "digit_leakage"}
    assert lines["token_precision"].value == 0.75
    assert lines["token_recall"].value == 0.5
    assert lines["digit_leakage"].value == 0.75
    counts = {"sentences": 8, "tokens": 8, "digits": 4, "version": 2}
    assert lines["token_f1"].more.items() >= counts.items()
    assert lines["digit_leakage"].more == {"spread": 0.5, "values": [0.5, 1.0], **counts, "paper": 0.876}
