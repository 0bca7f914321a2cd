"""Bundles: a folder of files and `bundle.json`, which lists each with its size and SHA-256.

Guarantees: a bundle appears whole or not at all. What is read from it is what was written, checked to the byte: the
bytes returned are the bytes that were hashed. A bundle's kind says what it holds:

    job         the start of a job: job.json, manifest.json, weights.bin; tokenizer.json unless members build their own;
                private.json and private.bin if members keep parameters that start from public numbers; frozen.json and
                frozen.bin if the job freezes parameters; backbone.safetensors if the model is prompted, and
                backbone.onnx if the job has one for members without torch
    model       a model to run: model.onnx, tokenizer.json, labels.json; bundle.json also says where it came from
    backbone    the frozen part of many models: backbone.onnx and tokenizer.json, in a folder named by its digest
                (`backbone_folder`) beside the prompts that need it
    prompt      a model to run on such a backbone: prompt.safetensors, labels.json; bundle.json also says where it came
                from and which backbone it needs
    generator   a model that writes: model.onnx with its weights in model.safetensors, tokenizer.json; cache.npz if
                a soft prompt comes before every dialogue; bundle.json also says where it came from and how it writes
    hf          a model for transformers or peft: config.json, tokenizer.json, tokenizer_config.json, README.md, and
                the weights under the names that each library looks for

This module does not authenticate the author. Digests detect damage; only a signature would prove who made a bundle.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Label, Part, Short, sentence_of
from tacit.generation import DialogueTemplate
from tacit.limits import MAX_AVERAGED, MAX_LABELS
from tacit.prompt import Template, parse_template

__all__ = [
    "BACKBONE_FILE",
    "CACHE_FILE",
    "GENERATOR_FILES",
    "HF_FILES",
    "INDEX",
    "JOB_FILES",
    "LARGE_FILES",
    "MAX_POSITIONS",
    "MODEL_FILES",
    "ONNX_FILE",
    "PASSPORT",
    "PIECES_FILE",
    "PROMPT_FILES",
    "SHARED_FILES",
    "WEIGHTS_FILE",
    "Averaged",
    "Bundle",
    "BundleIndex",
    "BundleInvalid",
    "BundleKind",
    "BundledFile",
    "GeneratorFacts",
    "Labels",
    "ModelFacts",
    "backbone_folder",
    "check_place",
    "read_bundle",
    "read_index",
    "scratch_beside",
    "write_backbone",
    "write_bundle",
]

INDEX = "bundle.json"
# May lie beside the files of an exported model; no bundle lists it, since it names the bundle (`tacit.passport`).
PASSPORT = "passport.json"
# The frozen values of a prompted job: up to 64 GiB, so no reader loads it into memory.
BACKBONE_FILE = "backbone.safetensors"
# The list of its pieces (`tacit.pieces`), if it has more than one.
PIECES_FILE = "backbone.pieces"
# The same as an ONNX file, for members without torch.
ONNX_FILE = "backbone.onnx"
# The weights of a model that writes, and the keys and values with which each of its dialogues begins.
WEIGHTS_FILE, CACHE_FILE = "model.safetensors", "cache.npz"
# What is checked in place, and not read into memory.
LARGE_FILES = (BACKBONE_FILE, ONNX_FILE)
# The files of every job bundle.
JOB_FILES = ("job.json", "manifest.json", "weights.bin")
MODEL_FILES = ("model.onnx", "tokenizer.json", "labels.json")
PROMPT_FILES = ("prompt.safetensors", "labels.json")
SHARED_FILES = ("backbone.onnx", "tokenizer.json")
GENERATOR_FILES = ("model.onnx", WEIGHTS_FILE, "tokenizer.json")
HF_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md")

BundleKind = Literal["job", "model", "backbone", "prompt", "generator", "hf"]
_NEEDED: dict[BundleKind, tuple[str, ...]] = {
    "job": JOB_FILES,
    "model": MODEL_FILES,
    "backbone": SHARED_FILES,
    "prompt": PROMPT_FILES,
    "generator": GENERATOR_FILES,
    "hf": HF_FILES,
}
_MAKES: dict[BundleKind, str] = {
    "job": "`coordinator job bundle` makes one",
    "model": "`export` makes one",
    "backbone": "`export --split` makes one",
    "prompt": "`export --split` makes one",
    "generator": "`export` of a job that writes makes one",
    "hf": "`coordinator export --format hf` makes one",
}
# A killed run's folder is removed after a day; no run takes that long.
_STALE_SECONDS = 24 * 3600.0
# Positions of a model that writes. Memory for them is taken when it is asked, so a bundle may not name any number.
MAX_POSITIONS = 2**17
# Versions in an average, in order.
Averaged = Annotated[tuple[Annotated[int, Field(ge=1)], ...], AtMost(MAX_AVERAGED)]
# A plain file name: no folder, not hidden.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class BundleInvalid(ValueError):
    """A bundle cannot be read or written; the text says which file and what to do."""


class BundledFile(Part):
    """One file of a bundle."""

    sha256: Digest
    size: int = Field(ge=0)


class ModelFacts(Part):
    """Where an exported model came from, and which inputs it accepts.

    Attributes:
        job: the job's name.
        version: SHA-256 of the weights from which it was made.
        averaged: numbers of the versions whose average these weights are; empty for a version.
        max_tokens: length to which longer texts are cut.
        min_tokens: length to which shorter texts are padded.
        frame: whether texts are put between [CLS] and [SEP].
        template: the template that a prompted model's texts fill; None if a text is read alone.
        backbone: for a prompt, the digest of its backbone's bundle.json in canonical form, and so of the files there;
            None for a whole model.
        private: whether it contains a member's private parameters and so must stay on that member's machine.
        parity: the largest difference between its logits and the training stack's.
        texts: the number of texts over which `parity` was measured.
    """

    job: Short
    version: Digest
    averaged: Averaged = ()
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
        """The template, split at its slots."""
        return None if self.template is None else _parsed(self.template)


def _parsed(template: str) -> Template:
    # A template under a head has no mask.
    return parse_template(template, mask="{mask}" in template)


class GeneratorFacts(Part):
    """Where an exported model that writes came from, what it reads, and how it writes unless told otherwise.

    Attributes:
        task: what it does.
        job: the job's name.
        version: SHA-256 of the weights that the job trained.
        averaged: as in `ModelFacts`.
        template: what stands around the turns of a dialogue.
        end_ids: tokens that end a response.
        max_tokens: length of a dialogue in training.
        soft: positions of the soft prompt before every dialogue, which `CACHE_FILE` holds.
        room: tokens of a prompt and its response together.
        max_new_tokens: the most tokens of a response.
        temperature: what logits are divided by; 0: the most probable token.
        top_k: choose among this many tokens. None: among all.
        top_p: choose among the fewest tokens that reach this probability. None: among all.
        precision: of the matrices.
        parity: the largest difference between its logits and the training stack's.
        texts: the number of dialogues over which `parity` was measured.
    """

    task: Literal["generate"] = "generate"
    job: Short
    version: Digest
    averaged: Averaged = ()
    template: DialogueTemplate
    end_ids: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], AtMost(64)] = Field(min_length=1)
    max_tokens: int = Field(ge=1, le=MAX_POSITIONS)
    soft: int = Field(default=0, ge=0, le=MAX_POSITIONS)
    room: int = Field(ge=2, le=MAX_POSITIONS)
    max_new_tokens: int = Field(ge=1, le=MAX_POSITIONS)
    temperature: float = Field(default=0, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    precision: Literal["float32", "int8"] = "float32"
    parity: float = Field(ge=0, allow_inf_nan=False)
    texts: int = Field(ge=1)


class Labels(Document):
    """labels.json: the labels of the model's outputs, in order."""

    max_bytes: ClassVar[int] = 1024 * 1024

    labels: Annotated[tuple[Label, ...], AtMost(MAX_LABELS)] = Field(min_length=2)


