"""Takes members' withdrawals, asked for by the member itself or by an operator.

The database has it before anybody hears of it: who asked, the marks, and the member's text that counts no longer. Then
every job goes on without the member (`withdrawn`), and only then does the caller get an answer. Once the database is
asked, all of it happens, even if the caller does not wait.
"""

import asyncio
import hashlib

import structlog

from coordinator.services.roster import RosterLog
from coordinator.services.running import Running
from coordinator.storage import records
from coordinator.storage.errors import NotFound
from tacit.documents import DocumentInvalid
from tacit.identity import Certificate, CertificateInvalid, verify_signature
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb
from tacit.withdrawal import WithdrawalRequest, WithdrawalTaken, request_bytes

__all__ = ["WithdrawalRefused", "held_to_pb", "take_own"]

log = structlog.get_logger("coordinator.federation")


class WithdrawalRefused(Exception):
    """A request is not taken, and nothing was changed. The text says why and what to do."""

    reason = Reason.REASON_WITHDRAWAL_INVALID


async def take_own(
    running: Running,
    roster: RosterLog,
    federation: bytes,
    caller: Certificate,
    message: pb.WithdrawRequest,
    now_ms: int,
    turn: asyncio.Lock,
) -> pb.WithdrawResponse:
    """Takes a member's own request.

    Args:
        running: The running coordinator.
        roster: Signs as the server.
        federation: The federation's name, 32 bytes.
        caller: The verified certificate of the calling member.
        message: The request.
        now_ms: The time.
        turn: Held while the database is asked, and not while the store deletes files, which may hang. A caller that
            goes away gives its place up.

    Raises:
        WithdrawalRefused: it is not what this caller signed, or names no job of this coordinator.
        DatabaseUnusable: nothing was recorded.
    """
    request = _checked(federation, caller, message)
    proof = records.Proof(message.statement, message.signature, caller.der)
    member = request.member

    async def act() -> records.Withdrawal:
        try:
            found = await running.database.run(lambda s: records.withdraw(s, member, request.job, now_ms, proof=proof))
            await running.withdrawn(member)
        finally:
            turn.release()
        await running.corpora.taken_back(found.texts)
        log.info("member_withdrew", member=member, scope=request.job or "all", jobs=len(found.held))
        return found

    await turn.acquire()
    try:
        taken = await running.acts.run(act(), "Withdraw", member=member)
    except NotFound as error:
        raise WithdrawalRefused(
            f"this coordinator has no job named {request.job}; `edge_client run --list` shows its jobs"
        ) from error
    entry = taken.entry
    if entry is None:
        raise RuntimeError("a withdrawal with a request has an entry")
    # An earlier request about the same is the one that counts.
    kept = str(entry.fields["request"]).encode()
    receipt = WithdrawalTaken(
        federation=federation,
        request=hashlib.sha256(kept).digest(),
        taken_ms=entry.at_ms,
        entry=entry.id,
        entry_hash=entry.hash,
    )
    signature, certificate = roster.sign(receipt)
    return pb.WithdrawResponse(
        jobs=[held_to_pb(each) for each in taken.held],
        taken=receipt.canonical(),
        signature=signature,
        certificate=certificate,
        request=kept,
        request_signature=bytes.fromhex(str(entry.fields["signature"])),
        request_certificate=bytes.fromhex(str(entry.fields["certificate"])),
    )


def _checked(federation: bytes, caller: Certificate, message: pb.WithdrawRequest) -> WithdrawalRequest:
    try:
        request = WithdrawalRequest.from_json(message.statement, what="the request")
    except DocumentInvalid as error:
        raise WithdrawalRefused(f"{error}; install this coordinator's version of the software") from error
    if request.canonical() != message.statement:
        raise WithdrawalRefused("the request is not in canonical form; install this coordinator's software")
    if request.federation != federation:
        raise WithdrawalRefused("the request is about another federation; ask that federation's coordinator")
    if request.member != caller.identity.name:
        raise WithdrawalRefused(
            f"the request is about {request.member}, but {caller.identity.name} sends it; it can withdraw only itself"
        )
    try:
        verify_signature(caller.key, request_bytes(request), message.signature)
    except CertificateInvalid as error:
        raise WithdrawalRefused(
            f"the request is not signed with the key of the certificate that this call shows ({error}); sign it again"
        ) from error
    return request


def held_to_pb(held: records.Held) -> pb.HeldContributions:
    """What one job holds of a member, for the wire."""
    return pb.HeldContributions(
        job=held.job,
        first=held.first,
        newest=held.newest,
        sums=held.sums,
        exported=held.exported,
        text=held.text,
        marked_before=held.marked,
        start_pruned=held.start_pruned,
    )
