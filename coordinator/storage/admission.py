"""Decides who is let in with a certificate of the federation's authority: at once, after a restore, or not at all.

A refusal is noted in the journal once a day for each certificate, because its holder may come as often as it likes.
"""

import hashlib

from sqlalchemy.orm import Session

from coordinator.storage import roster
from coordinator.storage.certificates import Served, keep_first, served
from coordinator.storage.journal import note, note_seldom
from coordinator.storage.models import MemberCertificateRow, MemberRow, RestoredMemberRow

__all__ = ["adopt", "let_in"]

# Certificates are backdated five minutes.
_BACKDATED_MS = 6 * 60 * 1000
_DAY_MS = 24 * 3600 * 1000


def let_in(
    s: Session,
    name: str,
    certificate: bytes,
    *,
    key: bytes,
    begins_ms: int,
    expires_ms: int,
    now_ms: int,
    adopting: bool = True,
) -> Served | None:
    """Returns what a member with this certificate is served under, or None if it is not enrolled.

    `Served.admits` says whether that is this certificate.

    Args:
        name: the member's name.
        certificate: DER, verified by the caller, with this name in it.
        key: SHA-256 of its public key, 32 bytes.
        begins_ms: the start of its validity.
        expires_ms: its end.
        now_ms: the present time.
        adopting: whether an authority that is trusted now issued it. A retired authority's must be on record.
    """
    fingerprint = hashlib.sha256(certificate).digest()
    found = served(s, name, fingerprint)
    if found is not None and found.admits(fingerprint, now_ms):
        return found
    dates = {"begins_ms": begins_ms, "expires_ms": expires_ms}
    if found is not None and adopting and adopt(s, name, certificate, key=key, **dates, now_ms=now_ms):
        return served(s, name, fingerprint)
    note_seldom(
        s,
        "member_refused",
        name,
        now_ms,
        _DAY_MS,
        same=("reason", "fingerprint"),
        reason="client_certificate_revoked" if found is None else "client_certificate_unknown",
        fingerprint=fingerprint.hex(),
    )
    return found


def adopt(
    s: Session, name: str, certificate: bytes, *, key: bytes, begins_ms: int, expires_ms: int, now_ms: int
) -> bool:
    """Adopts a certificate that is not on record if the member was restored from a backup and got it after that backup.

    It is then the one on record, and no other is adopted this way again. One that the roster log revokes, or whose key
    it revokes, is not adopted. Returns whether it was adopted.
    """
    doubt, row = s.get(RestoredMemberRow, name), s.get(MemberRow, name, with_for_update=True)
    if doubt is None or row is None or row.status != "enrolled" or (row.enrolled_ms or 0) > doubt.since_ms:
        return False
    kept = s.get(MemberCertificateRow, name)
    # Renewed since the restore, so the one on record is the newest.
    if kept is not None and kept.issued_ms > doubt.since_ms:
        return False
    # It dates from before the backup, so it would be the one on record.
    if begins_ms < doubt.since_ms - _BACKDATED_MS:
        return False
    if roster.revokes(s, hashlib.sha256(certificate).digest(), key, name):
        return False
    before, fingerprint = row.fingerprint, hashlib.sha256(certificate).digest()
    row.fingerprint, row.certificate_expires_ms = fingerprint, expires_ms
    keep_first(s, name, certificate, now_ms)
    s.delete(doubt)
    told = None if before is None else before.hex()
    leaf = roster.adopted(s, fingerprint, key, name, now_ms)
    note(s, "member_adopted", name, now_ms, fingerprint=fingerprint.hex(), before=told, leaf=leaf)
    s.flush()
    return True
