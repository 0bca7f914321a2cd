"""Inputs for decoders: messages made from their descriptors, and records and documents with changed places."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from tacit.v1 import federation_pb2 as pb

# Lengths around every meaningful length: nonces and keys 32, shares 33, seals 82, ledgers 16.
LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 34, 64, 81, 82, 83, 384, 385, 4000)
INTEGERS = (0, 1, 2, 3, 4, 5, 32, 33, 127, 128, 200, 201, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e9, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "m0", "m1", "m9", "questions", "a" * 300, "\0", "\n\r\x1b[31m", "Z\u00fcrich", "\u202e", "\U0001f600", "*")

names = st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8"), max_size=20)
blobs = st.sampled_from(LENGTHS).map(bytes) | st.binary(max_size=90)

_WIDTHS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


def _value(draw: st.DrawFn, field: FieldDescriptor, depth: int) -> Any:
    if field.message_type is not None:
        return _message(draw, field.message_type, depth + 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw(names)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw(blobs)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return draw(st.sampled_from(NUMBERS) | st.floats())
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw(st.booleans())
    low, high = _WIDTHS[field.type]
    return draw(st.sampled_from([n for n in INTEGERS if low <= n <= high]) | st.integers(low, high))


def _message(draw: st.DrawFn, described: Descriptor, depth: int = 0) -> Message:
    made: Message = getattr(pb, described.name)()
    # Protobuf represents an `optional` number as a choice of one. Here it is a field like any other.
    groups = [group for group in described.oneofs if len(group.fields) > 1]
    chosen = {draw(st.sampled_from(list(group.fields))).name for group in groups}
    for field in described.fields:
        of_a_group = field.containing_oneof in groups
        if of_a_group and field.name not in chosen:
            continue
        if not of_a_group and draw(st.integers(0, 9)) == 0:
            continue
        if field.is_repeated:
            count = draw(st.integers(0, 4))
            getattr(made, field.name).extend([_value(draw, field, depth) for _ in range(count)])
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(_value(draw, field, depth))
        else:
            setattr(made, field.name, _value(draw, field, depth))
    return made


@st.composite
def messages_of(draw: st.DrawFn, kind: type[Message]) -> Message:
    """A message of one kind with any of its fields, whose values are at or around meaningful ones."""
    return _message(draw, kind.DESCRIPTOR)


@st.composite
def damaged(draw: st.DrawFn, kind: type[Message]) -> bytes:
    """The bytes of such a message with flipped bits, a lost end, a lost or doubled stretch, or inserted noise."""
    data = bytearray(draw(messages_of(kind)).SerializeToString())
    for _ in range(draw(st.integers(1, 3))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 40))
        match draw(st.sampled_from(["bit", "cut", "double", "drop", "noise"])):
            case "bit" if data:
                data[at % len(data)] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "double":
                data[at:at] = data[at : at + length]
            case "drop":
                del data[at : at + length]
            case _:
                data[at:at] = draw(st.binary(max_size=12))
    return bytes(data)


# ---- records of the protocol ----------------------------------------------------------------------------------------


def _leaf(chance: random.Random, value: Any, others: list[Any]) -> Any:
    """Returns another value of the same type."""
    alike = [other for other in others if type(other) is type(value)]
    if isinstance(value, bytes):
        length = chance.choice(LENGTHS)
        flipped = bytearray(value or b"\0")
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        return chance.choice([chance.randbytes(length), bytes(length), bytes(flipped), value[:-1], *alike[:8]])
    if isinstance(value, str):
        return chance.choice([*TEXTS, *alike[:8]])
    if isinstance(value, int):
        return chance.choice(INTEGERS)
    return value


def leaves_of(value: Any) -> list[Any]:
    """Every number, string and byte string in a record, in order."""
    if dataclasses.is_dataclass(value):
        return [leaf for field in dataclasses.fields(value) for leaf in leaves_of(getattr(value, field.name))]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def changed(record: Any, seed: int, others: list[Any] | None = None) -> Any:
    """A record with one place changed.

    A leaf gets another value, length or owner; a list is emptied, reversed or repeated hundreds of times; or one item
    of a list is doubled, dropped or changed.
    """
    chance = random.Random(seed)
    others = others if others is not None else leaves_of(record)

    def at(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            # Choose lists more often, because they hold most of the content.
            weights = [4 if isinstance(getattr(value, field.name), tuple) else 1 for field in fields]
            name = chance.choices(fields, weights)[0].name
            return dataclasses.replace(value, **{name: at(getattr(value, name))})  # type: ignore[type-var]
        if isinstance(value, tuple):
            return _list(chance, value, at)
        return _leaf(chance, value, others)

    return at(record)


def _list(chance: random.Random, items: tuple[Any, ...], at: Callable[[Any], Any]) -> tuple[Any, ...]:
    if not items:
        return items
    place = chance.randrange(len(items))
    item = items[place]
    match chance.choice(["inside"] * 6 + ["double", "drop", "reverse", "many", "empty", "changed too"]):
        case "inside":
            return (*items[:place], at(item), *items[place + 1 :])
        case "double":
            return (*items, item)
        case "drop":
            return items[:place] + items[place + 1 :]
        case "reverse":
            return items[::-1]
        case "many":
            # Do not repeat a long list: three such changes would make it a thousand million items long.
            return items * max(1, 2000 // len(items))
        case "empty":
            return ()
        case _:
            return (*items, at(item))


# ---- documents ------------------------------------------------------------------------------------------------------

ODD = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**300,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "0",
    "none",
    "00" * 32,
    "zz" * 32,
    "a" * 5000,
    "\0",
    "\ud800",
    "\u0661",
    [],
    {},
    [[]],
    [None],
    {"": 0},
    ["a", "a"],
    {"name": "none"},
)


def odd(document: Any, seed: int) -> Any:
    """A JSON document with one place changed: another value, a key removed, added or renamed, or an item doubled."""
    chance = random.Random(seed)

    def at(value: Any) -> Any:
        if chance.random() < 0.25 or not isinstance(value, dict | list) or not value:
            return chance.choice(ODD)
        if isinstance(value, list):
            place = chance.randrange(len(value))
            if chance.random() < 0.2:
                return [*value, value[place]]
            return [*value[:place], at(value[place]), *value[place + 1 :]]
        key = chance.choice(list(value))
        match chance.choice(["inside"] * 6 + ["drop", "more", "rename"]):
            case "inside":
                return {**value, key: at(value[key])}
            case "drop":
                return {name: each for name, each in value.items() if name != key}
            case "more":
                return {**value, chance.choice(["x", "", "\ud800", "schema_version", "name"]): chance.choice(ODD)}
            case _:
                return {(name + "_" if name == key else name): each for name, each in value.items()}

    # The top level stays an object, so that decoders look further than at its type.
    while not isinstance(found := at(document), dict):
        pass
    return found


def written(document: Any, seed: int) -> bytes:
    """The document as JSON bytes, sometimes in an unusual encoding, sometimes damaged."""
    chance = random.Random(seed)
    text = json.dumps(document, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, None, 1]))
    data = text.encode(chance.choice(["utf-8", "utf-8", "utf-8", "utf-16", "utf-32-be"]), "surrogatepass")
    if chance.random() < 0.3:
        broken = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        data = bytes(broken[: chance.choice([len(broken), chance.randrange(len(broken))])])
    return data
