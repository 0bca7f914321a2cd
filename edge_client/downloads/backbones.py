"""Gets a job's backbone from the member's cache, its own folders, the hub or the coordinator, in this order.

Guarantees:

- A backbone that `open` returns has the digest that the job's document names, whatever its source. A folder, or the
  hub's files, with another digest is skipped, and both digests go to this machine's log.
- The coordinator is asked for nothing larger than the config's canonical file, or 16 MiB more if it is an ONNX file,
  and for nothing that does not fit within the cache's bound.
- The hub is asked for at most twice that, in weights (which may hold a pooler and copies of tied tables). Sizes are
  known before a file is requested, and all files go into the cache and within its bound.
- A fetched backbone is in the cache once, for all jobs, and pinned while one of them has it open. The next job on the
  same backbone transfers nothing.

The hub is asked only if the member's policy names it in `backbones`, which is not the default, and the document names a
commit there. A request tells the hub that this member takes part in something with this model.

Errors name folders of this machine. They are for its own log, not for the coordinator.
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
from typing import Any, Protocol, Self, TypeVar

import structlog

from edge_client.downloads.cache import BlobCache, Pin
from learning.backbones.checkpoint import CheckpointInvalid
from learning.backbones.hub_fetch import MAX_SMALL_BYTES, fetch_checkpoint
from learning.backbones.layout import HEAD_FLAGS, BackboneInvalid, checked_config, layout_of
from learning.backbones.onnx_features import OnnxBackbone, check_onnx_size
from learning.backbones.stored import StoredBackbone, digest_of, folder_config, read_backbone, write_backbone
from tacit.blobs import BlobDamaged, BlobNotThere
from tacit.pieces import PIECE, list_bytes
from tacit.prompt import SOURCES, PromptedModel, Source

__all__ = ["SOURCES", "BackboneMissing", "Backbones", "Fetch", "Source", "Wanted", "named_folders"]


class Fetch(Protocol):
    """Fetches by digest from the coordinator, for as long as it takes. It resumes and verifies."""

    def __call__(self, digest: bytes, into: Path, limit: int, pieces: bytes = b"", /) -> Awaitable[None]:
        """Fetches a file of at most `limit` bytes, or of `limit` bytes if it has a list of pieces (`tacit.pieces`)."""


T = TypeVar("T")

# Weights on the hub may hold more tensors than the canonical file. None needs to be twice as wide as its float32.
_HUB_TIMES = 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

log = structlog.get_logger("edge_client")


class BackboneMissing(LookupError):
    """No source has the job's backbone. The text says why for each, and what to do. It names folders."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The backbone of a job.

    Attributes:
        digest: Its 32 bytes.
        config: The checked config.
        hub: The name on the hub that the document suggests.
    """

    digest: bytes
    config: Mapping[str, Any]
    hub: str | None = None
    # The bytes of an ONNX file; None for the canonical file, whose size follows from the config.
    onnx_size: int | None = None
    # SHA-256 of the list of the file's pieces; None if it has one piece.
    pieces: bytes | None = None

    @classmethod
    def of(cls, model: PromptedModel) -> Self:
        """Returns what the members of a job train on.

        Raises:
            BackboneInvalid: The config is invalid, the model is not a bundle's, or a file of several pieces has no list
                of them. Without one, a member learns only at the end whether it fetched the right file.
        """
        if model.backbone is None or model.config is None:
            raise BackboneInvalid("model.backbone: the model has a base and no digest yet; make a job bundle of it")
        wanted = cls(model.backbone, checked_config(model.config), model.hub, pieces=model.pieces)
        if wanted.pieces is None and wanted.size > PIECE:
            raise BackboneInvalid(
                f"model.pieces: a backbone of {wanted.size:,} bytes needs the list of its pieces; the operator makes "
                "the job bundle again"
            )
        return wanted

    @classmethod
    def onnx(cls, model: PromptedModel) -> Self:
        """Returns what members without torch train on.

        Raises:
            BackboneInvalid: The config is invalid, or the job has no ONNX backbone, or one that is too large for it.
        """
        if model.onnx is None or model.onnx.digest is None or model.config is None:
            raise BackboneInvalid("model.onnx: the job has no ONNX backbone; make a job bundle with one")
        wanted = cls(model.onnx.digest, checked_config(model.config), None, model.onnx.size)
        check_onnx_size(wanted.size, wanted.config)
        return wanted

    @property
    def size(self) -> int:
        """The size of the file, in bytes."""
        return layout_of(self.config).size if self.onnx_size is None else self.onnx_size

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where it may be, in the order of asking. Nobody but a coordinator has a job's ONNX file."""
        if self.onnx_size is not None:
            return ("coordinator",)
        return tuple(each for each in SOURCES if each != "hub" or self.hub is not None)


