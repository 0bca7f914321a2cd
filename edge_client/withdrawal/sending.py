"""Tells the coordinator of a withdrawal, and keeps its signed answer.

A withdrawal is sent again at each start, so the routine must not cost the member its proof. Nothing on the disk changes
before an answer was checked, and an answer never takes the place of one that says something else.
"""

import asyncio

import grpc.aio
import structlog

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

__all__ = ["AnswerUnfit", "RequestRefused", "advice", "send"]

log = structlog.get_logger("edge_client")

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
    sent = kept
    if not kept.signed_by(identity):
        # The coordinator checks the signature against the certificate of the call.
        sent = await asyncio.to_thread(kept.signed_anew, identity)
    message = pb.WithdrawRequest(statement=sent.request.canonical(), signature=bytes.fromhex(sent.signature))
    try:
        answer: pb.WithdrawResponse = await stub.Withdraw(message, timeout=_SECONDS)
    except grpc.aio.AioRpcError as error:
        if reason_of(error)[0] != Reason.REASON_WITHDRAWAL_INVALID:
            raise
        why = clean(explain(error, identity), _LONGEST)
        folder.refused(kept, why)
        raise RequestRefused(why) from error
    taken = await asyncio.to_thread(_checked, answer, sent.request, identity)
    now = folder.answered(sent, taken)
    if kept.answers and not kept.has(taken):
        log.error(
            "withdrawal_answers_differ",
            scope=kept.request.job or "all",
            before=", ".join(kept.heads),
            now=taken.head,
            kept=now.has(taken),
            advice=advice(folder),
        )
    return now, tuple(answer.jobs)


def advice(folder: WithdrawalFolder) -> str:
    """What to do about answers that name different entries of the journal."""
    return (
        "the coordinator's journal is not the one that it signed before. Ask the operator whether it restored an older "
        "backup, which does this too; if it did not, an entry was removed, and `coordinator audit verify --head` with "
        f"each head shows it. Copy {folder.path}: the answers prove it"
    )


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
