"""Coordinators that lie, for tests: to state machines in one thread, and to a real process over the network.

`LyingFleet` extends the fleet of `tests.support.fleet` beyond `bend`: it can hide from members that they are out, send
messages that an honest coordinator would not send, and show what each member said and logged since the lie.
`LyingRelay` is a relay between a member and the coordinator. It parses what the coordinator sends in a session, and
forwards what a test makes of it: other messages, more messages, or none.
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

# ---- state machines -------------------------------------------------------------------------------------------------


class LyingFleet(Fleet):
    """A federation whose coordinator lies to `VICTIM`.

    `say` and `bent` tell a lie and call `lied`. A test that lies by `tell` or by a `bend` of its own calls it itself.
    """

    def __init__(self, members: int, **how: Any) -> None:
        # The effects of each member's state machine, in order.
        self.effects: dict[str, list[states.Effect]] = {f"m{number}": [] for number in range(members)}
        # Job documents of members that train under another one than the rest.
        self.jobs: dict[str, JobDocument] = {}
        # The event that the coordinator receives in place of a member's.
        self.hear: Callable[[str, Any], Any] = lambda member, message: message
        self._lied_at: dict[str, int] = {}
        super().__init__(members, **how)

    def lied(self, *names: str) -> None:
        """Marks the moment from which these members answer to a lie."""
        for name in names or (VICTIM,):
            self._lied_at.setdefault(name, len(self.effects[name]))

    def bent(self, kind: type, change: Callable[[Any], Any], name: str = VICTIM) -> None:
        """Replaces the payload of the first message of this kind to a member by `change(payload)`."""
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
        """Sends a member, now, a message that an honest coordinator would not send; by default in the last attempt."""
        self.lied(name)
        self.tell(name, states.Received(AttemptMessage(attempt or self.attempt, payload)))

    def in_the_dark(self, *names: str) -> None:
        """Never tells these members that an attempt continues without them."""
        self.lose = lambda name, message: name in names and isinstance(getattr(message, "payload", None), AttemptEnded)

    @property
    def attempt(self) -> AttemptId:
        """The attempt that was opened last."""
        return AttemptId(JOB, self.state.round, self.state.attempt)

    def in_attempt(self, name: str = VICTIM) -> states.InAttempt:
        """The state of a member that is taking part in an attempt."""
        phase = self.members[name].state.phase(JOB)
        assert isinstance(phase, states.InAttempt)
        return phase

    def payloads(self, kind: type, name: str = VICTIM) -> list[Any]:
        """The payloads of one kind that a member sent."""
        found = [getattr(message, "payload", None) for message in self.members[name].said]
        return [payload for payload in found if isinstance(payload, kind)]

    def since(self, name: str = VICTIM) -> list[states.Effect]:
        """The effects of a member's state machine since the lie."""
        assert name in self._lied_at, f"{name} was never lied to"
        return self.effects[name][self._lied_at[name] :]

    def refused(self, reason: Reason, *words: str, name: str = VICTIM, after: tuple[type, ...] = ()) -> None:
        """Checks that the member answered the lie with exactly one refusal.

        The refusal has this reason, and the member logs it as a warning that contains these words. Before the refusal,
        the member sent only messages of the kinds in `after` in that attempt.
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
        """The state and effects that a message would cause, without applying them. Only the protocol's latches
        remember the message.
        """
        member = self.members[name]
        return member_transition(member.environment, member.state, states.Received(message))


def dealt_to(receiver: str, dealings: Iterable[secure_agg.Dealing], session: Session) -> secure_agg.ReceivedDealings:
    """What a coordinator forwards to `receiver` from these dealings. `session` is the session of the dealings."""
    received = []
    for dealing in sorted(dealings, key=lambda each: each.dealer):
        paths = merkle.paths_of(session.dealing_leaves(dealing.dealer, dealing.shares))
        for share, path in zip(dealing.shares, paths, strict=True):
            if share.receiver == receiver != dealing.dealer:
                received.append(
                    secure_agg.ReceivedDealing(
                        dealer=dealing.dealer,
                        share=share,
                        seed_commitment=dealing.seed_commitment,
                        path=path,
                        signature=dealing.signature,
                    )
                )
    return secure_agg.ReceivedDealings(tuple(received))


def flipped(data: bytes, bit: int) -> bytes:
    """The data with one bit flipped. `bit` counts from the start."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# ---- over the network -----------------------------------------------------------------------------------------------

# Returns the messages that the member hears in place of one from the coordinator. An empty list drops it.
Bend = Callable[[pb.CoordinatorMessage], "list[pb.CoordinatorMessage | bytes]"]


def honest(message: pb.CoordinatorMessage) -> "list[pb.CoordinatorMessage | bytes]":
    """Forwards the message unchanged."""
    return [message]


class LyingRelay(Relay):
    """A relay with the coordinator's own certificate that changes the coordinator's messages in a session."""

    def __init__(self, credentials: grpc.ServerCredentials, target: str, towards: grpc.ChannelCredentials) -> None:
        self._bend: Bend = honest
        self._bending = threading.Lock()
        super().__init__(credentials, target, towards)

    def lie(self, bend: Bend) -> None:
        """Applies `bend` from the next message on. It runs in the session's thread, and may wait there."""
        with self._bending:
            self._bend = bend

    def forward(self, path: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Forwards one call. Only sessions are changed."""
        answers = super().forward(path, requests, context)
        if not path.endswith("/Session"):
            yield from answers
            return
        for data in answers:
            with self._bending:
                bend = self._bend
            for message in bend(pb.CoordinatorMessage.FromString(data)):
                yield message if isinstance(message, bytes) else message.SerializeToString()
