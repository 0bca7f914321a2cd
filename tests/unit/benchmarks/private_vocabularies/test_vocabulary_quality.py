"""The cells of the FedVocab benchmark are read as their methods require, and no choice uses a test."""

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from benchmarks.library import minilm
from benchmarks.library.record import Figure, Results
from benchmarks.library.report import newest, write_page
from benchmarks.private_vocabularies import quality as bench
from benchmarks.private_vocabularies.embedding_divergence import tables
from benchmarks.private_vocabularies.quality import CELLS, Cell, Data, Recipe, cells_of, measure, shortened, stripped
from benchmarks.private_vocabularies.report import PAGE
from benchmarks.private_vocabularies.tables import accuracy_rows, sent_rows
from learning.text.examples import Example
from secure_agg import packed_size
from simulation.virtual_members import Crew, Held
from tacit.method import FedAvg, FedProx, FedRecon, FedVocab, LgFedAvg
from tacit.vector import layout_of

torch.set_num_threads(1)
KINDS = {"NUM": "how many 7 are there", "LOC": "where is the city", "HUM": "who is the man"}
ROWS = [Example(f"{KINDS[label]} {'x' * (number % 4)}", label) for number in range(40) for label in KINDS]
DATA = Data("trec", ROWS, ROWS[:9])
RECIPE = Recipe(members=4, cohort=3, rounds=3, hidden=4, max_tokens=8, batch=8, learning_rate=0.03, local_epochs=12)


@pytest.fixture
def glove(tmp_path, monkeypatch):
    path = tmp_path / "glove.txt"
    random = np.random.default_rng(0)
    words = sorted({word for text in KINDS.values() for word in text.split()})
    path.write_text("".join(f"{word} {' '.join(f'{x:.3f}' for x in random.normal(size=6))}\n" for word in words))
    monkeypatch.setattr(bench.world_of, "__defaults__", (path,))
    monkeypatch.setattr(bench, "LOOK", 1)
    return path


def measured(cell, folder, data=DATA, recipe=RECIPE):
    folder.mkdir()
    return {figure.name: figure for figure in measure(cell, data, recipe, 0, folder, 1)}


def test_every_row_of_the_paper_has_a_cell_and_no_case_is_doubled():
    cases = [json.dumps(cell.case, sort_keys=True) for cell in CELLS]
    assert len(set(cases)) == len(cases)
    with_paper = [cell for cell in CELLS if cell.paper is not None]
    assert len(with_paper) == sum(map(len, bench.PAPER.values()))
    found = {(cell.dataset, cell.name, cell.adaptive): cell.paper for cell in with_paper}
    assert found["sst2", "fedvocab", True] == (87.8, 92.1)
    assert found["sst2", "fedvocab", False] == (85.1, 89.8)
    assert found["20newsgroups", "local", False] == (7.3, 42.2)


@pytest.mark.parametrize(
    ("method", "reading", "readings"),
    [
        (FedVocab(), "adapted", ("left", "adapted")),
        (FedVocab(adaptive=False), "left", ("left", "adapted")),
        (FedVocab(adaptive=False, embedding="frozen"), "left", ("left", "adapted")),
        (LgFedAvg(), "left", ("left", "adapted")),
        (FedRecon(), "adapted", ("adapted",)),
        (FedAvg(), "left", ("left",)),
        (None, "left", ("left",)),
    ],
)
def test_a_method_is_read_as_it_uses_private_parameters(method, reading, readings):
    cell = Cell("trec", method)
    assert (cell.reading, cell.readings) == (reading, readings)


# The first cell of each method; the sweep has their variants.
_FIRST = {cell.name: cell for cell in reversed(cells_of("trec"))}
_EVERY = [
    pytest.param(
        cell,
        id="-".join(map(str, cell.case.values())),
        marks=() if cell is _FIRST[cell.name] else pytest.mark.long,
    )
    for cell in cells_of("trec")
]


