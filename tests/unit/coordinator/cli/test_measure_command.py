"""`coordinator measure new` offline, and what `show` prints."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.cli.measure import _lines
from coordinator.domain.measurement import result_of
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.survey.answer import event_of_answer
from tacit.measurement import Measurement
from tacit.measurement_file import MeasurementSpec
from tacit.mechanism import OwnDiscreteGaussian
from toolkit.console import CommandFailed

WHOLE = Measurement(job="desk", document=bytes(32), number=3, weights=bytes(32), manifest=bytes(32), values=1)
BY_LABEL = WHOLE.model_copy(update={"breakdown": ("a", "rare")})
NOISE = OwnDiscreteGaussian(std=64.0, bound=64_000)


def typed(*words):
    """The exit code and what was said; a failed command raises its sentence, which `main` prints."""
    done = CliRunner().invoke(app, ["measure", *map(str, words)])
    if isinstance(done.exception, CommandFailed):
        return int(done.exception.code), str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("unit", "by"), [("example", ()), ("example", ("--by-label",)), ("member", ())])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 3.0])
def test_the_file_has_the_noise_that_the_epsilon_needs(epsilon, unit, by):
    code, said = typed(
        "new", "m", "--version", "desk:3", *by, "--members", 7, "--epsilon", epsilon, "--unit", unit, "--json"
    )
    assert code == 0, said
    told = json.loads(said)
    spec = MeasurementSpec.from_toml(Path(told["file"]))
    assert (spec.subject, spec.by, spec.rows, spec.rounds.min_members) == (
        ("desk", "3"),
        "label" if by else None,
        "kept-back",
        7,
    )
    question, limit = BY_LABEL if by else WHOLE, Limit(epsilon, 1e-6, "add-remove", unit)
    assert epsilon_counted([event_of_answer(question, spec.mechanism, "add-remove")], limit) <= epsilon
    less = spec.mechanism.model_copy(update={"std": 0.97 * spec.noise.std})
    assert epsilon_counted([event_of_answer(question, less, "add-remove")], limit) > epsilon
    # As many rows as it says give 2 points of accuracy.
    rows = told["rows"]
    found = result_of(WHOLE, spec.mechanism.model_copy(update={"bound": 3_200_000}), [0.0, 0.0, 32.0 * rows], 7)
    assert found.whole is None or found.whole.accuracy.error == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("m",), 2, "name what is measured: --version JOB:NUMBER"),
        (("m", "--version", "desk:1", "--bundle", "."), 2, "name what is measured"),
        (("m", "--bundle", "nowhere"), 5, "nowhere is not a folder"),
        (("m", "--version", "desk"), 2, "names no version"),
        (("m", "--version", "desk:1", "--unit", "person"), 2, "--unit person is not one of example, member"),
        (("m", "--version", "desk:1", "--unit", "member", "--by-label"), 2, "rows of several labels"),
        (("m", "--version", "desk:1", "--epsilon", "1e-9"), 2, "--epsilon 1e-09: "),
        (("M m", "--version", "desk:1"), 2, "name"),
    ],
)
def test_no_file_is_written_of_a_mistake(words, code, said, tmp_path):
    found, text = typed("new", *words)
    assert (found, said in text) == (code, True), text
    assert not list(tmp_path.glob("*.toml"))


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "m.toml").write_text("mine")
    code, text = typed("new", "m", "--version", "desk:best")
    assert (code, "is there already" in text) == (2, True)
    assert (tmp_path / "m.toml").read_text() == "mine"


def test_a_bundles_path_is_that_from_the_file(tmp_path):
    (tmp_path / "bundles" / "desk").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    code, text = typed("new", "m", "--bundle", "bundles/desk", "--out", "files/m.toml", "--all-rows")
    assert code == 0, text
    spec = MeasurementSpec.from_toml(tmp_path / "files" / "m.toml")
    assert (spec.bundle, spec.subject, spec.rows) == ("../bundles/desk", None, "all")


def test_every_number_is_shown_with_its_error():
    found = result_of(WHOLE, NOISE, [-6400.0, 9600.0, 32_000.0], 4)
    text = "\n".join(_lines("m", WHOLE, found, 0))
    assert "Measurement m: 4 members measured version 3 of desk on rows that they keep back" in text
    # m = 1000: the means are 1/2 - 0.1 and 1/2 + 0.15, of a loss up to 5; noise of 2 rows in each sum.
    assert "Accuracy 65.0 % ± 0.2" in text
    assert "loss 2.000 ± 0.01" in text
    assert "over 1,000 ± 4 rows" in text
    assert "None of these members has an update in the version" in text


def test_a_label_with_too_few_rows_is_named_without_a_number():
    found = result_of(BY_LABEL, NOISE, [-6400.0, 9600.0, 32_000.0, 99.0, 99.0, 200.0], 4)
    text = "\n".join(_lines("m", BY_LABEL, found, None))
    assert ["rare", "too", "few", "rows", "-", "-"] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("rows", "trained", "said"),
    [
        ("kept-back", 3, "3 of these 4 members have updates in the version. Their rows were kept back"),
        ("kept-back", None, "These members may have updates in the version. Their rows were kept back"),
        ("all", 3, "3 of these 4 members have updates in the version, and rows that were trained on are measured"),
        ("all", None, "These members may have updates in the version, and rows that were trained on are measured"),
        ("all", 0, "no row was trained on"),
    ],
)
def test_it_says_whether_the_number_may_be_too_good(rows, trained, said):
    question = WHOLE.model_copy(update={"rows": rows})
    found = result_of(question, NOISE, [-6400.0, 9600.0, 32_000.0], 4)
    assert said in "\n".join(_lines("m", question, found, trained))
