"""A coordinator that lies: every lie at the end of the protocol's page, carried out, refused by name, and logged.

Each ends in the honest member's refusal, with a warning in its log that names the fault, and reveals nothing of the
member. Each is tried on the member's machine (`LyingFleet`). What a network can carry is tried again with real
processes: west's calls go through a relay that has the coordinator's own certificate and changes its messages.

lie                                   machine                                 network                     reason
------------------------------------  --------------------------------------  --------------------------  ----------------
swapped or unsigned keys              test_swapped_or_unsigned_keys           swapped-key, unsigned-key   ROSTER_SIGNATURE_INVALID
a roster that differs                 test_a_roster_that_differs_...          flipped-bit-of-a-roster     DEALINGS_SIGNATURE_INVALID,
                                                                                                          here ROSTER_*
two versions of U3                    test_two_versions_of_u3_...             test_two_versions_of_u3_... CONFIRMATIONS_SIGNATURE_INVALID
    to one member                     test_a_second_version_of_u3_...         second-survivors            SECOND_SURVIVORS
a U3 with withheld dealings           test_a_u3_with_withheld_dealings (1)    test_a_withheld_dealing_... SURVIVORS_NOT_DEALT
a member both alive and dropped       test_a_member_both_alive_and_dropped    second-survivors            CONFIRMATIONS_SIGNATURE_INVALID,
                                                                                                          CONFIRMATIONS_TOO_FEW
itself listed as dropped              test_itself_listed_as_dropped           itself-dropped              SURVIVORS_WITHOUT_SELF
a repeated unmask request             test_a_repeated_unmask_request          unmask-again, ...           SECOND_UNMASK_REQUEST,
                                                                                                          SECOND_SURVIVORS
a replayed session                    test_a_replayed_session_...             test_a_replayed_attempt_... ATTEMPT_REPLAYED,
                                                                                                          ROSTER_OWN_ENTRY_ALTERED
a lowered threshold                   test_a_lowered_threshold                fewer-corrupt, and (2)      CONTEXT_UNEXPECTED
a shrunken cohort                     test_a_shrunken_cohort, ..._member      shrunken-cohort             CONTEXT_UNEXPECTED,
                                                                                                          ROSTER_SIGNATURE_INVALID
different models                      test_different_models                   another-model               the same two
different recipes                     test_different_recipes_and_a_wider_clip another-recipe              the same two
a widened clip                        test_different_recipes_and_a_wider_clip another-recipe              the same two
a modulus that wraps                  test_a_modulus_that_wraps               narrower-ring               CONTEXT_UNEXPECTED
forged and truncated ciphertexts      test_forged_and_truncated_ciphertexts   forged, truncated           DEALINGS_SIGNATURE_INVALID,
                                                                                                          DEALINGS_MALFORMED
a share off its commitment            test_a_share_that_does_not_match_...    (3)                         a complaint
a share at point 0                    test_a_share_at_point_0                 (3)                         a complaint
another seed of a pair                test_a_chooser_that_lies_about_a_...    (3)                         a complaint
the same update twice                 test_the_same_update_asked_for_twice    (4)                         POLICY_SECOND_SUM
a flipped bit anywhere                test_a_flipped_bit_anywhere_...         flipped-bit-of-a-roster,    whatever it hits
                                                                              test_unreadable_bytes_...

(1) The attack succeeds on a member without this check: tests/unit/secure_agg/test_sa_attacks.py. The split view with
colluding members, both ways: tests/attacks/test_split_view.py.
(2) A threshold that contradicts the cohort makes no context: CONTEXT_INVALID, test_an_impossible_context_...
(3) Needs a member on the coordinator's side that seals it; on the wire it looks like any sealed share.
(4) Needs a failed attempt; tests/attacks/test_sums_of_one_version.py has both sides of it.
"""
# ruff: noqa: E501  the table

import json
import random
import re
import threading
from contextlib import ExitStack
from dataclasses import replace

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

import secure_agg
from coordinator.config import CoordinatorFolder
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.services.credentials import federation_credentials
from edge_client.identity.home import MemberIdentity
from edge_client.policy.policy import Policy
from edge_client.session import states
from secure_agg.sealing import SecretKey
from secure_agg.session import Session
from secure_agg.shamir import PRIME, SHARE_BYTES, ShareInvalid, combine_secret, deal_secret
from tacit import wire
from tacit.attempt import AttemptId
from tacit.context import application_digest
from tacit.job import Aggregation
from tacit.messages import Assignment, AttemptMessage, AttemptOpened, AttemptRefusal
from tacit.reason import Reason, word
from tacit.v1 import federation_pb2 as pb
from tacit.vector import layout_of
from tests.support.crooked import opened, resealed, reseeded, resigned
from tests.support.fleet import job_document
from tests.support.lying import JOB, VICTIM, LyingFleet, LyingRelay, dealt_to, flipped, honest
from tests.support.processes import EXAMPLES, Federation, behind
from tests.support.sum_fleet import SeededRandom
from tests.support.sweep import sweep

OTHER = bytes([7]) * 32
KEYS = SecretKey(OTHER * 3).public + SecretKey(bytes(96)).public


def until_the_end(fleet):
    """Runs until the first attempt has ended. Checks that any opened sum is right, over exactly U3."""
    fleet.connect().run(lambda: bool(fleet.ends()))
    fleet.check()
    return fleet


def until_said(fleet, kind, name=VICTIM):
    """Runs until a member has sent its first message of a kind."""
    return fleet.connect().run(lambda: bool(fleet.payloads(kind, name)))


# ---- keys and rosters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["keys", "nonce", "signature"])
def test_swapped_or_unsigned_keys(change):
    fleet = LyingFleet(5)
    value = {"keys": KEYS, "nonce": OTHER, "signature": b""}[change]

    def swap(roster):
        entries = (replace(each, **{change: value}) if each.member == "m3" else each for each in roster.advertisements)
        return secure_agg.Roster(tuple(entries))

    fleet.bent(secure_agg.Roster, swap)
    until_the_end(fleet)
    fleet.refused(Reason.REASON_ROSTER_SIGNATURE_INVALID, "m3")
    # The other four are enough.
    assert fleet.ends()[0].published
    assert VICTIM not in fleet.ends()[0].survivors


