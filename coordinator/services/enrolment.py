"""Enrolment turns a join token and a key into a member's certificate.

The steps, in this order:

1. A caller that tries too often waits (`coordinator.services.rate_limit`), before anything is computed for it.
2. The certificate request must hold a suitable key and prove possession of it. So a request that cannot be certified
   does not redeem the token.
3. The token desk redeems the token atomically, once and for one key.
4. The authority issues the certificate, with the name from the token and only the key from the request.
5. The desk records the certificate, and only then the coordinator hands it out.

If the coordinator stops in between, the member repeats its request with the same key and enrolment continues.
"""

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from coordinator.authority import Anchors, AuthorityBook
from coordinator.domain.tokens import GrantedBefore, Refused, TokenDesk
from coordinator.pki import Authority, KeyElsewhere, LifetimeOutOfRange, RequestUnsuitable, certify_request
from coordinator.relay.names import peer_of
from coordinator.services.rate_limit import EnrolmentLimit
from coordinator.services.roster import RosterLog, cosigned_or_abort
from coordinator.services.unusable import come_again
from coordinator.storage.errors import TokenWithdrawn
from coordinator.storage.requests import Asked
from tacit.identity import Role
from tacit.reason import Reason, word
from tacit.status import abort_with, stamp
from tacit.token import secret_hash
from tacit.v1 import enrolment_pb2, enrolment_pb2_grpc, federation_pb2

__all__ = ["EnrolmentServicer", "key_fingerprint"]

_log = structlog.get_logger(__name__)

_DER = serialization.Encoding.DER


