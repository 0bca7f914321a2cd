"""Real processes: a job trains without noise, its last version is measured with noise, and killed members repeat it."""

import asyncio
import json
import sys

import numpy as np
import pytest

from coordinator.cli.common import operator_stub
from edge_client.ledger.home_key import home_key
from edge_client.session.answers import HeldAnswer
from learning.models.assembly import whole_model
from learning.text.examples import Example
from learning.training.local import logits_of
from learning.validation.split import Split, unit_of
from tacit.blobs import fetch_blob
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tests.support.processes import Process, command, running_federation, succeed

MEASURING = ("north", "east", "south", "west")
# Under none, which promises nothing, a measurement is noised and charged all the same.
POLICY = (
    'schema = 1\nepsilon = 1000.0\nmechanisms = ["none"]\nmetrics_epsilon = {limit}\nvalidation_share = 0.3\n'
    "min_cohort = 3\n"
)
ROWS = 240
# Little noise, so that the estimate shows with four small members. It is dear, and their policies allow it.
STD = 32.0


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("measurements")) as running:
        running.enrol(*MEASURING, policy=POLICY.format(limit=1000.0))
        # It trains, and measures nothing: the default of a policy.
        running.enrol("quiet", policy=POLICY.format(limit=0.0))
        for name in (*MEASURING, "quiet"):
            running.data(name, ROWS)
        yield running


def fetched(federation, *digests):
    async def fetch():
        found = []
        async with operator_stub(federation.dir / "operator") as stub:
            for digest in digests:
                data = bytearray()
                await fetch_blob(stub.FetchBlob, digest, data)
                found.append(bytes(data))
        return found

    return asyncio.run(fetch())


def examples(federation, name):
    rows = [json.loads(line) for line in federation.data(name).open()]
    return [Example(each["text"], each["label"]) for each in rows]


def truth(federation, job, digest):
    """Accuracy, clipped loss and number of the rows that the members keep back, without noise; and of each label."""
    (document,) = fetched(federation, federation.show(job).job.document)
    document = JobDocument.from_json(document)
    manifest, weights, tokenizer = fetched(federation, document.manifest, digest, document.tokenizer)
    module, encoder = whole_model(document, Manifest.from_json(manifest), weights, tokenizer)
    right, losses, labels = [], [], []
    for name in MEASURING:
        rows = examples(federation, name)
        key = home_key(federation.home(name) / "ledgers" / "validation.key", "")
        units = [unit_of(each) for each in rows]
        kept = Split(key, 0.3).kept_back(units)
        seen = set()
        for at in np.flatnonzero(kept):
            # A text twice is one unit; the examples have each label of a text once.
            if units[at] in seen:
                continue
            seen.add(units[at])
            logits = logits_of(module, encoder.encode([rows[at].text]))[0].astype(np.float64)
            place = document.labels.index(rows[at].label)
            losses.append(min(float(np.logaddexp.reduce(logits) - logits[place]), 5.0))
            right.append(int(logits.argmax()) == place)
            labels.append(place)
    return np.array(right), np.array(losses), np.array(labels), document.labels


def charges(federation, name, job):
    """The job's reservations in a member's ledger, with the event and the attempts that each was charged for."""
    file = federation.folder / f"ledger-{name}.jsonl"
    file.unlink(missing_ok=True)
    succeed("edge_client", "ledger", "export", file, "--home", federation.home(name))
    events, found = {}, {}
    for record in map(json.loads, file.read_text().splitlines()):
        if record.get("kind") == "reserved" and record["body"]["purpose"]["job"] == job:
            events[record["sequence"]] = record["body"]["event"]
        if record.get("kind") == "charged" and record["body"]["reservation"] in events:
            found.setdefault(record["body"]["reservation"], []).append(record["body"]["attempt"])
    return [(events[number], attempts) for number, attempts in found.items()]


def measurement_file(federation, name, *more):
    file = federation.folder / f"{name}.toml"
    words = ["measure", "new", name, "--version", "desk:2", "--members", "4", "--epsilon", "1", "--out", file, *more]
    told = json.loads(succeed("coordinator", *words, "--json"))
    text = file.read_text().replace(f"std = {told['std']:g}", f"std = {STD:g}")
    file.write_text(text + "\n[rounds.deadlines]\ntraining = 60\nreconnect = 2\n")
    return file


