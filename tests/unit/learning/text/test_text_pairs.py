"""Jobs that read pairs of texts: columns of data, rows of ids, refusals before anything leaves, and exports."""

import asyncio
import contextlib
import hashlib
import hmac
import io
import json
import sqlite3
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import secure_agg
from coordinator.cli.model import Material, export_version, load_tools
from edge_client.agent import runner
from edge_client.agent.dry_run import _show, describing, plan_of
from edge_client.agent.exporting import _written
from edge_client.agent.own_model import UNWATCHED, Fetched, own_model
from edge_client.agent.runner import Member, RunOptions, load_member, run_member
from edge_client.cli.predict import predict
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.opening import open_budget
from edge_client.ledger.overlap import digest_of_marks, marks_of
from edge_client.ledger.verification import verify
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import PreparationRefused, Preparer
from export.bundle import make_job_bundle, read_job_bundle
from export.evaluate import evaluate_bundle
from export.onnx import export_model
from export.predictor import Predictor
from learning.backbones.stored import read_backbone
from learning.mechanisms.contribution import segments
from learning.text.cloze import ClozeEncoder
from learning.text.cloze_tokenizer import own_form
from learning.text.corpus import EncodedExamples
from learning.text.data import Rows, read_data, read_examples
from learning.text.encoder import TextEncoder
from learning.text.examples import ColumnMissing, DataInvalid, Example, check_pairs, text_rows
from tacit.documents import DocumentInvalid
from tacit.job import JobSpec
from tacit.messages import Assignment
from tacit.prompt import PromptedModel, parse_template, reads_pairs
from tacit.reason import Reason
from tests.support import party
from tests.support.tiny_models import saved, tokenizer_of
from toolkit.console import CommandFailed

torch.set_num_threads(1)

SECRET = "biopsy Mrs Almeida"
PAIR = "{text}? {mask}, {text_b}"
CLOZE = {"name": "cloze", "template": PAIR, "verbaliser": {"yes": "yes", "no": ["no", "maybe"]}}
HEAD = {"name": "head", "pairs": True}
EXAMPLES = [
    Example("the movie is bad", "no", "a great film"),
    Example("it was great", "yes", "it was good"),
    Example("the film", "no", "first and second"),
    Example("a word", "yes", "word"),
]
ALONE = [Example(each.text, each.label) for each in EXAMPLES]
MECHANISMS = ("none", "dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian")
DP = {"name": "dp-sgd", "noise_multiplier": 4.0, "lot": 4, "steps": 2}
JSONL = "".join(json.dumps({"text": e.text, "text_b": e.text_b, "label": e.label}) + "\n" for e in EXAMPLES)
CSV = "text,label,text_b\n" + "".join(f"{e.text},{e.label},{e.text_b}\n" for e in EXAMPLES)


# Marks of single texts, with the bytes 0 to 31 as key.
MARKS = [-8859092314747491146, -5144469014999869054, -3203394101684669346, 5926456410991405486]
MARKS_DIGEST = "49def0f18724bd439c9f63035f82dd88abbf4916b64cf0e5ce3aec2a25a9efe1"


# ---- columns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", JSONL), ("rows.csv", CSV)], ids=["jsonl", "csv"])
def test_a_second_column_is_read_if_there_is_one(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    assert read_examples(path) == EXAMPLES
    named = tmp_path / f"named-{name}"
    named.write_text(content.replace("text_b", "hypothesis"))
    assert read_examples(named, text_b="hypothesis") == EXAMPLES
    assert read_examples(named) == ALONE
    with pytest.raises(DataInvalid, match=r"no column 'premise'; there are: .*hypothesis.* Name yours with --text-b"):
        read_examples(named, text_b="premise")


def test_a_row_may_lack_a_second_text_unless_the_column_was_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"text_b": "b"}, {"text_b": " "}, {"text_b": None}, {"text_b": 7}, {"text_b": f"{SECRET}\ud800"}, {}]
    path.write_text("".join(json.dumps({"text": "a", "label": "x"} | row) + "\n" for row in rows))
    examples = read_examples(path)
    assert [each.text_b for each in examples] == ["b", *[None] * 5]
    with pytest.raises(DataInvalid, match="line 2: no text in column 'text_b'"):
        read_examples(path, text_b="text_b")
    with pytest.raises(DataInvalid, match=r"5 of 6 rows have no second text in column 'text_b'; .* --text-b"):
        check_pairs(examples)
    with pytest.raises(
        DataInvalid, match=r"no row has a second text in a column 'text_b'; name the column .* --text-b"
    ):
        text_rows(ALONE, pairs=True)
    assert text_rows(examples, pairs=False) == ["a"] * 6
    assert text_rows(EXAMPLES[:1], pairs=True) == [("the movie is bad", "a great film")]