def key_fingerprint(key: rsa.RSAPublicKey) -> bytes:
    """Returns the fingerprint that a token is bound to: SHA-256 of the key's SubjectPublicKeyInfo, 32 bytes."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(_DER, serialization.PublicFormat.SubjectPublicKeyInfo))
    return digest.finalize()


# What a member is told whose request waits.
AWAITED = (
    "the request is stored and waits for the federation's authority, whose key is on another machine; repeat the same "
    "command once the operator has imported the certificate: the token still works for this machine's key"
)


async def _nobody_asks(asked: Asked) -> None:
    raise KeyElsewhere("this service was given no place to store requests")


class EnrolmentServicer(enrolment_pb2_grpc.EnrolmentServiceServicer):
    """Serves `tacit.v1.EnrolmentService`."""

    def __init__(
        self,
        authority: Authority | Anchors,
        desk: TokenDesk,
        *,
        federation_address: Callable[[], str],
        other_addresses: Sequence[str] = (),
        member_lifetime: timedelta,
        clock: Callable[[], datetime],
        count: Callable[[str], None] = lambda outcome: None,
        limit: EnrolmentLimit | None = None,
        roster: RosterLog | None = None,
        ask: Callable[[Asked], Awaitable[None]] | None = None,
    ) -> None:
        """Creates the service.

        Args:
            authority: The authority that issues certificates.
            desk: Redeems tokens and records certificates.
            federation_address: Called at each enrolment, as ports are known only once they are bound.
            other_addresses: Those of this federation's other coordinators.
            member_lifetime: How long a member's certificate is valid.
            clock: Returns the current time, with its time zone.
            count: Called once per request with "granted" or the reason's word.
            limit: How often strangers may try. Default: the limits of `EnrolmentLimit`.
            roster: The roster log, for witnesses.
            ask: Stores a request for an authority whose key is on another machine.
        """
        self._anchors = authority if isinstance(authority, Anchors) else Anchors(AuthorityBook.of(authority))
        self._desk = desk
        self._federation_address = federation_address
        self._other_addresses = tuple(other_addresses)
        self._member_lifetime = member_lifetime
        self._clock = clock
        self._count = count
        self._roster = roster
        self._ask = ask or _nobody_asks
        self._limit = EnrolmentLimit(time.monotonic) if limit is None else limit

    async def Enrol(  # noqa: N802  the name is the contract's
        self,
        request: enrolment_pb2.EnrolRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> enrolment_pb2.EnrolResponse:
        """Redeems a token. Refusals carry their reason (`tacit.status`), and every answer carries the server's time."""
        now = self._clock()
        stamp(context, now)
        # Take the permit before checking the request's signature and before asking the database.
        permit = self._limit.take(peer_of(context.peer()))
        if permit.refused_for is not None:
            await self._refuse_often(context, permit.refused_for)
        try:
            key = certify_request(request.certificate_request)
        except RequestUnsuitable as error:
            await self._refuse(context, request.token_id, Reason.REASON_KEY_UNSUITABLE, str(error))
        fingerprint = key_fingerprint(key)
        async with come_again(context):
            outcome = await self._desk.spend(request.token_id, secret_hash(request.secret), fingerprint, now)
        if isinstance(outcome, Refused):
            await self._refuse(context, request.token_id, outcome.reason, outcome.detail)
        if isinstance(outcome, GrantedBefore):
            chain = outcome.chain
        else:
            async with come_again(context):
                chain = await self._certify(request, context, key, outcome.member, now)
            # Not for a repetition, which its member could make as often as it likes.
            self._limit.give_back(permit)
        self._count("granted")
        _log.info(
            "member_enrolled",
            member=outcome.member,
            token_id=request.token_id,
            key=fingerprint.hex(),
            repeated=isinstance(outcome, GrantedBefore),
            software_version=request.software_version[:64],
        )
        return enrolment_pb2.EnrolResponse(
            certificate_chain=chain,
            member=outcome.member,
            federation_address=self._federation_address(),
            other_addresses=self._other_addresses,
            authorities=self._anchors.book.document,
        )

    async def FetchAuthorities(  # noqa: N802
        self, request: federation_pb2.FetchAuthoritiesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> federation_pb2.FetchAuthoritiesResponse:
        """Returns the federation's authorities to anyone: the list is public and proves itself."""
        return federation_pb2.FetchAuthoritiesResponse(authorities=self._anchors.book.document)

    async def FetchHead(  # noqa: N802
        self, request: enrolment_pb2.FetchHeadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> enrolment_pb2.FetchHeadResponse:
        """Returns the roster log's newest head and a proof to anyone: neither names anybody."""
        if self._roster is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this coordinator keeps no roster log")
        async with come_again(context):
            return await self._roster.since(request.known)

    async def Witness(  # noqa: N802
        self, request: federation_pb2.CosignRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> federation_pb2.CosignResponse:
        """Takes a witness's signature over a head."""
        async with come_again(context):
            return await cosigned_or_abort(self._roster, request, context)

    async def _certify(
        self,
        request: enrolment_pb2.EnrolRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        key: rsa.RSAPublicKey,
        member: str,
        now: datetime,
    ) -> tuple[bytes, ...]:
        try:
            authority = self._anchors.book.issuing
            certificate = authority.issue(key, Role.MEMBER, member, self._member_lifetime, now=now)
        except KeyElsewhere:
            await self._queue(request, context, key, member, now)
        except LifetimeOutOfRange as error:
            # The operator must repair this. The token stays bound to this key and can be redeemed afterwards.
            await self._refuse(context, request.token_id, Reason.REASON_INTERNAL, str(error))
        try:
            return await self._desk.record(
                request.token_id,
                member,
                (certificate.public_bytes(_DER), authority.certificate.public_bytes(_DER)),
                certificate.not_valid_after_utc,
                request.software_version[:64],
                now,
            )
        except TokenWithdrawn as error:
            await self._refuse(context, request.token_id, Reason.REASON_TOKEN_UNKNOWN, str(error))

    async def _queue(
        self,
        request: enrolment_pb2.EnrolRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        key: rsa.RSAPublicKey,
        member: str,
        now: datetime,
    ) -> NoReturn:
        """Stores a request for the authority on the other machine, and says that it waits."""
        asked = Asked(
            member,
            request.certificate_request,
            key_fingerprint(key),
            int(now.timestamp() * 1000),
            request.software_version[:64],
            token=request.token_id,
        )
        async with come_again(context):
            await self._ask(asked)
        await self._refuse(context, request.token_id, Reason.REASON_CERTIFICATE_AWAITED, AWAITED)

    async def _refuse_often(self, context: grpc.aio.ServicerContext[Any, Any], seconds: float) -> NoReturn:
        reason = Reason.REASON_ENROLMENT_TOO_FREQUENT
        self._count(word(reason))
        # A warning for each try would let a flood fill the disk. The metric counts them; this line is for debugging.
        _log.debug("enrolment_refused", reason=word(reason), peer=peer_of(context.peer()))
        wait = math.ceil(seconds)
        sentence = f"this network sent too many requests to enrol; wait {wait} s and repeat the same command"
        await abort_with(context, reason, sentence)

    async def _refuse(
        self, context: grpc.aio.ServicerContext[Any, Any], token_id: str, reason: Reason, detail: str
    ) -> NoReturn:
        self._count(word(reason))
        _log.warning("enrolment_refused", token_id=token_id[:64], reason=word(reason), peer=peer_of(context.peer()))
        await abort_with(context, reason, detail)
