"""The rule of join tokens: one token makes one key a member, once.

`judge` is the rule, a pure function of a stored token and a request for it. A `TokenDesk` keeps the tokens and applies
the rule. Its `spend` reads, judges and marks the token as redeemed in one transaction, so two machines that bring the
same token at the same moment never both become that member.

The first key that redeems a token binds it. The same key may come again at any time and gets the same answer. So a lost
answer costs nothing, nor does a coordinator that stopped between `spend` and `record`. Any other key is refused.
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
    """This key was certified before: answer with the same chain (DER, the member's first, the root last)."""

    member: str
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Refuse. `reason` is a value of tacit.v1.Reason; `detail` is a full sentence for the person who enrols."""

    reason: reason_pb2.Reason
    detail: str


SpendOutcome = Granted | GrantedBefore | Refused


@dataclass(frozen=True, slots=True, repr=False)
class StoredToken:
    """What a desk stores of a token: never the secret, only `tacit.token.secret_hash` of it."""

    token_id: str
    member: str
    secret_hash: bytes
    expires: datetime
    # Both are set by the first `spend` that is granted.
    redeemed_at: datetime | None = None
    redeemed_by: bytes | None = None
    # Empty until `record` sets it.
    chain: tuple[bytes, ...] = ()
    # The member was revoked, or the invitation was withdrawn.
    revoked: bool = False

    def __repr__(self) -> str:
        return f"StoredToken({self.token_id!r}, member={self.member!r}, spent={self.redeemed_at is not None})"


def judge(stored: StoredToken | None, *, secret_hash: bytes, key_fingerprint: bytes, now: datetime) -> SpendOutcome:
    """Decides a request to redeem a token. After `Granted` the caller must store `redeemed_at` and `redeemed_by`
    atomically.

    Without the secret, a caller learns only that a token's id exists.

    Args:
        stored: the token, or None if its id is unknown.
        secret_hash: 32 bytes.
        key_fingerprint: SHA-256 of the key's SubjectPublicKeyInfo (DER), 32 bytes.
        now: a timezone-aware time.
    """
    if stored is None:
        return Refused(
            reason_pb2.REASON_TOKEN_UNKNOWN,
            "the coordinator does not know this join token: another coordinator made it, or it was removed; "
            "ask the operator for a new one with `coordinator member invite`",
        )
    if not hmac.compare_digest(stored.secret_hash, secret_hash):
        return Refused(
            reason_pb2.REASON_TOKEN_SECRET_WRONG,
            "the join token's secret is wrong, so the token was altered; "
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
                f"the join token was used at {stored.redeemed_at:%Y-%m-%d %H:%M} UTC for another key; tell the "
                "operator if that was not you, and ask for a new one with `coordinator member invite`",
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
    """Keeps tokens. Implementations serialise `spend`; `tests/support` has one test suite for all of them."""

    async def spend(self, token_id: str, secret_hash: bytes, key_fingerprint: bytes, now: datetime) -> SpendOutcome:
        """Judges the request. If `Granted`, binds the token to the key in one transaction, durable on return."""
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
        """Stores the member and its new certificate, before the certificate is handed out.

        Args:
            token_id: the redeemed token.
            member: the member's name.
            chain: DER, the member's certificate first.
            expires: the end of that certificate.
            software_version: the member's software.
            now: a timezone-aware time.

        Returns:
            The chain that counts. If the same key came twice at the same moment, that is the chain recorded first.

        Raises:
            coordinator.storage.errors.TokenWithdrawn: since the token was redeemed, the member was revoked or invited
                anew. Nothing is stored, and the certificate must not be handed out.
        """
        ...
