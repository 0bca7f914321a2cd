"""The roster log as members and witnesses see it: pages of entries, signed heads, proofs that it grew, cosignatures.

The database holds the log (`coordinator.storage.roster`). This keeps its Merkle tree in memory, 64 bytes an entry, and
signs heads with the server's key. The first head is no older than the journal, which another coordinator may have
written with a clock that was ahead: a head that looks older than the one before it says nothing good to a member. Only
`refresh` reads new entries, so whoever needs a certificate to be in the head
calls it first: sessions do before they open, and renewals before they answer.

It also knows which members' newest certificates the configured witnesses have yet to sign. That decides only who is
asked to take part: members check witnesses' signatures themselves.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import grpc
import grpc.aio
import structlog
from cryptography.hazmat.primitives.asymmetric import rsa
from sqlalchemy.orm import Session

from coordinator.domain.witnessed import Witnessed
from coordinator.services.acts import Acts
from coordinator.storage import roster
from coordinator.storage.database import Database
from coordinator.storage.journal import newest_ms
from secure_agg.transparency import Tree
from tacit.identity import Trust
from tacit.roster import MAX_COSIGNATURE_AGE, MAX_SKEW, Cosignature, Entry, Head, HeadInvalid, Kind, SignedHead
from tacit.roster_wire import (
    ENTRIES_AT_ONCE,
    MEMBERS_COSIGNING,
    cosignature_from_pb,
    cosignature_to_pb,
    entry_to_pb,
    head_to_pb,
)
from tacit.v1 import enrolment_pb2
from tacit.v1 import federation_pb2 as pb
from tacit.withdrawal import WithdrawalTaken, sign_taken

__all__ = ["RosterLog", "cosigned_or_abort"]

log = structlog.get_logger("coordinator")

# A head is signed anew after this time, although the log did not grow: members refuse heads of more than an hour.
_SIGNED_ANEW_MS = 60_000
_SKEW_MS = MAX_SKEW.total_seconds() * 1000
_ASKED_AGAIN_SECONDS = 1.0

Signer = Callable[[], tuple[rsa.RSAPrivateKey, bytes]]


class RosterLog:
    """The log's tree and newest head. `head` may be called from any thread, everything else from the event loop."""

    def __init__(
        self,
        database: Database,
        federation: bytes,
        signer: Signer,
        *,
        acts: Acts,
        trust: Callable[[], Trust],
        witnesses: Collection[bytes] = (),
        told: Callable[[], None] = lambda: None,
        signed: Callable[[bytes, float], None] = lambda witness, at: None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts with an empty tree; call `refresh`.

        Args:
            database: Holds the log.
            federation: The federation's name, 32 bytes.
            signer: Returns the server's present key and certificate (DER).
            acts: Runs to its end what has begun.
            trust: Returns the authorities whose members may cosign.
            witnesses: The Ed25519 keys that may cosign, 32 bytes each.
            told: Called in the event loop when one member less waits for the witnesses: they have signed its newest
                certificate, or count no longer.
            signed: Called with each witness and when it signed last, in seconds since 1970 (0: never): at the first
                `refresh`, and at each signature.
            now_ms: Returns the time, in milliseconds since 1970.
            clock: Returns monotonic seconds.
        """
        self._database = database
        self._federation = federation
        self._signer = signer
        self._acts = acts
        self._trust = trust
        self._witnesses = frozenset(witnesses)
        self._now_ms = now_ms
        self._clock = clock
        self._read_at: float | None = None
        self._tree = Tree()
        self._signed: SignedHead | None = None
        self._signing: tuple[rsa.RSAPrivateKey, bytes] | None = None
        self._lock = threading.Lock()
        self._reading = asyncio.Lock()
        # The journal's newest time at the start. None: not read yet.
        self._begun_ms: int | None = None
        self._told, self._tell_signed = told, signed
        # By witness: the size of the newest head that it signed, and when.
        self._signatures: dict[bytes, tuple[int, int]] = {}
        # The number of each member's newest certificate. All of them, because a head that a witness signs next may be
        # smaller than those that count now.
        self._newest: dict[str, int] = {}
        # The last answer to `witnessed`, and the size of the tree then.
        self._witnessed, self._witnessed_at = Witnessed(), 0
        # Who waited for witnesses when that was looked at last, and what looks again when one counts no longer.
        self._waited: frozenset[str] = frozenset()
        self._ageing: asyncio.TimerHandle | None = None
        # The number of the newest revocation of each revoked name. Its entries before that one do not stand.
        self._revoked: dict[str, int] = {}

    async def refresh(self, max_age: float = 0.0) -> None:
        """Takes the entries that were added to the database since the last call.

        Args:
            max_age: Seconds. If the last call ended less long ago, the database is not asked.

        Raises:
            DatabaseUnusable: the database cannot be read.
        """
        async with self._reading:
            if self._read_at is not None and self._clock() - self._read_at < max_age:
                return
            known, begins = len(self._tree), self._begun_ms is None

            def read(s: Session) -> tuple[list[Entry], int, list[Cosignature]]:
                added = roster.entries(s, known)
                return (added, newest_ms(s), roster.cosignatures(s, 0)) if begins else (added, 0, [])

            added, begun_ms, cosignatures = await self._database.run(read)
            with self._lock:
                if begins:
                    self._begin(begun_ms)
                    self._signatures = {
                        each.signer: (each.size, each.at_ms) for each in cosignatures if each.signer in self._witnesses
                    }
                self._tree.extend(entry.leaf for entry in added)
                for number, entry in enumerate(added, start=known + 1):
                    if entry.kind is Kind.REVOKED:
                        self._revoked[entry.name] = number
                        self._newest.pop(entry.name, None)
                    else:
                        self._newest[entry.name] = number
            self._read_at = self._clock()
        if begins:
            for witness in self._witnesses:
                self._tell_signed(witness, self._signatures.get(witness, (0, 0))[1] / 1000)
        self._look()

    def _begin(self, begun_ms: int) -> None:
        ahead_ms = begun_ms - self._now_ms()
        if ahead_ms > _SKEW_MS:
            # Members would refuse such a head, from anybody.
            log.warning("clock_behind", seconds=ahead_ms // 1000, advice="compare the clocks of all coordinators")
            begun_ms = 0
        self._begun_ms = begun_ms

    def head(self) -> SignedHead:
        """Returns the newest head. It was signed less than a minute ago."""
        with self._lock:
            if self._begun_ms:
                # Again, because the clock may have been set back since.
                self._begin(self._begun_ms)
            now_ms, size, last = max(self._now_ms(), self._begun_ms or 0), len(self._tree), self._signed
            if last is not None and last.head.size == size and 0 <= now_ms - last.head.at_ms < _SIGNED_ANEW_MS:
                return last
            try:
                self._signing = self._signer()
            except (OSError, ValueError):
                # The files are being replaced; the pair before is as good.
                if self._signing is None:
                    raise
            key, certificate = self._signing
            if last is not None and last.head.size != size and last.head.at_ms - now_ms <= _SKEW_MS:
                # Members refuse a larger log that says it is older.
                now_ms = max(now_ms, last.head.at_ms)
            head = Head(self._federation, size, self._tree.root(), now_ms)
            self._signed = SignedHead.made(head, key, certificate)
            return self._signed

    def witnessed(self) -> Witnessed:
        """Returns what every configured witness that signed within a day has signed. From any thread.

        A witness that has signed nothing for a day counts no longer: no member accepts its signature.
        """
        with self._lock:
            if not (counted := self._counted()):
                return Witnessed()
            signed, least = min((size, key) for key, (size, _) in counted.items())
            # With 10,000 members, jobs ask more often than the answer changes.
            if (signed, least, len(self._tree)) != (self._witnessed.entries, self._witnessed.least, self._witnessed_at):
                newer = frozenset(name for name, number in self._newest.items() if number > signed)
                self._witnessed, self._witnessed_at = Witnessed(signed, newer, least), len(self._tree)
            return self._witnessed

    def _counted(self) -> dict[bytes, tuple[int, int]]:
        """Returns the signatures of within a day."""
        oldest_ms = self._now_ms() - MAX_COSIGNATURE_AGE.total_seconds() * 1000
        return {key: signed for key, signed in self._signatures.items() if signed[1] >= oldest_ms}

    def _look(self) -> None:
        """Tells if somebody waits for witnesses no longer. Looks again when the oldest signature is a day old."""
        newer = self.witnessed().newer
        before, self._waited = self._waited, newer
        if self._ageing is not None:
            self._ageing.cancel()
            self._ageing = None
        if newer:
            with self._lock:
                oldest_ms = min((at_ms for _, at_ms in self._counted().values()), default=self._now_ms())
            left = MAX_COSIGNATURE_AGE.total_seconds() + (oldest_ms + 1 - self._now_ms()) / 1000
            self._ageing = asyncio.get_running_loop().call_later(left, self._look)
        if before - newer:
            self._told()

    async def entry_of(self, certificate: bytes, member: str) -> int | None:
        """Returns the number of a certificate's entry, from 1 on; None if the log has none under this name that stands.

        Args:
            certificate: SHA-256 of the certificate, 32 bytes.
            member: The holder's name.
        """
        number = await self._database.run(lambda s: roster.number_of(s, certificate, member))
        return None if number is None or number <= self._revoked.get(member, 0) else number

    def sign(self, taken: WithdrawalTaken) -> tuple[bytes, bytes]:
        """Signs as the server that a withdrawal was taken. Returns the signature, and the server's certificate (DER).

        Raises:
            OSError, ValueError: the server's key is being replaced; try again.
        """
        key, certificate = self._signer()
        return sign_taken(taken, key), certificate

    def entries_of(self, request: pb.FetchLogRequest) -> int:
        """How many entries an answer has, by what is known here now."""
        with self._lock:
            size = len(self._tree)
        return max(0, min(request.size or size, size, request.start + ENTRIES_AT_ONCE) - request.start)

    async def page(self, request: pb.FetchLogRequest) -> pb.FetchLogResponse:
        """Returns the entries that a member asks for, as many as one answer has, and the newest head.

        `refresh` lets one caller in at a time, so one page waits for the database at a time, too.
        """
        await self.refresh()
        head = self.head()
        end = min(request.size or head.head.size, head.head.size, request.start + ENTRIES_AT_ONCE)
        start = min(request.start, end)

        def read(s: Session) -> tuple[list[Entry], list[Cosignature]]:
            return roster.entries(s, start, end), roster.cosignatures(s, MEMBERS_COSIGNING)

        found, cosignatures = await self._database.run(read)
        return pb.FetchLogResponse(
            entries=map(entry_to_pb, found),
            head=head_to_pb(head),
            cosignatures=map(cosignature_to_pb, cosignatures),
        )

    async def since(self, known: int) -> enrolment_pb2.FetchHeadResponse:
        """Returns a head of at most a second ago, and the proof that it continues the log of `known` entries.

        Anybody may ask, so the database is asked once a second, whoever asks how often.
        """
        await self.refresh(_ASKED_AGAIN_SECONDS)
        head = self.head()
        with self._lock:
            size = head.head.size
            proof = self._tree.consistency(known, size) if known <= size else ()
        return enrolment_pb2.FetchHeadResponse(head=head_to_pb(head), proof=proof)

    async def cosigned(self, message: pb.HeadCosignature, member: str = "") -> None:
        """Stores a cosignature of this log.

        Args:
            message: the cosignature.
            member: the calling member; empty for a witness.

        Raises:
            HeadInvalid: it is malformed, by somebody else, or of another log.
        """
        cosignature = cosignature_from_pb(message)
        if not member and cosignature.signer not in self._witnesses:
            raise HeadInvalid(
                "no witness with this key is known here; the operator adds it to `witnesses` in coordinator.toml"
            )
        if cosignature.check(self._trust()) != member:
            raise HeadInvalid("the cosignature is somebody else's")
        if abs(cosignature.at_ms - self._now_ms()) > MAX_SKEW.total_seconds() * 1000:
            raise HeadInvalid("the cosignature's time is not now; set the clock")
        with self._lock:
            size = len(self._tree)
            if cosignature.size > size or self._tree.root(cosignature.size) != cosignature.root:
                raise HeadInvalid(f"the cosignature is of another log: this one has {size} entries and other roots")
            known = self._signatures.get(cosignature.signer, (-1, 0))
        if member:
            await self._database.run(lambda s: roster.cosigned(s, cosignature, member))
        elif roster.is_newer(cosignature, *known):
            # Anybody may bring a witness's signature again.
            await self._acts.run(self._signed_by_witness(cosignature), "Witness")

    async def _signed_by_witness(self, cosignature: Cosignature) -> None:
        await self._database.run(lambda s: roster.cosigned(s, cosignature))
        self._note_signature(cosignature)

    def _note_signature(self, cosignature: Cosignature) -> None:
        with self._lock:
            if roster.is_newer(cosignature, *self._signatures.get(cosignature.signer, (-1, 0))):
                self._signatures[cosignature.signer] = (cosignature.size, cosignature.at_ms)
            _, at_ms = self._signatures[cosignature.signer]
        self._tell_signed(cosignature.signer, at_ms / 1000)
        self._look()


async def cosigned_or_abort(
    roster_log: RosterLog | None,
    request: pb.CosignRequest,
    context: grpc.aio.ServicerContext[Any, Any],
    member: str = "",
) -> pb.CosignResponse:
    """Answers a call that brings a cosignature."""
    if roster_log is None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this coordinator keeps no roster log")
    try:
        await roster_log.cosigned(request.cosignature, member)
    except HeadInvalid as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    return pb.CosignResponse()