def named_folders(given: Sequence[Path], environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Returns the folders of `--backbone` and of TACIT_BACKBONES, whose paths are separated as in PATH."""
    more = [Path(each) for each in environment.get("TACIT_BACKBONES", "").split(os.pathsep) if each]
    return tuple(dict.fromkeys(path.expanduser() for path in (*given, *more)))


class Backbones:
    """The backbones of all jobs of a process, each open once.

    Args:
        cache: Holds what is fetched.
        folders: Checkpoints as transformers saves them, or canonical files.
        allowed: The policy's `backbones`.
        hub: hub(name, folder, max_bytes) fetches the files of a name on the hub into a folder, with at most `max_bytes`
            of weights.
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
        self._open_onnx: dict[bytes, tuple[OnnxBackbone, Pin]] = {}
        self._locks: dict[bytes, asyncio.Lock] = {}
        # Why a place does not have a backbone. Reading a gigabyte again would not change it.
        self._differs: dict[tuple[str, bytes], str] = {}

    async def open(self, wanted: Wanted, fetch: Fetch) -> StoredBackbone:
        """Returns the job's backbone, read-only and shared by all callers in this process.

        Args:
            wanted: The backbone.
            fetch: Fetches from the coordinator, for as long as it takes. Its errors pass through, except that the blob
                is missing or damaged.

        Raises:
            BackboneMissing: No source has it.
            BackboneInvalid: Its bytes do not match the job's config.
            OSError: The disk cannot store it.
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

    async def open_onnx(self, wanted: Wanted, fetch: Fetch) -> OnnxBackbone:
        """Returns the job's ONNX backbone, as `open` does the other. It is in memory only while it computes.

        Raises:
            BackboneMissing, BackboneInvalid, OSError: As in `open`.
        """
        async with self._locks.setdefault(wanted.digest, asyncio.Lock()):
            if (found := self._open_onnx.get(wanted.digest)) is not None:
                return found[0]
            pin = self._cache.pin(wanted.digest)
            try:
                path = await self._obtain(wanted, fetch)
                backbone = await asyncio.to_thread(OnnxBackbone, path, wanted.digest)
            except BaseException:
                pin.release()
                raise
            self._open_onnx[wanted.digest] = backbone, pin
            return backbone

    def release(self, digest: bytes) -> None:
        """Allows the file to be deleted, once its job is over. A training that still uses it keeps its memory."""
        for opened in (self._open, self._open_onnx):
            if (found := opened.pop(digest, None)) is not None:
                found[1].release()

    async def _obtain(self, wanted: Wanted, fetch: Fetch) -> Path:
        path = self._cache.path(wanted.digest)
        if await asyncio.to_thread(_is, path, wanted.digest):
            return path
        said = []
        for source in wanted.sources if wanted.onnx_size is not None else SOURCES:
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
        advice = "Allow the coordinator in the policy's `backbones`; nobody else has an ONNX file"
        if wanted.onnx_size is None:
            advice = (
                "Save the model that the operator used into a folder and name it with --backbone, or allow the "
                "coordinator in the policy's `backbones`"
            )
        raise BackboneMissing(f"no source has the job's backbone {wanted.digest.hex()}; {'; '.join(said)}. {advice}")

    async def _from_disk(self, wanted: Wanted, path: Path) -> list[str]:
        """Returns nothing if the backbone is at `path` now, else why each place did not have it."""
        said = [] if self._folders else ["no folder was named (--backbone, TACIT_BACKBONES)"]
        for folder in self._folders:
            refused = await self._judged(str(folder), partial(_take, folder, wanted, path), wanted)
            if refused is None:
                return []
            said.append(refused)
        return said

    async def _from_hub(self, wanted: Wanted, path: Path) -> list[str]:
        if (name := wanted.hub) is None:
            return ["the job names no model there"]
        # The canonical file is made beside the hub's files.
        room = self._cache.max_bytes - wanted.size - 2 * MAX_SMALL_BYTES
        most = min(_HUB_TIMES * wanted.size, room)
        if most < wanted.size // 2:
            return [f"{name} and the {wanted.size:,} bytes made of it do not fit into this member's cache"]

        def take() -> str | None:
            with self._cache.room(wanted.digest, most + wanted.size + 2 * MAX_SMALL_BYTES) as folder:
                self._hub(name, folder, most)
                return _take(folder, wanted, path)

        refused = await self._judged(f"{name} on the hub", take, wanted)
        return [] if refused is None else [refused]

    async def _from_coordinator(self, wanted: Wanted, path: Path, fetch: Fetch) -> list[str]:
        async def take() -> None:
            if wanted.pieces is None:
                await fetch(wanted.digest, path, wanted.size)
                return
            listed = self._cache.path(wanted.pieces)
            with self._cache.pin(wanted.pieces):
                await fetch(wanted.pieces, listed, list_bytes(wanted.size))
                pieces = await asyncio.to_thread(listed.read_bytes)
            await fetch(wanted.digest, path, wanted.size, pieces)

        # The disk has room for more, but other programs need it, too.
        if not await asyncio.to_thread(self._cache.fits, wanted.digest, wanted.size):
            return [
                f"its {wanted.size:,} bytes do not fit into this member's cache, which may hold "
                f"{self._cache.max_bytes:,} with all that is in use; free some space on its disk"
            ]
        try:
            await self._with_room(wanted, take)
        except (BlobNotThere, BlobDamaged) as error:
            return [str(error)]
        return []

    async def _judged(self, where: str, take: Callable[[], str | None], wanted: Wanted) -> str | None:
        """Runs `take` in a thread, and returns why a place does not have the backbone. It looks only once at each."""
        if (known := self._differs.get((where, wanted.digest))) is not None:
            return known
        try:
            refused = await self._with_room(wanted, lambda: asyncio.to_thread(take))
        except (BackboneInvalid, CheckpointInvalid) as error:
            # Such an error is not remembered: the place may have the backbone next time.
            return str(error)
        if refused is None:
            return None
        sentence = f"{where} {refused}"
        log.warning("backbone_differs", where=where, wanted=wanted.digest.hex(), why=refused)
        self._differs[where, wanted.digest] = sentence
        return sentence

    async def _with_room(self, wanted: Wanted, act: Callable[[], Awaitable[T]]) -> T:
        """Runs `act`. If the disk is full, it deletes other blobs from the cache first and runs `act` again."""
        try:
            return await act()
        except OSError as error:
            if error.errno not in _NO_SPACE or not await asyncio.to_thread(self._cache.clear, wanted.digest):
                raise
            log.warning("cache_cleared", why=error.strerror)
            return await act()


def _is(path: Path, digest: bytes) -> bool:
    """Whether `path` holds the file of that digest. Deletes a damaged one."""
    try:
        if digest_of(path) == digest:
            return True
    except FileNotFoundError:
        return False
    path.unlink(missing_ok=True)
    return False


def _take(place: Path, wanted: Wanted, path: Path) -> str | None:
    """Writes the canonical file of the backbone at `place` to `path`, through a file beside it. Runs in a thread.

    Returns:
        None, or what is wrong with the backbone at `place`.

    Raises:
        BackboneInvalid, CheckpointInvalid: There is no backbone at `place`.
        OSError: The disk failed.
    """
    whole = place.is_file()
    if not whole:
        if not place.is_dir():
            return "does not exist"
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
                f"has the backbone {found.hex()}, and the job's is {wanted.digest.hex()}: same sizes, different values"
            )
        written.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            written.unlink()
    return None


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Says why two models have different tensors, or returns None if they have the same.

    A head that the folder has and the job does not need is ignored. Numbers that no shape depends on are the job's,
    whatever the folder says.
    """
    heads = {key for key in HEAD_FLAGS if found.get(key) and not wanted.get(key)}
    same = {**found, **dict.fromkeys(heads, False)}
    if same["model_type"] == wanted["model_type"] and layout_of(same).header == layout_of(wanted).header:
        return None
    key = next(key for key in ("model_type", *sorted({*same, *wanted})) if same.get(key) != wanted.get(key))
    return f"its {key} is {same.get(key)!r}, the job's {wanted.get(key)!r}"
