"""Rows for trials: parts never overlap, members get training rows only, and nothing chooses by the test part."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from edge_client.identity.home import Home
from learning.text.examples import Example
from simulation import word_counts
from simulation.home import in_a_members_home
from simulation.sweep import Candidate, NothingTried, Scored, best_of, described
from simulation.trial import Outcome, Rows, RowsUnfit, deal, divide, majority
from simulation.trying import check_job
from simulation.tuned import NotEditable, check_editable, tuned_text
from simulation.verdict import verdict
from simulation.word_counts import predicted
from tacit.job import JobSpec
from tacit.job_parts import Schedule
from tacit.mechanism import NoMechanism
from tests.support.tried_jobs import TOML, written_job, written_rows


def rows_of(count, column=False):
    rows = written_rows(count)
    examples = tuple(Example(row["text"], row["label"]) for row in rows)
    return Rows(examples, tuple(row["site"] for row in rows) if column else ())


def test_parts_do_not_overlap_even_if_texts_repeat():
    once = rows_of(60).examples
    divided = divide(Rows(once * 3), validation=0.2, test=0.2, seed=1)
    parts = [{each.text for each in part} for part in (divided.train.examples, divided.validation, divided.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 60
    assert [len(part) for part in parts] == [36, 12, 12]
    assert divide(Rows(once * 3), validation=0.2, test=0.2, seed=1) == divided
    assert divide(Rows(once * 3), validation=0.2, test=0.2, seed=2) != divided


@pytest.mark.parametrize(("kind", "column"), [("even", False), ("label", False), ("column", True)])
def test_every_training_row_is_dealt_once(kind, column):
    rows = rows_of(90, column)
    dealt = deal(rows, kind, 3, 0.3, 0)
    assert len(dealt) == 3
    assert sorted(each.text for part in dealt for each in part) == sorted(each.text for each in rows.examples)
    if kind == "column":
        sites = dict(zip((each.text for each in rows.examples), rows.column, strict=True))
        assert all(len({sites[each.text] for each in part}) == 1 for part in dealt)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (Rows(tuple(Example(f"text {n}", "day") for n in range(50))), "give rows of at least two labels"),
        (rows_of(4), "give more rows"),
    ],
)
def test_rows_that_do_not_suffice(rows, says):
    with pytest.raises(RowsUnfit, match=says):
        divide(rows, validation=0.2, test=0.2, seed=0)


def test_fewer_rows_than_members():
    with pytest.raises(RowsUnfit, match="20 training rows cannot be dealt to 30 members"):
        deal(rows_of(20), "even", 30, 1.0, 0)


def test_a_column_with_one_value():
    rows = rows_of(20)
    with pytest.raises(RowsUnfit, match="name another column"):
        deal(Rows(rows.examples, ("here",) * 20), "column", 0, 1.0, 0)


def test_the_majority_is_that_of_the_training_rows():
    train = [Example("x", "a"), Example("y", "a"), Example("z", "b")]
    assert majority(train, [Example("p", "b"), Example("q", "b"), Example("r", "a")]) == 1


def scored(validation, test, seeds=1):
    spec = JobSpec.model_validate({"name": "x", "labels": ["a", "b"], "vocabulary": {"kind": "words", "file": "w"}})
    candidate = Candidate(spec, Path("bundle"), "rates")
    return Scored(candidate, {seed: Outcome(validation, test, 1.0) for seed in range(seeds)})


def test_the_winner_has_the_best_validation_whatever_the_test_part_says():
    good, lucky = scored(60, 10), scored(50, 90)
    assert best_of([lucky, good], 100) is good
    assert best_of([scored(90, 0, seeds=1), few := scored(50, 0, seeds=2)], 100) is few


def test_nothing_measured_says_what_to_do():
    with pytest.raises(NothingTried, match="--minutes"):
        best_of([scored(1, 1, seeds=0)], 10)
    with pytest.raises(NothingTried, match="cannot be split"):
        best_of([dataclasses.replace(scored(1, 1, seeds=0), problem="the cohort cannot be split")], 10)


def test_the_verdict_is_chance_until_the_interval_leaves_the_majority():
    assert verdict(0.55, 0.5, 100).at_chance
    assert not verdict(0.55, 0.5, 10_000).at_chance
    assert "will end at chance: 55.0 % of 100 test rows" in verdict(0.55, 0.5, 100).sentence
    assert verdict(0.3, 0.5, 10_000).at_chance


def test_word_counts_read_words_and_not_places():
    train = [Example(row["text"], row["label"]) for row in written_rows(80)]
    asked = [Example(row["text"], row["label"]) for row in written_rows(40, seed=5)]
    answers = predicted(train, asked)
    assert sum(answer == row.label for answer, row in zip(answers, asked, strict=True)) >= 38
    turned = [Example(row.text, "night" if row.label == "day" else "day") for row in train]
    assert predicted(turned, asked) != answers


def test_word_counts_of_a_long_file_that_is_sorted_by_label_know_every_label(monkeypatch):
    monkeypatch.setattr(word_counts, "MAX_ROWS", 60)
    train = sorted((Example(row["text"], row["label"]) for row in written_rows(160)), key=lambda row: row.label)
    asked = [Example(row["text"], row["label"]) for row in written_rows(40, seed=5)]
    answers = predicted(train, asked)
    assert sum(answer == row.label for answer, row in zip(answers, asked, strict=True)) >= 36
    assert predicted(train, asked) == answers


def test_a_members_home_is_recognised(tmp_path):
    for name in ("identity", "ledgers"):
        (tmp_path / "home" / name).mkdir(parents=True)
    (tmp_path / "home" / "texts").mkdir()
    assert in_a_members_home(tmp_path / "home" / "texts" / "rows.csv") == tmp_path / "home"
    assert in_a_members_home(tmp_path / "rows.csv") is None


def test_a_members_home_is_recognised_before_it_has_a_ledger(tmp_path):
    """Enrolment makes the identity alone. The first run makes the rest."""
    identity = Home(tmp_path / "home").identity
    identity.path.mkdir(parents=True)
    assert in_a_members_home(tmp_path / "home" / "rows.csv") is None
    identity.document.write_text("{}")
    assert in_a_members_home(tmp_path / "home" / "rows.csv") == tmp_path / "home"


# ---- the tuned file --------------------------------------------------------------------------------------------------


def tuned(before, text, **tables):
    wanted = before.model_validate({**{name: getattr(before, name) for name in before.model_fields_set}, **tables})
    return wanted, tuned_text(text, before, wanted)


def test_comments_and_untouched_tables_stay(tmp_path):
    before = JobSpec.from_toml(written_job(tmp_path)[0])
    mechanism = before.mechanism.model_copy(update={"noise_multiplier": 4.5, "lot": 60})
    training = before.training.model_copy(update={"learning_rate": 0.25})
    rounds = before.rounds.model_copy(update={"count": 9})
    wanted, text = tuned(before, TOML, mechanism=mechanism, training=training, rounds=rounds)
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert JobSpec.from_toml(again) == wanted
    for kept in ("# What the job is for.", "# Found by the operator.", "noise_multiplier = 4.5\n", "count = 9"):
        assert kept in text
    # The comment was on 0.3.
    assert "# little" not in text


SCHEDULED = TOML.replace(
    "[rounds]",
    """# How it falls.
