"""Every byte of a small attempt, pinned. A change here is a change of the protocol and needs a decision record.

Encapsulation is random and takes no randomness of ours. So the vector also holds what was sealed when it was made, in
order, and the test replays it. Opening it is real.

`python tests/unit/secure_agg/test_sa_snapshot.py` rewrites the vector.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from secure_agg import Layout, Phase, Segment
from secure_agg.masking import MaskStream, apply_streams
from secure_agg.sealing import PublicKey
from secure_agg.session import roster_root
from tests.support import places
from tests.support.sum_fleet import Fleet, make_context

VECTOR = places.VECTORS / "secure_agg" / "attempt.json"


def flat(message: Any) -> Any:
    """Converts a message to nested lists, with bytes as hexadecimal."""
    if isinstance(message, bytes):
        return message.hex()
    if isinstance(message, tuple):
        return [flat(item) for item in message]
    if dataclasses.is_dataclass(message):
        return {field.name: flat(getattr(message, field.name)) for field in dataclasses.fields(message)}
    return message


def short(message: Any) -> str:
    return hashlib.sha256(json.dumps(flat(message), sort_keys=True).encode()).hexdigest()


def attempt() -> dict[str, Any]:
    context = make_context(4, values=5, bits=20)
    stream = np.zeros(6, dtype="<u4")
    apply_streams(stream, [MaskStream(bytes(range(32)), add=True)], 32)
    pinned: dict[str, Any] = {
        "context_digest": context.digest().hex(),
        "layout_digest": Layout((Segment("update", 4, 1024.0, 2.5), Segment("weight", 1, 1.0, 8.0)), 20).digest().hex(),
        "mask_stream": stream.tolist(),
    }
    fleet = Fleet(4, values=5, bits=20, seed="snapshot")
    for phase in Phase:
        fleet.play(lose={"m2"} if phase is Phase.MASK else ())
        pinned[f"{phase}: sent"] = {member: short(message) for member, message in fleet.sent[phase].items()}
        pinned[f"{phase}: passed on"] = {member: short(message) for member, message in fleet.inbox.items()}
        if phase is Phase.ADVERTISE:
            session = fleet.server.session
            pinned["advertisement of m0"] = flat(fleet.sent[phase]["m0"])
            pinned["roster_root"] = roster_root(session.entries.values()).hex()
            pinned["session_id"] = session.id.hex()
            pinned["pair_mask_info"] = session.pair_mask_info("m3", "m1").hex()
            pinned["pair_seed_info"] = session.pair_seed_info("m3", "m1").hex()
            pinned["share_key_info"] = session.share_key_info("m3", "m1").hex()
            pinned["shares_header"] = session.shares_header("m3", "m1").hex()
            pinned["self_mask_info"] = session.self_mask_info("m1").hex()
            pinned["survivors_digest"] = session.survivors_digest(["m3", "m0", "m1"]).hex()
        if phase is Phase.SHARE:
            pinned["dealt to m0 by m2"] = flat(fleet.inbox["m0"].dealings[1])
    pinned["masked m0"] = fleet.masked["m0"].tolist()
    pinned["masked sum"] = fleet.sum.total.tolist()
    fleet.server.unmask(fleet.sum.total)
    pinned["opened sum"] = fleet.sum.total.tolist()
    pinned["result_digest"] = fleet.server.result_digest(fleet.sum.total).hex()
    return pinned


def test_an_attempt_is_the_same_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = json.loads(VECTOR.read_text())
    sealed: Iterator[str] = iter(pinned.pop("sealed"))
    monkeypatch.setattr(PublicKey, "seal", lambda self, info, message: bytes.fromhex(next(sealed)))
    assert attempt() == pinned
    assert next(sealed, None) is None


if __name__ == "__main__":
    recorded: list[str] = []
    seal = PublicKey.seal

    def recording(self: PublicKey, info: bytes, message: bytes) -> bytes:
        ciphertext = seal(self, info, message)
        recorded.append(ciphertext.hex())
        return ciphertext

    PublicKey.seal = recording
    VECTOR.write_text(json.dumps({**attempt(), "sealed": recorded}, indent=2) + "\n")
