"""Members' certificate requests that wait for the authority, whose key is on another machine.

A member has at most one; a newer one replaces it. The answer is recorded as if the authority had been here: an
enrolment binds to its token, a renewal to the certificate under which it was asked for. So a member that was revoked or
invited anew in between gets nothing.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage.certificates import keep_next
from coordinator.storage.errors import TokenWithdrawn
from coordinator.storage.members import record_certificate
from coordinator.storage.models import CertificateRequestRow

__all__ = ["AnswerUnfit", "Asked", "answer", "ask", "asked"]


class AnswerUnfit(ValueError):
    """A certificate answers no open request. The sentence says why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An open request.

    Args:
        member: the member's name.
        request: PKCS#10, DER.
        key: SHA-256 of its public key, 32 bytes.
        asked_ms: when it was asked for.
        software_version: the member's software.
        token: the token of an enrolment.
        present: SHA-256 of the certificate under which a renewal was asked for.
        present_expires_ms: the end of that certificate.
    """

    member: str
    request: bytes
    key: bytes
    asked_ms: int
    software_version: str
    token: str | None = None
    present: bytes | None = None
    present_expires_ms: int | None = None


def ask(s: Session, asked: Asked) -> None:
    """Stores a request. The same request again changes nothing."""
    row = s.get(CertificateRequestRow, asked.member, with_for_update=True)
    if row is not None and (row.key, row.token, row.present) == (asked.key, asked.token, asked.present):
        return
    if row is None:
        row = CertificateRequestRow(member=asked.member)
        s.add(row)
    row.request, row.key, row.token, row.present = asked.request, asked.key, asked.token, asked.present
    row.present_expires_ms, row.software_version = asked.present_expires_ms, asked.software_version[:64]
    row.asked_ms = asked.asked_ms


def asked(s: Session) -> list[Asked]:
    """Returns the open requests, by name."""
    rows = s.scalars(select(CertificateRequestRow).order_by(CertificateRequestRow.member))
    return [
        Asked(
            row.member,
            row.request,
            row.key,
            row.asked_ms,
            row.software_version,
            row.token,
            row.present,
            row.present_expires_ms,
        )
        for row in rows
    ]


def answer(s: Session, member: str, chain: tuple[bytes, ...], key: bytes, expires: datetime, now: datetime) -> None:
    """Records a certificate that the caller has verified, and forgets the request.

    Args:
        member: the name in the certificate.
        chain: the certificate and the authority's, DER.
        key: SHA-256 of its public key, 32 bytes.
        expires: its end.
        now: the present time.

    Raises:
        AnswerUnfit: no request of this member for this key is open, or its ground is gone.
    """
    row = s.get(CertificateRequestRow, member, with_for_update=True)
    if row is None or row.key != key:
        raise AnswerUnfit(f"{member} has no open request for this key; it was answered before, or withdrawn")
    s.delete(row)
    if row.token is not None:
        try:
            record_certificate(s, row.token, member, chain, expires, row.software_version, now)
        except TokenWithdrawn as error:
            raise AnswerUnfit(str(error)) from error
        return
    kept = keep_next(
        s,
        member,
        using=row.present or b"",
        using_expires_ms=row.present_expires_ms or 0,
        certificate=chain[0],
        expires_ms=int(expires.astimezone(UTC).timestamp() * 1000),
        key=key.hex(),
        software_version=row.software_version,
        now_ms=int(now.timestamp() * 1000),
    )
    if not kept:
        raise AnswerUnfit(f"{member} was removed, or renewed in another way, since it asked")
