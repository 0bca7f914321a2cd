"""What a member sends, written down in clear, and two independent ways to look at it.

`Relay` stands between a member and the coordinator: TLS ends here, with the server's own certificate towards the member
and the member's own key towards the coordinator, and every call goes through as bytes. What the member sent is in
`Sent`: calls with their metadata, messages in the order in which they came.

`not_allowed` parses every message as what its method takes and names each field, metadata key and call that is not on a
list. `Canaries` knows nothing of any format: it looks for planted bytes, in every encoding, anywhere.

Neither sees what lies below gRPC's messages (TLS, HTTP/2 frames, gRPC's own headers), when something was sent, or what
a field of random bytes might hide under a key. The first is the library's, the second depends on how long training
takes, and the third is for a reader of the code.
"""

import base64
import itertools
import json
import math
import random
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

# Stands in nothing that is looked for.
_BETWEEN = b"\x00|\x00"

# ---- recording ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call: its method as "Service/Method", and the metadata that came with it."""

    number: int
    method: str
    metadata: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Recorded:
    """One message of the member, as it came."""

    call: int
    method: str
    data: bytes


@dataclass(frozen=True)
class Sent:
    """All that a member sent in some time, in order."""

    calls: tuple[Call, ...] = ()
    messages: tuple[Recorded, ...] = ()

    @property
    def methods(self) -> set[str]:
        """Of all calls."""
        return {call.method for call in self.calls}

    def parsed(self, method: str) -> list[Any]:
        """The messages of one method, as what it takes."""
        kind = REQUESTS[method]
        return [kind.FromString(each.data) for each in self.messages if each.method == method]

    def everything(self) -> bytes:
        """Every byte three times over: as the messages came, by call, and by field, so that nothing that was cut into
        pieces is missed.
        """
        by_call: dict[int, list[bytes]] = {}
        for each in self.messages:
            by_call.setdefault(each.call, []).append(each.data)
        parts = [b"".join(each.data for each in self.messages), *map(b"".join, by_call.values()), self.readable()]
        return _BETWEEN.join(parts)

    def readable(self, leave_out: Collection[str] = ()) -> bytes:
        """Metadata, and all values of each field together; without the fields of these paths."""
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
        """Method, kind and size of every message: what somebody sees who cannot read."""
        return [(each.method, _kind(each), len(each.data)) for each in self.messages]


