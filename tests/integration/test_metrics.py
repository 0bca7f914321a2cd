"""Noised metrics with real processes: who measures pays for it, who does not sends as much, and receipts say both."""

import json

import pytest

from learning.accounting.events import Beside, SampledGaussian, planned
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from tacit.validation import NoisedMetrics
from tests.support.places import ROOT
from tests.support.processes import PATIENCE, running_federation, succeed

MEASURING, SILENT = ("north", "east"), "south"
EXAMPLES, ROUNDS, DELTA = 360, 3, 1e-6
METRICS = NoisedMetrics(noise_multiplier=10.0, every=2)
BARE = SampledGaussian(multiplier=2.0, rate=64 / EXAMPLES, steps=8)
# The multiplier under add-remove is the job's own.
MEASURED = BARE.model_copy(update={"metrics": Beside(multiplier=10.0, every=16)})


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("metrics")) as running:
        running.enrol(*MEASURING, policy="schema = 1\nmetrics_epsilon = 4.0\nvalidation_share = 0.25\n")
        running.enrol(SILENT, policy="schema = 1\n")
        yield running


def ordered(folder):
    """The example job of dp-sgd, with metrics in every second round."""
    spec = (ROOT / "examples" / "mechanisms" / "dp-sgd.toml").read_text()
    spec = spec.replace('name = "dp-sgd"\nlabels', 'name = "measured"\nlabels')
    spec = spec.replace("../desk/words.txt", str(ROOT / "examples" / "desk" / "words.txt"))
    spec = spec.replace("count = 5", f"count = {ROUNDS}")
    path = folder / "measured.toml"
    path.write_text(spec + f"\n[metrics]\nnoise_multiplier = {METRICS.noise_multiplier}\nevery = {METRICS.every}\n")
    return path


def test_measured_rounds_are_one_event_with_the_training_and_a_silent_member_pays_for_none(federation, tmp_path):
    federation.create(ordered(tmp_path))
    members = []
    for name in (*MEASURING, SILENT):
        federation.data(name, EXAMPLES)
        members.append(federation.start(name, "--job", "measured", "--until-finished"))
    detail = federation.finished("measured")
    assert [member.process.wait(timeout=PATIENCE) for member in members] == [0, 0, 0]
    assert detail.job.version_number == ROUNDS
    lengths = set()
    for name in (*MEASURING, SILENT):
        home = federation.home(name)
        shown = json.loads(succeed("edge_client", "ledger", "show", "--home", home, "--json").splitlines()[0])
        whole = planned(MEASURED if name in MEASURING else BARE, 8 * ROUNDS)
        expected = epsilon_counted([whole], Limit(8.0, DELTA))
        assert shown["spent"]["epsilon"] == pytest.approx(expected, rel=1e-3)
        succeed("edge_client", "ledger", "verify", "--home", home)
        receipts = [json.loads(each.read_bytes()) for each in (home / "receipts" / "measured").glob("*.sent.json")]
        assert len(receipts) == ROUNDS
        for receipt in receipts:
            beside = receipt["event"]["metrics"]
            measured = METRICS.measured(receipt["round"])
            assert beside == (
                {"multiplier": 10.0, "every": 16, "measured": int(measured)} if name in MEASURING else None
            )
            assert [each["name"] for each in receipt["segments"]] == ["update", "metrics"]
            lengths.add((receipt["vector_bytes"], receipt["bits"], receipt["segments"][1]["values"]))
        assert (home / "ledgers" / "validation.key").exists() == (name in MEASURING)
    # Nobody sees who measures: all vectors have the same form.
    assert len(lengths) == 1
