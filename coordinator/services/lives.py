"""How long sessions stand: as long as the certificate that the member came with, or renewed to with the same key."""

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
    """A session, the certificate that it stands under, and the timer that ends it."""

    session: MemberSession
    certificate: Certificate
    fingerprint: bytes
    public: bytes
    timer: asyncio.TimerHandle


class Lives:
    """The lives of all sessions. Used from one event loop."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._lives: dict[str, _Life] = {}

    def used(self, member: str, fingerprint: bytes, certificate: Certificate) -> None:
        """A member's newest certificate is in its hands: what stands under the one before it goes on, or does not."""
        life = self._lives.get(member)
        if life is None or life.fingerprint == fingerprint:
            return
        if life.public == certificate.public:
            self.begin(life.session, certificate)
        else:
            detail = "the member has taken another key; it goes on with a session under that one"
            self._running.sessions.end(member, Reason.REASON_DISCONNECTED, detail)

    def begin(self, session: MemberSession, certificate: Certificate) -> None:
        """The session stands as long as this certificate is valid."""
        if (before := self._lives.pop(session.member, None)) is not None:
            before.timer.cancel()
        left = (certificate.expires - datetime.now(UTC)).total_seconds()
        timer = asyncio.get_running_loop().call_later(left, self._expired, session)
        fingerprint = hashlib.sha256(certificate.der).digest()
        self._lives[session.member] = _Life(session, certificate, fingerprint, certificate.public, timer)

    def end(self, session: MemberSession) -> None:
        """The session is over."""
        life = self._lives.get(session.member)
        if life is not None and life.session is session:
            life.timer.cancel()
            del self._lives[session.member]

    def _expired(self, session: MemberSession) -> None:
        if self._running.sessions.connected.get(session.member) is not session:
            return
        life = self._lives.get(session.member)
        if life is not None and life.certificate.expires > datetime.now(UTC):
            # The clock has been set back since this was reckoned.
            self.begin(session, life.certificate)
            return
        detail = (
            "by the coordinator's clock the member's certificate has expired; if that is so, enrol again with a new "
        )
        detail += "join token; if not, one of the two clocks is wrong"
        # Not final: the member looks at its own clock.
        self._running.sessions.end(session.member, Reason.REASON_CLOCK_SKEW, detail)
