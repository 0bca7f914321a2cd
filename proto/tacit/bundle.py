"""Bundles: a folder of files and `bundle.json`, which names each with its size and SHA-256.

Guarantees: a bundle appears whole or not at all, and what is read from one is what was written, checked to
the byte (the bytes handed out are the bytes that were hashed). A kind says what is inside:

    job     what a job starts from: job.json, manifest.json, weights.bin; tokenizer.json but where members build their
            own; private.json and private.bin where members keep parameters that start from public numbers;
            backbone.safetensors where the model is a prompted one
    model   what runs: model.onnx, tokenizer.json, labels.json, and in bundle.json where it came from
    backbone    the frozen part of many models: backbone.onnx and tokenizer.json. It lies in a folder of its digest's
            name (`backbone_folder`) beside those that stand on it
    prompt  what runs on such a backbone: prompt.safetensors, labels.json, and in bundle.json where it came from and
            which backbone it is
    hf      what transformers or peft loads: tokenizer.json, README.md, and the files that each of these looks for

Leaves to others: who made it. Digests find damage; a signature would find an author.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Label, Part, Short, sentence_of
from tacit.limits import MAX_LABELS
from tacit.prompt import Template, parse_template

__all__ = [
    "BACKBONE_FILE",
    "HF_FILES",
    "INDEX",
    "JOB_FILES",
    "MODEL_FILES",
    "PROMPT_FILES",
    "SHARED_FILES",
    "Bundle",
    "BundleIndex",
    "BundleInvalid",
    "BundleKind",
    "BundledFile",
    "Labels",
    "ModelFacts",
    "backbone_folder",
    "check_place",
    "read_bundle",
    "write_backbone",
    "write_bundle",
]

INDEX = "bundle.json"
# The frozen values of a prompted job: up to 2 GiB, so that not everybody reads it into memory.
BACKBONE_FILE = "backbone.safetensors"
# What every job bundle holds.
JOB_FILES = ("job.json", "manifest.json", "weights.bin")
MODEL_FILES = ("model.onnx", "tokenizer.json", "labels.json")
PROMPT_FILES = ("prompt.safetensors", "labels.json")
SHARED_FILES = ("backbone.onnx", "tokenizer.json")
HF_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md")

BundleKind = Literal["job", "model", "backbone", "prompt", "hf"]
_NEEDED: dict[BundleKind, tuple[str, ...]] = {
    "job": JOB_FILES,
    "model": MODEL_FILES,
    "backbone": SHARED_FILES,
    "prompt": PROMPT_FILES,
    "hf": HF_FILES,
}
_MAKES: dict[BundleKind, str] = {
    "job": "`coordinator job bundle` makes one",
    "model": "`export` makes one",
    "backbone": "`export --split` makes one",
    "prompt": "`export --split` makes one",
    "hf": "`coordinator export --format hf` makes one",
}
# A killed run's folder is removed after a day: nothing is written for so long.
_STALE_SECONDS = 24 * 3600.0
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

    job: the job's name. version: SHA-256 of the weights it was made from. max_tokens, min_tokens: lengths its texts are
    cut and padded to. frame: whether [CLS] and [SEP] stand around a text. template: what a prompted model's texts are
    put into; None where a text stands alone. backbone: of a prompt, the digest of its backbone's bundle.json (in its
    canonical form), and through it of the files there; None of a model that is whole. private: whether a member's own
    parameters are in it, so that it must stay on that member's machine. parity: largest difference between its logits
    and the training stack's, over so many texts.
    """

    job: Short
    version: Digest
    max_tokens: int = Field(ge=1)
    min_tokens: int = Field(ge=1)
    frame: bool = False
    template: str | None = Field(default=None, min_length=1, max_length=2000)
    backbone: Digest | None = None
    private: bool = False
    parity: float = Field(ge=0, allow_inf_nan=False)
    texts: int = Field(ge=1)

    @field_validator("template")
    @classmethod
    def _slots(cls, template: str | None) -> str | None:
        if template is not None:
            _parsed(template)
        return template

    @property
    def read_as(self) -> Template | None:
        """The template, cut at its slots."""
        return None if self.template is None else _parsed(self.template)


def _parsed(template: str) -> Template:
    # Under a head nothing fills in a word.
    return parse_template(template, mask="{mask}" in template)


class Labels(Document):
    """labels.json: what the model's outputs mean, in their order."""

    max_bytes: ClassVar[int] = 1024 * 1024

    labels: Annotated[tuple[Label, ...], AtMost(MAX_LABELS)] = Field(min_length=2)