def test_a_roster_that_differs_between_members():
    """m4 belongs to the coordinator, and signs two advertisements: one for the victim's roster, one for all others."""
    fleet = LyingFleet(5)
    fleet.in_the_dark(VICTIM)
    shown = []

    def swap(roster):
        context, environment = fleet.in_attempt().stage.context, fleet.members["m4"].environment
        _, second = secure_agg.advertise(
            context, environment.identity, environment.verify, SeededRandom("second"), key_of=environment.key_of
        )
        shown.append(roster)
        return secure_agg.Roster((*roster.advertisements[:4], second))

    fleet.bent(secure_agg.Roster, swap)
    fleet.connect().run(lambda: all(fleet.payloads(secure_agg.Dealing, name) for name in fleet.members))
    # The roster is valid, so the victim deals, but in another session than the rest, so the two never meet.
    session = Session.of(fleet.in_attempt().stage.seat.context, shown[0].advertisements)
    assert fleet.in_attempt().stage.seat.session.id != fleet.in_attempt("m1").stage.seat.session.id == session.id
    dealings = [fleet.payloads(secure_agg.Dealing, name)[0] for name in ("m1", "m2", "m3", "m4")]
    fleet.say(dealt_to(VICTIM, dealings, session))
    fleet.refused(Reason.REASON_DEALINGS_SIGNATURE_INVALID, "m1", "signature", after=(secure_agg.Dealing,))
    until_the_end(fleet)
    # The coordinator cannot use the victim's dealing either.
    assert [(lost.member, lost.reason) for lost in fleet.ends()[0].dropouts] == [
        (VICTIM, Reason.REASON_DEALING_SIGNATURE_INVALID)
    ]


def test_a_roster_of_more_members_than_the_cohort():
    """One of them was never invited to the attempt, but its certificate and signature are good."""
    fleet = LyingFleet(5)
    stranger = LyingFleet(6).members["m5"].environment

    def crowd(roster):
        _, entry = secure_agg.advertise(
            fleet.in_attempt().stage.context, stranger.identity, stranger.verify, stranger.random
        )
        return secure_agg.Roster((*roster.advertisements, entry))

    fleet.bent(secure_agg.Roster, crowd)
    until_the_end(fleet)
    fleet.refused(Reason.REASON_ROSTER_TOO_LARGE, "6", "5")


# ---- U3 -------------------------------------------------------------------------------------------------------------


def test_two_versions_of_u3_to_two_sides():
    fleet = LyingFleet(5)
    fleet.in_the_dark(VICTIM)
    fleet.bent(secure_agg.Survivors, lambda survivors: secure_agg.Survivors(survivors.members[:4]))
    said = []

    def overhear(name, message):
        if name == "m1" and isinstance(getattr(message, "payload", None), secure_agg.Confirmations) and not said:
            said.append(message)
            fleet.say(message.payload)

    fleet.before = overhear
    until_the_end(fleet)
    fleet.refused(Reason.REASON_CONFIRMATIONS_SIGNATURE_INVALID, "m1", after=(secure_agg.Confirmation,))
    assert fleet.payloads(secure_agg.Unmasking) == []


def test_a_second_version_of_u3_for_one_member():
    fleet = LyingFleet(5)
    until_said(fleet, secure_agg.Confirmation)
    fleet.say(secure_agg.Survivors(("m0", "m1", "m2", "m3")))
    fleet.refused(Reason.REASON_SECOND_SURVIVORS, "different")
    until_the_end(fleet)
    assert fleet.payloads(secure_agg.Unmasking) == []


def test_a_u3_with_withheld_dealings():
    """tests/unit/secure_agg/test_sa_attacks.py shows that the attack succeeds without the check."""
    fleet = LyingFleet(5)

    def withhold(name, message):
        payload = getattr(message, "payload", None)
        if name == VICTIM and isinstance(payload, secure_agg.ReceivedDealings):
            fleet.held_back = True  # type: ignore[attr-defined]
            return replace(message, payload=secure_agg.ReceivedDealings(payload.dealings[:3]))
        return message

    fleet.bend = withhold
    # U3 is unchanged. This only records the moment.
    fleet.bent(secure_agg.Survivors, lambda survivors: survivors)
    fleet.connect().run(lambda: bool(fleet.payloads(AttemptRefusal)))
    assert fleet.held_back  # type: ignore[attr-defined]
    fleet.refused(Reason.REASON_SURVIVORS_NOT_DEALT, "m4", "dealing never arrived")
    assert fleet.payloads(secure_agg.Confirmation) == []


@pytest.mark.parametrize("shown", ["everybody's", "alike"])
def test_a_member_both_alive_and_dropped(shown):
    """m0 and m1 hear that m4 was lost, so that they reveal shares of its masking key. The others hear that it is there,
    so that they reveal shares of its seed.
    """
    fleet = LyingFleet(5)
    names = tuple(fleet.members)
    without = ("m0", "m1", "m2", "m3")
    fleet.in_the_dark(*names)
    for name in ("m0", "m1"):
        fleet.bent(secure_agg.Survivors, lambda survivors: secure_agg.Survivors(without), name)
    fleet.connect().run(lambda: all(fleet.payloads(secure_agg.Confirmation, name) for name in names))
    signed = {name: fleet.payloads(secure_agg.Confirmation, name)[0] for name in names}
    for name in names:
        told = ("m0", "m1") if name in ("m0", "m1") else ("m2", "m3", "m4")
        of = told if shown == "alike" else tuple(each for each in names if each in without or name not in without)
        fleet._lied_at[name] = len(fleet.effects[name])
        fleet.say(secure_agg.Confirmations(tuple(signed[each] for each in of)), name=name)
        if shown == "alike":
            fleet.refused(Reason.REASON_CONFIRMATIONS_TOO_FEW, f"{len(told)} confirmed", "at least 4", name=name)
        else:
            odd = "m2" if name in ("m0", "m1") else "m0"
            fleet.refused(Reason.REASON_CONFIRMATIONS_SIGNATURE_INVALID, odd, name=name)
    assert not any(fleet.payloads(secure_agg.Unmasking, name) for name in names)


def test_itself_listed_as_dropped():
    fleet = LyingFleet(5)
    fleet.bent(secure_agg.Survivors, lambda survivors: secure_agg.Survivors(survivors.members[1:]))
    until_the_end(fleet)
    fleet.refused(Reason.REASON_SURVIVORS_WITHOUT_SELF, "leaves out")
    assert fleet.payloads(secure_agg.Confirmation) == []


# ---- the request to unmask ------------------------------------------------------------------------------------------


def test_a_repeated_unmask_request():
    fleet = LyingFleet(5)
    heard = []
    fleet.before = lambda name, message: heard.append(message) if name == VICTIM else None
    until_said(fleet, secure_agg.Unmasking)
    request = heard[-1].payload
    # The same message again is a retransmission, and gets the same answer to the byte.
    fleet.tell(VICTIM, states.Received(heard[-1]))
    first, second = fleet.payloads(secure_agg.Unmasking)
    assert first == second
    fleet.say(secure_agg.Confirmations(request.confirmations[1:]))
    fleet.refused(Reason.REASON_SECOND_UNMASK_REQUEST, "different")


