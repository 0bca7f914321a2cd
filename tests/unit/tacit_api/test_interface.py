"""`import tacit` is light, and offers what the commands do."""

import subprocess
import sys

import numpy as np
import pandas
import pytest

import tacit
from learning.text.data import DataInvalid
from tacit.job import JobSpec
from tacit_api.jobs import read_job
from tacit_api.rows import rows_of
from tests.support.tried_jobs import TOML, written_job, written_rows


def test_import_loads_nothing_heavy():
    """What makes it light, and not how many milliseconds it takes here."""
    script = "import sys, tacit; print(sorted({'torch','numpy','pandas','pydantic','grpc','typer'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_unknown_names_are_refused():
    assert {"simulate", "load"} <= set(dir(tacit))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        getattr(tacit, "simulat")  # noqa: B009  a name that mypy would refuse


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interface")
    file, _ = written_job(folder, TOML.replace('optimiser = "sgd"\nlearning_rate = 2.0', "learning_rate = 0.05"))
    seen = []
    rows = pandas.DataFrame(written_rows(120))
    return tacit.simulate(file, rows, members=3, partition="column", column="site", progress=seen.append), seen


def test_a_data_frame_becomes_rounds_a_history_and_a_plot(found, tmp_path):
    result, seen = found
    assert [each.round for each in result.rounds] == [each.round for each in seen] == [1, 2]
    assert len(result.members) == 3
    assert list(result.history.index) == [1, 2]
    assert result.history.accuracy.iloc[-1] == result.accuracy
    result.plot(tmp_path / "rounds.svg")
    assert b"accuracy, %" in (tmp_path / "rounds.svg").read_bytes() or (tmp_path / "rounds.svg").stat().st_size > 5000
    moved = [np.linalg.norm(result.version(number) - result.version(number - 1)) for number in (1, 2)]
    assert np.allclose(moved, result.history.change)
    with pytest.raises(ValueError, match="there is no version 3; the last is 2"):
        result.version(3)


def test_a_version_leaves_as_onnx_and_is_loaded(found, tmp_path):
    model = tacit.load(found[0].export(tmp_path / "model"))
    assert model.labels == ("day", "night")
    (answer,) = model.predict(["the sun was bright"])
    assert answer.label in ("day", "night")
    assert sum(answer.probabilities.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([{"text": "the sun"}], "row 1 has no 'label'; it has text"),
        ([("the sun", "day"), ("", "night")], "row 2 has no text"),
        ([("the sun", "day", 3)], "tuple is no row"),
        (7, "int is no data"),
        ([], "there are no rows"),
    ],
)
def test_rows_that_cannot_be_used(data, says):
    with pytest.raises(DataInvalid, match=says):
        rows_of(data, text="text", label="label")


def test_the_readme_of_simulate_runs(tmp_path, monkeypatch):
    """The docstring's example, as somebody types it."""
    import doctest

    import tacit_api.simulating as module

    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("the\nsun\nmoon\nrose\nover\nhill\n")
    done = doctest.testmod(module, raise_on_error=False)
    assert done.attempted >= 4
    assert done.failed == 0


def test_a_job_may_be_a_mapping(tmp_path, monkeypatch):
    spec = JobSpec.from_toml(written_job(tmp_path)[0])
    assert read_job(spec.model_dump(mode="json", exclude_none=True))[0] == spec
    with pytest.raises(ValueError, match="the job is not valid: labels"):
        read_job({"schema": 1, "name": "sky"})
