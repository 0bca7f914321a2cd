"""The member's certificate, kept valid while it runs; and the federation's authorities, as they change.

A certificate is renewed when about two thirds of its life are over (`due`), under the one that is there, and at once
where the federation has a newer authority. In this order:

1. `HOME/renewal.lock` is held: one process of this home renews at a time, and what another one got is taken;
2. the request goes out; the coordinator stores the next certificate before it answers, and takes the present one
   until the next is used: killed anywhere from here on, this machine still has one that is good, and asks again;
3. what came certifies this key, for this member, in this federation, by an authority that this machine can follow to;
4. it is put in place in one step, and only then used.

The key stays, as other members may have pinned it and attempts that are under way were joined with it; another one is
made on demand (`edge_client renew --new-key`).

Who was asleep while the authorities changed is shown a server that it does not know. It then asks for the list of
authorities, trusting nobody, and believes it as far as it proves itself from the one that it knows (`follow`).
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
from tacit import __version__
from tacit.authorities import Authorities, AuthoritiesInvalid
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

# Certificates begin so much before they are issued.
BACKDATED = timedelta(minutes=5)
# Between these parts of a certificate's life its renewal is due: spread, so that a fleet that enrolled on one morning
# does not come back on one morning.
_EARLIEST, _LATEST = 0.60, 0.70
# A newer authority: within this part of the life, and no more than ten minutes.
_MOVE_SHARE, _MAX_MOVE = 0.01, timedelta(minutes=10)
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(seconds=5), timedelta(hours=1)
# A clock that was set, or a machine that slept, is noticed after so long.
_LONGEST_SLEEP = timedelta(minutes=10)
_CALL_SECONDS = 20.0
_LOCK_PAUSE = 0.1


class RenewalFailed(Exception):
    """There is no next certificate. The sentence says why and what to do; the present one is as good as before."""

    def __init__(self, sentence: str, code: ExitCode, reason: Reason | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code
        self.reason = reason


def due(identity: MemberIdentity) -> datetime:
    """When the certificate is to be renewed: always the same moment for one certificate."""
    issued = (identity.begins or identity.expires) + BACKDATED
    life = max(identity.expires - issued, timedelta(0))
    # The certificate's own digest is as good as a throw of dice, and a restart does not throw again.
    drawn = int.from_bytes(identity.fingerprint[:4], "big") / 2**32
    return issued + life * (_EARLIEST + (_LATEST - _EARLIEST) * drawn)


def server_unknown(error: grpc.RpcError) -> bool:
    """Whether a call failed because the server was certified by nobody whom this member knows."""
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
    """The identity with its next certificate, stored. channel: an open one under the present certificate, if any.

    Where another process of this home has renewed meanwhile, what that one got is returned.

    Raises:
        RenewalFailed: nobody answered, the coordinator refused, or what came is no certificate for this member.
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
                "disk: the present one stays good, and it is tried again",
                ExitCode.FAILED,
            ) from error
        return renewed


