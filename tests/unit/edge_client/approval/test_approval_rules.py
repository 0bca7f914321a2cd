"""When stewards' statements allow a member to train: each rule alone, and all of them on arbitrary histories."""

from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.approval.rules import MAX_SKEW_MS, Heard, standing_of
from edge_client.approval.statement import ApprovalStatement, SignedStatement, StatementInvalid
from tests.support.stewards import DAY_MS, JOHN, MARY, NOW, QUESTION, Steward, heard, terms

MALLORY = Steward.named("mallory")
OTHER = sha256(b"other").digest()


def stage(*signed, of=None, now=NOW + 1):
    return standing_of(QUESTION, of or terms(MARY), heard(*signed), now).stage


def test_nobody_has_looked_at_first_and_one_approval_is_enough():
    assert stage() == "awaited"
    standing = standing_of(QUESTION, terms(MARY), heard(MARY.says("approve", days=2)), NOW + 1)
    assert (standing.stage, standing.approved, standing.until_ms) == ("approved", ("mary",), NOW + 2 * DAY_MS)


@pytest.mark.parametrize(
    "other",
    [
        {"federation": OTHER},
        {"member": "south"},
        {"data": "archive"},
        {"job": "desk-two"},
        {"document": OTHER},
        {"policy": OTHER},
        {"files": {"weights.bin": OTHER}},
        {"files": {**QUESTION.files, "backbone.safetensors": OTHER}},
    ],
    ids=str,
)
def test_an_approval_of_anything_else_does_not_count(other):
    assert stage(MARY.says("approve", **other)) == "awaited"


def test_a_stranger_and_a_forger_approve_nothing():
    assert stage(MALLORY.says("approve")) == "awaited"
    good = MARY.says("approve")
    forged = good.model_copy(update={"signature": MALLORY.key.sign(good.statement.signed_bytes).hex()})
    assert stage(forged) == "awaited"
    longer = good.statement.model_copy(update={"expires_ms": NOW + 80 * DAY_MS})
    assert stage(good.model_copy(update={"statement": longer})) == "awaited"
    with pytest.raises(StatementInvalid, match="another steward's key"):
        SignedStatement.sign(good.statement, MALLORY.key)


def test_the_signature_covers_every_field():
    """Whatever field of a statement changes, its signature no longer holds."""
    signed = MARY.says("decline", reason="no")
    changed = {
        **dict.fromkeys(("federation", "document", "policy", "steward"), OTHER),
        **dict.fromkeys(("member", "data", "job"), "other"),
        "files": {},
        "decision": "withdraw",
        "issued_ms": NOW + 1,
        "expires_ms": NOW + 2,
        "reason": "yes",
    }
    assert changed.keys() == ApprovalStatement.model_fields.keys()
    signed.verify()
    for name, value in changed.items():
        with pytest.raises(StatementInvalid):
            signed.model_copy(update={"statement": signed.statement.model_copy(update={name: value})}).verify()


def test_four_eyes_are_two_keys():
    both = terms(MARY, JOHN, needed=2)
    assert stage(MARY.says("approve"), of=both) == "awaited"
    assert stage(MARY.says("approve"), MARY.says("approve", at=NOW + 1, days=20), of=both, now=NOW + 2) == "awaited"
    standing = standing_of(QUESTION, both, heard(MARY.says("approve", days=9), JOHN.says("approve", days=3)), NOW + 1)
    assert (standing.stage, standing.until_ms) == ("approved", NOW + 3 * DAY_MS)


def test_an_approval_ends_when_it_expires_and_may_not_be_longer_than_the_policy_allows():
    approval = MARY.says("approve", days=1)
    assert stage(approval, now=NOW + DAY_MS - 1) == "approved"
    ended = standing_of(QUESTION, terms(MARY), heard(approval), NOW + DAY_MS)
    assert (ended.stage, ended.over, ended.unread) == ("awaited", (approval,), (("mary", "it has expired"),))
    assert stage(MARY.says("approve", days=90.5)) == "awaited"


def test_an_approval_from_the_future_waits_for_the_clock():
    early = MARY.says("approve", at=NOW + MAX_SKEW_MS + 1)
    assert stage(early, now=NOW) == "awaited"
    assert stage(early, now=NOW + 1) == "approved"


def test_what_lapsed_does_not_come_back_with_the_clock():
    approval = MARY.says("approve", days=1)
    assert standing_of(QUESTION, terms(MARY), [Heard(approval, lapsed=True)], NOW + 1).stage == "awaited"


@pytest.mark.parametrize("taken_back", ["withdraw", "decline"])
def test_a_withdrawal_wins_over_an_approval_of_the_same_key(taken_back):
    approval, no = MARY.says("approve"), MARY.says(taken_back, at=NOW + 1)
    after = {"withdraw": "awaited", "decline": "declined"}[taken_back]
    assert stage(approval, no, now=NOW + 2) == after
    # Shown again after it, the approval is older all the same; and a clock that is behind does not save it.
    assert stage(no, approval, now=NOW + 2) == after
    assert stage(approval, MARY.says(taken_back, at=NOW - DAY_MS), now=NOW + 2) == after
    assert stage(approval, MARY.says(taken_back, at=NOW), now=NOW + 2) == after
    # A newer approval counts again.
    assert stage(approval, no, MARY.says("approve", at=NOW + 2), now=NOW + 3) == "approved"


