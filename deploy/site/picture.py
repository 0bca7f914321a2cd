"""Draws docs/round.svg, the picture of one round, from a real attempt of secure aggregation.

python deploy/site/picture.py            writes docs/round.svg
python deploy/site/picture.py --check    fails if the file is stale

Three members sum small example vectors with `secure_agg`. The picture shows what that attempt held: the updates, the
masked vectors that leave the members, and the sum that the coordinator opens. Keys and randomness come from fixed
seeds, so that the same picture comes out each time; a federation draws them from the operating system.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
# Run as a file, Python has this folder on its path and not the project's root.
sys.path.insert(0, str(ROOT))

from coordinator.config import CoordinatorConfig  # noqa: E402
from deploy.site.drawing import box, checked_or_written, frame, text, way  # noqa: E402
from secure_agg import (  # noqa: E402
    RING_DTYPE,
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

__all__ = ["FILE", "Attempt", "main", "real_attempt", "rendered"]

FILE = ROOT / "docs" / "round.svg"
MEMBERS = ("aster", "birch", "cedar")
VALUES = 24
BITS = 16

Vector = NDArray[np.int64]


@dataclass(frozen=True)
class Attempt:
    """The vectors of one attempt, each of VALUES signed integers.

    updates, masked: one for each member. total: the sum that the coordinator opened.
    """

    updates: Sequence[Vector]
    masked: Sequence[Vector]
    total: Vector


@dataclass(frozen=True)
class _Identity:
    """A member with a key that follows from its name. Its certificate is its name and public key."""

    member: str

    @property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(_seed(f"key of {self.member}"))

    @property
    def certificate(self) -> bytes:
        return self.member.encode() + b" " + self._key.public_key().public_bytes_raw().hex().encode()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


@dataclass
class _SeededRandom:
    seed: str
    drawn: int = 0

    def bytes(self, n: int, /) -> bytes:
        self.drawn += 1
        return hashlib.shake_256(f"{self.seed} {self.drawn}".encode()).digest(n)


def real_attempt() -> Attempt:
    """Run one attempt of secure aggregation over three members and return its vectors.

    Raises:
        RuntimeError: the attempt dropped a member or did not open its sum.
    """
    at = np.linspace(0, 2 * np.pi, VALUES)
    waves = (np.sin(at), 0.8 * np.cos(2 * at), 0.9 * np.sin(at / 2 + 2))
    updates = [np.rint(1000 * wave).astype(np.int64) for wave in waves]
    parties = {name: _Identity(name) for name in MEMBERS}
    threshold, corrupt = default_thresholds(len(MEMBERS))
    context = RoundContext(
        federation=_seed("federation"),
        job="picture",
        round=1,
        attempt=1,
        application=_seed("application"),
        model=_seed("model"),
        cohort=len(MEMBERS),
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=VALUES,
        bits=BITS,
    )
    server: Any = open_attempt(context, list(MEMBERS), _verify, key_of=_key_of)
    states: dict[str, Any] = {}
    inbox: dict[str, Any] = {}
    masked: dict[str, NDArray[np.uint32]] = {}
    total = Accumulator(VALUES, BITS)
    for phase in Phase:
        for name, update in zip(MEMBERS, updates, strict=True):
            state: Any = states.get(name)
            more: tuple[bytes, ...] = ()
            if phase is Phase.ADVERTISE:
                state, message = advertise(context, parties[name], _verify, _SeededRandom(name), key_of=_key_of)
            elif phase is Phase.SHARE:
                state, message = state.on_roster(inbox[name])
            elif phase is Phase.MASK:
                vector = (update % 2**BITS).astype(RING_DTYPE)
                state, message = state.on_dealings(inbox[name]).mask(vector)
                masked[name] = vector.copy()
                more = (vector_digest(vector, BITS),)
                total.add(pack_in_place(vector, BITS), 0)
            elif phase is Phase.CONFIRM:
                state, message = state.on_survivors(inbox[name])
            else:
                state, message = state.on_confirmations(inbox[name])
            states[name] = state
            server = server.receive(name, message, *more)
            if isinstance(server, Dropped):
                raise RuntimeError(f"the attempt dropped {name}: {server}")
        server, inbox, _ = server.close()
    server.unmask(total.total)
    return Attempt(updates, [_signed(masked[name]) for name in MEMBERS], _signed(total.total))


# ---- drawing ---------------------------------------------------------------------------------------

_CELL = 8
_STRIP = VALUES * _CELL


def rendered() -> str:
    """Return the picture as SVG."""
    attempt = real_attempt()
    ports = {name: CoordinatorConfig.model_fields[f"{name}_port"].default for name in ("enrolment", "federation")}
    size = 2000
    parts = []
    for row, name in enumerate(MEMBERS):
        top = 56 + 104 * row
        parts += [
            box(20, top, 232, 88),
            text(34, top + 24, f"member {name}", "title"),
            text(34, top + 44, "text, training, noise: update", "small"),
            *_strip(34, top + 54, attempt.updates[row], size),
            way(f"M252 {top + 66} H296"),
            *_strip(300, top + 54, attempt.masked[row], 2 ** (BITS - 1)),
            way(f"M{300 + _STRIP + 4} {top + 66} H540"),
        ]
    parts += [
        text(300, 84, "masked vectors", "title"),
        box(544, 56, 232, 296),
        text(558, 80, "coordinator", "title"),
        text(558, 102, f"port {ports['federation']}, mutual TLS", "small"),
        text(558, 136, "adds the masked vectors,"),
        text(558, 156, "and takes the masks off:"),
        text(558, 186, "the sum of all updates", "title"),
        *_strip(558, 196, attempt.total, size),
        text(558, 248, "the next version of the model"),
        text(558, 300, f"relay, port {ports['enrolment']}: it holds no key", "small"),
        text(558, 320, "a new member enrols here", "small"),
        way("M776 206 H812"),
        box(816, 162, 124, 88),
        text(830, 188, "ONNX model", "title"),
        text(830, 210, "runs without the", "small"),
        text(830, 226, "training software", "small"),
        way("M660 352 V378 H136 V356"),
        text(300, 396, "the new version goes back to the members, round after round", "small"),
        text(20, 34, "One round. A real attempt of secure_agg summed these small example vectors.", "small"),
    ]
    return frame("Members send masked vectors, and the coordinator reads only their sum.", 960, 412, parts)


def _strip(x: int, y: int, vector: Vector, size: int) -> list[str]:
    """One cell for each value, from blue (-size) over white to orange (size)."""
    return [
        f'<rect x="{x + _CELL * number}" y="{y}" width="{_CELL}" height="22" fill="{_colour(value / size)}"/>'
        for number, value in enumerate(vector.tolist())
    ]


def _colour(value: float) -> str:
    end, share = ((194, 92, 10) if value > 0 else (29, 92, 173)), min(1.0, abs(value))
    return "#" + "".join(f"{round(245 + (channel - 245) * share):02x}" for channel in end)


def _signed(vector: NDArray[np.uint32]) -> Vector:
    """Read numbers below 2^BITS as signed ones."""
    whole = vector.astype(np.int64)
    return np.where(whole < 2 ** (BITS - 1), whole, whole - 2**BITS)


def _seed(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _key_of(certificate: bytes) -> bytes:
    return bytes.fromhex(certificate.split(b" ")[1].decode())


def _verify(certificate: bytes, message: bytes, signature: bytes) -> str:
    try:
        Ed25519PublicKey.from_public_bytes(_key_of(certificate)).verify(signature, message)
    except InvalidSignature:
        raise IdentityInvalid("the signature is not the member's") from None
    return certificate.split(b" ")[0].decode()


def main() -> int:
    """Command line."""
    return checked_or_written(FILE, rendered(), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
