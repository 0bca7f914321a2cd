"""One call to whichever of the coordinators serves: the member's addresses in order, until one answers for good.

For commands, which make a call and end. A running member's session goes through `edge_client.session.addresses`.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import grpc
import grpc.aio
import structlog

from edge_client.identity.connection import exit_code_of, explain, open_channel
from edge_client.identity.home import MemberIdentity
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1.federation_pb2_grpc import FederationServiceStub
from toolkit.console import ExitCode

__all__ = ["CallFailed", "call_any", "elsewhere", "unproven", "warn_of"]

log = structlog.get_logger("edge_client")

T = TypeVar("T")
# Codes of a call that no coordinator answered.
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# In gRPC's details, if a server did not prove itself.
_UNPROVEN = (
    "certificate_verify_failed",
    "hostname verification check failed",
    "is not in peer certificate",
    "unsupported certificate purpose",
)


class CallFailed(Exception):
    """No coordinator did what was asked. The sentence says why and what to do, for each address."""

    def __init__(self, sentence: str, code: ExitCode) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code


def elsewhere(reason: Reason | None, error: BaseException | None) -> bool:
    """Whether another coordinator may still serve: this one did not answer, stands by, or is about to stop.

    Args:
        reason: What the coordinator gave; None if it gave none.
        error: What the call raised. A server that answered without a reason refused, too.
    """
    if reason is None:
        return not isinstance(error, grpc.aio.AioRpcError) or error.code() in _UNANSWERED
    return reason in (Reason.REASON_COORDINATOR_STANDS_BY, Reason.REASON_COORDINATOR_STOPPING)


def unproven(error: BaseException | None) -> bool:
    """Whether a server answered that did not prove to be a coordinator of this federation.

    Args:
        error: What the call or the check of a document raised; None if the server's chain lacks the authority.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        details = reason_of(error)[1].lower()
        return error.code() in _UNANSWERED and any(text in details for text in _UNPROVEN)
    return error is None or isinstance(error, ValueError)


def warn_of(strangers: Iterable[tuple[str, str]]) -> None:
    """Warns of addresses where an unknown server answered, although another address served: (address, sentence)."""
    for address, sentence in strangers:
        log.warning("address_unproven", address=address, error=sentence)


async def call_any(identity: MemberIdentity, call: Callable[[FederationServiceStub], Awaitable[T]]) -> T:
    """Makes a call at the first address whose coordinator serves, and returns its result.

    Args:
        identity: Whose certificate and addresses to use.
        call: The call, which may be begun once for each address.

    Raises:
        CallFailed: A coordinator refused, or none served.
    """
    addresses = identity.addresses
    sentences, strangers, code = [], [], ExitCode.UNREACHABLE
    for where in addresses:
        async with open_channel(identity, where, several=len(addresses) > 1) as channel:
            try:
                result = await call(FederationServiceStub(channel))
            except grpc.aio.AioRpcError as error:
                sentences.append(explain(error, identity, address=where))
                reason, _ = reason_of(error)
                code = exit_code_of(error)
                if not elsewhere(reason, error):
                    raise CallFailed(sentences[-1], code) from error
                if unproven(error):
                    strangers.append((where, sentences[-1]))
            else:
                warn_of(strangers)
                return result
    if len(addresses) == 1:
        raise CallFailed(sentences[0], code)
    raise CallFailed(f"none of the coordinator's {len(addresses)} addresses serves: {'; '.join(sentences)}", code)