def test_a_repeated_unmask_request_for_other_survivors():
    fleet = LyingFleet(5)
    until_said(fleet, secure_agg.Unmasking)
    attempt = fleet.attempt
    fleet.say(secure_agg.Survivors(("m0", "m1", "m2", "m3")))
    fleet.refused(Reason.REASON_SECOND_SURVIVORS, "different")
    # The member has forgotten the attempt, so it can answer nothing about it.
    for payload in (secure_agg.Survivors(("m0", "m1", "m2", "m3")), secure_agg.Confirmations(())):
        fleet.say(payload, attempt)
    assert len(fleet.payloads(secure_agg.Unmasking)) == 1
    assert [refusal.reason for refusal in fleet.payloads(AttemptRefusal)] == [Reason.REASON_SECOND_SURVIVORS] * 3


# ---- replays --------------------------------------------------------------------------------------------------------


def test_a_replayed_session_is_not_joined():
    fleet = LyingFleet(5, job=job_document(count=2))
    opened = []
    fleet.before = lambda name, message: (
        opened.append(message)
        if name == VICTIM and isinstance(getattr(message, "payload", None), AttemptOpened)
        else None
    )
    fleet.connect().run(lambda: len(opened) == 2)
    fleet.say(opened[0].payload, opened[0].attempt)
    fleet.refused(Reason.REASON_ATTEMPT_REPLAYED, "attempt 1.1 is not above")
    # The attempt that is under way continues.
    fleet.run()
    fleet.check()
    assert fleet.state.version_number == 2


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        (secure_agg.Roster, Reason.REASON_ROSTER_OWN_ENTRY_ALTERED, (VICTIM,)),
        (secure_agg.ReceivedDealings, Reason.REASON_DEALINGS_SIGNATURE_INVALID, ("m1",)),
        (secure_agg.Confirmations, Reason.REASON_CONFIRMATIONS_SIGNATURE_INVALID, (VICTIM,)),
    ],
    ids=["roster", "dealings", "confirmations"],
)
def test_a_replayed_session_does_not_fit_a_new_one(kind, reason, words):
    fleet = LyingFleet(5, job=job_document(count=2))
    first = {}

    def replay(name, message):
        payload = getattr(message, "payload", None)
        if name != VICTIM or payload is None:
            return message
        earlier = first.setdefault(type(payload), payload)
        if isinstance(payload, kind) and earlier is not payload:
            fleet.lied()
            return replace(message, payload=earlier)
        return message

    fleet.bend = replay
    fleet.connect().run(lambda: bool(fleet.payloads(AttemptRefusal)))
    assert fleet.state.round == 2
    fleet.refused(reason, *words)


# ---- numbers --------------------------------------------------------------------------------------------------------


def opened_as(fleet, **change):
    fleet.bent(AttemptOpened, lambda opened: AttemptOpened(replace(opened.context, **change)))
    return fleet


def not_even_joined(fleet):
    """No key was shown, and nothing is in the journal."""
    assert fleet.payloads(secure_agg.Advertisement) == []
    assert fleet.members[VICTIM].joined == []
    assert fleet.ends()[0].published


def test_a_lowered_threshold():
    # Three of five with one corrupt: 2t > n + n_C does not hold, so neither side has such a context.
    fleet = LyingFleet(5)
    with pytest.raises(secure_agg.ContextInvalid, match=r"2t > n \+ n_C"):
        until_the_end(opened_as(fleet, threshold=3))
    message = wire.to_member(AttemptMessage(fleet.attempt, fleet.state.phase.outbox[VICTIM]))
    message.attempt_opened.threshold = 3
    fleet.say(wire.from_coordinator(message).payload)
    fleet.refused(Reason.REASON_CONTEXT_INVALID, "threshold 3 is too low")
    assert fleet.payloads(secure_agg.Advertisement) == []
    # With nobody corrupt it would hold, but the member knows how many it must assume.
    fleet = until_the_end(opened_as(LyingFleet(5), threshold=3, assumed_corrupt=0))
    fleet.refused(Reason.REASON_CONTEXT_UNEXPECTED, "assumed_corrupt")
    not_even_joined(fleet)


def test_a_threshold_lowered_by_the_job_meets_the_members_own_minimum():
    trusting = job_document(Aggregation(assumed_corrupt=0))
    fleet = LyingFleet(5, job=trusting)
    fleet.connect().run(hours=1)
    assert not fleet.results
    for name in fleet.members:
        assert Reason.REASON_POLICY_CORRUPTION in {each.reason for each in fleet.payloads(AttemptRefusal, name)}
        assert fleet.payloads(secure_agg.Advertisement, name) == []


def smaller(job, members, **more):
    """The context's numbers for an honest cohort of this size."""
    threshold, corrupt = secure_agg.default_thresholds(members)
    layout = layout_of(job, members)
    return {
        "cohort": members,
        "threshold": threshold,
        "assumed_corrupt": corrupt,
        "application": application_digest(job, layout),
        **more,
    }


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"cohort": 4, "threshold": 3}, "application"),
        ({"cohort": 3, "threshold": 3}, "application"),
        ({"cohort": 2, "threshold": 2, "assumed_corrupt": 0}, "cohort"),
    ],
    ids=str,
)
def test_a_shrunken_cohort(change, word):
    fleet = until_the_end(opened_as(LyingFleet(5), **change))
    fleet.refused(Reason.REASON_CONTEXT_UNEXPECTED, word)
    not_even_joined(fleet)


def test_a_shrunken_cohort_below_the_members_own_minimum():
    fleet = LyingFleet(5, policy=Policy(mechanisms=("none",), min_cohort=5))
    until_the_end(opened_as(fleet, **smaller(fleet.job, 4)))
    fleet.refused(Reason.REASON_POLICY_COHORT, "4", "5")
    not_even_joined(fleet)


def apart(fleet):
    """The victim got a context of its own, and joined. Whatever keys the coordinator now shows it are signed for another
    context, and so are the victim's keys for the others.
    """
    fleet.in_the_dark(VICTIM)
    rosters = []
    overheard = fleet.bend

    def overhear(name, message):
        message = overheard(name, message)
        if name == "m1" and isinstance(getattr(message, "payload", None), secure_agg.Roster):
            rosters.append(message.payload)
        return message

    fleet.bend = overhear
    fleet.connect().run(lambda: bool(rosters))
    (own,) = fleet.payloads(secure_agg.Advertisement)
    others = [each for each in rosters[0].advertisements if each.member != VICTIM]
    cohort = fleet.in_attempt().heard[AttemptOpened].context.cohort
    fleet._lied_at[VICTIM] = len(fleet.effects[VICTIM])
    fleet.say(secure_agg.Roster((own, *others[: cohort - 1])))
    fleet.refused(Reason.REASON_ROSTER_SIGNATURE_INVALID, "m1")
    fleet.say(secure_agg.Roster((own, *others)), name="m1")
    fleet.refused(Reason.REASON_ROSTER_SIGNATURE_INVALID, VICTIM, name="m1")
    fleet.run(lambda: bool(fleet.ends()))
    assert (VICTIM, Reason.REASON_ADVERTISEMENT_SIGNATURE_INVALID) in {
        (lost.member, lost.reason) for lost in fleet.ends()[0].dropouts
    }


