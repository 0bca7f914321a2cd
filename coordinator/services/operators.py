"""Which operators are let in: those with a valid certificate that is on record and was not cut off.

The list is the database's (`coordinator operator issue | list | revoke` on the coordinator's machine), looked at with
every call; streams that were open before are ended by `end_revoked`, which the server runs every few seconds.
"""

import hashlib
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
from tacit.identity import Certificate, Role
from tacit.reason import Reason
from tacit.status import abort_with

__all__ = ["calls", "end_revoked", "operator_peer", "say_cut_off"]

log = structlog.get_logger("coordinator.operator")

# Of this process: by the fingerprint of the certificate that each came with.
calls = Calls()

_CUT_OFF = "this operator's certificate was revoked; whoever runs the coordinator issues another with `coordinator "
_CUT_OFF += "operator issue`"
_UNKNOWN = "this operator's certificate is not among those that this coordinator has issued; whoever runs it issues "
_UNKNOWN += "another with `coordinator operator issue`, as after a restore from an older backup; if this one came from "
_UNKNOWN += "anywhere else, the authority's key was stolen"


async def operator_peer(
    context: grpc.aio.ServicerContext[Any, Any],
    database: Database,
    federation: bytes,
    root: x509.Certificate | Anchors,
    now: datetime,
) -> Certificate:
    """Who is calling. Ends the call with a reason unless it is an operator that was not cut off."""
    found = await peer(context, Role.OPERATOR, federation, root, now)
    fingerprint = _fingerprint(found)
    begins_ms = int(found.begins.timestamp() * 1000)
    now_ms = int(now.timestamp() * 1000)
    met = await database.run(
        lambda s: records.meet_operator(
            s,
            found.identity.name,
            fingerprint,
            begins_ms=begins_ms,
            now_ms=now_ms,
        )
    )
    if met is not records.Met.RECORDED:
        log.warning(
            "operator_refused", operator=found.identity.name, certificate=fingerprint.hex()[:16], record=met.value
        )
    if met is records.Met.REVOKED:
        await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_REVOKED, _CUT_OFF)
    if met is records.Met.UNKNOWN:
        await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, _UNKNOWN)
    calls.watch(fingerprint)
    return found


async def say_cut_off(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """In a call that was cancelled: if it was ended from here, says so in a way that the operator understands."""
    call = calls.mine()
    if call is not None and call.reason is not None:
        call.task.uncancel()
        await abort_with(context, call.reason, call.detail)


async def end_revoked(database: Database) -> None:
    """Ends the calls that are under way of operators that were cut off meanwhile."""
    callers = [caller for caller in calls.callers if isinstance(caller, bytes)]
    if not callers:
        return
    for fingerprint in await database.run(lambda s: records.revoked_among(s, callers)):
        ended = calls.end(fingerprint, Reason.REASON_CLIENT_CERTIFICATE_REVOKED, _CUT_OFF)
        log.info("operator_cut_off", certificate=fingerprint.hex()[:16], calls=ended)


def _fingerprint(certificate: Certificate) -> bytes:
    return hashlib.sha256(certificate.der).digest()
