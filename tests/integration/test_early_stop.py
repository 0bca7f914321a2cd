"""A private job with real processes that stops by what its members measure, and a passport of its best version.

The texts are easy to tell apart, but a fifth of them have another label than their words say. So the model is as good
as it can be after a round or two, and the members' estimates show that it no longer improves.
"""

import hashlib
import json
import random

import numpy as np
import pytest

from coordinator.storage import open_blobs
from export.evaluate import evaluate_bundle, read_examples
from tacit.reason import Reason
from tacit.v1 import operator_pb2 as pb
from tests.support.passports import by_openssl, party_of, refused_after_changes, verified
from tests.support.processes import PATIENCE, running_federation, succeed

pytestmark = pytest.mark.timeout(4 * PATIENCE)

MEMBERS = ("north", "east", "south")
LABELS = ("bill", "visit")
WORDS = {"bill": ("invoice", "payment", "price"), "visit": ("clinic", "doctor", "hour")}
FILLING = ("please", "today", "about", "my", "again", "thanks", "for", "the")
# Rows of a member, a quarter of which it keeps back; and the share of texts whose label is what their words say.
ROWS, RIGHT = 2400, 0.8
PATIENCE_ROUNDS, COUNT = 2, 20
MIN_IMPROVEMENT = 0.05
POLICY = "schema = 1\nepsilon = 20.0\nmetrics_epsilon = 8.0\nvalidation_share = 0.25\n"


def rows(seed, count):
    """Texts that differ from each other, and their labels."""
    draw = random.Random(seed)
    for number in range(count):
        label = draw.choice(LABELS)
        told = label if draw.random() < RIGHT else next(each for each in LABELS if each != label)
        words = [draw.choice(WORDS[label]), *draw.choices(FILLING, k=5), f"n{number}"]
        draw.shuffle(words)
        yield {"text": " ".join(words), "label": told}


