"""The roster log in the database: every certificate that was issued or revoked, in order, and who cosigned its head.

An entry is written in the transaction that issues or revokes the certificate, so neither exists without the other.
Triggers refuse to change, remove or replace an entry. The journal's entry about the same act holds the leaf hash, so
`coordinator audit verify` computes the log's root from the journal's chain alone.
"""

import hashlib

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from coordinator.storage.journal import lock_appends
from coordinator.storage.models import RosterCosignatureRow, RosterLogRow
from tacit.identity import Role
from tacit.roster import MAX_SKEW, Cosignature, Entry, Kind

__all__ = [
    "adopted",
    "append",
    "cosignatures",
    "cosigned",
    "entries",
    "number_of",
    "revoked",
    "revokes",
]


def append(s: Session, certificate: bytes, key: bytes, name: str, role: Role, kind: Kind, now_ms: int) -> str:
    """Adds an entry.

    Args:
        certificate: SHA-256 of the certificate, 32 bytes.
        key: SHA-256 of its public key, 32 bytes.
        name: the holder's name.
        role: the holder's role.
        kind: what happened.
        now_ms: the present time.

    Returns:
        The entry's leaf hash in hexadecimal, for the journal.
    """
    lock_appends(s)
    newest = s.scalars(select(RosterLogRow).order_by(RosterLogRow.id.desc()).limit(1)).one_or_none()
    number, before_ms = (1, 0) if newest is None else (newest.id + 1, newest.at_ms)
    # Members refuse a log whose times go back, as a clock that was set back would make them.
    entry = Entry(certificate, key, name, role, kind, max(now_ms, before_ms))
    s.add(
        RosterLogRow(
            id=number,
            certificate=certificate,
            key=key,
            name=name,
            role=role.value,
            kind=kind.value,
            at_ms=entry.at_ms,
        )
    )
    s.flush()
    return entry.leaf.hex()


def revoked(s: Session, certificate: bytes, name: str, now_ms: int) -> str:
    """Adds the entry of a revocation. The key is that of the certificate's own entry. Returns as `append` does."""
    known = s.scalars(select(RosterLogRow).where(RosterLogRow.certificate == certificate).limit(1)).one()
    return append(s, certificate, known.key, name, Role(known.role), Kind.REVOKED, now_ms)


def number_of(s: Session, certificate: bytes, name: str) -> int | None:
    """Returns the number of the entry that issued or renewed a certificate to this name, from 1 on; None without one.

    Args:
        certificate: SHA-256 of the certificate, 32 bytes.
        name: the holder's name.
    """
    query = select(RosterLogRow.id).where(RosterLogRow.certificate == certificate, RosterLogRow.name == name)
    return s.scalars(query.where(RosterLogRow.kind != Kind.REVOKED.value).order_by(RosterLogRow.id).limit(1)).first()


def revokes(s: Session, certificate: bytes, key: bytes, name: str) -> bool:
    """Whether the log revokes this certificate, or this key under this name. It reads the whole log.

    Args:
        certificate: SHA-256 of the certificate, 32 bytes.
        key: SHA-256 of its public key, 32 bytes.
        name: the holder's name.
    """
    of_name = RosterLogRow.name == name
    revocation = RosterLogRow.kind == Kind.REVOKED.value

    def newest(*conditions: ColumnElement[bool]) -> int:
        return s.scalars(select(func.coalesce(func.max(RosterLogRow.id), 0)).where(of_name, *conditions)).one()

    last = newest(revocation)
    seen = (newest(~revocation, RosterLogRow.certificate == certificate), newest(~revocation, RosterLogRow.key == key))
    return any(0 < number < last for number in seen)


def adopted(s: Session, certificate: bytes, key: bytes, name: str, now_ms: int) -> str | None:
    """Adds the certificate of a member that was restored from a backup, unless the log has it; then returns None."""
    if s.scalars(select(RosterLogRow.id).where(RosterLogRow.certificate == certificate).limit(1)).first() is not None:
        return None
    return append(s, certificate, key, name, Role.MEMBER, Kind.RENEWED, now_ms)


# Bytes of an Ed25519 key. A member signs with a certificate, which is longer.
_WITNESS_KEY = 32


def entries(s: Session, start: int, end: int | None = None) -> list[Entry]:
    """Returns the entries with the indices `start` (from 0) to `end`, which is left out; to the newest by default."""
    row = RosterLogRow
    # Columns, because an object for each row takes several times as long.
    query = select(row.certificate, row.key, row.name, row.role, row.kind, row.at_ms).where(row.id > start)
    if end is not None:
        query = query.where(row.id <= end)
    return [
        Entry(certificate, key, name, Role(role), Kind(kind), at_ms)
        for certificate, key, name, role, kind, at_ms in s.execute(query.order_by(row.id))
    ]


def cosigned(s: Session, cosignature: Cosignature, name: str = "") -> None:
    """Stores a cosignature that was checked. An older one of the same signer is replaced, a newer one stays.

    A newer one that came while a clock was ahead is replaced, too.

    Args:
        cosignature: the signature.
        name: the member's name; empty for a witness.
    """
    identifier = hashlib.sha256(b"member " + name.encode() if name else b"witness " + cosignature.signer).digest()
    row = s.get(RosterCosignatureRow, identifier, with_for_update=True)
    if row is None:
        row = RosterCosignatureRow(signer_id=identifier, size=0, at_ms=0)
        s.add(row)
    elif not is_newer(cosignature, row.size, row.at_ms):
        return
    row.signer, row.size, row.root = cosignature.signer, cosignature.size, cosignature.root
    row.at_ms, row.signature = cosignature.at_ms, cosignature.signature


def is_newer(cosignature: Cosignature, size: int, at_ms: int) -> bool:
    """Whether a cosignature, whose time is now, takes the place of the signer's one of this size and time."""
    # A cosignature's time was within MAX_SKEW when it came, so this one came while a clock was ahead.
    ahead = at_ms - cosignature.at_ms > 2 * MAX_SKEW.total_seconds() * 1000
    return (cosignature.size, cosignature.at_ms) > (size, at_ms) or (ahead and cosignature.size == size)


def cosignatures(s: Session, members: int) -> list[Cosignature]:
    """Returns the newest cosignature of each witness, and of the `members` members that signed last."""
    query = select(RosterCosignatureRow).order_by(RosterCosignatureRow.size.desc(), RosterCosignatureRow.at_ms.desc())
    of_witness = func.length(RosterCosignatureRow.signer) == _WITNESS_KEY
    rows = [*s.scalars(query.where(of_witness)), *s.scalars(query.where(~of_witness).limit(members))]
    return [Cosignature(row.signer, row.size, row.root, row.at_ms, row.signature) for row in rows]
