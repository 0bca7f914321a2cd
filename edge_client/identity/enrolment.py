"""Makes this machine a member. The key is made here and never leaves.

The steps run in this order, each only after the one before it succeeded:

1. The token is complete, and not expired by this machine's clock.
2. The server's chain holds the certificate that the token names by its fingerprint, or the server proves that a later
   authority follows from that one (`tacit.authorities`). A token that also names a later authority always requires that
   proof. Then an authority that is still trusted must have signed the server's own certificate, and that certificate
   must name the host that was dialled. Only now is the coordinator known.
3. The key is on the disk. Whatever breaks from here on, the same command repeats with the same key.
4. The token's secret and the certificate request go out, over TLS that trusts only that federation.
5. The answer certifies this key, for this member, in this federation, and the two clocks agree.
6. The whole identity moves into place in one step. An existing identity is only replaced on demand (`force`).
"""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from edge_client.identity.connection import channel_options, exit_code_of, explain
from edge_client.identity.handshake import HandshakeFailed, find_root, shake_hands, verify_server
from edge_client.identity.home import Home, HomeUnusable, IdentityDocument, IdentityFolder, MemberIdentity
from edge_client.identity.reaching import elsewhere, unproven, warn_of
from edge_client.identity.renewal import asked_authorities
from tacit import __version__
from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.certificates import certificate_from_der
from tacit.guard import guarded
from tacit.identity import CertificateInvalid, Role, Trust, federation_of, key_pem, new_key, own_key
from tacit.reason import Reason
from tacit.status import reason_of, time_of
from tacit.token import JoinToken, TokenInvalid, split_address
from tacit.v1 import enrolment_pb2, enrolment_pb2_grpc
from toolkit.console import ExitCode
from toolkit.durable import durable_file

__all__ = ["MAX_CLOCK_SKEW", "EnrolmentFailed", "enrol"]

# Certificates are backdated by the same amount.
MAX_CLOCK_SKEW = timedelta(minutes=5)


