"""Reads checkpoint folders as transformers saves them: tensors by name, and the entries of their vocabulary.

Guarantees: weights are read only from safetensors, since a pickle can run code, and no code from a folder is run. An
index can name only files of its own folder. Floats of 16, 32 and 64 bits come as float32. Other types are refused: a
quantised weight is nothing without its scale, which each library stores under another name.

Leaves to others: which tensors and entries they want, and whether these fit together.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from learning.text.examples import DataInvalid
from learning.text.textual import read_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "FILES",
    "INDEX",
    "WEIGHTS",
    "CheckpointInvalid",
    "Entries",
    "check_left_out",
    "present_name",
    "read_config",
    "read_entries",
    "read_object",
    "read_shapes",
    "read_tensors",
]

_Read = TypeVar("_Read")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_VOCABULARY, _TOKENIZER = "vocab.txt", "tokenizer.json"
# Patterns of the files that are read from a folder, and so all that a download needs.
FILES = ("config.json", "*.safetensors", INDEX, _VOCABULARY, "tokenizer*.json")

_PICKLES = {".bin", ".pt", ".pth"}
# Types whose numbers are the weights. numpy has all but BF16, which torch converts.
_FLOATS = ("F16", "BF16", "F32", "F64")
# The keys of config.json that say how a model was quantised; compressed-tensors wrote the second one.
_QUANTISED = ("quantization_config", "compression_config")
# A layer's number inside a tensor's name.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ORIGINAL = "use the unquantised original (F16, BF16 or F32)"


class CheckpointInvalid(ValueError):
    """The folder is no checkpoint. The text starts with the folder or file and says what to do."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a checkpoint's vocabulary.

    Attributes:
        kind: "WordPiece" or "WordLevel", or the tokenizer's own word for another kind, whose entries are not read; None
            if the folder has no vocabulary.
        rows: (entry, its row of the embedding), by row. An entry may occur twice.
    """

    kind: str | None
    rows: tuple[tuple[str, int], ...]


def read_entries(folder: Path) -> Entries:
    """Reads entries from vocab.txt, one a line, or else from tokenizer.json.

    Raises:
        CheckpointInvalid: A file of that name is something else.
    """
    if (lines := folder / _VOCABULARY).is_file():
        # Only \n ends an entry: vocabularies have characters at which splitlines() would cut.
        text = _text(lines).removesuffix("\n")
        return Entries("WordPiece", tuple((line.removesuffix("\r"), row) for row, line in enumerate(text.split("\n"))))
    path = folder / _TOKENIZER
    whole = read_object(path)
    if whole is None:
        return Entries(None, ())
    try:
        model = whole["model"]
        kind = str(model["type"])
        if kind not in ("WordPiece", "WordLevel"):
            return Entries(kind, ())
        rows = [(str(entry), int(row)) for entry, row in model["vocab"].items() if int(row) >= 0]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise CheckpointInvalid(f"{path} is not a tokenizer; download the checkpoint again") from None
    return Entries(kind, tuple(sorted(rows, key=lambda each: each[1])))


def read_object(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None if the file does not exist.

    Raises:
        CheckpointInvalid: The file has something else.
    """
    if not path.is_file():
        return None
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{path} is not JSON ({error}); download the checkpoint again") from None
    if not isinstance(found, dict):
        raise CheckpointInvalid(f"{path} is not a JSON object; download the checkpoint again")
    return found


def read_config(folder: Path) -> dict[str, Any] | None:
    """Reads config.json; None if it does not exist.

    Raises:
        CheckpointInvalid: The file has something else, or says that the model is quantised.
    """
    path = folder / "config.json"
    raw = read_object(path)
    if found := [key for key in _QUANTISED if raw is not None and raw.get(key) is not None]:
        raise CheckpointInvalid(f"{path} has a {found[0]}: its weights are quantised, which is not read; {_ORIGINAL}")
    return raw


