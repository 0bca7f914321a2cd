"""Members and their invitations, and the desk where join tokens are redeemed.

A name has at most one open invitation, and one newest certificate under which it is served: `enrolled` returns its
fingerprint, `certificates.served` also the one before it. Revoking forgets both and withdraws the open invitation in
one transaction, so an enrolment or a renewal that is under way then ends without a certificate.
"""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, delete, func, select
from sqlalchemy.orm import Session

from coordinator.domain.tokens import Granted, SpendOutcome, StoredToken, judge
from coordinator.storage import certificates, roster
from coordinator.storage.database import Database
from coordinator.storage.errors import NameTaken, NotFound, TokenWithdrawn
from coordinator.storage.journal import note
from coordinator.storage.models import LedgerCounterRow, MemberRow, TokenRow, WithdrawalRow
from tacit.identity import Role
from tacit.roster import Kind

__all__ = [
    "MAX_LEDGERS",
    "DatabaseTokenDesk",
    "MemberStatus",
    "StoredMember",
    "enrolled",
    "heard_ledger",
    "invite",
    "member",
    "members",
    "record_certificate",
    "revoke_member",
    "spend_token",
]


# The most ledgers of one member. It has one for each data set, chooses the id itself, and each takes a row for good.
MAX_LEDGERS = 16


class MemberStatus(StrEnum):
    """How far a party has come in joining."""

    INVITED = "invited"
    ENROLLED = "enrolled"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class StoredMember:
    """A party as the federation knows it."""

    name: str
    status: MemberStatus
    fingerprint: bytes | None  # SHA-256 of its certificate, while it is enrolled.
    certificate_expires_ms: int | None
    software_version: str | None  # The version it enrolled with.
    invited_ms: int
    enrolled_ms: int | None
    revoked_ms: int | None
    invitation_expires_ms: int | None  # Of the open invitation, if there is one.


def invite(
    s: Session, name: str, token_id: str, secret_hash: bytes, expires_ms: int, now_ms: int, *, by: str = ""
) -> None:
    """Stores an invitation. It replaces an open one of this name, whose token is then unknown.

    Args:
        by: the operator's name, for the journal.

    Raises:
        NameTaken: the name is enrolled, not revoked, and its certificate has not expired; or it withdrew for good.
    """
    row = s.get(MemberRow, name, with_for_update=True)
    left = select(WithdrawalRow.id).where(WithdrawalRow.member == name, WithdrawalRow.job.is_(None))
    if s.scalar(left) is not None:
        raise NameTaken(
            f"{name} withdrew from all jobs, for good, so no job would ask it for anything (docs/withdrawal.md); "
            "choose another name"
        )
    if row is None:
        row = MemberRow(name=name, status=MemberStatus.INVITED.value, invited_ms=now_ms)
        s.add(row)
        s.flush()
    elif row.status == MemberStatus.ENROLLED.value and (row.certificate_expires_ms or 0) > now_ms:
        raise NameTaken(
            f"{name} is enrolled and its certificate is valid; choose another name, or first "
            f"run `coordinator member revoke {name}`"
        )
    replaced = s.scalars(
        delete(TokenRow)
        .where(TokenRow.member == name, TokenRow.chain.is_(None), TokenRow.revoked_ms.is_(None))
        .returning(TokenRow.token_id)
    ).all()
    row.status, row.invited_ms = MemberStatus.INVITED.value, now_ms
    row.fingerprint = row.certificate_expires_ms = row.revoked_ms = None
    certificates.forget(s, name)
    s.add(TokenRow(token_id=token_id, member=name, secret_hash=secret_hash, created_ms=now_ms, expires_ms=expires_ms))
    note(
        s,
        "member_invited",
        name,
        now_ms,
        token=token_id,
        expires_ms=expires_ms,
        replaced=list(replaced),
        by=by,
    )
    s.flush()