class EnrolmentFailed(Exception):
    """This machine did not become a member. The sentence says why and what to do; `reason` is the coordinator's."""

    def __init__(self, sentence: str, code: ExitCode, reason: Reason | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code
        self.reason = reason


async def enrol(
    home: Path,
    token_text: str,
    *,
    force: bool = False,
    now: datetime | None = None,
    timeout: float = 20.0,  # noqa: ASYNC109  it bounds the steps that block, too
) -> MemberIdentity:
    """Redeems a join token and stores the identity under `home`.

    Args:
        home: The member's folder.
        token_text: The join token.
        force: Replaces an existing identity.
        now: The time by this machine's clock, for tests.
        timeout: Bounds each of the two connections, in seconds.

    Raises:
        EnrolmentFailed: In every foreseen case, with the command's exit code.
    """
    now = now if now is not None else datetime.now(UTC)
    token = _read(token_text)
    folder = Home(home)
    # The coordinator decides about a token that an earlier try has redeemed for a key that is stored here.
    if now > token.expires and not folder.pending(token.id).key.exists():
        raise EnrolmentFailed(
            f"the join token expired at {token.expires:%Y-%m-%d %H:%M} UTC (this machine's clock says "
            f"{now.astimezone(UTC):%Y-%m-%d %H:%M}); if the clock is right, ask the operator for a new one "
            "with `coordinator member invite`",
            ExitCode.REFUSED,
        )
    try:
        folder.prepare()
        folder.settle()
    except HomeUnusable as error:
        raise EnrolmentFailed(str(error), ExitCode.USAGE) from error
    if folder.identity.path.exists() and not force:
        raise EnrolmentFailed(
            f"{home} already holds an identity{_whose(folder.identity)}; use another folder with --home, or replace "
            "that identity with --force",
            ExitCode.USAGE,
        )
    pending = folder.pending(token.id)
    authorities, key, response, server_time = await _redeemed(token, pending, now, timeout)
    _check_clock(server_time, now)
    authorities = _told(response, token, authorities)
    certificate = _judge(response, token, key, authorities.trust, now)
    try:
        _store(pending, token, authorities, certificate, response)
        folder.adopt(pending)
    except OSError as error:
        raise EnrolmentFailed(
            f"the identity cannot be stored in {home} ({error.strerror}); make room or repair the disk, and repeat the "
            "same command: the token still works for this machine's key",
            ExitCode.FAILED,
        ) from error
    return MemberIdentity.load(home, now=now)


async def _redeemed(
    token: JoinToken, pending: IdentityFolder, now: datetime, limit: float
) -> tuple[Authorities, rsa.RSAPrivateKey, enrolment_pb2.EnrolResponse, datetime | None]:
    """Takes the steps 2 to 4 at one of the token's addresses after the other, until a coordinator serves there.

    Each address must prove itself like the first one. Repeating the request elsewhere changes nothing: the token is
    bound to the first key that redeems it, and that is the same key.
    """
    sentences, strangers = [], []
    for where in token.addresses:
        try:
            authorities = await _recognise(token, where, now, limit)
            key = await asyncio.to_thread(_key, pending)
            answer = await _ask(token, where, key, authorities.trust, now, limit)
        except EnrolmentFailed as failure:
            cause = failure.__cause__
            answered = failure.reason is None and failure.code is not ExitCode.UNREACHABLE
            if answered or not elsewhere(failure.reason, cause):
                raise
            sentences.append(failure.sentence)
            last = failure
            if failure.reason is None and unproven(cause):
                strangers.append((where, failure.sentence))
        else:
            warn_of(strangers)
            return authorities, key, *answer
    if len(sentences) == 1:
        raise last
    said = f"none of the token's {len(sentences)} addresses enrols this machine now: {'; '.join(sentences)}"
    raise EnrolmentFailed(said, last.code, last.reason) from last


def _read(text: str) -> JoinToken:
    try:
        return JoinToken.parse(text)
    except TokenInvalid as error:
        raise EnrolmentFailed(str(error), ExitCode.USAGE) from error


def _whose(identity: IdentityFolder) -> str:
    try:
        return f" ({IdentityDocument.from_file(identity.document).member})"
    except (OSError, ValueError):
        return ""


async def _recognise(token: JoinToken, where: str, now: datetime, limit: float) -> Authorities:
    """Returns the federation's authorities, from the server at this address of the token.

    They are either the first root in the chain that the server shows, or the whole list, which proves itself no matter
    who sends it. If the token names a later authority, the first root in a chain proves nothing, because it may have
    been retired.
    """
    try:
        shown = await asyncio.to_thread(shake_hands, where, timeout=limit)
    except HandshakeFailed as error:
        raise EnrolmentFailed(error.sentence, ExitCode.UNREACHABLE) from error
    root = find_root(shown.chain, token.federation)
    if token.newest is not None:
        known = await _listed(token, where, token.newest, now, limit)
    elif root is not None:
        known = Authorities.first(root)
    elif (followed := await _followed(token, where, limit)) is not None:
        known = followed
    else:
        raise EnrolmentFailed(
            f"the server at {where} does not belong to the federation of the join token: its chain lacks the "
            f"authority {token.federation.hex()[:16]}... that the token names. Nothing secret was sent. Another server "
            "answers there, or something in between intercepts the connection; ask the operator",
            ExitCode.UNREACHABLE,
        )
    try:
        verify_server(shown.chain, known.trust.roots, address=where, federation=token.federation, now=now)
    except CertificateInvalid as error:
        raise EnrolmentFailed(
            f"the coordinator at {where} cannot be trusted: {error}. Nothing secret was sent; ask the operator",
            ExitCode.UNREACHABLE,
        ) from error
    return known


async def _listed(token: JoinToken, where: str, newest: bytes, now: datetime, limit: float) -> Authorities:
    """Returns the server's list of authorities, if it is no older than the one that the token was made with.

    Raises:
        EnrolmentFailed: The list proves nothing, lacks the authority that the token names, or predates a retirement.
    """
    try:
        document = await asked_authorities(where, client=None, limit=limit)
        found = Authorities.read(document, federation=token.federation)
    except HandshakeFailed as error:
        raise EnrolmentFailed(error.sentence, ExitCode.UNREACHABLE) from error
    except grpc.aio.AioRpcError as error:
        raise EnrolmentFailed(
            f"the server at {where} did not send the federation's authorities, and nothing secret was sent to "
            f"it: {explain(error, address=where, now=now)}",
            ExitCode.UNREACHABLE,
        ) from error
    except AuthoritiesInvalid as error:
        raise EnrolmentFailed(
            f"the server at {where} cannot be trusted: {error}. Nothing secret was sent; ask the operator",
            ExitCode.UNREACHABLE,
        ) from error
    if newest not in {federation_of(root) for root in found.certificates}:
        raise EnrolmentFailed(
            f"the server at {where} does not belong to the federation of the join token: it does not know the "
            f"authority {newest.hex()[:16]}... that the token names. Nothing secret was sent. Another server answers "
            "there, or somebody has the key of an earlier authority; ask the operator",
            ExitCode.UNREACHABLE,
        )
    if found.number < token.number:
        raise EnrolmentFailed(
            f"the server at {where} sent an older list of authorities ({found.number}) than the join token was "
            f"made with ({token.number}). Nothing secret was sent. Somebody may have a retired authority's key, or the "
            "coordinator was restored to an earlier state; ask the operator",
            ExitCode.UNREACHABLE,
        )
    return found


async def _followed(token: JoinToken, where: str, limit: float) -> Authorities | None:
    """Returns the server's list of authorities, if it proves itself to the token."""
    try:
        document = await asked_authorities(where, client=None, limit=limit)
        return Authorities.read(document, federation=token.federation)
    except (HandshakeFailed, grpc.aio.AioRpcError, AuthoritiesInvalid):
        return None


def _told(response: enrolment_pb2.EnrolResponse, token: JoinToken, known: Authorities) -> Authorities:
    """Returns the authorities that the answer names if they are newer, else the known ones."""
    if not response.authorities:
        return known
    try:
        found = Authorities.read(response.authorities, federation=token.federation)
        return found if found.follows(known) else known
    except AuthoritiesInvalid as error:
        raise EnrolmentFailed(
            f"the coordinator cannot be trusted: {error}; ask the operator", ExitCode.FAILED
        ) from error


def _key(pending: IdentityFolder) -> rsa.RSAPrivateKey:
    """Returns the key that an earlier try with the same token stored, or stores a new one."""
    try:
        pending.path.mkdir(mode=0o700, exist_ok=True)
        if pending.key.exists():
            stored = own_key(pending.key.read_bytes())
            if isinstance(stored, rsa.RSAPrivateKey):
                return stored
        key = new_key()
        durable_file(pending.key, key_pem(key))
    except (OSError, ValueError, TypeError) as error:
        raise EnrolmentFailed(
            f"the key in {pending.path} cannot be written or read ({error}); check the disk, or use another --home",
            ExitCode.FAILED,
        ) from error
    return key


async def _ask(
    token: JoinToken, where: str, key: rsa.RSAPrivateKey, trust: Trust, now: datetime, limit: float
) -> tuple[enrolment_pb2.EnrolResponse, datetime | None]:
    # The name helps a person who reads a capture. The authority uses only the key of the request.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, token.member)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    request = enrolment_pb2.EnrolRequest(
        token_id=token.id,
        secret=token.secret,
        certificate_request=csr.public_bytes(serialization.Encoding.DER),
        software_version=__version__,
    )
    credentials = grpc.ssl_channel_credentials(root_certificates=trust.pem)
    async with guarded(grpc.aio.secure_channel(where, credentials, options=channel_options())) as channel:
        stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
        call = stub.Enrol(request, timeout=limit)
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            reason, _ = reason_of(error)
            _check_clock(time_of(error.trailing_metadata()), now)
            raise EnrolmentFailed(explain(error, address=where, now=now), exit_code_of(error), reason) from error
        return response, time_of(await call.trailing_metadata())