class BundleIndex(Document):
    """bundle.json."""

    kind: BundleKind
    files: Annotated[dict[FileName, BundledFile], AtMost(64)] = Field(min_length=1)
    # Present for a model or a prompt.
    model: ModelFacts | None = None
    # Present for a model that writes.
    generator: GeneratorFacts | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if missing := [name for name in _NEEDED[self.kind] if name not in self.files]:
            raise ValueError(f"a {self.kind} bundle must list {', '.join(missing)}")
        if INDEX in self.files:
            raise ValueError(f"{INDEX} must not list itself")
        if (self.kind in ("model", "prompt")) != (self.model is not None):
            raise ValueError("model and prompt bundles must have `model`, and no others")
        if self.model is not None and (self.kind == "prompt") != (self.model.backbone is not None):
            raise ValueError("prompt bundles must have `model.backbone`, and no others")
        if (self.kind == "generator") != (self.generator is not None):
            raise ValueError("generator bundles must have `generator`, and no others")
        if self.generator is not None and bool(self.generator.soft) != (CACHE_FILE in self.files):
            raise ValueError(f"a soft prompt needs {CACHE_FILE}, and nothing else has it")
        return self


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as read: every file matches its digest. `files` leaves out those that were only checked."""

    folder: Path
    index: BundleIndex
    files: Mapping[str, bytes]

    @property
    def kind(self) -> BundleKind:
        """What it holds."""
        return self.index.kind


def backbone_folder(folder: Path, digest: bytes) -> Path:
    """The folder of the backbone with that digest: beside `folder`, which is the prompt's."""
    return folder.resolve().parent / f"backbone-{digest.hex()[:32]}"