class BundleIndex(Document):
    """bundle.json."""

    kind: BundleKind
    files: Annotated[dict[FileName, BundledFile], AtMost(64)] = Field(min_length=1)
    # Of what gives labels: a model, or a prompt.
    model: ModelFacts | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if missing := [name for name in _NEEDED[self.kind] if name not in self.files]:
            raise ValueError(f"a {self.kind} bundle without {', '.join(missing)}")
        if INDEX in self.files:
            raise ValueError(f"{INDEX} cannot name itself")
        if (self.kind in ("model", "prompt")) != (self.model is not None):
            raise ValueError("`model` belongs to a model bundle or a prompt, and each of these has it")
        if self.model is not None and (self.kind == "prompt") != (self.model.backbone is not None):
            raise ValueError("`model.backbone` belongs to a prompt, and every prompt has it")
        return self


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as read: every file's bytes agree with its digest. files: but those that were only to be checked."""

    folder: Path
    index: BundleIndex
    files: Mapping[str, bytes]

    @property
    def kind(self) -> BundleKind:
        """What is inside."""
        return self.index.kind


def backbone_folder(folder: Path, digest: bytes) -> Path:
    """Where the backbone of that digest lies, for a prompt in `folder`: beside it."""
    return folder.resolve().parent / f"backbone-{digest.hex()[:32]}"


def write_bundle(
    folder: Path, kind: BundleKind, files: Mapping[str, bytes], *, model: ModelFacts | None = None
) -> BundleIndex:
    """Writes a bundle beside its place and renames it there.

    An empty folder is used, an older bundle replaced; a folder that holds anything else is left as it is. So is one
    that other bundles stand on: a backbone gives way to a backbone alone, and nothing else to a backbone. Of several
    that write to one place at once each succeeds, and what is there in the end is one of them, whole.

    What holds a member's private parameters (`model.private`) only its owner can open, whatever the umask and whoever
    could open the older one: folder 0700, files 0600, from the moment they are made.

    Raises:
        BundleInvalid: a file missing for its kind, a name that is no plain file name, a folder in the way.
    """
    index = _index_of(folder, kind, files, model)
    _put(folder, index, files)
    return index


def write_backbone(prompt: Path, files: Mapping[str, bytes]) -> tuple[Path, BundleIndex, bool]:
    """The backbone's bundle for a prompt in the folder `prompt`: where it lies, what it holds, and whether it had to be
    written. One that is there and whole is left as it is, whoever wrote it and when: others read it.

    Raises:
        BundleInvalid: as in `write_bundle`; the prompt's own folder would be in its place.
    """
    index = _index_of(prompt, "backbone", files, None)
    folder = backbone_folder(prompt, index.digest())
    if folder == prompt.resolve():
        raise BundleInvalid(f"{prompt} is where the backbone belongs; name another folder for the prompt")
    return folder, index, _put(folder, index, files)


def check_place(folder: Path, kind: BundleKind) -> None:
    """Whether a bundle of that kind may be written there. `write_bundle` looks by itself; this is for who has much to
    do before that.

    Raises:
        BundleInvalid: the folder holds something else, or is none.
    """
    try:
        while True:
            before = _identity(folder)
            refusal = None if before is None else _refusal(folder, kind)
            # Looked at while another run put its own there, it was neither the one nor the other.
            if _identity(folder) == before:
                break
    except OSError as error:
        raise BundleInvalid(f"{folder} cannot be looked into ({error.strerror}); name another folder") from error
    if refusal is not None:
        raise BundleInvalid(refusal)


def _index_of(folder: Path, kind: BundleKind, files: Mapping[str, bytes], model: ModelFacts | None) -> BundleIndex:
    try:
        return BundleIndex(
            kind=kind,
            files={
                name: BundledFile(sha256=hashlib.sha256(data).digest(), size=len(data)) for name, data in files.items()
            },
            model=model,
        )
    except ValidationError as error:
        raise BundleInvalid(f"{folder} would not be a bundle: {sentence_of(error)}") from error