def _check_clock(server_time: datetime | None, now: datetime) -> None:
    if server_time is None or abs(server_time - now) <= MAX_CLOCK_SKEW:
        return
    minutes = abs(server_time - now) / timedelta(minutes=1)
    direction = "ahead of" if now > server_time else "behind"
    raise EnrolmentFailed(
        f"this machine's clock is {minutes:.0f} minutes {direction} the coordinator's "
        f"({server_time:%Y-%m-%d %H:%M} UTC); set it (NTP) and repeat the same command: the token still works for this "
        "machine's key",
        ExitCode.FAILED,
        Reason.REASON_CLOCK_SKEW,
    )


def _judge(
    response: enrolment_pb2.EnrolResponse,
    token: JoinToken,
    key: rsa.RSAPrivateKey,
    trust: Trust,
    now: datetime,
) -> bytes:
    """Returns the member's certificate, DER, if it certifies exactly what was asked for."""
    blame = "the coordinator did not answer with a certificate for this machine"
    if not response.certificate_chain:
        raise EnrolmentFailed(f"{blame}: there is none; tell the operator", ExitCode.FAILED)
    der = response.certificate_chain[0]
    try:
        certificate = trust.verify(der, role=Role.MEMBER, now=now)
        for address in (response.federation_address, *response.other_addresses):
            split_address(address)
    except ValueError as error:
        raise EnrolmentFailed(f"{blame}: {error}; tell the operator", ExitCode.FAILED) from error
    if certificate.key != key.public_key():
        raise EnrolmentFailed(f"{blame}: it certifies another key; tell the operator", ExitCode.FAILED)
    if certificate.identity.name != token.member or response.member != token.member:
        raise EnrolmentFailed(
            f"{blame}: it names {certificate.identity.name}, and the token {token.member}; tell the operator",
            ExitCode.FAILED,
        )
    return der


# How many addresses beside the first one a member keeps.
_MAX_OTHERS = 16


def _store(
    pending: IdentityFolder,
    token: JoinToken,
    authorities: Authorities,
    der: bytes,
    response: enrolment_pb2.EnrolResponse,
) -> None:
    certificate = certificate_from_der(der)
    document = IdentityDocument(
        federation=token.federation,
        member=token.member,
        address=response.federation_address,
        other_addresses=tuple(response.other_addresses[:_MAX_OTHERS]),
    )
    durable_file(pending.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    first = certificate_from_der(authorities.roots[0])
    durable_file(pending.root, first.public_bytes(serialization.Encoding.PEM))
    if authorities.number:
        durable_file(pending.authorities, authorities.canonical())
    # The document comes last, because a pending folder that holds it is complete.
    durable_file(pending.document, document.canonical() + b"\n")
