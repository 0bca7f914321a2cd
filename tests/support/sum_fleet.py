"""A fleet of members and one server in one process, driven phase by phase, for tests.

`Fleet(5).run(lose={Phase.MASK: {"m2"}})` plays a whole attempt. `Fleet(5).until(Phase.CONFIRM)` stops when the server
has just sent its message of the phase before, so that a test can change that message and see how a member reacts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from secure_agg import (
    Abandoned,
    Accumulator,
    Dropped,
    IdentityInvalid,
    Phase,
    RoundContext,
    advertise,
    default_thresholds,
    open_attempt,
    pack_in_place,
    vector_digest,
)

FEDERATION = hashlib.sha256(b"a federation for tests").digest()
_AUTHORITY = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"authority").digest())
_PHASES = list(Phase)


def issue(member: str, key: Ed25519PrivateKey, role: str = "member") -> bytes:
    """A certificate of name, role and key, signed by the one authority."""
    body = b"|".join((member.encode(), role.encode(), key.public_key().public_bytes_raw().hex().encode()))
    return body + b"|" + _AUTHORITY.sign(body).hex().encode()


def key_of(certificate: bytes) -> bytes:
    return bytes.fromhex(certificate.split(b"|")[2].decode())


@lru_cache(maxsize=20_000)
def verify(certificate: bytes, message: bytes, signature: bytes) -> str:
    """The name of the member that signed. In one process, what hundreds of members accept is verified once."""
    try:
        name, role, key, seal = certificate.split(b"|")
        _AUTHORITY.public_key().verify(bytes.fromhex(seal.decode()), b"|".join((name, role, key)))
        if role != b"member":
            raise IdentityInvalid("the certificate is not a member's")
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.decode())).verify(signature, message)
    except (ValueError, InvalidSignature) as error:
        # The error repeats the bytes, which may be anything's.
        raise IdentityInvalid(f"not valid: {error!r}"[:200]) from None
    return name.decode()


class TestIdentity:
    """An identity whose key follows from its name, so that snapshots do not change."""

    __test__ = False

    def __init__(self, member: str, role: str = "member", key_from: str | None = None) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256((key_from or member).encode()).digest())
        self.member = member
        self.certificate = issue(member, self._key, role)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


class SeededRandom:
    """A deterministic stand-in for the cryptographic source: SHA-256 in counter mode. Tests only."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._drawn = 0

    def bytes(self, n: int, /) -> bytes:
        out = b""
        while len(out) < n:
            out += hashlib.sha256(f"{self._seed}/{self._drawn}".encode()).digest()
            self._drawn += 1
        return out[:n]


def names(n: int) -> list[str]:
    return [f"m{i}" for i in range(n)]


def make_context(
    n: int,
    threshold: int | None = None,
    corrupt: int | None = None,
    values: int = 6,
    bits: int = 32,
    **more: Any,
) -> RoundContext:
    if corrupt is None and n == 2:
        corrupt = 0
    default_threshold, default_corrupt = default_thresholds(n, corrupt)
    fields: dict[str, Any] = {
        "federation": FEDERATION,
        "job": "triage",
        "round": 7,
        "attempt": 1,
        "application": hashlib.sha256(b"application").digest(),
        "model": hashlib.sha256(b"model").digest(),
        "cohort": n,
        "threshold": threshold or default_threshold,
        "assumed_corrupt": default_corrupt,
        "values": values,
        "bits": bits,
    }
    return RoundContext(**{**fields, **more})


