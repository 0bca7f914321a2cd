"""The benchmark of models that write: its data, its cells, and a whole cell with a tiny backbone."""

import json
import re
import shutil
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.generation import bench as benches
from benchmarks.generation import quality, training, wire
from benchmarks.generation.bench import Bench, Cell, cells_of, recipes_of
from benchmarks.generation.data import CANARIES, COPIES, DATASETS, Data, Dataset, Pair, read_pairs
from benchmarks.generation.measuring import exposure_of, extracted_of, token_figures_of
from benchmarks.generation.report import PAGE
from benchmarks.generation.sharing import run_shared
from benchmarks.generation.training import Planned, Recipe, Trained, job_of, multiplier_at, start_of
from benchmarks.library.record import RESULTS, SHARED, Figure, open_results, read_lines
from benchmarks.library.simulation import backbone_of
from learning.auditing.exposure import make_canaries
from learning.models.assembly import NOTHING, whole_writer
from learning.models.division import shared_parameters
from learning.text.turns import Dialogue
from learning.training.local import train
from simulation.virtual_members import SeededRandom
from tacit.job import JobSpec, Training
from tacit.mechanism import DpSgd, NoMechanism
from tacit.prompt import LoRA
from tests.support.small_writer import MATRICES, saved_small_writer
from tests.support.tiny_writers import saved_writer

with_data = pytest.mark.skipif(not (SHARED / "e2e_nlg").is_dir(), reason="needs the public data sets")


@with_data
@pytest.mark.parametrize("name", list(DATASETS))
def test_no_prompt_of_validation_or_test_is_trained_on(name: str) -> None:
    data = read_pairs(name)
    trained = {row.prompt for rows in data.members.values() for row in rows}
    assert not trained & {row.prompt for row in data.validation}
    assert not trained & {row.prompt for row in data.test}
    assert not {row.prompt for row in data.validation} & {row.prompt for row in data.test}
    assert len(data.test) == DATASETS[name].scored
    assert len(data.answered) == DATASETS[name].answered
    assert len(data.canaries) == CANARIES
    assert not trained & {each.prompt for each in data.canaries.values()}


@with_data
def test_members_are_equal_or_sources() -> None:
    sizes = [len(rows) for rows in read_pairs("e2e_nlg").members.values()]
    assert (len(sizes), max(sizes) - min(sizes), sum(sizes)) == (10, 1, 42_061)
    assert set(read_pairs("medquad").members) >= {"CDC", "NHLBI", "GHR"}
    assert len(read_pairs("medquad").members) == 9


@with_data
def test_cells_come_in_the_order_of_their_goals() -> None:
    cells = cells_of(list(DATASETS), training.METHODS, [None, 8.0, 3.0])
    first = [(cell.dataset, cell.method, cell.epsilon) for cell in cells[:6]]
    assert first == [
        ("e2e_nlg", method, epsilon)
        for method, epsilon in [
            ("zero-shot", None),
            ("local", None),
            ("lora", None),
            ("ffa-lora", None),
            ("ffa-lora", 8.0),
            ("centralised", None),
        ]
    ]
    assert cells[6].dataset == "medquad"
    last = cells[[cell.epsilon for cell in cells].index(3.0) :]
    assert all(cell.epsilon is not None or cell.method == "prompt" for cell in last)
    # One of equal members is enough; of unlike ones, each.
    assert sum(cell.method == "local" for cell in cells) == 1 + 9
    cases = [str(cell.case) for cell in cells]
    assert len(set(cases)) == len(cases)


@with_data
def test_the_recipes_of_a_cell_fit_its_data() -> None:
    for cell in cells_of(list(DATASETS), training.METHODS, [None, 8.0, 3.0]):
        recipes = recipes_of(cell)
        assert (cell.method == "zero-shot") == (not recipes)
        for recipe in recipes:
            assert COPIES % recipe.rounds == 0 or cell.epsilon is not None
            # The goals' lot.
            assert cell.epsilon is None or recipe.lot >= 64


@with_data
@pytest.mark.parametrize("method", ["lora", "ffa-lora", "centralised"])
def test_medquads_rates_are_those_that_e2es_rows_chose(method) -> None:
    tried = [
        (line["value"], line["case"]["recipe"]["learning_rate"])
        for line in read_lines(RESULTS / "generation_search.jsonl")
        if line.get("case", {}) | Cell("e2e_nlg", method).case == line.get("case")
    ]
    assert len(tried) == 2
    assert [each.learning_rate for each in recipes_of(Cell("medquad", method))] == [min(tried)[1]]


