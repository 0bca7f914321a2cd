"""Which certificates of operators are let in: every one on record that was not revoked.

An operator's certificate is recorded before it is handed out. So one that is not on record was made by somebody else
who has the authority's key, and is refused (`check_operator`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage.errors import NameTaken, NotFound
from coordinator.storage.journal import note, note_seldom
from coordinator.storage.models import OperatorCertificateRow, OperatorRow
from tacit.identity import Role
from tacit.reason import Reason, word

__all__ = [
    "OperatorStanding",
    "StoredOperator",
    "check_operator",
    "note_act_refused",
    "operator_key_is_good",
    "operators",
    "record_operator",
    "revoke_operator",
    "revoked_among",
]

_DAY_MS = 24 * 3600 * 1000


class OperatorStanding(StrEnum):
    """What the record says about an operator's certificate. Only `RECORDED` is let in."""

    RECORDED = "recorded"
    REVOKED = "revoked"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StoredOperator:
    """A certificate of an operator."""

    name: str
    role: Role
    fingerprint: bytes
    issued_ms: int
    expires_ms: int
    issuer: bytes  # SHA-256 of the authority's certificate.
    revoked_ms: int | None


def record_operator(
    s: Session, name: str, role: Role, fingerprint: bytes, *, expires_ms: int, issuer: bytes, now_ms: int, by: str = ""
) -> None:
    """Records a certificate issued for an operator, before it is handed out.

    A name has one role at a time, so that the journal's names say what their holders could do.

    Raises:
        NameTaken: the name has a valid certificate with another role.
    """
    _operator(s, name)
    query = select(OperatorCertificateRow.role).where(
        OperatorCertificateRow.name == name,
        OperatorCertificateRow.revoked_ms.is_(None),
        OperatorCertificateRow.expires_ms > now_ms,
        OperatorCertificateRow.role != role,
    )
    if other := s.scalars(query.limit(1)).first():
        raise NameTaken(
            f"{name} has a valid certificate with the role {other}; choose another name, or end that one first with "
            f"`coordinator operator revoke {name}`"
        )
    s.add(
        OperatorCertificateRow(
            fingerprint=fingerprint, name=name, role=role, issued_ms=now_ms, expires_ms=expires_ms, issuer=issuer
        )
    )
    note(
        s,
        "operator_issued",
        name,
        now_ms,
        role=role.value,
        fingerprint=fingerprint.hex(),
        expires_ms=expires_ms,
        by=by,
    )
    s.flush()


def check_operator(s: Session, name: str, fingerprint: bytes, *, begins_ms: int, now_ms: int) -> OperatorStanding:
    """Decides whether an operator with this valid certificate is let in.

    A refusal is noted in the journal (`operator_refused`), once a day for each name.

    Args:
        begins_ms: the start of the certificate's validity.
    """
    row = s.get(OperatorCertificateRow, fingerprint)
    if row is not None and row.name == name and row.revoked_ms is None:
        return OperatorStanding.RECORDED
    operator = s.get(OperatorRow, name)
    revoked_ms = None if operator is None else operator.revoked_ms
    if row is not None or (revoked_ms is not None and begins_ms <= revoked_ms):
        standing, reason = OperatorStanding.REVOKED, Reason.REASON_CLIENT_CERTIFICATE_REVOKED
    else:
        standing, reason = OperatorStanding.UNKNOWN, Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
    refusal = {"reason": word(reason), "fingerprint": fingerprint.hex()}
    note_seldom(s, "operator_refused", name, now_ms, _DAY_MS, same=("reason",), **refusal)
    return standing


def note_act_refused(s: Session, name: str, act: str, *, now_ms: int) -> None:
    """Notes in the journal that an operator's role does not allow an act (`operator_refused`), once a day for each."""
    reason = word(Reason.REASON_CLIENT_ROLE_WRONG)
    note_seldom(s, "operator_refused", name, now_ms, _DAY_MS, same=("reason", "act"), reason=reason, act=act)


def operator_key_is_good(s: Session, fingerprint: bytes) -> bool:
    """Whether the key of an operator's certificate may be certified again: it is on record, and was not revoked."""
    row = s.get(OperatorCertificateRow, fingerprint)
    return row is not None and row.revoked_ms is None


def revoke_operator(s: Session, name: str, now_ms: int, *, by: str = "") -> int:
    """Revokes every present certificate of this name, and returns their number. One issued afterwards is good.

    Raises:
        NotFound: no certificate of this name was ever issued.
    """
    row = s.get(OperatorRow, name, with_for_update=True)
    if row is None:
        raise NotFound(f"there is no operator named {name}; `coordinator operator list` shows all operators")
    row.revoked_ms = now_ms
    query = select(OperatorCertificateRow).where(OperatorCertificateRow.name == name)
    known = list(s.scalars(query.where(OperatorCertificateRow.revoked_ms.is_(None))))
    for certificate in known:
        certificate.revoked_ms = now_ms
    note(s, "operator_revoked", name, now_ms, fingerprints=[each.fingerprint.hex() for each in known], by=by)
    s.flush()
    return len(known)


def revoked_among(s: Session, fingerprints: Collection[bytes]) -> frozenset[bytes]:
    """Returns those of these operator certificates that were revoked."""
    query = select(OperatorCertificateRow.fingerprint).where(OperatorCertificateRow.revoked_ms.is_not(None))
    return frozenset(s.scalars(query.where(OperatorCertificateRow.fingerprint.in_(fingerprints))))


def operators(s: Session) -> list[StoredOperator]:
    """Returns every operator certificate that was issued, by name and age."""
    rows = s.scalars(
        select(OperatorCertificateRow).order_by(OperatorCertificateRow.name, OperatorCertificateRow.issued_ms)
    )
    return [
        StoredOperator(
            row.name, Role(row.role), row.fingerprint, row.issued_ms, row.expires_ms, row.issuer, row.revoked_ms
        )
        for row in rows
    ]


def _operator(s: Session, name: str) -> OperatorRow:
    row = s.get(OperatorRow, name, with_for_update=True)
    if row is None:
        row = OperatorRow(name=name)
        s.add(row)
        s.flush()
    return row