def test_a_withdrawal_of_another_key_changes_nothing_and_a_decline_stops_the_job():
    both = terms(MARY, JOHN)
    assert stage(MARY.says("approve"), JOHN.says("withdraw", at=NOW + 1), of=both, now=NOW + 2) == "approved"
    standing = standing_of(
        QUESTION, both, heard(MARY.says("approve"), JOHN.says("decline", at=NOW + 1, reason="no consent")), NOW + 2
    )
    assert (standing.stage, standing.declined) == ("declined", (("john", "no consent"),))
    # A decline holds under any policy, and does not expire.
    assert stage(JOHN.says("decline", policy=OTHER), of=both, now=NOW + 5000 * DAY_MS) == "declined"
    assert stage(JOHN.says("decline"), JOHN.says("withdraw", at=NOW + 1), of=both, now=NOW + 2) == "awaited"


def test_a_statement_that_does_not_fit_together_cannot_exist():
    good = MARY.says("approve").statement.model_dump()
    for wrong in (
        {"expires_ms": None},
        {"expires_ms": good["issued_ms"]},
        {"reason": "because"},
        {"decision": "decline"},
        {"decision": "decline", "expires_ms": None, "reason": "\x1b[2J"},
    ):
        with pytest.raises(ValueError, match=r"expires_ms|reason"):
            ApprovalStatement.model_validate({**good, **wrong})


# ---- arbitrary histories ----------------------------------------------------------------------------------------

_SAID = st.tuples(
    st.sampled_from([MARY, JOHN, MALLORY]),
    st.sampled_from(["approve", "decline", "withdraw"]),
    st.integers(-3, 3),
    st.sampled_from([0.5, 2, 200]),
    st.sampled_from([{}, {}, {}, {"document": OTHER}, {"policy": OTHER}]),
)
_HISTORY = st.lists(_SAID, max_size=6).map(
    lambda said: [
        steward.says(decision, at=NOW + at * DAY_MS, days=days, **other) for steward, decision, at, days, other in said
    ]
)
_FEW = settings(max_examples=300, deadline=None)


def _may(history, now, needed=1):
    return standing_of(QUESTION, terms(MARY, JOHN, needed=needed), heard(*history), now).stage == "approved"


@_FEW
@given(_HISTORY, st.integers(-2, 4), st.sampled_from([1, 2]))
def test_whoever_may_train_has_that_many_valid_approvals_that_nothing_followed(history, day, needed):
    """The rules read once more, from the approvals that must be there and not from the code."""
    now = NOW + day * DAY_MS
    standing = standing_of(QUESTION, terms(MARY, JOHN, needed=needed), heard(*history), now)
    if standing.stage != "approved":
        return
    keys = set()
    for at, signed in enumerate(history):
        said = signed.statement
        own = [(place, each.statement) for place, each in enumerate(history) if each.statement.steward == said.steward]
        own = [(place, each) for place, each in own if each.document == QUESTION.document]
        others = [(place, each) for place, each in own if each.decision != "approve"]
        if (
            said.decision == "approve"
            and (said.document, said.policy) == (QUESTION.document, QUESTION.policy)
            and said.issued_ms <= now + MAX_SKEW_MS
            and now < said.expires_ms <= said.issued_ms + 90 * DAY_MS
            and all(place < at and each.issued_ms < said.issued_ms for place, each in others)
        ):
            keys.add(said.steward)
    assert len(keys & {MARY.public, JOHN.public}) >= needed


@_FEW
@given(_HISTORY, st.integers(-2, 4), st.sampled_from([MARY, JOHN]), st.sampled_from(["withdraw", "decline"]))
def test_whatever_was_said_a_withdrawal_now_ends_that_keys_approval(history, day, steward, decision):
    now = NOW + day * DAY_MS
    no = steward.says(decision, at=now)
    after = standing_of(QUESTION, terms(MARY, JOHN), heard(*history, no), now)
    assert steward.name not in after.approved
    # Nobody's replay of what was said before brings it back.
    assert steward.name not in standing_of(QUESTION, terms(MARY, JOHN), heard(*history, no, *history), now).approved


@_FEW
@given(_HISTORY, _HISTORY, st.integers(-2, 4))
def test_statements_of_others_and_about_others_never_allow_anything(history, more, day):
    now = NOW + day * DAY_MS
    strange = [each for each in more if each.statement.steward == MALLORY.public] + [
        each for each in more if each.statement.document == OTHER
    ]
    assert _may(history, now) == _may([*history, *strange], now)


@_FEW
@given(_HISTORY, st.integers(-2, 4), st.sampled_from([1, 2]))
def test_a_stricter_policy_never_allows_more(history, day, needed):
    now = NOW + day * DAY_MS
    if _may(history, now, 2):
        assert _may(history, now, 1)
    shorter = replace(terms(MARY, JOHN, needed=needed), longest_ms=DAY_MS)
    if standing_of(QUESTION, shorter, heard(*history), now).stage == "approved":
        assert _may(history, now, needed)