@pytest.mark.parametrize("cell", _EVERY)
def test_every_cell_has_all_its_figures(cell, glove, tmp_path):
    found = measured(cell, tmp_path / "cell")
    assert list(found) == ["global_accuracy", "local_accuracy", "values_per_round", "bytes_per_round", "seconds"]
    for name in ("global_accuracy", "local_accuracy"):
        more = found[name].more
        assert 0 < found[name].value <= 1
        assert found[name].value == more[more["reading"]]
        assert ("left" in more, "adapted" in more) == ("left" in cell.readings, "adapted" in cell.readings)
    ones_own = not isinstance(cell.method, FedAvg | FedProx) and not cell.frozen
    # An adjusted model has no label bias itself, only in its members' use.
    assert ("prior_removed" in found["global_accuracy"].more) == (ones_own and not cell.adjusted)
    assert ("prior_added" in found["local_accuracy"].more) == (not ones_own and not cell.adjusted)
    if cell.method is None:
        assert found["values_per_round"].value == found["bytes_per_round"].value == 0
        assert "best" not in found["global_accuracy"].more
    else:
        curve = found["global_accuracy"].more["curve"]
        assert [number for number, _ in curve] == [1, 2, 3]
        best = found["global_accuracy"].more["best_round"]
        assert best == max(curve, key=lambda each: each[1])[0], "the first of the highest values"


def test_a_frozen_embedding_moves_only_when_it_is_adapted(glove, tmp_path):
    """As left, all members have one model and equal scores on the common test set. Adapted, their models differ."""
    cell, recipe = Cell("trec", FedVocab(adaptive=False, embedding="frozen")), replace(RECIPE, learning_rate=0.2)
    world = bench.world_of(cell, DATA, recipe, 0, tmp_path)
    # Members have one label each, so all embeddings move differently.
    ones = [Held([Example(KINDS[label], label)] * 24, ROWS[:6], ROWS[:6]) for label in (*KINDS, "NUM")]
    crew = Crew(replace(world, members=ones), None)
    version, _, _ = bench.federate(cell, crew, replace(recipe, rounds=1), 0, bench.Best(tmp_path / "best"))
    start, found = tables(crew.world)
    assert all(np.array_equal(each, start) for each in found)
    each = crew.score(version, ("left", "adapted"), ("common", "test", "validation", "test, prior added"))
    assert len({found["left", "common"] for found in each}) == 1
    assert len({found["adapted", "common"] for found in each}) > 1
    assert bench._scores(crew, cell, version, recipe.places) == each, "equal members are read once"


def test_a_member_sends_only_the_shared_part(glove, tmp_path):
    recipe = replace(RECIPE, rounds=1, local_epochs=1)
    hidden, width, labels = RECIPE.hidden, 6, 3
    encoder = 2 * (4 * hidden * width + 4 * hidden * hidden + 4 * hidden)
    head = 2 * hidden * labels + labels
    embedding = (len(glove.read_text().splitlines()) + 2) * width
    sent = {}
    for method in (FedAvg(), FedVocab(), LgFedAvg(), FedRecon()):
        figures = measured(Cell("trec", method), tmp_path / method.name, recipe=recipe)
        sent[method.name] = figures["values_per_round"].value
        world = bench.world_of(Cell("trec", method), DATA, RECIPE, 0, tmp_path / f"{method.name}-again")
        layout = layout_of(world.bundle.document, 3)
        assert figures["bytes_per_round"].value == packed_size(layout.values, layout.bits)
    assert sent == {
        "fedavg": embedding + encoder + head,
        "fedvocab": encoder + head,
        "lg-fedavg": head,
        # "7" is the only word with a digit.
        "fedrecon": embedding - width + encoder + head,
    }


def test_no_choice_uses_a_test(glove, tmp_path, monkeypatch):
    """With other labels in all tests, the best rounds and the curve stay the same."""
    cell = Cell("trec", FedVocab())
    plain = measured(cell, tmp_path / "plain")["global_accuracy"]
    held = bench._held

    def wrong(example):
        return Example(example.text, {"NUM": "LOC", "LOC": "HUM", "HUM": "NUM"}[example.label])

    def bent(*arguments):
        return [replace(each, test=tuple(map(wrong, each.test))) for each in held(*arguments)]

    monkeypatch.setattr(bench, "_held", bent)
    other = measured(cell, tmp_path / "bent", replace(DATA, common=list(map(wrong, DATA.common))))["global_accuracy"]
    assert other.value != plain.value
    for key in ("curve", "best_round"):
        assert other.more[key] == plain.more[key]