def heard_ledger(s: Session, name: str, ledger: bytes, sequence: int) -> int | None:
    """Remembers how far a member's ledger has come.

    The member's name is part of the key, so nobody speaks for another's ledger.

    Args:
        ledger: the ledger's id, 16 bytes.

    Returns:
        The highest sequence heard before, 0 for a new ledger. None if the ledger is not remembered, because the member
        has named `MAX_LEDGERS` others. None of those is forgotten for it, since then an older copy of it would pass.
    """
    row = s.get(LedgerCounterRow, (name, ledger))
    if row is not None and sequence <= row.sequence:
        return row.sequence
    # Locked, because on PostgreSQL another coordinator may hear from this member too; then read again.
    s.get(MemberRow, name, with_for_update=True)
    row = s.get(LedgerCounterRow, (name, ledger), populate_existing=True)
    if row is None:
        known = s.scalar(select(func.count()).select_from(LedgerCounterRow).where(LedgerCounterRow.member == name))
        if (known or 0) >= MAX_LEDGERS:
            return None
        s.add(LedgerCounterRow(member=name, ledger=ledger, sequence=sequence))
        return 0
    before = row.sequence
    row.sequence = max(before, sequence)
    return before


def members(s: Session) -> list[StoredMember]:
    """Returns every party that was ever invited, ordered by name."""
    # At most one invitation is open for a name.
    invitations = {
        row[0]: row[1]
        for row in s.execute(
            select(TokenRow.member, func.max(TokenRow.expires_ms))
            .where(TokenRow.redeemed_by.is_(None), TokenRow.revoked_ms.is_(None))
            .group_by(TokenRow.member)
        )
    }
    # Whoever watches the status reads thousands of members several times a second: objects for the rows would take two
    # thirds of the time.
    rows = s.execute(select(*MemberRow.__table__.c).order_by(MemberRow.name))
    return [_stored_member(row, invitations.get(row.name)) for row in rows]


def member(s: Session, name: str) -> StoredMember | None:
    """Returns one party, or None if nobody of that name was invited."""
    row = s.get(MemberRow, name)
    if row is None:
        return None
    expires = s.scalar(
        select(TokenRow.expires_ms).where(
            TokenRow.member == name, TokenRow.redeemed_by.is_(None), TokenRow.revoked_ms.is_(None)
        )
    )
    return _stored_member(row, expires)


def enrolled(s: Session, name: str) -> bytes | None:
    """Returns the SHA-256 of the certificate under which `name` is served, or None."""
    row = s.get(MemberRow, name)
    return row.fingerprint if row is not None and row.status == MemberStatus.ENROLLED.value else None


def revoke_member(s: Session, name: str, now_ms: int, *, by: str = "", logged: bool = False) -> StoredMember:
    """Ends a membership, or withdraws an invitation. Doing it twice changes nothing.

    Args:
        name: the member's name.
        now_ms: the present time.
        by: who does it, for the journal.
        logged: whether the roster log has this revocation already.

    Raises:
        NotFound: nobody of that name was invited.
    """
    row = s.get(MemberRow, name, with_for_update=True)
    if row is None:
        raise NotFound(f"there is no member named {name}; `coordinator member list` shows all members")
    if row.status != MemberStatus.REVOKED.value:
        leaf = None if row.fingerprint is None or logged else roster.revoked(s, row.fingerprint, name, now_ms)
        hexed = _hex(row.fingerprint)
        note(s, "member_revoked", name, now_ms, before=row.status, fingerprint=hexed, by=by, leaf=leaf)
        row.status, row.revoked_ms, row.fingerprint = MemberStatus.REVOKED.value, now_ms, None
        certificates.forget(s, name)
        for token in s.scalars(select(TokenRow).where(TokenRow.member == name, TokenRow.revoked_ms.is_(None))):
            token.revoked_ms = now_ms
        s.flush()
    return _stored_member(row, None)


