"""Result lines are written by whole cells, count for their revision, and never come from a quick run."""

import fcntl
import json
import threading

import pytest

from benchmarks.library import record
from benchmarks.library.record import Figure, Results, code_digest, open_results, read_lines, spread, summarise

CASE = {"members": 3, "load": "equal"}


def results(path, code="aaaaaaaaaaaa"):
    lines = [line for line in read_lines(path) if line.get("code") == code]
    return Results("institutional", code, path, lines)


def test_a_cell_is_printed_written_and_found_again(tmp_path, capsys):
    path = tmp_path / "institutional.jsonl"
    results(path).add(CASE, [Figure("test_accuracy", 0.9, more={"paper": 0.878}), Figure("rounds", 20)], seed=1)
    printed = capsys.readouterr().out
    assert printed == path.read_text()
    first = json.loads(printed.splitlines()[0])
    assert first == {
        "bench": "institutional",
        "case": CASE,
        "seed": 1,
        "figure": "test_accuracy",
        "value": 0.9,
        "unit": "1",
        "paper": 0.878,
        "code": "aaaaaaaaaaaa",
        "revision": 1,
    }
    again = results(path)
    assert [line["figure"] for line in again.done(CASE, 1)] == ["test_accuracy", "rounds"]


def test_another_seed_or_case_is_another_cell(tmp_path):
    path = tmp_path / "institutional.jsonl"
    results(path).add(CASE, [Figure("test_accuracy", 0.9)], seed=1)
    again = results(path)
    assert not again.done(CASE, 2)
    assert not again.done(CASE), "a mean over the seeds is not one of them"
    assert not again.done({**CASE, "members": 4}, 1)


def test_keys_of_a_case_may_come_in_any_order(tmp_path):
    path = tmp_path / "institutional.jsonl"
    results(path).add(CASE, [Figure("test_accuracy", 0.9)])
    assert results(path).done(dict(reversed(CASE.items())))


def test_a_run_opens_once_with_machine_and_versions(tmp_path):
    path = tmp_path / "institutional.jsonl"
    made = results(path)
    made.open([0, 1])
    made.open([0, 1])
    (line,) = read_lines(path)
    assert line["bench"] == "institutional"
    assert line["run"]["seeds"] == [0, 1]
    assert line["run"]["code"] == "aaaaaaaaaaaa"
    assert {"at", "commit", "machine", "versions"} <= line["run"].keys()
    assert line["run"]["machine"].keys() == {"cpu", "cores", "memory_bytes", "system"}


def test_a_quick_run_writes_nothing_and_skips_nothing(tmp_path):
    folder = tmp_path / "results"
    open_results("institutional", quick=False, folder=folder).add(CASE, [Figure("test_accuracy", 0.9)])
    before = (folder / "institutional.jsonl").read_text()
    quick = open_results("institutional", quick=True, folder=folder)
    assert not quick.done(CASE)
    quick.open([0])
    quick.add(CASE, [Figure("test_accuracy", 0.1)])
    assert (folder / "institutional.jsonl").read_text() == before
    assert open_results("institutional", quick=False, folder=folder).done(CASE)


def test_a_cell_stays_measured_when_the_code_changes_or_moves(tmp_path):
    for code, figures in (
        ("aaaaaaaaaaaa", [Figure("test_accuracy", 0.5), Figure("seconds", 7)]),
        ("bbbbbbbbbbbb", [Figure("test_accuracy", 0.6)]),
    ):
        Results("institutional", code, tmp_path / "institutional.jsonl").add(CASE, figures, seed=1)
    found = open_results("institutional", folder=tmp_path)
    # The last line of each figure counts. A figure that the last run did not measure stays.
    assert [(line["figure"], line["value"]) for line in found.done(CASE, 1)] == [("test_accuracy", 0.6), ("seconds", 7)]
    assert not found.done({**CASE, "members": 5}, 1)
    assert found.code == code_digest()


def test_lines_without_a_revision_have_revision_1(tmp_path):
    line = {"bench": "institutional", "case": CASE, "figure": "test_accuracy", "value": 0.5, "unit": "1", "code": "a"}
    (tmp_path / "institutional.jsonl").write_text(json.dumps(line) + "\n")
    assert open_results("institutional", folder=tmp_path).done(CASE)
    assert not open_results("institutional", revision=2, folder=tmp_path).done(CASE)


def test_only_a_new_revision_makes_a_cell_unmeasured(tmp_path):
    open_results("institutional", folder=tmp_path).add(CASE, [Figure("test_accuracy", 0.5)])
    second = open_results("institutional", revision=2, folder=tmp_path)
    assert not second.done(CASE)
    second.add(CASE, [Figure("test_accuracy", 0.6)])
    assert [line["value"] for line in open_results("institutional", revision=2, folder=tmp_path).done(CASE)] == [0.6]
    assert [line["value"] for line in open_results("institutional", folder=tmp_path).done(CASE)] == [0.5]


