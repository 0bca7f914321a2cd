"""Issues a member's next certificate to a caller with its current one.

The steps, in this order:

1. The caller is admitted under its newest certificate, or under the previous one while that is good.
2. The request must hold a suitable key and prove possession of it.
3. The newest authority issues the certificate, with the caller's name.
4. The database stores the certificate, and only then the coordinator hands it out.

The key may be the current one (other members' pins name keys) or a new one. Repeating a request costs nothing: until
half of a certificate's lifetime is over, the same key gets the same certificate. Requests of one member are answered
one after the other, so that many at once make no more certificates than one. A request whose turn has come is answered
to its end, so the log names whoever renews, however quickly the caller goes away.
"""

import asyncio
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from weakref import WeakValueDictionary

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from coordinator.authority import Anchors
from coordinator.pki import KeyElsewhere, LifetimeOutOfRange, RequestUnsuitable, certify_request
from coordinator.services.acts import Acts
from coordinator.services.enrolment import key_fingerprint
from coordinator.storage import records
from coordinator.storage.database import Database
from coordinator.storage.requests import Asked, ask
from tacit.certificates import certificate_from_der
from tacit.identity import Certificate, Role, issued_by
from tacit.reason import Reason, word

__all__ = ["RenewalRefused", "Renewals", "stands"]

log = structlog.get_logger("coordinator.enrolment")

_DER = serialization.Encoding.DER
# Each new key costs a signature, a row and a journal entry, and nobody needs one more often.
_BETWEEN_KEYS_MS = 60_000


