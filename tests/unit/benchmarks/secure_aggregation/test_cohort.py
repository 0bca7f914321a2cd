"""The cohort in one process sums the survivors' vectors, and its time counts only if all checks were made."""

import numpy as np
import pytest

import secure_agg
from benchmarks.library.parties import mean_of, vector_of
from benchmarks.secure_aggregation.cohort import ChecksMissing, CohortFailed, Server, play
from benchmarks.secure_aggregation.crowd import (
    Crowd,
    complete_context,
    due_of_member,
    due_of_server,
    layout_for,
    sparse_context,
)
from coordinator.rounds.masked_sum import keys_of_few_primes, names
from secure_agg import ContextInvalid, Layout, LayoutInvalid, Phase
from secure_agg.member.seat import Seat
from secure_agg.member.unmask import AwaitingConfirmations
from secure_agg.server import confirm as server_confirm
from tacit.identity import CertificateInvalid, sign, verify_signature

VALUES = 1000
LOST = (2,)


@pytest.fixture
def crowd(members):
    return members


class KeepingServer(Server):
    """Keeps the opened mean, and can falsify it."""

    mean = None
    bend = 0.0

    def open(self):
        self.mean = super().open() + self.bend
        return self.mean


def attempt(crowd, members=6, lost=LOST, context=None, **how):
    """Return the outcome and the server of one attempt with the first `members`."""
    crowd = crowd.first(members)
    layout = layout_for(members, VALUES)
    context = context or complete_context(members, layout, 4)
    who = [party.member for party in crowd.parties]
    server = KeepingServer(context, layout, who, crowd.verify, crowd.key_of, due_of_server(context, len(lost)))
    server.bend = how.pop("bend", 0.0)
    return play(crowd, context, layout, lost, server, **how), server


def test_the_mean_is_that_of_the_survivors(crowd):
    outcome, server = attempt(crowd)
    step = 1 / layout_for(6, VALUES).segments[0].scale
    assert np.abs(server.mean - mean_of([0, 1, 3, 4, 5], VALUES)).max() == outcome.max_abs_error <= step
    assert np.abs(server.mean - mean_of(range(6), VALUES)).max() > 0.1
    assert outcome.timed == 5
    assert server.watch.wall > 0 < outcome.member_wall


def test_every_party_checks_every_due_signature(crowd):
    calls = []

    def verify(certificate, message, signature):
        calls.append(signature)
        return crowd.verify(certificate, message, signature)

    counted = Crowd(crowd.root, crowd.parties, verify, crowd.key_of, 0.0)
    outcome, _ = attempt(counted)
    # A member: a roster of 6, 5 dealings, 5 confirmations. The lost one saw only the roster. The server: 6 + 6 + 5 + 5.
    assert outcome.checked == {"member": 16, "server": 22}
    assert len(calls) == 5 * 16 + 6 + 22


def test_untimed_members_share_their_checks(crowd):
    calls = []

    def verify(certificate, message, signature):
        calls.append(signature)
        return crowd.verify(certificate, message, signature)

    outcome, _ = attempt(Crowd(crowd.root, crowd.parties, verify, crowd.key_of, 0.0), timed=1)
    # One member and the server check alone. The others share 6 on the roster, 6 dealings and 5 confirmations.
    assert outcome.timed == 1
    assert len(calls) == 16 + 22 + (6 + 6 + 5)


def test_a_sparse_cohort_checks_its_neighbourhood(crowd):
    layout = layout_for(24, VALUES)
    context = sparse_context(24, layout)
    outcome, server = attempt(crowd, 24, (5, 11), context, timed=2)
    assert np.abs(server.mean - mean_of([n for n in range(24) if n not in (5, 11)], VALUES)).max() < 1e-5
    assert outcome.checked["member"] == 24 + context.sparse.degree + context.min_confirmations
    assert context.sparse.degree < 23