# ---- means over seeds ------------------------------------------------------------------------------------------------


def seeded(*seeds, code="c"):
    """Return results with one seed for each list of figures."""
    results = Results("institutional", code, None)
    for seed, figures in enumerate(seeds):
        assert not results.done(CASE)
        summarise(results, CASE, range(len(seeds)))
        results.add(CASE, figures, seed=seed)
    return results


def test_a_mean_is_added_once_all_seeds_are_measured():
    results = seeded(*([Figure("test_accuracy", value, more={"late": value / 2})] for value in (0.86, 0.88, 0.93)))
    for _ in range(2):
        summarise(results, CASE, range(3), averaged=("late",), more={"paper": 0.878})
    (mean,) = results.done(CASE)
    assert "seed" not in mean
    assert mean["value"] == pytest.approx(0.89)
    assert mean["spread"] == pytest.approx(0.07)
    assert mean["values"] == [0.86, 0.88, 0.93]
    assert mean["late"] == pytest.approx(0.445)
    assert mean["paper"] == 0.878


def test_seeds_with_different_recipes_have_no_mean():
    def figures(recipe, *names):
        return [Figure("test_accuracy", 0.8, more={"recipe": recipe}), *(Figure(name, 1.0) for name in names)]

    rate = {"learning_rate": 0.1}
    for others in ([figures({**rate, "precision": "bfloat16"})], [figures(rate, "seconds")], []):
        results = seeded(figures(rate), *others)
        summarise(results, CASE, (0, 1))
        assert not results.done(CASE)
    # Another version of the code with the same recipe has a mean: only the recipe counts.
    results = seeded(figures(rate, "seconds"))
    results.code = "d"
    results.add(CASE, figures(rate, "seconds"), seed=1)
    summarise(results, CASE, (0, 1), keep=("recipe",))
    assert results.done(CASE)[0]["recipe"] == rate


@pytest.fixture
def tree(tmp_path):
    for folder in ("coordinator", "benchmarks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "coordinator" / "a.py").write_text("x = 1\n")
    for name in ("mine.py", "other.py"):
        (tmp_path / "benchmarks" / name).write_text("y = 1\n")
    (tmp_path / "constraints.txt").write_text("numpy==2.0\n")
    return tmp_path


@pytest.mark.parametrize("name", ["coordinator/a.py", "coordinator/new.py", "benchmarks/mine.py", "constraints.txt"])
def test_the_digest_changes_with_the_sources(tree, name):
    before = code_digest(tree)
    (tree / name).write_text("x = 2\n")
    assert code_digest(tree) != before


def test_a_moved_or_renamed_file_leaves_the_digest(tree):
    before = code_digest(tree)
    (tree / "benchmarks" / "prompts").mkdir()
    (tree / "benchmarks" / "mine.py").rename(tree / "benchmarks" / "prompts" / "quality.py")
    (tree / "README.md").write_text("words")
    assert code_digest(tree) == before


def test_spread_is_the_largest_difference():
    assert spread([0.25, 0.75, 0.5]) == {"spread": 0.5, "values": [0.25, 0.75, 0.5]}


def test_a_folder_that_is_not_there_loses_no_cell(tmp_path):
    results = open_results("many", folder=tmp_path / "a" / "b")
    results.add(CASE, [Figure("first", 1.0)])
    assert [line["figure"] for line in read_lines(tmp_path / "a" / "b" / "many.jsonl")] == ["first"]


def test_no_file_has_no_lines(tmp_path):
    assert record.read_lines(tmp_path / "nothing.jsonl") == []


def test_a_cell_waits_for_the_lines_that_others_write_and_read(tmp_path, monkeypatch):
    results, asked, real = open_results("many", folder=tmp_path), threading.Event(), fcntl.flock
    results.add(CASE, [Figure("first", 1.0)])
    whole = results.path.read_text()

    def flock(file, kind):
        asked.set()
        real(file, kind)

    monkeypatch.setattr("benchmarks.library.record.fcntl.flock", flock)
    for act, kind in (
        (lambda: results.add(CASE, [Figure("second", 2.0)]), fcntl.LOCK_SH),
        (lambda: open_results("many", folder=tmp_path), fcntl.LOCK_EX),
    ):
        asked.clear()
        waiting = threading.Thread(target=act)
        with results.path.open() as held:
            real(held, kind)
            waiting.start()
            assert asked.wait(20)
            assert waiting.is_alive()
            assert results.path.read_text() == whole
        waiting.join(20)
        assert not waiting.is_alive()
        whole = results.path.read_text()
    assert [line["figure"] for line in read_lines(results.path)] == ["first", "second"]
