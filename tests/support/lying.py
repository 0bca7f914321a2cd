"""Coordinators that lie, for tests: to machines in one thread, and to a real process over the network.

`LyingFleet` is the fleet of `tests.support.fleet` with what a liar needs besides `bend`: members that are not told that
they are out, messages that the honest coordinator would not send, and what each member said and logged since the lie.
`LyingRelay` stands between a member and the coordinator, parses what the coordinator sends in a session, and sends on
what a test makes of it: other messages, more of them, or none.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import grpc

import secure_agg
from edge_client.session import states
from edge_client.session.machine import transition as member_transition
from secure_agg import merkle
from secure_agg.session import Session
from tacit.attempt import AttemptId
from tacit.job import JobDocument
from tacit.messages import AttemptEnded, AttemptMessage, AttemptRefusal
from tacit.reason import Reason, word
from tacit.v1 import federation_pb2 as pb
from tests.support.fleet import Fleet
from tests.support.recorder import Relay

__all__ = ["JOB", "VICTIM", "Bend", "LyingFleet", "LyingRelay", "dealt_to", "flipped", "honest"]

JOB = "questions"
VICTIM = "m0"

# ---- machines -------------------------------------------------------------------------------------------------------


class LyingFleet(Fleet):
    """A federation whose coordinator lies to `VICTIM`; `lied` is called when a lie is told, by `tell` or by a bend."""

    def __init__(self, members: int, **how: Any) -> None:
        # What each member's machine wanted done, in order.
        self.effects: dict[str, list[states.Effect]] = {f"m{number}": [] for number in range(members)}
        # Members that train under another job document than the rest.
        self.jobs: dict[str, JobDocument] = {}
        # What the coordinator makes of what a member says.
        self.hear: Callable[[str, Any], Any] = lambda member, message: message
        self._lied_at: dict[str, int] = {}
        super().__init__(members, **how)

    def lied(self, *names: str) -> None:
        """From here on the members answer to a lie."""
        for name in names or (VICTIM,):
            self._lied_at.setdefault(name, len(self.effects[name]))

    def bent(self, kind: type, change: Callable[[Any], Any], name: str = VICTIM) -> None:
        """The first message of a kind to a member is another one; `change` is of its payload."""
        before, told = self.bend, []

        def bend(member: str, message: Any) -> Any:
            message = before(member, message)
            if member != name or told or not isinstance(getattr(message, "payload", None), kind):
                return message
            told.append(message)
            self.lied(name)
            return replace(message, payload=change(message.payload))

        self.bend = bend

    def say(self, payload: Any, attempt: AttemptId | None = None, name: str = VICTIM) -> None:
        """A message of the present attempt, from nobody but the liar, now."""
        self.lied(name)
        self.tell(name, states.Received(AttemptMessage(attempt or self.attempt, payload)))

    def in_the_dark(self, *names: str) -> None:
        """These are never told that an attempt goes on without them."""
        self.lose = lambda name, message: name in names and isinstance(getattr(message, "payload", None), AttemptEnded)

    @property
    def attempt(self) -> AttemptId:
        """The last one that was opened."""
        return AttemptId(JOB, self.state.round, self.state.attempt)

    def in_attempt(self, name: str = VICTIM) -> states.InAttempt:
        """A member that is taking part in one."""
        phase = self.members[name].state.phase(JOB)
        assert isinstance(phase, states.InAttempt)
        return phase

    def payloads(self, kind: type, name: str = VICTIM) -> list[Any]:
        """What a member said of one kind."""
        found = [getattr(message, "payload", None) for message in self.members[name].said]
        return [payload for payload in found if isinstance(payload, kind)]

    def since(self, name: str = VICTIM) -> list[states.Effect]:
        """What a member's machine wanted done since it was lied to."""
        assert name in self._lied_at, f"{name} was never lied to"
        return self.effects[name][self._lied_at[name] :]

    def refused(self, reason: Reason, *words: str, name: str = VICTIM, after: tuple[type, ...] = ()) -> None:
        """The member answered the lie with one refusal of this reason and a line in its log, at warning, that holds
        these words; it told nothing of the attempt, before that, but messages of the kinds in `after`.
        """
        effects = self.since(name)
        said = [effect.message for effect in effects if isinstance(effect, states.Say)]
        attempt = next(each.attempt for each in said if isinstance(getattr(each, "payload", None), AttemptRefusal))
        of_attempt = [each.payload for each in said if getattr(each, "attempt", None) == attempt]
        assert tuple(type(payload) for payload in of_attempt) == (*after, AttemptRefusal), of_attempt
        assert of_attempt[-1].reason == reason, f"{Reason.Name(of_attempt[-1].reason)}: {of_attempt[-1].detail}"
        assert not any(isinstance(effect, states.MaskAndUpload) and effect.attempt == attempt for effect in effects)
        (note,) = [
            effect
            for effect in effects
            if isinstance(effect, states.Note)
            and effect.what == "attempt_refused"
            and effect.fields["attempt"] == str(attempt)
        ]
        assert note.warning
        assert note.fields["reason"] == word(reason)
        assert note.fields["detail"] == of_attempt[-1].detail
        assert not [word for word in words if word not in str(note.fields["detail"])], note.fields["detail"]

    def _member_effect(self, member: Any, effect: states.Effect) -> None:
        self.effects[member.name].append(effect)
        super()._member_effect(member, effect)

    def post(self, event: Any, delay_ms: float = 0) -> None:
        super().post(self.hear(getattr(event, "member", ""), event), delay_ms)

    def _trained(self, member: Any, assignment: Any) -> None:
        kept, self.job = self.job, self.jobs.get(member.name, self.job)
        super()._trained(member, assignment)
        self.job = kept

    def would(self, name: str, message: Any) -> tuple[states.MemberState, tuple[states.Effect, ...]]:
        """What a member would do on a message, without doing it. Only its protocol's latches keep it in mind."""
        member = self.members[name]
        return member_transition(member.environment, member.state, states.Received(message))