def spend_token(s: Session, token_id: str, secret_hash: bytes, key_fingerprint: bytes, now: datetime) -> SpendOutcome:
    """Judges a token and, if granted, binds it to the key. See `coordinator.domain.tokens`."""
    # Locked, because on PostgreSQL another coordinator may look at the same row.
    row = s.get(TokenRow, token_id, with_for_update=True)
    outcome = judge(
        None if row is None else _stored_token(row),
        secret_hash=secret_hash,
        key_fingerprint=key_fingerprint,
        now=now,
    )
    if isinstance(outcome, Granted) and row is not None and row.redeemed_by is None:
        row.redeemed_by, row.redeemed_ms = key_fingerprint, _milliseconds(now)
        note(s, "token_redeemed", row.member, _milliseconds(now), token=token_id, key=key_fingerprint.hex())
        s.flush()
    return outcome


def record_certificate(
    s: Session,
    token_id: str,
    name: str,
    chain: tuple[bytes, ...],
    expires: datetime,
    software_version: str,
    now: datetime,
) -> tuple[bytes, ...]:
    """Enrols the token's member under `chain[0]`. A chain that is already recorded stays.

    Raises:
        TokenWithdrawn: since the token was redeemed, the invitation was replaced or the member revoked.
    """
    token = s.get(TokenRow, token_id, with_for_update=True)
    if token is None or token.member != name or token.revoked_ms is not None or token.redeemed_by is None:
        raise TokenWithdrawn(
            f"the invitation of {name} was withdrawn while it enrolled; ask the operator for a new one with "
            "`coordinator member invite`"
        )
    if token.chain is not None:
        return _chain(token)
    now_ms = _milliseconds(now)
    token.chain = [certificate.hex() for certificate in chain]
    row = s.get_one(MemberRow, name, with_for_update=True)
    row.status, row.enrolled_ms = MemberStatus.ENROLLED.value, now_ms
    row.fingerprint = hashlib.sha256(chain[0]).digest()
    row.certificate_expires_ms = _milliseconds(expires)
    row.software_version = software_version[:64]
    certificates.keep_first(s, name, chain[0], now_ms)
    leaf = roster.append(s, row.fingerprint, token.redeemed_by, name, Role.MEMBER, Kind.ISSUED, now_ms)
    note(s, "member_enrolled", name, now_ms, token=token_id, fingerprint=row.fingerprint.hex(), leaf=leaf)
    s.flush()
    return chain


class DatabaseTokenDesk:
    """The `TokenDesk` of a running coordinator. Each call is one transaction, so no two interleave."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def spend(self, token_id: str, secret_hash: bytes, key_fingerprint: bytes, now: datetime) -> SpendOutcome:
        """See `TokenDesk.spend`."""
        return await self._database.run(lambda s: spend_token(s, token_id, secret_hash, key_fingerprint, now))

    async def record(
        self,
        token_id: str,
        member: str,
        chain: tuple[bytes, ...],
        expires: datetime,
        software_version: str,
        now: datetime,
    ) -> tuple[bytes, ...]:
        """See `TokenDesk.record`.

        Raises:
            TokenWithdrawn: nothing was stored and the certificate must not be handed out.
        """
        return await self._database.run(
            lambda s: record_certificate(s, token_id, member, chain, expires, software_version, now)
        )


def _stored_member(row: MemberRow | Row[Any], invitation_expires_ms: int | None) -> StoredMember:
    return StoredMember(
        name=row.name,
        status=MemberStatus(row.status),
        fingerprint=row.fingerprint,
        certificate_expires_ms=row.certificate_expires_ms,
        software_version=row.software_version,
        invited_ms=row.invited_ms,
        enrolled_ms=row.enrolled_ms,
        revoked_ms=row.revoked_ms,
        invitation_expires_ms=invitation_expires_ms,
    )


def _stored_token(row: TokenRow) -> StoredToken:
    return StoredToken(
        token_id=row.token_id,
        member=row.member,
        secret_hash=row.secret_hash,
        expires=_datetime(row.expires_ms),
        redeemed_at=None if row.redeemed_ms is None else _datetime(row.redeemed_ms),
        redeemed_by=row.redeemed_by,
        chain=_chain(row),
        revoked=row.revoked_ms is not None,
    )


def _chain(row: TokenRow) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(certificate) for certificate in row.chain or ())


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def _datetime(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()