def test_a_shrunken_cohort_for_one_member():
    """All its numbers are consistent, as for an honest cohort of four."""
    fleet = LyingFleet(5)
    apart(opened_as(fleet, **smaller(fleet.job, 4)))


def test_different_models():
    fleet = until_the_end(opened_as(LyingFleet(5), model=OTHER))
    fleet.refused(Reason.REASON_CONTEXT_UNEXPECTED, "model")
    not_even_joined(fleet)


def test_different_models_from_the_assignment_on():
    fleet = LyingFleet(5)
    opened_as(fleet, model=OTHER)
    opening = fleet.bend

    def bend(name, message):
        if name == VICTIM and isinstance(message, Assignment):
            return replace(message, version=OTHER)
        return opening(name, message)

    def hear(name, event):
        if name == VICTIM and isinstance(event, ev.SaidReady):
            assert event.version == OTHER
            return replace(event, version=fleet.state.version)
        return event

    fleet.bend, fleet.hear = bend, hear
    apart(fleet)


RECIPES = {
    "recipe": job_document().model_copy(update={"seed": 1}),
    "clip": job_document(Aggregation(clip=1000.0)),
    "bound": job_document(Aggregation(coordinate_bound=1000.0)),
    "weight": job_document(Aggregation(max_weight=4_000_000)),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_different_recipes_and_a_wider_clip(recipe):
    """The victim trained under another document than the rest, so the attempt is not for its document."""
    fleet = LyingFleet(5)
    fleet.jobs[VICTIM] = RECIPES[recipe]
    fleet.bent(AttemptOpened, lambda opened: opened)
    until_the_end(fleet)
    fleet.refused(Reason.REASON_CONTEXT_UNEXPECTED, "application")
    not_even_joined(fleet)


@pytest.mark.parametrize("recipe", RECIPES)
def test_different_recipes_and_a_wider_clip_from_the_assignment_on(recipe):
    fleet = LyingFleet(5)
    fleet.jobs[VICTIM] = RECIPES[recipe]
    layout = layout_of(RECIPES[recipe], 5)
    apart(opened_as(fleet, application=application_digest(RECIPES[recipe], layout), bits=layout.bits))


@pytest.mark.parametrize("bits", [8, 16, 31])
def test_a_modulus_that_wraps(bits):
    fleet = until_the_end(opened_as(LyingFleet(5), bits=bits))
    fleet.refused(Reason.REASON_CONTEXT_UNEXPECTED, "bits")
    not_even_joined(fleet)


def test_a_ring_too_narrow_for_its_sum_is_refused_when_it_is_built():
    """Both sides refuse, with the same function, so no such numbers of a job or cohort ever reach the members."""
    heavy = job_document(Aggregation(max_weight=4_000_000), target_members=200)
    layout_of(heavy, 200).check_no_wrap(200)
    with pytest.raises(secure_agg.LayoutInvalid, match="could wrap"):
        layout_of(heavy, 600)
    with pytest.raises(secure_agg.LayoutInvalid, match="could wrap"):
        layout_of(heavy, 200).check_no_wrap(600)
    with pytest.raises(secure_agg.LayoutInvalid, match="could wrap"):
        replace(layout_of(heavy, 200), bits=16)


# ---- dealings -------------------------------------------------------------------------------------------------------


def dealt(change, dealer="m3"):
    """Changes the dealing of one dealer."""
    return lambda dealings: secure_agg.ReceivedDealings(
        tuple(change(each) if each.dealer == dealer else each for each in dealings.dealings)
    )


SEALED = ("sealed_key", "locked_shares", "sealed_pair_seed")


@pytest.mark.parametrize("field", SEALED)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda sealed: flipped(sealed, 3), Reason.REASON_DEALINGS_SIGNATURE_INVALID),
        (lambda sealed: flipped(sealed, 8 * len(sealed) - 1), Reason.REASON_DEALINGS_SIGNATURE_INVALID),
        (lambda sealed: sealed[40:] + sealed[:40], Reason.REASON_DEALINGS_SIGNATURE_INVALID),
        (lambda sealed: bytes(len(sealed)), Reason.REASON_DEALINGS_SIGNATURE_INVALID),
        (lambda sealed: sealed[:-1], Reason.REASON_DEALINGS_MALFORMED),
        (lambda sealed: sealed[:16], Reason.REASON_DEALINGS_MALFORMED),
        (lambda sealed: b"", Reason.REASON_DEALINGS_MALFORMED),
        (lambda sealed: sealed + b"\0", Reason.REASON_DEALINGS_MALFORMED),
    ],
    ids=["bit", "tag", "turned", "zeros", "one-short", "tag-only", "empty", "one-more"],
)
def test_forged_and_truncated_ciphertexts(change, reason, field):
    """The dealer signed another one, so the coordinator is at fault. m2 chooses the seed of its pair with the victim."""
    fleet = LyingFleet(5)

    def forged(each):
        return replace(each, share=replace(each.share, **{field: change(getattr(each.share, field))}))

    fleet.bent(secure_agg.ReceivedDealings, dealt(forged, "m2"))
    until_the_end(fleet)
    fleet.refused(reason, "m2")
    assert fleet.members[VICTIM].opened == []
    assert fleet.ends()[0].published


def dealt_by(dealer, fleet, change):
    """Replaces what a dealer, which belongs to the coordinator, made for the victim. The dealer signs it."""

    def lie(dealing):
        session = fleet.in_attempt(dealer).stage.seat.session
        identity = fleet.members[dealer].environment.identity
        original = fleet.payloads(secure_agg.Dealing, dealer)[-1]
        again = resigned(session, identity, original, VICTIM, lambda share: change(session, share))
        (received,) = dealt_to(VICTIM, [again], session).dealings
        return received

    return dealt(lie, dealer)


def complained(fleet, dealer, part):
    """The victim complains about exactly this, and never masks. The coordinator dealt it something else than it kept."""
    (said,) = fleet.payloads(secure_agg.Complaints)
    assert [(each.dealer, each.part) for each in said.complaints] == [(dealer, part)]
    assert fleet.members[VICTIM].opened == []
    notes = [each for each in fleet.since() if isinstance(each, states.Note) and each.what == "complained"]
    assert [(note.warning, note.fields["dealer"]) for note in notes] == [(True, dealer)]


