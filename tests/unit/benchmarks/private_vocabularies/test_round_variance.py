"""Each round's version is read for round variance, and the page's table and drawing show it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.library.masked_rounds import play_round
from benchmarks.library.record import Results
from benchmarks.private_vocabularies import quality as fedvocab
from benchmarks.private_vocabularies import round_variance as wobble
from benchmarks.private_vocabularies.quality import Cell, Data, Recipe
from benchmarks.private_vocabularies.round_variance_tables import draw_variance, variance_rows
from learning.models import EVERYTHING_SHARED, build_blank
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.training.local import evaluate
from simulation.virtual_members import Crew, cohort_of
from tacit.method import FedAvg

torch.set_num_threads(1)
KINDS = {"bad": "never again this film", "good": "what a lovely film"}
ROWS = [Example(f"{KINDS[label]} {'x' * (number % 4)}", label) for number in range(60) for label in KINDS]
DATA = Data("sst2", ROWS, ROWS[:9])
RECIPE = Recipe(members=5, cohort=3, rounds=6, hidden=4, max_tokens=8, batch=8, learning_rate=0.03)


@pytest.fixture
def glove(tmp_path, monkeypatch):
    path = tmp_path / "glove.txt"
    random = np.random.default_rng(0)
    words = sorted({word for text in KINDS.values() for word in text.split()})
    path.write_text("".join(f"{word} {' '.join(f'{x:.3f}' for x in random.normal(size=6))}\n" for word in words))
    monkeypatch.setattr(fedvocab.world_of, "__defaults__", (path,))


@pytest.fixture
def results(glove, tmp_path):
    made = Results("wobble", "c1", tmp_path / "wobble.jsonl")
    wobble.run(made, DATA, RECIPE, (0,))
    return made


def test_a_model_with_only_a_label_bias_is_right_at_the_threshold():
    labels = np.array([0, 0, 0, 1, 1])
    knows = np.array([-1.0, 0.5, 0.0, 2.0, 1.0])
    assert wobble.threshold_accuracies(knows - 0.7, labels) == (1.0, 1.0)
    assert wobble.threshold_accuracies(knows + 5, labels) == (0.4, 1.0)
    assert wobble.threshold_accuracies(knows - 5, labels) == (0.6, 1.0)
    assert wobble.threshold_accuracies(-knows, labels) == (0.4, 0.2)
    assert wobble.threshold_accuracies(np.array([3.0, 1.0]), np.array([0, 0])) == (0.0, 1.0)


def test_each_round_is_recorded_with_its_members(glove, tmp_path):
    world = fedvocab.world_of(Cell("sst2", FedAvg()), DATA, RECIPE, 0, tmp_path)
    bad, good = ([Example(KINDS[label], label)] * 12 for label in KINDS)
    # Members 0 to 3 have one label each, and the last has both.
    rows = (bad, bad, bad, good, bad + good)
    held = [replace(each, train=mine) for each, mine in zip(world.members, rows, strict=True)]
    found = wobble.read_rounds(Crew(replace(world, members=held), None), RECIPE, 0, ROWS)
    assert len(found) == RECIPE.rounds
    for number, each in enumerate(found, start=1):
        places = cohort_of(5, 3, 0, number)
        labels = [example.label for place in places for example in held[place].train]
        assert each.of_one_label == sum(place < 4 for place in places)
        assert each.first == pytest.approx(labels.count("bad") / len(labels))
    assert len({each.of_one_label for each in found}) > 1


def test_a_version_is_read_as_a_member_reads_it(glove, tmp_path):
    world = fedvocab.world_of(Cell("sst2", FedAvg()), DATA, RECIPE, 0, tmp_path)
    # Long and short texts alternate, and labels are in blocks, so that answers in a wrong order would show.
    crew, rows, job = Crew(world, None), [*ROWS[:40:2], *ROWS[1:40:2]], world.bundle.document
    reader, manifest = wobble.Reader(world, rows), world.bundle.manifest
    corpus = EncodedExamples(rows, job, world.bundle.public_tokenizer)
    module = build_blank(job.model, corpus.vocabulary_size, 2, corpus.pad_id)
    values, seen = manifest.decode(world.bundle.weights), set()
    for number in range(1, 5):
        values = play_round(crew, values, number, (0, 1, 2))
        EVERYTHING_SHARED.load_shared(module, manifest.unflatten(values))
        accuracy, _ = reader.accuracies(values)
        assert accuracy == pytest.approx(evaluate(module, corpus.read().ids, corpus.read().labels).accuracy)
        seen.add(accuracy)
    assert len(seen) > 1


def test_more_than_two_labels_have_no_one_threshold(glove, tmp_path):
    data = Data("trec", [*ROWS, *[Example("who", "new")] * 40], ROWS[:9])
    world = fedvocab.world_of(Cell("trec", FedAvg()), data, RECIPE, 0, tmp_path)
    with pytest.raises(ValueError, match="between two labels, but the job has 3"):
        wobble.read_rounds(Crew(world, None), RECIPE, 0, ROWS)


def test_both_trainings_are_read_once_and_no_test_is_used(results, glove, monkeypatch, capsys):
    assert [(line["case"].get("logit_adjustment", False), line["figure"]) for line in results.lines] == [
        (adjusted, name) for adjusted in (False, True) for name in ("swing", "swing_at_the_threshold")
    ]
    for line in results.lines:
        assert len(line["curve"]) == RECIPE.rounds
        assert line["value"] == pytest.approx(np.abs(np.diff(line["curve"][4:])).mean(), abs=1e-5)
    capsys.readouterr()
    monkeypatch.setattr(wobble, "measure", None)
    wobble.run(results, DATA, RECIPE, (0,))
    assert capsys.readouterr().out == ""


def test_the_page_shows_each_training(results, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    lines = [json.loads(json.dumps(line)) for line in results.lines]
    _, *rows = variance_rows(lines)
    assert [row[:2] for row in rows] == [["usual", "0"], ["adjusted logits", "0"]]
    assert rows[0][2] == f"{100 * lines[0]['value']:.1f}"
    draw_variance(lines, tmp_path / "wobble.svg")
    assert (tmp_path / "wobble.svg").read_text().count('id="axes_') == 2