class Fleet:
    """Members and a server.

    Attributes:
        states: each member's state.
        server: the server's state.
        inbox: the server's last messages, by member.
        sent: members' messages, by phase and member.
        masked: the masked vectors, by member.
        inputs: the plain vectors, by member.
    """

    def __init__(self, n: int, *, seed: str = "fleet", **context: Any) -> None:
        self.context = make_context(n, **context)
        self.identities = {name: TestIdentity(name) for name in names(n)}
        self.server: Any = open_attempt(self.context, names(n), verify, key_of=key_of)
        self.states: dict[str, Any] = {}
        self.inbox: dict[str, Any] = {}
        self.sent: dict[Phase, dict[str, Any]] = {phase: {} for phase in Phase}
        self.dropped: list[Dropped] = []
        self.gone: set[str] = set()
        rng = np.random.default_rng(len(seed) + n)
        top = 2 ** (self.context.bits - 1)
        self.inputs = {
            name: rng.integers(0, top, self.context.values, dtype=np.uint32).astype("<u4") for name in names(n)
        }
        self.masked: dict[str, np.ndarray] = {}
        self.sum = Accumulator(self.context.values, self.context.bits)
        self.bend: Callable[[Phase, str, Any], Any] = lambda phase, member, message: message
        self._seed = seed

    def act(self, member: str, phase: Phase) -> Any:
        """Performs one member's part of a phase with the message in its inbox. Returns the member's message."""
        state = self.states.get(member)
        if phase is Phase.ADVERTISE:
            identity = self.identities[member]
            state, message = advertise(
                self.context, identity, verify, SeededRandom(f"{self._seed}/{member}"), key_of=key_of
            )
        elif phase is Phase.SHARE:
            state, message = state.on_roster(self.inbox[member])
        elif phase is Phase.MASK:
            vector = self.inputs[member].copy()
            state, message = state.on_dealings(self.inbox[member]).mask(vector)
            self.masked[member] = vector
        elif phase is Phase.CONFIRM:
            state, message = state.on_survivors(self.inbox[member])
        else:
            state, message = state.on_confirmations(self.inbox[member])
        self.states[member] = state
        return message

    def deliver(self, member: str, message: Any) -> Any:
        """Gives a message to the server as a driver does. Applies and returns a Dropped."""
        phase = self.server.phase
        if phase is Phase.MASK:
            answer = self.server.receive(member, message, vector_digest(self.masked[member], self.context.bits))
        else:
            answer = self.server.receive(member, message)
        if isinstance(answer, Dropped):
            self.server = self.server.drop(member, answer.reason, answer.detail)
            return answer
        self.server = answer
        if phase is Phase.MASK:
            self.sum.add(pack_in_place(self.masked[member].copy(), self.context.bits), 0)
        return answer

    def play(self, lose: Collection[str] = ()) -> Abandoned | None:
        """Plays one phase: every remaining member except those in `lose` acts, then the server closes the phase."""
        phase = self.server.phase
        self.gone |= set(lose)
        for member in sorted(self.server.waiting - self.gone):
            message = self.bend(phase, member, self.act(member, phase))
            self.sent[phase][member] = message
            self.deliver(member, message)
        closed = self.server.close()
        if isinstance(closed, Abandoned):
            return closed
        self.server, self.inbox, dropped = closed
        self.dropped += dropped
        return None

    def until(self, phase: Phase, lose: Mapping[Phase, Collection[str]] | None = None) -> Fleet:
        """Plays every phase before `phase`."""
        for earlier in _PHASES[: _PHASES.index(phase)]:
            assert self.play((lose or {}).get(earlier, ())) is None
        return self

    def run(self, lose: Mapping[Phase, Collection[str]] | None = None) -> Abandoned | np.ndarray:
        """Plays every phase. Returns the opened sum, or why the attempt was abandoned."""
        for phase in _PHASES:
            abandoned = self.play((lose or {}).get(phase, ()))
            if abandoned is not None:
                return abandoned
        self.server.unmask(self.sum.total)
        return self.sum.total

    def plain_sum(self, members: Collection[str]) -> np.ndarray:
        """The expected sum of these members' inputs, computed in whole numbers."""
        mask = (1 << self.context.bits) - 1
        total = sum((self.inputs[member].astype(object) for member in members), np.zeros(1, dtype=object))
        return np.array([int(value) & mask for value in total], dtype="<u4")
