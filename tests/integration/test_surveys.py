"""Real processes: a survey is asked, members are killed after their vectors left, and the same answers come again."""

import asyncio
import json
import shutil
import sys

import numpy as np
import pytest

from coordinator.cli.common import operator_stub
from edge_client.session.answers import HeldAnswer
from tacit.blobs import fetch_blob
from tacit.v1 import operator_pb2 as pb
from tests.support.processes import EXAMPLES, Process, command, running_federation, succeed

ANSWERING = ("north", "east", "south", "west")
POLICY = "schema = 1\nepsilon = 100.0\nsurveys_epsilon = {limit}\nmin_cohort = 3\n"
# Little noise, so that the answer shows with four small members. It is dear, and their policies allow it.
STD = 2.0


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("surveys")) as running:
        running.enrol(*ANSWERING, policy=POLICY.format(limit=100.0))
        # The default of a policy: no survey is answered.
        running.enrol("quiet", policy="schema = 1\n")
        yield running


def survey_file(federation, name):
    labels = sorted({json.loads(line)["label"] for line in (EXAMPLES / "train.jsonl").open()})
    file = federation.folder / f"{name}.toml"
    words = ["--labels", ",".join(labels[:3]), "--words", EXAMPLES / "words.txt", "--rows", "--members", "4"]
    told = json.loads(succeed("coordinator", "survey", "new", name, *words, "--epsilon", "90", "--out", file, "--json"))
    text = file.read_text().replace(f"std = {told['std']:g}", f"std = {STD:g}")
    file.write_text(text + "\n[rounds.deadlines]\ntraining = 60\nreconnect = 2\n")
    return file, labels


def held(federation, name, job):
    path = federation.home(name) / "answers" / "data" / f"{job}.json"
    return HeldAnswer.from_file(path).array


def published(federation, digest):
    async def fetch():
        data = bytearray()
        async with operator_stub(federation.dir / "operator") as stub:
            await fetch_blob(stub.FetchBlob, digest, data)
        return np.frombuffer(bytes(data), dtype="<f4")

    return asyncio.run(fetch())


def charges(federation, name):
    """The survey's reservations in a member's ledger, and the attempts that each was charged for."""
    file = federation.folder / f"ledger-{name}.jsonl"
    file.unlink(missing_ok=True)
    succeed("edge_client", "ledger", "export", file, "--home", federation.home(name))
    found = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        if record.get("kind") == "charged":
            found.setdefault(record["body"]["reservation"], []).append(record["body"]["attempt"])
    return found


def dry_run(federation, name):
    words = ("run", "--dry-run", "--json", "--data", federation.data(name), "--home", federation.home(name))
    return [json.loads(line) for line in succeed("edge_client", *words).splitlines()]


