"""Records in clear what a member sends, and searches it in two independent ways.

`Relay` is between a member and the coordinator. TLS ends here: it has the server's certificate towards the member and
the member's key towards the coordinator, and forwards every call as bytes. `Sent` holds what the member sent: calls
with their metadata, and messages in order of arrival.

`not_allowed` parses every message as its method's request, and names each field, metadata key and call that is not on a
list. `Canaries` knows no formats: it searches everywhere for planted bytes, in every encoding.

Neither sees the layers below gRPC's messages (TLS, HTTP/2 frames, gRPC's own headers), the time of a message, or what a
field of random bytes might hide under a key. The library is responsible for the first, the second depends on how long
training takes, and the third needs a reader of the code.
"""

import base64
import itertools
import json
import math
import random
import struct
import sys
import threading
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import message_factory, unknown_fields
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from coordinator.services.credentials import server_options
from tacit.v1 import enrolment_pb2, federation_pb2
from toolkit.tls import tls_13_only

if "grpc" not in sys.modules:
    tls_13_only()

import grpc

from edge_client.identity.connection import channel_options

# A separator that no canary contains.
_BETWEEN = b"\x00|\x00"

# ---- recording ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call: its method as "Service/Method", and its metadata."""

    number: int
    method: str
    metadata: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Recorded:
    """One message from the member, as it arrived."""

    call: int
    method: str
    data: bytes


@dataclass(frozen=True)
class Sent:
    """Everything that a member sent in some period, in order."""

    calls: tuple[Call, ...] = ()
    messages: tuple[Recorded, ...] = ()

    @property
    def methods(self) -> set[str]:
        """The methods of all calls."""
        return {call.method for call in self.calls}

    def parsed(self, method: str) -> list[Any]:
        """The messages of one method, parsed as its request."""
        kind = REQUESTS[method]
        return [kind.FromString(each.data) for each in self.messages if each.method == method]

    def everything(self) -> bytes:
        """Every byte three times: in order of arrival, by call, and by field, so that a search also finds what was
        split into pieces.
        """
        by_call: dict[int, list[bytes]] = {}
        for each in self.messages:
            by_call.setdefault(each.call, []).append(each.data)
        parts = [b"".join(each.data for each in self.messages), *map(b"".join, by_call.values()), self.readable()]
        return _BETWEEN.join(parts)

    def readable(self, leave_out: Collection[str] = ()) -> bytes:
        """Metadata, and all values of each field together, except the fields at these paths."""
        by_field: dict[str, list[bytes]] = {}
        for each in self.messages:
            with suppress(KeyError, DecodeError):
                for path, value in leaves(REQUESTS[each.method].FromString(each.data), each.method):
                    by_field.setdefault(path, []).append(_as_bytes(value))
        metadata = [part for call in self.calls for key, value in call.metadata for part in (key.encode(), value)]
        return _BETWEEN.join(
            [*metadata, *(b"".join(values) for path, values in by_field.items() if path not in leave_out)]
        )

    def shape(self) -> list[tuple[str, str, int]]:
        """Method, kind and size of every message: what an observer who cannot decrypt sees."""
        return [(each.method, _kind(each), len(each.data)) for each in self.messages]


