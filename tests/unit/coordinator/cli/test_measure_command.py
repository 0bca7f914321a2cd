"""`coordinator measure new` offline, and what `show` prints."""

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.cli.asking import Answer
from coordinator.cli.measure import _lines, _trained, _version_of
from coordinator.domain.measurement import result_of
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.survey.answer import event_of_answer
from tacit.job import EarlierVersion
from tacit.measurement import Measurement
from tacit.measurement_file import MeasurementSpec
from tacit.mechanism import OwnDiscreteGaussian
from tacit.v1 import operator_pb2 as pb
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
    # As many rows as it says are shown, with 2 points of error or less.
    rows = told["rows"]
    wide = spec.mechanism.model_copy(update={"bound": 3_200_000})
    found = result_of(WHOLE, wide, [0.0, 0.0, 32.0 * rows], 7).whole
    assert found.accuracy.error <= 0.0201
    assert found.accuracy.error > 0.019 or rows == 30 or rows < 5.01 * found.units.error


def test_a_question_whose_answer_would_never_show_is_not_asked(tmp_path):
    words = ("new", "m", "--version", "desk:1", "--unit", "member")
    code, said = typed(*words)
    assert code == 0
    assert "if 614 members answer" in said
    file = tmp_path / "m.toml"
    file.write_text(file.read_text().replace("target_members = 200", "target_members = 29"))
    code, said = typed("run", "m.toml")
    assert (code, "nothing is shown of fewer than 30; raise it from 29" in said) == (2, True), said
    found = result_of(WHOLE, NOISE.model_copy(update={"unit": "member"}), [0.0, 0.0, 32.0 * 40], 4)
    assert "over 40 ± 4 members" in "\n".join(_lines("m", WHOLE, "member", found, None))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("m",), 2, "name what is measured: --version JOB:NUMBER"),
        (("m", "--version", "desk:1", "--bundle", "."), 2, "name what is measured"),
        (("m", "--bundle", "nowhere"), 5, "nowhere is not a folder"),
        (("m", "--version", "desk"), 2, "names no version"),
        (("m", "--version", "desk:1", "--unit", "people"), 2, "--unit people is not one of example, person, member"),
        (("m", "--version", "desk:1", "--unit", "member", "--by-label"), 2, "rows of several labels"),
        (("m", "--version", "desk:1", "--epsilon", "0"), 2, "--epsilon 0: "),
        # The largest noise has a wide grid, which takes four seconds.
        pytest.param(
            *(("m", "--version", "desk:1", "--epsilon", "1e-9"), 2, "--epsilon 1e-09: "), marks=pytest.mark.long
        ),
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
    text = "\n".join(_lines("m", WHOLE, "example", found, 0))
    assert "Measurement m: 4 members measured version 3 of desk on rows that they keep back" in text
    # m = 1000: the means are 1/2 - 0.1 and 1/2 + 0.15, of a loss up to 5; noise of 2 rows in each sum.
    assert "Accuracy 65.0 % ± 0.2" in text
    assert "loss 2.000 ± 0.01" in text
    assert "over 1,000 ± 4 rows" in text
    assert "None of these members has an update in the version" in text


def test_a_label_with_too_few_rows_is_named_without_a_number():
    found = result_of(BY_LABEL, NOISE, [-6400.0, 9600.0, 32_000.0, 99.0, 99.0, 200.0], 4)
    text = "\n".join(_lines("m", BY_LABEL, "example", found, None))
    assert ["rare", "too", "few", "rows", "-", "-"] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("rows", "trained", "said"),
    [
        ("kept-back", 3, "3 of these 4 members have updates in the version. Their rows were kept back"),
        ("kept-back", None, "These members may have updates in the version. Their rows were kept back"),
        ("all", 3, "3 of these 4 members have updates in the version, and rows that were trained on are measured"),
        ("all", None, "These members may have updates in the version, and rows that were trained on are measured"),
        ("all", 0, "None of these members has an update in the version."),
    ],
)
def test_it_says_whether_the_number_may_be_too_good(rows, trained, said):
    question = WHOLE.model_copy(update={"rows": rows})
    found = result_of(question, NOISE, [-6400.0, 9600.0, 32_000.0], 4)
    assert said in "\n".join(_lines("m", question, "example", found, trained))


