"""A member takes part under certificates that the others must refuse, and so tries to stop every attempt for everybody.

The honest members watch the roster log and pin a witness. The baseline is a coordinator that seats every certificate of
the federation's authority.
"""

import hashlib
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.domain.jobs import JobStatus
from coordinator.domain.witnessed import Witnessed
from coordinator.rounds import counts
from coordinator.rounds import events as ev
from coordinator.rounds.waiting import waiting
from coordinator.services.credentials import SERVER_NAME
from edge_client.policy.policy import Policy
from edge_client.roster.book import RosterBook
from secure_agg import Unmasking
from secure_agg.transparency import Tree
from tacit.identity import Role, Trust
from tacit.messages import Assignment, AttemptMessage, AttemptOpened, Ready
from tacit.reason import Reason, word
from tacit.roster import Cosignature, Entry, Head, Kind, SignedHead
from tests.support.fleet import Fleet, job_document
from tests.support.party import authority, key, present
from tests.support.sum_fleet import TestIdentity, key_of

TRUST = Trust.in_root(authority().certificate)
SERVER = (
    authority()
    .issue(key(1).public_key(), Role.SERVER, SERVER_NAME, host_names=("localhost",), now=present())
    .public_bytes(serialization.Encoding.DER)
)
NOW = present()
MS = int(NOW.timestamp() * 1000)
WITNESS = Ed25519PrivateKey.generate()
PINNED = WITNESS.public_key().public_bytes_raw()


def sha256(data):
    return hashlib.sha256(data).digest()


class Federation:
    """Honest members with copies of a real log, and the last of them, which attacks."""

    def __init__(self, folder, members, *, guarded=True, job=None):
        self.fleet = Fleet(members, job=job)
        *self.honest, self.attacker = self.fleet.members
        self.log, self.cosignature, self.keys = [], None, 1
        # Called when an attempt opens, before and after the coordinator signs the head for it.
        self.before_head = self.after_head = lambda: None
        for name, member in self.fleet.members.items():
            self.enter(member.environment.identity)
            if name in self.honest:
                book = RosterBook(folder / f"{name}.db", TRUST)
                policy = Policy(mechanisms=("none",), witnesses={"library": PINNED.hex()})
                member.environment = replace(member.environment, roster=book, policy=policy, now=lambda: NOW)
        self.witness_looks()
        self.fleet.before = self.follow
        parameters = replace(self.fleet.parameters, log_head=self.opening)
        if guarded:
            parameters = replace(parameters, witnessed=self.witnessed)
            self.fleet.entry_of = lambda _, keys: self.number_of(keys.certificate)
        self.fleet.state = replace(self.fleet.state, parameters=parameters)

    def enter(self, identity, kind=Kind.ISSUED):
        certificate, holder = sha256(identity.certificate), sha256(key_of(identity.certificate))
        self.log.append(Entry(certificate, holder, identity.member, Role.MEMBER, kind, MS))

    def number_of(self, certificate):
        found = [number for number, each in enumerate(self.log, 1) if each.certificate == sha256(certificate)]
        return found[0] if found else None

    def new_certificate(self, *, logged=True):
        self.keys += 1
        identity = TestIdentity(self.attacker, key_from=f"{self.attacker} {self.keys}")
        if logged:
            self.enter(identity, Kind.RENEWED)
        member = self.fleet.members[self.attacker]
        member.environment = replace(member.environment, identity=identity)

    def head(self):
        head = Head(TRUST.federation, len(self.log), Tree(each.leaf for each in self.log).root(), MS)
        return SignedHead.made(head, key(1), SERVER)

    def witness_looks(self, size=None):
        log, size = self.log, size or len(self.log)
        self.log = log[:size]
        self.cosignature = Cosignature.by_witness(self.head().head, WITNESS, MS)
        self.log = log

    def witnessed(self):
        size = self.cosignature.size
        return Witnessed(size, frozenset(each.name for each in self.log[size:]), PINNED)

    def opening(self):
        self.before_head()
        head = self.head()
        self.after_head()
        return head

    def follow(self, name, message):
        """An honest member follows the log to the head of an attempt."""
        if name in self.honest and isinstance(getattr(message, "payload", None), AttemptOpened):
            assert isinstance(message, AttemptMessage)
            book, head = self.fleet.members[name].environment.roster, message.payload.log_head
            book.take(head, self.log[: head.head.size], 0, NOW)
            book.take_cosignatures([self.cosignature], [PINNED])

    def refusals(self):
        return {(each.member, each.reason) for each in self.fleet.counts if isinstance(each, counts.Refused)}

    def dropped(self):
        return {(each.member, each.reason) for each in self.fleet.counts if isinstance(each, counts.DroppedOut)}