def test_members_that_were_killed_send_the_same_answer_again_at_no_further_cost(federation, tmp_path):
    file, labels = survey_file(federation, "before-desk")
    assert "is asked" in federation.operator("survey", "run", file)
    waiting = json.loads(federation.operator("survey", "show", "before-desk", "--json"))
    assert (waiting["status"], waiting["answer"]) == ("running", None)
    assert "no answer yet" in federation.operator("survey", "show", "before-desk")

    # Before anything is charged, the dry run shows the question and its price.
    (plan,) = dry_run(federation, "north")
    assert [each["kind"] for each in plan["question"]["histograms"]] == ["labels", "lengths", "unknown", "rows"]
    assert plan["takes_part"]
    assert plan["epsilon"] > 1
    assert plan["spent"] == 0
    (refusing,) = dry_run(federation, "quiet")
    assert not refusing["takes_part"]
    assert "surveys_epsilon: the job asks for histograms of labels, lengths, unknown, rows" in refusing["refusals"][0]

    quiet = federation.start("quiet")
    quiet.wait_for("declined", job="before-desk")
    for name in ANSWERING[:2]:
        federation.start(name)
    halt = tmp_path / "halt"
    halt.touch()
    victims = []
    for name in ANSWERING[2:]:
        words = [sys.executable, "-m", "tests.support.halting_member", "confirm", str(halt), "--", "run"]
        words += ["--data", str(federation.data(name)), "--home", str(federation.home(name)), "--log-format", "json"]
        victim = Process(name, words, federation.folder / f"{name}-halting.log")
        federation.processes.append(victim)
        victims.append(victim)
    for victim in victims:
        victim.wait_for("halted", phase="confirm")
    before = {name: held(federation, name, "before-desk") for name in ANSWERING}
    for victim in victims:
        victim.kill()
    detail = federation.wait_for(
        "before-desk", lambda detail: any(each.outcome == "abandoned" for each in _attempts(detail))
    )
    first = _attempts(detail)[0]
    assert set(first.cohort) == set(ANSWERING)

    halt.unlink()
    for name in ANSWERING[2:]:
        federation.start(name)
    detail = federation.finished("before-desk")
    last = _attempts(detail)[-1]
    assert (last.outcome, set(last.survivors)) == ("published", set(ANSWERING))

    # What was published is the sum of the very answers that were held before the kill, and each was charged once.
    mean = published(federation, detail.versions[-1].digest)
    assert np.array_equal(np.rint(mean * len(ANSWERING)).astype(np.int64), sum(before.values()))
    for name in ANSWERING:
        ((_, attempts),) = charges(federation, name).items()
        assert len(attempts) == len(_attempts(detail))
        assert succeed("edge_client", "ledger", "verify", "--home", federation.home(name))
    assert not charges(federation, "quiet")

    # A survey has an answer and no model.
    quiet_at = ("--data", federation.data("quiet"), "--home", federation.home("quiet"), "--job", "before-desk")
    told = succeed("edge_client", "run", "--dry-run", *quiet_at)
    assert told.startswith("before-desk is finished: ")
    assert told.endswith("Nothing would be sent; it asked a question and has no model.\n")

    answer = json.loads(federation.operator("survey", "show", "before-desk", "--json"))
    assert answer["status"] == "finished"
    assert answer["answer"]["members"] == len(ANSWERING)
    assert answer["answer"]["error"] == pytest.approx(2 * STD)
    by_label = {each["name"]: each for each in answer["answer"]["histograms"][0]["bins"]}
    truth = [json.loads(line)["label"] for name in ANSWERING for line in federation.data(name).open()]
    for label in labels[:3]:
        shown = by_label[label]["count"]
        assert shown is None or shown == pytest.approx(truth.count(label), abs=6 * 2 * STD)
    assert answer["answer"]["histograms"][0]["total"] == pytest.approx(len(truth), abs=6 * 2 * STD * 2)
    assert set(answer["suggestions"]["labels"]) | set(answer["suggestions"]["rare"]) == set(labels[:3])
    # Whether a bound is sure depends on the noise. No text here is longer than the largest one.
    whole = answer["suggestions"]["whole"]
    assert 0.95 - 6 * whole["error"] <= whole["value"] <= 1
    assert "max_tokens " in federation.operator("survey", "show", "before-desk")


def _attempts(detail: pb.JobDetail):
    return [attempt for each in detail.rounds for attempt in each.attempts]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "nobody-asked"), 5, "there is no job named nobody-asked"),
        (("run", "not-there.toml"), 5, "does not exist; write one with `coordinator survey new`"),
        (("new", "empty"), 2, "the survey asks nothing; give --labels, --words or --rows"),
        (("new", "costly", "--rows", "--epsilon", "0"), 2, "--epsilon 0"),
    ],
)
def test_a_sentence_for_each_mistake(federation, words, code, said):
    where = () if words[0] == "new" else ("--dir", federation.dir)
    done = command("coordinator", "survey", *words, *where)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_an_absent_coordinator_a_wrong_file_and_a_job_that_is_no_survey_have_a_sentence_each(federation, tmp_path):
    file, _ = survey_file(federation, "unheard")
    away = tmp_path / "operator"
    shutil.copytree(federation.dir / "operator", away)
    config = away / "operator.toml"
    lines = [
        line if not line.startswith("address") else 'address = "127.0.0.1:1"'
        for line in config.read_text().splitlines()
    ]
    config.write_text("\n".join(lines) + "\n")
    done = command("coordinator", "survey", "run", file, "--operator", away)
    assert (done.returncode, "nobody listens" in done.stderr) == (3, True), done.stderr

    wrong = tmp_path / "wrong.toml"
    wrong.write_text(file.read_text().replace('kind = "labels"', 'kind = "names"'))
    done = command("coordinator", "survey", "run", wrong, "--dir", federation.dir)
    assert (done.returncode, "names" in done.stderr and "labels" in done.stderr) == (2, True), done.stderr

    federation.job("trains", count=1)
    done = command("coordinator", "survey", "show", "trains", "--dir", federation.dir)
    assert (done.returncode, "is a job and no survey" in done.stderr) == (2, True), done.stderr
    federation.operator("job", "abort", "trains", "--yes")