def test_the_search_never_scores_a_test(glove, tmp_path, monkeypatch):
    asked, common = [], []
    score = Crew.score

    def watched(self, version, readings, parts, **more):
        asked.extend(parts)
        common.append(self.world.common)
        return score(self, version, readings, parts, **more)

    monkeypatch.setattr(Crew, "score", watched)
    tests = [Example("where is nobody", "HUM")]
    own, everybodys = bench.tried(Cell("trec", FedVocab()), replace(DATA, common=tests), RECIPE, tmp_path, 1)
    assert (own.name, everybodys.name) == ("validation_accuracy", "common_validation_accuracy")
    assert set(asked) == {"common", "validation"}
    validation = [example for held in bench._held(DATA, bench.dealt(DATA, RECIPE, 0), 0) for example in held.validation]
    for rows in common:
        assert sorted(each.text for each in rows) == sorted(each.text for each in validation)
    assert 0 < everybodys.value <= 1


def test_recipes_differ_and_every_used_recipe_was_compared():
    for name in ("trec", "sst2"):
        said = [json.dumps(recipe.as_json(), sort_keys=True) for recipe in bench.tried_recipes(name)]
        assert len(set(said)) == len(said)
        assert json.dumps(bench.recipe_of(name).as_json(), sort_keys=True) in said, "a used recipe was compared"
    assert "embedding_learning_rate" not in Recipe().as_json()


def test_a_cells_rates_are_in_the_job_and_the_case(glove, tmp_path, monkeypatch):
    rates, adjusted, make = [], [], bench.world_of

    def watched(*arguments, **more):
        world = make(*arguments, glove, **more)
        training = world.bundle.document.training
        rates.append((training.learning_rate, training.embedding_learning_rate))
        adjusted.append(training.logit_adjustment)
        return world

    monkeypatch.setattr(bench, "world_of", watched)
    for name, cell in {
        "plain": Cell("trec", FedAvg()),
        "low": Cell("trec", FedAvg(), rate=0.001),
        "slow": Cell("trec", FedAvg(), embedding=0.0005),
        "adjusted": Cell("trec", FedAvg(), adjusted=True),
    }.items():
        figures = measured(cell, tmp_path / name, recipe=replace(RECIPE, rounds=1))
        said = figures["global_accuracy"].more["recipe"]
        assert (said["learning_rate"], said.get("embedding_learning_rate")) == rates[-1]
        assert cell.rates == name
        assert said.get("logit_adjustment", False) == adjusted[-1] == (name == "adjusted")
        keys = {"learning_rate", "embedding_learning_rate", "logit_adjustment"} & cell.case.keys()
        assert {each: cell.case[each] for each in keys} == {
            "plain": {},
            "low": {"learning_rate": 0.001},
            "slow": {"embedding_learning_rate": 0.0005},
            "adjusted": {"logit_adjustment": True},
        }[name]
    assert rates == [(0.03, None), (0.001, None), (0.03, 0.0005), (0.03, None)]
    assert {cell.rates for cell in CELLS} == {"plain", "low", "slow", "adjusted"}


def test_members_use_an_adjusted_model_with_their_own_prior(glove, tmp_path, monkeypatch):
    asked = []
    score = Crew.score

    def watched(self, version, readings, parts, **more):
        asked.append(set(parts))
        return score(self, version, readings, parts, **more)

    monkeypatch.setattr(Crew, "score", watched)
    measured(Cell("trec", FedVocab(), adjusted=True), tmp_path / "cell")
    assert {part for parts in asked for part in parts} == {"common", "test, prior added", "validation, prior added"}