class Relay:
    """A gRPC server on localhost that hands every call on to another one, and keeps what came from the client."""

    def __init__(self, credentials: grpc.ServerCredentials, target: str, towards: grpc.ChannelCredentials) -> None:
        """credentials: what the client is shown. target, towards: where calls go on to, and as whom."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: list[Call] = []
        self._messages: list[Recorded] = []
        self._channel = grpc.secure_channel(target, towards, options=channel_options())
        # A session keeps its thread until it ends.
        self._server = grpc.server(ThreadPoolExecutor(32), handlers=[_Everything(self)], options=server_options())
        self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self._server.start()

    def take(self) -> Sent:
        """What was sent since it was asked last."""
        with self._lock:
            sent = Sent(tuple(self._calls), tuple(self._messages))
            self._calls.clear()
            self._messages.clear()
        return sent

    def close(self) -> None:
        """No more calls."""
        self._server.stop(None).wait()
        self._channel.close()

    def forward(self, path: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One call, whatever its kind: on the wire a single message is a stream of one."""
        came = context.invocation_metadata()
        method = path.removeprefix("/tacit.v1.")
        with self._lock:
            number = next(self._numbers)
            self._calls.append(Call(number, method, tuple((key, _as_bytes(value)) for key, value in came)))
        left = context.time_remaining()
        call = self._channel.stream_stream(path)(
            self._noted(number, method, requests),
            # The channel names its own agent.
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
        # The client hung up: so does the relay, by the call's own callback.
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

# predicate(value, message): whether this value may stand there, in this message (the whole one).
Predicate = Callable[[Any, Any], bool]


def leaves(message: Message, path: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of every field that is there, down to the last; list indices do not count in a path."""
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
    """What is not on the lists: a sentence for each, which begins with its place. fields: by path, the method first;
    metadata: by key.
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
    # One content has one spelling: nothing can hide in doubled fields, their order or long numbers.
    if message.SerializeToString(deterministic=True) != recorded.data:
        yield f"{method}: not in canonical form"
    for path, value in leaves(message, method):
        if path not in fields:
            yield f"{path}: not on the list: {value!r:.120}"
        elif not fields[path](value, message):
            yield f"{path}: not what it may be: {value!r:.120}"


def _unknown(message: Message, path: str) -> Iterator[str]:
    yield from (path for _ in unknown_fields.UnknownFieldSet(message))
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
    # Numbers have a field each on the list; here they are text, so that nothing is left out.
    return value.encode() if isinstance(value, str) else f"{value!r} ".encode()


# ---- by canaries ----------------------------------------------------------------------------------------------------

# The shortest thing that is looked for among bytes of which most are random.
SHORTEST = 6


@dataclass
class Canaries:
    """Things that must not be found, by the bytes they would be found as."""

    _names: dict[bytes, str] = field(default_factory=dict)
    # Of less than SHORTEST bytes: looked for only where few bytes are random.
    _short: dict[bytes, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._names) + len(self._short)

    def text(self, name: str, text: str) -> None:
        """In the character sets and the escapes that programs write text in, each as `blob`."""
        for way, data in _spellings(text):
            self.blob(f"{name}, {way}", data)

    def blob(self, name: str, data: bytes) -> None:
        """As it is and backwards; in base64 at all three alignments, base32, hexadecimal, percent signs."""
        self._add(name, data)
        self._add(f"{name}, backwards", data[::-1])
        for way, encoded in _wrapped(data):
            self._add(f"{name}, {way}", encoded)

    def integers(self, name: str, values: Sequence[int]) -> None:
        """A sequence of whole numbers: fixed widths, varints, decimal lists."""
        for kind in ("i8", "i4", "i2"):
            for order in "<>":
                self._add(f"{name}, {order}{kind}", np.array(values, dtype=order + kind).tobytes())
        if max(values) < 256:
            self._add(f"{name}, bytes", bytes(values))
        self._add(f"{name}, varints", b"".join(map(_varint, values)))
        for separator in (",", ", ", " ", ";", "\n", "\t", "-", "|"):
            self._add(f"{name}, decimal", separator.join(map(str, values)).encode())

    def number(self, name: str, value: float) -> None:
        """One number that is not a small whole one: float64, float32, and as text with at least six characters."""
        for order in "<>":
            self._add(f"{name}, {order}f8", np.array(value, dtype=f"{order}f8").tobytes())
            self._add(f"{name}, {order}f4", np.array(value, dtype=f"{order}f4").tobytes())
        for digits in (4, 6, 8, 12, 17):
            self._add(f"{name}, decimal", f"{value:.{digits}g}".encode(), least=SHORTEST)
            self._add(f"{name}, decimal", f"{value:.{digits}f}".encode(), least=SHORTEST)
        self._add(f"{name}, decimal", repr(float(value)).encode(), least=SHORTEST)

    def windows(
        self, name: str, data: bytes, source: random.Random, *, count: int = 60, length: int = 16, align: int = 1
    ) -> None:
        """Stretches of `data` at random places (of `align` bytes) that are no mere run of equal bytes."""
        places = range(0, len(data) - length + 1, align)
        tries = (source.choice(places) for _ in range(50 * count) if places)
        found = (data[at : at + length] for at in tries)
        for window in itertools.islice((each for each in found if len(set(each)) >= 5), count):
            self._add(name, window)

    def chance(self, searched: int) -> float:
        """A bound on the probability that one of them is in so many uniformly random bytes by accident (union bound);
        of the long ones.
        """
        return math.fsum(searched * 256.0 ** -len(data) for data in self._names)

    def found(self, sent: Sent, random_fields: Collection[str]) -> list[str]:
        """The names of those that were sent. random_fields: where short ones are not looked for, by path."""
        rest = sent.readable(random_fields)
        short = [name for data, name in self._short.items() if data in rest]
        return sorted({*self.within(sent.everything()), *short})

    def within(self, haystack: bytes) -> list[str]:
        """The names of those of at least SHORTEST bytes that stand anywhere in `haystack`."""
        # Looking for each in turn takes minutes: first for what they begin with, all at once.
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
    """The first SHORTEST bytes at every place, as one number each."""
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
    # Tokenisers lower a text before they cut it up.
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
        # What the neighbours in a longer text cannot change: whole groups less the characters they share.
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
    """All stretches of so many values."""
    return (values[at : at + length] for at in range(len(values) - length + 1))
