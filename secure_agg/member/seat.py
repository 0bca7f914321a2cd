"""What a member carries through the phases after the roster: its place, and the shares that it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from secure_agg.context import RoundContext
from secure_agg.identity import Identity, IdentityInvalid, MemberId, VerifyIdentity
from secure_agg.secret import Secret
from secure_agg.session import Session

__all__ = ["HeldShares", "Seat"]


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place in one session. Holds no secret."""

    session: Session
    identity: Identity = field(repr=False)
    verify: VerifyIdentity = field(repr=False)

    @property
    def member(self) -> MemberId:
        return self.identity.member

    @property
    def context(self) -> RoundContext:
        return self.session.context

    def signed_by(self, member: MemberId, statement: bytes, signature: bytes) -> bool:
        """Whether `member` signed `statement` with the key of its certificate in the roster."""
        try:
            return self.verify(self.session.certificates[member], statement, signature) == member
        except IdentityInvalid:
            return False


@dataclass(frozen=True, slots=True)
class HeldShares:
    """One dealer's two shares for this member."""

    root: Secret
    seed: Secret

    def erase(self) -> None:
        """Erases both. Erasing twice is harmless."""
        self.root.erase()
        self.seed.erase()
