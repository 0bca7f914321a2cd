"""`coordinator survey new` offline, and what `show` prints."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.cli.survey import _text
from coordinator.domain.survey import answered, suggestions
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.survey.answer import event_of_answer
from tacit.mechanism import OwnDiscreteGaussian
from tacit.survey import LabelHistogram, LengthHistogram, RowHistogram, Survey, UnknownHistogram
from tacit.survey_file import SurveySpec
from toolkit.console import CommandFailed, ExitCode


def typed(*words):
    """The exit code and what was said; a failed command raises its sentence, which `main` prints."""
    done = CliRunner().invoke(app, ["survey", *map(str, words)])
    if isinstance(done.exception, CommandFailed):
        return int(done.exception.code), str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("one\ntwo\n")


@pytest.mark.parametrize("unit", ["example", "person", "member"])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 3.0])
def test_the_file_has_the_noise_that_the_epsilon_needs(epsilon, unit):
    words = ("--labels", "a, b", "--words", "words.txt", "--rows", "--members", 7, "--epsilon", epsilon)
    code, said = typed("new", "before", *words, "--unit", unit, "--json")
    told = json.loads(said)
    assert code == 0
    assert told["file"] == "before.toml"
    spec = SurveySpec.from_toml(Path(told["file"]))
    assert [each.kind for each in spec.question.histograms] == ["labels", "lengths", "unknown", "rows"]
    assert (spec.rounds.min_members, spec.noise.unit) == (7, unit)
    event = event_of_answer(spec.question, spec.noise, "add-remove")
    limit = Limit(epsilon, 1e-6, "add-remove", unit)
    assert epsilon_counted([event], limit) <= epsilon
    less = spec.noise.model_copy(update={"std": 0.97 * spec.noise.std})
    assert epsilon_counted([event_of_answer(spec.question, less, "add-remove")], limit) > epsilon
    assert told["error"] == pytest.approx(spec.noise.std * math.sqrt(7))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("before",), "the survey asks nothing; give --labels, --words or --rows"),
        (("before", "--rows", "--epsilon", "-1"), "--epsilon -1: "),
        (("before", "--rows", "--epsilon", "1e-9"), "--epsilon 1e-09: "),
        (("before", "--rows", "--unit", "people"), "--unit people is not one of example, person, member"),
        (("before", "--labels", "a,a"), "before.toml: histograms.0.labels: names a label twice"),
        (("before", "--words", "words.txt", "--kind", "bytes"), "'bytes' is not one of wordpiece, words"),
        (("Before It", "--rows"), "a name is 1 to 63 of a-z, 0-9, dot, dash, underscore"),
        (("before", "--labels", '"a, b'), "--labels '\"a, b' is not one line of CSV"),
        (("before", "--rows", "--epsilon", "1e-7"), "at any noise; raise epsilon"),
        (("before", "--rows", "--epsilon", "0"), "--epsilon 0: must be a positive number; 0.5 is usual"),
    ],
)
def test_no_file_is_written_of_a_mistake(words, said, tmp_path):
    code, text = typed("new", *words)
    assert (code, said in text) == (2, True), text
    assert not list(tmp_path.glob("*.toml"))


def test_labels_are_one_line_of_csv():
    assert typed("new", "quoted", "--labels", 'complaint, "billing, insurance"')[0] == 0
    (histogram,) = SurveySpec.from_toml(Path("quoted.toml")).question.histograms
    assert histogram.labels == ("complaint", "billing, insurance")


def test_a_survey_is_not_told_of_rounds_and_lots():
    _, text = typed("new", "before", "--rows", "--epsilon", "1e-7")
    assert "steps" not in text
    assert "1 round" not in text


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "before.toml").write_text("mine")
    code, text = typed("new", "before", "--rows")
    assert (code, "is there already" in text) == (2, True)
    assert (tmp_path / "before.toml").read_text() == "mine"


def test_an_answer_is_shown_with_errors_and_suggestions():
    question = Survey(
        histograms=(
            LabelHistogram(labels=("a", "rare")),
            LengthHistogram(at_most=(8, 16)),
            UnknownHistogram(at_most=(0,)),
            RowHistogram(at_most=(100,)),
        )
    )
    noise, total = OwnDiscreteGaussian(std=2.0), [700, 5, 300, 900, 90, 15, 800, 205, 3, 1]
    found = answered(question, noise, total, 4)
    text = _text("before", found, suggestions(question, noise, total, 4), "example")
    lines = [line.split() for line in text.splitlines()]
    assert "Survey before: 4 members answered. A count has a standard error of 4." in text
    assert ["a", "700", "69.7", "%", "+-", "0.4"] in lines
    assert ["rare", "not", "shown", "(under", "10)", "-"] in lines
    assert "too few rows to tell: rare" in text
    assert "The total is too small beside its noise, so there are no shares." in text
    assert 'labels = ["a"]' in text
    assert "max_tokens = 16 leaves 98.5 % (+- 0.4) of the rows whole" in text
    assert "29.9 % (+- 0.3) of the rows have another label" in text
    assert "the vocabulary lacks 0.0 % (+- 0.0) to 20.4 % (+- 0.3) of a row's words" in text


def test_members_as_units_are_not_called_rows():
    question = Survey(histograms=(LabelHistogram(labels=("a",)), LengthHistogram(at_most=(8,))))
    noise, total = OwnDiscreteGaussian(std=1.0, unit="member"), [700, 300, 990, 10]
    found = answered(question, noise, total, 4)
    text = _text("before", found, suggestions(question, noise, total, 4), "member")
    assert "Members by the label of most of their rows" in text
    assert "of the members have another label" in text
    assert "max_tokens" not in text


def test_a_list_of_words_that_is_not_there_and_a_label_that_is_no_text_have_a_sentence(tmp_path):
    code, text = typed("new", "before", "--words", "nowhere.txt")
    assert (code, "nowhere.txt does not exist; name a public list of words" in text) == (5, True), text
    code, text = typed("new", "before", "--labels", "a,\udcff")
    assert (code, "is not UTF-8 text; type it again" in text) == (2, True), text
    assert not list(tmp_path.glob("*.toml"))


def test_an_unknown_kind_of_words_is_refused_also_without_words(tmp_path):
    code, _ = typed("new", "ask", "--labels", "a", "--kind", "foo")
    assert code == ExitCode.USAGE
    assert not (tmp_path / "ask.toml").exists()
