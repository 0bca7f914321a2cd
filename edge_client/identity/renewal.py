"""Keeps the member's certificate valid while it runs, and follows the federation's authorities as they change.

A certificate is renewed under the present one when about two thirds of its life are over (`due`), or soon after the
member learns of a newer authority. The steps run in this order:

1. The process holds `HOME/renewal.lock`. One process of this home renews at a time, and the others use what it got.
2. The request goes out. The coordinator stores the next certificate before it answers, and accepts the present one
   until the next is used. If this machine is killed anywhere from here on, it still has a good certificate and asks
   again.
3. The answer certifies this key, for this member, in this federation, by an authority that this machine can follow to.
4. The next certificate is put in place in one step, and only then used.

The key stays the same, because other members may have pinned it and running attempts were joined with it. A new key is
made on demand (`edge_client renew --new-key`).

A member that was offline while the authorities changed meets a server that it does not know. It then asks for the list
of authorities while trusting nobody, and believes the list as far as it proves itself from the one that it knows
(`follow`).
"""

import asyncio
import fcntl
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from edge_client.identity.connection import channel_options, exit_code_of, explain, open_channel
from edge_client.identity.handshake import ClientKey, HandshakeFailed, shake_hands
from edge_client.identity.home import Home, HomeUnusable, MemberIdentity
from edge_client.identity.reaching import elsewhere, unproven, warn_of
from tacit import __version__
from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.certificates import certificate_from_der
from tacit.guard import guarded
from tacit.identity import CertificateInvalid, Role, Trust, new_key
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from toolkit.console import ExitCode

__all__ = [
    "BACKDATED",
    "RenewalFailed",
    "Renewer",
    "asked_authorities",
    "due",
    "first_use",
    "follow",
    "followed",
    "renew",
    "renew_now",
    "server_unknown",
]

log = structlog.get_logger("edge_client")

# Certificates begin this long before they are issued.
BACKDATED = timedelta(minutes=5)
# The renewal is due between these fractions of a certificate's life. They are spread, so that members that enrolled on
# the same morning do not all renew on the same morning.
_EARLIEST, _LATEST = 0.60, 0.70
# A member moves to a newer authority within this fraction of the certificate's life, and within ten minutes.
_MOVE_SHARE, _MAX_MOVE = 0.01, timedelta(minutes=10)
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(seconds=5), timedelta(hours=1)
# A clock that was set, or a machine that slept, is noticed after this long at the latest.
_LONGEST_SLEEP = timedelta(minutes=10)
_CALL_SECONDS = 20.0
_LOCK_PAUSE = 0.1