def attempts_of(detail):
    return [attempt for each in detail.rounds for attempt in each.attempts]


def test_a_version_trained_without_noise_is_measured_with_it_and_killed_members_send_the_same_again(
    federation, tmp_path
):
    federation.job("desk", count=2, min_members=5)
    running = {name: federation.start(name) for name in (*MEASURING, "quiet")}
    version = federation.finished("desk").versions[-1]
    assert version.number == 2

    file = measurement_file(federation, "how-well")
    for name in MEASURING[2:]:
        running[name].stop()
    halt = tmp_path / "halt"
    halt.touch()
    victims = []
    for name in MEASURING[2:]:
        words = [sys.executable, "-m", "tests.support.halting_member", "confirm", str(halt), "--", "run"]
        words += ["--data", str(federation.data(name)), "--home", str(federation.home(name)), "--log-format", "json"]
        victims.append(Process(name, words, federation.folder / f"{name}-halting.log"))
        federation.processes.append(victims[-1])
    assert "is asked for" in federation.operator("measure", "run", file)
    waiting = json.loads(federation.operator("measure", "show", "how-well", "--json"))
    assert (waiting["status"], waiting["result"]) == ("running", None)
    assert "no estimate yet" in federation.operator("measure", "show", "how-well")
    running["quiet"].wait_for("declined", job="how-well")
    for victim in victims:
        victim.wait_for("halted", phase="confirm")
    before = {
        name: HeldAnswer.from_file(federation.home(name) / "answers" / "data" / "how-well.json").array
        for name in MEASURING
    }
    for victim in victims:
        victim.kill()
    federation.wait_for("how-well", lambda detail: any(each.outcome == "abandoned" for each in attempts_of(detail)))
    halt.unlink()
    for name in MEASURING[2:]:
        federation.start(name)
    detail = federation.finished("how-well")
    assert set(attempts_of(detail)[-1].survivors) == set(MEASURING)

    # The published sum is that of the answers held before the kill, and each was charged once.
    (mean,) = fetched(federation, detail.versions[-1].digest)
    total = np.rint(np.frombuffer(mean, dtype="<f4") * len(MEASURING)).astype(np.int64)
    assert np.array_equal(total, sum(before.values()))
    for name in MEASURING:
        ((event, attempts),) = charges(federation, name, "how-well")
        assert (event["kind"], event["vector"]) == ("discrete-gaussian", "metrics")
        assert event["multiplier"] == pytest.approx(STD / (32 * 3**0.5))
        assert len(attempts) == len(attempts_of(detail))
        assert succeed("edge_client", "ledger", "verify", "--home", federation.home(name))
        # Training under none costs nothing, and promises nothing.
        assert not charges(federation, name, "desk")
    assert not charges(federation, "quiet", "how-well")

    right, losses, labels, names = truth(federation, "desk", version.digest)
    shown = json.loads(federation.operator("measure", "show", "how-well", "--json"))
    assert (shown["status"], shown["result"]["members"], shown["members_that_trained"]) == ("finished", 4, 4)
    whole = shown["result"]["whole"]
    assert whole["units"]["value"] == pytest.approx(len(right), abs=6 * whole["units"]["error"])
    assert 0 < whole["accuracy"]["error"] < 0.02
    assert whole["accuracy"]["value"] == pytest.approx(right.mean(), abs=6 * whole["accuracy"]["error"])
    assert whole["loss"]["value"] == pytest.approx(losses.mean(), abs=6 * whole["loss"]["error"])
    said = federation.operator("measure", "show", "how-well")
    assert "Accuracy" in said
    assert "±" in said
    assert "4 of these 4 members have updates in the version. Their rows were kept back" in said

    # A breakdown is an evaluation of its own, with a charge of its own.
    federation.operator("measure", "run", measurement_file(federation, "by-label", "--by-label"))
    federation.finished("by-label")
    for name in MEASURING:
        assert len(charges(federation, name, "how-well")) == 1
        ((event, _),) = charges(federation, name, "by-label")
        assert event["vector"] == "metrics"
    by_label = json.loads(federation.operator("measure", "show", "by-label", "--json"))["result"]["by_label"]
    assert [each["label"] for each in by_label] == list(names)
    seen = 0
    for place, each in enumerate(by_label):
        if (found := each["estimate"]) is not None:
            seen += 1
            here = labels == place
            assert found["units"]["value"] == pytest.approx(here.sum(), abs=6 * found["units"]["error"])
            recall = found["accuracy"]
            assert recall["value"] == pytest.approx(right[here].mean(), abs=6 * recall["error"])
    assert seen
    assert "RECALL" in federation.operator("measure", "show", "by-label")

    # The passport of the measured job cites both, and is verified.
    passport = federation.folder / "desk.passport.json"
    federation.operator("passport", "desk", "--measurement", "how-well", "--measurement", "by-label", "--out", passport)
    root = federation.dir / "operator" / "root.pem"
    held = json.loads(succeed("coordinator", "passport", "verify", passport, "--authority", root, "--json"))
    first, second = held["measurements"]
    assert (held["valid"], first["name"], first["number"], first["trained"]) == (True, "how-well", 2, 4)
    assert first["whole"]["accuracy"] == pytest.approx(whole["accuracy"]["value"])
    assert first["whole"]["accuracy_error"] > 0
    assert [each["label"] for each in second["by_label"]] == list(names)
    assert "4 members measured version 2 on rows that they keep back from training (4 of them have" in succeed(
        "coordinator", "passport", "verify", passport, "--authority", root
    )
    done = command("coordinator", "passport", "desk", "--measurement", "desk", "--out", "x", "--dir", federation.dir)
    assert (done.returncode, "desk is no measurement" in done.stderr) == (2, True), done.stderr