def resealed_by_m3(fleet, change):
    """Changes the two shares that m3 deals to the victim, and seals and signs them."""

    def other(session, share):
        pair = opened(session, "m3", share, fleet.in_attempt().stage._sealing)
        return resealed(session, "m3", share, change(pair))

    return dealt_by("m3", fleet, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda pair: bytes(SHARE_BYTES) + pair[SHARE_BYTES:],
        lambda pair: pair[:SHARE_BYTES] + bytes(SHARE_BYTES),
        lambda pair: pair[SHARE_BYTES:] + pair[:SHARE_BYTES],
        lambda pair: flipped(pair, 8 * SHARE_BYTES - 1),
        lambda pair: PRIME.to_bytes(SHARE_BYTES, "big") + pair[SHARE_BYTES:],
    ],
    ids=["root", "seed", "swapped", "last-bit", "out-of-range"],
)
def test_a_share_that_does_not_match_its_commitment(change):
    fleet = LyingFleet(5)
    fleet.bent(secure_agg.ReceivedDealings, resealed_by_m3(fleet, change))
    until_the_end(fleet)
    complained(fleet, "m3", secure_agg.Part.SHARES)


@pytest.mark.parametrize("secret", ["root", "seed"])
def test_a_share_at_point_0(secret):
    """The polynomial's value at 0 is the secret itself. m3 gives it to the victim instead of its share."""
    fleet = LyingFleet(5)

    def at_zero(pair):
        if secret == "seed":
            return pair[:SHARE_BYTES] + b"\0" + fleet.in_attempt("m3").stage._seed.reveal()
        session = fleet.in_attempt("m3").stage.seat.session
        others = [each for each in session.members if each != "m3"]
        shares = {each.receiver: each for each in fleet.payloads(secure_agg.Dealing, "m3")[-1].shares}
        pairs = [(each, opened(session, "m3", shares[each], keys[each])) for each in others]
        root = combine_secret([(session.point(each), pair[:SHARE_BYTES]) for each, pair in pairs], 4)
        return b"\0" + root + pair[SHARE_BYTES:]

    keys = {}

    def look(name, message):
        # The members' secret keys before they erase them.
        stage = getattr(fleet.members[name].state.phase(JOB), "stage", None) if name in fleet.members else None
        if isinstance(stage, secure_agg.AwaitingDealings) and name not in keys:
            keys[name] = SecretKey(stage._sealing.reveal())
        return message

    fleet.hear = look
    fleet.bent(secure_agg.ReceivedDealings, resealed_by_m3(fleet, at_zero))
    until_the_end(fleet)
    complained(fleet, "m3", secure_agg.Part.SHARES)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda session, share: reseeded(session, "m2", share, b"s" * 32),
        lambda session, share: replace(share, sealed_pair_seed=flipped(share.sealed_pair_seed, 3)),
        lambda session, share: replace(share, sealed_pair_seed=flipped(share.sealed_pair_seed, 8 * 1100)),
        lambda session, share: replace(share, pair_seed_commitment=bytes(32)),
    ],
    ids=["another-seed", "lattice", "curve", "commitment"],
)
def test_a_chooser_that_lies_about_a_pairs_seed(spoil):
    fleet = LyingFleet(5)
    # m2 chooses the seed of its pair with the victim.
    fleet.bent(secure_agg.ReceivedDealings, dealt_by("m2", fleet, spoil))
    until_the_end(fleet)
    complained(fleet, "m2", secure_agg.Part.PAIR_SEED)


def test_no_message_can_name_a_point():
    """Points are places in the roster, starting at 1. No message holds one, and none is 0."""
    kinds = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE}
    for message in (pb.ReceivedDealing, pb.DealtShare, pb.RevealedShare, pb.Dealing, pb.Unmasking):
        assert {field.type for field in message.DESCRIPTOR.fields} <= kinds
    fleet = LyingFleet(5)
    until_said(fleet, secure_agg.Dealing)
    session = fleet.in_attempt().stage.seat.session
    assert [session.point(member) for member in session.members] == [1, 2, 3, 4, 5]
    shares = deal_secret(OTHER, 2, (1, 2, 3), SeededRandom("shares"))
    with pytest.raises(ShareInvalid, match="point 0"):
        combine_secret([(0, b"\0" + OTHER), (1, shares[0])], 2)
    with pytest.raises(ShareInvalid):
        deal_secret(OTHER, 2, (0, 1, 2), SeededRandom("shares"))


# ---- the same update twice ------------------------------------------------------------------------------------------


def test_the_same_update_asked_for_twice():
    """Attempt 1 over five is said to have failed. Attempt 2 asks a new cohort without m4 for the same updates."""
    fleet = LyingFleet(5, policy=Policy(mechanisms=("none",)))
    carry_out, failed = fleet._effect, []

    def effect(wanted):
        if isinstance(wanted, fx.Compute):
            failed.append(wanted.attempt)
            fleet.cut("m4")
            fleet.post(ev.ComputeFailed(wanted.attempt, Reason.REASON_INTERNAL, "the coordinator says so"))
        else:
            carry_out(wanted)

    fleet._effect = effect
    fleet.connect().run(lambda: bool(failed))
    fleet.lied("m0", "m1", "m2", "m3")
    fleet.run(lambda: len(fleet.ends()) == 2, hours=1)
    assert failed == [AttemptId(JOB, 1, 1)]
    assert not fleet.results
    for name in ("m0", "m1", "m2", "m3"):
        # The member refuses the roster, so no share is dealt and no second vector leaves.
        assert not [effect for effect in fleet.since(name) if isinstance(effect, states.MaskAndUpload)]
        (refusal,) = [
            each for each in fleet.payloads(AttemptRefusal, name) if each.reason == Reason.REASON_POLICY_SECOND_SUM
        ]
        assert "m4" in refusal.detail
        assert len(fleet.payloads(secure_agg.Unmasking, name)) == 1


# ---- bits on the wire -----------------------------------------------------------------------------------------------

KINDS = (
    AttemptOpened,
    secure_agg.Roster,
    secure_agg.ReceivedDealings,
    secure_agg.Survivors,
    secure_agg.Confirmations,
)
# A member's answer to each of them if it is in order.
ANSWERS = (
    secure_agg.Advertisement,
    secure_agg.Dealing,
    states.MaskAndUpload,
    secure_agg.Confirmation,
    secure_agg.Unmasking,
)


def at(kind):
    """A fleet of four, of which three are enough, and the victim's first message of a kind, which is not delivered."""
    fleet, about = LyingFleet(4), []

    def keep(name, message):
        if name == VICTIM and isinstance(getattr(message, "payload", None), kind):
            about.append(message)
        return message

    fleet.bend = keep
    # The message is never delivered.
    fleet.lose = lambda name, message: any(message is each for each in about)
    fleet.connect().run(lambda: bool(about))
    return fleet, about[0]


def read(data):
    """What the member's side of the connection reads from these bytes. None ends the session."""
    try:
        return wire.from_coordinator(pb.CoordinatorMessage.FromString(data))
    except (DecodeError, wire.WireInvalid):
        return None


def goes_on(effects, answer):
    """Whether a member answered as if nothing were wrong."""
    return any(
        isinstance(effect, answer)
        or (isinstance(effect, states.Say) and isinstance(getattr(effect.message, "payload", None), answer))
        for effect in effects
    )


