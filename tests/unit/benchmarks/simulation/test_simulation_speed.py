"""The benchmark of the simulation: its quick mode runs, and both sides do the same steps."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.library.record import ROOT, Results
from benchmarks.simulation import speed
from benchmarks.simulation.setup import ROWS, Case, places_of

RUN = {"clock": [9.0, 2.0, 4.0, 2.0], "processor": [9.0, 1.0, 1.0, 2.0], "resident": [1, 3, 2, 2]}


def run_of(**changes):
    return {**RUN, "start_seconds": 1.0, "accuracy": 0.5, **changes}


def test_rates_leave_the_first_round_out_and_ratios_pair_turns():
    case = Case("head", 100, 20, 4)
    ours, theirs = (
        [run_of(), run_of(clock=[9.0, 1, 1, 1])],
        [run_of(clock=[9.0, 8, 8, 8], processor=[1.0, 4, 4, 4])] * 2,
    )
    found = {each.name: each for each in speed.figures(case, ours, theirs)}
    # The medians of the counted rounds are 2 s and 1 s.
    assert found["client_rounds_per_second"].more["turns"] == [10.0, 20.0]
    assert found["client_rounds_per_second"].value == 15.0
    assert found["client_rounds_per_second"].more["processor_seconds"] == pytest.approx(4 / 60, abs=1e-5)
    assert found["client_rounds_per_second"].more["start_seconds"] == 10.0
    assert found["times_flower"].more["turns"] == [4.0, 8.0]
    assert found["times_flower"].value == 6.0
    assert found["times_flower"].more["processor"] == 3.0
    assert found["resident_bytes"].value == 3
    assert "times_flower" not in {each.name for each in speed.figures(case, theirs, theirs)}
    assert "times_flower" not in {each.name for each in speed.figures(case, ours, None)}


def test_every_member_has_as_many_rows_and_every_row_is_dealt_as_often_as_the_others():
    for members in (100, 1_000, 10_000):
        places = places_of(members, 5_452)
        assert places.shape == (members, ROWS)
        counts = np.bincount(places.ravel(), minlength=5_452)
        assert counts.max() - counts.min() <= 1
    assert np.array_equal(places_of(100, 5_452), places_of(1_000, 5_452)[:100])


def test_a_cell_is_measured_again_for_more_turns_only():
    results = Results("simulation", "code", None)
    case = Case("head", 100, 20, 4)
    assert speed._turns(results, case, 2) == 0
    results.add(speed.case_of(case, "flower", 2), speed.figures(case, [run_of()] * 2, None))
    assert speed._turns(results, case, 2) == 2
    assert speed._turns(results, case, 1) == 0


def test_cells_that_a_goal_needs_come_first_and_one_that_fails_stops_no_other(monkeypatch, tmp_path, capsys):
    cells = speed._cells((100, 20), (1, 2), (100, 10_000), ("head",))
    found = [(case.cohort, workers, case.members) for case, workers in cells]
    assert found == [
        (20, 2, 100), (20, 2, 10_000), (20, 1, 100), (20, 1, 10_000),
        (100, 2, 100), (100, 2, 10_000), (100, 1, 100), (100, 1, 10_000),
    ]  # fmt: skip
    tried = []

    def fails(results, case, workers, *_others, **_more):
        tried.append((case.members, workers))
        if case.members == 100:
            raise subprocess.TimeoutExpired("flower", 900)

    monkeypatch.setattr(speed, "measure", fails)
    monkeypatch.setattr(speed, "_ray_version", lambda: "2")
    monkeypatch.setattr(speed, "flower_python", lambda *_, **_more: tmp_path)
    monkeypatch.setattr(speed, "open_results", lambda *_, **_more: Results("simulation", "code", None))
    words = ["simulation", "--cohorts", "20", "--members", "100", "1000", "--models", "head", "--workers", "2"]
    monkeypatch.setattr(sys, "argv", words)
    assert speed.main() == 1
    assert tried == [(100, 2), (1000, 2)]
    assert "members=100" in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT.parent / "shared" / "data" / "trec").exists(), reason="TREC is not here")
def test_the_quick_mode_prints_figures_of_each_engine_and_writes_nothing():
    pytest.importorskip("ray")
    before = sorted(ROOT.glob("benchmarks/results/simulation*"))
    words = [sys.executable, "-m", "benchmarks.simulation", "--quick"]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    figures = [line for line in lines if "figure" in line]
    assert {line["case"]["engine"] for line in figures} >= {"local", "ray"}
    # The engine changes no bit, so it changes no accuracy.
    ours = {line["value"] for line in figures if line["figure"] == "accuracy" and line["case"]["engine"] != "flower"}
    assert len(ours) == 1
    assert all(line["value"] > 0 for line in figures)
    assert sorted(ROOT.glob("benchmarks/results/simulation*")) == before
