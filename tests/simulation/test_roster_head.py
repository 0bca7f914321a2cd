"""The head of the roster log in the machines: a member that watches the log takes part in no attempt without one, and
members that were shown different heads are in no sum together.
"""

from dataclasses import replace

import pytest

from coordinator.rounds import counts
from edge_client.roster.book import RosterBook
from secure_agg.transparency import EMPTY_ROOT
from tacit.identity import Trust
from tacit.messages import AttemptMessage, AttemptOpened, AttemptRefusal
from tacit.reason import Reason, word
from tacit.roster import Head, SignedHead
from tests.support.fleet import Fleet
from tests.support.sum_fleet import FEDERATION

VICTIM = "m0"


def signed(size):
    return SignedHead(Head(FEDERATION, size, EMPTY_ROOT, 1), b"", b"")


@pytest.fixture
def book(tmp_path):
    made = RosterBook(tmp_path / "roster.db", Trust(FEDERATION, ()))
    yield made
    made.close()


def refusals(fleet):
    return {(each.member, each.reason) for each in fleet.counts if isinstance(each, counts.Refused)}


@pytest.mark.parametrize("head", [None, "it cannot be read", signed(0)], ids=["missing", "unreadable", "unsigned"])
def test_a_member_that_watches_the_log_shows_no_key_without_a_head_that_holds(book, head):
    fleet = Fleet(4)
    victim = fleet.members[VICTIM]
    victim.environment = replace(victim.environment, roster=book)
    fleet.bend = lambda name, message: (
        replace(message, payload=AttemptOpened(message.payload.heard, head))
        if name == VICTIM and isinstance(getattr(message, "payload", None), AttemptOpened)
        else message
    )
    fleet.connect().run(lambda: bool(refusals(fleet)))
    assert refusals(fleet) == {(VICTIM, word(Reason.REASON_LOG_HEAD_INVALID))}
    answers = [each.payload for each in victim.said if isinstance(each, AttemptMessage)]
    assert answers
    assert all(isinstance(each, AttemptRefusal) for each in answers)


def test_members_that_are_shown_different_heads_are_in_no_sum_together():
    """The coordinator opens an attempt with one head, and tells one member another."""
    fleet = Fleet(4)
    fleet.state = replace(fleet.state, parameters=replace(fleet.parameters, log_head=lambda: signed(7)))
    fleet.connect().run(lambda: bool(fleet.results))
    assert fleet.results

    split = Fleet(4)
    split.state = replace(split.state, parameters=replace(split.parameters, log_head=lambda: signed(7)))
    split.bend = lambda name, message: (
        replace(message, payload=AttemptOpened(message.payload.heard, signed(8)))
        if name == VICTIM and isinstance(getattr(message, "payload", None), AttemptOpened)
        else message
    )
    split.connect().run(lambda: bool(refusals(split)))
    assert refusals(split) == {(VICTIM, word(Reason.REASON_CONTEXT_UNEXPECTED))}
