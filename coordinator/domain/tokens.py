"""The rule of join tokens: one token makes one key a member, once.

`judge` is the rule itself, pure: what a stored token and a request for it lead to. A `TokenDesk` keeps the
tokens and applies the rule; its `spend` reads, judges and marks the token as spent in one transaction, so
that two machines that come with the same token at the same moment never both become that member.

A token is bound to the first key that spends it. The same key may come again, at any time, and gets what it
got the first time: an answer that was lost on the way costs nothing, and neither does a coordinator that
stopped between `spend` and `record`. Any other key is refused.
"""

import hmac
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from tacit.v1 import reason_pb2

__all__ = ["Granted", "GrantedBefore", "Refused", "SpendOutcome", "StoredToken", "TokenDesk", "judge"]


@dataclass(frozen=True, slots=True)
class Granted:
    """Certify the key for this member, then `record` the certificate."""

    member: str


@dataclass(frozen=True, slots=True)
class GrantedBefore:
    """This very key was certified already: answer with the same chain (DER, the member's first, the root
    last)."""

    member: str
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """No. `reason` is a value of tacit.v1.Reason; `detail` a whole sentence for the person who tried to
    enrol."""

    reason: reason_pb2.Reason
    detail: str


SpendOutcome = Granted | GrantedBefore | Refused


@dataclass(frozen=True, slots=True, repr=False)
class StoredToken:
    """What a desk keeps of a token. The secret itself is never kept, only `tacit.token.secret_hash` of it."""

    token_id: str
    member: str
    secret_hash: bytes
    expires: datetime
    # Set together, by the first `spend` that is granted.
    redeemed_at: datetime | None = None
    redeemed_by: bytes | None = None
    # Set by `record`; empty until then.
    chain: tuple[bytes, ...] = ()
    # The member was revoked, or the invitation was taken back.
    revoked: bool = False

    def __repr__(self) -> str:
        return f"StoredToken({self.token_id!r}, member={self.member!r}, spent={self.redeemed_at is not None})"


def judge(stored: StoredToken | None, *, secret_hash: bytes, key_fingerprint: bytes, now: datetime) -> SpendOutcome:
    """What a request to spend leads to. `Granted` obliges the caller to store `redeemed_at` and `redeemed_by`
    atomically.

    `secret_hash` and `key_fingerprint` (SHA-256 of the key's SubjectPublicKeyInfo, DER) are 32 bytes each;
    `now` is timezone-aware. Whoever does not hold the secret learns nothing about a token but that its id
    exists.
    """
    if stored is None:
        return Refused(
            reason_pb2.REASON_TOKEN_UNKNOWN,
            "the coordinator does not know this join token: it was made by another coordinator, or removed; "
            "ask the operator for a new one with `coordinator member invite`",
        )
    if not hmac.compare_digest(stored.secret_hash, secret_hash):
        return Refused(
            reason_pb2.REASON_TOKEN_SECRET_WRONG,
            "the join token's secret is not the one that was given out: the token was altered; "
            "ask the operator for a new one with `coordinator member invite`",
        )
    if stored.revoked:
        return Refused(
            reason_pb2.REASON_CLIENT_CERTIFICATE_REVOKED,
            f"{stored.member} was removed from the federation, and its join token with it; ask the operator",
        )
    if stored.redeemed_by is not None and stored.redeemed_at is not None:
        if not hmac.compare_digest(stored.redeemed_by, key_fingerprint):
            return Refused(
                reason_pb2.REASON_TOKEN_USED,
                f"the join token was used at {stored.redeemed_at:%Y-%m-%d %H:%M} UTC, for another key; if that "
                "was not this machine, tell the operator; ask for a new one with `coordinator member "
                "invite`",
            )
        return GrantedBefore(stored.member, stored.chain) if stored.chain else Granted(stored.member)
    if now > stored.expires:
        return Refused(
            reason_pb2.REASON_TOKEN_EXPIRED,
            f"the join token expired at {stored.expires:%Y-%m-%d %H:%M} UTC; "
            "ask the operator for a new one with `coordinator member invite`",
        )
    return Granted(stored.member)


class TokenDesk(Protocol):
    """Where tokens are kept. Implementations serialise `spend`; `tests/support` holds one suite for all of
    them."""

    async def spend(self, token_id: str, secret_hash: bytes, key_fingerprint: bytes, now: datetime) -> SpendOutcome:
        """Judges and, if `Granted`, binds the token to the key, in one transaction that is durable on
        return."""
        ...

    async def record(
        self,
        token_id: str,
        member: str,
        chain: tuple[bytes, ...],
        expires: datetime,
        software_version: str,
        now: datetime,
    ) -> tuple[bytes, ...]:
        """Stores the member with the certificate just issued, before it is handed out.

        `chain` is DER, the member's certificate first; `expires` that certificate's end. If a chain was
        recorded for this token meanwhile (the same key, twice at the same moment), that one stays. Returns
        the chain that stands.

        Raises:
            coordinator.storage.errors.TokenWithdrawn: the member was revoked, or invited anew, since the
                token was spent; nothing is stored and the certificate must not be handed out.
        """
        ...