def write(path, found):
    path.write_text("".join(json.dumps(each) + "\n" for each in found))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A federation whose job has stopped, and the job."""
    folder = tmp_path_factory.mktemp("stop")
    with running_federation(folder) as federation:
        federation.enrol(*MEMBERS, policy=POLICY)
        (folder / "words.txt").write_text("\n".join([*WORDS["bill"], *WORDS["visit"], *FILLING]) + "\n")
        spec = folder / "wards.toml"
        spec.write_text(
            f'schema = 1\nname = "wards"\nlabels = {json.dumps(LABELS)}\n'
            '[mechanism]\nname = "dp-sgd"\nnoise_multiplier = 0.8\nclip = 1.0\nlot = 200\nsteps = 20\n'
            '[vocabulary]\nkind = "words"\nfile = "words.txt"\n'
            "[model]\nembedding = 16\nwidths = [1]\nmaps = 8\n"
            '[training]\noptimiser = "sgd"\nlearning_rate = 2.0\n'
            f"[metrics]\nnoise_multiplier = 10.0\npatience = {PATIENCE_ROUNDS}\nmin_improvement = {MIN_IMPROVEMENT}\n"
            '[average]\nkind = "ema"\ndecay = 0.1\n'
            f"[rounds]\ncount = {COUNT}\nmin_members = 3\ntarget_members = 3\n"
            "[rounds.deadlines]\ntraining = 120\nreconnect = 5\n"
        )
        federation.create(spec)
        for seed, name in enumerate(MEMBERS):
            write(folder / f"{name}.jsonl", rows(seed, ROWS))
        members = [federation.start(name, "--job", "wards", "--until-finished") for name in MEMBERS]
        # The coordinator is killed when an estimate is there; what it said before is what it says afterwards.
        before = federation.wait_for("wards", lambda detail: detail.job.HasField("best"))
        federation.coordinator.kill()
        federation.processes.remove(federation.coordinator)
        federation.serve()
        after = federation.show("wards")
        told = [each.estimate for each in before.versions if each.HasField("estimate")]
        assert [each.estimate for each in after.versions][: len(told)] == told
        detail = federation.finished("wards")
        assert [member.process.wait(timeout=PATIENCE) for member in members] == [0, 0, 0]
        yield federation, detail


def test_a_job_that_no_longer_improves_stops_and_says_why(stopped):
    federation, detail = stopped
    assert (detail.job.reason, detail.job.status) == (Reason.REASON_NO_IMPROVEMENT, pb.JOB_STATUS_FINISHED)
    newest = detail.job.version_number
    assert PATIENCE_ROUNDS + 1 <= newest < COUNT
    # Each version but the last was measured, by all three members.
    assert [each.HasField("estimate") for each in detail.versions] == [True] * newest + [False]
    assert {each.estimate.members for each in detail.versions[:-1]} == {3}
    shown = [each.estimate.shown for each in detail.versions[:-1]]
    assert all(abs(each.units - 3 * ROWS / 4) < 5 * each.units_error + 150 for each in shown)
    # It began by guessing, and nothing can be better than the labels.
    assert shown[0].accuracy < 0.7
    best = detail.job.best.shown
    assert abs(best.accuracy - RIGHT) < 4 * best.accuracy_error + 0.04
    said = federation.operator("job", "show", "wards")
    assert "Stopped early: 2 measured versions were not 5 points of accuracy better than version" in said
    assert "no longer improve" in federation.operator("status")
    labels = {"job": "wards"}
    assert federation.metric("tacit_coordinator_best_version", **labels) == detail.job.best.version_number
    assert federation.metric("tacit_coordinator_best_accuracy_error", **labels) == pytest.approx(best.accuracy_error)
    assert federation.metric("tacit_coordinator_estimate_version", **labels) == newest - 1
    # What was charged stays charged: a training and a measurement for each round, and nothing for rounds never begun.
    for name in MEMBERS:
        told = succeed("edge_client", "ledger", "show", "--home", federation.home(name), "--json").splitlines()[0]
        assert 0 < json.loads(told)["spent"]["epsilon"] < 20


def test_the_best_version_is_exported_and_its_passport_verified_and_refused_after_each_change(stopped, tmp_path):
    federation, detail = stopped
    out, ours = tmp_path / "best", party_of(federation)
    federation.operator("export", "wards", "--version", "best", "--out", out)
    # On rows that no member has it is as good as its estimate says, which was selected.
    write(tmp_path / "test.jsonl", rows(99, 2000))
    found = evaluate_bundle(out, read_examples(tmp_path / "test.jsonl", text="text", label="label"))
    best = detail.job.best.shown
    assert abs(found.accuracy - best.accuracy) < 4 * best.accuracy_error + 0.06
    passport = out / "passport.json"
    said = verified(passport, ours, out)
    (export,) = said["exports"]
    assert export["number"] == detail.job.best.version_number
    estimates = [each["estimate"] for each in said["versions"]]
    assert estimates[-1] is None
    assert [each["accuracy_error"] for each in estimates[:-1]] == [
        each.estimate.shown.accuracy_error for each in detail.versions[:-1]
    ]
    assert [each["number"] for each in said["versions"] if each["estimate"] and each["estimate"]["selected"]] == [
        detail.job.best.version_number
    ]
    shown = succeed("coordinator", "passport", "verify", passport, "--federation", ours)
    assert "(best, selected)" in shown
    assert "not measured" in shown
    done = by_openssl(passport, ours, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["the passport holds"]), done
    refused_after_changes(passport, ours, tmp_path / "edited.json", seed=7)


def test_an_average_of_the_newest_versions_is_exported_like_a_version(stopped, tmp_path):
    federation, detail = stopped
    out, newest = tmp_path / "average", detail.job.version_number
    store = open_blobs(f"file://{federation.dir / 'store'}")
    said = json.loads(federation.operator("export", "wards", "--version", "average", "--out", out, "--json"))
    # With decay 0.1 the newest weighs 10 of 11 parts and the one before it 1.
    assert (said["averaged"], said["version_number"]) == ([newest - 1, newest], newest)
    parts = [np.frombuffer(store.get(each.digest), "<f4").astype(float) for each in detail.versions[-2:]]
    mean = (parts[0] * (0.1 / 1.1) + parts[1] * (1 / 1.1)).astype("<f4")
    assert not np.array_equal(parts[0], parts[1])
    assert said["version"] == hashlib.sha256(mean.tobytes()).hexdigest()
    assert f"the average of versions {newest - 1} to {newest}" in (out / "README.md").read_text()
    (export,) = verified(out / "passport.json", party_of(federation), out)["exports"]
    assert export["averaged"] == [newest - 1, newest]
    write(tmp_path / "test.jsonl", rows(99, 500))
    figures = ("evaluate", "wards", "--version", "average", "--data", tmp_path / "test.jsonl")
    before = [len(each.evaluations) for each in federation.show("wards").versions]
    assert f"average of {newest - 1} to {newest}: accuracy" in federation.operator(*figures)
    # The coordinator stores figures of versions only.
    assert [len(each.evaluations) for each in federation.show("wards").versions] == before
    # The same folder later, by the passport command.
    again = tmp_path / "again.json"
    federation.operator("passport", "wards", "--export", out, "--out", again)
    assert verified(again, party_of(federation), out)["exports"] == [export]


def test_pruning_keeps_the_best_version_and_those_of_the_average(stopped):
    federation, detail = stopped
    config = federation.dir / "coordinator.toml"
    text = config.read_text()
    config.write_text(
        text.replace("keep_versions = 0", "keep_versions = 1").replace("keep_exported = true", "keep_exported = false")
    )
    said = json.loads(succeed("coordinator", "store", "prune", "--dir", federation.dir, "--dry-run", "--json"))
    config.write_text(text)
    newest = detail.job.version_number
    stays = {0, detail.job.best.version_number, newest - 1, newest}
    assert said["versions"] == {"wards": [each.number for each in detail.versions if each.number not in stays]}