class RenewalRefused(Exception):
    """The renewal is refused. `reason` goes to the member; the text is a whole sentence."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def stands(served: records.Served, key: rsa.RSAPublicKey, issuer: x509.Certificate, now_ms: int) -> bool:
    """Returns whether the member's current certificate already answers a request for `key`.

    It does if it has this key, the newest authority issued it, and less than half of its lifetime is over.

    Args:
        served: The certificates under which the member is served.
        key: The requested key.
        issuer: The newest authority's certificate.
        now_ms: The current time, in milliseconds since the epoch.
    """
    try:
        known = certificate_from_der(served.certificate)
    except ValueError:
        return False
    if known.public_key() != key or not issued_by(known, issuer):
        return False
    if now_ms < known.not_valid_before_utc.timestamp() * 1000:
        # It was issued while this clock was ahead, and no member accepts it before it begins.
        return False
    expires_ms = known.not_valid_after_utc.timestamp() * 1000
    return now_ms < served.issued_ms + (expires_ms - served.issued_ms) / 2


class Renewals:
    """Renews the certificate of a caller that `FederationService.Renew` has identified."""

    def __init__(
        self,
        anchors: Anchors,
        database: Database,
        *,
        acts: Acts,
        member_lifetime: timedelta,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """Creates the service.

        Args:
            anchors: The authorities; the newest one issues certificates.
            database: Keeps members' certificates.
            acts: Runs to its end what has begun.
            member_lifetime: How long a member's certificate is valid.
            clock: Returns the current time, with its time zone.
            count: Called once per request with "granted" or the reason's word.
        """
        self._anchors = anchors
        self._database = database
        self._acts = acts
        self._member_lifetime = member_lifetime
        self._clock = clock
        self._count = count
        # By member, while a request of its is being answered.
        self._answering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def document(self) -> bytes:
        """The federation's authorities, encoded for the wire."""
        return self._anchors.book.document

    async def renew(self, caller: Certificate, request: bytes, software_version: str) -> tuple[bytes, ...]:
        """Returns the caller's next certificate, or its current one if that is new enough.

        Args:
            caller: The certificate under which the member calls.
            request: The certificate request (PKCS#10, DER). Empty asks for the current certificate.
            software_version: The member's software version.

        Returns:
            The certificate and the authority that issued it, both DER.

        Raises:
            RenewalRefused: the request holds no suitable key, the member was revoked meanwhile, or it asks too often.
        """
        member = caller.identity.name
        turn = self._answering.setdefault(member, asyncio.Lock())

        async def act() -> tuple[bytes, ...]:
            try:
                renewed = await self._renew(caller, request, software_version)
            except RenewalRefused as refusal:
                self._count(word(refusal.reason))
                log.warning("renewal_refused", member=member, reason=word(refusal.reason))
                raise
            finally:
                turn.release()
            if request:
                self._count("granted")
            return renewed

        # A caller that goes away gives its place up.
        await turn.acquire()
        return await self._acts.run(act(), "Renew", refusals=RenewalRefused, member=member)

    async def _renew(self, caller: Certificate, request: bytes, software_version: str) -> tuple[bytes, ...]:
        name, book = caller.identity.name, self._anchors.book
        now = self._clock()
        now_ms = int(now.timestamp() * 1000)
        served = await self._database.run(lambda s: records.served(s, name))
        if served is None:
            raise RenewalRefused(Reason.REASON_CLIENT_CERTIFICATE_REVOKED, f"{name} was removed from the federation")
        if not request:
            return self._chain(served.certificate)
        try:
            key = certify_request(request)
        except RequestUnsuitable as error:
            raise RenewalRefused(Reason.REASON_KEY_UNSUITABLE, str(error)) from error
        if stands(served, key, book.issuing.certificate, now_ms):
            return self._chain(served.certificate)
        same = key == caller.key
        if not same and served.issued_ms <= now_ms < served.issued_ms + _BETWEEN_KEYS_MS:
            raise RenewalRefused(
                Reason.REASON_KEY_UNSUITABLE, f"{name} got a certificate a moment ago; request a new key in a minute"
            )
        try:
            made = book.issuing.issue(key, Role.MEMBER, name, self._member_lifetime, now=now)
        except KeyElsewhere as error:
            if not same:
                # The member makes a new key for each request, and the answer comes after many.
                raise RenewalRefused(
                    Reason.REASON_KEY_UNSUITABLE,
                    "the authority's key is on another machine, so a renewal keeps its key; for a new key ask the "
                    "operator to revoke and invite this member",
                ) from error
            asked = Asked(
                name,
                request,
                key_fingerprint(key),
                now_ms,
                software_version[:64],
                present=hashlib.sha256(caller.der).digest(),
                present_expires_ms=int(caller.expires.timestamp() * 1000),
            )
            await self._database.run(lambda s: ask(s, asked))
            raise RenewalRefused(
                Reason.REASON_CERTIFICATE_AWAITED,
                "the request is stored and waits for the federation's authority, whose key is on another machine; this "
                "member asks again by itself",
            ) from error
        except LifetimeOutOfRange as error:
            # The operator must repair this.
            raise RenewalRefused(Reason.REASON_INTERNAL, str(error)) from error
        der, expires_ms = made.public_bytes(_DER), int(made.not_valid_after_utc.timestamp() * 1000)
        using, using_expires_ms = hashlib.sha256(caller.der).digest(), int(caller.expires.timestamp() * 1000)
        kept = await self._database.run(
            lambda s: records.keep_next(
                s,
                name,
                using=using,
                using_expires_ms=using_expires_ms,
                certificate=der,
                expires_ms=expires_ms,
                key=key_fingerprint(key).hex(),
                software_version=software_version,
                now_ms=now_ms,
            )
        )
        if not kept:
            raise RenewalRefused(
                Reason.REASON_CLIENT_CERTIFICATE_REVOKED, f"meanwhile {name} was removed, or renewed elsewhere"
            )
        log.info("member_renewed", member=name, key=key_fingerprint(key).hex(), same_key=same)
        return self._chain(der)

    def _chain(self, der: bytes) -> tuple[bytes, ...]:
        certificate = certificate_from_der(der)
        for root in self._anchors.history.roots:
            if issued_by(certificate, root):
                return (der, root.public_bytes(_DER))
        raise RenewalRefused(
            Reason.REASON_INTERNAL,
            "no authority of this federation issued the certificate on record; tell the operator",
        )
