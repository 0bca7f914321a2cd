"""Bundles: a folder of files and `bundle.json`, which names each with its size and SHA-256.

Guarantees: a bundle appears whole or not at all, and what is read from one is what was written, checked to
the byte (the bytes handed out are the bytes that were hashed). A kind says what is inside:

    job     what a job starts from: job.json, manifest.json, weights.bin, tokenizer.json
    model   what runs: model.onnx, tokenizer.json, labels.json, and in bundle.json where it came from

Leaves to others: who made it. Digests find damage; a signature would find an author.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from tacit.documents import Digest, Document, DocumentInvalid, Part, sentence_of

__all__ = [
    "INDEX",
    "JOB_FILES",
    "MODEL_FILES",
    "Bundle",
    "BundleIndex",
    "BundleInvalid",
    "BundleKind",
    "BundledFile",
    "Labels",
    "ModelFacts",
    "read_bundle",
    "write_bundle",
]

INDEX = "bundle.json"
JOB_FILES = ("job.json", "manifest.json", "weights.bin", "tokenizer.json")
MODEL_FILES = ("model.onnx", "tokenizer.json", "labels.json")

BundleKind = Literal["job", "model"]
# A file's own name: no folder, nothing hidden.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class BundleInvalid(ValueError):
    """A bundle that cannot be read or written; the text says which file and what to do."""


class BundledFile(Part):
    """One file of a bundle."""

    sha256: Digest
    size: int = Field(ge=0)


class ModelFacts(Part):
    """Where an exported model came from, and what it takes.

    job: the job's name. version: SHA-256 of the weights it was made from. max_tokens, min_tokens: lengths its
    texts are cut and padded to. parity: largest difference between its logits and the training stack's, over
    so many texts.
    """

    job: str
    version: Digest
    max_tokens: int = Field(ge=1)
    min_tokens: int = Field(ge=1)
    parity: float = Field(ge=0, allow_inf_nan=False)
    texts: int = Field(ge=1)


class Labels(Document):
    """labels.json: what the model's outputs mean, in their order."""

    labels: tuple[str, ...] = Field(min_length=2)


class BundleIndex(Document):
    """bundle.json."""

    kind: BundleKind
    files: dict[FileName, BundledFile] = Field(min_length=1)
    # Of a model bundle, and of no other.
    model: ModelFacts | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needed = JOB_FILES if self.kind == "job" else MODEL_FILES
        if missing := [name for name in needed if name not in self.files]:
            raise ValueError(f"a {self.kind} bundle without {', '.join(missing)}")
        if INDEX in self.files:
            raise ValueError(f"{INDEX} cannot name itself")
        if (self.kind == "model") != (self.model is not None):
            raise ValueError("`model` belongs to a model bundle, and every model bundle has it")
        return self


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as read: every file's bytes agree with its digest."""

    folder: Path
    index: BundleIndex
    files: Mapping[str, bytes]

    @property
    def kind(self) -> BundleKind:
        """job or model."""
        return self.index.kind


def write_bundle(
    folder: Path, kind: BundleKind, files: Mapping[str, bytes], *, model: ModelFacts | None = None
) -> BundleIndex:
    """Writes a bundle beside its place and renames it there.

    An empty folder is used, an older bundle replaced; a folder that holds anything else is left as it is.

    Raises:
        BundleInvalid: a file missing for its kind, a name that is no plain file name, a folder in the way.
    """
    try:
        index = BundleIndex(
            kind=kind,
            files={
                name: BundledFile(sha256=hashlib.sha256(data).digest(), size=len(data)) for name, data in files.items()
            },
            model=model,
        )
    except ValidationError as error:
        raise BundleInvalid(f"{folder} would not be a bundle: {sentence_of(error)}") from error
    _check_place(folder)
    place = folder.absolute()
    # Hidden names of our own, so that nobody else's folder is ever removed.
    partial, older = (place.with_name(f".{place.name}.{what}") for what in ("partial", "older"))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (partial, older):  # Of a run that was killed.
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir()
        for name, data in files.items():
            _write(partial / name, data)
        _write(partial / INDEX, index.canonical() + b"\n")
        # A folder cannot be renamed over one that has files in it.
        if place.exists():
            place.rename(older)
        partial.rename(place)
        shutil.rmtree(older, ignore_errors=True)
    except OSError as error:
        raise BundleInvalid(f"{folder} cannot be written: {error.strerror}; name another folder") from error
    return index


def _check_place(folder: Path) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise BundleInvalid(f"{folder} is not a folder; name a new one for the bundle")
    present = {entry.name for entry in folder.iterdir()}
    if not present:
        return
    try:
        known = {INDEX, *_index(folder).files}
    except BundleInvalid:
        known = set()
    if foreign := sorted(present - known):
        raise BundleInvalid(
            f"{folder} holds other files ({', '.join(foreign[:3])}) and would be replaced whole; name a new folder"
        )


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _index(folder: Path) -> BundleIndex:
    try:
        data = (folder / INDEX).read_bytes()
    except FileNotFoundError:
        what = "holds no bundle.json" if folder.is_dir() else "does not exist"
        raise BundleInvalid(f"{folder} {what}; name the folder that `job bundle` or `export` wrote") from None
    except OSError as error:
        raise BundleInvalid(f"{folder / INDEX} cannot be read: {error.strerror}") from error
    try:
        return BundleIndex.from_json(data, what=str(folder / INDEX))
    except DocumentInvalid as error:
        raise BundleInvalid(str(error)) from error


def read_bundle(folder: Path, kind: BundleKind | None = None) -> Bundle:
    """Every file that bundle.json names, checked. Other files in the folder are not looked at.

    kind: what it has to be, if that matters.

    Raises:
        BundleInvalid: no bundle, another kind, a file that is missing or differs (named).
    """
    index = _index(folder)
    if kind is not None and index.kind != kind:
        hint = {"job": "`coordinator job bundle` makes one", "model": "`export` makes one"}[kind]
        raise BundleInvalid(f"{folder} is a {index.kind} bundle where a {kind} bundle is needed; {hint}")
    files: dict[str, bytes] = {}
    for name, expected in index.files.items():
        path = folder / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise BundleInvalid(f"{path} is missing; copy or make the bundle again") from None
        except OSError as error:
            raise BundleInvalid(f"{path} cannot be read: {error.strerror}") from error
        if len(data) != expected.size or hashlib.sha256(data).digest() != expected.sha256:
            raise BundleInvalid(
                f"{path} differs from what {INDEX} says ({len(data)} bytes of {expected.size}, or "
                "other ones); copy or make the bundle again"
            )
        files[name] = data
    return Bundle(folder, index, files)
