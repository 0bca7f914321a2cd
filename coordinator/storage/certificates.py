"""Which certificates a member is served under: the newest one and, until that is used, the one before.

A renewal goes like this:

1. `keep_next` stores the next certificate, before it is handed out. Now both are good.
2. The member gets it. If the answer is lost, or the member is killed before it stores it, it still has the one before.
3. `served` sees the member use the next certificate, and ends the one before. That one also ends at its own end.

A revocation removes both in one transaction, with `forget`.
"""

import hashlib
from dataclasses import dataclass

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from coordinator.storage import roster
from coordinator.storage.journal import note
from coordinator.storage.models import CertificateRequestRow, MemberCertificateRow, MemberRow
from tacit.identity import Role
from tacit.roster import Kind

__all__ = [
    "Served",
    "forget",
    "keep_first",
    "keep_next",
    "member_certificates",
    "served",
]

_ENROLLED = "enrolled"


@dataclass(frozen=True, slots=True)
class Served:
    """The certificates under which an enrolled member is served. Fingerprints are SHA-256, 32 bytes.

    Args:
        current: the fingerprint of the newest certificate.
        certificate: that certificate, DER.
        issued_ms: when it was issued.
        previous: the fingerprint of the one before, or None once the newest was used.
        previous_expires_ms: the end of the one before.
    """

    current: bytes
    certificate: bytes
    issued_ms: int
    previous: bytes | None = None
    previous_expires_ms: int | None = None

    def admits(self, fingerprint: bytes, now_ms: int) -> bool:
        """Whether a caller with this certificate is let in."""
        if fingerprint == self.current:
            return True
        return fingerprint == self.previous and now_ms <= (self.previous_expires_ms or 0)


_MEMBERS, _CERTIFICATES = MemberRow.__table__.c, MemberCertificateRow.__table__.c
# Every call of a member runs this query. Built once, and over columns, it takes a fifth of the time that loading two
# rows as objects takes.
_SERVED = (
    select(
        _MEMBERS.fingerprint,
        _CERTIFICATES.certificate,
        _CERTIFICATES.issued_ms,
        _CERTIFICATES.previous,
        _CERTIFICATES.previous_expires_ms,
    )
    .join_from(MemberRow.__table__, MemberCertificateRow.__table__, _CERTIFICATES.member == _MEMBERS.name)
    .where(_MEMBERS.name == bindparam("name"), _MEMBERS.status == _ENROLLED, _MEMBERS.fingerprint.is_not(None))
)


def served(s: Session, name: str, using: bytes | None = None) -> Served | None:
    """Returns what a member is served under, or None if it is not enrolled.

    The first use of the newest certificate ends the one before it.

    Args:
        using: the fingerprint of the certificate that the member connects with. None ends nothing.
    """
    row = s.execute(_SERVED, {"name": name}).one_or_none()
    if row is None:
        return None
    fingerprint, certificate, issued_ms, previous, previous_expires_ms = row
    if using == fingerprint and previous is not None:
        kept = s.get_one(MemberCertificateRow, name)
        kept.previous = kept.previous_expires_ms = previous = previous_expires_ms = None
        # The next query may be in this transaction. Before SQLAlchemy 2.1, a query of tables does not flush first.
        s.flush()
    return Served(fingerprint or b"", certificate, issued_ms, previous, previous_expires_ms)


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
    """Serves a member under its next certificate from now on. The one that it asked with stays good beside it.

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
    before = served(s, name)
    if row is None or before is None or not before.admits(using, now_ms):
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
