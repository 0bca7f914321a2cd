"""Tells the coordinator of a withdrawal, and keeps its signed answer."""

import asyncio

import grpc.aio

from edge_client.identity.connection import explain
from edge_client.identity.home import MemberIdentity
from edge_client.withdrawal.folder import KeptWithdrawal, TakenWithdrawal, WithdrawalFolder
from tacit.documents import DocumentInvalid
from tacit.identity import CertificateInvalid
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from tacit.withdrawal import WithdrawalRequest, WithdrawalTaken, check_request, check_taken
from toolkit.text import clean

__all__ = ["AnswerUnfit", "RequestRefused", "send"]

_SECONDS = 60.0
_LONGEST = 2000


class RequestRefused(Exception):
    """The coordinator does not take the request, and asking again does not change that. The text is its answer."""


class AnswerUnfit(Exception):
    """The answer does not prove that the coordinator took the request. The text says why."""


async def send(
    stub: federation_pb2_grpc.FederationServiceStub,
    identity: MemberIdentity,
    folder: WithdrawalFolder,
    kept: KeptWithdrawal,
) -> tuple[KeptWithdrawal, tuple[pb.HeldContributions, ...]]:
    """Sends a withdrawal, also one that the coordinator has taken before: its database may have been restored.

    Returns:
        The withdrawal with the answer, as it is on the disk now, and what the coordinator says that jobs hold.

    Raises:
        RequestRefused: the coordinator does not take it.
        AnswerUnfit: the answer proves nothing.
        grpc.aio.AioRpcError: the call failed; try again.
        OSError: the answer cannot be written.
    """
    if not kept.signed_by(identity):
        # The coordinator checks the signature against the certificate of the call.
        kept = await asyncio.to_thread(KeptWithdrawal.signed, kept.request, identity)
        folder.put(kept)
    message = pb.WithdrawRequest(statement=kept.request.canonical(), signature=bytes.fromhex(kept.signature))
    try:
        answer: pb.WithdrawResponse = await stub.Withdraw(message, timeout=_SECONDS)
    except grpc.aio.AioRpcError as error:
        if reason_of(error)[0] != Reason.REASON_WITHDRAWAL_INVALID:
            raise
        why = clean(explain(error, identity), _LONGEST)
        folder.put(kept.model_copy(update={"refused": why}))
        raise RequestRefused(why) from error
    taken = await asyncio.to_thread(_checked, answer, kept.request, identity)
    kept = kept.model_copy(update={"answer": taken, "refused": ""})
    folder.put(kept)
    return kept, tuple(answer.jobs)


def _checked(answer: pb.WithdrawResponse, mine: WithdrawalRequest, identity: MemberIdentity) -> TakenWithdrawal:
    try:
        request = WithdrawalRequest.from_json(answer.request, what="the request that the coordinator has")
        taken = WithdrawalTaken.from_json(answer.taken, what="the coordinator's answer")
        if (request.federation, request.member, request.job) != (mine.federation, mine.member, mine.job):
            raise CertificateInvalid("it is about another withdrawal")
        # Otherwise a server could answer about a request with another date, which this member never made.
        check_request(request, answer.request_signature, answer.request_certificate, identity.authorities)
        check_taken(taken, answer.signature, answer.certificate, request, identity.authorities)
        return TakenWithdrawal(
            request=request,
            request_signature=answer.request_signature.hex(),
            request_certificate=answer.request_certificate.hex(),
            taken=taken,
            signature=answer.signature.hex(),
            certificate=answer.certificate.hex(),
        )
    except (DocumentInvalid, CertificateInvalid, ValueError) as error:
        raise AnswerUnfit(
            f"the coordinator's answer does not prove that it took the withdrawal: {error}. It counts here all the "
            "same; ask the operator"
        ) from error
