"""Finds what is wrong between this machine and the coordinator, and says what to do about it.

`examine` checks in this order. A check that an earlier failure makes impossible is `skip`:

    identity     the folder, its modes, the certificate and its key, how long it is still valid
    withdrawals  those of this member, if there are any, and what the coordinator signed about each
    name         the coordinator's name resolves
    tcp          a server listens there
    tls          TLS 1.3, and a chain of this member's own federation that names the host
    clock        against the certificates' validity, and the coordinator's time if it tells one
    session      the coordinator accepts this member's certificate, and answers as one, or stands by for another
    renewal      how long the certificate is still valid; a certificate that is due is renewed
    python, grpcio, protobuf, torch, onnxruntime    versions

The checks from `name` to `renewal` are made at each of the member's addresses. If one coordinator serves, failures at
the others are warnings.

It opens no session, so it does not disturb a running agent. It changes nothing but a certificate that is due, which a
running agent would have renewed itself, and which the agent then picks up.
"""

import asyncio
import importlib.metadata
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path

import grpc
import grpc.aio

from edge_client.identity.connection import exit_code_of, explain, open_channel
from edge_client.identity.enrolment import MAX_CLOCK_SKEW
from edge_client.identity.handshake import (
    ClientKey,
    Handshake,
    HandshakeFailed,
    connect,
    resolve,
    shake_hands,
    verify_server,
)
from edge_client.identity.home import HomeUnusable, MemberIdentity, NotEnrolled
from edge_client.identity.proxy import proxy_for
from edge_client.identity.renewal import RenewalFailed, due, follow, renew_now
from edge_client.runtime import RuntimeUnavailable, pick_runtime
from edge_client.withdrawal.folder import KeptWithdrawal, WithdrawalFolder, WithdrawalsUnreadable
from edge_client.withdrawal.sending import advice
from tacit.certificates import certificate_from_der
from tacit.identity import CertificateInvalid
from tacit.reason import Reason
from tacit.status import reason_of, time_of
from tacit.token import split_address
from tacit.v1 import federation_pb2, federation_pb2_grpc
from toolkit.console import ExitCode
from toolkit.install import install_with