[training.schedule]
# Like a cosine.
decay = "cosine"
# One is enough.
warmup_rounds = 1

# As many as were asked for.
[rounds]""",
)


@pytest.mark.parametrize(
    ("schedule", "gone"),
    [
        (None, ("schedule", "How it falls", "Like a cosine", "One is enough")),
        (Schedule(decay="linear", warmup_rounds=1), ("Like a cosine",)),
        (Schedule(decay="cosine"), ("One is enough",)),
    ],
)
def test_a_table_inside_a_table_is_tuned_too(schedule, gone):
    """With a header of its own. A search may end without what the operator wrote there."""
    before = JobSpec.model_validate(tomllib.loads(SCHEDULED))
    check_editable(SCHEDULED, before)
    training = before.training.model_copy(update={"learning_rate": 0.25, "schedule": schedule})
    wanted, text = tuned(before, SCHEDULED, training=training)
    assert JobSpec.model_validate(tomllib.loads(text)) == wanted
    assert not [each for each in gone if each in text]
    assert text.count("# As many as were asked for.\n[rounds]") == 1


CLAIMS = """\
# Made for epsilon 4.
# The second line of the same comment.

# For the desk.
schema = 1
name = "tried"
labels = ["day", "night"]
# The list of the town.
vocabulary = {kind = "words", file = "words.txt"}

[mechanism]
# All 10 rounds together cost epsilon 4.
name = "dp-sgd"
# Three.
noise_multiplier = 3.0
# Draws each with probability 13 / N, 15 times a round.
lot = 13
steps = 15

# As many as the budget admits.
[rounds]
# Ten.
count = 10  # rounds
# Without them no round begins.
min_members = 3  # members