BLANK = "text,label,text_b\n" + "".join(f"{e.text},{e.label}, \n" for e in EXAMPLES)


@pytest.mark.parametrize(
    ("name", "content", "there"),
    [
        pytest.param("rows.csv", CSV, True, id="csv"),
        pytest.param("rows.csv", BLANK, True, id="blank-cells"),
        pytest.param("rows.csv", CSV.replace("text_b", "claim"), False, id="another-header"),
        pytest.param("rows.tsv", "text\tlabel\none\tyes\n", False, id="tsv"),
        pytest.param("rows.jsonl", '{"text": "one", "label": "yes"}\n', True, id="jsonl"),
    ],
)
def test_only_the_header_decides_whether_there_is_a_column(tmp_path, name, content, there):
    path = tmp_path / name
    path.write_text(content)
    rows = read_data(path)
    examples, found = rows.examples, rows.second_column
    assert (examples, found) == (read_examples(path), there)
    if content is not CSV:
        # An error must not call a column missing that is there.
        with pytest.raises(DataInvalid) as error:
            check_pairs(examples, second_column=found)
        assert isinstance(error.value, ColumnMissing) is not there
        assert ("the table has no column 'text_b'" in str(error.value)) is not there


def test_a_column_of_another_name_is_found_if_it_is_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(CSV.replace("text_b", "claim"))
    assert read_data(path, text_b="claim") == Rows(EXAMPLES, True, dialogue_columns=False)
    assert read_data(path) == Rows(ALONE, False, dialogue_columns=False)


def test_a_pair_does_not_print_its_texts():
    assert SECRET not in repr(Example("a", "x", SECRET))


def test_a_member_names_its_column_once(tmp_path):
    identity = party.member(tmp_path / "home", "localhost:7441")
    data = tmp_path / "rows.csv"
    data.write_text(CSV.replace("text_b", "claim"))
    options = {"data": data, "home": identity.home}
    assert load_member(RunOptions(**options, text_b="claim")).examples == EXAMPLES
    assert load_member(RunOptions(**options)).examples == ALONE
    with pytest.raises(CommandFailed, match="no column 'other'"):
        load_member(RunOptions(**options, text_b="other"))


# ---- rows ------------------------------------------------------------------------------------------------------


def head_encoder(family, most=24):
    model = PromptedModel.model_validate({"base": "x", "task": HEAD, "max_tokens": most})
    return ClozeEncoder.of(model, own_form(tokenizer_of(family)))


@pytest.mark.parametrize(
    ("family", "processor"),
    [
        pytest.param("bert", ("TemplateProcessing", "[CLS]", "[SEP]"), id="bert"),
        pytest.param("roberta", ("RobertaProcessing", "<s>", "</s>"), id="roberta"),
    ],
)
def test_a_pair_under_a_head_has_the_librarys_frame(family, processor):
    from tokenizers import Tokenizer, processors

    theirs = Tokenizer.from_buffer(tokenizer_of(family))
    kind, first, last = processor
    frame = [(token, theirs.token_to_id(token)) for token in (first, last)]
    if kind == "RobertaProcessing":
        theirs.post_processor = processors.RobertaProcessing(frame[1], frame[0], add_prefix_space=False)
    else:
        theirs.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=frame
        )
    encoder = head_encoder(family, 64)
    for pair in (("a great film", "it was good"), ("Yes? no", "the movie is terrible"), ("word", "word")):
        expected = theirs.encode(*pair)
        (row,) = encoder.encode([pair])
        assert row[row != encoder.pad_id].tolist() == expected.ids
    assert encoder.separator_id == theirs.token_to_id(last)
    assert encoder.template.slots == ("text", "text_b")


