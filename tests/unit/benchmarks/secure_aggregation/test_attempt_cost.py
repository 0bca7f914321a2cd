"""Cells of the cost of secure aggregation: their keys and targets, a server process's memory, and the drawing."""

import json
import os
import signal

import pytest

from benchmarks.library.record import Figure, Results
from benchmarks.library.report import section_text, write_page
from benchmarks.library.stopwatch import Stopwatch
from benchmarks.secure_aggregation import attempt as secure_cost
from benchmarks.secure_aggregation import cipher
from benchmarks.secure_aggregation import costs as secure_agg
from benchmarks.secure_aggregation.cohort import ChecksMissing, CohortFailed, Outcome, play
from benchmarks.secure_aggregation.crowd import complete_context, layout_for, sparse_context
from benchmarks.secure_aggregation.report import PAGE
from benchmarks.secure_aggregation.spooling import SeparateServer
from secure_agg import Graph


@pytest.fixture(scope="module")
def crowd(members):
    return members.first(6)


class Timed:
    def __init__(self):
        self.watch = Stopwatch()
        self.watch.wall, self.watch.cpu = 5.0, 4.0


OUTCOME = Outcome(0.2, 0.15, 5, 4.0, 1e-7, {"member": 1, "server": 2})


def figures_of(context, dropped):
    return {each.name: each for each in secure_cost.figures(context, dropped, OUTCOME, Timed(), 0.0)}


def test_the_figures_of_the_large_cohort_have_their_targets():
    context = sparse_context(1000, layout_for(1000, 100_000))
    assert context.sparse.degree == 120
    found = figures_of(context, 50)
    assert found["client_cpu_seconds"].value == 0.15
    assert found["client_cpu_seconds"].more["target"] == 0.2
    assert (found["server_seconds"].value, found["server_seconds"].more["target"]) == (5.0, 6.0)
    assert {each.unit for each in found.values()} == {"s"}


def test_other_cohorts_and_lengths_have_no_targets():
    context = sparse_context(1000, layout_for(1000, 10_000))
    assert all("target" not in each.more for each in figures_of(context, 50).values())
    context = complete_context(100, layout_for(100, 100_000))
    assert all("target" not in each.more for each in figures_of(context, 10).values())


def test_a_case_names_its_graph_and_neighbours():
    assert secure_cost.case_of(1000, 100_000, 50, Graph.SPARSE) == {
        "members": 1000,
        "values": 100_000,
        "dropped": 50,
        "graph": "sparse",
        "neighbours": 120,
    }
    assert "neighbours" not in secure_cost.case_of(100, 100_000, 10, Graph.COMPLETE)


def test_an_attempt_gives_both_figures(crowd):
    found = {each.name: each for each in secure_cost.cost(crowd, 500, 1, Graph.COMPLETE)}
    assert found.keys() == {"client_cpu_seconds", "server_seconds"}
    assert found["server_seconds"].more["cpu_seconds"] > 0
    assert found["client_cpu_seconds"].more["timed"] == 5


def test_a_server_in_another_process_opens_the_same_mean(crowd):
    layout = layout_for(6, 5000, bits=32)
    context = complete_context(6, layout)
    with SeparateServer(crowd, context, layout, 1) as server:
        outcome = play(crowd, context, layout, (3,), server, timed=1)
        assert server.peak.highest() >= server.peak.idle > 0
    # `play` has compared the mean with the plain one.
    assert outcome.max_abs_error < 1e-5


def test_an_error_in_the_other_process_is_raised_here(crowd):
    layout = layout_for(6, 500, bits=32)
    context = complete_context(6, layout)
    with SeparateServer(crowd, context, layout, 0) as server, pytest.raises(ChecksMissing, match="6 were due"):
        play(crowd, context, layout, (3,), server, timed=1)


def test_a_server_process_that_dies_is_reported_at_once(crowd):
    layout = layout_for(6, 500, bits=32)
    context = complete_context(6, layout)
    dying = SeparateServer(crowd, context, layout, 1)
    with dying as server:
        os.kill(dying.process_id, signal.SIGKILL)
        with pytest.raises(CohortFailed, match="ended early"):
            play(crowd, context, layout, (3,), server, timed=1)


def test_memory_is_counted_in_vectors(crowd):
    (figure,) = secure_cost.memory(crowd, 1_000_000, 1)
    more = figure.more
    assert (figure.name, figure.unit) == ("server_peak_vectors", "vectors")
    assert figure.value == round((more["peak_bytes"] - more["idle_bytes"]) / 4_000_000, 2)
    assert figure.value >= 1, "the sum itself is one vector"