def flip_and_look(kind, answer, bits):
    """Flips each bit in turn. Counts which were (unreadable, refused, passed over, accepted)."""
    fleet, message = at(kind)
    data = wire.to_member(message).SerializeToString()
    assert read(data) == message
    counts = {"unreadable": 0, "refused": 0, "passed over": 0, "accepted": 0}
    for bit in bits(8 * len(data)):
        bent = read(flipped(data, bit))
        if bent is None:
            counts["unreadable"] += 1
            continue
        assert bent != message
        if not isinstance(bent, AttemptMessage):
            # It has become a message that is not about an attempt.
            counts["passed over"] += 1
            continue
        _, effects = fleet.would(VICTIM, bent)
        said = [getattr(each.message, "payload", None) for each in effects if isinstance(each, states.Say)]
        if goes_on(effects, answer):
            counts["accepted"] += 1
            harmless(kind, bit)
            # The member's one-time decisions are made, so this needs a new fleet. What is sealed in it is random.
            fleet, message = at(kind)
            again = wire.to_member(message).SerializeToString()
            assert len(again) == len(data)
            data = again
        elif any(isinstance(payload, AttemptRefusal) for payload in said):
            counts["refused"] += 1
            # A refusal; the round is also declined if nothing was joined yet.
            assert [
                payload for payload in said if payload is not None and not isinstance(payload, AttemptRefusal)
            ] == []
            (note,) = [each for each in effects if isinstance(each, states.Note) and each.what == "attempt_refused"]
            assert note.warning
            assert note.fields["detail"]
        else:
            counts["passed over"] += 1
            assert said == []
            assert not any(isinstance(each, states.MaskAndUpload) for each in effects)
    return counts


def harmless(kind, bit):
    """Checks the outcome after a member went on with a wrong bit.

    Either it reveals nothing with which a sum could be opened, or what it was shown was true: one of more signatures
    than needed was lost.
    """
    fleet = LyingFleet(4)

    def bend(name, message):
        if name == VICTIM and isinstance(getattr(message, "payload", None), kind) and not told:
            told.append(message)
            return read(flipped(wire.to_member(message).SerializeToString(), bit))
        return message

    told = []
    fleet.bend = bend
    fleet.connect().run(lambda: bool(fleet.ends()))
    revealed = fleet.payloads(secure_agg.Unmasking)
    if kind is not secure_agg.Confirmations:
        assert revealed == []
    if kind is secure_agg.ReceivedDealings:
        # One dealing was lost, and enough are left. The victim has no mask with that dealer, which has one with it.
        assert fleet.payloads(AttemptRefusal)[0].reason == Reason.REASON_SURVIVORS_NOT_DEALT
    else:
        fleet.check()
    for each in revealed:
        assert tuple(share.dealer for share in each.seed_shares) == fleet.ends()[0].survivors
        assert each.root_shares == ()


EACH_KIND = pytest.mark.parametrize(
    ("kind", "answer"), list(zip(KINDS, ANSWERS, strict=True)), ids=lambda each: each.__name__
)


@EACH_KIND
def test_a_flipped_bit_anywhere_in_a_message(kind, answer):
    """One bit each in most bytes of three of the messages; the next test flips all of them."""
    counts = flip_and_look(kind, answer, lambda many: range(5, many, 23))
    assert counts["refused"] > 0


@pytest.mark.long
@EACH_KIND
def test_every_flipped_bit_in_a_message(kind, answer):
    counts = flip_and_look(kind, answer, range)
    assert counts["refused"] > counts["accepted"]
    assert counts["unreadable"] > 0


# ---- over the network -----------------------------------------------------------------------------------------------

MEMBERS = ("east", "north", "south", "west")
LIED_TO, OVERHEARD = "west", "north"


class Network:
    """Four members with one long job. The relay lies to west, and overhears what north receives."""

    job = "lied-about"

    def __init__(self, folder, stack):
        self.federation = Federation(folder)
        stack.callback(self.federation.close)
        self.federation.enrol(*MEMBERS)
        self.relay, self.overhearing = (self._relay(name, stack) for name in (LIED_TO, OVERHEARD))
        self._messages = []
        self._create(folder)
        self.member = [self.federation.start(name) for name in MEMBERS][MEMBERS.index(LIED_TO)]

    def _relay(self, name, stack):
        identity = MemberIdentity.load(self.federation.home(name))
        towards = grpc.ssl_channel_credentials(identity.root_pem, identity.key_pem, identity.certificate_pem)
        credentials = federation_credentials(CoordinatorFolder(self.federation.dir))
        relay = LyingRelay(credentials, f"localhost:{self.federation.port}", towards)
        stack.callback(relay.close)
        behind(relay, self.federation.home(name))
        return relay

    def _create(self, folder):
        """Creates a job with as many rounds as needed. Whatever goes wrong in one, the next one begins."""
        spec = folder / f"{self.job}.toml"
        spec.write_text(
            f'schema = 1\nname = "{self.job}"\n'
            f"labels = {sorted({json.loads(line)['label'] for line in (EXAMPLES / 'train.jsonl').open()})}\n"
            f'[vocabulary]\nkind = "words"\nfile = {json.dumps(str(EXAMPLES / "words.txt"))}\n'
            "[model]\nembedding = 2\nwidths = [1]\nmaps = 2\n"
            "[rounds]\ncount = 100000\nmin_members = 3\ntarget_members = 4\nmax_attempts = 1\nmax_failed_rounds = 1000\n"
            "[rounds.deadlines]\ntraining = 60\nreconnect = 60\n"
        )
        self.federation.create(spec)

    def lie(self, kind, change):
        """Changes the next message of a kind to west. Returns a list that will hold its attempt."""
        told = []

        def bend(message):
            if told or message.WhichOneof("message") != kind:
                return [message]
            told.append(wire.attempt_from_pb(getattr(message, kind).ref))
            return change(message)

        self.relay.lie(bend)
        return told

    def refused(self, reason, *words, **fields):
        """The member's log line about its refusal."""
        line = self.member.wait_for("attempt_refused", reason=word(reason), **fields)
        assert line["level"] == "warning"
        assert not [word for word in words if word not in line["detail"]], line
        return line

    def said(self, attempt):
        """The kinds of west's messages in an attempt, in order."""
        self._messages += self.relay.take().messages
        kinds = []
        for each in self._messages:
            if each.method == "FederationService/Session":
                message = pb.MemberMessage.FromString(each.data)
                kind = message.WhichOneof("message")
                ref = getattr(getattr(message, kind), "ref", None)
            else:
                kind, ref = "vector", None
                if each.method == "FederationService/UploadMasked":
                    ref = pb.MaskedUpload.FromString(each.data).header.ref
            if ref is not None and ref.round and wire.attempt_from_pb(ref) == attempt:
                kinds.append(kind)
        return kinds

    def ended(self, attempt):
        """How an attempt ended, as the operator sees it."""

        def found(detail):
            return [
                each
                for of_round in detail.rounds
                if of_round.number == attempt.round
                for each in of_round.attempts
                if each.number == attempt.attempt and each.outcome in ("published", "abandoned")
            ]

        return found(self.federation.wait_for(self.job, found))[0]

    def goes_on(self, attempt):
        """Waits until a later round of the job is published with west in its sum."""
        self.federation.wait_for(
            self.job,
            lambda detail: any(
                LIED_TO in each.survivors and each.outcome == "published"
                for of_round in detail.rounds
                if of_round.number > attempt.round
                for each in of_round.attempts
            ),
        )


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with ExitStack() as stack:
        yield Network(tmp_path_factory.mktemp("lies"), stack)


