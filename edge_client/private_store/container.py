"""One private state as one file: a header that anybody with the file may read, and the content behind it.

    TACITPS1                        8 bytes
    length of the header            4 bytes, big endian
    header                          `StateHeader`, canonical JSON
    content                         safetensors; where it is sealed (`edge_client.private_store.sealing`), its length in
                                    8 bytes, big endian, the safetensors, and zeros up to `padded_length`
    SHA-256 of all of that          32 bytes

Guarantees: a file that is cut or changed by accident is found and named before anything of it is used.

What a sealed file tells without its key: what stands in `StateHeader` (the job, the name of the data, round and
version, how many states were staged), which kind of key it has, and how large its content is, to an eighth or 64 KiB.
Where the width of the embedding is known, that is about how many words a vocabulary has; one more shows seldom. It
tells no word, no value, and no array's name or shape.

What it does not tell, with its key either: whether it is the newest one. An older file put in its place opens.

Only pure functions over bytes; nothing here touches a disk.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, StringConstraints

from edge_client.private_store.errors import StateDamaged, StateNewer, StateSealed
from edge_client.private_store.sealing import NEEDED, Sealing, StoreKey, sealed_length
from tacit.documents import AtMost, Digest, Document, DocumentInvalid

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "TOKEN",
    "PrivateState",
    "StateHeader",
    "check_whole",
    "decode",
    "encode",
    "header_of",
    "padded_length",
]

_MAGIC, _MAGIC_LENGTH = b"TACITPS1", 8
_FAMILY = b"TACITPS"
_DIGEST = 32
# Of sealed content: bytes of its own length in front, and the least that lengths are rounded to.
_LENGTH = 8
_MIN_PADDED = 64 * 1024
# Arrays and tokenizer lie in one safetensors file: the one by name behind a prefix, the other beside them as bytes.
_ARRAY, _TOKENIZER = "array/", "tokenizer"
# What an update is staged under, such as "3-a1b2..." of round and version; it is part of a file's name.
TOKEN = r"^[a-z0-9][a-z0-9._-]{0,126}$"  # noqa: S105  a pattern, no secret

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
_Flag = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]{0,31}$")]
_Number = Annotated[int, Field(ge=0, le=2**63 - 1)]


class StateHeader(Document):
    """What a file says of itself. Digests are SHA-256, 32 bytes."""

    job: _Name
    # Of the job document.
    document: Digest
    federation: Digest
    # The member's own name for its data.
    data: _Name
    # Where it was trained last: a round, and the version the round started from.
    round: _Number
    version: Digest
    # 1, 2, 3, ... in the order in which states of this job were staged.
    counter: int = Field(ge=1, le=2**63 - 1)
    # What it was staged under.
    token: Annotated[str, StringConstraints(pattern=TOKEN)]
    flags: Annotated[tuple[_Flag, ...], AtMost(16)] = ()
    # Of the content; where it is sealed, before that and with its padding.
    length: _Number
    sealing: Sealing | None = None


@dataclass(frozen=True, repr=False)
class PrivateState:
    """What one job leaves with one member. Its `repr` shows no value and no word.

    document: digest of the job document; round, version: where it was trained last (version: digest of what the round
    started from). arrays: float32, by parameter name. tokenizer: bytes of the member's own tokenizer.json, None where
    the job's is used. flags: words such as "personalised". counter: set by the store; 0 before it was staged.
    """

    document: bytes
    round: int
    version: bytes
    arrays: Mapping[str, "NDArray[np.float32]"]
    tokenizer: bytes | None = None
    flags: frozenset[str] = field(default_factory=frozenset)
    counter: int = 0

    def __repr__(self) -> str:
        return f"PrivateState(round={self.round}, {len(self.arrays)} arrays, counter={self.counter})"


def encode(
    job: str, state: PrivateState, *, federation: bytes, data: str, counter: int, token: str, key: StoreKey | None
) -> Iterator[bytes]:
    """The file's bytes, in pieces.

    Raises:
        ValueError: an array that is not float32, or a header that cannot be (pydantic's ValidationError): our own
            fault, not the member's.
    """
    content = _content(state) if key is None else _padded(_content(state))
    header = StateHeader(
        job=job,
        document=state.document,
        federation=federation,
        data=data,
        round=state.round,
        version=state.version,
        counter=counter,
        token=token,
        flags=tuple(sorted(state.flags)),
        length=len(content),
        sealing=None if key is None else key.new_sealing(),
    )
    return _framed(header, content, key)


def _framed(header: StateHeader, content: bytes, key: StoreKey | None) -> Iterator[bytes]:
    canonical = header.canonical()
    prefix = _MAGIC + len(canonical).to_bytes(4, "big") + canonical
    digest = hashlib.sha256(prefix)
    yield prefix
    sealed = (content,) if key is None or header.sealing is None else key.seal(header.sealing, prefix, content)
    for piece in sealed:
        digest.update(piece)
        yield piece
    yield digest.digest()


def header_of(data: bytes, what: str) -> tuple[StateHeader, int]:
    """The header at the beginning of a file's bytes, and where the content starts.

    what: the file's name, for sentences.

    Raises:
        StateDamaged, StateNewer.
    """
    if data[:_MAGIC_LENGTH] != _MAGIC:
        if data.startswith(_FAMILY):
            raise StateNewer(f"{what} was written by newer software; upgrade edge_client. The file was left as it is")
        raise StateDamaged(f"{what} is not a private state; {_RESTORE}")
    length = int.from_bytes(data[_MAGIC_LENGTH : _MAGIC_LENGTH + 4], "big")
    start = _MAGIC_LENGTH + 4 + length
    if length > StateHeader.max_bytes or len(data) < start:
        raise StateDamaged(f"{what} is damaged: its header does not end; {_RESTORE}")
    try:
        header = StateHeader.from_json(data[_MAGIC_LENGTH + 4 : start], what="its header")
    except DocumentInvalid:
        # The reason could hold whatever the bytes now are.
        raise StateDamaged(f"{what} is damaged: its header cannot be read; {_RESTORE}") from None
    return header, start


def check_whole(data: bytes, what: str) -> tuple[StateHeader, int]:
    """The same for all of a file's bytes, once their length and their SHA-256 are right.

    Raises:
        StateDamaged, StateNewer.
    """
    header, start = header_of(data, what)
    length = header.length if header.sealing is None else sealed_length(header.length)
    if len(data) != start + length + _DIGEST:
        raise StateDamaged(f"{what} is damaged: {len(data)} bytes of {start + length + _DIGEST}; {_RESTORE}")
    if hashlib.sha256(memoryview(data)[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise StateDamaged(f"{what} is damaged: its SHA-256 is another than was written; {_RESTORE}")
    return header, start


def decode(data: bytes, what: str, key: StoreKey | None) -> tuple[StateHeader, PrivateState]:
    """A state from all of a file's bytes.

    Raises:
        StateDamaged, StateNewer.
        StateSealed: it needs a key, another one, or it is not sealed although a key was given.
    """
    header, start = check_whole(data, what)
    body = memoryview(data)[start:-_DIGEST]
    if header.sealing is None:
        if key is not None:
            raise StateSealed(
                f"{what} is not sealed, though a {key.kind.replace('-', ' ')} is given: seal it with `edge_client "
                "private rekey`, or leave the key away"
            )
        content = bytes(body)
    elif key is None:
        raise StateSealed(f"{what}: {NEEDED[header.sealing.kind]}")
    else:
        try:
            content = _unpadded(key.open(header.sealing, data[:start], body, header.length), what)
        except StateSealed as error:
            raise StateSealed(f"{what}: {error}") from None
    arrays, tokenizer = _parts(content, what)
    return header, PrivateState(
        document=header.document,
        round=header.round,
        version=header.version,
        arrays=arrays,
        tokenizer=tokenizer,
        flags=frozenset(header.flags),
        counter=header.counter,
    )


def padded_length(length: int) -> int:
    """What `length` bytes are padded to: the next multiple of 64 KiB, above a MiB of a sixteenth of the next power of
    two. So it is one of eight lengths between a power of two and the next, and less than an eighth is added.
    """
    step = max(_MIN_PADDED, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step


def _padded(content: bytes) -> bytes:
    length = _LENGTH + len(content)
    return b"".join((len(content).to_bytes(_LENGTH, "big"), content, bytes(padded_length(length) - length)))


def _unpadded(padded: bytes, what: str) -> bytes:
    """Raises: StateDamaged: it was not padded here; whoever sealed it had the key."""
    end = _LENGTH + int.from_bytes(padded[:_LENGTH], "big")
    if len(padded) < _LENGTH or end > len(padded):
        raise StateDamaged(f"{what} is damaged: its content is shorter than it says; {_RESTORE}")
    return padded[_LENGTH:end]


def _content(state: PrivateState) -> bytes:
    import numpy as np
    from safetensors.numpy import save

    tensors: dict[str, NDArray[np.generic]] = {}
    for name, array in state.arrays.items():
        if array.dtype != np.float32:
            raise ValueError(f"array {name} is {array.dtype}; private state is float32")
        # The library writes memory as it lies there: a transposed view would come back wrong.
        tensors[_ARRAY + name] = np.asarray(array, order="C")
    if state.tokenizer is not None:
        tensors[_TOKENIZER] = np.frombuffer(state.tokenizer, dtype=np.uint8)
    return save(tensors)


def _parts(content: bytes, what: str) -> tuple[dict[str, "NDArray[np.float32]"], bytes | None]:
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
        tokenizer = tensors.pop(_TOKENIZER, None)
        if any(not name.startswith(_ARRAY) or array.dtype != np.float32 for name, array in tensors.items()):
            raise ValueError("an array of another kind")
    except (SafetensorError, KeyError, ValueError):
        raise StateDamaged(f"{what} is damaged: its content is no private state; {_RESTORE}") from None
    arrays = {name.removeprefix(_ARRAY): array for name, array in sorted(tensors.items())}
    return arrays, None if tokenizer is None else tokenizer.tobytes()


_RESTORE = (
    "put back a backup with `edge_client private restore FILE`, or give it up with `edge_client private remove JOB`"
)