def test_a_bundle_is_measured_on_all_rows_and_its_history_is_not_known(federation):
    """After the first test: the job's own bundle, whose weights nobody trained."""
    file = federation.folder / "from-outside.toml"
    bundle = federation.folder / "bundle-desk"
    words = ["measure", "new", "from-outside", "--bundle", bundle, "--all-rows", "--members", "4", "--out", file]
    told = json.loads(succeed("coordinator", *words, "--json"))
    text = file.read_text().replace(f"std = {told['std']:g}", f"std = {STD:g}")
    file.write_text(text + "\n[rounds.deadlines]\ntraining = 60\nreconnect = 2\n")
    asked = json.loads(federation.operator("measure", "run", file, "--json"))
    assert (asked["job"], asked["version_number"]) == ("desk", None)
    federation.finished("from-outside")
    shown = json.loads(federation.operator("measure", "show", "from-outside", "--json"))
    assert shown["members_that_trained"] is None
    whole = shown["result"]["whole"]
    texts = sum(len({each.text for each in examples(federation, name)}) for name in MEASURING)
    assert whole["units"]["value"] == pytest.approx(texts, abs=6 * whole["units"]["error"])
    said = federation.operator("measure", "show", "from-outside")
    assert "measured the start of desk on all their rows" in said
    assert "These members may have updates in the version, and rows that were trained on are measured" in said
    assert "It is a measurement: `coordinator measure show from-outside`" in federation.operator(
        "job", "show", "from-outside"
    )
    done = command("coordinator", "survey", "show", "from-outside", "--dir", federation.dir)
    assert (done.returncode, "is a measurement; see it with `coordinator measure show" in done.stderr) == (2, True)
    done = command("coordinator", "export", "from-outside", "--out", federation.folder / "x", "--dir", federation.dir)
    assert (done.returncode, "is a measurement and trains no model" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "nobody-asked"), 5, "there is no job named nobody-asked"),
        (("show", "desk"), 2, "desk is a job that trains; see it with `coordinator job show desk`"),
        (("run", "not-there.toml"), 5, "does not exist; write one with `coordinator measure new`"),
        (("new", "empty"), 2, "name what is measured"),
        (("new", "odd", "--version", "desk"), 2, "names no version"),
        (("new", "costly", "--version", "desk:1", "--epsilon", "0"), 2, "--epsilon 0"),
        (("new", "whole", "--version", "desk:1", "--by-label", "--unit", "member"), 2, "rows of several labels"),
    ],
)
def test_a_sentence_for_each_mistake(federation, words, code, said):
    where = () if words[0] == "new" else ("--dir", federation.dir)
    done = command("coordinator", "measure", *words, *where)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