@pytest.fixture(autouse=True)
def _honest_again(request):
    yield
    if "network" in request.fixturenames:
        network = request.getfixturevalue("network")
        network.relay.lie(honest)
        network.overhearing.lie(honest)


def changing(path, value):
    """Replaces one field of a message, or of the list entry that names a member."""

    def change(message):
        kind, *names = path.split(".")
        at = getattr(message, kind)
        for name in names[:-1]:
            found = re.fullmatch(r"(\w+)\[(\w+)\]", name)
            if found is None:
                at = getattr(at, name)
                continue
            at = next(
                each
                for each in getattr(at, found[1])
                if found[2] in (getattr(each, "member", None), getattr(each, "dealer", None))
            )
        old = getattr(at, names[-1])
        setattr(at, names[-1], value(old) if callable(value) else value)
        return [message]

    return change


def of_the_context(**numbers):
    def change(message):
        for name, value in numbers.items():
            setattr(message.attempt_opened, name, value)
        return [message]

    return change


def without_the_number(name):
    def change(message):
        message.attempt_opened.ClearField(name)
        return [message]

    return change


def twice(change):
    """Sends the message as it came, and then a changed one."""

    def both(message):
        second = pb.CoordinatorMessage()
        second.CopyFrom(message)
        return [message, *change(second)]

    return both


def without(kind, items, name):
    def change(message):
        listed = getattr(getattr(message, kind), items)
        kept = [
            each for each in listed if name not in (each, getattr(each, "member", None), getattr(each, "dealer", None))
        ]
        assert len(kept) == len(listed) - 1
        del listed[:]
        listed.extend(kept)
        return [message]

    return change


def other_survivors_then(message):
    """After the member has answered: another list, and the request to unmask again."""
    survivors = pb.Survivors(ref=message.confirmations.ref, members=["east", "south", "west"])
    return [message, pb.CoordinatorMessage(survivors=survivors), message]


def flip_of_a_roster(seed):
    """Flips one bit of one field in a random entry."""

    def change(message):
        chance = random.Random(seed)
        entry = chance.choice(list(message.roster.advertisements))
        field = chance.choice(["certificate", "keys", "nonce", "signature"])
        data = getattr(entry, field)
        setattr(entry, field, flipped(data, chance.randrange(8 * len(data))))
        return [message]

    return change


JOINED = ["advertisement"]
DEALT = [*JOINED, "dealing"]
MASKED = [*DEALT, "vector"]
CONFIRMED = [*MASKED, "confirmation"]
REVEALED = [*CONFIRMED, "unmasking"]

# The kind of message, the change, the reason, words in the log line, and what the member sent before it refused.
LIES = {
    "swapped-key": (
        "roster",
        changing("roster.advertisements[east].keys", KEYS),
        Reason.REASON_ROSTER_SIGNATURE_INVALID,
        ("east",),
        JOINED,
    ),
    "unsigned-key": (
        "roster",
        changing("roster.advertisements[east].signature", b""),
        Reason.REASON_ROSTER_SIGNATURE_INVALID,
        ("east",),
        JOINED,
    ),
    "own-key": (
        "roster",
        changing("roster.advertisements[west].keys", KEYS),
        Reason.REASON_ROSTER_OWN_ENTRY_ALTERED,
        ("west",),
        JOINED,
    ),
    "fewer-corrupt": (
        "attempt_opened",
        of_the_context(assumed_corrupt=0),
        Reason.REASON_CONTEXT_UNEXPECTED,
        ("assumed_corrupt",),
        [],
    ),
    "shrunken-cohort": (
        "attempt_opened",
        of_the_context(cohort=3, threshold=3),
        Reason.REASON_CONTEXT_UNEXPECTED,
        ("application",),
        [],
    ),
    "narrower-ring": (
        "attempt_opened",
        of_the_context(bits=16),
        Reason.REASON_CONTEXT_UNEXPECTED,
        ("bits",),
        [],
    ),
    "another-model": (
        "attempt_opened",
        of_the_context(model=OTHER),
        Reason.REASON_CONTEXT_UNEXPECTED,
        ("model",),
        [],
    ),
    "another-recipe": (
        "attempt_opened",
        of_the_context(application=OTHER),
        Reason.REASON_CONTEXT_UNEXPECTED,
        ("application",),
        [],
    ),
    "forged": (
        "received_dealings",
        changing("received_dealings.dealings[south].share.sealed_key", lambda sealed: flipped(sealed, 100)),
        Reason.REASON_DEALINGS_SIGNATURE_INVALID,
        ("south",),
        DEALT,
    ),
    "truncated": (
        "received_dealings",
        changing("received_dealings.dealings[south].share.sealed_key", lambda sealed: sealed[:-1]),
        Reason.REASON_DEALINGS_MALFORMED,
        ("south",),
        DEALT,
    ),
    "itself-dropped": (
        "survivors",
        without("survivors", "members", "west"),
        Reason.REASON_SURVIVORS_WITHOUT_SELF,
        ("leaves out",),
        MASKED,
    ),
    "second-survivors": (
        "survivors",
        twice(without("survivors", "members", "north")),
        Reason.REASON_SECOND_SURVIVORS,
        ("different",),
        CONFIRMED,
    ),
    "unmask-again": (
        "confirmations",
        twice(without("confirmations", "confirmations", "north")),
        Reason.REASON_SECOND_UNMASK_REQUEST,
        ("different",),
        REVEALED,
    ),
    "unmask-again-for-others": (
        "confirmations",
        other_survivors_then,
        Reason.REASON_SECOND_SURVIVORS,
        ("different",),
        REVEALED,
    ),
    "flipped-bit-of-a-roster-1": ("roster", flip_of_a_roster(1), Reason.REASON_ROSTER_SIGNATURE_INVALID, (), JOINED),
    "flipped-bit-of-a-roster-2": ("roster", flip_of_a_roster(2), Reason.REASON_ROSTER_SIGNATURE_INVALID, (), JOINED),
}


