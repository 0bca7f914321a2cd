"""`coordinator simulate` prints rounds, goes on in its folder, and refuses in sentences."""

import json

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from learning.training.outcome import TrainingLost
from tests.support.tiny_writers import saved_writer
from tests.support.tried_jobs import DIVERGES, WRITER, written_job, written_rows
from toolkit.console import CommandFailed, ExitCode


def simulated(*words, code=ExitCode.OK):
    result = CliRunner().invoke(app, ["simulate", *(str(word) for word in words)])
    if isinstance(result.exception, CommandFailed):
        assert result.exception.code is code, result.exception
        return str(result.exception)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return written_job(tmp_path)[0]


DATA = ("--data", "rows.jsonl")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("none.toml", *DATA), ExitCode.NOT_FOUND, "does not exist"),
        (("job.toml", "--data", "none.jsonl"), ExitCode.NOT_FOUND, "none.jsonl does not exist"),
        (("job.toml", *DATA, "--test-data", "none.jsonl"), ExitCode.NOT_FOUND, "none.jsonl does not exist"),
        (("job.toml", *DATA, "--label", "kind"), ExitCode.USAGE, "kind"),
        (("job.toml", *DATA, "--person", "whose"), ExitCode.USAGE, "no column 'whose'"),
        (("job.toml", *DATA, "--partition", "column"), ExitCode.USAGE, "go together"),
        (("job.toml", *DATA, "--column", "site"), ExitCode.USAGE, "go together"),
        (("job.toml", *DATA, "--partition", "fair"), ExitCode.USAGE, "'fair' is no partition"),
        (("job.toml", *DATA, "--dropout", "often"), ExitCode.USAGE, "'often' is no loss of members"),
        (("job.toml", *DATA, "--members", 200), ExitCode.USAGE, "96 training rows cannot be dealt to members"),
        (("job.toml", *DATA, "--members", 2), ExitCode.USAGE, "below the job's rounds.min_members = 3"),
        (("job.toml", *DATA, "--device", "tpu"), ExitCode.USAGE, "tpu"),
    ],
)
def test_bad_input_says_what_to_do(job, words, code, says):
    assert says in simulated(*words, code=code)


def test_rows_in_a_members_home_are_refused(job):
    home = job.parent / "home"
    for name in ("identity", "ledgers"):
        (home / name).mkdir(parents=True)
    (home / "rows.jsonl").write_bytes((job.parent / "rows.jsonl").read_bytes())
    assert "lies in a member's home" in simulated("job.toml", "--data", "home/rows.jsonl", code=ExitCode.REFUSED)


def test_a_training_that_diverges_is_a_sentence(job):
    job.write_text(DIVERGES)
    for workers in (1, 2):
        said = simulated("job.toml", *DATA, "--members", 4, "--workers", workers, code=ExitCode.FAILED)
        assert said.startswith("job.toml cannot be simulated: round 1: training diverged: ")
        assert "lower training.learning_rate (it is 1000)" in said


def test_a_training_that_fails_otherwise_is_a_sentence(job, monkeypatch):
    def lost(*_given, **_more):
        raise TrainingLost("the memory of the GPU is full")

    monkeypatch.setattr("learning.training.update.train_update", lost)
    said = simulated("job.toml", *DATA, "--members", 4, code=ExitCode.FAILED)
    assert said == "job.toml cannot be simulated: round 1: the memory of the GPU is full"


def test_rounds_are_shown_and_a_second_run_adds_none(job):
    words = ("job.toml", *DATA, "--members", 4)
    shown = simulated(*words)
    rows = [line.split() for line in shown.splitlines() if line[:1].isdigit()]
    assert [row[:3] for row in rows] == [["1", "4", "0"], ["2", "4", "0"]]
    assert "Results: tried.simulation" in shown
    kept = (job.parent / "tried.simulation" / "rounds.jsonl").read_bytes()
    last = json.loads(simulated(*words, "--json").splitlines()[-1])
    assert (last["round"], last["job"]) == (2, "tried")
    assert (job.parent / "tried.simulation" / "rounds.jsonl").read_bytes() == kept
    assert "another plan" in simulated(*words, "--dropout", "random:0.1", code=ExitCode.USAGE)
    job.write_text(job.read_text().replace("learning_rate = 2.0", "learning_rate = 1.0"))
    assert "before it was changed" in simulated(*words, code=ExitCode.USAGE)


def test_a_model_that_writes_reads_the_columns_that_are_named(job):
    saved_writer(job.parent / "writer")
    job.write_text(WRITER.replace("count = 3", "count = 1"))
    rows = [{"ask": each["text"], "say": f"the {each['label']}", "site": each["site"]} for each in written_rows(60)]
    (job.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("job.toml", *DATA, "--partition", "column", "--column", "site")
    assert "no column 'turns'" in simulated(*words, "--messages", "turns", code=ExitCode.USAGE)
    shown = simulated(*words, "--prompt", "ask", "--response", "say")
    assert [line.split()[:2] for line in shown.splitlines() if line[:1].isdigit()] == [["1", "3"]]
    none = simulated(*words[:-1], "ward", "--prompt", "ask", "--response", "say", code=ExitCode.USAGE)
    assert "60 of 60 rows have no ward; fill the column" in none