def write_bundle(
    folder: Path,
    kind: BundleKind,
    files: Mapping[str, bytes],
    *,
    model: ModelFacts | None = None,
    generator: GeneratorFacts | None = None,
) -> BundleIndex:
    """Writes a bundle beside its place and renames it there.

    It uses an empty folder, replaces an older bundle, and leaves a folder that holds anything else unchanged. It also
    protects a backbone, on which other bundles may depend: only a backbone replaces a backbone, and a backbone replaces
    nothing else. If several runs write to one place at once, each succeeds, and one of their bundles remains, whole.

    A bundle with a member's private parameters (`model.private`) is closed to everybody but its owner from the moment
    it is made (folder 0700, files 0600), whatever the umask and the older bundle's mode.

    Args:
        folder: where the bundle will be.
        kind: what it holds.
        files: content by name.
        model: facts about the model, for a model or a prompt.
        generator: facts about a model that writes.

    Raises:
        BundleInvalid: the kind needs a file that is missing, a name is not a plain file name, or a folder is in the
            way.
    """
    index = _index_of(folder, kind, files, model, generator)
    _put(folder, index, files)
    return index


def write_backbone(prompt: Path, files: Mapping[str, bytes]) -> tuple[Path, BundleIndex, bool]:
    """Writes the backbone's bundle for a prompt, unless it exists.

    An intact one is left unchanged, whoever wrote it and when, because others read it.

    Args:
        prompt: the prompt's folder; the backbone's is beside it.
        files: content by name.

    Returns:
        The backbone's folder, its index, and whether it was written.

    Raises:
        BundleInvalid: see `write_bundle`; also if the prompt's own folder is where the backbone belongs.
    """
    index = _index_of(prompt, "backbone", files, None)
    folder = backbone_folder(prompt, index.digest())
    if folder == prompt.resolve():
        raise BundleInvalid(f"{prompt} is where the backbone belongs; name another folder for the prompt")
    return folder, index, _put(folder, index, files)


