"""Where a member has a job's backbone from: its cache, its own folders, the hub, the coordinator, in this order.

Guarantees: what `open` hands over has the digest that the job's document names, whoever gave it; a folder or a hub's
files with another digest are passed over, with both digests in this machine's log. From the coordinator nothing larger
than the config's canonical file is fetched. From the hub at most twice that is, in weights (they may hold a pooler and
copies of tied tables); sizes are known before a file is asked for, and all of it goes into the cache and within its
bound. What was fetched lies in the cache once, for all jobs, and is pinned while one of them has it open, so that the
next job on the same backbone transfers nothing.

The hub is asked only where the member's policy names it in `backbones`, which is not the default, and the document
names a commit there: whoever asks it says that it takes part in something with this model.

Errors name folders of this machine: they are for its own log, not for the coordinator.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog

from edge_client.downloads.cache import BlobCache, Pin
from learning.backbones.checkpoint import CheckpointInvalid
from learning.backbones.hub_fetch import MAX_SMALL_BYTES, fetch_checkpoint
from learning.backbones.layout import HEAD_FLAGS, BackboneInvalid, checked_config, layout_of
from learning.backbones.stored import StoredBackbone, digest_of, folder_config, read_backbone, write_backbone
from tacit.blobs import BlobDamaged, BlobNotThere
from tacit.prompt import SOURCES, PromptedModel, Source

__all__ = ["SOURCES", "BackboneMissing", "Backbones", "Source", "Wanted", "named_folders"]

# fetch(digest, into, limit): by digest, resumable, verified, no more than `limit` bytes.
Fetch = Callable[[bytes, Path, int], Awaitable[None]]

T = TypeVar("T")

# Weights on the hub may hold more tensors than the canonical file, and none need be twice as wide as its float32.
_HUB_TIMES = 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

log = structlog.get_logger("edge_client")


class BackboneMissing(LookupError):
    """No source has the job's backbone. The text says of each why not, and what to do; it names folders."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The backbone of a job: digest, 32 bytes; config, checked; the name on the hub that the document hints at."""

    digest: bytes
    config: Mapping[str, Any]
    hub: str | None = None

    @classmethod
    def of(cls, model: PromptedModel) -> Self:
        """What this job's members train on. Raises: BackboneInvalid: a config that is none, or no bundle's model."""
        if model.backbone is None or model.config is None:
            raise BackboneInvalid("model.backbone: the model has a base and no digest yet; make a job bundle of it")
        return cls(model.backbone, checked_config(model.config), model.hub)

    @property
    def size(self) -> int:
        """Of the canonical file, in bytes."""
        return layout_of(self.config).size