def check_left_out(stored: str, name: str, known: Collection[str]) -> None:
    """Checks that a tensor may be left out: it is in no module whose weight is read, and in no further layer.

    In such a module it would change what the weight computes: a scale or zero point of a quantised one, a change of an
    adapter, or a bias that the config does not have. Poolers, heads, copies of tied tables and buffers are in modules
    of their own. A further layer is one that the config does not count, and without it the model is another.

    Args:
        stored: Its stored name, for the sentence.
        name: Its name, as the known ones are called.
        known: The names of what is read.

    Raises:
        CheckpointInvalid: It is inside one.
    """
    alike = _NUMBER.sub("*", name)
    if alike != name and any(_NUMBER.sub("*", each) == alike for each in known):
        raise CheckpointInvalid(
            f"the tensor {stored[:120]} is in a layer that the config does not count, so the model would be cut; use "
            "the config.json that belongs to the weights"
        )
    owner = name
    while "." in owner:
        owner = owner.rpartition(".")[0]
        if f"{owner}.weight" in known:
            raise CheckpointInvalid(
                f"the tensor {stored[:120]} belongs to a weight and is not read here, so the model would compute "
                f"something else; if it is a scale or zero point, {_ORIGINAL}"
            )


def read_tensors(folder: Path, wanted: Callable[[str], str | None]) -> "Iterator[tuple[str, NDArray[np.float32]]]":
    """Yields the wanted tensors one by one, since checkpoints are large.

    Args:
        folder: The checkpoint.
        wanted: Maps a tensor's stored name to the name that is returned; None skips it.

    Raises:
        CheckpointInvalid: The folder has no safetensors, lacks one that its index names, or has damaged ones. A wanted
            tensor is quantised.
    """
    yield from _each(folder, wanted, _tensor)


def read_shapes(folder: Path, wanted: Callable[[str], str | None]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Like `read_tensors`, but yields only shapes and reads no numbers."""
    yield from _each(folder, wanted, _shape)


def _each(
    folder: Path, wanted: Callable[[str], str | None], read: Callable[[Path, Any, str], _Read]
) -> Iterator[tuple[str, _Read]]:
    """Yields, for each wanted tensor, what `read` returns for the file's path, the open file and the stored name."""
    from safetensors import SafetensorError, safe_open

    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="np") as file:
                for stored in file.keys():  # noqa: SIM118  no mapping
                    name = wanted(stored)
                    if name is not None:
                        yield name, read(path, file, stored)
        except FileNotFoundError:
            raise CheckpointInvalid(f"{folder} names {path.name} and does not have it; download it again") from None
        except (OSError, SafetensorError, UnicodeDecodeError) as error:
            raise CheckpointInvalid(
                f"{path} cannot be read as safetensors ({_one_line(error)}); download it again"
            ) from None


def present_name(stored: str) -> str:
    """A tensor's present name. Old checkpoints call a normalisation's weight and bias gamma and beta."""
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if stored.endswith(old):
            return stored.removesuffix(old) + new
    return stored


def _shape(_: Path, file: Any, stored: str) -> tuple[int, ...]:
    return tuple(file.get_slice(stored).get_shape())


def _tensor(path: Path, file: Any, stored: str) -> "NDArray[np.float32]":
    import numpy as np
    from safetensors import safe_open

    kind = file.get_slice(stored).get_dtype()
    if kind not in _FLOATS:
        raise CheckpointInvalid(f"{path} has {stored[:120]} as {kind}, a quantised type, not read here; {_ORIGINAL}")
    if kind != "BF16":
        return np.asarray(file.get_tensor(stored), dtype=np.float32)
    with safe_open(path, framework="pt") as tensors:
        tensor: Any = tensors.get_tensor(stored)
        return np.asarray(tensor.float().numpy(), dtype=np.float32)


def _weight_files(folder: Path) -> list[Path]:
    """The whole file, or else the parts that the index names, or else the parts in the folder."""
    whole = folder / WEIGHTS
    if whole.is_file():
        return [whole]
    index = read_object(folder / INDEX)
    if index is None:
        parts = sorted(folder.glob("*.safetensors"))
        if not parts:
            raise CheckpointInvalid(_without_weights(folder))
        return parts
    try:
        # Only the last part of a name with a folder counts.
        return [folder / Path(name).name for name in sorted({str(name) for name in index["weight_map"].values()})]
    except (KeyError, AttributeError):
        raise CheckpointInvalid(f"{folder / INDEX} is not an index of weights; download the checkpoint again") from None


def _without_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if not pickled:
        return f"{folder} has no {WEIGHTS}; save the model there with transformers' save_pretrained"
    return (
        f"{folder} has {', '.join(pickled)} and no {WEIGHTS}: a pickle can run code when it is read. Load it on a "
        "machine where you trust it, and save it again with transformers' save_pretrained, which writes safetensors"
    )


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except DataInvalid as error:
        raise CheckpointInvalid(str(error)) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
