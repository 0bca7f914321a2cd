"""The one encoding of fields as bytes, for everything that is hashed, signed, derived or authenticated.

Guarantees: the encoding is injective. Two calls give the same bytes only if they name the same purpose and the same
fields, of the same types, in the same order. So no signature, key or commitment made for one purpose can serve another,
and no boundary between two fields can be moved.

Encoding: each field is one type letter, a length of eight bytes (big-endian), and that many bytes. `B` is bytes, `S`
UTF-8 text, `I` an unsigned integer (big-endian, no leading zeros), `L` a list whose body is the encodings of its items.
A frame starts with two text fields: the protocol's name and version, and the purpose.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import lru_cache
from typing import Union

__all__ = ["PROTOCOL", "Field", "Purpose", "digest", "frame"]

PROTOCOL = "tacit/secure_agg/1"

Field = Union[bytes, str, int, tuple["Field", ...]]  # noqa: UP007  a recursive alias needs the quoted form


class Purpose(StrEnum):
    """All uses of the transcript, listed together so that two uses never share a name by accident."""

    CONTEXT = "context"
    LAYOUT = "layout"
    ADVERTISEMENT = "advertisement"
    ROSTER = "roster"
    ROSTER_ENTRY = "roster entry"
    ROSTER_NODE = "roster node"
    RING = "ring"
    GROUPS = "groups"
    SESSION = "session"
    SEED_KEY = "seed key"
    PAIR_SEED = "pair seed"
    SHARE_KEY_SEAL = "share key seal"
    PAIR_SEED_SEAL = "pair seed seal"
    SHARES_HEADER = "shares header"
    SEED_COMMITMENT = "seed commitment"
    SHARE_KEY_COMMITMENT = "share key commitment"
    ROOT_SHARE_COMMITMENT = "root share commitment"
    SEED_SHARE_COMMITMENT = "seed share commitment"
    PAIR_SEED_COMMITMENT = "pair seed commitment"
    DEALING_LEAF = "dealing leaf"
    DEALING_NODE = "dealing node"
    DEALING = "dealing"
    COMPLAINT = "complaint"
    OPENING = "opening"
    PAIR_MASK = "mask"
    SELF_MASK = "self mask"
    MASKED_INPUT = "masked input"
    SURVIVORS = "survivors"
    CONFIRMATION = "confirmation"
    RESULT = "result"
    RESULTS = "results"
    LOG_ENTRY = "log entry"
    LOG_HEAD = "log head"
    LOG_COSIGNATURE = "log cosignature"


def frame(purpose: Purpose, *fields: Field) -> bytes:
    """Encodes `fields` for one purpose.

    Raises:
        ValueError: an integer is negative.
        TypeError: a field has another type.
    """
    parts = [_prefix(purpose)]
    for field in fields:
        # Nearly all fields are short bytes, and a large cohort frames millions of them.
        if type(field) is bytes and len(field) < _SHORT:
            parts.append(_HEADS[len(field)])
            parts.append(field)
        else:
            parts.append(_encode(field))
    return b"".join(parts)


def digest(purpose: Purpose, *fields: Field) -> bytes:
    """SHA-256 of `frame(purpose, *fields)`, 32 bytes."""
    return hashlib.sha256(frame(purpose, *fields)).digest()


@lru_cache(maxsize=len(Purpose))
def _prefix(purpose: Purpose) -> bytes:
    return _encode(PROTOCOL) + _encode(purpose.value)


_SHORT = 128
# Precomputed letter and length of the fields that are framed by the million: digests, keys, shares.
_HEADS = tuple(b"B" + length.to_bytes(8, "big") for length in range(_SHORT))


# Cached, because a member's name is in every commitment that concerns it.
@lru_cache(maxsize=32_768)
def _short_text(field: str) -> bytes:
    return _tagged(b"S", field.encode("utf-8"))


def _encode(field: Field) -> bytes:
    # A fast path: nearly all fields are short bytes and names, and a large cohort frames millions.
    if type(field) is bytes and len(field) < _SHORT:
        return _HEADS[len(field)] + field
    if type(field) is str and len(field) < _SHORT:
        return _short_text(field)
    # In Python a bool is an int, so True would encode like 1. No statement of the protocol needs a bool.
    if isinstance(field, bool):
        raise TypeError("a transcript field is bytes, text, an unsigned integer or a tuple of these")
    if isinstance(field, bytes):
        return _tagged(b"B", field)
    if isinstance(field, str):
        return _tagged(b"S", field.encode("utf-8"))
    if isinstance(field, int):
        if field < 0:
            raise ValueError(f"a transcript integer is unsigned, got {field}")
        return _tagged(b"I", field.to_bytes((field.bit_length() + 7) // 8, "big"))
    if isinstance(field, tuple):
        return _tagged(b"L", b"".join(map(_encode, field)))
    raise TypeError("a transcript field is bytes, text, an unsigned integer or a tuple of these")


def _tagged(kind: bytes, body: bytes) -> bytes:
    return kind + len(body).to_bytes(8, "big") + body
