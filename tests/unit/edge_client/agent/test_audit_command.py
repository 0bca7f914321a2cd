"""Tests of `edge_client audit` as whole commands, against a federation port that only lists jobs and serves blobs."""

import json

import pytest
from typer.testing import CliRunner

from edge_client.canaries import CanaryRecord, CanaryRow
from edge_client.cli import app
from tests.support.audited_jobs import WORDS, broken, rows_of
from tests.support.own_models import ROWS
from toolkit.console import ExitCode

# Enough words for canaries of the member's own vocabulary.
MORE = [
    (f"the {colour} heron {verb} near {place}", label)
    for colour in ("grey", "white", "purple", "great", "little", "green")
    for verb, place, label in (
        ("waits", "water", "bird"),
        ("flies", "trees", "bird"),
        ("pays", "tolls", "money"),
        ("owes", "rent", "money"),
    )
]


@pytest.fixture
def audited(machine, town):
    """Runs an audit that may end with any code."""

    def run(job, *words):
        options = ("audit", job, "--minutes", "0", "--home", machine.home, "--data", machine.data, *words)
        return CliRunner().invoke(app, [str(each) for each in options])

    machine.write([*ROWS, *MORE] * 3)
    return run


def kept(machine):
    """The member's files, without those that SQLite makes while it reads the ledger."""
    return {path: data for path, data in machine.written().items() if path.suffix not in (".db-shm", ".db-wal")}


def test_a_job_with_a_private_vocabulary_and_noise_is_audited_and_nothing_is_written(machine, town, audited):
    machine.take_part(town, "noised")
    before = kept(machine)
    done = audited("noised", "--json")
    assert done.exit_code == ExitCode.OK, done.output
    told = json.loads(done.stdout)
    # Two rehearsals of few canaries may be too few to tell.
    assert told["verdict"] in ("sound", "cannot-tell")
    tests = {each["attack"]: each for each in told["tests"]}
    assert tests["canaries"]["claim"] > 0
    # The embedding stays with the member.
    assert "does not share them" in told["not_applicable"]["reconstruction"]
    assert kept(machine) == before


def test_a_job_whose_members_keep_parameters_has_no_test_of_canaries_and_nothing_may_leave(machine, town, audited):
    machine.take_part(town, "noised")
    # As if canaries had been planted: with the embedding that stayed here, their losses would tell the coins.
    rows = tuple(CanaryRow(text=" ".join(WORDS[at : at + 12]), label="bird", present=at % 2 == 0) for at in range(40))
    record = CanaryRecord(document=town.bundles["noised"].document.digest(), rows=rows)
    path = machine.home / "canaries" / "data" / "noised.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(record.canonical())
    told = json.loads(audited("noised", "--json").stdout)
    assert {each["on"] for each in told["tests"]} == {"update"}
    assert "members of this job keep parameters" in told["not_applicable"]["canaries, version 4"]
    out = machine.home.with_name("out.json")
    done = audited("noised", "--release", out)
    assert (done.exception.code, "keep parameters" in done.exception.sentence) == (ExitCode.REFUSED, True)
    assert not out.exists()


def test_the_exit_code_says_that_noise_is_missing(machine, audited, monkeypatch):
    machine.write([(each.text, place) for each, place in zip(rows_of(60), ("bird", "money") * 30, strict=True)])
    monkeypatch.setattr("learning.auditing.audit.runs_within", lambda *_: lambda _seconds: 12)
    monkeypatch.setattr("learning.auditing.audit.MAX_CANARIES", 12)
    with broken("nothing"):
        assert audited("steps").exit_code == ExitCode.OK
    with broken("noise"):
        done = audited("steps")
    assert done.exit_code == ExitCode.ABOVE_CLAIM, done.output
    assert done.stdout.splitlines()[-1].startswith("ABOVE THE CLAIM")


def test_a_job_without_a_mechanism_claims_nothing(audited):
    done = audited("plain")
    assert done.exit_code == ExitCode.OK, done.output
    assert "no epsilon is claimed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("no claim:")
    # The public list of 13 words is too short.
    assert "canaries: does not apply" in done.stdout


def test_wrong_input_is_refused_before_anything_is_trained(machine, audited):
    for words, code, says in (
        (("--held-out", machine.data.with_name("none.jsonl")), ExitCode.NOT_FOUND, "does not exist"),
        (("--data-name", "."), ExitCode.USAGE, ""),
    ):
        done = audited("plain", *words)
        assert done.exit_code != ExitCode.OK
        if says:
            assert (done.exception.code, says in str(done.exception)) == (code, True)
    done = audited("nowhere")
    assert done.exception.code == ExitCode.NOT_FOUND


def test_a_release_that_cannot_be_written_is_refused_before_anything_is_trained(machine, audited, monkeypatch):
    def trains(*_args, **_more):
        raise AssertionError("a rehearsal was made first")

    monkeypatch.setattr("learning.auditing.audit.audit_update", trains)
    before = machine.data.read_bytes()
    few = machine.data.with_name("few.jsonl")
    machine.write(ROWS[:4], few)
    beside = machine.data.with_name("new.json")
    for words, code, says in (
        (("--release", machine.data), ExitCode.USAGE, "exists already"),
        (("--release", machine.home / "none" / "new.json"), ExitCode.USAGE, "no folder"),
        (("--release", beside), ExitCode.REFUSED, "planted no canaries"),
        (("--held-out", few), ExitCode.USAGE, "--held-out needs 40 rows"),
    ):
        done = audited("steps", *words)
        assert (done.exception.code, says in done.exception.sentence) == (code, True), done.exception
    assert machine.data.read_bytes() == before
    assert not beside.exists()


def test_a_version_that_no_ledger_was_charged_for_claims_nothing_of_this_member(machine, town, audited):
    held_out = machine.data.with_name("others.jsonl")
    machine.write([*ROWS, *MORE] * 2, held_out)
    told = json.loads(audited("steps", "--held-out", held_out, "--json").stdout)
    assert {each["claim"] for each in told["tests"] if each["on"] == "version-4"} == {0.0}
    rows = tuple(CanaryRow(text=" ".join(WORDS[at : at + 12]), label="bird", present=at % 2 == 0) for at in range(40))
    path = machine.home / "canaries" / "data" / "steps.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(CanaryRecord(document=town.bundles["steps"].document.digest(), rows=rows).canonical())
    done = audited("steps", "--release", machine.data.with_name("new.json"))
    assert (done.exception.code, "charged nothing" in done.exception.sentence) == (ExitCode.REFUSED, True)