# One for each kind of message, and for each second message. The tests above have all lies, without a network.
TOLD = ("swapped-key", "fewer-corrupt", "forged", "itself-dropped", "second-survivors", "unmask-again")


@pytest.mark.parametrize("lie", sweep(LIES, *TOLD))
def test_a_lie_over_the_network(network, lie):
    kind, change, reason, words, before = LIES[lie]
    told = network.lie(kind, change)
    line = network.refused(reason, *words)
    (attempt,) = told
    assert line["attempt"] == str(attempt)
    end = network.ended(attempt)
    said = network.said(attempt)
    assert said[: len(before)] == before
    assert set(said[len(before) :]) == {"refusal"}
    # The other three are enough, whatever the lie did.
    assert end.outcome == "published"
    assert (LIED_TO in end.survivors) == ("vector" in before)
    if "confirmation" not in before:
        assert (LIED_TO, reason) in {(lost.member, lost.reason) for lost in end.dropouts}
    network.goes_on(attempt)


def test_two_versions_of_u3_over_the_network(network):
    """West hears that north was lost, and gets the others' signatures of the true list."""
    signatures, heard = [], threading.Event()

    def overhear(message):
        of_it = message.WhichOneof("message") == "confirmations" and told and not signatures
        if of_it and wire.attempt_from_pb(message.confirmations.ref) == told[0]:
            signatures.append(message)
            heard.set()
        return [message]

    network.overhearing.lie(overhear)
    told = network.lie("survivors", without("survivors", "members", "north"))
    bend = network.relay._bend

    def keep_in_the_dark(message):
        if told and message.WhichOneof("message") == "attempt_ended" and not keep_in_the_dark.done:  # type: ignore[attr-defined]
            keep_in_the_dark.done = True  # type: ignore[attr-defined]
            assert heard.wait(60)
            return signatures
        return bend(message)

    keep_in_the_dark.done = False  # type: ignore[attr-defined]
    network.relay.lie(keep_in_the_dark)
    line = network.refused(Reason.REASON_CONFIRMATIONS_SIGNATURE_INVALID, "east")
    (attempt,) = told
    assert line["attempt"] == str(attempt)
    end = network.ended(attempt)
    assert network.said(attempt) == [*CONFIRMED, "refusal"]
    assert (LIED_TO, Reason.REASON_CONFIRMATION_SIGNATURE_INVALID) in {
        (lost.member, lost.reason) for lost in end.dropouts
    }
    network.relay.lie(honest)
    network.goes_on(attempt)


def test_a_withheld_dealing_over_the_network(network):
    told = network.lie("received_dealings", without("received_dealings", "dealings", "north"))
    line = network.refused(Reason.REASON_SURVIVORS_NOT_DEALT, "north", "never arrived")
    (attempt,) = told
    assert line["attempt"] == str(attempt)
    end = network.ended(attempt)
    assert network.said(attempt) == [*MASKED, "refusal"]
    # North's vector has a mask with west, and west's has none with north, so the result is no sum and is not published.
    assert (end.outcome, end.reason) == ("abandoned", Reason.REASON_RESULT_INVALID)
    network.goes_on(attempt)


def test_a_replayed_attempt_over_the_network(network):
    opened = []

    def replay(message):
        if message.WhichOneof("message") != "attempt_opened":
            return [message]
        opened.append(message)
        return [opened[0], message] if len(opened) == 2 else [message]

    network.relay.lie(replay)
    line = network.refused(Reason.REASON_ATTEMPT_REPLAYED, "is not above")
    first, second = (wire.attempt_from_pb(message.attempt_opened.ref) for message in opened[:2])
    assert line["attempt"] == str(first)
    # The new attempt is not affected.
    assert LIED_TO in network.ended(second).survivors
    assert network.said(second) == REVEALED
    assert [kind for kind in network.said(first) if kind == "advertisement"] == JOINED


IMPOSSIBLE = {
    "threshold": (of_the_context(threshold=2), ("threshold 2 is too low",)),
    "cohort": (of_the_context(cohort=1), ("cohort of 1",)),
    "values": (of_the_context(values=2**63), ("values is a whole number",)),
    "no-assumed-corrupt": (without_the_number("assumed_corrupt"), ("leaves out assumed_corrupt",)),
    "no-threshold": (without_the_number("threshold"), ("leaves out threshold",)),
}


@pytest.mark.parametrize("what", sweep(IMPOSSIBLE, "threshold", "no-assumed-corrupt"))
def test_an_impossible_context_is_refused_by_name_and_the_session_stays(network, what):
    change, words = IMPOSSIBLE[what]
    before = len(network.member.lines)
    told = network.lie("attempt_opened", change)
    line = network.refused(Reason.REASON_CONTEXT_INVALID, *words)
    (attempt,) = told
    assert line["attempt"] == str(attempt)
    end = network.ended(attempt)
    assert end.outcome == "published"
    assert (LIED_TO, Reason.REASON_CONTEXT_INVALID) in {(lost.member, lost.reason) for lost in end.dropouts}
    assert set(network.said(attempt)) == {"refusal"}
    network.goes_on(attempt)
    assert not [each for each in network.member.lines[before:] if each["event"] == "disconnected"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda message: [pb.CoordinatorMessage()], ("unreadable", "nothing in it")),
        (lambda message: [b"\xff" + message.SerializeToString()], ("unreadable",)),
    ],
    ids=["empty", "bytes"],
)
def test_unreadable_bytes_end_the_session_and_the_member_reconnects(network, change, words):
    """There is no attempt to refuse."""
    told = network.lie("attempt_opened", change)
    line = network.member.wait_for("disconnected")
    assert line["level"] == "warning"
    assert line["why"]
    assert not [word for word in words if word not in line["why"]], line
    network.member.wait_for("connected")
    (attempt,) = told
    # The member is asked again, in a readable message.
    assert LIED_TO in network.ended(attempt).survivors
    assert network.said(attempt) == REVEALED


def test_unreadable_bytes_of_a_member_end_only_its_call(network):
    """The other direction: whatever a member sends, the coordinator serves the others."""
    identity = MemberIdentity.load(network.federation.home(LIED_TO))
    towards = grpc.ssl_channel_credentials(identity.root_pem, identity.key_pem, identity.certificate_pem)
    before = network.federation.show(network.job).job.version_number
    with grpc.secure_channel(f"localhost:{network.federation.port}", towards) as channel:
        for method in pb.DESCRIPTOR.services_by_name["FederationService"].methods_by_name:
            for data in (b"\xff", b"\x0a\xff", bytes(100)):
                call = channel.stream_stream(f"/tacit.v1.FederationService/{method}")  # type: ignore[call-arg]
                with pytest.raises(grpc.RpcError):
                    list(call(iter([data]), timeout=60))
    assert network.federation.coordinator.process.poll() is None
    network.federation.wait_for(network.job, lambda detail: detail.job.version_number > before + 1)
