"""What the operator believes of a member's audit: what follows from its counts, for the version that is exported."""

import json

import pytest

from coordinator.cli.member_audits import Audited, check_version, miscomputed
from coordinator.cli.passport_page import audit_text
from learning.auditing.planted import bound_of, largest_bound, planted_guesses
from learning.auditing.statistics import Guesses
from tacit.audit import AuditStatement
from tacit.documents import DocumentInvalid
from tacit.passport import AuditFacts
from toolkit.console import CommandFailed, ExitCode

VERSION, OTHER, DELTA = "02" * 32, "01" * 32, 1e-6


def signed(**changes):
    """A statement that follows from its counts, unless the changes say otherwise."""
    canaries = changes.get("canaries", 100)
    guesses = changes.get("guesses", planted_guesses(canaries))
    correct = changes.get("correct", 22)
    fields = {
        **{"schema": 1, "federation": "00" * 32, "member": "north", "job": "desk", "document": "00" * 32},
        **{"number": 2, "version": VERSION, "verdict": "sound", "claim": 1.5, "delta": DELTA, "confidence": 0.95},
        **{"tests": 4, "canaries": canaries, "guesses": guesses, "correct": correct, "made_ms": 1},
        "lower_bound": bound_of(Guesses(canaries, guesses, correct), DELTA),
        "possible": largest_bound(canaries, DELTA),
    }
    return AuditStatement.from_json(json.dumps(fields | changes).encode())


def refused(*statements):
    with pytest.raises(CommandFailed) as error:
        check_version("desk", 2, bytes.fromhex(VERSION), [Audited(bytes(32), each) for each in statements])
    return error.value


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lower_bound": 99.0, "possible": 100.0, "claim": 1.0}, "above its claim"),
        ({"correct": 41}, "more than its guesses"),
        ({"guesses": 101, "correct": 22}, "more than its canaries"),
        ({"guesses": 0, "correct": 40, "lower_bound": 0.0}, "more than its guesses"),
        ({"lower_bound": 1.4, "possible": 1.3, "claim": 1.45}, "above possible"),
        ({"canaries": 20, "guesses": 8, "correct": 4}, "could not have refuted"),
        ({"confidence": 1e-9}, "confidence"),
        ({"delta": 0.999}, "delta"),
    ],
)
def test_a_statement_that_contradicts_itself_is_none(changes, says):
    with pytest.raises(DocumentInvalid, match=says):
        signed(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lower_bound": 0.1}, "lower bound"),
        ({"possible": 9.0}, "possible bound"),
        ({"correct": 40, "lower_bound": 0.0}, "lower bound"),
        ({"confidence": 0.99}, "95% confidence"),
        ({"tests": 9}, "4 tests"),
        ({"guesses": 2, "correct": 1, "lower_bound": 0.0}, "40 are guessed"),
        # What a row more or less is allowed would hide: the bound at a large delta is 0.
        ({"delta": 0.009}, "bound"),
    ],
)
def test_the_operator_computes_a_members_bounds_again(changes, says):
    assert miscomputed(signed()) is None
    assert says in (miscomputed(signed(**changes)) or "")


def test_what_is_proved_is_rounded_down_and_what_can_be_proved_and_was_charged_is_not():
    audit = AuditFacts.model_validate(
        {
            "audit": "00" * 32,
            "number": 2,
            "version": VERSION,
            "verdict": "sound",
            "canaries": 40,
            "lower_bound": 0.5678,
            "possible": 2.1678,
            "claim": 2.0,
            "delta": 1e-6,
            "confidence": 0.95,
        }
    )
    said = audit_text(audit)
    assert "prove an epsilon of at least 0.567 at" in said
    assert "could have proved 2.16; it was charged at most 2." in said


def test_only_an_audit_of_the_exported_version_that_could_have_refuted_its_claim_opens_the_export():
    check_version("desk", 2, bytes.fromhex(VERSION), [Audited(bytes(32), signed())])
    assert refused().code == ExitCode.REFUSED
    assert refused(signed(number=1, version=OTHER)).code == ExitCode.REFUSED
    few = refused(signed(canaries=20, correct=4, verdict="cannot-tell"))
    assert (few.code, "20 canaries prove an epsilon of at most 0.316" in few.sentence) == (ExitCode.REFUSED, True)
    above = refused(signed(), signed(correct=40, verdict="above-claim"))
    assert (above.code, "at least 2.15" in above.sentence) == (ExitCode.ABOVE_CLAIM, True)
    # Its number is another version's.
    assert refused(signed(number=7)).code == ExitCode.USAGE
    assert refused(signed(version=OTHER)).code == ExitCode.USAGE