class Relay:
    """A gRPC server on localhost that forwards every call to another server, and records what the client sent."""

    def __init__(self, credentials: grpc.ServerCredentials, target: str, towards: grpc.ChannelCredentials) -> None:
        """Starts the relay.

        Args:
            credentials: the relay's credentials towards the client.
            target: the address to which calls are forwarded.
            towards: the relay's credentials towards that address.
        """
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: list[Call] = []
        self._messages: list[Recorded] = []
        self._channel = grpc.secure_channel(target, towards, options=channel_options())
        # A session occupies its thread until it ends.
        self._server = grpc.server(ThreadPoolExecutor(32), handlers=[_Everything(self)], options=server_options())
        self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self._server.start()

    def take(self) -> Sent:
        """Everything sent since the last call of `take`."""
        with self._lock:
            sent = Sent(tuple(self._calls), tuple(self._messages))
            self._calls.clear()
            self._messages.clear()
        return sent

    def close(self) -> None:
        """Stops the server and closes its channel."""
        self._server.stop(None).wait()
        self._channel.close()

    def forward(self, path: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Forwards one call of any kind: on the wire, a single message is a stream of one."""
        came = context.invocation_metadata()
        method = path.removeprefix("/tacit.v1.")
        with self._lock:
            number = next(self._numbers)
            self._calls.append(Call(number, method, tuple((key, _as_bytes(value)) for key, value in came)))
        left = context.time_remaining()
        call = self._channel.stream_stream(path)(  # type: ignore[call-arg]
            self._noted(number, method, requests),
            # The channel sends its own user agent.
            metadata=[(key, value) for key, value in came if key != "user-agent"],
            timeout=left if left is not None and left < 1e6 else None,
        )
        if not context.add_callback(call.cancel):
            call.cancel()
        try:
            yield from call
        except grpc.RpcError:
            context.set_trailing_metadata(call.trailing_metadata() or ())
            context.abort(call.code(), call.details())
        context.set_trailing_metadata(call.trailing_metadata() or ())

    def _noted(self, number: int, method: str, requests: Iterator[bytes]) -> Iterator[bytes]:
        # If the client hangs up, the call's callback cancels the relay's call.
        with suppress(grpc.RpcError):
            for data in requests:
                with self._lock:
                    self._messages.append(Recorded(number, method, data))
                yield data


class _Everything(grpc.GenericRpcHandler):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        path = details.method
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._relay.forward(path, requests, context)
        )


# ---- by allow-list --------------------------------------------------------------------------------------------------

REQUESTS: dict[str, Any] = {
    f"{service.name}/{method.name}": message_factory.GetMessageClass(method.input_type)
    for module in (federation_pb2, enrolment_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

# predicate(value, message): whether the field may have this value in this whole message.
Predicate = Callable[[Any, Any], bool]


def leaves(message: Message, path: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of every present leaf field. Paths leave out list indices."""
    for described, value in message.ListFields():
        here = f"{path}.{described.name}" if "." in path else f"{path.rpartition('/')[2]}.{described.name}"
        for each in value if described.is_repeated else (value,):
            if isinstance(each, Message):
                yield from leaves(each, here)
            else:
                yield here, each


def not_allowed(
    sent: Sent, fields: Mapping[str, Predicate], metadata: Mapping[str, Callable[[bytes], bool]]
) -> list[str]:
    """Everything that the lists do not allow, one sentence each, which begins with its place.

    Args:
        fields: predicates by path, which begins with the method.
        metadata: predicates by key.
    """
    faults = [
        f"metadata {key}: {value!r:.120}"
        for call in sent.calls
        for key, value in call.metadata
        if key not in metadata or not metadata[key](value)
    ]
    faults += [f"{call.method}: no such method" for call in sent.calls if call.method not in REQUESTS]
    for each in sent.messages:
        faults += _faults(each, fields)
    return faults


def _faults(recorded: Recorded, fields: Mapping[str, Predicate]) -> Iterator[str]:
    method = recorded.method
    if method not in REQUESTS:
        return
    try:
        message = REQUESTS[method].FromString(recorded.data)
    except DecodeError as error:
        yield f"{method}: not a message: {error}"
        return
    for path in _unknown(message, method.rpartition("/")[2]):
        yield f"{path}: an unknown field"
    # The canonical form is unique, so nothing can hide in doubled fields, their order or long numbers.
    if message.SerializeToString(deterministic=True) != recorded.data:
        yield f"{method}: not in canonical form"
    for path, value in leaves(message, method):
        if path not in fields:
            yield f"{path}: not on the list: {value!r:.120}"
        elif not fields[path](value, message):
            yield f"{path}: not what it may be: {value!r:.120}"


def _unknown(message: Message, path: str) -> Iterator[str]:
    yield from (path for _ in unknown_fields.UnknownFieldSet(message))  # type: ignore[attr-defined]
    for described, value in message.ListFields():
        for each in value if described.is_repeated else (value,):
            if isinstance(each, Message):
                yield from _unknown(each, f"{path}.{described.name}")


def _kind(recorded: Recorded) -> str:
    try:
        message = REQUESTS[recorded.method].FromString(recorded.data)
    except (KeyError, DecodeError):
        return ""
    return ",".join(described.name for described, _ in message.ListFields())


def _as_bytes(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    # The allow-list checks numbers by field. Here whole numbers become text, so that nothing is left out. Others stay
    # bytes: as text, a long public fraction contains the few digits of a rounded canary once in some hundred runs.
    if isinstance(value, float):
        return struct.pack("<d", value)
    return value.encode() if isinstance(value, str) else f"{value!r} ".encode()


# ---- by canaries ----------------------------------------------------------------------------------------------------

# The length of the shortest canary searched among mostly random bytes.
SHORTEST = 6


@dataclass
class Canaries:
    """Things that must not be found, each with the bytes to search for."""

    _names: dict[bytes, str] = field(default_factory=dict)
    # Shorter than SHORTEST: searched only where few bytes are random.
    _short: dict[bytes, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._names) + len(self._short)

    def text(self, name: str, text: str) -> None:
        """Plants a text in the character sets and escapes that programs write, each as `blob` does."""
        for way, data in _spellings(text):
            self.blob(f"{name}, {way}", data)

    def blob(self, name: str, data: bytes) -> None:
        """Plants bytes: plain, backwards, in base64 at all three alignments, base32, hexadecimal, percent codes."""
        self._add(name, data)
        self._add(f"{name}, backwards", data[::-1])
        for way, encoded in _wrapped(data):
            self._add(f"{name}, {way}", encoded)

    def integers(self, name: str, values: Sequence[int]) -> None:
        """Plants a sequence of whole numbers in fixed widths, varints and decimal lists."""
        for kind in ("i8", "i4", "i2"):
            for order in "<>":
                self._add(f"{name}, {order}{kind}", np.array(values, dtype=order + kind).tobytes())
        if max(values) < 256:
            self._add(f"{name}, bytes", bytes(values))
        self._add(f"{name}, varints", b"".join(map(_varint, values)))
        for separator in (",", ", ", " ", ";", "\n", "\t", "-", "|"):
            self._add(f"{name}, decimal", separator.join(map(str, values)).encode())

    def number(self, name: str, value: float) -> None:
        """Plants one number, not a small whole one, as float64, float32 and text of at least six characters, and
        rounded as float64.
        """
        for order in "<>":
            self._add(f"{name}, {order}f8", np.array(value, dtype=f"{order}f8").tobytes())
            self._add(f"{name}, {order}f4", np.array(value, dtype=f"{order}f4").tobytes())
        for digits in (4, 6, 8, 12, 17):
            for text in (f"{value:.{digits}g}", f"{value:.{digits}f}"):
                self._add(f"{name}, decimal", text.encode(), least=SHORTEST)
                rounded = struct.pack("<d", float(text))
                # Round numbers are mostly zero bytes, and public.
                if len(set(rounded)) >= 5:
                    self._add(f"{name}, rounded, <f8", rounded)
        self._add(f"{name}, decimal", repr(float(value)).encode(), least=SHORTEST)

    def windows(
        self, name: str, data: bytes, source: random.Random, *, count: int = 60, length: int = 16, align: int = 1
    ) -> None:
        """Plants stretches of `data` from random multiples of `align`, with at least five different bytes each."""
        places = range(0, len(data) - length + 1, align)
        tries = (source.choice(places) for _ in range(50 * count) if places)
        found = (data[at : at + length] for at in tries)
        for window in itertools.islice((each for each in found if len(set(each)) >= 5), count):
            self._add(name, window)

    def chance(self, searched: int) -> float:
        """A union bound on the probability that `searched` uniformly random bytes contain a canary of at least SHORTEST
        bytes by accident.
        """
        return math.fsum(searched * 256.0 ** -len(data) for data in self._names)

    def found(self, sent: Sent, random_fields: Collection[str]) -> list[str]:
        """The names of canaries that were sent. Short canaries are not searched in the fields at `random_fields`."""
        rest = sent.readable(random_fields)
        short = [name for data, name in self._short.items() if data in rest]
        return sorted({*self.within(sent.everything()), *short})

    def within(self, haystack: bytes) -> list[str]:
        """The names of canaries of at least SHORTEST bytes that `haystack` contains."""
        # Searching for each in turn takes minutes, so first search for all their beginnings at once.
        if len(haystack) < SHORTEST or not self._names:
            return []
        by_head: dict[int, list[bytes]] = {}
        for data in self._names:
            by_head.setdefault(int(_heads(data[:SHORTEST])[0]), []).append(data)
        wanted = np.array(sorted(by_head), dtype=np.uint64)
        heads = _heads(haystack)
        some = np.uint64(0xFFFFFF)
        begun = np.zeros(2**24, dtype=bool)
        begun[(wanted & some).astype(np.intp)] = True
        met = heads[begun[(heads & some).astype(np.intp)]]
        return [
            self._names[data] for head in np.intersect1d(met, wanted) for data in by_head[int(head)] if data in haystack
        ]

    def _add(self, name: str, data: bytes, least: int = 4) -> None:
        if len(data) >= SHORTEST:
            self._names.setdefault(data, name)
        elif len(data) >= least:
            self._short.setdefault(data, name)


def _heads(data: bytes) -> NDArray[np.uint64]:
    """The SHORTEST bytes from every place on, as one number each."""
    given = np.frombuffer(data, dtype=np.uint8)
    count = len(given) - SHORTEST + 1
    heads = np.zeros(count, dtype=np.uint64)
    for at in range(SHORTEST):
        heads |= given[at : at + count].astype(np.uint64) << np.uint64(8 * at)
    return heads


_CHARSETS = ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "latin-1", "utf-7")


def _spellings(text: str) -> Iterator[tuple[str, bytes]]:
    for charset in _CHARSETS:
        with suppress(UnicodeEncodeError):
            yield charset, text.encode(charset)
    # Tokenisers lower-case a text before they split it.
    yield "lower", text.lower().encode()
    yield "upper", text.upper().encode()
    yield "by letters backwards", text[::-1].encode()
    yield "quoted", urllib.parse.quote(text, safe="").encode()
    yield "quoted, plus", urllib.parse.quote_plus(text).encode()
    yield "JSON", json.dumps(text)[1:-1].encode()
    yield "escapes", "".join(f"\\u{ord(letter):04x}" for letter in text).encode()
    yield "escapes, upper", "".join(f"\\u{ord(letter):04X}" for letter in text).encode()
    yield "byte escapes", "".join(f"\\x{byte:02x}" for byte in text.encode()).encode()
    yield "octal escapes", "".join(f"\\{byte:03o}" for byte in text.encode()).encode()
    yield "code points", ",".join(str(ord(letter)) for letter in text).encode()


def _wrapped(data: bytes) -> Iterator[tuple[str, bytes]]:
    for before in range(3):
        # Keep only the characters that neighbouring bytes of a longer text cannot change.
        first, last = -(-8 * before // 6), (8 * (before + len(data))) // 6
        encoded = base64.b64encode(b"\x00" * before + data + b"\x00" * 3)[first:last]
        yield f"base64 at {before}", encoded
        yield f"base64url at {before}", encoded.translate(bytes.maketrans(b"+/", b"-_"))
    yield "base32", base64.b32encode(data + bytes(5))[: 8 * len(data) // 5]
    yield "hex", data.hex().encode()
    yield "HEX", data.hex().upper().encode()
    yield "percent", "".join(f"%{byte:02x}" for byte in data).encode()
    yield "Percent", "".join(f"%{byte:02X}" for byte in data).encode()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def pieces(values: Sequence[int], length: int) -> Iterable[Sequence[int]]:
    """All stretches of `length` values."""
    return (values[at : at + length] for at in range(len(values) - length + 1))