@with_data
@pytest.mark.parametrize("method", ["lora", "ffa-lora"])
def test_under_noise_other_cells_have_what_e2es_rehearsals_chose(method) -> None:
    chosen = best_rehearsal(Cell("e2e_nlg", method, 8.0))
    assert [chosen] == recipes_of(Cell("e2e_nlg", method, 3.0))
    assert [replace(chosen, rounds=2)] == recipes_of(Cell("medquad", method, 3.0))


@with_data
def test_medquads_own_rehearsal_chose_the_same() -> None:
    assert [best_rehearsal(Cell("medquad", "ffa-lora", 8.0))] == recipes_of(Cell("medquad", "ffa-lora", 3.0))


def best_rehearsal(cell: Cell) -> training.Recipe:
    """The recipe of a cell with the least loss in its rehearsals."""
    tried = {
        json.dumps(line["case"]["recipe"]): line["value"]
        for line in read_lines(RESULTS / "generation_search.jsonl")
        if line.get("case", {}) | cell.case == line.get("case")
    }
    return min(recipes_of(cell), key=lambda recipe: tried[json.dumps(recipe.as_json(cell.method, 8.0))])


def test_a_smaller_epsilon_and_more_steps_need_more_noise() -> None:
    known = multiplier_at(8.0, 64, 2, 4, 4206)
    assert multiplier_at(3.0, 64, 2, 4, 4206) > known
    assert multiplier_at(8.0, 64, 8, 4, 4206) > known
    assert multiplier_at(8.0, 64, 2, 4, 420) > known


# ---- a whole cell ---------------------------------------------------------------------------------------------------


