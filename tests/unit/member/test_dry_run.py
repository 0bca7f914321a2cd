"""`edge_client run --dry-run`: what it says of the bytes is what a masked vector has."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.data import Example
from edge_client.dry_run import Plan, _show, plan_of
from edge_client.home import MemberIdentity
from edge_client.privacy.policy import Policy
from edge_client.runner import Member
from secure_agg import pack_in_place
from tacit.job import JobDocument
from tacit.manifest import Manifest, Tensor
from tacit.vector import layout_of
from tests.support import party
from tests.support.fleet import job_document

MANIFEST = Manifest(tensors=(Tensor(name="output.weight", shape=(3, 1000)), Tensor(name="output.bias", shape=(7,))))


def a_job(**changes: Any) -> JobDocument:
    base = json.loads(job_document(min_members=3, target_members=100).canonical())
    return JobDocument.model_validate(base | {"values": MANIFEST.values} | changes)


@pytest.fixture
def member(tmp_path: Path) -> Member:
    party.member_home(tmp_path, "localhost:7441")
    identity = MemberIdentity.load(tmp_path)
    return Member(tmp_path, identity, Policy(mechanisms=("none", "dp-sgd")), [Example("one", "a")] * 20, "cpu")


def sent(job: JobDocument, members: int) -> int:
    """Bytes of a masked vector as it is packed for the wire."""
    layout = layout_of(job, members)
    return len(pack_in_place(np.zeros(layout.values, np.uint32), layout.bits))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation": {"bits": 25}},
        {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0}},
        {"mechanism": {"name": "gaussian-update", "noise_multiplier": 1.0}},
    ],
    ids=str,
)
def test_the_bytes_are_those_of_a_packed_vector(changes: dict[str, Any]) -> None:
    job = a_job(**changes)
    told = Plan(job, MANIFEST, ()).as_json()
    assert told["bytes_a_round"] == sent(job, 3) < 4 * MANIFEST.values
    assert told["most_bytes_a_round"] == sent(job, 100)
    assert sum(told["segments"].values()) == layout_of(job, 3).values


def test_tensors_are_shown_with_their_values_and_the_vector_with_its_bytes(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    job = a_job()
    _show(plan_of(job, MANIFEST, member), member)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["output.weight", "3", "x", "1000", "3,000", "values"] in lines
    assert ["output.bias", "7", "7", "values"] in lines
    assert ["weight,", "loss_sum,", "correct,", "count", "1", "each", "4", "values"] in lines
    (told,) = (" ".join(line) for line in lines if line[:3] == ["bytes", "a", "round:"])
    few, many = (layout_of(job, members).bits for members in (3, 100))
    assert told == (
        f"bytes a round: {sent(job, 3):,} in a cohort of 3 ({few} bits a value), "
        f"{sent(job, 100):,} in a cohort of 100 ({many} bits a value)"
    )
    assert few < many


def test_a_job_that_sends_nothing_but_the_change_shows_nothing_else(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    _show(plan_of(a_job(mechanism={"name": "dp-sgd", "noise_multiplier": 1.0}), MANIFEST, member), member)
    assert "each" not in capsys.readouterr().out


def test_a_dry_run_says_that_a_vocabulary_is_not_the_members_own(member: Member) -> None:
    strict = replace(member, policy=Policy(mechanisms=("none",), vocabularies=("own",)))
    words = {"vocabulary": {"kind": "words"}, "tokenizer": None}
    start = {"private": {"manifest": "00" * 32, "weights": "00" * 32, "values": 3}}
    public = plan_of(a_job(method="fedvocab", **start), MANIFEST, strict).as_json()
    assert not public["takes_part"]
    (refusal,) = public["refusals"]
    assert refusal.startswith("vocabularies: the job's vocabulary is public, the policy admits own; ")
    own = plan_of(a_job(method="fedvocab", **words), MANIFEST, strict).as_json()
    assert (own["takes_part"], own["refusals"]) == (True, [])


def test_a_member_of_one_label_hears_that_it_teaches_an_adjusted_job_nothing(member: Member) -> None:
    job = a_job()
    adjusted = a_job(training=job.training.model_copy(update={"logit_adjustment": True}).model_dump())
    label, other = job.labels[:2]
    rows = [Example("one", label)] * 19
    for document, last, notes in ((adjusted, label, 1), (adjusted, other, 0), (job, label, 0)):
        found = plan_of(document, MANIFEST, replace(member, examples=[*rows, Example("two", last)])).notes
        assert len(found) == notes
    (note,) = plan_of(adjusted, MANIFEST, replace(member, examples=rows)).notes
    assert note.startswith(
        f"all of your rows have the label {label}: with adjusted logits they teach the model nothing"
    )