async def renew_now(
    identity: MemberIdentity, *, another_key: bool = False, address: str | None = None
) -> MemberIdentity:
    """The same for a person who asks: follows to another authority first where that is needed, and uses what came.

    Raises:
        RenewalFailed: as above.
    """
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
    """A call under a certificate that was just stored: the coordinator then knows that this machine has it, and takes
    the one before it no more.

    Raises:
        RenewalFailed: it could not be made; the next connection is as good.
    """
    async with open_channel(identity, address) as channel:
        stub = federation_pb2_grpc.FederationServiceStub(channel)
        try:
            await stub.Renew(pb.RenewRequest(), timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise RenewalFailed(explain(error, identity, address=address), exit_code_of(error)) from error


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
        # Nobody told this task to stop: the channel was closed under the call.
        raise RenewalFailed("the connection broke while the certificate was renewed", ExitCode.UNREACHABLE) from error
    finally:
        if own is not None:
            await own.close(None)


def _judged(
    identity: MemberIdentity, response: pb.RenewResponse, key: rsa.RSAPrivateKey, now: datetime
) -> MemberIdentity:
    """What the response makes of an identity, once it says exactly what was asked for."""
    blame = "the coordinator answered with something else than this member's next certificate"
    if not response.certificate_chain:
        raise RenewalFailed(f"{blame}: there is none; tell the operator", ExitCode.FAILED)
    der = response.certificate_chain[0]
    try:
        known = followed(identity, response.authorities)
        verified = known.trust.verify(der, role=Role.MEMBER, now=now)
    except (AuthoritiesInvalid, CertificateInvalid) as error:
        raise RenewalFailed(f"{blame}: {error}", ExitCode.FAILED) from error
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
    """An identity that believes what it was told of the authorities, if that is newer than what it knows.

    Raises:
        AuthoritiesInvalid: it proves nothing, or contradicts what is known.
    """
    if not document:
        return identity
    found = Authorities.read(document, federation=identity.federation)
    return replace(identity, known_authorities=found) if found.follows(identity.authorities) else identity


async def follow(identity: MemberIdentity, address: str | None = None) -> MemberIdentity:
    """Asks a server that this member does not know for the list of authorities; stores and returns what it proves.

    Raises:
        RenewalFailed: nobody answers, or what answers proves nothing: it is not this federation's coordinator.
    """
    where = address or identity.address
    client = ClientKey(identity.key, x509.load_der_x509_certificate(identity.certificate))
    try:
        document = await asked_authorities(where, client=client)
        known = followed(identity, document)
    except HandshakeFailed as error:
        raise RenewalFailed(error.sentence, ExitCode.UNREACHABLE) from error
    except grpc.aio.AioRpcError as error:
        raise RenewalFailed(explain(error, identity, address=where), exit_code_of(error)) from error
    except AuthoritiesInvalid as error:
        raise RenewalFailed(f"the server at {where} is not to be trusted: {error}", ExitCode.UNREACHABLE) from error
    if known is identity or known.known_authorities is None:
        raise RenewalFailed(
            f"the server at {where} was not certified by this member's federation, and knows of no newer authority: "
            "another coordinator answers there, or something in between opens the connection; check the address with "
            "the operator",
            ExitCode.UNREACHABLE,
        )
    await asyncio.to_thread(Home(identity.home).keep_authorities, known.known_authorities)
    log.info("authorities_followed", number=known.known_authorities.number)
    return known


async def asked_authorities(address: str, *, client: ClientKey | None, limit: float = 20.0) -> bytes:
    """The list of authorities of whoever answers at an address; nothing secret is sent, nothing is believed.

    client: what to show at the federation port; None asks at an enrolment port. limit: of each step, in seconds.

    Raises:
        HandshakeFailed: nobody answers in TLS. grpc.aio.AioRpcError.
    """
    shown = await asyncio.to_thread(shake_hands, address, client=client, timeout=limit)
    # Whoever this is: the channel below reaches the very same.
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
    """Keeps one member's identity. Used from one event loop; `identity` is what to dial and to sign with next."""

    def __init__(
        self,
        identity: MemberIdentity,
        *,
        trusted: Callable[[Trust], None] = lambda trust: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """trusted: told whose certificates count, when that changes."""
        self.identity = identity
        self._trusted = trusted
        # Told the identity whenever its certificate is another.
        self.listeners: list[Callable[[MemberIdentity], None]] = []
        self._now = now
        # Set when the wait for the next renewal has to be thought over.
        self._woken = asyncio.Event()
        self._moves_at: datetime | None = None

    def take(self, identity: MemberIdentity) -> None:
        """This is the identity from now on."""
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
        """The coordinator says that the authorities have changed. What proves nothing is not believed, and told."""
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
            # Believed while this process lives; the next one asks again.
            log.warning("authorities_not_kept", error=str(error))
        log.info("authorities_followed", number=known.known_authorities.number)
        self.take(known)

    async def before_dialling(self) -> None:
        """What another process of this home has put in place counts; and whom nobody would take renews first."""
        await self.reload()
        if not self.identity.issued_by_trusted():
            try:
                await self.renew()
            except RenewalFailed as failure:
                log.warning("certificate_not_renewed", error=failure.sentence)

    async def reload(self) -> bool:
        """Whether another process of this home has put something newer in place; it counts from now on."""
        newer = await asyncio.to_thread(self._reload)
        if newer is not None:
            self.take(newer)
        return newer is not None

    async def catch_up(self) -> bool:
        """After a server that this member does not know: whether there is more to trust now."""
        try:
            self.take(await follow(self.identity))
        except (RenewalFailed, OSError) as error:
            log.warning("authorities_not_followed", error=str(error))
            return False
        return True

    async def renew(self, channel: grpc.aio.Channel | None = None) -> None:
        """Once. Raises: RenewalFailed."""
        self.take(await renew(self.identity, channel=channel, now=self._now))

    async def run(
        self, channel: Callable[[], Awaitable[grpc.aio.Channel]], moved: Callable[[], Awaitable[None]]
    ) -> None:
        """Until cancelled. channel: waits for a session and gives its channel. moved: called after each renewal."""
        pause = _FIRST_PAUSE
        while True:
            await self._until_due()
            open_one = await channel()
            if self._wait() > timedelta(0):
                continue
            before, problem = self.identity.certificate, "the coordinator gave the same certificate once more"
            try:
                await self.renew(open_one)
            except RenewalFailed as failure:
                problem = failure.sentence
            except Exception as error:
                # An error of our own must not end a member that has a good certificate.
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
        """How long until the certificate is to be renewed; nothing or less: now."""
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
            return None  # What is in memory may still be good, and says best what is wrong with it.
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
