"""Keeps members' sessions: who is connected, and a queue of messages for each.

A member has one session: a newer one replaces the older one, which is told so. A member whose queue fills up is
disconnected, which costs the others nothing. It can reconnect, and then learns the current state.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from tacit.messages import FromCoordinator, Goodbye
from tacit.reason import Reason, word

__all__ = ["MemberSession", "Sessions"]

log = structlog.get_logger("coordinator.sessions")

_QUEUE = 1000


@dataclass(eq=False)
class MemberSession:
    """One open stream to one member. The last message of `outgoing` is a Goodbye, and nothing follows it."""

    member: str
    process: bytes
    software_version: str
    admits: tuple[str, ...]
    # Bounded by `send`, so that a Goodbye always fits. Jobs may speak at once, so their number is added to the bound.
    outgoing: asyncio.Queue[FromCoordinator] = field(default_factory=asyncio.Queue)
    jobs: int = 0
    goodbye: Goodbye | None = None
    # SHA-256 of the certificate under which it last took part, and the number of its entry in the roster log. A
    # revocation ends the session.
    entry: tuple[bytes, int] | None = None

    def end(self, reason: Reason, detail: str = "") -> None:
        """Ends the session with a Goodbye as its last message."""
        if self.goodbye is None:
            self.goodbye = Goodbye(reason, detail)
            self.outgoing.put_nowait(self.goodbye)


class Sessions:
    """All sessions. It calls `opened` and `closed` in order, and never one of them twice in a row for one member."""

    def __init__(self, opened: Callable[[MemberSession], None], closed: Callable[[MemberSession], None]) -> None:
        self._sessions: dict[str, MemberSession] = {}
        self._opened = opened
        self._closed = closed
        # Whether this process may still tell members something; not once it may have lost the lease.
        self.may_speak: Callable[[], bool] = lambda: True

    def open(self, session: MemberSession) -> None:
        """Adds a session, after ending an older one of the same member."""
        older = self._sessions.get(session.member)
        if older is not None:
            older.end(Reason.REASON_SESSION_REPLACED)
            self._remove(older)
        self._sessions[session.member] = session
        log.info("member_connected", member=session.member, software=session.software_version)
        self._opened(session)

    def close(self, session: MemberSession) -> None:
        """Removes a session whose stream is over. A session that was already replaced changes nothing."""
        if self._sessions.get(session.member) is session:
            self._remove(session)

    def _remove(self, session: MemberSession) -> None:
        del self._sessions[session.member]
        reason = word(session.goodbye.reason) if session.goodbye else "stream_ended"
        log.info("member_disconnected", member=session.member, reason=reason)
        self._closed(session)

    def send(self, member: str, message: FromCoordinator) -> None:
        """Queues a message. A member without a session misses it, and learns the current state when it reconnects."""
        session = self._sessions.get(member)
        if session is None or session.goodbye is not None:
            return
        if session.outgoing.qsize() < _QUEUE + session.jobs:
            session.outgoing.put_nowait(message)
        else:
            self.end(member, Reason.REASON_DISCONNECTED, "this member did not read its messages")

    def tell(self, message: FromCoordinator) -> None:
        """Queues a message for every member with a session."""
        for name in list(self._sessions):
            self.send(name, message)

    def end(self, member: str, reason: Reason, detail: str = "") -> None:
        """Ends a member's session. It no longer counts as connected, whether or not it reads its Goodbye."""
        if (session := self._sessions.get(member)) is not None:
            session.end(reason, detail)
            self._remove(session)

    def end_all(self, reason: Reason) -> None:
        """Ends every session."""
        for member in list(self._sessions):
            self.end(member, reason)

    @property
    def connected(self) -> Mapping[str, MemberSession]:
        """The open sessions, by member."""
        return self._sessions
