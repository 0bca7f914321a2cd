"""Which certificates are served. Members: the newest one and, until that is used, the one before. Operators: all that
were not revoked.

An operator's certificate is recorded before it is handed out. So one that is not on record was made by somebody else
who has the authority's key, and is refused (`meet_operator`).

A member's next certificate is stored before it is handed out. The one before it stays good until its end, or until the
next one is first used. So a lost answer costs nothing, nor does a member that was killed before it stored what it got.
A revocation removes both, in one transaction.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage import roster
from coordinator.storage.errors import NotFound
from coordinator.storage.journal import note, note_seldom
from coordinator.storage.models import (
    CertificateRequestRow,
    MemberCertificateRow,
    MemberRow,
    OperatorCertificateRow,
    OperatorRow,
)
from tacit.identity import Role
from tacit.reason import Reason, word
from tacit.roster import Kind

__all__ = [
    "Met",
    "Served",
    "StoredOperator",
    "forget",
    "keep_first",
    "keep_next",
    "meet_operator",
    "member_certificates",
    "operator_key_is_good",
    "operators",
    "record_operator",
    "revoke_operator",
    "revoked_among",
    "served",
]

_ENROLLED = "enrolled"
_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Served:
    """The certificates under which an enrolled member is served. Fingerprints are SHA-256, 32 bytes."""

    current: bytes
    # DER.
    certificate: bytes
    issued_ms: int
    # Also good until its end, because the current one was never used.
    previous: bytes | None = None
    previous_expires_ms: int | None = None

    def admits(self, fingerprint: bytes, now_ms: int) -> bool:
        """Whether a caller with this certificate is let in."""
        if fingerprint == self.current:
            return True
        return fingerprint == self.previous and now_ms <= (self.previous_expires_ms or 0)


class Met(StrEnum):
    """What the record says about an operator's certificate. Only `RECORDED` is let in."""

    RECORDED = "recorded"
    REVOKED = "revoked"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StoredOperator:
    """A certificate of an operator."""

    name: str
    fingerprint: bytes
    known_ms: int
    expires_ms: int
    issuer: bytes  # SHA-256 of the authority's certificate.
    revoked_ms: int | None


# ---- members --------------------------------------------------------------------------------------------------------


def served(s: Session, name: str, using: bytes | None = None) -> Served | None:
    """Returns what a member is served under, or None if it is not enrolled.

    The first use of the newest certificate ends the one before it.

    Args:
        using: the fingerprint that the member comes with.
    """
    row = s.get(MemberRow, name)
    if row is None or row.status != _ENROLLED or row.fingerprint is None:
        return None
    kept = s.get_one(MemberCertificateRow, name)
    if using == row.fingerprint and kept.previous is not None:
        kept.previous = kept.previous_expires_ms = None
    return Served(row.fingerprint, kept.certificate, kept.issued_ms, kept.previous, kept.previous_expires_ms)


def keep_first(s: Session, name: str, certificate: bytes, now_ms: int) -> None:
    """Stores an enrolment's certificate. Call it in the transaction that enrols the member."""
    kept = s.get(MemberCertificateRow, name)
    if kept is None:
        s.add(MemberCertificateRow(member=name, certificate=certificate, issued_ms=now_ms))
    else:
        kept.certificate, kept.issued_ms, kept.previous, kept.previous_expires_ms = certificate, now_ms, None, None