[training]
# A gentle one.
learning_rate = 2.0
# Never adaptive.
optimiser = "sgd"
"""


@pytest.mark.parametrize(
    ("tables", "gone"),
    [
        ({"mechanism": {"lot": 18}}, {"epsilon 4", "The second line", "All 10", "Three", "probability"}),
        (
            {"rounds": {"count": 9}},
            {"epsilon 4", "The second line", "All 10", "Three", "probability", "Ten", "# rounds"},
        ),
        ({"training": {"learning_rate": 0.5}}, {"A gentle"}),
        # A key that is left out takes its comment along.
        ({"mechanism": None}, {"epsilon 4", "The second line", "All 10", "Three", "probability"}),
        ({"tuned_on": "own-private"}, set()),
    ],
)
def test_a_comment_on_a_number_that_changed_is_left_out(tmp_path, tables, gone):
    (tmp_path / "job.toml").write_text(CLAIMS)
    before = JobSpec.from_toml(tmp_path / "job.toml")
    changes = {
        name: update
        if isinstance(update, str)
        else NoMechanism()
        if update is None
        else getattr(before, name).model_copy(update=update)
        for name, update in tables.items()
    }
    wanted, text = tuned(before, CLAIMS, **changes)
    (tmp_path / "again.toml").write_text(text)
    assert JobSpec.from_toml(tmp_path / "again.toml") == wanted
    said = {"epsilon 4", "The second line", "For the desk", "the town", "All 10", "Three", "probability", "budget"}
    said |= {"Ten", "# rounds", "Without them", "# members", "A gentle", "Never"}
    assert {each for each in said if each not in text} == gone


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('mechanism = "none"\n', ""),
        ('[mechanism]\nname = "laplace-update"\nepsilon = 2.0\n\n[rounds]\ncount = 3\n', ""),
        ("", ""),
        ("", "\n# the end\n"),
    ],
)
def test_another_mechanism_replaces_the_old_one(tmp_path, old, new):
    head = 'schema = 1\nname = "x"\nlabels = ["a", "b"]\n'
    text = head + (old if not old.startswith("[") else "") + '\n[vocabulary]\nkind = "words"\nfile = "w"\n'
    text += (old if old.startswith("[") else "") + new
    file = tmp_path / "job.toml"
    file.write_text(text)
    before = JobSpec.from_toml(file)
    wanted, made = tuned(
        before,
        text,
        mechanism={"name": "dp-sgd", "noise_multiplier": 2.0},
        model={"freeze_embedding": True, "widths": [1, 2]},
        tuned_on="own-private",
    )
    file.write_text(made)
    assert JobSpec.from_toml(file) == wanted
    assert "epsilon" not in made


def test_a_form_that_is_not_edited_is_refused(tmp_path):
    text = (
        'schema = 1\nname = "x"\nlabels = ["a", "b"]\nmodel.embedding = 8\n[vocabulary]\nkind = "words"\nfile = "w"\n'
    )
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(NotEditable, match="each key on a line of its own"):
        tuned(JobSpec.from_toml(file), text, model={"embedding": 8, "freeze_embedding": True})


HEAD = 'schema = 1\nname = "x"\nlabels = ["a", "b"]\n'
WORDS = '[vocabulary]\nkind = "words"\nfile = "w"\n'


@pytest.mark.parametrize(
    ("top", "below"),
    [
        ("model.embedding = 8\n", ""),
        ("model = {embedding = 8}\n", ""),
        ("rounds.count = 3\n", ""),
        ("rounds = {count = 3}\n", ""),
        ("aggregation.coordinate_bound = 2.0\n", ""),
        ("training.epochs = 2\n", ""),
        ('method.name = "fedprox"\n', ""),
        ('mechanism.name = "none"\n', ""),
        ("", "[model]\nwidths = [\n  1,\n  2,\n]\n"),
    ],
    ids=str,
)
def test_a_form_that_is_not_edited_is_found_before_anything_is_tried(tmp_path, top, below):
    file = tmp_path / "job.toml"
    file.write_text(HEAD + top + WORDS + below)
    job = JobSpec.from_toml(file)
    with pytest.raises(NotEditable, match="each key on a line of its own"):
        check_editable(file.read_text(), job)


ROOT = Path(__file__).parents[3]
SHIPPED = [path for path in sorted((ROOT / "examples").rglob("*.toml")) if "[rounds]" in path.read_text()]


def tunable(job):
    try:
        check_job(job)
    except ValueError:
        return False
    return True


def test_the_jobs_that_we_ship_can_be_tuned():
    jobs = {path: JobSpec.from_toml(path) for path in SHIPPED}
    tried = [path for path, job in jobs.items() if tunable(job)]
    assert len(tried) > 5
    for path in tried:
        check_editable(path.read_text(), jobs[path])


@pytest.mark.parametrize(
    "schedule",
    [
        'schedule = {warmup_rounds = 1, decay = "linear"}\n',
        '[training.schedule]\nwarmup_rounds = 1\ndecay = "linear"\n',
    ],
    ids=["inline", "table"],
)
def test_a_schedule_stays_where_the_rate_changes(tmp_path, schedule):
    text = HEAD + WORDS + "[training]\nlearning_rate = 1.0\n" + schedule
    file = tmp_path / "job.toml"
    file.write_text(text)
    before = JobSpec.from_toml(file)
    check_editable(text, before)
    training = before.training.model_copy(update={"learning_rate": 0.25})
    wanted, made = tuned(before, text, training=training)
    file.write_text(made)
    assert JobSpec.from_toml(file) == wanted
    assert schedule in made


def test_a_recipe_is_described_in_a_line(tmp_path):
    job = JobSpec.from_toml(written_job(tmp_path)[0])
    assert described(job) == "dp-sgd noise 0.3, clip 1, lot 20, 2 x 6 steps, sgd 2"
