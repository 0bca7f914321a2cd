"""Checks each member's call against the caller's certificate and the list of enrolled members.

A call ends when its member is revoked. A member that calls too often is refused before the call costs anything.

Every call asks the database, and a cohort calls at once. The callers that come while the database answers earlier ones
are looked up together, in one transaction. It begins after the last of them has come, so each hears what is true now.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import NoReturn

import structlog
from cryptography import x509

from coordinator.authority import Anchors
from coordinator.metrics import Metrics
from coordinator.services.credentials import is_trusted, peer
from coordinator.services.lives import Lives
from coordinator.services.member_limit import MemberLimit, too_frequent
from coordinator.services.running import Running
from coordinator.services.streams import Context
from coordinator.services.unusable import come_again
from coordinator.storage import records
from coordinator.storage.certificates import Served
from coordinator.storage.database import Database
from tacit.identity import Certificate, Role
from tacit.reason import Reason
from tacit.status import abort_with, stamp

__all__ = ["Callers"]

log = structlog.get_logger("coordinator.federation")

# Maximum concurrent calls of one member: a connection carries 64, and a member has one or two connections.
_CALLS_AT_ONCE = 128
# Seconds before a too frequent call is refused, so that repeating it at once gains nothing.
_REFUSED_AFTER = 1.0
# Maximum callers that are looked up in one transaction, so that other transactions wait milliseconds at most.
_MAX_TOGETHER = 32

# Looks a caller up.
_LookUp = Callable[[records.Session], Served | None]


class _Door:
    """Looks callers up, those that wait together. Used from one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[_LookUp, asyncio.Future[Served | None]]] = []
        self._answering: asyncio.Task[None] | None = None

    async def ask(self, database: Database, look_up: _LookUp) -> Served | None:
        """Returns what `look_up` returns in a transaction that begins after this call. Raises what it raises."""
        answer: asyncio.Future[Served | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((look_up, answer))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer(database))
        return await answer

    async def _answer(self, database: Database) -> None:
        while self._waiting:
            batch = self._waiting[:_MAX_TOGETHER]
            del self._waiting[:_MAX_TOGETHER]
            try:
                found = await database.run(lambda session: [look_up(session) for look_up, _ in batch])  # noqa: B023
            except Exception:  # noqa: BLE001  one caller's failure is not the others'
                for one in batch:
                    await self._answer_alone(database, *one)
                continue
            for (_, answer), served in zip(batch, found, strict=True):
                if not answer.done():
                    answer.set_result(served)

    async def _answer_alone(
        self, database: Database, look_up: _LookUp, answer: "asyncio.Future[Served | None]"
    ) -> None:
        try:
            served = await database.run(look_up)
        except Exception as error:  # noqa: BLE001  raised again where it is awaited
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(served)


class Callers:
    """Admits the calls of members."""

    def __init__(
        self,
        running: Running,
        metrics: Metrics,
        federation: bytes,
        root: x509.Certificate | Anchors,
        limit: MemberLimit,
        lives: Lives,
    ) -> None:
        self._running = running
        self._metrics = metrics
        self._federation = federation
        self._root = root
        self._limit = limit
        self._lives = lives
        self._door = _Door()

    @contextlib.asynccontextmanager
    async def member(self, context: Context, tokens: float = 1.0) -> AsyncIterator[str]:
        """Yields the name of the calling member. Ends the call if it is not enrolled, or once it is revoked.

        Args:
            context: The call.
            tokens: What the call costs of the member's allowance.
        """
        member = (await self.certificate(context, tokens=tokens)).identity.name
        async with self.under_way(member, context):
            yield member

    @contextlib.asynccontextmanager
    async def under_way(self, member: str, context: Context) -> AsyncIterator[None]:
        """Counts a member's call, and ends it when the member is revoked."""
        if self._running.calls.count(member) >= _CALLS_AT_ONCE:
            await self.refuse_often(context, member, 1.0)
        with self._running.calls.of(member) as call:
            try:
                yield
            except asyncio.CancelledError:
                if call.reason is None:
                    raise
                # The coordinator ended the call, so tell the member why.
                call.task.uncancel()
                await abort_with(context, call.reason, call.detail)

    async def certificate(self, context: Context, *, retired: bool = False, tokens: float = 1.0) -> Certificate:
        """Returns the caller's certificate. Ends the call of a caller that is not an enrolled member.

        Args:
            context: The call.
            retired: Whether to accept a certificate from a retired authority, too.
            tokens: What the call costs of the member's allowance.
        """
        now = datetime.now(UTC)
        # Check the limit before verifying the certificate, which is most of the cost of a refused call. The handshake
        # has proved that an authority vouches for the name; only verified callers spend tokens of the bucket.
        claimed = b"".join(context.auth_context().get("peer_uri") or ()).decode(errors="replace").rpartition("/")[2]
        if seconds := self._limit.call_short(claimed, tokens):
            stamp(context, now)
            await self.refuse_often(context, claimed, seconds)
        found = await peer(context, Role.MEMBER, self._federation, self._root, now, retired=retired)
        name, fingerprint = found.identity.name, hashlib.sha256(found.der).digest()
        if seconds := self._limit.call(name, tokens):
            await self.refuse_often(context, name, seconds)
        now_ms = int(now.timestamp() * 1000)
        begins_ms, expires_ms = (int(moment.timestamp() * 1000) for moment in (found.begins, found.expires))
        # The holder of a retired authority's key can make certificates with any date, so never adopt one of those.
        adopting = is_trusted(found, self._root)
        async with come_again(context, member=name):
            served = await self._door.ask(
                self._running.database,
                lambda session: records.let_in(
                    session,
                    name,
                    found.der,
                    key=hashlib.sha256(found.public).digest(),
                    begins_ms=begins_ms,
                    expires_ms=expires_ms,
                    now_ms=now_ms,
                    adopting=adopting,
                ),
            )
        if served is None:
            async with come_again(context, member=name):
                known = await self._running.database.run(lambda session: records.member(session, name))
            if known is None:
                detail = f"this coordinator has no member {name}, although its authority certified one. Ask the "
                detail += (
                    "operator whether the database was lost, replaced or restored from a backup; then enrol again "
                )
                detail += "with a new join token, or restart this member once the database is back"
                await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, detail)
            await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_REVOKED)
        if not served.admits(fingerprint, now_ms):
            detail = f"{name} has a newer certificate than this one: it renewed or enrolled again since. Use that one; "
            detail += "if another machine did this, tell the operator"
            await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, detail)
        if fingerprint == served.current:
            self._lives.used(name, fingerprint, found)
        return found

    async def refuse_often(self, context: Context, member: str, seconds: float) -> NoReturn:
        """Refuses a call of a member that calls too often.

        Args:
            context: The call.
            member: The member's name.
            seconds: How long the member should wait.
        """
        self._metrics.member_limited("calls")
        log.warning("member_limited", member=member, what="calls")
        await asyncio.sleep(min(seconds, _REFUSED_AFTER))
        await abort_with(context, Reason.REASON_MEMBER_TOO_FREQUENT, too_frequent("calls", seconds))