def named_folders(given: Sequence[Path], environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Where the member says that backbones lie. given: from `--backbone`. In the environment paths are separated as in
    PATH.
    """
    more = [Path(each) for each in environment.get("TACIT_BACKBONES", "").split(os.pathsep) if each]
    return tuple(dict.fromkeys(path.expanduser() for path in (*given, *more)))


class Backbones:
    """Backbones of all jobs of a process, each open once.

    folders: checkpoints as transformers saves them, or canonical files. allowed: the policy's `backbones`. hub: fetches
    the files of a name on the hub into a folder, no more than so many bytes of weights.
    """

    def __init__(
        self,
        cache: BlobCache,
        *,
        folders: Sequence[Path] = (),
        allowed: Collection[Source] = SOURCES,
        hub: Callable[[str, Path, int], None] = fetch_checkpoint,
    ) -> None:
        self._cache = cache
        self._folders = tuple(folders)
        self._allowed = frozenset(allowed)
        self._hub = hub
        self._open: dict[bytes, tuple[StoredBackbone, Pin]] = {}
        self._locks: dict[bytes, asyncio.Lock] = {}
        # What a place said of a backbone that it does not have: reading a gigabyte again would not change it.
        self._differs: dict[tuple[str, bytes], str] = {}

    async def open(self, wanted: Wanted, fetch: Fetch) -> StoredBackbone:
        """The job's backbone, read-only and shared by all who ask for it in this process.

        fetch: from the coordinator, as long as it takes; what it raises goes through, but that the blob is not there.

        Raises:
            BackboneMissing: no source has it.
            BackboneInvalid: its bytes are not what the job's config says.
            OSError: the disk does not take it.
        """
        async with self._locks.setdefault(wanted.digest, asyncio.Lock()):
            if (found := self._open.get(wanted.digest)) is not None:
                return found[0]
            pin = self._cache.pin(wanted.digest)
            try:
                path = await self._obtain(wanted, fetch)
                backbone = await asyncio.to_thread(read_backbone, path, wanted.config)
            except BaseException:
                pin.release()
                raise
            self._open[wanted.digest] = backbone, pin
            return backbone

    def release(self, digest: bytes) -> None:
        """The job is over, and the file may go when room is needed. Who still trains on it keeps its memory."""
        if (found := self._open.pop(digest, None)) is not None:
            found[1].release()

    async def _obtain(self, wanted: Wanted, fetch: Fetch) -> Path:
        path = self._cache.path(wanted.digest)
        if await asyncio.to_thread(_is, path, wanted.digest):
            return path
        said = []
        for source in SOURCES:
            if source not in self._allowed:
                said.append(f"{source}: this member's policy does not name it in `backbones`")
                continue
            match source:
                case "disk":
                    refusals = await self._from_disk(wanted, path)
                case "hub":
                    refusals = await self._from_hub(wanted, path)
                case "coordinator":
                    refusals = await self._from_coordinator(wanted, path, fetch)
            if not refusals:
                log.info("backbone_found", source=source, backbone=wanted.digest.hex(), bytes=wanted.size)
                return path
            said += [f"{source}: {each}" for each in refusals]
        raise BackboneMissing(
            f"the job's backbone {wanted.digest.hex()} is nowhere to be had; {'; '.join(said)}. Save the model that "
            "the operator took into a folder and name it with --backbone, or let the policy take it from the "
            "coordinator"
        )

    async def _from_disk(self, wanted: Wanted, path: Path) -> list[str]:
        """Nothing once it lies at `path`; else what each place said."""
        said = [] if self._folders else ["no folder was named (--backbone, TACIT_BACKBONES)"]
        for folder in self._folders:
            refused = await self._judged(str(folder), partial(_take, folder, wanted, path), wanted)
            if refused is None:
                return []
            said.append(refused)
        return said

    async def _from_hub(self, wanted: Wanted, path: Path) -> list[str]:
        if (name := wanted.hub) is None:
            return ["the job names none there"]
        # The canonical file is made beside them.
        room = self._cache.max_bytes - wanted.size - 2 * MAX_SMALL_BYTES
        most = min(_HUB_TIMES * wanted.size, room)
        if most < wanted.size // 2:
            return [f"{name} and the {wanted.size:,} bytes made of it do not fit into the cache of this member"]

        def take() -> str | None:
            with self._cache.room(wanted.digest, most + wanted.size + 2 * MAX_SMALL_BYTES) as folder:
                self._hub(name, folder, most)
                return _take(folder, wanted, path)

        refused = await self._judged(f"{name} on the hub", take, wanted)
        return [] if refused is None else [refused]

    async def _from_coordinator(self, wanted: Wanted, path: Path, fetch: Fetch) -> list[str]:
        try:
            await self._with_room(wanted, lambda: fetch(wanted.digest, path, wanted.size))
        except (BlobNotThere, BlobDamaged) as error:
            return [str(error)]
        return []

    async def _judged(self, where: str, take: Callable[[], str | None], wanted: Wanted) -> str | None:
        """What `take` does in a thread, and what it says of a place that does not have the backbone: once for each."""
        if (known := self._differs.get((where, wanted.digest))) is not None:
            return known
        try:
            refused = await self._with_room(wanted, lambda: asyncio.to_thread(take))
        except (BackboneInvalid, CheckpointInvalid) as error:
            # It may be there the next time.
            return str(error)
        if refused is None:
            return None
        sentence = f"{where} {refused}"
        log.warning("backbone_differs", where=where, wanted=wanted.digest.hex(), why=refused)
        self._differs[where, wanted.digest] = sentence
        return sentence

    async def _with_room(self, wanted: Wanted, act: Callable[[], Awaitable[T]]) -> T:
        """Old versions are the first to go when a disk is full."""
        try:
            return await act()
        except OSError as error:
            if error.errno not in _NO_SPACE or not await asyncio.to_thread(self._cache.clear, wanted.digest):
                raise
            log.warning("cache_cleared", why=error.strerror)
            return await act()


def _is(path: Path, digest: bytes) -> bool:
    """Whether the file of that digest lies there; one that has been damaged goes."""
    try:
        if digest_of(path) == digest:
            return True
    except FileNotFoundError:
        return False
    path.unlink(missing_ok=True)
    return False


def _take(place: Path, wanted: Wanted, path: Path) -> str | None:
    """In a thread: the canonical file of what lies at `place`, beside `path` first. None, or what is wrong with it.

    Raises:
        BackboneInvalid, CheckpointInvalid: no backbone at all. OSError: the disk.
    """
    whole = place.is_file()
    if not whole:
        if not place.is_dir():
            return "is not there"
        if (difference := _difference(folder_config(place), wanted.config)) is not None:
            return f"holds another model: {difference}"
    elif place.stat().st_size != wanted.size:
        return f"has {place.stat().st_size:,} bytes, and the job's backbone has {wanted.size:,}"
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".writing", dir=path.parent)
    os.close(handle)
    written = Path(name)
    try:
        if whole:
            shutil.copyfile(place, written)
            found = digest_of(written)
        else:
            found = write_backbone(place, wanted.config, written)
        if found != wanted.digest:
            return (
                f"has the backbone {found.hex()}, and the job's is {wanted.digest.hex()}: the same sizes, other values"
            )
        written.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            written.unlink()
    return None


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """What makes these two models' tensors different ones. A head that the folder has and the job does not need is left
    out; numbers that no shape depends on are the job's, whatever the folder says.
    """
    heads = {key for key in HEAD_FLAGS if found.get(key) and not wanted.get(key)}
    same = {**found, **dict.fromkeys(heads, False)}
    if same["model_type"] == wanted["model_type"] and layout_of(same).header == layout_of(wanted).header:
        return None
    key = next(key for key in ("model_type", *sorted({*same, *wanted})) if same.get(key) != wanted.get(key))
    return f"its {key} is {same.get(key)!r}, the job's {wanted.get(key)!r}"
