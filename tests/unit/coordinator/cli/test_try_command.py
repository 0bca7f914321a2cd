"""`coordinator job try` refuses what it cannot try, in sentences, and marks a job that private rows tuned."""

import csv
import json
import os
import random
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from learning.training.outcome import TrainingLost
from simulation.engines import WorkersDied
from simulation.kept_features import SharedFeatures
from simulation.suggestion import budget_of
from tacit.job import JobSpec
from tests.support.tiny_models import saved
from tests.support.tried_jobs import DIVERGES, TOML, written_job, written_rows
from toolkit.console import CommandFailed, ExitCode

QUICK = ("--no-search", "--cores", "1", "--seed", "0", "--minutes", "5")


def tried(*words, code=ExitCode.OK):
    result = CliRunner().invoke(app, ["job", "try", *(str(word) for word in words)])
    if isinstance(result.exception, CommandFailed):
        assert result.exception.code is code, result.exception
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def job(tmp_path):
    return written_job(tmp_path)[0]


PUBLIC = ("--rows", "public")
DATA = ("--data", "rows.jsonl")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--members", 3, *PUBLIC), ExitCode.USAGE, "give --data FILE"),
        ((*DATA, *PUBLIC), ExitCode.USAGE, "give --members N"),
        ((*DATA, *PUBLIC, "--members", 3, "--column", "site"), ExitCode.USAGE, "--members and --column are both given"),
        ((*DATA, "--members", 3, "--rows", "own-private"), ExitCode.REFUSED, "private rows are refused"),
        (("--data", "none.jsonl", *PUBLIC, "--members", 3), ExitCode.NOT_FOUND, "none.jsonl"),
        ((*DATA, *PUBLIC, "--members", 3, "--label", "kind"), ExitCode.USAGE, "kind"),
        ((*DATA, *PUBLIC, "--column", "place"), ExitCode.USAGE, "place"),
        ((*DATA, *PUBLIC, "--column", "place"), ExitCode.USAGE, "Name yours with --column"),
        ((*DATA, *PUBLIC, "--members", 100), ExitCode.USAGE, "72 training rows cannot be dealt to 100 members"),
        ((*DATA, *PUBLIC, "--members", 100), ExitCode.USAGE, "100 equal shares leave a member 0 of 72 rows"),
        ((*DATA, *PUBLIC, "--members", 2), ExitCode.USAGE, "needs 3 members (rounds.min_members)"),
        ((*DATA, *PUBLIC, "--members", 3, "--out", "elsewhere/job.toml"), ExitCode.USAGE, "relative to its folder"),
        ((*DATA, *PUBLIC, "--members", 3, "--out", "job.toml"), ExitCode.USAGE, "the job file itself"),
        ((*DATA, "--suggest"), ExitCode.USAGE, "--suggest needs no data"),
        (("--suggest",), ExitCode.USAGE, "give --examples N"),
        (("--suggest", "--examples", 9, "--minutes", 3), ExitCode.USAGE, "--minutes: --suggest reads no data"),
        ((*DATA, *PUBLIC, "--members", 3, "--examples", 9), ExitCode.USAGE, "--examples: it belongs to --suggest"),
        ((*DATA, *PUBLIC, "--members", 3, "--alpha", 0.1), ExitCode.USAGE, "--alpha: it belongs to --partition label"),
        (
            (*DATA, *PUBLIC, "--column", "site", "--partition", "label", "--alpha", 0.1),
            ExitCode.USAGE,
            "--partition, --alpha: --column says who the members are, so this changes nothing here; leave it out",
        ),
    ],
)
def test_bad_input_says_what_to_do(job, monkeypatch, words, code, says):
    monkeypatch.chdir(job.parent)
    monkeypatch.setattr("simulation.trying._baselines", lambda _: ())
    assert says in tried("job.toml", *words, code=code)
    assert not list(job.parent.glob("*.tuned.toml"))