def test_an_adjusted_jobs_prior_starts_from_equal_labels(glove, tmp_path):
    """With a zero head, a member answers its most common label, not the one that it has more of than others."""
    answers = {}
    for adjusted in (False, True):
        cell = Cell("trec", FedAvg(), adjusted=adjusted)
        world = bench.world_of(cell, DATA, cell.recipe(RECIPE), 0, tmp_path / str(adjusted))
        labels = [Example("what", "NUM")] * 6 + [Example("what", "LOC")] * 4
        few = Held(labels, labels[:1], [Example("what", "NUM"), Example("what", "LOC"), Example("what", "LOC")])
        many = Held([Example("what", "NUM")] * 10 + [Example("what", "HUM")] * 5, labels[:1], labels[:1])
        world = replace(world, members=[few, many])
        manifest = world.bundle.manifest
        nothing = manifest.encode(np.zeros(manifest.values, np.float32))
        (found, _) = Crew(world, None).score(nothing, ("left",), ("test, prior added",))
        answers[adjusted] = found["left", "test, prior added"].correct
    assert answers == {False: 2, True: 1}


def test_the_coordinators_rate_is_in_the_job_and_the_recipe(glove, tmp_path):
    recipe = replace(RECIPE, server_learning_rate=0.2)
    assert bench.world_of(Cell("trec", FedAvg()), DATA, recipe, 0, tmp_path).bundle.document.server.learning_rate == 0.2
    assert recipe.as_json()["server_learning_rate"] == 0.2
    assert "server_learning_rate" not in RECIPE.as_json()


def test_best_is_the_state_kept_at_its_round(glove, tmp_path, monkeypatch):
    """If round 1 counts as the best, a cell's `best` equals the end of a training of one round."""
    cell = Cell("trec", FedVocab(adaptive=False))
    falling = iter([0.9, 0.8, 0.7])
    monkeypatch.setattr(bench, "validated", lambda *_: next(falling))
    long = measured(cell, tmp_path / "long")
    monkeypatch.setattr(bench, "validated", lambda *_: 0.5)
    short = measured(cell, tmp_path / "short", recipe=replace(RECIPE, rounds=1))
    assert long["global_accuracy"].more["best_round"] == 1
    for name in ("global_accuracy", "local_accuracy"):
        assert long[name].more["best"] == short[name].value
        assert long[name].more["best_adapted"] == short[name].more["adapted"]
        assert "best_left" not in long[name].more, "it would repeat `best`"


def test_a_run_measures_missing_cells_and_averages(tmp_path, monkeypatch):
    cells = [Cell("trec", FedAvg()), Cell("trec", FedVocab())]
    calls = []

    def fake(cell, data, recipe, seed, folder, workers, masked):
        calls.append((cell.name, seed))
        more = {"reading": "left", "left": 0.5, "best": 0.25 * seed}
        return [Figure("global_accuracy", 0.5 + seed / 10, more=more), Figure("seconds", 1.0, "s")]

    monkeypatch.setattr(bench, "measure", fake)
    monkeypatch.setattr(bench, "read_data", lambda name: DATA)
    path = tmp_path / "fedvocab.jsonl"
    forever = float("inf")

    def recipes(_dataset, _model):
        return RECIPE

    assert bench.run(Results("fedvocab", "c1", path), cells, recipes, (0, 1), 1, forever)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    again = Results("fedvocab", "c1", path, [line for line in lines if "figure" in line])
    assert bench.run(again, cells, recipes, (0, 1, 2), 1, forever)
    assert calls == [(name, seed) for seed in range(3) for name in ("fedavg", "fedvocab")]
    assert accuracy_rows(newest(again.lines))[2][2:9] == ["fedvocab", "", "0, 1, 2", "60.0 (20.0)", "", "", "25.0"]
    assert not bench.run(Results("fedvocab", "c2", None), cells, recipes, (0,), 1, -forever)


