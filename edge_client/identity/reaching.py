"""One call to whichever of the coordinators serves: the member's addresses in order, until one answers for good.

For commands, which make a call and end. A running member's session goes through `edge_client.session.addresses`.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from edge_client.identity.connection import exit_code_of, explain, open_channel
from edge_client.identity.home import MemberIdentity
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1.federation_pb2_grpc import FederationServiceStub
from toolkit.console import ExitCode

__all__ = ["CallFailed", "call_any", "elsewhere"]

T = TypeVar("T")


class CallFailed(Exception):
    """No coordinator did what was asked. The sentence says why and what to do, for each address."""

    def __init__(self, sentence: str, code: ExitCode) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code


def elsewhere(reason: Reason | None) -> bool:
    """Whether another coordinator may still serve: this one did not answer (None), stands by, or is about to stop."""
    return reason in (None, Reason.REASON_COORDINATOR_STANDS_BY, Reason.REASON_COORDINATOR_STOPPING)


async def call_any(identity: MemberIdentity, call: Callable[[FederationServiceStub], Awaitable[T]]) -> T:
    """Makes a call at the first address whose coordinator serves, and returns its result.

    Args:
        identity: Whose certificate and addresses to use.
        call: The call, which may be begun once for each address.

    Raises:
        CallFailed: A coordinator refused, or none served.
    """
    addresses = identity.addresses
    sentences, code = [], ExitCode.UNREACHABLE
    for where in addresses:
        async with open_channel(identity, where, several=len(addresses) > 1) as channel:
            try:
                return await call(FederationServiceStub(channel))
            except grpc.aio.AioRpcError as error:
                sentences.append(explain(error, identity, address=where))
                reason, _ = reason_of(error)
                code = exit_code_of(error)
                if not elsewhere(reason):
                    raise CallFailed(sentences[-1], code) from error
    if len(addresses) == 1:
        raise CallFailed(sentences[0], code)
    raise CallFailed(f"none of the coordinator's {len(addresses)} addresses serves: {'; '.join(sentences)}", code)