def test_a_pruned_version_is_not_asked_about(monkeypatch):
    made = detail_of("desk", [["north"], ["north"]])
    made.versions[1].pruned = True
    stub = Answers(monkeypatch, desk=made)
    stub.documents["desk"] = "the document"

    @contextlib.asynccontextmanager
    async def operator_stub(where):
        yield stub

    monkeypatch.setattr("coordinator.cli.measure.operator_stub", operator_stub)
    with pytest.raises(CommandFailed, match="version 1 of desk was pruned"):
        asyncio.run(_version_of(Path(), "desk", "1"))
    assert asyncio.run(_version_of(Path(), "desk", "2")).number == 2


class Answers:
    """The operator's service: details of jobs by name, and their documents."""

    def __init__(self, monkeypatch, **details):
        self.details = details
        self.documents = {}

        async def fetch_document(stub, detail):
            return self.documents[detail.job.name]

        monkeypatch.setattr("coordinator.cli.measure.fetch_document", fetch_document)

    async def GetJob(self, request, **more):  # noqa: N802
        return self.details[request.name]


def detail_of(name, rounds, *, known=None, document=bytes(32)):
    """A job with the survivors of each round, of which the coordinator sends those in `known`."""
    made = pb.JobDetail(job=pb.Job(name=name, document=document))
    made.versions.append(pb.Version(number=0))
    for number, survivors in enumerate(rounds, start=1):
        made.versions.append(pb.Version(number=number, round=number))
        if known is None or number in known:
            attempt = pb.Attempt(outcome="published", survivors=survivors)
            made.rounds.append(pb.Round(number=number, attempts=[attempt]))
    return made


@pytest.mark.parametrize(
    ("number", "known", "expected"),
    [(1, None, 1), (2, None, 2), (3, None, 3), (0, None, 0), (3, {3}, None), (2, {1, 3}, None), (1, {1}, 1)],
)
def test_members_that_trained_are_counted_up_to_the_version_or_nobody_knows(monkeypatch, number, known, expected):
    subject = detail_of("desk", [["north"], ["east"], ["south"]], known=known)
    asked = Answer(detail_of("m", [["north", "east", "south"]]), None, [0.0] * 3, 3)
    stub = Answers(monkeypatch, desk=subject)
    stub.documents["desk"] = SimpleNamespace(earlier=None)
    question = WHOLE.model_copy(update={"number": number})
    assert asyncio.run(_trained(stub, question, asked)) == expected
    # Without the round of the measurement itself, nobody knows who measured.
    gone = Answer(detail_of("m", [["north"]], known=set()), None, [0.0] * 3, 3)
    assert asyncio.run(_trained(stub, question, gone)) is None


def test_members_that_trained_what_a_job_started_from_count_too(monkeypatch):
    asked = Answer(detail_of("m", [["north", "east", "south"]]), None, [0.0] * 3, 3)
    first, second = detail_of("first", [["south"]], document=b"1" * 32), detail_of("desk", [["north"]])
    stub = Answers(monkeypatch, desk=second, first=first)
    earlier = EarlierVersion(job="first", number=1, document=b"1" * 32)
    stub.documents |= {"desk": SimpleNamespace(earlier=earlier), "first": SimpleNamespace(earlier=None)}
    assert asyncio.run(_trained(stub, WHOLE.model_copy(update={"number": 1}), asked)) == 2
    # Another job of that name is not the one that it started from.
    first.job.document = b"2" * 32
    assert asyncio.run(_trained(stub, WHOLE.model_copy(update={"number": 1}), asked)) is None
