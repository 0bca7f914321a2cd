"""The benchmark of small devices measures a member's real process, and the page of devices has its figures."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.device import costs
from benchmarks.library.record import RESULTS, ROOT, read_lines
from benchmarks.library.report import newest
from tests.unit.learning.training.test_head_update import DP, SGD, bundled, examples


def figure(name, runtime):
    (line,) = [
        each
        for each in newest(read_lines(RESULTS / "device.jsonl"))
        if (each["figure"], each["case"]["runtime"]) == (name, runtime)
    ]
    return line


def test_the_page_of_devices_has_the_measured_figures():
    page = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")

    def row(name, cell):
        return f"| {name} | " + " | ".join(cell(runtime) for runtime in costs.RUNTIMES) + " |"

    def installed(runtime):
        line = figure("installed_bytes", runtime)
        return f"{line['value'] / 1e6:,.0f} MB, {line['packages']} packages"

    def resident(runtime):
        line = figure("resident_bytes", runtime)
        return f"{line['value'] / 1e6:.0f}, {line['afterwards'] / 1e6:.0f} MB"

    def rounds(runtime):
        line = figure("round_seconds", runtime)
        return f"{line['first_processor']:.2f}, {line['processor']:.2f} s"

    for name, cell in (
        ("installed", installed),
        ("resident at the peak, and afterwards", resident),
        ("start", lambda runtime: f"{figure('start_seconds', runtime)['processor']:.2f} s"),
        ("first round, and a later one", rounds),
        (
            f"test questions right, of {figure('accuracy', 'torch')['test']}",
            lambda runtime: f"{100 * figure('accuracy', runtime)['value']:.1f} %",
        ),
    ):
        assert row(name, cell) in page


def test_a_device_needs_a_part_of_what_a_member_with_torch_installs():
    python = Path(sys.executable)
    (small, few), (large, many) = (costs.installed_bytes(python, extra) for extra in ("device", "edge"))
    assert few < many
    assert 10_000_000 < small < large / 2


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.long), "device"])
def test_the_worker_trains_two_rounds_and_says_what_they_took(tmp_path, kind):
    bundled(tmp_path, mechanism=DP, training=SGD)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": each.text, "label": each.label}) + "\n" for each in examples()))
    python = Path(sys.executable)
    told = json.loads(costs._run(python, costs._WORKER, kind, str(tmp_path / "bundle"), str(rows)).splitlines()[-1])
    assert len(told["rounds"]) == len(told["processor"]) == 2
    assert min(*told["rounds"], *told["processor"]) > 0
    assert told["resident"] >= told["after"] > 10_000_000


def test_a_head_learns_from_either_runtimes_features(tmp_path):
    bundled(tmp_path, mechanism=DP, training=SGD)
    rows = examples()
    found = [costs.accuracy(tmp_path / "bundle", each, rows, rows[:20]) for each in ("torch", "device")]
    assert found[0].value == found[1].value > 0.7
    assert found[1].more == {"train": 40, "test": 20}