def test_without_pairs_nothing_separates():
    model = PromptedModel.model_validate({"base": "x", "task": "head"})
    assert ClozeEncoder.of(model, own_form(tokenizer_of("bert"))).separator_id is None
    cloze = PromptedModel.model_validate({"base": "x", "task": CLOZE})
    assert ClozeEncoder.of(cloze, own_form(tokenizer_of("bert"))).separator_id is None
    assert (reads_pairs(model), reads_pairs(cloze), reads_pairs(object())) == (False, True, False)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@given(
    pair=st.tuples(
        *[st.one_of(st.text(max_size=60), st.sampled_from(["[SEP] </s>", "{sep}", "word " * 90, "", "</s>" * 9]))] * 2
    )
)
@settings(max_examples=60, deadline=None)
def test_any_pair_keeps_its_frame_and_its_texts_stay_distinguishable(family, pair):
    """A spelled separator is never the separator, or the two texts could no longer be told apart."""
    encoder = head_encoder(family)
    (row,) = encoder.encode([pair])
    whole = row[row != encoder.pad_id].tolist()
    between = 2 if family == "roberta" else 1
    assert len(whole) <= encoder.max_tokens
    assert whole.count(encoder.separator_id) == between + 1
    assert whole[-1] == encoder.separator_id
    at = whole.index(encoder.separator_id)
    assert whole[at : at + between] == [encoder.separator_id] * between


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_under_a_head_the_longer_text_is_cut_first(family):
    encoder = head_encoder(family)
    words = encoder.words()
    for pair in (("great bad", "no " * 90), ("no " * 90, "great bad")):
        (row,) = encoder.encode([pair])
        assert len(row) == encoder.max_tokens
        assert "greatbad" in "".join(words[number] for number in row.tolist()).replace("Ġ", "")


def test_a_pair_in_place_of_one_text_is_refused_and_the_reverse():
    plain = TextEncoder(own_form(tokenizer_of("bert")), 12, 3)
    assert plain.pairs is False
    with pytest.raises(ValueError, match="takes one text for each example; pairs are for prompted models"):
        plain.encode(["alone", ("one", "two")])
    with pytest.raises(ValueError, match="takes a pair of texts"):
        head_encoder("bert").encode(["alone"])


@pytest.mark.parametrize(
    ("task", "said"),
    [
        pytest.param({"name": "head", "pairs": "maybe"}, "task.pairs", id="no-answer"),
        pytest.param({**CLOZE, "pairs": True}, "task.pairs: cloze has no such key", id="cloze"),
        pytest.param({**CLOZE, "template": "{text} {sep} {mask} {text_b}"}, "{sep} is not a slot", id="separator"),
    ],
)
def test_an_impossible_task_says_why(task, said):
    from tacit.documents import sentence_of

    with pytest.raises(ValidationError) as refused:
        PromptedModel.model_validate({"base": "x", "task": task})
    assert said in sentence_of(refused.value)


def test_a_separator_may_only_be_between_two_texts():
    for template in ("{sep}{text}{text_b}", "{text}{sep}", "{text_b}{sep}{text}"):
        with pytest.raises(ValueError, match=r"\{sep\} may only be between \{text\} and \{text_b\}"):
            parse_template(template, mask=False)


# ---- a job -----------------------------------------------------------------------------------------------------


def bundled(folder, task, name, **changes):
    if not (folder / "model").exists():
        saved(folder / "model", "bert")
    model = {"architecture": "prompted", "base": "model", "max_tokens": 24, "task": task}
    whole = {"schema": 1, "name": name, "labels": ["yes", "no"], "mechanism": DP, "model": model}
    make_job_bundle(JobSpec.model_validate(whole | changes), folder, folder / name)
    return read_job_bundle(folder / name)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    none = {"mechanism": "none"}
    single = {**CLOZE, "template": "{text} is {mask}."}
    mechanisms = {
        "gaussian-update": {"name": "gaussian-update", "noise_multiplier": 4.0},
        "laplace-update": {"name": "laplace-update", "epsilon": 1.0, "bound": 1.0},
        "distributed-gaussian": {"name": "distributed-gaussian", "noise_multiplier": 4.0, "clip": 1.0},
    }
    return {
        **{name: bundled(folder, CLOZE, name, mechanism=mechanism) for name, mechanism in mechanisms.items()},
        "cloze": bundled(folder, CLOZE, "cloze"),
        "head": bundled(folder, HEAD, "head"),
        "open": bundled(folder, CLOZE, "open", **none),
        "single": bundled(folder, single, "single", **none),
    }


