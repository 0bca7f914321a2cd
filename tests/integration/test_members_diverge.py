"""Training that diverges, in real processes: members and the operator are warned, and a job that lost all members ends.

Members' losses depend on their data, so only their own log has them. The coordinator judges by the versions.
"""

import json

import pytest

from tacit.reason import Reason, word
from tacit.v1 import operator_pb2 as pb
from tests.support.processes import EXAMPLES, running_federation

MEMBERS = ("aster", "birch", "cedar")
DP_SGD = '[mechanism]\nname = "dp-sgd"\nnoise_multiplier = 1.0\nclip = 1.0\nlot = 32\nsteps = 8\n'


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    policy = 'schema = 1\nepsilon = 1000.0\nmechanisms = ["dp-sgd", "none"]\n'
    with running_federation(tmp_path_factory.mktemp("divergence")) as running:
        running.enrol(*MEMBERS, policy=policy)
        for name in MEMBERS:
            running.start(name)
        yield running


def create(federation, name, mechanism, training, rounds):
    labels = sorted({json.loads(line)["label"] for line in (EXAMPLES / "train.jsonl").open()})
    spec = federation.folder / f"{name}.toml"
    spec.write_text(
        f"schema = 1\nname = {json.dumps(name)}\nlabels = {json.dumps(labels)}\n"
        f'[vocabulary]\nkind = "words"\nfile = {json.dumps(str(EXAMPLES / "words.txt"))}\n'
        f"[model]\nembedding = 32\nwidths = [2]\nmaps = 16\n{mechanism}[training]\n{training}\n"
        f"[rounds]\ncount = {rounds}\nmin_members = 3\n[rounds.deadlines]\ntraining = 20\n"
    )
    federation.create(spec)


def lines(federation, name, event, job):
    text = (federation.folder / f"{name}.log").read_text()
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event and line.get("job") == job]


def test_dp_sgd_at_too_high_a_rate_warns_members_and_operator(federation):
    create(federation, "wild", DP_SGD, 'optimiser = "sgd"\nlearning_rate = 10.0', rounds=6)
    job = federation.finished("wild").job
    assert "has exploded: its norm is" in job.warning
    assert "a lower training.learning_rate or clip" in job.warning
    shown = json.loads(federation.operator("job", "show", "wild", "--json"))
    assert shown["warning"] == job.warning
    norms = [version["norm"] for version in shown["versions"]]
    assert norms[-1] > 5 * norms[0]
    assert job.warning in federation.operator("status")
    assert "NORM" in federation.operator("job", "show", "wild")
    found = lines(federation, "coordinator", "version_exploded", "wild")
    assert {line["level"] for line in found} == {"warning"}
    assert federation.metric("tacit_coordinator_versions_exploded_total", job="wild") == len(found)
    # When a counter began is no series.
    assert federation.metric("tacit_coordinator_versions_exploded_created", job="wild") == 0
    assert federation.metric("tacit_coordinator_version_norm", job="wild") == pytest.approx(norms[-1])
    journal = federation.operator("audit", "show", "--json", "--subject", "wild")
    assert journal.count('"version_exploded"') == len(found)
    for name in MEMBERS:
        warned = lines(federation, name, "training_failing", "wild")
        assert len(warned) == 6
        assert "and guessing costs 1.79" in warned[-1]["why"]
    # What a member sees of its own loss, nobody else does.
    heard = (federation.folder / "coordinator.log").read_text()
    assert "training_failing" not in heard
    assert "guessing costs" not in heard


def test_training_that_works_warns_nobody(federation):
    create(federation, "calm", DP_SGD, 'optimiser = "sgd"\nlearning_rate = 0.1', rounds=3)
    job = federation.finished("calm").job
    assert job.warning == ""
    assert federation.metric("tacit_coordinator_versions_exploded_total", job="calm") == 0
    assert not lines(federation, "coordinator", "version_exploded", "calm")
    assert not any(lines(federation, name, "training_failing", "calm") for name in MEMBERS)


def test_a_job_whose_members_all_diverge_pauses_and_says_why(federation):
    create(federation, "lost", "", 'optimiser = "adam"\nlearning_rate = 5.0\nepochs = 8', rounds=6)
    job = federation.wait_for("lost", lambda detail: detail.job.status == pb.JOB_STATUS_PAUSED).job
    assert job.reason == Reason.REASON_MEMBERS_DECLINED
    assert "lower training.learning_rate (it is 5)" in job.waiting
    for name in MEMBERS:
        declined = lines(federation, name, "declined", "lost")
        assert declined
        assert all("diverged" in line["detail"] for line in declined)
    reason = word(Reason.REASON_TRAINING_DIVERGED)
    assert federation.metric("tacit_coordinator_declines_total", job="lost", reason=reason) >= 3