def check_place(folder: Path, kind: BundleKind) -> None:
    """Checks that a bundle of that kind may be written there. `write_bundle` checks it too; call this before long work.

    Raises:
        BundleInvalid: the folder holds something else, or is not a folder.
    """
    try:
        while True:
            before = _identity(folder)
            refusal = None if before is None else _refusal(folder, kind)
            # If another run replaced the folder in between, the check saw a mixture of both; check again.
            if _identity(folder) == before:
                break
    except OSError as error:
        raise BundleInvalid(f"{folder} cannot be read ({error.strerror}); name another folder") from error
    if refusal is not None:
        raise BundleInvalid(refusal)


@contextlib.contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """A folder for large files that are made before the bundle is written; it is removed at the end of the block.

    It lies beside the bundle's place, on the same file system, and is closed to everybody but its owner. What a killed
    run leaves is removed by a later run to the same place, once it is a day old.

    Args:
        folder: where the bundle will be.

    Raises:
        OSError: the folder cannot be made.
    """
    place = folder.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(place)
    # A unique name, so that two runs never write into one folder or remove each other's.
    scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(place), dir=place.parent))
    try:
        # A umask such as 0277 would take the owner's rights away.
        scratch.chmod(0o700)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _index_of(
    folder: Path,
    kind: BundleKind,
    files: Mapping[str, bytes],
    model: ModelFacts | None,
    generator: GeneratorFacts | None = None,
) -> BundleIndex:
    try:
        return BundleIndex(
            kind=kind,
            files={
                name: BundledFile(sha256=hashlib.sha256(data).digest(), size=len(data)) for name, data in files.items()
            },
            model=model,
            generator=generator,
        )
    except ValidationError as error:
        raise BundleInvalid(f"{folder} would not be a valid bundle: {sentence_of(error)}") from error


def _put(folder: Path, index: BundleIndex, files: Mapping[str, bytes]) -> bool:
    """Writes the bundle and returns True, or returns False if the same backbone exists already."""
    check_place(folder, index.kind)
    if _stands(folder, index):
        return False
    place, private = folder.absolute(), index.model is not None and index.model.private
    try:
        with scratch_beside(place) as scratch:
            # A folder inside gets its mode from the umask; the scratch folder around it is closed to others.
            made = scratch / "made"
            made.mkdir(mode=0o700 if private else 0o777)
            if private:
                made.chmod(0o700)
            for name, data in files.items():
                _write(made / name, data, private)
            _write(made / INDEX, index.canonical() + b"\n", private)
            return _take_place(made, place, index, scratch)
    except OSError as error:
        raise BundleInvalid(f"{folder} cannot be written: {error.strerror}; name another folder") from error


def _take_place(made: Path, place: Path, index: BundleIndex, scratch: Path) -> bool:
    """Renames the bundle to its place, moving an older one aside. Returns False if an equal backbone came first."""
    aside: list[Path] = []
    try:
        while True:
            try:
                # Succeeds if nothing or an empty folder is there.
                made.rename(place)
                return True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            check_place(place, index.kind)
            if _stands(place, index):
                return False
            older = scratch / f"older-{len(aside)}"
            with contextlib.suppress(FileNotFoundError):  # Another run has just moved it.
                place.rename(older)
                aside.append(older)
    except BaseException:
        if aside:
            # Put the older one back, unless another one is there by now.
            with contextlib.suppress(OSError):
                aside[-1].rename(place)
        raise


def _stands(folder: Path, index: BundleIndex) -> bool:
    """Whether that backbone is there, intact."""
    if index.kind != "backbone":
        return False
    try:
        return read_bundle(folder, "backbone", unread=index.files.keys()).index == index
    except BundleInvalid:
        return False


def _scratch_prefix(place: Path) -> str:
    return f".{place.name}.bundle-"