def dealt_to(receiver: str, dealings: Iterable[secure_agg.Dealing], session: Session) -> secure_agg.ReceivedDealings:
    """What a coordinator passes on of these dealings; `session` is the one that they were dealt in."""
    received = []
    for dealing in sorted(dealings, key=lambda each: each.dealer):
        paths = merkle.paths_of(session.dealing_leaves(dealing.dealer, dealing.shares))
        for share, path in zip(dealing.shares, paths, strict=True):
            if share.receiver == receiver != dealing.dealer:
                received.append(
                    secure_agg.ReceivedDealing(
                        dealer=dealing.dealer,
                        sealed=share.sealed,
                        masking_share_commitment=share.masking_commitment,
                        seed_share_commitment=share.seed_commitment,
                        seed_commitment=dealing.seed_commitment,
                        path=path,
                        signature=dealing.signature,
                    )
                )
    return secure_agg.ReceivedDealings(tuple(received))


def flipped(data: bytes, bit: int) -> bytes:
    """The same with one bit the other way round, counted from the start."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# ---- over the network -----------------------------------------------------------------------------------------------

# What the member hears in place of a message of the coordinator; an empty list is silence.
Bend = Callable[[pb.CoordinatorMessage], "list[pb.CoordinatorMessage | bytes]"]


def honest(message: pb.CoordinatorMessage) -> "list[pb.CoordinatorMessage | bytes]":
    """As it came."""
    return [message]


class LyingRelay(Relay):
    """A relay with the coordinator's own certificate that changes what the coordinator says in a session."""

    def __init__(self, credentials: grpc.ServerCredentials, target: str, towards: grpc.ChannelCredentials) -> None:
        self._bend: Bend = honest
        self._bending = threading.Lock()
        super().__init__(credentials, target, towards)

    def lie(self, bend: Bend) -> None:
        """From the next message on. `bend` is called in the session's thread, and may wait there."""
        with self._bending:
            self._bend = bend

    def forward(self, path: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One call; only sessions are lied in."""
        answers = super().forward(path, requests, context)
        if not path.endswith("/Session"):
            yield from answers
            return
        for data in answers:
            with self._bending:
                bend = self._bend
            for message in bend(pb.CoordinatorMessage.FromString(data)):
                yield message if isinstance(message, bytes) else message.SerializeToString()