def test_the_cipher_figures_are_ratios_of_rates(monkeypatch):
    monkeypatch.setattr(cipher, "masking_seconds", lambda values, threads: 2.0 / threads)
    monkeypatch.setattr(cipher, "raw_seconds", lambda total_bytes, block: 1.5 if block == 256 * 1024 else 1.7)
    (share,) = cipher.share_of_limit(1000)
    assert (share.name, share.value, share.more["raw_block_bytes"]) == ("share_of_cipher_limit", 0.75, 256 * 1024)
    (speedup,) = cipher.thread_speedup(1000)
    assert (speedup.name, speedup.value) == ("thread_speedup", 2.0)


def test_the_raw_loop_is_scaled_to_the_bytes_asked_for(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            self.now += 1.0
            return self.now

        process_time = perf_counter

    monkeypatch.setattr("benchmarks.library.stopwatch.time", Clock())
    # The clock is read twice in between (perf_counter, process_time, perf_counter), and three blocks replace 2.5.
    assert cipher.raw_seconds(2560, 1024) == pytest.approx(2.0 * 2560 / 3072)


def test_a_cell_is_measured_once_for_each_figure(tmp_path):
    results = Results("secure_agg", "aaaaaaaaaaaa", tmp_path / "secure_agg.jsonl")
    cells = secure_agg.Cells(results, quick=False)
    case = {"members": 10}
    runs = []

    def run(name):
        runs.append(name)
        return [Figure(name, 1.0)]

    for name in ("server_seconds", "server_seconds", "max_abs_error"):
        cells.measure(case, name, lambda name=name: run(name))
    assert runs == ["server_seconds", "max_abs_error"]
    written = [json.loads(line) for line in results.path.read_text().splitlines()]
    assert [line.get("figure") for line in written] == [None, "server_seconds", "max_abs_error"]


def test_the_members_of_a_part_are_made_once(crowd, monkeypatch):
    made = []
    monkeypatch.setattr(secure_agg.Crowd, "make", lambda members: made.append(members) or crowd)  # type: ignore[attr-defined]
    cells = secure_agg.Cells(Results("secure_agg", "a", None), quick=True)
    assert len(cells.crowd(6).parties) == 6
    assert len(cells.crowd(4).parties) == 4
    assert made == [6]


RUN = {
    "commit": "0123456789abcdef",
    "code": "c1",
    "machine": {"cpu": "a processor", "cores": 2, "memory_bytes": 1, "system": "Linux x86_64"},
    "versions": {"python": "3.11"},
}


def line(figure, value, members=100, values=100_000, graph="complete", dropped=10, **more):
    case = {"members": members, "values": values, "dropped": dropped, "graph": graph}
    return {
        "bench": "secure_agg",
        "case": case,
        "figure": figure,
        "value": value,
        "unit": "1",
        "code": "c1",
        **more,
    }


LINES = [
    {"bench": "secure_agg", "run": RUN},
    line("secure_over_clear_round", 1.1, target=1.1),
    line("server_times_faster_than_flower", 320.0, peer=96.0, ours=0.3, target=300.0),
    line("share_of_cipher_limit", 0.9),
    *(line("server_seconds", 0.01 * n, n, dropped=n // 10) for n in (10, 100)),
    *(line("client_cpu_seconds", 0.001 * n, n, dropped=n // 10) for n in (10, 100)),
    line("server_seconds", 4.0, 1000, graph="sparse", dropped=100),
    line("client_cpu_seconds", 0.1, 1000, graph="sparse", dropped=100),
    line("server_seconds", 3.0, values=1_000_000),
    line("client_cpu_seconds", 0.3, values=1_000_000),
]


def test_each_figure_is_in_one_section():
    sections = [section for section in PAGE.sections if section.bench == "secure_agg"]
    named = [name for section in sections for name in section.figures]
    assert len(named) == len(set(named)) == 17
    texts = {each.name: section_text(each, each.lines(LINES)) for each in sections if each.name in ("flower", "cost")}
    assert "320" in texts["flower"]
    assert "secure_over_clear_round" not in texts["flower"]
    assert "| 1000 | 100,000 | 100 | sparse |" in texts["cost"]


def test_the_plot_is_reproducible(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    (tmp_path / "secure_agg.jsonl").write_text("".join(json.dumps(each) + "\n" for each in LINES))
    first = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "a")}
    again = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "b")}
    assert first == again
    assert first.keys() == {"secure-aggregation.md", "secure_agg_cost.svg"}
    drawing = first["secure_agg_cost.svg"].decode()
    assert "a member, CPU, sparse graph" in drawing
    assert "100 members" in drawing
