"""`coordinator job new`: every recipe of docs/recipes.md is a job file that members accept, and the answers count."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.cli.new_job import DELTA, MODELS, TEXTS, Answers, JobNotMade, job_file
from edge_client.cli import app as edge_app
from learning.accounting.planning import Setting, cost_of_job
from tacit.job import JobSpec
from tacit.mechanism import DpSgd, NoMechanism
from tests.support.places import ROOT
from toolkit.console import CommandFailed, ExitCode

COMMANDS = re.findall(r"^coordinator (job new .*)$", (ROOT / "docs" / "recipes.md").read_text(), flags=re.MULTILINE)


def typed(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def options(command: str) -> dict[str, str]:
    words = shlex.split(command)[3:]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_recipe_of_the_page_passes_parser_and_policy(command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("the\nbill\n")
    name, said = shlex.split(command)[2], options(command)
    assert f"Wrote {name}.toml." in typed(*shlex.split(command))
    spec = JobSpec.from_toml(tmp_path / f"{name}.toml")
    assert (spec.name, list(spec.labels)) == (name, said["--labels"].split(","))
    assert spec.rounds.min_members == int(said["--members"])
    # With noise the policy that says nothing accepts; without, the member says so.
    private = said["--epsilon"] != "none"
    assert isinstance(spec.mechanism, DpSgd if private else NoMechanism)
    policy = tmp_path / "policy.toml"
    policy.write_text("schema = 1\n" + ("" if private else 'mechanisms = ["none"]\n'))
    words = ["policy", "check", f"{name}.toml", "--policy", str(policy), "--examples", said["--examples"]]
    checked = CliRunner().invoke(edge_app, [*words, "--home", str(tmp_path / "member"), "--json"])
    assert checked.exit_code == 0, (checked.output, checked.exception)
    if private:
        outlook = json.loads(checked.stdout)["outlook"]
        assert outlook["possible"] == outlook["rounds"] == spec.rounds.count


def test_the_page_has_every_situation() -> None:
    assert len(COMMANDS) >= 10
    said = [options(command) for command in COMMANDS]
    assert {each["--texts"] for each in said} == set(TEXTS)
    assert {each["--model"] for each in said} == {"minilm", *MODELS}
    assert {each["--epsilon"] for each in said} == {"none", "1", "4", "8"}
    assert any(len(each["--labels"].split(",")) >= 20 for each in said)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("examples", [40, 363, 5000])
def test_the_noise_is_what_the_epsilon_asks_for(epsilon, examples, tmp_path) -> None:
    answers = Answers("x", ("a", "b"), 3, examples, epsilon, "short", "minilm")
    (tmp_path / "job.toml").write_text(job_file(answers))
    spec = JobSpec.from_toml(tmp_path / "job.toml")
    cost = cost_of_job(spec, Setting(examples, spec.rounds.count, DELTA), [epsilon])
    # The last of three digits decides how close it comes.
    assert 0.93 * epsilon < cost.gate <= epsilon
    assert cost.rows[0].rounds == spec.rounds.count


@pytest.mark.parametrize(("examples", "stays"), [(100, True), (5000, False)])
def test_the_file_says_that_a_head_will_stay_at_its_start(examples, stays, tmp_path) -> None:
    """77 labels of 100 examples: the rate is 0.025, and the whole epsilon is paid for it."""
    text = job_file(Answers("x", tuple(f"l{each}" for each in range(77)), 3, examples, 1.0, "short", "minilm"))
    words = f"# With 77 labels, {examples} examples and 3 members, noise outweighs what can be learnt, so the head"
    assert (words in text) == stays
    assert ("labels would move it.\n" in text.replace("\n# ", " ")) == stays
    (tmp_path / "job.toml").write_text(text)
    assert (JobSpec.from_toml(tmp_path / "job.toml").training.learning_rate < 0.1) == stays


@pytest.mark.parametrize(("epsilon", "band"), [(1.0, 1), (8.0, 6)])
def test_noise_is_correlated_where_that_leaves_less(epsilon, band, tmp_path) -> None:
    answers = Answers("x", ("a", "b"), 3, 5000, epsilon, "short", "words", vocabulary="words.txt")
    (tmp_path / "job.toml").write_text(job_file(answers))
    spec = JobSpec.from_toml(tmp_path / "job.toml")
    assert isinstance(spec.mechanism, DpSgd)
    assert spec.mechanism.band == band
    assert spec.mechanism.spare_rounds == (0 if band == 1 else 2)
    cost = cost_of_job(spec, Setting(5000, spec.rounds.count, DELTA), [epsilon])
    assert 0.93 * epsilon < cost.gate <= epsilon
    assert cost.rows[0].rounds == spec.rounds.count


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"texts": "pairs", "model": "words", "vocabulary": "w"}, "only a job on a backbone reads two texts"),
        ({"model": "words"}, "a public word list is missing"),
        ({"model": "own", "epsilon": 8.0}, "depends on all its texts"),
        ({"members": 2}, "needs three members or more, got 2"),
        ({"epsilon": -1.0}, "must be above 0, or none"),
        ({"epsilon": 1e-9}, "is not enough for 10 rounds at any noise"),
        ({"labels": ("a", "a")}, "labels"),
        ({"labels": ("a",)}, "labels"),
        ({"name": "No Name"}, "name"),
        ({"model": "smollm2"}, "copy examples/assistant.toml"),
    ],
)
def test_answers_that_make_no_job_are_refused(changes, sentence) -> None:
    whole = {
        "name": "x",
        "labels": ("a", "b"),
        "members": 3,
        "examples": 300,
        "epsilon": None,
        "texts": "short",
        "model": "minilm",
    }
    with pytest.raises(JobNotMade, match=re.escape(sentence)):
        job_file(Answers(**(whole | changes)))


def test_labels_cannot_write_other_keys(tmp_path) -> None:
    odd = ('a"]\nseed = 7', "$name", "ü 'x'")
    with pytest.raises(JobNotMade, match="labels"):
        job_file(Answers("x", odd, 3, 300, None, "short", "minilm"))
    (tmp_path / "job.toml").write_text(job_file(Answers("x", odd[1:], 3, 300, None, "short", "minilm")))
    assert JobSpec.from_toml(tmp_path / "job.toml").labels == odd[1:]


def test_questions_are_asked_on_a_terminal_only(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CommandFailed,
        match="--members, --examples, --labels, --epsilon, --texts and --model are missing, and there is no",
    ) as failed:
        typed("job", "new", "x")
    assert failed.value.code is ExitCode.USAGE

    def answered(name: str, *lines: str) -> subprocess.CompletedProcess[str]:
        """Types answers into a terminal."""
        ours, theirs = pty.openpty()
        os.write(ours, "".join(f"{line}\n" for line in lines).encode())
        try:
            return subprocess.run(
                [Path(sys.executable).with_name("coordinator"), "job", "new", name],
                stdin=theirs,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            os.close(ours)
            os.close(theirs)

    done = answered("x", "3 300", "good, bad", "none", "", "")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r":(?=[A-Z]|$)", done.stderr)) >= 5
    spec = JobSpec.from_toml(Path("x.toml"))
    assert (spec.labels, spec.rounds.min_members, spec.model.base) == (("good", "bad"), 3, "minilm")
    assert "x.toml is there already" in answered("x").stderr
    with pytest.raises(CommandFailed, match="--texts is missing, and there is no terminal to ask; add it"):
        typed(*shlex.split("job new x2 --members 3 --examples 9 --labels a,b --epsilon none --model minilm"))
    with pytest.raises(CommandFailed, match="--members is missing"):
        typed(*shlex.split("job new x2 --examples 9 --labels a,b --epsilon none --model minilm --texts short"))

    # A wrong answer is refused at its question, which is asked again.
    done = answered(
        "y", "three", "2 300", "3 0", "3 300", "a", "a,b,a", "a,b", "lots", "0", "none", "tall", "short", ""
    )
    assert done.returncode == 0, done.stderr
    for sentence in (
        "'three' is not two numbers; write them as 3 300",
        "members: secure aggregation needs three members or more, got 2",
        "examples: the member with the fewest needs one or more, got 0",
        "a job needs two labels or more",
        "a label is named twice",
        "'lots' is neither a number nor none",
        "Error: must be above 0, or none for a job without noise, got 0",
        "'tall' is not one of short, long, pairs",
    ):
        assert done.stderr.count(sentence) == 1, (sentence, done.stderr)
    spec = JobSpec.from_toml(Path("y.toml"))
    assert (spec.labels, spec.rounds.min_members, isinstance(spec.mechanism, NoMechanism)) == (("a", "b"), 3, True)


def test_labels_are_one_line_of_csv(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rest = shlex.split("--members 3 --examples 300 --epsilon none --texts short --model minilm")
    typed("job", "new", "quoted", "--labels", '"billing, insurance", complaint,"say ""no"""', *rest)
    assert JobSpec.from_toml(Path("quoted.toml")).labels == ("billing, insurance", "complaint", 'say "no"')
    for wrong in ('"billing, insurance', "a,b\nc,d", '"a"b,c', "", "a,,b"):
        with pytest.raises(CommandFailed, match="--labels") as failed:
            typed("job", "new", "wrong", "--labels", wrong, *rest)
        assert failed.value.code is ExitCode.USAGE
        assert not Path("wrong.toml").exists()


