"""Admits operators whose certificate is valid, on record and not revoked, to the calls that its role allows.

The authority signs the role as a part of the identity, so nobody can raise their own. `LEAST_ROLE` is the one table of
what a role allows; a call that it does not list is refused to everybody.

The record is in the database (`coordinator operator issue | list | revoke` on the coordinator's machine), and every
call checks it. `end_over`, which the server runs every few seconds, ends streams that outlive their certificate.
"""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import grpc.aio
import structlog
from cryptography import x509

from coordinator.authority import Anchors
from coordinator.services.calls import Calls
from coordinator.services.credentials import peer
from coordinator.storage import records
from coordinator.storage.database import Database
from tacit.identity import OPERATOR_ROLES, Certificate, Identity, Role
from tacit.reason import Reason
from tacit.status import abort_with

__all__ = ["LEAST_ROLE", "allows", "calls", "end_over", "need_role", "operator_peer", "say_cut_off"]

log = structlog.get_logger("coordinator.operator")

# This process's calls, by the fingerprint of the operator's certificate.
calls = Calls()

# The least role that may call each method of OperatorService. Viewers see numbers and names. Operators run jobs, and
# read and write weights and texts. Administrators decide who takes part.
LEAST_ROLE: Mapping[str, Role] = {
    "Status": Role.VIEWER,
    "Watch": Role.VIEWER,
    "ListMembers": Role.VIEWER,
    "GetJob": Role.VIEWER,
    "ListCorpora": Role.VIEWER,
    "ReadJournal": Role.VIEWER,
    # A viewer fetches documents of jobs, and nothing else.
    "FetchBlob": Role.VIEWER,
    "StatBlob": Role.OPERATOR,
    "PutBlob": Role.OPERATOR,
    "CreateJob": Role.OPERATOR,
    "ChangeJob": Role.OPERATOR,
    "RecordEvaluation": Role.OPERATOR,
    "InviteMember": Role.ADMINISTRATOR,
    "RevokeMember": Role.ADMINISTRATOR,
    "WithdrawMember": Role.ADMINISTRATOR,
}

_CUT_OFF = "this operator's certificate was revoked; get a new one with `coordinator operator issue` on the "
_CUT_OFF += "coordinator's machine"
_EXPIRED = "by the coordinator's clock, this operator's certificate has expired; if it has, get a new one with "
_EXPIRED += "`coordinator operator issue` on the coordinator's machine; otherwise set this clock or the coordinator's"
_UNKNOWN = (
    "this coordinator has no record of issuing this operator's certificate. After a restore from an older backup, "
)
_UNKNOWN += "issue a new one with `coordinator operator issue`; if the certificate came from anywhere else, the "
_UNKNOWN += "authority's key was stolen"


async def operator_peer(
    context: grpc.aio.ServicerContext[Any, Any],
    database: Database,
    federation: bytes,
    root: x509.Certificate | Anchors,
    now: datetime,
    act: str,
) -> Certificate:
    """Returns the calling operator's certificate. Ends the call with a reason unless it is on record, not revoked, and
    of a role that may call this method.

    Args:
        context: The call.
        database: Holds the record of operators' certificates.
        federation: The federation's name, 32 bytes.
        root: The authority or authorities whose certificates are accepted.
        now: The current time, at which the certificate must be valid.
        act: The method's name in `LEAST_ROLE`.
    """
    found = await peer(context, OPERATOR_ROLES, federation, root, now)
    fingerprint = _fingerprint(found)
    begins_ms = int(found.begins.timestamp() * 1000)
    now_ms = int(now.timestamp() * 1000)
    standing = await database.run(
        lambda s: records.check_operator(
            s,
            found.identity.name,
            fingerprint,
            begins_ms=begins_ms,
            now_ms=now_ms,
        )
    )
    if standing is not records.OperatorStanding.RECORDED:
        log.warning(
            "operator_refused", operator=found.identity.name, certificate=fingerprint.hex()[:16], record=standing.value
        )
    if standing is records.OperatorStanding.REVOKED:
        await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_REVOKED, _CUT_OFF)
    if standing is records.OperatorStanding.UNKNOWN:
        await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, _UNKNOWN)
    await need_role(context, database, found.identity, LEAST_ROLE.get(act), act, now_ms=now_ms)
    calls.watch(fingerprint, found.expires)
    return found


def allows(role: Role, least: Role | None) -> bool:
    """Returns whether an operator's role includes another. None: no role allows it."""
    return least is not None and OPERATOR_ROLES.index(role) >= OPERATOR_ROLES.index(least)


async def need_role(
    context: grpc.aio.ServicerContext[Any, Any],
    database: Database,
    who: Identity,
    least: Role | None,
    act: str,
    *,
    now_ms: int,
) -> None:
    """Ends the call of an operator whose role does not allow an act, and notes it in the journal.

    Args:
        context: The call.
        database: Holds the journal.
        who: The calling operator.
        least: The least role that allows the act.
        act: What it wants to do, for the journal.
        now_ms: The current time.
    """
    if allows(who.role, least):
        return
    log.warning("operator_refused", operator=who.name, role=who.role.value, act=act)
    await database.run(lambda s: records.note_act_refused(s, who.name, act, now_ms=now_ms))
    detail = f"operator {who.name} has the role {who.role}, and this needs the role {least or 'of nobody'}; use the "
    detail += "folder of such an operator (--operator), or make one on the coordinator's machine with "
    detail += f"`coordinator operator issue NAME --role {least} --out FOLDER`"
    await abort_with(context, Reason.REASON_CLIENT_ROLE_WRONG, detail)


async def say_cut_off(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Tells the operator why a cancelled call ended, if `end_over` ended it. Run it in the cancelled call."""
    call = calls.mine()
    if call is not None and call.reason is not None:
        call.task.uncancel()
        await abort_with(context, call.reason, call.detail)


async def end_over(database: Database, now: datetime) -> None:
    """Ends the calls in progress of operators whose certificate has expired or was revoked."""
    for fingerprint, ended in calls.end_expired(now, Reason.REASON_CLOCK_SKEW, _EXPIRED):
        log.info("operator_expired", certificate=fingerprint.hex()[:16], calls=ended)
    callers = [caller for caller in calls.callers if isinstance(caller, bytes)]
    if not callers:
        return
    for fingerprint in await database.run(lambda s: records.revoked_among(s, callers)):
        ended = calls.end(fingerprint, Reason.REASON_CLIENT_CERTIFICATE_REVOKED, _CUT_OFF)
        log.info("operator_cut_off", certificate=fingerprint.hex()[:16], calls=ended)


def _fingerprint(certificate: Certificate) -> bytes:
    return hashlib.sha256(certificate.der).digest()