def keep_next(
    s: Session,
    name: str,
    *,
    using: bytes,
    using_expires_ms: int,
    certificate: bytes,
    expires_ms: int,
    key: str,
    software_version: str,
    now_ms: int,
) -> bool:
    """Serves a member under its next certificate from now on; the one it asked with stays good beside it.

    Args:
        name: the member's name.
        using: the fingerprint of the certificate it asked with.
        using_expires_ms: the end of that certificate.
        certificate: the next one, DER.
        expires_ms: its end.
        key: SHA-256 of the public key, in hexadecimal, for the journal.
        software_version: the member's software.
        now_ms: the present time.

    Returns:
        False if `using` is no longer served. Then nothing is stored.
    """
    row = s.get(MemberRow, name, with_for_update=True)
    now = served(s, name)
    if row is None or now is None or not now.admits(using, now_ms):
        return False
    keep_first(s, name, certificate, now_ms)
    kept = s.get_one(MemberCertificateRow, name)
    kept.previous, kept.previous_expires_ms = using, using_expires_ms
    row.fingerprint, row.certificate_expires_ms = hashlib.sha256(certificate).digest(), expires_ms
    row.software_version = software_version[:64]
    leaf = roster.append(s, row.fingerprint, bytes.fromhex(key), name, Role.MEMBER, Kind.RENEWED, now_ms)
    note(s, "member_renewed", name, now_ms, fingerprint=row.fingerprint.hex(), before=using.hex(), key=key, leaf=leaf)
    s.flush()
    return True


def forget(s: Session, name: str) -> None:
    """Stops serving the member under any certificate, and forgets its open request for one."""
    for kind in (MemberCertificateRow, CertificateRequestRow):
        if (kept := s.get(kind, name)) is not None:
            s.delete(kept)


def member_certificates(s: Session) -> dict[str, tuple[bytes, int]]:
    """Returns the certificate (DER) of every enrolled member, and its end in milliseconds since 1970."""
    query = select(MemberRow.name, MemberRow.certificate_expires_ms, MemberCertificateRow.certificate).join_from(
        MemberRow, MemberCertificateRow
    )
    rows = s.execute(query.where(MemberRow.status == _ENROLLED).order_by(MemberRow.name))
    return {name: (certificate, expires_ms or 0) for name, expires_ms, certificate in rows}


# ---- operators ------------------------------------------------------------------------------------------------------


def record_operator(
    s: Session, name: str, fingerprint: bytes, *, expires_ms: int, issuer: bytes, now_ms: int, by: str = ""
) -> None:
    """Records a certificate issued for an operator, before it is handed out."""
    _known(s, name)
    s.add(
        OperatorCertificateRow(
            fingerprint=fingerprint, name=name, known_ms=now_ms, expires_ms=expires_ms, issuer=issuer
        )
    )
    note(s, "operator_issued", name, now_ms, fingerprint=fingerprint.hex(), expires_ms=expires_ms, by=by)
    s.flush()


def meet_operator(
    s: Session,
    name: str,
    fingerprint: bytes,
    *,
    begins_ms: int,
    now_ms: int,
) -> Met:
    """Decides whether an operator with this valid certificate is let in.

    A refusal is noted in the journal (`operator_refused`), once a day for each name.

    Args:
        begins_ms: the start of the certificate's validity.
    """
    row = s.get(OperatorCertificateRow, fingerprint)
    if row is not None and row.name == name and row.revoked_ms is None:
        return Met.RECORDED
    operator = s.get(OperatorRow, name)
    revoked_ms = None if operator is None else operator.revoked_ms
    if row is not None or (revoked_ms is not None and begins_ms <= revoked_ms):
        return _refused(s, name, fingerprint, Met.REVOKED, Reason.REASON_CLIENT_CERTIFICATE_REVOKED, now_ms)
    return _refused(s, name, fingerprint, Met.UNKNOWN, Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, now_ms)


def _refused(s: Session, name: str, fingerprint: bytes, met: Met, reason: Reason, now_ms: int) -> Met:
    told = {"reason": word(reason), "fingerprint": fingerprint.hex()}
    note_seldom(s, "operator_refused", name, now_ms, _DAY_MS, same=("reason",), **told)
    return met


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
        select(OperatorCertificateRow).order_by(OperatorCertificateRow.name, OperatorCertificateRow.known_ms)
    )
    return [
        StoredOperator(row.name, row.fingerprint, row.known_ms, row.expires_ms, row.issuer, row.revoked_ms)
        for row in rows
    ]


def _known(s: Session, name: str) -> OperatorRow:
    row = s.get(OperatorRow, name, with_for_update=True)
    if row is None:
        row = OperatorRow(name=name)
        s.add(row)
        s.flush()
    return row