def test_a_name_and_a_word_list_that_cannot_be_are_refused_in_words(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rest = shlex.split("--members 3 --examples 300 --epsilon none --texts short --labels a,b")
    for name in ("Desk One", "-x", "x" * 64):
        with pytest.raises(CommandFailed) as failed:
            typed("job", "new", *rest, "--model", "minilm", "--", name)
        assert "a name is 1 to 63 of a-z, 0-9, dot, dash, underscore, and begins with a letter or a digit" in str(
            failed.value
        )
        assert failed.value.code is ExitCode.USAGE
    with pytest.raises(CommandFailed, match=r"nofile\.txt does not exist; name a public list of words") as failed:
        typed("job", "new", "x", *rest, "--model", "words", "--words", "nofile.txt")
    assert failed.value.code is ExitCode.NOT_FOUND
    assert not list(tmp_path.iterdir())


def test_words_come_from_the_vocabulary_of_a_backbone(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    pieces = tmp_path / "federation" / "operator" / "backbones" / "minilm" / "vocab.txt"
    pieces.parent.mkdir(parents=True)
    pieces.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "bill", "##s"]) + "\n")
    (tmp_path / "federation" / "operator" / "operator.toml").write_text("")
    (tmp_path / "jobs").mkdir()
    answers = "--labels a,b --members 3 --examples 300 --epsilon none --texts short --model words"
    typed("job", "new", "x", *answers.split(), "--out", "jobs/x.toml")
    spec = JobSpec.from_toml(tmp_path / "jobs" / "x.toml")
    assert (spec.vocabulary.kind, (tmp_path / "jobs" / spec.vocabulary.file).resolve()) == ("wordpiece", pieces)
    assert "Created" in typed("job", "bundle", "jobs/x.toml", "--out", str(tmp_path / "bundle"))
