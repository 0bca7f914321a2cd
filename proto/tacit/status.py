"""How a refusal travels: a gRPC status for intermediaries, a `Reason` for our software, a sentence for people.

The reason's name is in the trailing metadata `tacit-reason`, the sentence in the status's details. A server ends a call
with `abort_with`; a client reads both with `reason_of`. A status without a reason comes from gRPC itself, or from
something between the two sides, and says only what the transport knows.

`stamp` adds the server's time, so a member can check its own clock even when it is refused.
"""

from __future__ import annotations  # `Reason | None` is for the type checker: protobuf enums know no `|`

from datetime import UTC, datetime
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from tacit.reason import Reason, sentence
from toolkit.text import MAX_STATUS, clean

__all__ = ["METADATA_KEY", "TIME_KEY", "abort_with", "code_of", "details_of", "reason_of", "stamp", "time_of"]

METADATA_KEY = "tacit-reason"
# Milliseconds since 1970.
TIME_KEY = "tacit-time-ms"

_SINGLE: dict[Reason, grpc.StatusCode] = {
    Reason.REASON_UNSPECIFIED: grpc.StatusCode.UNKNOWN,
    Reason.REASON_CLIENT_CERTIFICATE_MISSING: grpc.StatusCode.UNAUTHENTICATED,
    Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN: grpc.StatusCode.UNAUTHENTICATED,
    Reason.REASON_CLIENT_CERTIFICATE_REVOKED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.REASON_CLIENT_ROLE_WRONG: grpc.StatusCode.PERMISSION_DENIED,
    Reason.REASON_PROTOCOL_VERSION_UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.REASON_COORDINATOR_STOPPING: grpc.StatusCode.UNAVAILABLE,
    Reason.REASON_COORDINATOR_RESTARTED: grpc.StatusCode.UNAVAILABLE,
    Reason.REASON_COORDINATOR_STANDS_BY: grpc.StatusCode.UNAVAILABLE,
    Reason.REASON_TOKEN_UNKNOWN: grpc.StatusCode.UNAUTHENTICATED,
    Reason.REASON_TOKEN_SECRET_WRONG: grpc.StatusCode.UNAUTHENTICATED,
    Reason.REASON_KEY_UNSUITABLE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.REASON_NAME_TAKEN: grpc.StatusCode.ALREADY_EXISTS,
    Reason.REASON_ENROLMENT_TOO_FREQUENT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.REASON_MEMBER_TOO_FREQUENT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.REASON_INTERNAL: grpc.StatusCode.INTERNAL,
    Reason.REASON_MESSAGE_MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.REASON_SENDER_NOT_EXPECTED: grpc.StatusCode.PERMISSION_DENIED,
}


def code_of(reason: Reason) -> grpc.StatusCode:
    """The gRPC status of a reason. Reasons without one of their own mean that the call came at the wrong time or in the
    wrong state.
    """
    return _SINGLE.get(reason, grpc.StatusCode.FAILED_PRECONDITION)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], reason: Reason, detail: str = "") -> NoReturn:
    """Ends a call on the server with a reason.

    Args:
        context: the call.
        reason: why.
        detail: a sentence for people; without one the reason's own sentence is sent.
    """
    await context.abort(
        code_of(reason),
        clean(detail or sentence(reason), MAX_STATUS),
        # `abort` replaces the metadata set before, and the time matters most in a refusal.
        (*(context.trailing_metadata() or ()), (METADATA_KEY, Reason.Name(reason))),
    )
    raise AssertionError("unreachable: abort raises")


def stamp(context: grpc.aio.ServicerContext[Any, Any], now: datetime) -> None:
    """Puts the server's time into the call's trailing metadata. `now` is timezone-aware."""
    context.set_trailing_metadata(((TIME_KEY, str(int(now.timestamp() * 1000))),))


def time_of(metadata: object) -> datetime | None:
    """Reads the server's time from a call's trailing metadata, if it is there."""
    value = _entry(metadata, TIME_KEY)
    try:
        return datetime.fromtimestamp(int(value) / 1000, UTC) if value else None
    except (ValueError, OverflowError, OSError):
        return None


def _entry(metadata: object, wanted: str) -> str | None:
    # grpc-stubs leave the metadata opaque; it consists of pairs of a key and text or bytes.
    for key, value in cast("tuple[tuple[str, str | bytes], ...]", metadata or ()):
        if key == wanted:
            return value.decode(errors="replace") if isinstance(value, bytes) else value
    return None


def details_of(error: grpc.RpcError) -> str:
    """The details of a failed call, from the other side or gRPC itself: cleaned, at most MAX_STATUS characters."""
    details = error.details() if isinstance(error, grpc.aio.AioRpcError | grpc.Call) else None
    return clean(details or "", MAX_STATUS)


def reason_of(error: grpc.RpcError) -> tuple[Reason | None, str]:
    """The reason and sentence of a failed call, read at the client.

    Without a reason, the transport failed, not Tacit. A reason that this software does not know, because the other side
    is newer, is `REASON_UNSPECIFIED`. The sentence is the other side's, cleaned.
    """
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return None, clean(str(error), MAX_STATUS)
    details = details_of(error)
    name = _entry(error.trailing_metadata(), METADATA_KEY)
    if name is None:
        return None, details
    # A protobuf enum has `keys` but does not support `in`.
    known_names = frozenset(Reason.keys())
    known = cast("Reason", Reason.Value(name)) if name in known_names else Reason.REASON_UNSPECIFIED
    return known, details or sentence(known)