def test_unchecked_dealings_are_noticed(crowd, monkeypatch):
    monkeypatch.setattr(Seat, "signed_by", lambda *_: True)
    with pytest.raises(ChecksMissing, match="m0000 checked 0 signatures, 0 of them distinct, in phase mask; 5 were"):
        attempt(crowd)


def test_a_missing_consistency_check_is_noticed(crowd, monkeypatch):
    monkeypatch.setattr(AwaitingConfirmations, "_check_confirmations", lambda *_: None)
    with pytest.raises(ChecksMissing, match="m0000 checked 0 signatures, 0 of them distinct, in phase unmask"):
        attempt(crowd)


def test_unchecked_confirmations_at_the_server_are_noticed(crowd, monkeypatch):
    monkeypatch.setattr(server_confirm, "signed_by", lambda *_: True)
    with pytest.raises(ChecksMissing, match="the server checked 0 signatures, 0 of them distinct, in phase confirm"):
        attempt(crowd)


def test_one_signature_checked_many_times_counts_once(crowd, monkeypatch):
    honest = Seat.signed_by
    first = []

    def again(seat, *asked):
        first.append(asked)
        return honest(seat, *first[0])

    monkeypatch.setattr(Seat, "signed_by", again)
    with pytest.raises(ChecksMissing, match="checked 5 signatures, 1 of them distinct"):
        attempt(crowd)


def test_a_wrong_mean_fails_the_measurement(crowd):
    with pytest.raises(CohortFailed, match="the mean is off by"):
        attempt(crowd, bend=0.01)


def test_a_lost_threshold_is_reported(crowd):
    with pytest.raises(CohortFailed, match="threshold_lost"):
        attempt(crowd, lost=(0, 1, 2))


@pytest.mark.parametrize(("members", "bits", "scale"), [(10, 27, 2**19), (100, 30, 2**19), (1000, 32, 2**18)])
def test_the_ring_is_narrowest_for_a_grid_at_least_as_fine_as_flowers(members, bits, scale):
    layout = layout_for(members, 5)
    assert (layout.bits, layout.segments[0].scale) == (bits, scale)
    with pytest.raises(LayoutInvalid):
        Layout(layout.segments, bits - 1).check_no_wrap(members)


def test_more_members_than_32_bits_hold_are_refused():
    with pytest.raises(ValueError, match="32 bits do not hold the sum of 1100 members"):
        layout_for(1100, 5)


@pytest.mark.parametrize("members", [10, 50, 100])
def test_two_thirds_come_with_the_most_corrupt_they_allow(members):
    context = complete_context(members, layout_for(members, 5), -(-2 * members // 3))
    fields = {name: getattr(context, name) for name in context.__slots__}
    with pytest.raises(ContextInvalid, match="too low"):
        secure_agg.RoundContext(**{**fields, "assumed_corrupt": context.assumed_corrupt + 1})


def test_the_due_checks_follow_from_the_context():
    context = complete_context(10, layout_for(10, 5))
    assert due_of_member(context, 2) == {
        Phase.ADVERTISE: 0,
        Phase.SHARE: 10,
        Phase.MASK: 9,
        Phase.CONFIRM: 0,
        Phase.UNMASK: 8,
    }
    assert sum(due_of_server(context, 2).values()) == 10 + 10 + 8 + 8


def test_keys_of_few_primes_are_distinct_and_sign():
    keys = keys_of_few_primes(6)
    assert len({key.private_numbers().public_numbers.n for key in keys}) == 6
    assert {key.key_size for key in keys} == {3072}
    signature = sign(keys[0], b"message")
    verify_signature(keys[0].public_key(), b"message", signature)
    with pytest.raises(CertificateInvalid):
        verify_signature(keys[1].public_key(), b"message", signature)


def test_vectors_are_reproducible_and_within_flowers_range():
    assert np.array_equal(vector_of(3, 100), vector_of(3, 100))
    assert not np.array_equal(vector_of(3, 100), vector_of(4, 100))
    assert np.abs(vector_of(3, 10_000)).max() <= 8
    assert names(1000) == sorted(names(1000))
