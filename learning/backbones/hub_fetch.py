"""A backbone's files from the hub, for a member: at one commit, no others, and of sizes that are bounded beforehand.

Order: the hub is asked which files the commit has and how large they are; what is needed is chosen (config.json, and
model.safetensors or else the index with the parts that it names) and refused if it is too large; only then a file is
asked for. Each is cut off at the size that was stated.

Guarantees: nothing is written but into the folder given, so not into the hub's own cache either; no code, pickle or
other form of the weights is fetched; no token of this machine's user is sent.

Assumption: the hub's answer about a commit's files fits into memory: the library reads it whole.

Leaves to others: whether the bytes are the right ones. The backbone's digest says that, which
`edge_client.downloads.backbones` checks.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from learning.backbones.checkpoint import INDEX, WEIGHTS, CheckpointInvalid, read_object
from learning.backbones.hub import what_the_hub_said

__all__ = ["MAX_SMALL_BYTES", "fetch_checkpoint"]

# Of config.json and of the index, each: real ones have kilobytes.
MAX_SMALL_BYTES = 4 * 1024**2
_CONFIG = "config.json"
_PART = re.compile(r"[A-Za-z0-9][\w.-]{0,250}\.safetensors", re.ASCII)
_PINNED = re.compile(r"([^@]+)@([0-9a-f]{40})")
_SECONDS = 30.0
_CHUNK = 1 << 20
_OK = 200


def fetch_checkpoint(name: str, into: Path, max_bytes: int, *, endpoint: str | None = None) -> None:
    """Fetches what a backbone is made of into an empty folder. In a thread: it waits for the network.

    name: owner/name@COMMIT, as a job's document has it. max_bytes: of the weights together.
    endpoint: the hub's address; None: the library's, which `HF_ENDPOINT` changes.

    Raises:
        CheckpointInvalid: no such commit, a file that is missing or too large, or the hub does not give it.
        OSError: the disk does not take it.
    """
    from huggingface_hub import hf_hub_url

    if (match := _PINNED.fullmatch(name)) is None:
        raise CheckpointInvalid(f"{name} names no commit on the hub, which is owner/name@COMMIT")
    repository, commit = match[1], match[2]
    sizes = _sizes(repository, commit, endpoint)

    def fetch(file: str, most: int) -> None:
        size = _stated(name, sizes, file, most)
        _stream(
            hf_hub_url(repository, file, revision=commit, endpoint=endpoint), f"{file} of {name}", into / file, size
        )

    if WEIGHTS in sizes:
        parts: tuple[str, ...] = (WEIGHTS,)
    elif INDEX in sizes:
        fetch(INDEX, MAX_SMALL_BYTES)
        parts = _parts(name, into)
    else:
        raise CheckpointInvalid(f"{name} holds no {WEIGHTS} on the hub, and no {INDEX}")
    total = sum(_stated(name, sizes, part, max_bytes) for part in parts)
    if total > max_bytes:
        raise CheckpointInvalid(_too_large(name, "weights", total, max_bytes))
    fetch(_CONFIG, MAX_SMALL_BYTES)
    for part in parts:
        fetch(part, max_bytes)


def _sizes(repository: str, commit: str, endpoint: str | None) -> Mapping[str, int | None]:
    """The files of a commit and their sizes in bytes. Raises: CheckpointInvalid."""
    from huggingface_hub import HfApi

    try:
        # A member reads what everybody may read.
        told = HfApi(endpoint, token=False).model_info(
            repository, revision=commit, files_metadata=True, timeout=_SECONDS
        )
    except Exception as error:  # Of the network, the hub, the name: the library has no common class.
        raise CheckpointInvalid(f"the hub did not tell of {repository}@{commit}: {what_the_hub_said(error)}") from error
    if told.sha != commit:
        raise CheckpointInvalid(f"the hub tells of commit {told.sha} in place of {repository}@{commit}")
    return {each.rfilename: each.size for each in told.siblings or ()}


def _stated(name: str, sizes: Mapping[str, int | None], file: str, most: int) -> int:
    if file not in sizes:
        raise CheckpointInvalid(f"{name} holds no {file} on the hub")
    size = sizes[file]
    if size is None or size < 0:
        raise CheckpointInvalid(f"the hub does not say how large {file} of {name} is")
    if size > most:
        raise CheckpointInvalid(_too_large(name, file, size, most))
    return size


def _too_large(name: str, what: str, size: int, most: int) -> str:
    return f"{name}: {size:,} bytes of {what} on the hub, and at most {most:,} are taken"


def _parts(name: str, folder: Path) -> tuple[str, ...]:
    """The parts that the index names. Raises: CheckpointInvalid."""
    try:
        parts = tuple(sorted({str(part) for part in (read_object(folder / INDEX) or {})["weight_map"].values()}))
    except (KeyError, AttributeError):
        raise CheckpointInvalid(f"{name}: {INDEX} on the hub is no index of weights") from None
    for part in parts:
        if _PART.fullmatch(part) is None:
            raise CheckpointInvalid(f"{name}: {INDEX} on the hub names {part[:80]!r}, which is no part of weights")
    return parts


def _stream(url: str, what: str, into: Path, size: int) -> None:
    """One file of exactly `size` bytes; nothing beyond them is kept. Raises: CheckpointInvalid, OSError: the disk."""
    from huggingface_hub import get_session

    # Bytes as they are stored: what a server compresses could unfold to any size.
    headers = {"accept-encoding": "identity"}
    arrived = 0
    with into.open("wb") as written:
        try:
            with get_session().stream("GET", url, headers=headers, timeout=_SECONDS) as response:
                if response.status_code != _OK:
                    raise CheckpointInvalid(f"the hub did not give {what}: HTTP status {response.status_code}")
                for chunk in response.iter_raw(_CHUNK):
                    arrived += len(chunk)
                    if arrived > size:
                        break
                    written.write(chunk)
        except (OSError, CheckpointInvalid):
            raise
        except Exception as error:  # Of the network: the library has no common class.
            raise CheckpointInvalid(f"the hub did not give {what}: {what_the_hub_said(error)}") from error
    if arrived != size:
        more = "more than" if arrived > size else f"{arrived:,} of"
        raise CheckpointInvalid(f"the hub sent {more} the {size:,} bytes that {what} was said to have")