class RenewalFailed(Exception):
    """There is no next certificate. The sentence says why and what to do. The present one is as good as before."""

    def __init__(self, sentence: str, code: ExitCode, reason: Reason | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code
        self.reason = reason


def due(identity: MemberIdentity) -> datetime:
    """Returns when the certificate is due for renewal: always the same moment for the same certificate."""
    issued = (identity.begins or identity.expires) + BACKDATED
    life = max(identity.expires - issued, timedelta(0))
    # The certificate's digest serves as a random draw that a restart does not repeat.
    drawn = int.from_bytes(identity.fingerprint[:4], "big") / 2**32
    return issued + life * (_EARLIEST + (_LATEST - _EARLIEST) * drawn)


def server_unknown(error: grpc.RpcError) -> bool:
    """Whether a call failed because no authority that this member knows certified the server."""
    reason, details = reason_of(error)
    return reason is None and "certificate_verify_failed" in details.lower()


# ---- asking ---------------------------------------------------------------------------------------------------------


async def renew(
    identity: MemberIdentity,
    *,
    another_key: bool = False,
    address: str | None = None,
    channel: grpc.aio.Channel | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> MemberIdentity:
    """Gets and stores the next certificate, and returns the identity with it.

    If another process of this home has renewed in the meantime, its result is returned.

    Args:
        identity: The present identity.
        another_key: Makes a new key.
        address: host:port to ask; `identity.address` unless given.
        channel: An open channel under the present certificate, if there is one.
        now: Tells the time by this machine's clock.

    Raises:
        RenewalFailed: Nobody answered, the coordinator refused, or the answer is not a certificate for this member.
    """
    try:
        lock = await asyncio.to_thread(_lock_file, identity.home)
    except OSError as error:
        raise RenewalFailed(
            f"{identity.home} cannot be written ({error.strerror}); make room or repair the disk", ExitCode.FAILED
        ) from error
    async with _locked(lock):
        try:
            kept = await asyncio.to_thread(MemberIdentity.load, identity.home, now=now())
        except HomeUnusable as error:
            raise RenewalFailed(str(error), ExitCode.USAGE) from error
        if kept.certificate != identity.certificate and not another_key:
            return kept
        if kept.certificate != identity.certificate:
            channel = None
        key = await asyncio.to_thread(new_key) if another_key else kept.key
        response = await _ask(kept, key, address, channel, now())
        renewed = _judged(kept, response, key, now())
        try:
            await asyncio.to_thread(_store, kept, renewed, another_key)
        except OSError as error:
            raise RenewalFailed(
                f"the next certificate cannot be stored in {identity.home} ({error.strerror}); make room or repair the "
                "disk: the present one stays valid, and the next try renews it",
                ExitCode.FAILED,
            ) from error
        return renewed


async def renew_now(
    identity: MemberIdentity, *, another_key: bool = False, address: str | None = None
) -> MemberIdentity:
    """Renews because a person asks: first follows to another authority if needed, and uses the new certificate at once.

    Without `address`, it asks at the identity's addresses in order, until one serves.

    Raises:
        RenewalFailed: As for `renew`.
    """
    addresses = identity.addresses if address is None else (address,)
    strangers: list[tuple[str, str]] = []
    for where in addresses:
        try:
            renewed = await _renewed_at(identity, where, another_key)
        except RenewalFailed as failure:
            cause = failure.__cause__
            answered = failure.reason is None and failure.code is not ExitCode.UNREACHABLE
            if answered or not elsewhere(failure.reason, cause):
                raise
            if unproven(cause):
                strangers.append((where, failure.sentence))
            last = failure
            log.info("renewal_tries_next_address", address=where, error=failure.sentence)
        else:
            warn_of(strangers)
            return renewed
    raise last


async def _renewed_at(identity: MemberIdentity, address: str, another_key: bool) -> MemberIdentity:
    try:
        renewed = await renew(identity, another_key=another_key, address=address)
    except RenewalFailed as failure:
        if not (isinstance(failure.__cause__, grpc.RpcError) and server_unknown(failure.__cause__)):
            raise
        renewed = await renew(await follow(identity, address), another_key=another_key, address=address)
    if renewed.certificate != identity.certificate:
        await first_use(renewed, address)
    return renewed


async def first_use(identity: MemberIdentity, address: str | None = None) -> None:
    """Makes a call under a certificate that was just stored.

    It tells the coordinator that this machine has the certificate; the one before is then no longer accepted.

    Raises:
        RenewalFailed: The call failed. The next connection has the same effect.
    """
    async with open_channel(identity, address) as channel:
        stub = federation_pb2_grpc.FederationServiceStub(channel)
        try:
            await stub.Renew(pb.RenewRequest(), timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            reason, _ = reason_of(error)
            raise RenewalFailed(explain(error, identity, address=address), exit_code_of(error), reason) from error


async def _ask(
    identity: MemberIdentity,
    key: rsa.RSAPrivateKey,
    address: str | None,
    channel: grpc.aio.Channel | None,
    now: datetime,
) -> pb.RenewResponse:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.member)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    request = pb.RenewRequest(
        certificate_request=csr.public_bytes(serialization.Encoding.DER), software_version=__version__
    )
    own = open_channel(identity, address) if channel is None else None
    try:
        stub = federation_pb2_grpc.FederationServiceStub(own or channel)
        response: pb.RenewResponse = await stub.Renew(request, timeout=_CALL_SECONDS)
        return response
    except grpc.aio.AioRpcError as error:
        reason, _ = reason_of(error)
        raise RenewalFailed(explain(error, identity, address=address, now=now), exit_code_of(error), reason) from error
    except (asyncio.CancelledError, grpc.aio.UsageError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        # Nobody cancelled this task: the channel was closed during the call.
        raise RenewalFailed(
            "the connection broke while the certificate was renewed; try again", ExitCode.UNREACHABLE
        ) from error
    finally:
        if own is not None:
            await own.close(None)


def _judged(
    identity: MemberIdentity, response: pb.RenewResponse, key: rsa.RSAPrivateKey, now: datetime
) -> MemberIdentity:
    """Returns the identity with the certificate of the response, if it certifies exactly what was asked for."""
    blame = "the coordinator did not answer with this member's next certificate"
    if not response.certificate_chain:
        raise RenewalFailed(f"{blame}: there is none; tell the operator", ExitCode.FAILED)
    der = response.certificate_chain[0]
    try:
        known = followed(identity, response.authorities)
        verified = known.trust.verify(der, role=Role.MEMBER, now=now)
    except (AuthoritiesInvalid, CertificateInvalid) as error:
        raise RenewalFailed(f"{blame}: {error}; tell the operator", ExitCode.FAILED) from error
    if verified.key != key.public_key() or verified.identity.name != identity.member:
        raise RenewalFailed(f"{blame}: it is for another key or another member; tell the operator", ExitCode.FAILED)
    return replace(known, key=key, certificate=der, begins=verified.begins, expires=verified.expires)


def _store(before: MemberIdentity, renewed: MemberIdentity, another_key: bool) -> None:
    home = Home(before.home)
    if renewed.known_authorities is not None and renewed.known_authorities != before.known_authorities:
        home.keep_authorities(renewed.known_authorities)
    if another_key:
        home.replace_key(renewed.key, renewed.certificate)
    else:
        home.replace_certificate(renewed.certificate)


# ---- the federation's authorities -----------------------------------------------------------------------------------


def followed(identity: MemberIdentity, document: bytes) -> MemberIdentity:
    """Returns the identity with the authorities of `document` if they are newer than the ones that it knows.

    Raises:
        AuthoritiesInvalid: The document proves nothing, or contradicts what is known.
    """
    if not document:
        return identity
    found = Authorities.read(document, federation=identity.federation)
    return replace(identity, known_authorities=found) if found.follows(identity.authorities) else identity


async def follow(identity: MemberIdentity, address: str | None = None) -> MemberIdentity:
    """Asks a server that this member does not know for the list of authorities, and stores what the list proves.

    Returns:
        The identity that trusts the proven authorities.

    Raises:
        RenewalFailed: Nobody answers, or the answer proves nothing: the server is not this federation's coordinator.
    """
    where = address or identity.address
    client = ClientKey(identity.key, certificate_from_der(identity.certificate))
    try:
        document = await asked_authorities(where, client=client)
        known = followed(identity, document)
    except HandshakeFailed as error:
        raise RenewalFailed(error.sentence, ExitCode.UNREACHABLE) from error
    except grpc.aio.AioRpcError as error:
        raise RenewalFailed(explain(error, identity, address=where), exit_code_of(error)) from error
    except AuthoritiesInvalid as error:
        raise RenewalFailed(
            f"the server at {where} cannot be trusted: {error}; ask the operator", ExitCode.UNREACHABLE
        ) from error
    if known is identity or known.known_authorities is None:
        raise RenewalFailed(
            f"the server at {where} was not certified by this member's federation, and knows of no newer authority: "
            "another coordinator answers there, or something in between intercepts the connection; check the address "
            "with the operator",
            ExitCode.UNREACHABLE,
        )
    await asyncio.to_thread(Home(identity.home).keep_authorities, known.known_authorities)
    log.info("authorities_followed", number=known.known_authorities.number)
    return known


async def asked_authorities(address: str, *, client: ClientKey | None, limit: float = 20.0) -> bytes:
    """Returns the list of authorities of any server that answers at an address. Sends nothing secret, believes nothing.

    Args:
        address: host:port to ask.
        client: What to show at the federation port; None asks at an enrolment port.
        limit: Bounds each step, in seconds.

    Raises:
        HandshakeFailed: Nobody answers in TLS.
        grpc.aio.AioRpcError: The call failed.
    """
    shown = await asyncio.to_thread(shake_hands, address, client=client, timeout=limit)
    # Trusting the shown root makes sure that the channel below reaches the same server, whoever it is.
    root = shown.chain[-1].public_bytes(serialization.Encoding.PEM)
    if client is None:
        credentials = grpc.ssl_channel_credentials(root_certificates=root)
    else:
        key = client.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem = client.certificate.public_bytes(serialization.Encoding.PEM)
        credentials = grpc.ssl_channel_credentials(root, key, pem)
    async with guarded(grpc.aio.secure_channel(address, credentials, options=channel_options())) as channel:
        if client is None:
            from tacit.v1 import enrolment_pb2_grpc

            answer = await enrolment_pb2_grpc.EnrolmentServiceStub(channel).FetchAuthorities(
                pb.FetchAuthoritiesRequest(), timeout=limit
            )
        else:
            answer = await federation_pb2_grpc.FederationServiceStub(channel).FetchAuthorities(
                pb.FetchAuthoritiesRequest(), timeout=limit
            )
    document: bytes = answer.authorities
    return document


# ---- in the background ----------------------------------------------------------------------------------------------


class Renewer:
    """Keeps one member's identity up to date, in one event loop. `identity` is the one to connect and sign with."""

    def __init__(
        self,
        identity: MemberIdentity,
        *,
        trusted: Callable[[Trust], None] = lambda trust: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Starts from `identity`. `trusted` is called with the new trust whenever it changes."""
        self.identity = identity
        # The address to ask; None: the identity's first.
        self.address: Callable[[], str | None] = lambda: None
        self._trusted = trusted
        # Called with the identity whenever it changes.
        self.listeners: list[Callable[[MemberIdentity], None]] = []
        self._now = now
        # Set when the wait for the next renewal must be computed again.
        self._woken = asyncio.Event()
        self._moves_at: datetime | None = None

    def take(self, identity: MemberIdentity) -> None:
        """Makes this the identity from now on."""
        before, self.identity = self.identity, identity
        if identity.trust != before.trust:
            self._trusted(identity.trust)
        if identity.certificate != before.certificate:
            self._moves_at = None
            log.info(
                "certificate_renewed",
                expires=identity.expires.isoformat(),
                same_key=identity.key.public_key() == before.key.public_key(),
            )
        for listener in self.listeners:
            listener(identity)
        self._woken.set()

    def heard(self, document: bytes) -> None:
        """Takes a changed list of authorities from the coordinator. A list that proves nothing is only logged."""
        try:
            known = followed(self.identity, document)
        except AuthoritiesInvalid as error:
            log.error("authorities_refused", error=str(error))
            return
        if known is self.identity or known.known_authorities is None:
            return
        try:
            Home(known.home).keep_authorities(known.known_authorities)
        except OSError as error:
            # This process believes it anyway, and the next one asks again.
            log.warning("authorities_not_kept", error=str(error))
        log.info("authorities_followed", number=known.known_authorities.number)
        self.take(known)

    async def before_dialling(self) -> None:
        """Loads what another process of this home has stored, and renews a certificate that nobody would accept."""
        await self.reload()
        if not self.identity.issued_by_trusted():
            try:
                await self.renew()
            except RenewalFailed as failure:
                log.warning("certificate_not_renewed", error=failure.sentence)

    async def reload(self) -> bool:
        """Loads a newer identity that another process of this home has stored. Returns whether there was one."""
        newer = await asyncio.to_thread(self._reload)
        if newer is not None:
            self.take(newer)
        return newer is not None

    async def catch_up(self) -> bool:
        """Follows to the authority of a server that this member does not know. Returns whether it did."""
        try:
            self.take(await follow(self.identity, self.address()))
        except (RenewalFailed, OSError) as error:
            log.warning("authorities_not_followed", error=str(error))
            return False
        return True

    async def renew(self, channel: grpc.aio.Channel | None = None) -> None:
        """Renews once. Raises RenewalFailed."""
        self.take(await renew(self.identity, address=self.address(), channel=channel, now=self._now))

    async def run(
        self, channel: Callable[[], Awaitable[grpc.aio.Channel]], moved: Callable[[], Awaitable[None]]
    ) -> None:
        """Renews whenever it is due, until cancelled.

        Args:
            channel: Waits for a session and returns its channel.
            moved: Called after each renewal.
        """
        pause = _FIRST_PAUSE
        while True:
            await self._until_due()
            open_one = await channel()
            if self._wait() > timedelta(0):
                continue
            before, problem = self.identity.certificate, "the coordinator sent the same certificate again"
            try:
                await self.renew(open_one)
            except RenewalFailed as failure:
                problem = failure.sentence
            except Exception as error:
                # A bug of ours must not end a member that has a good certificate.
                problem = ""
                log.error("certificate_not_renewed", error=f"{type(error).__name__}: {error}", exc_info=error)
            if self.identity.certificate != before:
                pause = _FIRST_PAUSE
                await moved()
                continue
            if problem:
                log.warning("certificate_not_renewed", error=problem, expires=self.identity.expires.isoformat())
            await asyncio.sleep(pause.total_seconds() * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _until_due(self) -> None:
        while (left := self._wait()) > timedelta(0):
            self._woken.clear()
            try:
                async with asyncio.timeout(min(left, _LONGEST_SLEEP).total_seconds()):
                    await self._woken.wait()
            except TimeoutError:
                pass

    def _wait(self) -> timedelta:
        """Returns the time until the renewal is due; zero or less means now."""
        at = due(self.identity)
        if not self.identity.issued_by_newest():
            if self._moves_at is None:
                life = self.identity.expires - (self.identity.begins or self.identity.expires)
                self._moves_at = self._now() + random.random() * min(life * _MOVE_SHARE, _MAX_MOVE)
            at = min(at, self._moves_at)
        return at - self._now()

    def _reload(self) -> MemberIdentity | None:
        try:
            names = Home(self.identity.home).identity
            listed = names.authorities.read_bytes() if names.authorities.exists() else b""
            known = self.identity.known_authorities
            same = listed == (known.canonical() if known is not None else b"")
            if same and names.certificate.read_bytes() == self.identity.certificate_pem:
                return None
            kept = MemberIdentity.load(self.identity.home, now=self._now())
        except OSError:
            return None
        except HomeUnusable:
            return None  # The identity in memory may still be good, and says best what is wrong with it.
        further = kept.authorities.number > self.identity.authorities.number
        return kept if further or kept.certificate != self.identity.certificate else None


def _lock_file(home: Path) -> int:
    return os.open(home / "renewal.lock", os.O_RDWR | os.O_CREAT, 0o600)


@asynccontextmanager
async def _locked(descriptor: int) -> AsyncIterator[None]:
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)