class Watcher:
    def training(self, *_):
        """Ignores progress."""

    def reading(self, *_):
        pass

    training_failing = training


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def prepare(tmp_path, identity, jobs):
    """Prepares a job with these examples, as a member does."""
    opened = []

    def go(job, examples, **more):
        policy, home = Policy(mechanisms=MECHANISMS), tmp_path / f"home{len(opened)}"
        home.mkdir()
        manager = open_budget(home, identity, policy, [each.texts for each in examples])
        budget = manager.__enter__()
        opened.append(manager)
        preparer = Preparer(
            examples,
            identity.federation,
            identity.member,
            policy,
            budget,
            secure_agg.SystemRandom(),
            BlobCache(home / "cache"),
            "cpu",
            Watcher(),
            Keeper(PrivateStore(home, identity.federation, "data"), examples),
            **more,
        )
        served = {digest: (job.backbone.parent / name).read_bytes() for name, digest in job.document.files.items()}
        served[job.document.digest()] = job.document.canonical()

        async def fetch(digest, into, limit):
            into.write_bytes(served[digest])

        name = job.document.name
        assignment = Assignment(name, 1, job.document.digest(), job.document.weights, 0, 1000)
        try:
            return asyncio.run(preparer.prepare(assignment, fetch))
        except PreparationRefused as refused:
            assert not budget.statement(name).of_job
            return refused

    yield go
    for manager in opened:
        manager.__exit__(None, None, None)


@pytest.mark.parametrize("name", ["cloze", "head", "open"])
def test_members_train_on_pairs(name, jobs, prepare):
    prepared = prepare(jobs[name], EXAMPLES)
    assert np.abs(prepared.update.change).max() > 0
    assert prepared.update.examples == len(EXAMPLES)


@pytest.mark.parametrize("name", ["cloze", "head", "open"])
def test_a_table_without_the_column_is_refused_before_anything_is_spent(name, jobs, prepare):
    refused = prepare(jobs[name], ALONE, second_column=False)
    assert refused.reason == Reason.REASON_DATA_UNSUITABLE
    assert refused.detail.startswith("the job reads pairs of texts, and the member's table has no column of second")
    assert refused.private.endswith("name the column of the second text with --text-b")


def test_rows_without_second_texts_are_refused_if_nothing_hides_a_row(jobs, prepare):
    refused = prepare(jobs["open"], ALONE)
    assert refused.reason == Reason.REASON_DATA_UNSUITABLE
    assert refused.detail.startswith("the job reads pairs of texts, and the member's data has no second text")
    assert refused.private.endswith("name the column of the second text with --text-b")


@pytest.mark.parametrize("name", ["cloze", "head", "gaussian-update", "laplace-update", "distributed-gaussian"])
def test_neighbouring_data_look_alike_from_outside(name, jobs, prepare):
    """The neighbour has one row more, the only one with a second text. Neither the existence of an update nor anything
    of it that goes out without noise may tell them apart.
    """

    def seen(examples):
        with structlog.testing.capture_logs() as logs:
            prepared = prepare(jobs[name], examples)
        assert not isinstance(prepared, PreparationRefused), (prepared.reason, prepared.detail)
        warnings = [each["why"] for each in logs if each["event"] == "examples_left_out"]
        assert np.isfinite(prepared.update.change).all()
        return (
            warnings,
            prepared.update.examples,
            {key: value.shape for key, value in segments(prepared.job, prepared.update).items()},
            prepared.protection.event,
        )

    warnings, *without = seen(ALONE)
    assert [each.split(";")[0] for each in warnings] == [
        "the job reads pairs of texts, and no row has a second text in a column 'text_b'"
    ]
    warnings, *with_one = seen([EXAMPLES[0], *ALONE[1:]])
    assert ["3 of 4 rows have no second text" in each for each in warnings] == [True]
    assert without == with_one
    assert without[0] == len(ALONE)


