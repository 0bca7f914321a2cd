"""Tests of `edge_client run --dry-run`: bytes, epsilon, the data, and a table of vectors."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.agent.dry_run import Plan, Reading, _show, plan_of
from edge_client.agent.runner import Member, RunOptions, Table, load_member
from edge_client.identity.home import MemberIdentity
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore, StoreKey
from edge_client.session.keeping import Keeper
from learning.accounting.calibration import epsilon_at_gate, repeated
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.accounting.planning import cost_of_metrics, nothing_measured
from learning.mechanisms.banded import best_coefficients
from learning.mechanisms.protection import protection_of
from learning.text.coverage import Coverage
from learning.text.encoder import word_tokenizer
from learning.text.examples import Example
from secure_agg import pack_in_place
from tacit.attempt import AttemptId
from tacit.job import JobDocument
from tacit.manifest import Manifest, Tensor
from tacit.mechanism import DpSgd
from tacit.messages import Assignment
from tacit.rounding import rounded_up
from tacit.vector import layout_of
from tests.support import party
from tests.support.fleet import job_document
from toolkit.console import CommandFailed

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
    """Returns the bytes of a masked vector, packed for the wire."""
    layout = layout_of(job, members)
    return len(pack_in_place(np.zeros(layout.values, np.uint32), layout.bits))


def test_correlated_noise_is_shown_with_its_memory_and_the_rounds_that_may_fail(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    mechanism = {"name": "dp-sgd", "noise_multiplier": 5.0, "steps": 3, "coefficients": best_coefficients(64, 90)}
    job = a_job(mechanism=mechanism | {"spare_rounds": 2}, rounds={"count": 30, "min_members": 3, "target_members": 9})
    _show(plan_of(job, MANIFEST, member), member)
    shown = capsys.readouterr().out
    # 63 rows of 8 bytes for each of 3,007 values.
    assert MANIFEST.values == 3_007
    assert "its last rows of noise take 1.5 MB of memory" in shown
    # Two classes of 64 steps: 128 steps for 90.
    assert "at most 12 rounds fail after you sent your vector" in shown
    # The job is one event, so no round has a price of its own.
    plan = plan_of(job, MANIFEST, member)
    assert plan.epsilon_of_all_rounds is not None
    price = f"epsilon {rounded_up(plan.epsilon_of_all_rounds):g} for the job"
    assert f"{price}, charged before its first round, by dp-sgd; the policy's limit" in shown
    assert "epsilon a round" not in shown
    assert " a round, " not in shown


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
def test_the_bytes_shown_are_those_of_a_packed_vector(changes: dict[str, Any]) -> None:
    job = a_job(**changes)
    told = Plan(job, MANIFEST, ()).as_json()
    assert told["bytes_a_round"] == sent(job, 3) < 4 * MANIFEST.values
    assert told["max_bytes_a_round"] == sent(job, 100)
    assert sum(told["segments"].values()) == layout_of(job, 3).values


def test_it_shows_values_of_each_tensor_and_bytes_of_the_vector(
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


def test_frozen_values_are_shown_and_are_none_of_the_bytes(member: Member, capsys: pytest.CaptureFixture[str]) -> None:
    start = {"manifest": bytes(32), "weights": bytes(32), "values": 1_002_496}
    job = a_job(model={"architecture": "textcnn", "freeze_embedding": True}, frozen=start)
    plan = plan_of(job, MANIFEST, member)
    _show(plan, member)
    said = capsys.readouterr().out
    assert "  stays frozen: 1,002,496 values of the embedding, 4.0 MB, fetched once and never sent\n" in said
    assert f"bytes a round: {sent(a_job(), 3):,} in a cohort of 3" in said
    assert plan.as_json()["frozen"] == 1_002_496
    assert plan_of(a_job(), MANIFEST, member).as_json()["frozen"] is None
    for more, of in (
        ({}, "of the encoder"),
        ({"freeze_embedding": True}, "of the encoder and the embedding"),
        ({"injection": {"name": "lora", "train": "up"}}, "of the encoder and one matrix of each adapter"),
    ):
        over = a_job(model={**DISTILBERT, "injection": "lora", **more}, frozen=start)
        _show(plan_of(over, MANIFEST, member), member)
        assert f"  stays frozen: 1,002,496 values {of}, 4.0 MB, fetched" in capsys.readouterr().out


def test_a_job_that_the_member_withdrew_from_is_refused(member: Member, capsys: pytest.CaptureFixture[str]) -> None:
    job = a_job()
    assert not plan_of(job, MANIFEST, member).refusals
    member.withdrawals.ask(member.identity, job.name)
    plan = plan_of(job, MANIFEST, member)
    assert plan.refusals == (f"this member withdrew from {job.name}",)
    _show(plan, member)
    assert "would take part" not in capsys.readouterr().out


def test_a_job_that_sends_only_the_change_shows_nothing_else(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    _show(plan_of(a_job(mechanism={"name": "dp-sgd", "noise_multiplier": 1.0}), MANIFEST, member), member)
    assert "each" not in capsys.readouterr().out


def test_epsilon_is_what_the_gate_counts_against_the_limit(member: Member, capsys: pytest.CaptureFixture[str]) -> None:
    job = a_job(mechanism={"name": "dp-sgd", "noise_multiplier": 1.1, "lot": 4, "steps": 5})
    plan = plan_of(job, MANIFEST, member)
    event = protection_of(job, 20, own=member.policy.own(), trust_central_noise=False).event
    assert event is not None
    count = job.rounds.count
    one, every = (epsilon_at_gate(repeated(event, rounds), 1e-6, "add-remove") for rounds in (1, count))
    assert (plan.epsilon_a_round, plan.epsilon_of_all_rounds) == pytest.approx((one, every))
    _show(plan, member)
    said = re.search(f"epsilon ([0-9.]+) a round, ([0-9.]+) for all {count} rounds, by dp-sgd", capsys.readouterr().out)
    assert said is not None
    for exact, printed in zip((one, every), said.groups(), strict=True):
        assert exact <= float(printed) < 1.01 * exact
    # Rounding to nearest would state less.
    assert any(float(f"{exact:.3g}") < exact for exact in (one, every))


def test_it_says_how_long_the_noise_is_beside_an_update_and_what_would_lower_it(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the job, the member's rows and the smallest cohort: nobody gives it a number."""
    job = a_job(mechanism={"name": "dp-sgd", "noise_multiplier": 1.1, "lot": 4, "steps": 5})
    told, said = planned(job, member, capsys)
    ratio = 1.1 * math.sqrt(MANIFEST.values) / (4 * math.sqrt(5 * 3))
    assert told["expected_noise"] == {
        "noise_to_signal": pytest.approx(ratio),
        "values": 3_007,
        "members": 3,
        "lot": 4,
        "lower": [
            "To halve it: train a quarter of the values, or have 12 members, or double the lot",
            "A doubled lot costs the same epsilon only if members have twice the rows",
            "A greater epsilon lowers it in about the same proportion",
        ],
    }
    assert (
        "  expected noise to signal: 3.9 in a round (3,007 values, 3 members, lots of 4)\n"
        "  to halve it: train a quarter of the values, or have 12 members, or double the lot. A doubled lot costs the "
        "same epsilon only if members have twice the rows. A greater epsilon lowers it in about the same proportion\n"
    ) in said
    # Its own rows count: a lot of 40 of 20 rows is no longer than 20, and there is nothing to double it from.
    few, said = planned(a_job(mechanism={**job.mechanism.model_dump(), "lot": 40}), member, capsys)
    assert (few["expected_noise"]["lot"], "double the lot" in said) == (20, False)
    # A trained embedding is named with what freezing it leaves.
    manifest = Manifest(tensors=(Tensor(name="embedding.weight", shape=(9000, 1)), *MANIFEST.tensors))
    frozen = plan_of(a_job(mechanism=job.mechanism.model_dump(), values=manifest.values), manifest, member)
    _show(frozen, member)
    assert "  freeze_embedding = true leaves 3,007 values and a ratio of 3.9. To halve it: " in capsys.readouterr().out
    # Without noise there is nothing to say.
    told, said = planned(a_job(), member, capsys)
    assert (told["expected_noise"], "noise to signal" in said) == (None, False)


