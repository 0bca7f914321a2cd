"""A token desk in memory, and the test suite that every token desk must pass."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Protocol

from coordinator.domain.tokens import (
    Granted,
    GrantedBefore,
    Refused,
    SpendOutcome,
    StoredToken,
    TokenDesk,
    judge,
)
from coordinator.storage.errors import TokenWithdrawn
from tacit.token import secret_hash
from tacit.v1 import reason_pb2

__all__ = ["MemoryTokenDesk", "TokenDeskSuite"]


class MemoryTokenDesk:
    """A token desk in one dict. Its calls never await, so no two interleave."""

    def __init__(self) -> None:
        self.tokens: dict[str, StoredToken] = {}
        self.recorded: list[str] = []

    def add(self, token: StoredToken) -> None:
        self.tokens[token.token_id] = token

    def revoke(self, token_id: str) -> None:
        self.tokens[token_id] = replace(self.tokens[token_id], revoked=True)

    async def spend(self, token_id: str, secret_hash: bytes, key_fingerprint: bytes, now: datetime) -> SpendOutcome:
        stored = self.tokens.get(token_id)
        outcome = judge(stored, secret_hash=secret_hash, key_fingerprint=key_fingerprint, now=now)
        if isinstance(outcome, Granted) and stored is not None and stored.redeemed_by is None:
            self.tokens[token_id] = replace(stored, redeemed_at=now, redeemed_by=key_fingerprint)
        return outcome

    async def record(
        self,
        token_id: str,
        member: str,
        chain: tuple[bytes, ...],
        expires: datetime,
        software_version: str,
        now: datetime,
    ) -> tuple[bytes, ...]:
        stored = self.tokens[token_id]
        if stored.revoked:
            raise TokenWithdrawn(f"the invitation of {member} was taken back while it enrolled")
        if not stored.chain:
            self.tokens[token_id] = replace(stored, chain=chain)
            self.recorded.append(member)
        return self.tokens[token_id].chain


class Invite(Protocol):
    """Stores one invitation and returns its token's id."""

    def __call__(self, member: str, secret_hash: bytes, expires: datetime) -> str: ...


class TokenDeskSuite:
    """Tests for a token desk. Subclasses add two fixtures: `desk`, and `invite`, an `Invite` for that desk."""

    SECRET = b"s" * 32
    KEY = b"k" * 32
    OTHER = b"o" * 32

    def run(self, desk: TokenDesk, token: str, now: datetime, *, secret: bytes = SECRET, key: bytes = KEY):
        return asyncio.run(desk.spend(token, secret_hash(secret), key, now))

    def refused(self, outcome: SpendOutcome) -> int:
        assert isinstance(outcome, Refused)
        assert outcome.detail
        return outcome.reason

    def test_one_key_is_granted_and_another_refused(self, desk, invite, now):
        token = invite("north", secret_hash(self.SECRET), now + timedelta(hours=1))
        assert self.run(desk, token, now) == Granted("north")
        second = self.run(desk, token, now + timedelta(minutes=1), key=self.OTHER)
        assert self.refused(second) == reason_pb2.REASON_TOKEN_USED
        assert f"{now:%H:%M}" in second.detail

    def test_the_same_key_is_granted_again_before_and_after_recording(self, desk, invite, now):
        token = invite("north", secret_hash(self.SECRET), now + timedelta(hours=1))
        self.run(desk, token, now)
        assert self.run(desk, token, now) == Granted("north")
        chain = (b"leaf", b"root")
        late = now + timedelta(days=2)
        assert asyncio.run(desk.record(token, "north", chain, late, "0.1.0", now)) == chain
        # Even after the token expired, because it was redeemed in time.
        assert self.run(desk, token, late) == GrantedBefore("north", chain)

    def test_the_first_recorded_chain_is_kept(self, desk, invite, now):
        token = invite("north", secret_hash(self.SECRET), now + timedelta(hours=1))
        self.run(desk, token, now)
        first = asyncio.run(desk.record(token, "north", (b"a", b"root"), now, "0.1.0", now))
        assert asyncio.run(desk.record(token, "north", (b"b", b"root"), now, "0.1.0", now)) == first

    def test_a_wrong_secret_is_refused_and_redeems_nothing(self, desk, invite, now):
        token = invite("north", secret_hash(self.SECRET), now + timedelta(hours=1))
        wrong = self.run(desk, token, now, secret=b"x" * 32, key=self.OTHER)
        assert self.refused(wrong) == reason_pb2.REASON_TOKEN_SECRET_WRONG
        assert self.run(desk, token, now) == Granted("north")

    def test_a_wrong_secret_learns_nothing_of_a_redeemed_token(self, desk, invite, now):
        token = invite("north", secret_hash(self.SECRET), now + timedelta(hours=1))
        self.run(desk, token, now)
        wrong = self.run(desk, token, now, secret=b"x" * 32)
        assert self.refused(wrong) == reason_pb2.REASON_TOKEN_SECRET_WRONG
        assert "north" not in wrong.detail

    def test_an_unknown_token_id_is_refused(self, desk, now):
        assert self.refused(self.run(desk, "0" * 24, now)) == reason_pb2.REASON_TOKEN_UNKNOWN

    def test_an_expired_token_is_refused(self, desk, invite, now):
        token = invite("north", secret_hash(self.SECRET), now + timedelta(hours=1))
        late = self.run(desk, token, now + timedelta(hours=1, seconds=1))
        assert self.refused(late) == reason_pb2.REASON_TOKEN_EXPIRED

    def test_only_one_of_many_concurrent_keys_is_granted(self, desk, invite, now):
        token = invite("north", secret_hash(self.SECRET), now + timedelta(hours=1))
        keys = [bytes([number]) * 32 for number in range(8)]

        async def race() -> list[SpendOutcome]:
            digest = secret_hash(self.SECRET)
            return await asyncio.gather(*(desk.spend(token, digest, key, now) for key in keys))

        outcomes = asyncio.run(race())
        assert sum(isinstance(outcome, Granted) for outcome in outcomes) == 1
