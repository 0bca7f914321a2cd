"""The grid over the pretrained encoder: its cells, and that one of each kind trains what it says."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest

from benchmarks.library import minilm
from benchmarks.private_vocabularies import pretrained as bench
from benchmarks.private_vocabularies.pretrained import CELLS, cells_of, recipe_for, shared_of
from benchmarks.private_vocabularies.quality import PAPER_TRANSFORMER, Cell, Data, measure
from learning.text.examples import Example
from tacit.method import FedVocab

KINDS = {"NUM": "how many 7 are there", "LOC": "where is the city", "HUM": "who is the man"}
ROWS = [Example(f"{KINDS[label]} {'x' * (number % 4)}", label) for number in range(12) for label in KINDS]


def test_no_case_is_doubled_and_every_row_of_the_paper_has_a_cell() -> None:
    cases = [json.dumps(cell.case, sort_keys=True) for cell in CELLS]
    assert len(set(cases)) == len(cases) == 4 * 2 * (7 + 4)
    assert sum(cell.paper is not None for cell in CELLS) == sum(map(len, PAPER_TRANSFORMER.values()))
    found = {(cell.dataset, cell.name, cell.adaptive): cell.paper for cell in CELLS if cell.paper is not None}
    assert found["20newsgroups", "fedvocab", True] == (75.2, 86.8)
    assert found["20newsgroups", "fedvocab", False] == (72.9, 78.7)
    assert all(cell.injection is None for cell in CELLS if cell.paper is not None)


def test_lora_has_rates_of_its_own_and_small_members_small_batches() -> None:
    for cell in cells_of("trec"):
        recipe = recipe_for(cell)
        lora = shared_of(cell) == "lora"
        assert (recipe.learning_rate, recipe.embedding_learning_rate) == ((0.001, 0.0001) if lora else (0.0001, None))
        assert (recipe.members, recipe.cohort, recipe.rounds, recipe.batch) == (100, 10, 20, 8)
    assert recipe_for(cells_of("sst2")[0]).batch == 16


@pytest.mark.skipif(
    find_spec(minilm.PACKAGE) is None, reason="the package with the pretrained encoder is not installed"
)
@pytest.mark.parametrize("vocabulary", ["same", "own"])
def test_a_cell_of_lora_shares_lora_alone(tmp_path, vocabulary) -> None:
    cell = Cell("trec", FedVocab(), vocabulary, model="minilm", injection="lora")
    recipe = replace(recipe_for(cell), members=3, cohort=3, rounds=1, common=4, rows=None, tested=2)
    found = {each.name: each for each in measure(cell, Data("trec", ROWS, ROWS[:9]), recipe, 0, tmp_path, 1)}
    # Rank 8 of two matrices in six layers, 384 wide, and the head of three labels.
    assert found["values_per_round"].value == 6 * 2 * 8 * 768 + 385 * 3
    assert 0 <= found["local_accuracy"].value <= 1
    assert found["global_accuracy"].more["recipe"]["embedding_learning_rate"] == 0.0001


def test_cells_are_measured_once_and_a_seed_after_the_other(monkeypatch) -> None:
    measured = []

    class Kept:
        def done(self, case, seed):
            return [1] if (case["method"], seed) == ("fedavg", 0) else []

        def open(self, seeds):
            assert seeds == [0, 1]

    monkeypatch.setattr(bench, "read_data", lambda name: name)
    monkeypatch.setattr(bench, "_add", lambda results, cell, data, recipe, seed, *_: measured.append((seed, cell.name)))
    cells = [cell for cell in cells_of("trec") if cell.adaptive or cell.name == "fedavg"][:2]
    assert bench.run(Kept(), cells, [0, 1], 1, float("inf"))
    assert measured == [(0, "fedvocab"), (1, "fedvocab"), (1, "fedavg")]
    assert not bench.run(Kept(), cells, [0, 1], 1, float("-inf"))