def test_a_row_without_a_second_text_is_dropped_only_under_noise(jobs, prepare):
    """Without noise it is refused. With noise, a refusal would tell the coordinator about one example."""
    mixed = [*EXAMPLES, Example("alone", "yes")]
    assert prepare(jobs["cloze"], mixed).update.examples == 5
    corpus = EncodedExamples(mixed, jobs["cloze"].document, jobs["cloze"].tokenizer)
    assert corpus.read().usable.tolist() == [0, 1, 2, 3]
    refused = prepare(jobs["open"], mixed)
    assert refused.reason == Reason.REASON_DATA_UNSUITABLE
    assert "1 of 5 rows have no second text" in refused.private
    assert "1" not in refused.detail


def test_a_job_that_reads_one_text_ignores_the_second(jobs, prepare):
    with_second, alone = prepare(jobs["single"], EXAMPLES), prepare(jobs["single"], ALONE)
    assert np.array_equal(with_second.update.change, alone.update.change)
    assert np.abs(alone.update.change).max() > 0


def test_the_order_of_the_two_texts_matters(jobs):
    for name in ("cloze", "head"):
        job = jobs[name]
        turned = [Example(each.text_b or "", each.label, each.text) for each in EXAMPLES]
        ids = [EncodedExamples(each, job.document, job.tokenizer).read().ids for each in (EXAMPLES, turned)]
        assert ids[0].shape != ids[1].shape or not np.array_equal(*ids)


def test_a_dry_run_says_that_it_reads_pairs_and_what_is_missing(jobs, identity, tmp_path, capsys):
    def plan(job, examples, **more):
        member = Member(tmp_path, identity, Policy(mechanisms=("none", "dp-sgd")), examples, "cpu", **more)
        found = plan_of(job.document, job.manifest, member)
        _show(found, member)
        return found, capsys.readouterr().out

    found, said = plan(jobs["head"], EXAMPLES)
    assert (found.refusals, found.as_json()["reads_pairs"]) == ((), True)
    assert "reads pairs: the text and the second text of each row" in said
    found, said = plan(jobs["head"], ALONE, second_column=False)
    assert [each for each in found.refusals if "--text-b" in each]
    assert "refused: the job reads pairs of texts" in said
    assert found.notes == ()
    found, said = plan(jobs["open"], [*EXAMPLES, ALONE[0]])
    assert [each for each in found.refusals if "1 of 5 rows have no second text" in each]
    assert found.notes == ()
    found, said = plan(jobs["single"], ALONE)
    assert (found.refusals, found.as_json()["reads_pairs"]) == ((), False)
    assert "reads pairs" not in said


@pytest.mark.parametrize(
    ("examples", "said", "left"),
    [
        pytest.param([*EXAMPLES, ALONE[0]], "1 of 5 rows have no second text", True, id="a-row-without-a-second-text"),
        pytest.param([*EXAMPLES, Example("a", "maybe", "b")], "'maybe' (1 rows)", True, id="a-foreign-label"),
        pytest.param(ALONE, "no row has a second text", False, id="no-second-text"),
    ],
)
def test_a_dry_run_notes_what_the_member_would_leave_out(
    examples, said, left, jobs, prepare, identity, tmp_path, capsys
):
    member = Member(tmp_path, identity, Policy(mechanisms=("none", "dp-sgd")), examples, "cpu")
    plan = plan_of(jobs["head"].document, jobs["head"].manifest, member)
    _show(plan, member)
    shown = capsys.readouterr().out
    assert (plan.refusals, plan.as_json()["takes_part"]) == ((), True)
    assert said in plan.notes[0]
    assert len(plan.notes) == 1 + (not left)
    assert plan.as_json()["notes"] == [*plan.notes]
    assert "refused" not in shown
    assert plan.notes[0].endswith("; until then such rows are skipped, and the member takes part")
    assert f"  note: {plan.notes[0]}" in shown
    assert ("note: no row is left" in shown) is not left
    # The run does what the dry run said.
    assert prepare(jobs["head"], examples).update.examples == len(examples)


# ---- the ledger ------------------------------------------------------------------------------------------------


