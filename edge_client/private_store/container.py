"""The file format of one private state: a header that anyone with the file can read, then the content.

    TACITPS1                        8 bytes
    length of the header            4 bytes, big endian
    header                          `StateHeader`, canonical JSON
    content                         safetensors; if it is sealed (`edge_client.private_store.sealing`), its length in
                                    8 bytes, big endian, the safetensors, and zeros up to `padded_length`
    SHA-256 of all of that          32 bytes

Guarantees: a file that is cut or changed by accident is found and named before any of it is used.

Without its key, a sealed file reveals the fields of `StateHeader` (the job, the name of the data, round and version,
how many states were staged), the kind of its key, and the size of its content, to an eighth or 64 KiB. If the width of
the embedding is known, the size gives roughly the number of words in a vocabulary; one word more rarely shows. It
reveals no word, no value, and no array's name or shape.

Even with its key, a file does not show whether it is the newest one: an older file put in its place opens.

All functions are pure, over bytes; nothing here touches a disk.
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
# For sealed content: bytes of the length in front of it, and the smallest step that lengths are rounded up to.
_LENGTH = 8
_MIN_PADDED = 64 * 1024
# One safetensors file holds the arrays, each by its name after a prefix, and the tokenizer as bytes.
_ARRAY, _TOKENIZER = "array/", "tokenizer"
# The token that an update is staged under, such as "3-a1b2..." from round and version. It is part of a file's name.
TOKEN = r"^[a-z0-9][a-z0-9._-]{0,126}$"  # noqa: S105  a pattern, no secret

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
_Flag = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]{0,31}$")]
_Number = Annotated[int, Field(ge=0, le=2**63 - 1)]


class StateHeader(Document):
    """The header of a state's file. Digests are SHA-256, 32 bytes."""

    job: _Name
    # Digest of the job document.
    document: Digest
    federation: Digest
    # The member's own name for its data.
    data: _Name
    # The last round that trained it, and the version that this round started from.
    round: _Number
    version: Digest
    # 1, 2, 3, ... in the order in which states of this job were staged.
    counter: int = Field(ge=1, le=2**63 - 1)
    # The token that it was staged under.
    token: Annotated[str, StringConstraints(pattern=TOKEN)]
    flags: Annotated[tuple[_Flag, ...], AtMost(16)] = ()
    # Bytes of the content; of sealed content with its padding, but before sealing.
    length: _Number
    sealing: Sealing | None = None


@dataclass(frozen=True, repr=False)
class PrivateState:
    """The private state of one member in one job. Its `repr` shows no value and no word.

    Args:
        document: digest of the job document.
        round: the last round that trained it.
        version: digest of the version that this round started from.
        arrays: float32, by parameter name.
        tokenizer: bytes of the member's own tokenizer.json. None: the job's is used.
        flags: words such as "personalised".
        counter: set by the store; 0 before the state is staged.
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
    """Returns the bytes of a state's file, in pieces.

    Args:
        job: the job's name.
        state: what to write.
        federation: SHA-256 that names the federation, 32 bytes.
        data: the member's own name for its data.
        counter: number of the state, in the order of staging.
        token: the token that it is staged under.
        key: seals the content. None: it is written in clear.

    Raises:
        ValueError: an array is not float32, or the header is not valid (pydantic's ValidationError). Either is a bug of
            ours, not the member's fault.
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
    """Reads the header at the start of a file's bytes.

    Args:
        data: the file's bytes, or at least its header.
        what: the file's name, for sentences.

    Returns:
        The header, and where the content starts.

    Raises:
        StateDamaged: it is not a state, or is damaged.
        StateNewer: newer software wrote it.
    """
    if data[:_MAGIC_LENGTH] != _MAGIC:
        if data.startswith(_FAMILY):
            raise StateNewer(f"{what} was written by newer software; upgrade edge_client. The file is unchanged")
        raise StateDamaged(f"{what} is not a private state; {_RESTORE}")
    length = int.from_bytes(data[_MAGIC_LENGTH : _MAGIC_LENGTH + 4], "big")
    start = _MAGIC_LENGTH + 4 + length
    if length > StateHeader.max_bytes or len(data) < start:
        raise StateDamaged(f"{what} is damaged: its header does not end; {_RESTORE}")
    try:
        header = StateHeader.from_json(data[_MAGIC_LENGTH + 4 : start], what="its header")
    except DocumentInvalid:
        # The error's text could contain the damaged bytes, so it is not shown.
        raise StateDamaged(f"{what} is damaged: its header cannot be read; {_RESTORE}") from None
    return header, start


def check_whole(data: bytes, what: str) -> tuple[StateHeader, int]:
    """Checks the length and the SHA-256 of a whole file's bytes, and reads its header as `header_of` does.

    Raises:
        StateDamaged: it is not a state, or is damaged.
        StateNewer: newer software wrote it.
    """
    header, start = header_of(data, what)
    length = header.length if header.sealing is None else sealed_length(header.length)
    if len(data) != start + length + _DIGEST:
        raise StateDamaged(
            f"{what} is damaged: it has {len(data)} bytes and should have {start + length + _DIGEST}; {_RESTORE}"
        )
    if hashlib.sha256(memoryview(data)[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise StateDamaged(f"{what} is damaged: its SHA-256 is not the one that was written; {_RESTORE}")
    return header, start


def decode(data: bytes, what: str, key: StoreKey | None) -> tuple[StateHeader, PrivateState]:
    """Reads a state from a whole file's bytes.

    Raises:
        StateDamaged: it is not a state, or is damaged.
        StateNewer: newer software wrote it.
        StateSealed: it needs a key, or another key, or it is not sealed although a key was given.
    """
    header, start = check_whole(data, what)
    body = memoryview(data)[start:-_DIGEST]
    if header.sealing is None:
        if key is not None:
            raise StateSealed(
                f"{what} is not sealed, although a {key.kind.replace('-', ' ')} is given; seal it with `edge_client "
                "private rekey`, or give no key"
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
    """The length that `length` bytes are padded to: the next multiple of a step.

    The step is 64 KiB, or above one MiB a sixteenth of the next power of two. So there are eight lengths between a
    power of two and the next, and less than an eighth is added.
    """
    step = max(_MIN_PADDED, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step


def _padded(content: bytes) -> bytes:
    length = _LENGTH + len(content)
    return b"".join((len(content).to_bytes(_LENGTH, "big"), content, bytes(padded_length(length) - length)))


def _unpadded(padded: bytes, what: str) -> bytes:
    """Removes the padding.

    Raises:
        StateDamaged: it has another padding, although somebody with the key sealed it.
    """
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
        # The library writes memory in its order: a transposed view would come back wrong.
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
        raise StateDamaged(f"{what} is damaged: its content is not a private state; {_RESTORE}") from None
    arrays = {name.removeprefix(_ARRAY): array for name, array in sorted(tensors.items())}
    return arrays, None if tokenizer is None else tokenizer.tobytes()


_RESTORE = (
    "restore a backup with `edge_client private restore FILE`, or give the state up with `edge_client private remove "
    "JOB`"
)