def _put(folder: Path, index: BundleIndex, files: Mapping[str, bytes]) -> bool:
    """Whether it was written: a backbone that is there already is not."""
    check_place(folder, index.kind)
    if _stands(folder, index):
        return False
    place, private = folder.absolute(), index.model is not None and index.model.private
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(place)
        # A name that nobody else has, so that no two runs write into one folder, or remove each other's.
        scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(place), dir=place.parent))
        try:
            # A umask takes rights away and gives none; but one such as 0277 would take the owner's.
            scratch.chmod(0o700)
            # Inside, for the umask is to give it its rights: the one around it is closed to others.
            made = scratch / "made"
            made.mkdir(mode=0o700 if private else 0o777)
            if private:
                made.chmod(0o700)
            for name, data in files.items():
                _write(made / name, data, private)
            _write(made / INDEX, index.canonical() + b"\n", private)
            return _take_place(made, place, index, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise BundleInvalid(f"{folder} cannot be written: {error.strerror}; name another folder") from error


def _take_place(made: Path, place: Path, index: BundleIndex, scratch: Path) -> bool:
    """Renames it to its place, and what is there out of the way; False where an equal backbone came first."""
    aside: list[Path] = []
    try:
        while True:
            try:
                # Over nothing, or over an empty folder.
                made.rename(place)
                return True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            check_place(place, index.kind)
            if _stands(place, index):
                return False
            older = scratch / f"older-{len(aside)}"
            with contextlib.suppress(FileNotFoundError):  # Another run took it away just now.
                place.rename(older)
                aside.append(older)
    except BaseException:
        if aside:
            # It goes back, unless another one is there by now.
            with contextlib.suppress(OSError):
                aside[-1].rename(place)
        raise


def _stands(folder: Path, index: BundleIndex) -> bool:
    """Whether that backbone lies there, whole."""
    if index.kind != "backbone":
        return False
    try:
        return read_bundle(folder, "backbone", unread=index.files.keys()).index == index
    except BundleInvalid:
        return False


def _scratch_prefix(place: Path) -> str:
    return f".{place.name}.bundle-"


def _remove_stale(place: Path) -> None:
    """What runs that were killed left beside the place. Young ones may be at work."""
    with contextlib.suppress(OSError):
        for entry in list(place.parent.iterdir()):
            if not entry.name.startswith(_scratch_prefix(place)):
                continue
            with contextlib.suppress(FileNotFoundError):  # Another run was done with it just now.
                if time.time() - entry.lstat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(entry, ignore_errors=True)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder, file or link has that name now."""
    try:
        found = folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _refusal(folder: Path, kind: BundleKind) -> str | None:
    """Why what is there stays there."""
    if folder.is_symlink() or not folder.is_dir():
        return f"{folder} is not a folder; name a new one for the bundle"
    try:
        present = {entry.name for entry in folder.iterdir()}
    except FileNotFoundError:  # It is another one by now, or none.
        return None
    if not present:
        return None
    try:
        index = _index(folder)
    except BundleInvalid:
        index = None
    known = set() if index is None else {INDEX, *index.files}
    if foreign := sorted(present - known):
        return f"{folder} holds other files ({', '.join(foreign[:3])}) and would be replaced whole; name a new folder"
    if index is not None and index.kind == "backbone" and kind != "backbone":
        return f"{folder} is a backbone, which every prompt beside it may stand on, and stays; name a new folder"
    if index is not None and index.kind != "backbone" and kind == "backbone":
        return f"{folder} is a {index.kind} bundle where the backbone belongs; move it elsewhere"
    return None


def _write(path: Path, data: bytes, private: bool) -> None:
    mode = 0o600 if private else 0o666
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
        if private:
            os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _index(folder: Path) -> BundleIndex:
    try:
        return BundleIndex.from_file(folder / INDEX)
    except FileNotFoundError:
        what = "holds no bundle.json" if folder.is_dir() else "does not exist"
        raise BundleInvalid(f"{folder} {what}; name the folder that `job bundle` or `export` wrote") from None
    except OSError as error:
        raise BundleInvalid(f"{folder / INDEX} cannot be read: {error.strerror}") from error
    except DocumentInvalid as error:
        raise BundleInvalid(str(error)) from error


def read_bundle(folder: Path, *kinds: BundleKind, unread: Collection[str] = ()) -> Bundle:
    """Every file that bundle.json names, checked. Other files in the folder are not looked at.

    kinds: what it has to be one of, if that matters. unread: files that are checked where they lie, for being large,
    and are none of `Bundle.files`; who uses one later checks it then.

    Raises:
        BundleInvalid: no bundle, another kind, a file that is missing or differs (named).
    """
    index = _index(folder)
    if kinds and index.kind not in kinds:
        hint = _MAKES[kinds[0]]
        if index.kind == "backbone" and "prompt" in kinds:
            hint = "name the folder of a prompt, which lies beside its backbone"
        raise BundleInvalid(f"{folder} is a {index.kind} bundle where a {kinds[0]} bundle is needed; {hint}")
    files: dict[str, bytes] = {}
    for name, expected in index.files.items():
        path = folder / name
        data = None
        try:
            if name in unread:
                with path.open("rb") as file:
                    size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").digest()
            else:
                data = path.read_bytes()
                size, digest = len(data), hashlib.sha256(data).digest()
        except FileNotFoundError:
            raise BundleInvalid(f"{path} is missing; copy or make the bundle again") from None
        except OSError as error:
            raise BundleInvalid(f"{path} cannot be read: {error.strerror}") from error
        if size != expected.size or digest != expected.sha256:
            raise BundleInvalid(
                f"{path} differs from what {INDEX} says ({size} bytes of {expected.size}, or "
                "other ones); copy or make the bundle again"
            )
        if data is not None:
            files[name] = data
    return Bundle(folder, index, files)
