"""The member's connection to the coordinator: one mutual-TLS channel, and sentences for what can go wrong on it.

gRPC says "Socket closed" for a client certificate that is missing, unknown or expired, and UNAVAILABLE for nearly
everything else. `explain` combines what the transport knows with what the member knows (its certificate, its clock),
and names the likeliest cause and what to do. Its sentences are for people; they decide nothing.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import grpc
import grpc.aio

from edge_client.identity.home import MemberIdentity
from tacit.guard import guarded
from tacit.limits import MAX_FROM_COORDINATOR, MAX_FROM_MEMBER
from tacit.reason import Reason
from tacit.status import reason_of
from toolkit.console import ExitCode

__all__ = [
    "CALL_BROKEN",
    "NOT_SERVED",
    "channel_options",
    "exit_code_of",
    "explain",
    "open_channel",
    "raise_if_told_to_stop",
]

# Status codes of a call that the coordinator will always refuse.
NOT_SERVED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)

# The errors of a call whose connection broke. A closed channel cancels its calls, and the task that awaits one sees
# CancelledError, as if the task itself were to stop.
CALL_BROKEN = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError)


def raise_if_told_to_stop(error: BaseException) -> None:
    """Raises an error of `CALL_BROKEN` again if this task itself was cancelled, and not just its call."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def channel_options(*, several: bool = False) -> list[tuple[str, int]]:
    """Returns the options of every channel of a member.

    Args:
        several: Whether the coordinator has other addresses. The member then notices sooner that one hangs: a silent
            one within six seconds, one that completes no handshake within five.
    """
    seconds, answer_seconds = (2, 4) if several else (30, 10)
    return [
        # gRPC 1.85 ends a connection only after ping_timeout, a minute by default, whatever keepalive_timeout says.
        *((("grpc.min_reconnect_backoff_ms", 5000), ("grpc.http2.ping_timeout_ms", 4000)) if several else ()),
        # Several members in one process (simulations, test benches) must not share a connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_FROM_COORDINATOR),
        ("grpc.max_send_message_length", MAX_FROM_MEMBER),
        # A session is silent for minutes while others train. Middleboxes forget silent connections, and the member must
        # notice a coordinator that vanished. The coordinator's server options allow these pings.
        ("grpc.keepalive_time_ms", seconds * 1000),
        ("grpc.keepalive_timeout_ms", answer_seconds * 1000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 30_000),
        # The caller decides what to do about a refusal, so gRPC must not retry by itself.
        ("grpc.enable_retries", 0),
    ]


def open_channel(identity: MemberIdentity, address: str | None = None, *, several: bool = False) -> grpc.aio.Channel:
    """Returns a channel to the federation port, at `identity.address` unless given. The caller closes it.

    The channel connects on first use. It trusts only the federation's own authorities, not the machine's store of
    public ones. `several`: see `channel_options`.
    """
    credentials = grpc.ssl_channel_credentials(
        root_certificates=identity.root_pem,
        private_key=identity.key_pem,
        certificate_chain=identity.certificate_pem,
    )
    return guarded(
        grpc.aio.secure_channel(address or identity.address, credentials, options=channel_options(several=several))
    )


def explain(
    error: grpc.RpcError,
    identity: MemberIdentity | None = None,
    *,
    address: str | None = None,
    now: datetime | None = None,
) -> str:
    """Explains to a person why a call failed, and what to do.

    Args:
        error: What the call raised.
        identity: The member that called, if any.
        address: The address that was dialled; `identity.address` unless given.
        now: The time by this machine's clock.
    """
    reason, details = reason_of(error)
    if reason is not None:
        return details
    where = address or (identity.address if identity is not None else "the coordinator")
    return _of_certificate(identity, now or datetime.now(UTC), details, where) or _of_transport(error, details, where)