def test_options_of_tuning_are_refused_where_nothing_is_tuned(tmp_path, monkeypatch):
    monkeypatch.setattr("simulation.trying.read_rows", lambda *_, **__: pytest.fail("the rows were read"))
    job, data = written_job(tmp_path, KEPT)
    words = (job, "--data", data, *PUBLIC, "--members", 3)
    for more, said in (
        (("--epsilon", 3, "--no-search"), "--epsilon, --no-search: "),
        (("--out", job.with_name("x.toml")), "--out: "),
    ):
        told = tried(*words, *more, code=ExitCode.USAGE)
        assert told.startswith(f"{said}members of this job keep a part of the model, so nothing is tuned")


def test_a_search_that_its_time_cut_says_so_everywhere(job, monkeypatch):
    from simulation import sweep

    monkeypatch.setattr("simulation.trying._baselines", lambda _: ())
    clock, inner = [0.0], sweep._tried

    def slow(plan, candidate, seed, until):
        found = inner(plan, candidate, seed, float("inf")) if clock[0] < until else None
        clock[0] += 100.0
        return found

    # Each trial takes 100 of 420 seconds, so the axes' share is over after a few.
    monkeypatch.setattr(sweep, "_tried", slow)
    for name in ("simulation.sweep", "simulation.trying"):
        monkeypatch.setattr(f"{name}.time", SimpleNamespace(time=lambda: clock[0]))
    limits = ("--epsilon", 30, "--cores", 1, "--minutes", 7)
    words = ("--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3, *limits)
    shown = tried(job, *words)
    (line,) = [each for each in shown.splitlines() if each.startswith("The time limit cut the search short after ")]
    trials, planned = re.search(r"after (\d+) of (\d+) trials", line).groups()
    assert 2 <= int(trials) < int(planned)
    tuned = job.with_name("job.tuned.toml")
    note = (
        f"# The time limit of `coordinator job try` cut the search for these numbers after {trials} of {planned} trials"
    )
    assert tuned.read_text().splitlines()[:2] == [note, "# What the job is for."]
    # Tuned again, the note is of the last search.
    clock[0] = 0.0
    again = (tuned, *words, "--json", "--out", job.with_name("again.toml"))
    told = json.loads(tried(*again).splitlines()[-1])
    assert told["cut_by_time"]
    assert told["trials"] < told["trials_planned"]
    lines = job.with_name("again.toml").read_text().splitlines()
    assert sum("cut the search" in each for each in lines) == 1
    assert f"after {told['trials']} of {told['trials_planned']} trials" in lines[0]


def test_a_limit_in_which_no_recipe_ends_asks_for_more(job, monkeypatch):
    monkeypatch.chdir(job.parent)
    monkeypatch.setattr("simulation.trying._baselines", lambda _: ())
    # A machine may be fast enough for a few steps in half a second.
    text = job.read_text()
    assert "\nsteps = 6\n" in text
    job.write_text(text.replace("\nsteps = 6\n", "\nsteps = 20000\n"))
    words = (*DATA, *PUBLIC, "--members", 3, "--minutes", 0.01, "--cores", 1)
    assert "give more --minutes" in tried("job.toml", *words, code=ExitCode.FAILED)
    assert not list(job.parent.glob("*.tuned.toml"))


def test_a_job_file_with_a_byte_order_mark_is_tuned(job):
    job.write_text("\ufeff" + job.read_text())
    tried(job, "--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3, "--epsilon", 9, *QUICK)
    tuned = job.with_name("job.tuned.toml")
    assert tuned.read_text().startswith("# What the job is for.")
    assert JobSpec.from_toml(tuned).rounds.min_members == 3


MECHANISM = """[mechanism]
name = "dp-sgd"
noise_multiplier = 0.3  # little
clip = 1.0
lot = 20
steps = 6
"""
DOTTED = TOML.replace(MECHANISM, "").replace(
    "schema = 1\n",
    'schema = 1\nmechanism.name = "dp-sgd"\nmechanism.noise_multiplier = 0.3\nmechanism.lot = 20\n',
)


def test_a_job_file_whose_numbers_cannot_be_edited_is_refused_before_the_search(job, monkeypatch):
    monkeypatch.setattr("simulation.trying.read_rows", lambda *_, **__: pytest.fail("the rows were read"))
    job.write_text(DOTTED)
    words = (job, "--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3)
    said = tried(*words, code=ExitCode.USAGE)
    assert "the job file cannot be edited to the tuned numbers" in said
    assert "each key on a line of its own" in said


def test_what_a_search_found_is_shown_also_if_its_file_cannot_be_written(job, monkeypatch):
    monkeypatch.setattr("simulation.tuned.check_editable", lambda *_: None)
    job.write_text(DOTTED)
    words = (job, "--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3, "--epsilon", 9, *QUICK)
    for more in ((), ("--json",)):
        result = CliRunner().invoke(app, ["job", "try", *(str(word) for word in (*words, *more))])
        assert isinstance(result.exception, CommandFailed)
        assert result.exception.code is ExitCode.FAILED
        assert "job.tuned.toml was not written" in str(result.exception)
        if more:
            found = json.loads(result.stdout.splitlines()[-1])
            assert found["out"] is None
            assert "dp-sgd noise" in found["best"]
        else:
            assert "Beside it on the test rows" in result.stdout
            assert "Wrote" not in result.stdout


def test_a_file_that_is_there_is_not_overwritten(job, monkeypatch):
    monkeypatch.setattr("simulation.trying.read_rows", lambda *_, **__: pytest.fail("the rows were read"))
    mine = job.with_name("job.tuned.toml"), job.with_name("s.toml")
    for path in mine:
        path.write_text("mine")
    words = (job, "--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3)
    for given in (words, (*words, "--out", mine[1]), (job, "--suggest", "--examples", 400, "--out", mine[1])):
        assert "is there already; choose another file with --out, or remove it" in tried(*given, code=ExitCode.USAGE)
    assert [path.read_text() for path in mine] == ["mine", "mine"]
    # What writes nothing overwrites nothing.
    assert "Suggested" in tried(job, "--suggest", "--examples", 400)


def test_one_label_is_not_enough(job):
    rows = job.with_name("one.csv")
    rows.write_text("text,label\n" + "".join(f"the sun {n},day\n" for n in range(40)))
    assert "at least two labels" in tried(job, "--data", rows, *PUBLIC, "--members", 3, code=ExitCode.USAGE)


def test_a_job_that_is_not_there(tmp_path):
    assert "does not exist" in tried(tmp_path / "job.toml", code=ExitCode.NOT_FOUND)


def test_rows_in_a_members_home_are_not_public(job):
    for name in ("identity", "ledgers"):
        (job.parent / "home" / name).mkdir(parents=True)
    rows = job.parent / "home" / "rows.jsonl"
    rows.write_text((job.parent / "rows.jsonl").read_text())
    for declared in (PUBLIC, ()):
        assert "lies in a member's home" in tried(job, "--data", rows, *declared, "--members", 3, code=ExitCode.REFUSED)


def test_a_job_with_rows_made_anew_has_nothing_that_is_kept(tmp_path):
    own = TOML.partition("# Found by")[0] + '\n[method]\nname = "fedrecon"\ntokens = ["sun"]\n'
    job, data = written_job(tmp_path, own)
    said = tried(job, "--data", data, *PUBLIC, "--members", 3, code=ExitCode.USAGE)
    assert "fedrecon makes private rows anew in each round" in said


def test_a_job_that_keeps_the_embedding_says_what_that_is_worth_and_writes_no_job(tmp_path):
    kept = TOML.partition("# Found by")[0] + '\n[method]\nname = "fedvocab"\n\n[rounds]\ncount = 2\nmin_members = 3\n'
    job, data = written_job(tmp_path, kept)
    words = (job, "--data", data, *PUBLIC, "--members", 3, "--seed", 0, "--cores", 1)
    said = tried(*words)
    for line in ("the job as written", "everything shared", "each member alone"):
        assert line in said
    assert "The private part against everything shared, all 3 members (32 rows, " in said
    assert "All members have 32 rows, so nothing is said by their size." in said
    assert "All members have 14 % unknown words, so nothing is said by their share of them." in said
    assert "measured for transformers only" in said
    assert "no job file was written" in said
    assert not list(tmp_path.glob("*.tuned.toml"))
    found = json.loads(tried(*words, "--json").splitlines()[-1], parse_constant=pytest.fail)
    assert (found["job"], len(found["members"]), found["seeds"]) == ("tried", 3, [0])
    assert found["rows"] == {"training": 96, "test": 24}
    assert found["variants"]["everything shared"].keys() == {"own", "common"}
    # The job as written shares no embedding; alone, a member shares nothing.
    assert "aggregation.groups" not in said
    refused = tried(*words[:-4], "--members", 2, "--seed", 0, code=ExitCode.USAGE)
    assert "needs 3 members (rounds.min_members)" in refused


OVER_BASE = """schema = 1
name = "desk"
labels = ["day", "night"]
method = "fedvocab"
[model]
architecture = "transformer"
base = "encoder"
max_tokens = 24
dropout = 0.0
injection = { name = "lora", rank = 4 }
[vocabulary]
kind = "wordpiece"
size = 120
[training]
learning_rate = 0.02
epochs = 5
batch = 8
[rounds]
count = 3
min_members = 3
"""
FILLERS = ["the", "is", "was", "over", "a", "hill", "and", "we", "saw", "they", "came", "by", "then", "old"]
KNOWN = {"day": ["sun", "noon", "light", "bright"], "night": ["moon", "dark", "star", "late"]}
SITES = {"codes 1": 30, "codes 2": 40, "codes 3": 60, "plain 1": 40, "plain 2": 50, "plain 3": 60}


def six_sites():
    """Rows whose label one word decides. At three sites it is a code of the site, which the base cannot spell."""
    draw = random.Random(7)
    for site, count in SITES.items():
        codes = ["".join(draw.choices("nopqrstuvwxyz", k=5)) for _ in range(4)]
        deciding = {"day": codes[:2], "night": codes[2:]} if site.startswith("codes") else KNOWN
        for number in range(count):
            label = ("day", "night")[number % 2]
            words = [draw.choice(deciding[label]), *draw.sample(FILLERS, 3)]
            draw.shuffle(words)
            yield {"text": " ".join(words), "label": label, "site": site}


def test_an_own_vocabulary_over_a_base_helps_the_members_whose_words_the_base_lacks(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *FILLERS, *KNOWN["day"], *KNOWN["night"]]
    saved(tmp_path / "encoder", "bert", bare=True, words=len(pieces), tokenizer=False)
    (tmp_path / "encoder" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    job, data = tmp_path / "job.toml", tmp_path / "rows.jsonl"
    job.write_text(OVER_BASE)
    data.write_text("".join(json.dumps(row) + "\n" for row in six_sites()))
    words = (job, "--data", data, *PUBLIC, "--column", "site", "--seed", 0, "--cores", 1, "--minutes", 30, "--json")
    found = json.loads(tried(*words).splitlines()[-1], parse_constant=pytest.fail)
    assert (found["rows"], found["cut_by_time"]) == ({"training": 224, "test": 56}, False)
    # By the column's values, so that the sites with codes come first: one word of four is a code.
    assert [each["unknown"] for each in found["members"]] == [0.25] * 3 + [0.0] * 3
    sizes = [each["rows"] for each in found["members"]]
    assert sum(sizes) == 224
    own = {name: np.array(each) for name, each in found["own_by_member"].items()}
    against = "the base's word pieces"
    apart = own["the job as written"] - own[against]
    # Without the codes, the base's pieces leave a coin's toss on the few rows that measure a member.
    assert (apart[:3] > 0).all()
    assert apart[:3].mean() > 0.3
    assert own["the job as written"].mean() > 0.85
    assert abs(apart[3:].mean()) < 0.15
    gains = {each["of"].partition(" (")[0]: each for each in found["gains"] if each["against"] == against}
    assert list(gains) == [
        *("all 6 members", "the 3 smaller members", "the 3 larger members"),
        *("the 3 members with fewer unknown words", "the 3 members with more unknown words"),
    ]
    order = np.argsort(sizes)
    for name, places in zip(gains, ([*range(6)], order[:3], order[3:], [3, 4, 5], [0, 1, 2]), strict=True):
        chosen, gain = apart[places], gains[name]
        assert gain["gain"] == pytest.approx(chosen.mean()), name
        assert (gain["better"], gain["worse"]) == ((chosen > 1e-9).sum(), (chosen < -1e-9).sum())
    few, many = gains["the 3 members with fewer unknown words"], gains["the 3 members with more unknown words"]
    assert (many["better"], many["worse"]) == (3, 0)
    assert many["gain"] - few["gain"] > 0.3
    # The shared table has the codes of nobody either.
    assert (own["the job as written"] - own["everything shared"])[:3].mean() > 0.2
    # The attack is on two of these members: with the fewest and the most unknown words, and four words in each text.
    said = found["attacked"][0]
    assert "16 texts with 64 tokens: the first 8 training rows of members " in said
    assert set(re.findall(r"rows, (\d+) % unknown words", said)) == {"0", "25"}
    public, present, chance = map(int, re.findall(r"(?:names|name|chance,) (\d+) %", said))
    # A code's row started at the base's row for unknown words, as all codes' did, so the public table names no code.
    assert chance + 10 < public < 75
    assert present > 90
    assert f"private is worth {present - public} of 100 points" in said


KEPT = f"""{DIVERGES}
[method]
name = "lg-fedavg"
"""


def test_a_job_that_keeps_a_part_and_diverges_is_a_sentence(tmp_path):
    job, data = written_job(tmp_path, KEPT)
    for cores in (1, 2):
        words = (job, "--data", data, *PUBLIC, "--members", 3, "--seed", 0, "--cores", cores)
        said = tried(*words, code=ExitCode.FAILED)
        assert said.startswith(f"{job} cannot be tried: training diverged: ")


def test_members_alone_learn_beside_a_job_whose_rate_suits_clipped_steps(tmp_path):
    """By plain steps at that rate they would not."""
    clipped = TOML.replace("learning_rate = 2.0", "learning_rate = 1000.0").replace("clip = 1.0", "clip = 0.001")
    job, data = written_job(tmp_path, f'{clipped}[method]\nname = "fedvocab"\n')
    said = tried(job, "--data", data, *PUBLIC, "--members", 3, "--seed", 0, "--cores", 1, "--json")
    found = json.loads(said.splitlines()[-1])
    assert "each member alone" in found["variants"]
    assert found["failed"] == []
    # One word decides each label, and the rows are few.
    assert found["variants"]["each member alone"]["own"] > 0.6


@pytest.mark.parametrize("error", [TrainingLost("the memory is full"), WorkersDied("3 workers died")])
def test_a_job_that_keeps_a_part_and_fails_otherwise_is_a_sentence(tmp_path, monkeypatch, error):
    def fails(*_given, **_more):
        raise error

    monkeypatch.setattr("learning.training.update.train_update", fails)
    job, data = written_job(tmp_path, KEPT)
    words = (job, "--data", data, *PUBLIC, "--members", 3, "--seed", 0, "--cores", 1)
    assert tried(*words, code=ExitCode.FAILED) == f"{job} cannot be tried: {error}"


class Deadly(SharedFeatures):
    """Ends the process that reads it."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_process_that_dies_is_a_sentence(job, monkeypatch):
    """As one that the system ends for want of memory."""
    monkeypatch.setattr("simulation.trying.SharedFeatures", Deadly)
    words = (job, "--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3, "--seed", 0, "--cores", 2)
    said = tried(*words, code=ExitCode.FAILED)
    assert said.startswith(f"{job} cannot be tried: a process died while it tried a recipe; look for memory")
    assert said.endswith("use fewer cores")


def test_without_torch_it_says_what_to_install(job, monkeypatch):
    monkeypatch.delitem(sys.modules, "simulation.trying", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    said = tried(job, "--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3, code=ExitCode.USAGE)
    assert "pip install '.[coordinator,export]'" in said
    assert "--suggest" in said


def test_rows_that_nobody_declared_count_as_public_and_a_sentence_says_so(job, monkeypatch):
    monkeypatch.chdir(job.parent)
    with Path("public.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("text", "label"), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(written_rows(120))
    words = ("job.toml", "--data", "public.csv", "--members", 4, "--epsilon", 4, *QUICK)
    said = tried(*words)
    assert "The rows of public.csv count as public, because --rows does not say whose they are." in said
    assert "72 training rows at 4 members" in said
    assert "Wrote job.tuned.toml." in said
    assert JobSpec.from_toml(Path("job.tuned.toml")).tuned_on is None
    # Who declares them is told nothing.
    Path("job.tuned.toml").unlink()
    assert "count as public" not in tried(*words, *PUBLIC)


def test_private_rows_leave_a_mark_that_a_bundle_keeps(job):
    rows = job.with_name("rows.jsonl")
    words = (job, "--data", rows, "--rows", "own-private", "--force", "--members", 3, "--epsilon", 8, *QUICK, "--json")
    found = json.loads(tried(*words).splitlines()[-1])
    assert found["tuned_on_private_rows"]
    tuned = JobSpec.from_toml(job.with_name("job.tuned.toml"))
    assert tuned.tuned_on == "own-private"
    assert JobSpec.from_toml(job).tuned_on is None


def test_suggest_writes_numbers_and_prints_the_expected_noise(job):
    out = job.with_name("numbers.toml")
    said = tried(job, "--suggest", "--examples", 400, "--members", 4, "--epsilon", 4, "--out", out)
    assert "expected noise to signal" in said
    found = tomllib.loads(out.read_text())
    assert found["mechanism"]["lot"] == 134
    assert found["rounds"] == {"count": 10, "min_members": 3}
    numbers = json.loads(tried(job, "--suggest", "--examples", 400, "--members", 4, "--epsilon", 4, "--json"))
    assert numbers["mechanism"] == found["mechanism"] | {"unit": "example", "person": None}


BY_MEMBER = 'name = "distributed-gaussian"\nnoise_multiplier = 4.0\nhonest = 2\nunit = "member"\n'
BY_PERSON = 'name = "dp-sgd"\nnoise_multiplier = 1.0\nunit = "person"\nperson = { max_examples = 2 }\n'
LAPLACE = 'name = "laplace-update"\nepsilon = 2.0\n'
REPLACED = 'name = "gaussian-update"\nnoise_multiplier = 3.0\nlot = 20\nsampling = "fixed"\n'


# What it shares is known only with its bundle.
ON_ENCODER = """schema = 1
name = "desk"
labels = ["day", "night"]
model = { architecture = "prompted", base = "encoder", injection = "none", task = "head" }
[mechanism]
"""


def with_mechanism(folder, mechanism):
    return written_job(folder, TOML.replace(MECHANISM, f"[mechanism]\n{mechanism}"))[0]


def on_encoder(folder, mechanism):
    job = folder / "job.toml"
    job.write_text(ON_ENCODER + mechanism)
    return job


@pytest.mark.parametrize(
    ("made", "mechanism", "says"),
    [
        (with_mechanism, BY_MEMBER, 'unit = "member": the written rules propose dp-sgd by example'),
        (on_encoder, BY_MEMBER, 'unit = "member": the written rules propose dp-sgd by example'),
        (on_encoder, BY_PERSON, 'unit = "person": the written rules propose dp-sgd by example'),
        (with_mechanism, REPLACED, 'sampling = "fixed": this mechanism hides which of two rows a member has'),
        (with_mechanism, LAPLACE, "laplace-update: its epsilon holds without a delta"),
    ],
)
@pytest.mark.parametrize("budget", [(), ("--epsilon", 4)])
def test_suggest_refuses_to_protect_less_than_the_job(tmp_path, made, mechanism, says, budget):
    job, out = made(tmp_path, mechanism), tmp_path / "numbers.toml"
    said = tried(job, "--suggest", "--examples", 400, *budget, "--out", out, code=ExitCode.USAGE)
    assert says in said
    assert "choose this mechanism's noise with `edge_client privacy plan`, or set " in said
    assert not out.exists()


def test_suggest_without_an_epsilon_keeps_what_the_job_costs(job):
    out = job.with_name("numbers.toml")
    tried(job, "--suggest", "--examples", 400, "--members", 4, "--out", out)
    written, found = JobSpec.from_toml(job), JobSpec.from_toml(out)
    costs = [budget_of(each, 400, 4) for each in (written, found)]
    assert 0.9 * costs[0] < costs[1] <= costs[0] * (1 + 1e-5)
    ring = on_encoder(job.parent, BY_MEMBER.replace("member", "example"))
    said = tried(ring, "--suggest", "--examples", 400, code=ExitCode.USAGE)
    assert "give --epsilon" in said


WRITER = """schema = 1
name = "assistant"
[model]
architecture = "prompted"
base = "encoder"
injection = { name = "lora", rank = 8, alpha = 16.0 }
task = { name = "generate", template = "chatml" }
[mechanism]
name = "dp-sgd"
noise_multiplier = 1.0
"""


def test_suggest_has_numbers_for_a_model_that_writes(tmp_path):
    (tmp_path / "job.toml").write_text(WRITER)
    words = (tmp_path / "job.toml", "--suggest", "--examples", 700, "--members", 3, "--epsilon", 8)
    said = tried(*words)
    assert "4 x 3 steps, sgd 4.6" in said
    assert "`coordinator evaluate` measures its versions." in said
    tried(*words, "--out", out := tmp_path / "numbers.toml")
    assert JobSpec.from_toml(out).training.schedule.decay == "cosine"


@pytest.mark.parametrize(
    ("mechanism", "kept"),
    [(BY_MEMBER, {"unit": "member"}), (REPLACED, {"sampling": "fixed"}), (LAPLACE, {"name": "laplace-update"})],
)
def test_a_tuned_job_protects_what_the_job_protects(tmp_path, mechanism, kept):
    job = with_mechanism(tmp_path, mechanism)
    words = (job, "--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3, *QUICK)
    said = tried(*words, "--epsilon", 30)
    assert "no suggestion beside the job as written: " in said
    before, after = (tomllib.loads(job.with_name(name).read_text()) for name in ("job.toml", "job.tuned.toml"))
    assert after["mechanism"]["name"] == before["mechanism"]["name"]
    assert kept.items() <= after["mechanism"].items()


@pytest.mark.parametrize("mechanism", [BY_MEMBER, REPLACED])
def test_an_epsilon_that_the_jobs_own_mechanism_cannot_keep_is_refused(tmp_path, mechanism):
    """Nothing is left to try, and that is no matter of time."""
    job = with_mechanism(tmp_path, mechanism)
    words = (job, "--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3, *QUICK)
    said = tried(*words, "--epsilon", 0.001, "--delta", 1e-9, code=ExitCode.USAGE)
    assert "is not enough for 2 rounds at any noise" in said


def test_a_drowned_job_is_told_that_it_ends_at_chance(job):
    words = (job, "--data", job.with_name("rows.jsonl"), *PUBLIC, "--members", 3, "--epsilon", 0.01, *QUICK)
    assert "will end at chance" in tried(*words)


def test_bundle_prints_the_expected_noise(job, monkeypatch):
    result = CliRunner().invoke(app, ["job", "bundle", str(job), "--out", str(job.with_name("b"))])
    assert "Expected noise to signal: " in result.output
    assert "freeze_embedding = true leaves" in result.output