def test_canaries_count_in_the_plan_as_in_the_charge(member: Member, capsys: pytest.CaptureFixture[str]) -> None:
    job = a_job(mechanism={"name": "dp-sgd", "noise_multiplier": 1.1, "lot": 4, "steps": 5}, audit={"canaries": 60})
    planting = replace(member, policy=Policy(max_canaries=40))
    plan = plan_of(job, MANIFEST, planting)
    event = protection_of(job, 20 + 40, own=planting.policy.own()).event
    assert event is not None
    assert plan.epsilon_a_round == pytest.approx(epsilon_at_gate(event, 1e-6, "add-remove"))
    assert plan.as_json()["canaries"] == 40
    _show(plan, planting)
    said = capsys.readouterr().out
    assert "adds 40 canaries to your data, random texts with random labels" in said
    assert "follow from 60 examples" in said
    without = plan_of(job, MANIFEST, member)
    assert (
        without.epsilon_a_round
        == plan_of(a_job(mechanism=job.mechanism.model_dump()), MANIFEST, member).epsilon_a_round
    )
    assert (without.as_json()["canaries"], without.notes) == (0, ())


def test_it_says_in_how_many_rounds_the_budget_lets_the_member_take_part(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    job = a_job(mechanism={"name": "dp-sgd", "noise_multiplier": 4.0, "lot": 4, "steps": 5})
    whole = plan_of(job, MANIFEST, member)
    assert whole.outlook is not None
    assert whole.epsilon_a_round is not None
    assert whole.epsilon_of_all_rounds is not None
    assert whole.as_json()["outlook"]["possible"] == job.rounds.count == whole.outlook.rounds
    short = replace(member, policy=Policy(epsilon=(whole.epsilon_a_round + whole.epsilon_of_all_rounds) / 2))
    plan = plan_of(job, MANIFEST, short)
    assert plan.outlook is not None
    told = plan.as_json()
    assert told["takes_part"]
    assert 0 < told["outlook"]["possible"] < job.rounds.count
    _show(plan, short)
    output = capsys.readouterr().out
    assert f"  {plan.outlook.sentence}\n" in output
    assert f"`edge_client run` would take part in {plan.outlook.possible} of {job.rounds.count} rounds" in output
    # What the ledger of this data has charged counts, and nothing is left in the end.
    with open_budget(member.home, member.identity, short.policy, ["one"]) as budget:
        protection = budget.protection(job, 20)
        for round in range(1, plan.outlook.possible + 1):
            assignment = Assignment(job.name, round, job.digest(), bytes(32), 0, 1000)
            budget.charge(AttemptId(job.name, round, round), budget.reserve(assignment, job, protection))
    spent = plan_of(job, MANIFEST, short)
    assert not spent.as_json()["takes_part"]
    assert spent.refusals == ("epsilon allows no further round now",)
    assert plan_of(a_job(), MANIFEST, member).as_json()["outlook"] is None


def test_skipped_rows_do_not_count_in_the_cost_of_a_round(member: Member, tmp_path: Path) -> None:
    """N is the count after skipping, and it is fixed before anything else looks at the data."""
    file = tmp_path / "rows.jsonl"
    good = '{"text": "one", "label": "a"}\n'
    file.write_text(good * 12 + "{\n" + good * 8 + '{"text": "two"}\n')
    options = RunOptions(data=file, home=tmp_path, device="cpu")
    with pytest.raises(CommandFailed, match=r"line 13: not JSON; .*; or skip such rows with --skip-invalid"):
        load_member(options)
    loaded = [load_member(replace(options, skip_invalid=True)) for _ in range(2)]
    # Every start, and so every round, has the same rows.
    assert loaded[0].examples == loaded[1].examples == member.examples
    assert loaded[0].skipped.rows == 2
    job = a_job(mechanism={"name": "dp-sgd", "noise_multiplier": 1.1, "lot": 4, "steps": 5})
    plans = [plan_of(job, MANIFEST, replace(each, policy=member.policy)) for each in (loaded[0], member)]
    assert plans[0].epsilon_a_round == plans[1].epsilon_a_round is not None


def by_person(**changes: Any) -> JobDocument:
    mechanism = {
        "name": "dp-sgd", "noise_multiplier": 1.1, "lot": 2, "steps": 5, "unit": "person", "person": {"max_examples": 4}
    }  # fmt: skip
    # The rules of a model that can be trained by person are not what is shown here.
    return a_job().model_copy(update={"mechanism": DpSgd.model_validate(mechanism), **changes})


def test_a_job_by_person_is_charged_by_persons_and_shows_rows_per_person(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Example(f"text {at}", "a", None, "ann" if at < 15 else f"person {at}") for at in range(20)]
    mine = replace(member, examples=rows, person="patient", policy=Policy(unit="person"))
    plan = plan_of(by_person(), MANIFEST, mine)
    _show(plan, mine)
    said = capsys.readouterr().out
    assert (
        "  protects persons: 6 persons by column 'patient': the middle one has 1 row, the largest 15; a draw uses at "
        in said
    )
    assert mine.population(by_person()) == 6
    assert mine.population(a_job(mechanism={"name": "dp-sgd", "noise_multiplier": 1.1})) == 20
    limit = Limit(8.0, 1e-6, unit="person")
    event = SampledGaussian(multiplier=1.1, rate=2 / 6, steps=5, unit="person")
    assert plan.epsilon_a_round == pytest.approx(epsilon_counted([event], limit))
    # A member whose policy protects rows refuses, and the reverse.
    (refusal, *_) = plan_of(by_person(), MANIFEST, member).refusals
    assert refusal.startswith("unit: the job protects one person; the policy's ledger counts by example")
    (refusal, *_) = plan_of(a_job(mechanism={"name": "dp-sgd", "noise_multiplier": 1.1}), MANIFEST, mine).refusals
    assert refusal.startswith("unit: the job protects one example; the policy's ledger counts by person")


@pytest.mark.parametrize(
    ("unit", "column", "said"),
    [
        ("person", None, "nothing says whose each row is; name the column with --person"),
        ("example", "patient", 'the policy protects one example; write unit = "person" in policy.toml'),
        ("member", "patient", 'the policy protects one member; write unit = "person" in policy.toml'),
    ],
)
def test_persons_are_named_exactly_if_the_policy_protects_them(
    member: Member, tmp_path: Path, unit: str, column: str | None, said: str
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("text,label,patient\none,a,ann\n")
    (tmp_path / "policy.toml").write_text(f'schema = 1\nunit = "{unit}"\n')
    options = RunOptions(data=file, home=tmp_path, device="cpu", person=column)
    with pytest.raises(CommandFailed, match=re.escape(said)):
        load_member(options, takes_part=True)
    fits = replace(options, person="patient" if unit == "person" else None)
    assert load_member(fits, takes_part=True).examples[0].person == (None if unit != "person" else "ann")


def test_a_policy_for_own_vocabularies_refuses_a_public_one(member: Member) -> None:
    strict = replace(member, policy=Policy(mechanisms=("none",), vocabularies=("own",)))
    words = {"vocabulary": {"kind": "words"}, "tokenizer": None}
    start = {"private": {"manifest": "00" * 32, "weights": "00" * 32, "values": 3}}
    public = plan_of(a_job(method="fedvocab", **start), MANIFEST, strict).as_json()
    assert not public["takes_part"]
    (refusal,) = public["refusals"]
    assert refusal.startswith("vocabularies: the job's vocabulary is public; the policy allows own; ")
    own = plan_of(a_job(method="fedvocab", **words), MANIFEST, strict).as_json()
    assert (own["takes_part"], own["refusals"]) == (True, [])


def test_a_note_warns_a_member_with_one_label_of_adjusted_logits(member: Member) -> None:
    job = a_job()
    adjusted = a_job(training=job.training.model_copy(update={"logit_adjustment": True}).model_dump())
    label, other = job.labels[:2]
    rows = [Example("one", label)] * 19
    for document, last, notes in ((adjusted, label, 1), (adjusted, other, 0), (job, label, 0)):
        found = plan_of(document, MANIFEST, replace(member, examples=[*rows, Example("two", last)])).notes
        assert len(found) == notes
    (note,) = plan_of(adjusted, MANIFEST, replace(member, examples=rows)).notes
    assert note.startswith(
        f"all your rows have the label {label}: with adjusted logits they teach the shared model nothing"
    )


# ---- a table of vectors ---------------------------------------------------------------------------------------------

BILSTM = {"architecture": "bilstm", "embedding": 3, "hidden": 2}
DISTILBERT = {"architecture": "transformer", "config": {"model_type": "distilbert", "dim": 12, "n_heads": 2}}


def own_words(**changes: Any) -> JobDocument:
    """Returns a job whose members each keep an embedding of their own words."""
    own = {"method": "fedvocab", "model": BILSTM, "vocabulary": {"kind": "words", "size": 50}, "tokenizer": None}
    return a_job(**own | changes)


def planned(job: JobDocument, member: Member, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Returns the plan as `--json` prints it, and as a person reads it."""
    plan = plan_of(job, MANIFEST, member)
    _show(plan, member)
    return plan.as_json(), capsys.readouterr().out


def naming(member: Member, width: int) -> Member:
    table = member.home / "vectors.txt"
    table.write_text(f"heron {' '.join(['1'] * width)}\n")
    return replace(member, table=Table(table, width))


@pytest.mark.parametrize(
    ("model", "needed"),
    [(BILSTM, 3), ({"embedding": 5}, 5), (DISTILBERT, 12)],
    ids=["bilstm", "textcnn", "transformer"],
)
def test_a_table_of_another_width_is_refused_before_the_first_round(
    member: Member, capsys: pytest.CaptureFixture[str], model: dict[str, Any], needed: int
) -> None:
    kind = "wordpiece" if model is DISTILBERT else "words"
    job = own_words(model=model, vocabulary={"kind": kind, "size": 50})
    told, shown = planned(job, naming(member, needed), capsys)
    assert told["embedding_table"] == {"width": needed, "needed": needed, "unused": None}
    assert (told["takes_part"], told["refusals"], told["notes"]) == (True, [], [])
    assert f"its embedding starts from {member.home / 'vectors.txt'}, whose vectors have {needed} numbers" in shown

    told, shown = planned(job, naming(member, 4), capsys)
    assert told["embedding_table"] == {"width": 4, "needed": needed, "unused": None}
    sentence = (
        f"{member.home / 'vectors.txt'}: its vectors have 4 numbers and the job's embedding has {needed}; give "
        f"--embedding a table of {needed}, or leave the option out"
    )
    assert (told["takes_part"], told["refusals"]) == (False, [sentence])
    assert f"  refused: {sentence}\n" in shown
    assert "starts from" not in shown

    told, _ = planned(job, member, capsys)
    assert (told["embedding_table"], told["takes_part"]) == (None, True)


def test_an_unused_table_of_any_width_is_only_a_note(member: Member, capsys: pytest.CaptureFixture[str]) -> None:
    named = naming(member, 4)
    told, shown = planned(a_job(), named, capsys)
    assert told["embedding_table"] == {"width": 4, "needed": None, "unused": "embedding_not_private"}
    assert (told["takes_part"], told["refusals"]) == (True, [])
    note = "--embedding is not used: fedavg leaves you no whole embedding of your own"
    assert told["notes"] == [note]
    assert f"  note: {note}\n" in shown

    job = own_words()
    # The plan sees that a sealed state exists without its key.
    key = StoreKey.from_passphrase("where is the heron")
    with PrivateStore(member.home, member.identity.federation, "data", key) as store:
        Keeper(store, member.examples).make(job, None, None)
    told, shown = planned(job, named, capsys)
    assert told["embedding_table"] == {"width": 4, "needed": None, "unused": "private_state_exists"}
    assert (told["takes_part"], told["refusals"]) == (True, [])
    (note,) = told["notes"]
    assert note.startswith("--embedding is not used: you already have an embedding of this job, and continue with it")
    assert f"`edge_client private remove {job.name}`" in note
    assert f"  note: {note}\n" in shown


def test_a_state_of_another_job_or_other_data_is_a_refusal(member: Member, capsys: pytest.CaptureFixture[str]) -> None:
    """The real run would refuse it too, rather than ignore the table."""
    with PrivateStore(member.home, member.identity.federation, "data") as store:
        Keeper(store, member.examples).make(own_words(), None, None)
    told, _ = planned(own_words(seed=9), naming(member, 3), capsys)
    (sentence,) = told["refusals"]
    assert "was trained under another document of this job" in sentence
    told, _ = planned(own_words(), replace(naming(member, 3), data_name="other"), capsys)
    (sentence,) = told["refusals"]
    assert "was trained on the data named data, and not on other" in sentence


# ---- how much of the texts is read -----------------------------------------------------------------------------------

SECRET = "where is the heron"
TEXTS = ["the heron stands", "an owl", "a heron in the reeds of the lake by the old mill on the hill"]


def reading(member: Member, texts: list[str]) -> Member:
    return replace(member, examples=[Example(text, "a") for text in texts])


def test_the_shares_of_unknown_words_and_of_texts_that_are_cut_are_shown(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    job = a_job(model={"max_tokens": 8})
    tokenizer = word_tokenizer(["the", "heron", "stands", "in", "a", "reeds", "of", "lake"])
    reader = reading(member, TEXTS)
    plan = plan_of(job, MANIFEST, reader, Reading.of(job, tokenizer, reader, None))
    assert plan.as_json()["reading"] == {
        "own_vocabulary": False,
        "texts": 3,
        "cut_texts": 1,
        "cut_share": pytest.approx(1 / 3),
        "tokens": 13,
        "unknown_tokens": 2,
        "unknown_share": pytest.approx(2 / 13),
        "max_tokens": 8,
    }
    _show(plan, reader)
    assert (
        "  reads your texts: with the job's vocabulary, 15.4 % of the tokens are unknown words, and 33.3 % of the "
        "texts are cut, because the model reads at most 8 tokens\n"
    ) in capsys.readouterr().out


def test_an_own_vocabulary_is_the_kept_one_or_as_a_first_round_would_build_it(member: Member) -> None:
    job = own_words()
    before = reading(member, TEXTS)
    first = Reading.of(job, None, before, None)
    assert first.own
    assert first.coverage is not None
    assert first.coverage.unknown == 0
    # Nothing is kept of it.
    assert not (member.home / "private").exists()
    with PrivateStore(member.home, member.identity.federation, "data", StoreKey.from_passphrase(SECRET)) as store:
        Keeper(store, before.examples).make(job, None, None)
    # The kept vocabulary does not know the words of new data, and needs its key.
    later = reading(member, ["the swan"])
    sealed = Reading.of(job, None, later, None)
    assert sealed.coverage is None
    assert "TACIT_PASSPHRASE" in sealed.sentence(job)
    assert plan_of(job, MANIFEST, later, sealed).as_json()["takes_part"]
    key = member.home / "key"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TACIT_PASSPHRASE", SECRET)
        opened = Reading.of(job, None, later, None)
    assert (opened.own, opened.coverage) == (True, Coverage(texts=1, cut=0, tokens=2, unknown=1))
    assert "does not exist" in str(Reading.of(job, None, later, key).problem)


def test_what_cannot_be_read_is_said(member: Member) -> None:
    job = a_job()
    assert Reading.of(job, None, member, None).as_json(job) == {
        "problem": "the job has no tokenizer; tell the operator"
    }
    assert "not a tokenizer.json" in str(Reading.of(job, b"{", member, None).problem)


MEASURED = {
    "mechanism": {"name": "dp-sgd", "noise_multiplier": 1.1, "lot": 4, "steps": 5},
    "metrics": {"noise_multiplier": 28.0, "every": 2},
}


def test_it_says_what_metrics_cost_in_the_words_of_the_accounting(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    job = a_job(**MEASURED)
    silent, said = planned(job, member, capsys)
    assert silent["metrics"] is None
    assert nothing_measured(0) in said
    assert re.search(r"^ {4}metrics +3 each +3 values$", said, re.MULTILINE)
    assert "keeps" not in said
    member = replace(member, policy=member.policy.model_copy(update={"metrics_epsilon": 1.0}))
    told, said = planned(job, member, capsys)
    event = protection_of(job, 20, metrics="add-remove").event
    assert event is not None
    cost = cost_of_metrics(event, job.rounds.count, member.policy.limit(), 1.0)
    assert cost is not None
    assert (cost.measured, cost.rounds, cost.allowed) == (2, 3, 42)
    assert told["metrics"] == cost.as_json()
    assert f"  {cost.sentence}\n" in said
    assert cost.without == pytest.approx(silent["epsilon_of_all_rounds"])
    assert cost.together == pytest.approx(told["epsilon_of_all_rounds"])
    assert cost.without < cost.together < cost.without + cost.alone
    assert "keeps 10% of your rows back from every training" in said


def test_metrics_that_their_part_of_the_budget_does_not_pay_for_are_said(member: Member) -> None:
    member = replace(member, policy=member.policy.model_copy(update={"metrics_epsilon": 0.14}))
    plan = plan_of(a_job(**MEASURED), MANIFEST, member)
    assert plan.metrics is not None
    assert plan.metrics.allowed == 1
    assert plan.metrics.sentence.endswith(
        "metrics_epsilon allows 1 measurements, and then this member sends noise alone"
    )
    assert not plan.refusals


def test_metrics_without_room_for_one_are_not_called_switched_off(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    member = replace(member, policy=member.policy.model_copy(update={"metrics_epsilon": 0.01}))
    silent, said = planned(a_job(**MEASURED), member, capsys)
    assert silent["metrics"] is None
    assert "sends noise alone, which costs nothing (metrics_epsilon = 0.01 has no room for a measurement, or " in said


def test_a_ledger_of_another_unit_is_the_reason_and_not_the_metrics(
    member: Member, capsys: pytest.CaptureFixture[str]
) -> None:
    """`edge_client run` refuses such a ledger when it opens it."""
    job = a_job(**MEASURED)
    with open_budget(member.home, member.identity, member.policy, ["one"]):
        pass
    policy = member.policy.model_copy(update={"metrics_epsilon": 1.0, "unit": "person"})
    told, said = planned(by_person(), replace(member, policy=policy), capsys)
    advice = 'the ledger of this data counts by example, and the policy protects by person; write unit = "example"'
    assert any(each.startswith(advice) for each in told["refusals"])
    assert "edge_client ledger persons" in said
    assert "measures nothing" not in planned(job, replace(member, policy=policy), capsys)[1]


def test_a_job_that_began_without_metrics_is_planned_without(member: Member) -> None:
    """As the running member does: the ledger's first event of a job decides its kind."""
    job = a_job(**MEASURED)
    with open_budget(member.home, member.identity, member.policy, ["one"]) as budget:
        assignment = Assignment(job.name, 1, job.digest(), bytes(32), 0, 1000)
        budget.reserve(assignment, job, budget.protection(job, 20))
        member = replace(member, policy=member.policy.model_copy(update={"metrics_epsilon": 1.0}))
        assert plan_of(job, MANIFEST, member).metrics is None