def _of_certificate(identity: MemberIdentity | None, now: datetime, details: str, where: str) -> str | None:
    """Explains a failed connection by the member's own certificate, if that can be the cause."""
    closed = "failed to connect" in details and "socket closed" in details.lower()
    if not closed or "handshake read failed" in details.lower():
        return None
    if identity is None:
        return (
            f"the coordinator closed the connection because it got no client certificate: {where} is the federation "
            "port, for members only; join with `edge_client enrol`"
        )
    if now > identity.expires:
        return (
            f"this member's certificate expired on {identity.expires:%Y-%m-%d %H:%M} UTC; ask the operator "
            "for a new join token and run `edge_client enrol --force`"
        )
    return (
        f"the coordinator refused this member's certificate ({identity.member}, valid until "
        f"{identity.expires:%Y-%m-%d %H:%M} UTC): it belongs to another federation, or the two clocks differ; "
        "`edge_client doctor` says which"
    )


_UNNAMED = (
    "the coordinator's certificate does not name {where}; ask the operator to add the name to `advertise` in "
    "coordinator.toml and to restart"
)
_UNRESOLVED = "the name in {where} cannot be resolved; check its spelling and this machine's DNS"
_SILENT = "{where} does not answer; check the network, and that a firewall lets the port through"
_NO_ROUTE = "there is no network route to {where}; check this machine's network"

# The first text that occurs in gRPC's details decides.
_TRANSPORT: tuple[tuple[str, str], ...] = (
    (
        "http proxy returned response code",
        "the HTTP proxy that this environment names did not open a tunnel to {where}; `edge_client doctor` says why",
    ),
    (
        "certificate has expired",
        "the certificate of the coordinator at {where} has expired by this machine's clock; check the clock, "
        "then tell the operator to restart the coordinator, which renews it",
    ),
    (
        "certificate is not yet valid",
        "the certificate of the coordinator at {where} is not valid yet by this machine's clock; set the clock",
    ),
    (
        "unsupported certificate purpose",
        "the server at {where} shows a certificate that is not a server's, so it is not the coordinator; check the "
        "address, and tell the operator",
    ),
    (
        "certificate_verify_failed",
        "the server at {where} was not certified by this member's federation: another coordinator answers there, or "
        "something in between intercepts the connection; check the address with the operator",
    ),
    ("hostname verification check failed", _UNNAMED),
    ("is not in peer certificate", _UNNAMED),
    (
        "wrong_version_number",
        "the server at {where} does not speak TLS; check the port, and that no proxy is in between",
    ),
    (
        "handshake read failed",
        "the server at {where} closed the connection before TLS; check the port, and that no firewall is in between",
    ),
    ("address lookup failed", _UNRESOLVED),
    ("errors resolving", _UNRESOLVED),
    ("dns resolution failed", _UNRESOLVED),
    (
        "connection refused",
        "nobody listens at {where}; check that the coordinator runs and that the port is right",
    ),
    ("network is unreachable", _NO_ROUTE),
    ("no route to host", _NO_ROUTE),
    (
        "kept the connection open and sent nothing",
        "the coordinator at {where} keeps the connection open, and sent nothing of a file for two minutes; what "
        "arrived is kept, so try again, and tell the operator if it goes on",
    ),
    ("timed out", _SILENT),
    ("timeout", _SILENT),
    ("failed to connect", "{where} cannot be reached; `edge_client doctor` says why"),
)


def _of_transport(error: grpc.RpcError, details: str, where: str) -> str:
    lowered = details.lower()
    for text, sentence in _TRANSPORT:
        if text in lowered:
            return sentence.format(where=where)
    code = error.code() if isinstance(error, grpc.aio.AioRpcError | grpc.Call) else None
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"{where} did not answer in time; check the network, and that a firewall lets the port through"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"the server at {where} does not offer this service; check the port, or upgrade the older side"
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"the connection to {where} broke: the coordinator stopped or the network failed; try again"
    name = code.name if code is not None else "an error without a status"
    return f"{where} answered {name}: {details}"


def exit_code_of(error: grpc.RpcError) -> ExitCode:
    """Returns REFUSED or FAILED if the coordinator gave a reason, and UNREACHABLE if the transport failed."""
    reason, _ = reason_of(error)
    if reason is None:
        return ExitCode.UNREACHABLE
    return ExitCode.FAILED if reason == Reason.REASON_INTERNAL else ExitCode.REFUSED