def test_headers_quotations_and_signature_are_removed_from_a_post():
    post = (
        "From: a@b.c (A)\nSubject: Re: engines\n\nIn article <1@x>, b@c (B) writes:\n> it broke\n>> twice\n"
        "Mine held.\n| quoted too\n\nChange the oil.\n--\nA. Person, Somewhere\n"
    )
    assert stripped(post) == "Mine held.\n\nChange the oil."
    assert stripped("Subject: none\n\n> all of it\n") == ""


def test_a_common_test_set_is_fixed_and_has_a_thousand_rows(tmp_path, monkeypatch):
    folder = tmp_path / "ag_news"
    folder.mkdir()
    for name, size in (("train", 5), ("test", 1500)):
        rows = (json.dumps({"text": f"text {at}", "label": str(at % 4)}) for at in range(size))
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    import gzip

    for path in folder.glob("*.jsonl"):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setattr(bench, "SHARED", tmp_path)
    found = [bench.read_data.__wrapped__("ag_news").common for _ in range(2)]
    assert found[0] == found[1]
    assert len({example.text for example in found[0]}) == bench.COMMON_ROWS


LINES = [
    {
        "bench": "fedvocab",
        "case": Cell("sst2", method, vocabulary, **rates).case,
        "seed": seed,
        "figure": name,
        "value": value + shift,
        "unit": "1",
        "code": "c1",
        "reading": "left",
        "left": value + shift,
        **{key: each if key == "paper" else each + shift for key, each in more.items()},
    }
    for method, vocabulary, rates, value, more in (
        (FedVocab(adaptive=False), "same", {}, 0.7, {"adapted": 0.75, "paper": 0.851, "best": 0.72}),
        (FedVocab(adaptive=False), "same", {"embedding": 0.0005}, 0.8, {"best": 0.8, "best_adapted": 0.83}),
        (FedVocab(), "same", {"rate": 0.001}, 0.9, {"best": 0.9}),
        (FedAvg(), "same", {}, 0.6, {"paper": 0.83, "best": 0.61}),
        (FedVocab(), "own", {}, 0.5, {"best": 0.5}),
    )
    for name in ("global_accuracy", "local_accuracy", "values_per_round")
    for seed, shift in ((0, -0.01), (1, 0.01))
]
MINILM_TITLE = "FedVocab from a pretrained encoder"
RUN = {
    "bench": "fedvocab",
    "run": {
        "commit": "0123456789abcdef",
        "code": "c1",
        "machine": {"cpu": "a processor", "cores": 2, "system": "Linux x86_64"},
        "versions": {"python": "3.11"},
    },
}
PICTURE = {
    "bench": "fedvocab",
    "case": {"dataset": "sst2", "partition": "by label", "alpha": 1.0, "members": 2},
    "seed": 0,
    "figure": "rows_per_member",
    "value": 5.0,
    "unit": "1",
    "labels": ["0", "1"],
    "counts": [[1, 4], [5, 0]],
    "code": "c1",
}


def test_the_table_has_a_row_for_each_cell_in_per_cent():
    head, *rows = accuracy_rows(LINES)
    assert [row[:4] for row in rows] == [
        ["sst2", "same", "fedavg", ""],
        ["sst2", "same", "fedvocab, not adaptive", ""],
        ["sst2", "same", "fedvocab", "0.001"],
        ["sst2", "same", "fedvocab, not adaptive", "embedding 0.0005"],
        ["sst2", "own", "fedvocab", ""],
    ]
    assert rows[3][4:9] == ["0, 1", "80.0 (2.0)", "", "", "80.0, 83.0 adapted"]
    assert rows[1][4:9] == ["0, 1", "70.0 (2.0)", "85.1", "75.0 adapted", "72.0"]
    assert rows[0][4:9] == ["0, 1", "60.0 (2.0)", "83.0", "", "61.0"]
    assert {len(row) for row in rows} == {len(head)}
    one = next(line for line in LINES if line["figure"] == "local_accuracy")
    alone = ["0", *[""] * 5, f"{100 * one['value']:.1f}"]
    assert accuracy_rows([one])[1][4:11] == alone, "one seed has no spread"
    keys = {
        "global_accuracy": ("prior_removed", 0.2),
        "local_accuracy": ("prior_added", 0.4),
        "values_per_round": ("bits", 9),
    }
    shifted = [{**line, keys[line["figure"]][0]: keys[line["figure"]][1] + line["seed"] / 10} for line in LINES]
    row = dict(zip(head, accuracy_rows(shifted)[1], strict=True))
    assert (row["global, prior removed"], row["local, prior added"]) == ("25.0", "45.0")
    mixed = [{key: each for key, each in line.items() if key != "best_adapted" or line["seed"]} for line in LINES]
    assert accuracy_rows(mixed)[4][8] == "80.0", "no mean over some of the seeds"
    mean = {key: each for key, each in one.items() if key != "seed"} | {"value": 0.99}
    assert accuracy_rows([*LINES, mean]) == accuracy_rows(LINES), "a mean in the results is not one more seed"
    assert sent_rows(LINES)[1] == ["sst2", "same", "fedavg", "", "1", "", ""]