__all__ = ["Finding", "Status", "examine", "exit_code"]


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's output. A failure's `what` says what happened and what to do."""

    check: str
    status: Status
    what: str
    code: ExitCode = ExitCode.OK
    # host:port of the coordinator that was checked.
    address: str | None = None
    # Whether that coordinator said that it stands by for another one.
    stands_by: bool = False


def exit_code(findings: list[Finding]) -> ExitCode:
    """Returns the exit code of the first failure, or OK."""
    return next((finding.code for finding in findings if finding.status is Status.FAIL), ExitCode.OK)


async def examine(
    home: Path,
    *,
    address: str | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    timeout: float = 10.0,  # noqa: ASYNC109  it bounds the steps that block, too
) -> list[Finding]:
    """Runs all checks. It reports what is wrong and never raises for it.

    Args:
        home: The member's folder.
        address: host:port of the federation port, in place of the enrolled ones.
        now: Tells the time by this machine's clock.
        timeout: Bounds each step, in seconds.
    """
    findings: list[Finding] = []
    identity = _identity(home, now(), findings)
    if identity is not None:
        findings += _withdrawals(WithdrawalFolder(identity.home, identity.federation, identity.member))
    addresses = (address,) if address is not None else (identity.addresses if identity is not None else ())
    if not addresses:
        findings += [
            Finding(check, Status.SKIP, "the coordinator is unknown; give its address with --address host:port")
            for check in ("name", "tcp", "tls", "clock", "session", "renewal")
        ]
    else:
        of_each = []
        for where in addresses:
            found: list[Finding] = []
            await _network(where, identity, now, timeout, found)
            of_each.append([replace(finding, address=where) for finding in found])
            if identity is not None:
                # A renewal at this address has replaced the certificate.
                identity = _identity(home, now(), []) or identity
        findings += _of_several(of_each)
    findings += _versions()
    return findings


def _of_several(of_each: list[list[Finding]]) -> list[Finding]:
    """Joins the findings of several addresses: if one of them serves, the others' failures are warnings.

    A coordinator that stands by is as it should be while another one serves, and a failure otherwise.
    """
    serves = any(all(finding.status is not Status.FAIL for finding in findings) for findings in of_each)
    joined = list(itertools.chain(*of_each))
    if not serves:
        return joined
    return [
        finding
        if finding.status is not Status.FAIL
        else replace(finding, status=Status.OK if finding.stands_by else Status.WARN, code=ExitCode.OK)
        for finding in joined
    ]


def _identity(home: Path, now: datetime, findings: list[Finding]) -> MemberIdentity | None:
    try:
        identity = MemberIdentity.load(home, now=now)
    except NotEnrolled as error:
        findings.append(Finding("identity", Status.FAIL, str(error), ExitCode.NOT_FOUND))
        return None
    except HomeUnusable as error:
        findings.append(Finding("identity", Status.FAIL, str(error), ExitCode.USAGE))
        return None
    what = (
        f"{identity.member} of {identity.federation.hex()[:16]}..., valid until {identity.expires:%Y-%m-%d %H:%M} UTC "
        f"({_left(identity, now)})"
    )
    findings.append(Finding("identity", Status.OK, what))
    return identity


def _withdrawals(folder: WithdrawalFolder) -> list[Finding]:
    try:
        return [_withdrawal(folder, kept) for kept in folder.all()]
    except WithdrawalsUnreadable as error:
        return [Finding("withdrawals", Status.FAIL, f"this member takes part in nothing: {error}", ExitCode.USAGE)]


def _withdrawal(folder: WithdrawalFolder, kept: KeptWithdrawal) -> Finding:
    scope, heads = kept.request.job or "all jobs", ", ".join(kept.heads)
    if len(kept.heads) > 1:
        what = f"from {scope}: the coordinator signed different heads, {heads}; {advice(folder)}"
    elif kept.refused:
        what = f"from {scope}: the coordinator does not take it: {kept.refused}"
    elif not kept.heads:
        what = f"from {scope}: the coordinator has not answered; `edge_client withdraw` sends it again"
    else:
        return Finding("withdrawals", Status.OK, f"from {scope}: taken, the journal's head is {heads}")
    return Finding("withdrawals", Status.WARN, what)


def _left(identity: MemberIdentity, now: datetime) -> str:
    hours = (identity.expires - now) / timedelta(hours=1)
    return f"{hours / 24:.0f} days left" if hours >= 48 else f"{hours:.0f} hours left"


async def _network(
    where: str,
    identity: MemberIdentity | None,
    now: Callable[[], datetime],
    limit: float,
    findings: list[Finding],
) -> None:
    """Checks from the name to the renewal, and stops where nothing further can be learnt."""
    steps = ["name", "tcp", "tls", "clock", "session", "renewal"]

    def give_up(check: str, sentence: str) -> None:
        findings.append(Finding(check, Status.FAIL, sentence, ExitCode.UNREACHABLE))
        for later in steps[steps.index(check) + 1 :]:
            findings.append(Finding(later, Status.SKIP, f"not checked, because {check} failed"))

    try:
        addresses = await asyncio.to_thread(resolve, where)
    except ValueError as error:
        return give_up("name", str(error))
    except HandshakeFailed as error:
        return give_up("name", error.sentence)
    proxy = proxy_for(split_address(where)[0])
    found = ", ".join(addresses)
    what = f"{where} is {found}" if proxy is None else f"{where} is reached through the proxy {proxy} ({found})"
    findings.append(Finding("name", Status.OK, what))

    try:
        (await asyncio.to_thread(connect, where, timeout=limit)).close()
    except HandshakeFailed as error:
        return give_up("tcp", error.sentence)
    findings.append(Finding("tcp", Status.OK, f"{where} accepts connections"))

    client = None
    if identity is not None:
        client = ClientKey(identity.key, certificate_from_der(identity.certificate))
    try:
        shown = await asyncio.to_thread(shake_hands, where, client=client, timeout=limit)
        if identity is not None:
            identity = await _known_to(identity, shown, where, now())
            roots = identity.trust.roots
            verify_server(shown.chain, roots, address=where, federation=identity.federation, now=now())
    except HandshakeFailed as error:
        return give_up("tls", error.sentence)
    except CertificateInvalid as error:
        return give_up("tls", f"the server at {where} is not this federation's coordinator: {error}")
    if identity is None:
        findings.append(Finding("tls", Status.WARN, f"{shown.version}; not enrolled, so the chain is not checked"))
        findings.append(Finding("clock", Status.SKIP, "not enrolled"))
        findings.append(Finding("session", Status.SKIP, "not enrolled"))
        findings.append(Finding("renewal", Status.SKIP, "not enrolled"))
        return None
    findings.append(Finding("tls", Status.OK, f"{shown.version}, a chain of this federation that names the host"))
    renewal: Finding | None = None
    if not identity.issued_by_trusted():
        # Nobody accepts the certificate as it is, so it is renewed before the session is checked.
        renewal, identity = await _renewal(identity, where, now())
    session, server_time = await _session(identity, where, shown, limit, now)
    findings.append(_clock(server_time, now()))
    findings.append(session)
    if renewal is None and session.status is Status.OK:
        renewal, _ = await _renewal(identity, where, now())
    why = "the coordinator stands by" if session.stands_by else "session failed"
    findings.append(renewal or Finding("renewal", Status.SKIP, f"not checked, because {why}"))
    return None


async def _known_to(identity: MemberIdentity, shown: Handshake, where: str, now: datetime) -> MemberIdentity:
    """Returns the identity, after following to the authority of the server if it does not know that one."""
    try:
        verify_server(shown.chain, identity.trust.roots, address=where, federation=identity.federation, now=now)
    except CertificateInvalid:
        last = shown.chain[-1] if shown.chain else None
        if last is None or last in identity.authorities.certificates:
            return identity  # The authority is known, so something else is wrong.
        try:
            return await follow(identity, where)
        except RenewalFailed:
            return identity
    return identity


async def _renewal(identity: MemberIdentity, where: str, now: datetime) -> tuple[Finding, MemberIdentity]:
    at = due(identity)
    if now < at and identity.issued_by_newest():
        what = f"due on {at:%Y-%m-%d %H:%M} UTC; `edge_client run` does it by itself"
        return Finding("renewal", Status.OK, what), identity
    try:
        renewed = await renew_now(identity, address=where)
    except RenewalFailed as failure:
        what = f"the certificate expires on {identity.expires:%Y-%m-%d %H:%M} UTC and could not be renewed: "
        return Finding("renewal", Status.FAIL, what + failure.sentence, failure.code), identity
    if renewed.certificate == identity.certificate:
        what = "due by this machine's clock, but not yet by the coordinator's"
        return Finding("renewal", Status.OK, what), identity
    what = f"was due: renewed, valid until {renewed.expires:%Y-%m-%d %H:%M} UTC"
    return Finding("renewal", Status.OK, what), renewed


def _clock(server_time: datetime | None, now: datetime) -> Finding:
    if server_time is None:
        return Finding("clock", Status.OK, "within the validity of both certificates; the coordinator told no time")
    skew = now - server_time
    if abs(skew) > MAX_CLOCK_SKEW:
        minutes = abs(skew) / timedelta(minutes=1)
        direction = "ahead of" if skew > timedelta(0) else "behind"
        return Finding(
            "clock",
            Status.FAIL,
            f"this machine's clock is {minutes:.0f} minutes {direction} the coordinator's; set it (NTP)",
            ExitCode.FAILED,
        )
    return Finding("clock", Status.OK, f"{abs(skew).total_seconds():.1f} s from the coordinator's")


async def _session(
    identity: MemberIdentity, where: str, shown: Handshake, limit: float, now: Callable[[], datetime]
) -> tuple[Finding, datetime | None]:
    """Makes a call that changes nothing and that only members may make."""
    if shown.alert is not None:
        return Finding("session", Status.FAIL, _of_alert(shown.alert), ExitCode.REFUSED), None
    channel = open_channel(identity, where)
    try:
        stub = federation_pb2_grpc.FederationServiceStub(channel)
        call = stub.MaskedUploadStatus(federation_pb2.AttemptRef(), timeout=limit)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            server_time = time_of(error.trailing_metadata())
            reason, _ = reason_of(error)
            if reason is not None and error.code() in _TAKEN:
                return Finding("session", Status.OK, "the coordinator accepts this member's certificate"), server_time
            sentence = explain(error, identity, address=where, now=now())
            stands_by = reason == Reason.REASON_COORDINATOR_STANDS_BY
            found = Finding("session", Status.FAIL, sentence, exit_code_of(error), stands_by=stands_by)
            return found, server_time
        server_time = time_of(await call.trailing_metadata())
        return Finding("session", Status.OK, "the coordinator accepts this member's certificate"), server_time
    finally:
        await channel.close(None)


# A refusal with one of these codes is about the (empty) question, not about the caller.
_TAKEN = frozenset({grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND})


def _of_alert(alert: str) -> str:
    # As far as this machine knows, the certificate is good: `identity` and `tls` have passed. gRPC servers close
    # without an alert; other TLS servers (a proxy in between) name the cause.
    if "expired" in alert:
        return "to the coordinator this member's certificate is expired, so its clock is ahead; tell the operator"
    return (
        f"the coordinator refused this member's certificate ({alert}): it trusts another authority, its clock is off, "
        "or something in between intercepts the connection; tell the operator"
    )


def _versions() -> list[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    findings = [
        Finding("python", Status.OK, python)
        if sys.version_info >= (3, 11)
        else Finding("python", Status.FAIL, f"{python}; Tacit needs 3.11 or newer", ExitCode.FAILED)
    ]
    for package, needed, missing in (
        ("grpcio", "1.81.1", f"reinstall with {install_with()}"),
        ("protobuf", "6.33.5", f"reinstall with {install_with()}"),
        ("torch", "", _without_torch()),
        ("onnxruntime", "", f"this machine cannot run exported models; {install_with('edge')}"),
    ):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            status, code = (Status.FAIL, ExitCode.FAILED) if needed else (Status.WARN, ExitCode.OK)
            findings.append(Finding(package, status, f"not installed: {missing}", code))
            continue
        if needed and _numbers(version) < _numbers(needed):
            what = f"{version}; {needed} or newer is needed: {missing}"
            findings.append(Finding(package, Status.FAIL, what, ExitCode.FAILED))
        else:
            findings.append(Finding(package, Status.OK, version))
    return findings


def _without_torch() -> str:
    """What a machine without torch can do."""
    try:
        pick_runtime("device")
    except RuntimeUnavailable:
        return f"this machine cannot train; {install_with('edge')}"
    return f"this machine trains only heads (--runtime device); for other jobs, {install_with('edge')}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".") if part.isdigit())
