"""Ends each session when its certificate expires: the one it was opened with, or a renewal with the same key."""

import asyncio
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

from coordinator.services.running import Running
from coordinator.services.sessions import MemberSession
from tacit.identity import Certificate
from tacit.reason import Reason

__all__ = ["Lives"]


@dataclass
class _Life:
    """A session, the certificate that keeps it open, and the timer that ends it."""

    session: MemberSession
    certificate: Certificate
    fingerprint: bytes
    public: bytes
    timer: asyncio.TimerHandle


class Lives:
    """Tracks the lifetimes of all sessions. Used from one event loop."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._lives: dict[str, _Life] = {}

    def used(self, member: str, fingerprint: bytes, certificate: Certificate) -> None:
        """Notes that a member uses its newest certificate.

        A session opened under the previous certificate continues if the key is the same, and ends otherwise.
        """
        life = self._lives.get(member)
        if life is None or life.fingerprint == fingerprint:
            return
        if life.public == certificate.public:
            self.begin(life.session, certificate)
        else:
            detail = "this member has a new key; it continues with a session under that key"
            self._running.sessions.end(member, Reason.REASON_DISCONNECTED, detail)

    def begin(self, session: MemberSession, certificate: Certificate) -> None:
        """Keeps the session open until this certificate expires."""
        if (before := self._lives.pop(session.member, None)) is not None:
            before.timer.cancel()
        left = (certificate.expires - datetime.now(UTC)).total_seconds()
        timer = asyncio.get_running_loop().call_later(left, self._expired, session)
        fingerprint = hashlib.sha256(certificate.der).digest()
        self._lives[session.member] = _Life(session, certificate, fingerprint, certificate.public, timer)

    def end(self, session: MemberSession) -> None:
        """Forgets a session that has ended."""
        life = self._lives.get(session.member)
        if life is not None and life.session is session:
            life.timer.cancel()
            del self._lives[session.member]

    def _expired(self, session: MemberSession) -> None:
        if self._running.sessions.connected.get(session.member) is not session:
            return
        life = self._lives.get(session.member)
        if life is not None and life.certificate.expires > datetime.now(UTC):
            # The clock was set back after the timer was computed.
            self.begin(session, life.certificate)
            return
        detail = "by the coordinator's clock, this member's certificate has expired; if it has, enrol again with a new "
        detail += "join token; otherwise set this clock or the coordinator's"
        # This is not final: the member checks its own clock.
        self._running.sessions.end(session.member, Reason.REASON_CLOCK_SKEW, detail)