def test_the_page_has_tables_and_drawings_and_is_reproducible(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    stale = {**LINES[0], "value": 0.123}
    text = "".join(json.dumps(line) + "\n" for line in [RUN, stale, *LINES, PICTURE])
    (tmp_path / "fedvocab.jsonl").write_text(text)
    first = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "a")}
    again = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "b")}
    assert first == again
    assert first.keys() == {"private-vocabularies.md", "fedvocab.svg", "fedvocab_partitions.svg"}
    page = first["private-vocabularies.md"].decode()
    assert "| sst2 | same | fedavg |  | 0, 1 | 60.0 (2.0) | 83.0 |" in page
    assert "| sst2 | 1 | 2 | 5 | 2 | 90.0 % |" in page, "the most common labels have 4 of 5 and 5 of 5"
    assert "| counts" not in page
    assert "12.3" not in page, "an older line of a case is not shown"
    assert "commit 0123456789ab" in page
    assert [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")] == [
        "Accuracy of FedVocab and its peers",
        "What a member sends",
        "Label distribution of the members",
    ]


def test_fewer_rows_are_the_same_for_every_seed(glove, tmp_path):
    few = shortened(DATA, 40)
    assert len(few.train) == 40
    assert few.train == shortened(DATA, 40).train
    assert shortened(DATA, None) is DATA
    assert shortened(DATA, len(DATA.train)) is DATA
    assert list(replace(RECIPE, members=10, tested=4).places) == [0, 4, 8]


@pytest.mark.skipif(
    find_spec(minilm.PACKAGE) is None, reason="the package with the pretrained encoder is not installed"
)
def test_a_pretrained_encoder_trains_from_its_own_weights(tmp_path):
    (tmp_path / "cell").mkdir()
    recipe = replace(bench.recipe_of("sst2", "minilm"), members=3, cohort=3, rounds=1, common=4, rows=None, tested=2)
    cell = Cell("trec", FedVocab(), model="minilm")
    data = replace(DATA, train=DATA.train[:36])
    figures = {each.name: each for each in measure(cell, data, recipe, 0, tmp_path / "cell", 1)}
    # Six layers of 384, positions and types, and the head: everything except the word vectors.
    assert figures["values_per_round"].value == 22_713_216 - 30_522 * 384 - 384 * 384 - 384 + (384 + 1) * len(
        data.labels
    )
    assert 0 <= figures["local_accuracy"].value <= 1
    assert figures["global_accuracy"].more["recipe"]["rounds"] == 1
    assert "paper" not in figures["global_accuracy"].more


def test_the_pretrained_encoder_has_its_own_section(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    case = Cell("sst2", FedAvg(), model="minilm").case
    other = {**next(line for line in LINES if line["figure"] == "global_accuracy"), "case": case, "value": 0.876}
    (tmp_path / "fedvocab.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [RUN, *LINES, other]))
    write_page(PAGE, tmp_path, tmp_path / "out")
    first, second = (
        (tmp_path / "out" / "benchmarks" / "private-vocabularies.md").read_text().split(f"## {MINILM_TITLE}")
    )
    assert "87.6" not in first
    assert second.count("| 87.6 |") == 1
