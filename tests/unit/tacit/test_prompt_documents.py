"""Prompted models as a job states them: which are accepted, and the errors of those that are not."""

import json
import re
import tomllib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tacit.documents import sentence_of
from tacit.job import JobDocument
from tacit.method import FedAvg, FedProx, FedRecon, FedVocab, LgFedAvg
from tacit.prompt import (
    PLAIN,
    Cloze,
    Head,
    Injection,
    LoRA,
    Piece,
    PrefixTuning,
    PromptedModel,
    PromptTuning,
    PTuning,
    check_prompted_method,
    parse_template,
)
from tests.support.fleet import job_document
from tests.support.places import ROOT

VERBALISER = {"positive": ["great", "good"], "negative": "bad"}
CLOZE = {"name": "cloze", "verbaliser": VERBALISER}
PAGE = (ROOT / "docs" / "prompts.md").read_text(encoding="utf-8")
COMMIT = "a1" * 20
CONFIG = {"model_type": "bert", "hidden_size": 16, "layer_norm_eps": 1e-12}


def refused(**table) -> str:
    with pytest.raises(ValidationError) as error:
        PromptedModel.model_validate(table)
    return sentence_of(error.value)


# ---- templates -------------------------------------------------------------------------------------------------


def test_a_template_is_split_at_its_slots_and_records_white_space():
    assert parse_template(" {text} is {mask}. ").pieces == (
        Piece("text", "", spaced=False),
        Piece("", "is", spaced=True),
        Piece("mask", "", spaced=True),
        Piece("", ".", spaced=False),
    )
    pair = parse_template("({text})?{mask},\n {text_b}")
    assert [(piece.slot or piece.text, piece.spaced) for piece in pair.pieces] == [
        ("(", False),
        ("text", False),
        (")?", False),
        ("mask", False),
        (",", False),
        ("text_b", True),
    ]
    assert pair.slots == ("text", "text_b")
    assert parse_template("{mask} {text}").pieces[1].spaced
    assert PLAIN.slots == ("text",)
    assert not PLAIN.has_mask