def _remove_stale(place: Path) -> None:
    """Removes what killed runs left beside the place, but not recent folders, whose runs may still be at work."""
    with contextlib.suppress(OSError):
        for entry in list(place.parent.iterdir()):
            if not entry.name.startswith(_scratch_prefix(place)):
                continue
            with contextlib.suppress(FileNotFoundError):  # Another run has just finished with it.
                if time.time() - entry.lstat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(entry, ignore_errors=True)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Identifies the folder, file or link that has that name now."""
    try:
        found = folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _refusal(folder: Path, kind: BundleKind) -> str | None:
    """Says why what is there must stay; None if it may be replaced."""
    if folder.is_symlink() or not folder.is_dir():
        return f"{folder} is not a folder; name a new one for the bundle"
    try:
        present = {entry.name for entry in folder.iterdir()}
    except FileNotFoundError:  # It was moved or replaced in between.
        return None
    if not present:
        return None
    try:
        index = _index(folder)
    except BundleInvalid:
        index = None
    known = set() if index is None else {INDEX, PASSPORT, *index.files}
    if foreign := sorted(present - known):
        return f"{folder} holds other files ({', '.join(foreign[:3])}), which would be lost; name a new folder"
    if index is not None and index.kind == "backbone" and kind != "backbone":
        return f"{folder} is a backbone, which prompts beside it may need; name a new folder"
    if index is not None and index.kind != "backbone" and kind == "backbone":
        return f"{folder} is a {index.kind} bundle in the backbone's place; move it elsewhere"
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


def read_index(folder: Path, *kinds: BundleKind) -> BundleIndex:
    """Reads bundle.json, and checks that what it lists is there: plain files of these sizes. Their content is not read.

    Args:
        folder: the bundle.
        kinds: accepted kinds; any if empty.

    Raises:
        BundleInvalid: not a bundle, of another kind, or a file is missing or of another size; the text names it.
    """
    index = _index(folder)
    if kinds and index.kind not in kinds:
        hint = _MAKES[kinds[0]]
        if index.kind == "backbone" and "prompt" in kinds:
            hint = "name the folder of a prompt, which is beside its backbone"
        if (other := {"generator": "generate", "model": "predict", "prompt": "predict"}.get(index.kind)) is not None:
            hint = f"`edge_client {other}` runs it"
        raise BundleInvalid(f"{folder} is a {index.kind} bundle where a {kinds[0]} bundle is needed; {hint}")
    for name, expected in index.files.items():
        path = folder / name
        try:
            found = path.stat()
        except FileNotFoundError:
            raise BundleInvalid(f"{path} is missing; copy or make the bundle again") from None
        except OSError as error:
            raise BundleInvalid(f"{path} cannot be read: {error.strerror}") from error
        # Reading a pipe or a device might never end.
        if not stat.S_ISREG(found.st_mode):
            raise BundleInvalid(f"{path} is not a plain file; copy or make the bundle again")
        if found.st_size != expected.size:
            raise BundleInvalid(_differs(path, found.st_size, expected.size))
    return index


def _differs(path: Path, size: int, expected: int) -> str:
    return (
        f"{path} differs from what {INDEX} lists ({size} bytes, {expected} expected, or other content); "
        "copy or make the bundle again"
    )


def read_bundle(folder: Path, *kinds: BundleKind, unread: Collection[str] = ()) -> Bundle:
    """Reads and checks every file that bundle.json lists. Other files in the folder are ignored.

    Args:
        folder: the bundle.
        kinds: accepted kinds; any if empty.
        unread: large files that are checked in place and left out of `Bundle.files`; later users check them again.

    Raises:
        BundleInvalid: not a bundle, of another kind, or a file is missing or differs; the text names it.
    """
    index = read_index(folder, *kinds)
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
            raise BundleInvalid(_differs(path, size, expected.size))
        if data is not None:
            files[name] = data
    return Bundle(folder, index, files)
