"""A shared part is read behind four tables of word vectors, and the page's table and drawing show it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.library.record import Results
from benchmarks.private_vocabularies import embedding_divergence as drift
from benchmarks.private_vocabularies import quality as fedvocab
from benchmarks.private_vocabularies.embedding_divergence_tables import (
    divergence_rows,
    draw_divergence,
)
from benchmarks.private_vocabularies.quality import Cell, Data, Recipe
from learning.text.examples import Example
from simulation.virtual_members import Crew, States
from tacit.method import FedAvg, FedVocab

torch.set_num_threads(1)
KINDS = {"bad": "never again this film", "good": "what a lovely film"}
ROWS = [Example(f"{KINDS[label]} {'x' * (number % 4)}", label) for number in range(60) for label in KINDS]
DATA = Data("sst2", ROWS, ROWS[:9])
RECIPE = Recipe(members=5, cohort=3, rounds=3, hidden=4, max_tokens=8, batch=8, learning_rate=0.03)
BEHIND = ("own", "start", "mean", "another's")


@pytest.fixture
def glove(tmp_path, monkeypatch):
    path = tmp_path / "glove.txt"
    random = np.random.default_rng(0)
    words = sorted({word for text in KINDS.values() for word in text.split()})
    path.write_text("".join(f"{word} {' '.join(f'{x:.3f}' for x in random.normal(size=6))}\n" for word in words))
    monkeypatch.setattr(fedvocab.world_of, "__defaults__", (path,))


def test_movement_and_its_common_share_are_separate():
    start = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    step = np.array([[0.0, 3.0], [0.0, 0.0]], np.float32)
    assert drift.movement(start, [start, start]) == (0.0, 0.0)
    # The start has norm 5, and each table moved by 3.
    assert drift.movement(start, [start + step] * 3) == pytest.approx((0.6, 1.0))
    assert drift.movement(start, [start + step, start - step]) == pytest.approx((0.6, 0.0))
    assert drift.movement(start, [start + step, start + step.T]) == pytest.approx((0.6, 0.5))


def test_a_member_that_was_never_drawn_has_the_common_start(glove, tmp_path):
    world = fedvocab.world_of(Cell("sst2", FedVocab()), DATA, RECIPE, 0, tmp_path)
    (name,) = world.bundle.private[0].unflatten(world.bundle.private[0].decode(world.bundle.private[1]))
    start, found = drift.tables(world)
    assert all(np.array_equal(each, start) for each in found)
    States(world.states).save(3, None, {name: start + 1})
    _, found = drift.tables(world)
    assert [np.array_equal(each, start) for each in found] == [True, True, True, False, True]
    assert np.array_equal(found[3], start + 1)


def test_a_shared_table_or_own_word_lists_are_refused(glove, tmp_path):
    for name, cell in {"all": Cell("sst2", FedAvg()), "own": Cell("sst2", FedVocab(), "own")}.items():
        world = fedvocab.world_of(cell, DATA, RECIPE, 0, tmp_path / name)
        with pytest.raises(ValueError, match="do not start from a common table"):
            drift.tables(world)


def test_members_are_read_with_each_of_the_four_tables(glove, tmp_path, monkeypatch):
    """They are scored with their own table, the start, the mean, and the next member's."""
    seen, score = [], Crew.score

    def watched(self, version, readings, parts, **more):
        if "test" in parts:
            seen.append(drift.tables(replace(self.world, states=more["states"]))[1])
        return score(self, version, readings, parts, **more)

    monkeypatch.setattr(Crew, "score", watched)
    cells = drift.measure(Cell("sst2", FedVocab()), DATA, RECIPE, 0, tmp_path, 1)
    own, start, mean, others = seen
    assert not np.array_equal(own[0], own[1])
    world = fedvocab.world_of(Cell("sst2", FedVocab()), DATA, RECIPE, 0, tmp_path / "again")
    first, _ = drift.tables(world)
    for place in range(5):
        assert np.array_equal(start[place], first)
        np.testing.assert_allclose(mean[place], np.mean(own, axis=0), rtol=1e-6)
        assert np.array_equal(others[place], own[(place + 1) % 5])
    moved, in_common = (figure.value for figure in cells[-1][1])
    assert (moved, in_common) == pytest.approx(drift.movement(first, own), abs=1e-4)
    assert 0 < in_common < 1


def test_members_with_one_table_read_the_common_test_set_once(glove, tmp_path):
    world = fedvocab.world_of(Cell("sst2", FedVocab()), DATA, RECIPE, 0, tmp_path)
    crew, manifest = Crew(world, None), world.bundle.manifest
    version = manifest.encode(np.random.default_rng(1).normal(size=manifest.values, scale=2).astype(np.float32))
    start, _ = drift.tables(world)
    states = drift._written(world, tmp_path / "behind", [start] * 5)
    once, each = (drift._scores(crew, version, states, one=one) for one in (True, False))
    assert once == each
    others = drift._written(world, tmp_path / "others", [start * (4 * place - 8) for place in range(5)])
    assert len({found["left", "common"] for found in drift._scores(crew, version, others, one=False)}) > 1


@pytest.fixture
def results(glove, tmp_path):
    made = Results("drift", "c1", tmp_path / "drift.jsonl")
    drift.run(made, DATA, RECIPE, (0,))
    return made


def test_both_trainings_are_read_once(results, monkeypatch, capsys):
    cells = [(line["case"]["adaptive"], line["case"].get("behind"), line["figure"]) for line in results.lines]
    assert cells == [
        each
        for adaptive in (True, False)
        for each in (
            *((adaptive, table, name) for table in BEHIND[:3] for name in ("global_accuracy", "local_accuracy")),
            (adaptive, "another's", "local_accuracy"),
            (adaptive, None, "moved"),
            (adaptive, None, "in_common"),
        )
    ]
    assert {line["value"] for line in results.lines if line["figure"] == "moved"} != {0}
    capsys.readouterr()
    monkeypatch.setattr(drift, "measure", None)
    drift.run(results, DATA, RECIPE, (0,))
    assert capsys.readouterr().out == ""


def test_the_page_shows_each_training_and_data_set(results, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    lines = [json.loads(json.dumps(line)) for line in results.lines]
    second = [{**line, "seed": 1, "value": line["value"] + 0.01} for line in lines]
    head, *rows = divergence_rows([*lines, *second])
    assert [row[:3] for row in rows] == [["sst2", "fedvocab", "0, 1"], ["sst2", "fedvocab, not adaptive", "0, 1"]]
    own = next(line for line in lines if line["case"].get("behind") == "another's")
    assert dict(zip(head, rows[0], strict=True))["local, behind another's"] == f"{100 * own['value'] + 0.5:.1f} (1.0)"
    torn = [line for line in lines if line["case"]["adaptive"] or "behind" in line["case"]]
    assert len(divergence_rows(torn)) == 2, "an incomplete training has no row"
    draw_divergence([*lines, *second], tmp_path / "drift.svg")
    assert (tmp_path / "drift.svg").read_text().count('id="axes_') == 1