@given(st.lists(st.sampled_from([" ", "  ", "\n", "\t \t"]), min_size=2, max_size=2))
def test_the_amount_of_white_space_does_not_matter(spaces):
    first, second = spaces
    assert parse_template(f"{first}{{text}}{first}is{second}{{mask}}.") == parse_template("{text} is {mask}.")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        pytest.param("{text}", "{mask} is missing", id="no-mask"),
        pytest.param("{mask} and {mask}: {text}", "{mask} occurs 2 times", id="two-masks"),
        pytest.param("{text} {text} {mask}", "{text} occurs 2 times", id="two-texts"),
        pytest.param("It is {mask}.", "this one holds neither", id="no-text"),
        pytest.param("{text_b} {mask}", "this one holds {text_b} alone", id="half-a-pair"),
        pytest.param("{text} {text_b} {text_b} {mask}", "{text_b} occurs 2 times", id="two-second-texts"),
        pytest.param("{first} {mask} {second}", "{first} is not a slot", id="other-names"),
        pytest.param("{text}{sep}{text_b} {mask}", "{sep} is not a slot", id="separator"),
        pytest.param("{text} is {label}", "{label} is not a slot", id="unknown-slot"),
        pytest.param("{text} is {mask} {}", "{} is not a slot", id="empty-slot"),
        pytest.param("{text} is [MASK] {mask}", "write {mask}", id="literal-of-bert"),
        pytest.param("{text} is <MASK>", "write {mask}", id="literal-of-roberta"),
        pytest.param("{text} is <extra_id_0>", "write {mask}", id="literal-of-t5"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(template, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_template(template)
    assert "task.template" in refused(base="x", task={**CLOZE, "template": template})


def test_a_head_has_no_mask():
    with pytest.raises(ValueError, match="nothing fills in a word"):
        parse_template("{text} {mask}", mask=False)


# ---- models ----------------------------------------------------------------------------------------------------


def a_job(task):
    model = {"architecture": "prompted", "config": CONFIG, "backbone": "ab" * 32, "task": task}
    return JobDocument.model_validate(job_document().model_dump() | {"model": model})


@pytest.mark.parametrize("task", ["head", {"name": "head"}, {"name": "head", "pairs": False}], ids=str)
def test_a_job_with_a_head_reads_single_texts_by_default(task):
    job = a_job(task)
    assert b'"layers":null,"name":"head","pairs":false,"start":"random"}' in job.canonical()
    assert JobDocument.from_json(job.canonical()) == job


def test_a_job_with_a_head_can_read_pairs():
    job = a_job({"name": "head", "pairs": True})
    assert b'"layers":null,"name":"head","pairs":true,"start":"random"}' in job.canonical()
    assert JobDocument.from_json(job.canonical()) == job
    assert JobDocument.from_json(job.canonical()).model.template.pairs


def test_an_operators_table_gets_its_defaults():
    model = PromptedModel.model_validate({"base": "minilm", "task": CLOZE})
    assert model.injection == PromptTuning(tokens=20)
    assert isinstance(model.task, Cloze)
    assert model.task.template == "{text} is {mask}."
    assert model.task.verbaliser == {"positive": ("great", "good"), "negative": ("bad",)}
    assert model.label_words(["negative", "positive"]) == (("bad",), ("great", "good"))
    assert not model.freeze_embedding
    plain = PromptedModel.model_validate({"base": "minilm", "task": "head", "injection": "lora"})
    assert plain.task == Head()
    assert plain.injection == LoRA(rank=8, alpha=16)
    assert plain.template == PLAIN
    assert plain.label_words(["a", "b"]) is None


@pytest.mark.parametrize(
    "injection",
    [
        pytest.param(PromptTuning(tokens=5), id="prompt-tuning"),
        pytest.param(PTuning(tokens=3, encoder="lstm", hidden=8), id="p-tuning"),
        pytest.param(PrefixTuning(tokens=3, hidden=8), id="prefix-tuning"),
        pytest.param(PrefixTuning(), id="prefix-tuning-free"),
        pytest.param(LoRA(rank=4, alpha=4), id="lora"),
    ],
)
def test_a_document_reads_back_unchanged(injection):
    model = PromptedModel.model_validate(
        {"config": CONFIG, "backbone": "ab" * 32, "hub": f"people/bert@{COMMIT}", "injection": injection, "task": CLOZE}
    )
    text = json.dumps(model.model_dump(mode="json"), sort_keys=True)
    again = PromptedModel.model_validate(json.loads(text))
    assert again == model
    assert again.backbone == b"\xab" * 32
    assert json.dumps(again.model_dump(mode="json"), sort_keys=True) == text


@pytest.mark.parametrize(
    ("table", "said"),
    [
        pytest.param({}, "needs a base", id="nothing"),
        pytest.param(
            {"base": "x", "config": CONFIG, "backbone": "00" * 32},
            "do not write config and backbone by hand",
            id="both",
        ),
        pytest.param({"config": CONFIG}, "go together", id="no-digest"),
        pytest.param({"backbone": "00" * 32}, "go together", id="no-config"),
        pytest.param({"base": "x", "backbone": "12"}, "64 hexadecimal digits", id="no-digest-at-all"),
        pytest.param({"base": "x", "hub": f"people/bert@{COMMIT}"}, "leave it out and name the base", id="hub-by-hand"),
        pytest.param(
            {"config": CONFIG, "backbone": "00" * 32, "hub": f"../bert@{COMMIT}"}, "hub: ", id="hub-as-a-path"
        ),
        *(
            pytest.param(
                {"config": CONFIG, "backbone": "00" * 32, "hub": hub},
                "names no commit, and a branch or tag can move; write owner/name@COMMIT",
                id=f"hub-without-a-commit-{number}",
            )
            for number, hub in enumerate(("people/bert", "people/bert@main", "people/bert@abc123"))
        ),
        pytest.param({"base": "x", "injection": "adapter"}, "'adapter' is not one of prompt-tuning", id="injection"),
        pytest.param(
            {"base": "x", "injection": {"name": "lora", "tokens": 3}},
            "injection.tokens: lora has no such key",
            id="key",
        ),
        pytest.param({"base": "x", "injection": {"name": "prompt-tuning", "tokens": 0}}, "injection", id="no-tokens"),
        pytest.param({"base": "x", "task": "guess"}, "'guess' is not one of cloze, head", id="task"),
        pytest.param({"base": "x", "task": {"name": "cloze"}}, "task.verbaliser: missing", id="no-words"),
        pytest.param({"config": {"a": {"b": 1}}, "backbone": "00" * 32}, "a must be a word, a number", id="nested"),
        pytest.param(
            {"config": {"model_type": "t5"}, "backbone": "00" * 32, "task": "head"},
            "does not work with t5",
            id="t5-head",
        ),
    ],
)
def test_an_invalid_model_is_refused_with_the_reason(table, said):
    assert said in refused(**{"task": CLOZE, **table})


@pytest.mark.parametrize(
    ("verbaliser", "said"),
    [
        pytest.param({"a": ["x"], "b": []}, "b has no words", id="empty"),
        pytest.param({"a": ["x"], "b": ["y", "x"]}, "'x' is listed under b and under a", id="under-two"),
        pytest.param({"a": ["x", "x"], "b": ["y"]}, "'x' is listed under a twice", id="twice"),
        pytest.param({"a": ["x"]}, "must have 2 entries", id="one-label"),
        pytest.param(["x"], "must be a table of label", id="no-table"),
        pytest.param({"a": ["x"], "b": [" "]}, "verbaliser.b.0", id="blank"),
        pytest.param(
            {"a": ["x"], "b": [str(at) for at in range(101)]}, "must have at most 100 entries, has 101", id="too-many"
        ),
    ],
)
def test_an_invalid_verbaliser_is_refused_with_the_reason(verbaliser, said):
    assert said in refused(base="x", task={"name": "cloze", "verbaliser": verbaliser})


def test_the_verbaliser_has_exactly_the_jobs_labels():
    model = PromptedModel.model_validate({"base": "x", "task": CLOZE})
    with pytest.raises(ValueError, match="no words for the label 'neutral'"):
        model.label_words(["positive", "negative", "neutral"])
    with pytest.raises(ValueError, match="'negative' is not a label of this job"):
        model.label_words(["positive"])


@pytest.mark.parametrize("method", [FedVocab(), LgFedAvg(), FedRecon()], ids=lambda method: method.name)
def test_a_method_that_keeps_parts_private_is_refused(method):
    with pytest.raises(ValueError, match=f"{method.name} keeps parts .* use fedavg or fedprox"):
        check_prompted_method(method)


def test_the_methods_that_share_everything_are_accepted():
    for method in (FedAvg(), FedProx()):
        check_prompted_method(method)


# ---- the page --------------------------------------------------------------------------------------------------


def test_the_job_on_the_page_has_a_valid_model():
    (shown,) = re.findall(r"^```(?:text|toml)\n(schema = 1.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    job = tomllib.loads(shown)
    model = PromptedModel.model_validate(job["model"])
    assert model.label_words(job["labels"]) == (("great", "good"), ("terrible", "bad"))


def test_the_page_names_every_key_and_every_injection():
    written = {name for line in PAGE.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
    assert written >= PromptedModel.model_fields.keys()
    for kind in get_args(get_args(Injection)[0]):
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f'| `"{kind.model_fields["name"].default}"`')]
        assert set(re.findall(r"`(\w+)`", line)) == kind.model_fields.keys() - {"name"}