@pytest.fixture
def charged(tmp_path, monkeypatch):
    """Starts a member up to the connection, and gives its warnings, preparer, budget and marks."""
    identity = party.member(tmp_path / "home", "localhost:7441")

    def start(name, content, suffix="csv", **options):
        data = tmp_path / f"{name}.{suffix}"
        data.write_text(content)
        begun = []

        class Nobody:
            def __init__(self, identity, environment, journal, preparer, budget, *_, **__):
                begun.extend((preparer, budget))

            async def run(self):
                """There is no coordinator."""

        monkeypatch.setattr(runner, "Agent", Nobody)
        monkeypatch.setattr(runner, "configure", lambda *_: None)
        with structlog.testing.capture_logs() as logs:
            told = RunOptions(data=data, home=identity.home, data_name=name, **options)
            run_member(told, describe=describing(told))
        warnings = [(each["other"], each["examples"]) for each in logs if each["event"] == "data_in_two_ledgers"]
        ledger = ledger_path(identity.home, name)
        assert verify(ledger).sound
        with contextlib.closing(sqlite3.connect(ledger)) as opened:
            marks = frozenset(mark for (mark,) in opened.execute("SELECT mark FROM marks"))
        preparer, budget = begun
        return SimpleNamespace(warnings=warnings, preparer=preparer, budget=budget, marks=marks)

    return start


def test_a_common_pair_is_an_overlap_and_a_common_premise_is_not(charged):
    rows = "text,label,text_b\n" + "the film,yes,{}\n"
    one = charged("one", rows.format("it was good"))
    other = charged("other", rows.format("it was bad"))
    assert (one.warnings, other.warnings) == ([], [])
    assert one.budget._data != other.budget._data
    again = charged("again", rows.format("it was good"))
    assert again.warnings == [("one", 1)]
    assert again.budget._data == one.budget._data
    # A row with that single text is another row.
    assert charged("single", "text,label\nthe film,yes\n").warnings == []


def test_a_row_of_one_text_is_marked_by_the_documented_formula(charged, tmp_path):
    found = charged("single", "text,label\nthe film,yes\nGrüße,no\n")
    key = (tmp_path / "home" / "ledgers" / "marks.key").read_bytes()
    marks = sorted(
        int.from_bytes(hmac.digest(key, text.encode(), "sha256")[:8], "big", signed=True) & ~1
        for text in ("the film", "Grüße")
    )
    assert sorted(found.marks) == marks
    digest = hashlib.sha256(b"".join(mark.to_bytes(8, "big", signed=True) for mark in marks)).digest()
    assert found.budget._data == digest


def test_marks_and_their_digest_are_pinned():
    """A ledger compares marks of different days, so a changed formula would lose overlaps."""
    found = marks_of(bytes(range(32)), ["the film", "Grüße", "", "a\tb"])
    assert sorted(found.values) == MARKS
    assert digest_of_marks(found.values).hex() == MARKS_DIGEST


@given(rows=st.lists(st.one_of(st.text("ab\xff\0", max_size=3), st.tuples(*[st.text("ab\xff\0", max_size=3)] * 2))))
def test_no_two_rows_have_one_mark(rows):
    assert len(marks_of(bytes(32), rows).values) == len({*rows})


def test_the_preparer_learns_whether_there_is_a_second_column(charged, jobs):
    without = charged("without", "text,label\nthe film,yes\n").preparer
    with pytest.raises(PreparationRefused, match="no column of second texts"):
        without._check_data(jobs["head"].document)
    charged("blank", BLANK).preparer._check_data(jobs["head"].document)
    charged("lines", '{"text": "one", "label": "yes"}\n', "jsonl").preparer._check_data(jobs["head"].document)


def test_the_room_of_a_template_for_two_texts_is_checked_when_bundled(tmp_path):
    with pytest.raises(DocumentInvalid, match=r"leaves 7 of max_tokens = 24 for the text"):
        bundled(tmp_path, {**CLOZE, "template": "the movie was great " * 3 + PAIR}, "narrow")


# ---- what runs -------------------------------------------------------------------------------------------------


def stored(job):
    return read_backbone(job.backbone, job.document.model.config)