UNKNOWN, UNWITNESSED = word(Reason.REASON_LOG_CERTIFICATE_UNKNOWN), word(Reason.REASON_POLICY_WITNESSES)
ATTACKS = {
    "renews just before the head is signed": ("before_head", {}, UNWITNESSED),
    "renews just after the head is signed": ("after_head", {}, UNKNOWN),
    "shows a certificate that is not in the log": ("after_head", {"logged": False}, UNKNOWN),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_member_that_renews_in_time_stops_nobody(tmp_path, attack):
    moment, how, reason = ATTACKS[attack]
    for guarded in (False, True):
        folder = tmp_path / str(guarded)
        folder.mkdir()
        federation = Federation(folder, 5, guarded=guarded)
        setattr(federation, moment, lambda: federation.new_certificate(**how))  # noqa: B023  called in this turn
        fleet = federation.fleet.connect().run()
        if guarded:
            assert fleet.state.status is JobStatus.FINISHED
            assert federation.refusals() == set()
            assert federation.dropped() == {(federation.attacker, reason)}
            assert {tuple(each.survivors) for each in fleet.ends()} == {tuple(federation.honest)}
            fleet.check()
        else:
            assert (fleet.state.status, fleet.state.reason) == (JobStatus.PAUSED, Reason.REASON_ROUNDS_FAILING)
            # An attempt ends with the refusal that leaves too few.
            assert {said for _, said in federation.refusals()} == {reason}
            assert {name for name, _ in federation.refusals()} <= set(federation.honest)
            assert not fleet.results


def test_a_refusal_names_the_members_whose_certificates_no_witness_has_signed(tmp_path):
    federation = Federation(tmp_path, 5, guarded=False)
    federation.before_head = federation.new_certificate
    federation.fleet.connect().run(lambda: bool(federation.refusals()))
    said = {each.detail for each in federation.fleet.counts if isinstance(each, counts.Refused)}
    assert said
    assert all("too few signed for m4)" in each for each in said)


def test_nobody_waits_for_a_member_whose_certificate_no_witness_has_signed(tmp_path):
    federation = Federation(tmp_path, 5)
    federation.new_certificate()
    fleet = federation.fleet.connect().run(lambda: bool(federation.fleet.ends()))
    (first,) = fleet.ends()
    assert first.published
    assert list(first.survivors) == federation.honest
    # No training window had to run out.
    assert fleet.now_ms < 60_000
    federation.witness_looks()
    fleet.run()
    assert federation.attacker in fleet.ends()[-1].survivors
    assert federation.refusals() == federation.dropped() == set()


def silent(federation, name):
    federation.fleet.lose = lambda member, message: member == name and isinstance(message, Ready)


def missed(fleet):
    return {each.member for each in fleet.counts if isinstance(each, counts.DeadlineMissed)}


def test_a_member_that_waits_for_the_witness_has_missed_no_deadline(tmp_path):
    federation = Federation(tmp_path, 5, job=job_document(count=2))
    fleet = federation.fleet.connect().run(lambda: len(federation.fleet.ends()) == 1)
    began = fleet.now_ms
    federation.new_certificate()
    silent(federation, "m3")
    fleet.run(lambda: len(fleet.ends()) == 2)
    # The window ran out, and there were enough without either.
    assert fleet.now_ms >= began + 60_000
    assert fleet.ends()[1].survivors == ("m0", "m1", "m2")
    assert missed(fleet) == {"m3"}


def test_a_full_cohort_does_not_wait_for_the_member_either(tmp_path):
    """The other two that are missing or late have missed deadlines before, so nobody steady is left to wait for."""
    federation = Federation(tmp_path, 5, job=job_document(count=1, target_members=3))
    federation.new_certificate()
    silent(federation, "m3")
    fleet = federation.fleet.connect().run(hours=0.0001)
    for name in ("m2", "m3"):
        fleet.state = fleet.state.with_member(name, replace(fleet.state.members[name], missed_deadlines=1))
    fleet.run(lambda: bool(fleet.ends()))
    assert fleet.ends()[0].survivors == ("m0", "m1", "m2")
    assert fleet.now_ms < 60_000


def test_a_job_that_needs_the_member_waits_for_the_witness_and_blames_nobody(tmp_path):
    federation = Federation(tmp_path, 3, job=job_document(count=1))
    federation.new_certificate()
    assigned = []

    def noted(name, message):
        if isinstance(message, Assignment):
            assigned.append(name)
        federation.follow(name, message)

    federation.fleet.before = noted
    fleet = federation.fleet.connect().run(hours=0.1)
    assert fleet.ends() == []
    # The window ran out several times, and who is ready is not asked again.
    assert assigned == ["m0", "m1", "m2"]
    assert "the witnesses of the roster log have yet to sign the certificates of m2" in waiting(fleet.state)
    federation.witness_looks()
    fleet.post(ev.Cosigned())
    began = fleet.now_ms
    fleet.run(lambda: fleet.state.status is JobStatus.FINISHED)
    assert fleet.now_ms - began < 60_000
    assert [each.published for each in fleet.ends()] == [True]
    assert not missed(fleet)


def test_a_renewal_during_an_attempt_costs_the_member_that_attempt_and_no_standing(tmp_path):
    federation = Federation(tmp_path, 5)
    federation.after_head = federation.new_certificate
    fleet = federation.fleet.connect().run(lambda: bool(federation.fleet.ends()))
    federation.after_head = lambda: None
    federation.witness_looks()
    fleet.run()
    assert federation.attacker in fleet.ends()[-1].survivors
    assert fleet.state.members[federation.attacker].faults == 0


def test_a_confirmed_sum_waits_for_the_witness_of_one_of_its_members(tmp_path):
    """m1 to m3 confirmed a sum that was lost, and would refuse any other with `policy_second_sum`."""
    federation = Federation(tmp_path, 4, job=job_document(count=1))
    fleet = federation.fleet
    fleet.lose = lambda _, message: isinstance(getattr(message, "payload", None), Unmasking)
    fleet.connect("m1", "m2", "m3").run(lambda: bool(fleet.ends()))
    assert fleet.state.confirmed_sums
    fleet.lose = lambda *_: False
    # The silence in the first attempt was counted.
    fleet.counts.clear()
    federation.new_certificate()
    # The window runs out many times, and with m0 there are enough for another sum.
    fleet.connect("m0").run(hours=3)
    assert [each.published for each in fleet.ends()] == [False]
    assert "have yet to sign the certificates of m3" in waiting(fleet.state)
    federation.witness_looks()
    fleet.post(ev.Cosigned())
    fleet.run(lambda: fleet.state.status is JobStatus.FINISHED, hours=0.1)
    assert [each.survivors for each in fleet.ends()][1:] == [("m1", "m2", "m3")]
    assert federation.refusals() == federation.dropped() == set()
    assert not missed(fleet)


def test_a_job_waits_for_a_witness_that_signs_only_an_old_head_and_says_for_which(tmp_path):
    federation = Federation(tmp_path, 5)
    federation.witness_looks(2)
    fleet = federation.fleet.connect().run(hours=3)
    assert fleet.state.status is JobStatus.RUNNING
    assert fleet.ends() == []
    assert f"the witness {PINNED.hex()} has signed the fewest entries, 2" in waiting(fleet.state)
    assert not missed(fleet)
    federation.witness_looks()
    fleet.post(ev.Cosigned())
    fleet.run()
    assert fleet.state.status is JobStatus.FINISHED
    assert federation.refusals() == federation.dropped() == set()
