"""A file of prompts under other names: the sentence says the options of texts and those of dialogues.

Commands that read data before they know the job say both. `job try` knows that the job writes, and has no such options.
"""

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from edge_client.agent.measuring import _read
from edge_client.agent.runner import RunOptions, _rows_of
from learning.text.examples import DataInvalid
from simulation.trying import read_rows
from tacit.job import JobSpec
from tests.support.tried_jobs import WRITER
from toolkit.console import CommandFailed

BOTH = (
    r"no column 'text', 'prompt' or 'messages'; there are: Fråga, Svar\. Name yours with --text; for a model that "
    r"writes, with --prompt and --response, or with --messages"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "qa_odd.csv"
    path.write_text("Fråga,Svar\nVad?,Det.\n")
    return path


def test_a_member_is_told_both(data: Path) -> None:
    with pytest.raises(DataInvalid, match=BOTH):
        _rows_of(RunOptions(data=data))
    with pytest.raises(CommandFailed, match=BOTH):
        _read(data, RunOptions(data=data))


def test_an_operator_is_told_both(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package's name `evaluate` is the command.
    module = importlib.import_module("coordinator.cli.evaluate")
    monkeypatch.setattr(module, "operator_folder", lambda *_: data.parent)
    result = CliRunner().invoke(app, ["evaluate", "qajob", "--data", str(data)])
    assert isinstance(result.exception, CommandFailed)
    with pytest.raises(CommandFailed, match=BOTH):
        raise result.exception


def test_a_trial_of_a_job_that_writes_has_no_options_for_them(data: Path) -> None:
    file = data.with_name("job.toml")
    file.write_text(WRITER)
    with pytest.raises(DataInvalid, match=r"there are: Fråga, Svar\. Rename yours to 'prompt' and 'response'"):
        read_rows(data, JobSpec.from_toml(file), text="text", label="label")