def small_data() -> Data:
    def rows(first: int) -> list[Pair]:
        return [
            Pair(f"Is place {at} good?", ("the food is good", "it is late")[at % 2]) for at in range(first, first + 20)
        ]

    members = {"a": rows(0), "b": rows(20), "c": rows(40)}
    canaries = dict(zip(members, make_canaries(2, SeededRandom("small"), digits=3), strict=False))
    return Data(members, canaries, rows(60), rows(80), [])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "small", Dataset(3, None, max_tokens=96, max_new_tokens=8, scored=20, answered=0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory):
    return saved_writer(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("jobs")


RECIPE = Recipe(0.01, rank=2, batch=4, rounds=2, rows=8, lot=8, steps=2)


@pytest.mark.parametrize(
    ("method", "epsilon"), [("lora", None), ("ffa-lora", None), ("ffa-lora", 8.0), ("prompt", 8.0)]
)
@pytest.mark.usefixtures("small")
def test_a_cell_trains_every_member_and_moves(method, epsilon, base, folder) -> None:
    planned = Planned.of("small", small_data(), method, epsilon, RECIPE, 0, base=base, folder=folder)
    made = planned.trained()
    start = made.bundle.manifest.decode(made.bundle.weights)
    assert np.isfinite(made.values).all()
    assert np.abs(made.values - start).max() > 0
    assert len(made.multipliers) == (0 if epsilon is None else 3)
    # Two members hold a canary, whose copies are in the rows of either kind of cell.
    assert made.sizes == ([18, 18, 8] if epsilon is None else [40, 40, 20])
    assert token_figures_of(made.bundle, made.values, small_data().test).tokens > 0


@pytest.mark.usefixtures("small")
def test_one_place_has_the_same_rows_as_the_federation(base, folder) -> None:
    def rows(planned: Planned) -> list[list[str]]:
        return [sorted(row.text for part in planned.parts for row in part[number]) for number in range(RECIPE.rounds)]

    federated, one = (
        Planned.of("small", small_data(), method, None, RECIPE, 0, base=base, folder=folder)
        for method in ("lora", "centralised")
    )
    assert rows(federated) == rows(one)
    assert (len(federated.parts), len(one.parts)) == (3, 1)
    alone = Planned.of("small", small_data(), "local", None, RECIPE, 0, base=base, folder=folder, alone="b")
    assert [row.text for row in alone.parts[0][0]] == [row.text for row in federated.parts[1][0]]


@pytest.mark.usefixtures("small")
def test_training_lowers_the_loss_and_a_version_is_not_trained_twice(base, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(benches, "read_pairs", lambda _name: small_data())
    results = open_results("generation", quick=True)
    recipe = replace(RECIPE, learning_rate=0.05, rounds=4, rows=5)
    bench = Bench(results, open_results("generation_search", quick=True), base, folder, tmp_path, quick=(recipe,))
    zero, lora = Cell("small", "zero-shot"), Cell("small", "lora")
    bench.measure(zero)
    bench.measure(lora)
    before, after = (
        next(line for line in results.done(cell.case, 0) if line["figure"] == "loss_per_token") for cell in (zero, lora)
    )
    assert after["high"] < before["low"]
    monkeypatch.setattr(Planned, "trained", lambda *_: pytest.fail("trained again"))
    again = bench.train(lora, recipe)
    assert token_figures_of(again.bundle, again.values, small_data().test).loss.value == pytest.approx(
        after["value"], abs=1e-4
    )


@pytest.mark.usefixtures("small")
def test_a_recipe_under_noise_is_rehearsed_on_validation_rows_alone(base, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(benches, "read_pairs", lambda _name: small_data())
    monkeypatch.setattr(benches, "REHEARSED", 12)
    trained, judged, inner = [], [], Planned.trained

    def watched(planned: Planned, device: str) -> Trained:
        trained.append(planned)
        return inner(planned, device)

    def judging(bundle, values, rows, device):
        judged.append(rows)
        return token_figures_of(bundle, values, rows, device)

    monkeypatch.setattr(Planned, "trained", watched)
    monkeypatch.setattr(benches, "token_figures_of", judging)
    slow = replace(RECIPE, optimiser="sgd", learning_rate=1e-3)
    fast, many = replace(slow, learning_rate=1.0), 12
    searched = open_results("generation_search", quick=True)
    bench = Bench(searched, searched, base, folder, tmp_path / "versions", quick=(slow, fast))
    cell = Cell("small", "ffa-lora", 8.0)
    assert bench.choose(cell) == fast
    assert [line["case"]["recipe"]["learning_rate"] for line in searched.lines] == [1e-3, 1.0]
    own = Planned.of("small", small_data(), "ffa-lora", 8.0, RECIPE, 0, base=base, folder=folder).multipliers
    for planned in trained:
        assert {row.text for part in planned.parts for rows in part for row in rows} == {
            row.prompt for row in small_data().validation[:many]
        }
        # The mean over three members' lots has the variance of one over all of them, if their noise is equal.
        spread = np.sqrt(np.mean(np.square(own)) / 3) / RECIPE.lot
        assert planned.multipliers == pytest.approx([many * spread])
    assert judged == [small_data().validation[many:]] * 2
    assert not (tmp_path / "versions").exists()


@pytest.mark.parametrize(("method", "epsilon"), [("lora", None), ("centralised", None), ("ffa-lora", 8.0)])
@pytest.mark.usefixtures("small")
def test_a_stopped_training_goes_on_after_its_last_round(method, epsilon, base, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(benches, "read_pairs", lambda _name: small_data())
    results, cell = open_results("generation", quick=True), Cell("small", method, epsilon)
    whole, stopped = (
        Bench(results, results, base, folder, tmp_path / name, quick=(RECIPE,)) for name in ("whole", "stopped")
    )
    expected = whole.train(cell, RECIPE)
    inner, played = benches._save, []

    def stop(path, **arrays):
        inner(path, **arrays)
        played.append(arrays["rounds"])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(benches, "_save", stop)
        with pytest.raises(KeyboardInterrupt):
            stopped.train(cell, RECIPE)
    (half,) = (tmp_path / "stopped").iterdir()
    begun = []

    def watched(real):
        def one(*of, **more):
            begun.append(of[4])
            return real(*of, **more)

        return one

    for name in ("play_round", "alone"):
        monkeypatch.setattr(training, name, watched(getattr(training, name)))
    found = stopped.train(cell, RECIPE)
    assert (played, begun) == ([1], [2])
    assert np.array_equal(found.values, expected.values)
    assert (found.lengths, found.sizes, found.rows) == (expected.lengths, expected.sizes, expected.rows)
    assert not half.exists()
    assert len(list((tmp_path / "stopped").iterdir())) == 1


@with_data
@pytest.mark.long
def test_processes_measure_what_one_does(base, tmp_path) -> None:
    """Two cells with two recipes each. A measured cell is left alone."""
    roomy = tmp_path / "base"
    shutil.copytree(base, roomy)
    config = json.loads((base / "config.json").read_text())
    (roomy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    cells = [Cell("e2e_nlg", "ffa-lora"), Cell("e2e_nlg", "ffa-lora", 8.0)]
    figures = []
    for name in ("one", "many"):
        (folder := tmp_path / name).mkdir()
        results, searched = (open_results(each, folder=folder) for each in (benches.BENCH, benches.SEARCH))
        small = Recipe(0.01, rank=2, batch=4, rounds=1, rows=4, lot=2, steps=1)
        bench = Bench(
            results,
            searched,
            roomy,
            folder,
            folder / "versions",
            rows=8,
            quick=(small, replace(small, learning_rate=0.02)),
        )
        if name == "one":
            quality.run(bench, cells, answers=False)
        else:
            assert run_shared(bench, cells, 2) == []
        figures.append([{line["figure"]: line["value"] for line in results.done(cell.case, 0)} for cell in cells])
    assert figures[0] == figures[1]
    # A rehearsal leaves no version.
    assert (len(searched.lines), len(list((folder / "versions").iterdir()))) == (4, 3)
    assert all({"loss_per_token", "exposure", "extracted", "upload_bytes"} == set(each) for each in figures[1])
    lines = (tmp_path / "many" / "generation.jsonl").read_text()
    assert run_shared(bench, cells, 2) == []
    assert (tmp_path / "many" / "generation.jsonl").read_text() == lines


@pytest.mark.usefixtures("small")
def test_the_exposure_of_a_start_is_that_of_what_was_never_planted(base, folder) -> None:
    start = start_of("small", base, folder)
    found = exposure_of(start.bundle, start.values, list(small_data().canaries.values()), candidates=100)
    assert not found.remembered


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model that was trained on the first of the two canaries until it says its secret."""
    folder = tmp_path_factory.mktemp("remembering")
    base, jobs = saved_small_writer(folder / "base"), folder / "jobs"
    jobs.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "small", Dataset(3, None, max_tokens=96, max_new_tokens=8, scored=20, answered=0))
        bundle = job_of("small", LoRA(rank=16, alpha=32.0, matrices=MATRICES, train="both"), base, jobs)
    parts = (bundle.document, bundle.manifest, bundle.weights, bundle.public_tokenizer)
    module, encoder = whole_writer(*parts, backbone=backbone_of(bundle), frozen=bundle.frozen or NOTHING)
    (first, *_) = small_data().canaries.values()
    ids, targets = encoder.encode([Dialogue.of(first.prompt, first.response)] * 4)
    train(module, ids, targets, Training(optimiser="adamw", learning_rate=0.01, batch=4, epochs=30), seed=1)
    return Trained(bundle, bundle.manifest.flatten(shared_parameters(module)))


def test_a_canary_counts_as_extracted_if_its_prompt_brings_its_secret(remembering) -> None:
    canaries = list(small_data().canaries.values())
    assert extracted_of(remembering.bundle, remembering.values, canaries) == [True, False]
    start = remembering.bundle.manifest.decode(remembering.bundle.weights)
    assert extracted_of(remembering.bundle, start, canaries) == [False, False]


def test_a_cell_says_what_prompts_extract_beside_the_exposure(remembering, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(benches, "read_pairs", lambda _name: small_data())
    monkeypatch.setattr(Planned, "of", lambda *_, **__: pytest.fail("trained"))
    results, cell = open_results("generation", quick=True), Cell("small", "zero-shot")
    monkeypatch.setattr(benches, "start_of", lambda *_: remembering)
    Bench(results, results, tmp_path, tmp_path, tmp_path).measure(cell)
    lines = {line["figure"]: line for line in results.done(cell.case, 0)}
    assert list(lines) == ["loss_per_token", "exposure", "extracted"]
    assert (lines["extracted"]["value"], lines["extracted"]["canaries"], lines["extracted"]["each"]) == (1, 2, [1, 0])


def test_a_cell_from_before_this_figure_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(benches, "start_of", lambda *_: pytest.fail("measured again"))
    results, cell = open_results("generation", folder=tmp_path), Cell("e2e_nlg", "zero-shot")
    results.add(cell.case, [Figure("loss_per_token", 2.4, "nats"), Figure("exposure", 0.9, "bits")], seed=0)
    bench = Bench(open_results("generation", folder=tmp_path), results, tmp_path, tmp_path, tmp_path)
    bench.measure(cell)
    assert run_shared(bench, [cell], 2) == []
    assert [line["figure"] for line in bench.results.done(cell.case, 0)] == ["loss_per_token", "exposure"]


def test_the_page_has_each_section_once() -> None:
    assert re.findall(r"\{\{(\w+)\}\}", PAGE.template) == [section.name for section in PAGE.sections]


@pytest.mark.parametrize("precision", wire.PRECISIONS)
def test_a_round_under_noise_has_the_multiplier_of_its_epsilon(precision, tmp_path):
    words = [wire.specification(tmp_path, "ffa-lora", precision, private=private)[1] for private in (False, True)]
    plain, private = (JobSpec.model_validate(tomllib.loads(each)) for each in words)
    assert isinstance(plain.mechanism, NoMechanism)
    assert isinstance(private.mechanism, DpSgd)
    assert private.mechanism.noise_multiplier == multiplier_at(wire.EPSILON, wire.ROWS, 1, 1, wire.ROWS)
    assert plain.training == private.training
    assert private.training.precision == precision
