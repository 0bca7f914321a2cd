"""Fetches a backbone's files from the hub for a member: at one commit, only the needed ones, within size limits.

Order: it asks the hub for the commit's files and their sizes, chooses what is needed (config.json, and
model.safetensors or else the index with the parts that it names), and refuses what is too large. Only then it requests
files. Each is cut off at its stated size.

Guarantees: nothing is written outside the given folder, so not into the hub's own cache either. No code, pickle or
other form of the weights is fetched. No token of this machine's user is sent.

Assumption: the hub's answer about a commit's files fits into memory, since the library reads it whole.

Leaves to others: whether the bytes are the right ones. `edge_client.downloads.backbones` checks the backbone's digest.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from learning.backbones.checkpoint import INDEX, WEIGHTS, CheckpointInvalid, read_object
from learning.backbones.hub import what_the_hub_said

__all__ = ["MAX_SMALL_BYTES", "fetch_checkpoint"]

# The most bytes of config.json and of the index, each. Real ones have kilobytes.
MAX_SMALL_BYTES = 4 * 1024**2
_CONFIG = "config.json"
_PART = re.compile(r"[A-Za-z0-9][\w.-]{0,250}\.safetensors", re.ASCII)
_PINNED = re.compile(r"([^@]+)@([0-9a-f]{40})")
_SECONDS = 30.0
_CHUNK = 1 << 20
_OK = 200


def fetch_checkpoint(name: str, into: Path, max_bytes: int, *, endpoint: str | None = None) -> None:
    """Fetches the files of a backbone into an empty folder. It waits for the network, so run it in a thread.

    Args:
        name: owner/name@COMMIT, as in a job's document.
        into: The folder.
        max_bytes: The most bytes of all weights together.
        endpoint: The hub's address; None is the library's, which `HF_ENDPOINT` changes.

    Raises:
        CheckpointInvalid: The commit does not exist, a file is missing or too large, or the hub does not provide it.
        OSError: The disk refused a write.
    """
    from huggingface_hub import hf_hub_url

    if (match := _PINNED.fullmatch(name)) is None:
        raise CheckpointInvalid(f"{name} names no commit on the hub; write owner/name@COMMIT")
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
        raise CheckpointInvalid(f"{name} has neither {WEIGHTS} nor {INDEX} on the hub; choose another backbone")
    total = sum(_stated(name, sizes, part, max_bytes) for part in parts)
    if total > max_bytes:
        raise CheckpointInvalid(_too_large(name, "weights", total, max_bytes))
    fetch(_CONFIG, MAX_SMALL_BYTES)
    for part in parts:
        fetch(part, max_bytes)


def _sizes(repository: str, commit: str, endpoint: str | None) -> Mapping[str, int | None]:
    """The files of a commit and their sizes in bytes. Raises CheckpointInvalid."""
    from huggingface_hub import HfApi

    try:
        # A member reads only public repositories.
        told = HfApi(endpoint, token=False).model_info(
            repository, revision=commit, files_metadata=True, timeout=_SECONDS
        )
    except Exception as error:  # From network, hub or name: the library has no common class.
        raise CheckpointInvalid(
            f"the hub did not list {repository}@{commit}: {what_the_hub_said(error)}; check the name and the connection"
        ) from error
    if told.sha != commit:
        raise CheckpointInvalid(f"the hub answered for commit {told.sha} in place of {repository}@{commit}; try again")
    return {each.rfilename: each.size for each in told.siblings or ()}


def _stated(name: str, sizes: Mapping[str, int | None], file: str, most: int) -> int:
    if file not in sizes:
        raise CheckpointInvalid(f"{name} has no {file} on the hub; choose another backbone")
    size = sizes[file]
    if size is None or size < 0:
        raise CheckpointInvalid(f"the hub does not state the size of {file} of {name}; try again later")
    if size > most:
        raise CheckpointInvalid(_too_large(name, file, size, most))
    return size


def _too_large(name: str, what: str, size: int, most: int) -> str:
    return f"{name}: the hub has {size:,} bytes of {what}, and the limit is {most:,}; choose a smaller backbone"


def _parts(name: str, folder: Path) -> tuple[str, ...]:
    """The parts that the index names. Raises CheckpointInvalid."""
    try:
        parts = tuple(sorted({str(part) for part in (read_object(folder / INDEX) or {})["weight_map"].values()}))
    except (KeyError, AttributeError):
        raise CheckpointInvalid(
            f"{name}: {INDEX} on the hub is not an index of weights; choose another backbone"
        ) from None
    for part in parts:
        if _PART.fullmatch(part) is None:
            raise CheckpointInvalid(
                f"{name}: {INDEX} on the hub names {part[:80]!r}, which is not a file of weights; choose another "
                "backbone"
            )
    return parts


def _stream(url: str, what: str, into: Path, size: int) -> None:
    """Fetches one file of exactly `size` bytes and keeps nothing beyond. Raises CheckpointInvalid, or OSError."""
    from huggingface_hub import get_session

    # Uncompressed, since compressed bytes could unfold to any size.
    headers = {"accept-encoding": "identity"}
    arrived = 0
    with into.open("wb") as written:
        try:
            with get_session().stream("GET", url, headers=headers, timeout=_SECONDS) as response:
                if response.status_code != _OK:
                    raise CheckpointInvalid(
                        f"the hub did not provide {what}: HTTP status {response.status_code}; try again later"
                    )
                for chunk in response.iter_raw(_CHUNK):
                    arrived += len(chunk)
                    if arrived > size:
                        break
                    written.write(chunk)
        except (OSError, CheckpointInvalid):
            raise
        except Exception as error:  # From the network: the library has no common class.
            raise CheckpointInvalid(
                f"the hub did not provide {what}: {what_the_hub_said(error)}; try again later"
            ) from error
    if arrived != size:
        more = "more than" if arrived > size else f"{arrived:,} of"
        raise CheckpointInvalid(f"the hub sent {more} the {size:,} bytes that it stated for {what}; try again later")