@pytest.fixture(scope="module")
def exported(jobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    for name in ("cloze", "head"):
        job = jobs[name]
        rows = text_rows(EXAMPLES, pairs=True)
        report = export_model(
            job.document, job.manifest, job.weights, job.tokenizer, folder / name, rows, backbone=stored(job)
        )
        assert report.max_difference <= 1e-4
    return folder


@pytest.fixture
def run(capsys, monkeypatch):
    def command(*arguments, stdin=""):
        app = typer.Typer()
        app.command()(predict)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin.encode()), isatty=lambda: False))
        app(args=[str(argument) for argument in arguments], standalone_mode=False)
        return capsys.readouterr().out.splitlines()

    return command


@pytest.mark.parametrize("name", ["cloze", "head"])
def test_every_way_to_give_pairs_gives_the_same_lines(name, exported, run, tmp_path):
    predictor = Predictor.load(exported / name)
    assert predictor.pairs
    rows = text_rows(EXAMPLES, pairs=True)
    expected = [f"{each.label:<3}  {each.probability:.4f}" for each in predictor.predict(rows)]
    assert len({*expected}) > 1
    flat = [text for pair in rows for text in pair]
    lines = "\n\n".join("\t".join(pair) for pair in rows) + "\n"
    (tmp_path / "rows.csv").write_text(CSV.replace("text_b", "claim"))
    (tmp_path / "rows.txt").write_text(lines)
    bundle = ("--bundle", exported / name)
    assert run(*bundle, *flat) == expected
    assert run(*bundle, stdin=lines) == expected
    assert run(*bundle, "--file", tmp_path / "rows.txt") == expected
    assert run(*bundle, "--file", tmp_path / "rows.csv", "--text-b", "claim") == expected


def test_an_incomplete_pair_is_refused(exported, run, tmp_path):
    bundle = ("--bundle", exported / "head")
    with pytest.raises(CommandFailed, match="labels pairs, and there are 3 texts"):
        run(*bundle, "one", "two", "three")
    for lines in ("one\ttwo\nalone\n", "one\ttwo\nalone\t \n"):
        with pytest.raises(CommandFailed, match=r"standard input, line 2: .* with a tab between"):
            run(*bundle, stdin=lines)
    (tmp_path / "rows.jsonl").write_text('{"text": "alone"}\n')
    with pytest.raises(CommandFailed, match=r"no row has a second text in a column 'text_b'; .*--text-b"):
        run(*bundle, "--file", tmp_path / "rows.jsonl")


def test_an_evaluation_needs_the_second_column_too(exported):
    found = evaluate_bundle(exported / "head", EXAMPLES)
    predicted = Predictor.load(exported / "head").predict(text_rows(EXAMPLES, pairs=True))
    right = sum(each.label == example.label for each, example in zip(predicted, EXAMPLES, strict=True))
    assert found.accuracy == right / len(EXAMPLES)
    with pytest.raises(DataInvalid, match="--text-b"):
        evaluate_bundle(exported / "head", ALONE)


def test_a_member_that_left_out_rows_exports_on_the_others(jobs, identity, tmp_path):
    """Even if the first rows, which a comparison uses, are all left out."""
    job = jobs["cloze"]
    document, digest = job.document, job.document.weights
    found = Fetched(document, job.manifest, job.weights, 0, digest, job.tokenizer, {}, {}, stored(job))

    def export(examples, out):
        member = Member(tmp_path, identity, Policy(mechanisms=("dp-sgd",)), examples, "cpu")
        return _written(own_model(found, member, epochs=0), member, out, False, UNWATCHED)

    assert export([*ALONE * 20, *EXAMPLES], tmp_path / "some").report.texts == len(EXAMPLES)
    assert Predictor.load(tmp_path / "some").pairs
    with pytest.raises(CommandFailed, match="no row has a second text in a column 'text_b'"):
        export(ALONE, tmp_path / "none")


def test_the_operators_export_generates_pairs_if_none_are_given(jobs, tmp_path):
    job = jobs["head"]
    document, digest = job.document, job.document.weights
    material = Material(document, job.manifest, job.tokenizer, job.weights, 0, digest, job.backbone)
    assert export_version(load_tools(), material, tmp_path / "made-up", []).texts == 24
    assert Predictor.load(tmp_path / "made-up").facts.template == "{text}{sep}{text_b}"
    with pytest.raises(CommandFailed, match="--text-b"):
        export_version(load_tools(), material, tmp_path / "alone", ALONE)
