"""Jobs whose model writes: their templates are data, they have no labels, and nothing that needs labels."""

import re
import tomllib

import pytest
from pydantic import ValidationError

from tacit.documents import sentence_of
from tacit.generation import CAUSAL_FAMILIES, TEMPLATES, DialogueTemplate, Generate, TemplatePiece, parse_around
from tacit.job import JobDocument, JobSpec
from tacit.prompt import PromptedModel, reads_pairs, writes
from tests.support.fleet import job_document
from tests.support.places import ROOT

MODEL = {
    "architecture": "prompted",
    "base": "models/small",
    "injection": "lora",
    "task": {"name": "generate", "template": "chatml"},
}
BASE = {"schema": 1, "name": "desk", "model": MODEL}


def model(**changes):
    return {**MODEL, **changes}


def said(**changes):
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate({**BASE, **changes})
    return sentence_of(refused.value)


def document(**changes):
    made = job_document().model_dump(mode="json")
    table = {**MODEL, "base": None, "config": {"model_type": "llama"}, "backbone": "0" * 64}
    return JobDocument.model_validate({**made, "labels": [], "model": table, **changes})


def test_a_job_that_writes_has_no_labels_in_its_file_and_its_document():
    spec = JobSpec.model_validate(BASE)
    assert (spec.labels, writes(spec.model), reads_pairs(spec.model)) == ((), True, False)
    made = document()
    assert JobDocument.from_json(made.canonical()) == made
    assert made.labels == ()
    assert not writes(job_document().model)


def test_a_document_holds_the_template_itself():
    task = document().model.task
    assert task.template == TEMPLATES["chatml"]
    assert (task.template_name, task.max_new_tokens) == ("chatml", 64)
    assert b"<|im_start|>" in document().canonical()
    plain = Generate(template="plain")
    assert plain.ended("</s>").template.end == "</s>"
    assert plain.ended("</s>").template_name == "plain"
    assert task.ended("</s>").template_name == "own"
    assert Generate(template={"first": "{<s>}"}).template_name == "own"


@pytest.mark.parametrize("family", sorted(CAUSAL_FAMILIES))
@pytest.mark.parametrize("injection", ["lora", "prompt-tuning", "prefix-tuning"])
def test_causal_families_write(family, injection):
    assert writes(document(model={**MODEL, "base": None, "config": {"model_type": family}, "backbone": "0" * 64}).model)
    assert writes(PromptedModel.model_validate(model(injection=injection)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labels": ["a", "b"]}, "labels: a model that writes chooses no label; leave this key out"),
        ({"vocabulary": {"kind": "words", "file": "w.txt"}}, "vocabulary: a prompted model uses its base's tokenizer"),
        ({"method": "fedvocab"}, "vocabulary: with fedvocab|method: fedvocab keeps parts"),
        *(
            ({"model": model(injection=name)}, f'model: injection: "{name}" is not for models that write')
            for name in ("p-tuning", "bitfit", "none")
        ),
        (
            {"model": model(injection="none", onnx="int8")},
            'injection: "none" is not for models that write',
        ),
        ({"model": model(onnx="int8")}, "onnx: a model that writes trains with torch alone"),
        ({"training": {"logit_adjustment": True}}, "training.logit_adjustment"),
        ({"corpus": {"texts": 10}}, "corpus"),
        (
            {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0}, "training": {"packing": True}},
            "training: packing: rows are never packed, since packed rows see each other and cannot be clipped apart",
        ),
        (
            {"mechanism": {"name": "gaussian-update", "noise_multiplier": 1, "clip": 1}, "metrics": {}},
            "metrics",
        ),
        ({"audit": {"canaries": 8}}, "audit"),
        ({"model": model(task={"name": "generate"})}, "template: missing; name one"),
        ({"model": model(task="generate")}, "template: missing; name one"),
        (
            {"model": model(task={"name": "generate", "template": "jinja"})},
            "template: 'jinja' is not one of chatml, llama3, mistral, plain",
        ),
        (
            {"model": model(task={"name": "generate", "template": "chatml", "verbaliser": {}})},
            "generate has no such key",
        ),
        (
            {"model": model(task={"name": "generate", "template": {"user": {"before": "{{ x }}"}}})},
            "a brace is open",
        ),
        (
            {"model": model(task={"name": "generate", "template": {"user": {"before": "a}"}}})},
            "a brace is open; {TOKEN} names a special token",
        ),
        (
            {"model": model(task={"name": "generate", "template": {"user": {"before": "{}"}}})},
            "names no special token",
        ),
        ({"model": model(task={"name": "head"})}, "labels: missing; it has no default"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(changes, sentence):
    found = said(**changes)
    assert any(each in found for each in sentence.split("|")), found


def test_metrics_and_audits_are_refused_for_their_own_reasons():
    noised = {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0}}
    plain = {"name": "x", "labels": ["a", "b"], "vocabulary": {"kind": "words", "file": "w.txt"}, "schema": 1}
    metrics, audit = {"noise_multiplier": 10.0}, {}
    for table in ({"metrics": metrics}, {"audit": audit}):
        try:
            JobSpec.model_validate({**plain, **noised, **table})
        except ValidationError as error:
            raise AssertionError(sentence_of(error)) from None
    assert "they count right labels" in said(**noised, metrics=metrics)
    assert "texts with a label" in said(**noised, audit=audit)


@pytest.mark.parametrize(
    ("config", "task", "sentence"),
    [
        ("bert", MODEL["task"], "a bert does not write"),
        ("t5", MODEL["task"], "a t5 does not write"),
        ("llama", {"name": "head"}, "a llama writes"),
        ("gpt2", {"name": "cloze", "verbaliser": {"a": ["x"], "b": ["y"]}}, "a gpt2 writes"),
    ],
)
def test_only_causal_families_write_and_they_do_nothing_else(config, task, sentence):
    with pytest.raises(ValidationError) as refused:
        PromptedModel.model_validate(
            {**MODEL, "base": None, "config": {"model_type": config}, "backbone": "0" * 64, "task": task}
        )
    assert sentence in sentence_of(refused.value)


def test_what_stands_around_a_turn_is_text_and_special_tokens():
    assert parse_around("{<s>}[INST] ") == (TemplatePiece("<s>", True), TemplatePiece("[INST] ", False))
    assert parse_around("") == ()
    assert DialogueTemplate(first="{<s>}", end="</s>").specials == ("<s>", "</s>")
    assert TEMPLATES["chatml"].specials == ("<|im_start|>", "<|im_end|>")


def test_the_page_shows_a_template_that_is_read():
    page = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text$\n(\[model\.task\.template\]\n.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    template = DialogueTemplate.model_validate(tomllib.loads(shown)["model"]["task"]["template"])
    assert (template.roles, template.specials) == (("user", "assistant"), ("<s>", "</s>"))
    names = re.findall(
        r"^\| `([a-z0-9]+)` \| .* \| (?:`(.*)`|the tokenizer's own end token) \|$", page, flags=re.MULTILINE
    )
    assert {name: end.replace("\\|", "|") or None for name, end in names} == {
        name: each.end for name, each in TEMPLATES.items()
    }
