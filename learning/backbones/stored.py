"""Backbones on disk: one canonical file of a frozen language model, whatever files it came from.

A backbone is named by the SHA-256 of its canonical file (`learning.backbones.layout`), a safetensors file that we write
ourselves. So the same values have the same name, whether they were in one file or in shards, with or without a pooler,
under old names or new ones. The file of a folder in half precision differs from that of its float32 original only where
its values differ.

Guarantees: weights are read only from safetensors (`learning.backbones.checkpoint`), one tensor in memory at a time.
`read_backbone` checks the length, the header, which the config alone determines, and that values are finite and
bounded. Then it returns read-only views of the file's memory map, without a copy.

Assumption: the file is the member's own, and nobody changes it while it is mapped. The caller that opens it checks its
digest (`edge_client.downloads.backbones`).
"""

import hashlib
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning.artifacts import LARGEST_WEIGHT
from learning.backbones.checkpoint import CheckpointInvalid, check_left_out, present_name, read_config, read_tensors
from learning.backbones.layout import (
    CAUSAL_FAMILIES,
    FAMILIES,
    BackboneInvalid,
    Layout,
    checked_config,
    known_keys,
    layout_of,
    library_config,
)
from learning.causal.config import CausalConfigInvalid, flat_config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["StoredBackbone", "digest_of", "folder_config", "read_backbone", "write_backbone"]

_SAVE = "name a folder that transformers' save_pretrained wrote"
_T5_HEAD = "lm_head.weight"
# Where the names of a family's tensors begin with something else than the family.
_PREFIXES = {"gpt2": "transformer", **dict.fromkeys(sorted(set(CAUSAL_FAMILIES) - {"gpt2"}), "model")}


@dataclass(frozen=True, eq=False)
class StoredBackbone:
    """A backbone for `learning.prompts`.

    Attributes:
        config: The library's config.
        tensors: Read-only float32 views of the mapped file, by the library's names.
    """

    config: Mapping[str, Any]
    tensors: "Mapping[str, NDArray[np.float32]]"

    def __repr__(self) -> str:
        return f"StoredBackbone({self.config['model_type']}, {len(self.tensors)} tensors)"


def digest_of(path: Path) -> bytes:
    """The SHA-256 of a file, 32 bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


# ---- from a folder ---------------------------------------------------------------------------------------------


def folder_config(folder: Path) -> dict[str, Any]:
    """The config of the backbone in a folder, as in a job's document.

    Only the names of the weights are read, except for the two tables of a T5 that has two.

    Raises:
        BackboneInvalid: The folder has no config.json, another kind of model, a quantised one, or no safetensors.
    """
    try:
        raw = read_config(folder)
        if raw is None:
            raise BackboneInvalid(f"{folder} has no config.json; {_SAVE}")
        return _config(folder, raw)
    except CheckpointInvalid as error:
        raise BackboneInvalid(str(error)) from None


def write_backbone(folder: Path, config: Mapping[str, Any], into: Path) -> bytes:
    """Writes the canonical file of the folder's backbone durably. Memory: the largest tensor.

    Args:
        folder: The checkpoint.
        config: The config from `folder_config`.
        into: The file to write.

    Returns:
        The file's digest, 32 bytes.

    Raises:
        BackboneInvalid: A tensor is missing, not finite, too large for weights, quantised, or has another shape.
        OSError: The file cannot be written.
    """
    layout = layout_of(config)
    kind, lacking = config["model_type"], set(layout.shapes)
    try:
        with into.open("w+b") as file:
            file.write(layout.header)
            # The full size, so tensors can come in any order.
            file.truncate(layout.size)
            for name, values in read_tensors(folder, lambda stored: _canonical(stored, kind, layout)):
                if name not in lacking:
                    raise BackboneInvalid(f"{folder} has {name} twice; save it again with save_pretrained")
                lacking.discard(name)
                _check_values(name, values, layout.shapes[name])
                file.seek(layout.places[name])
                file.write(values.astype("<f4", order="C", copy=False).data)
            if lacking:
                raise BackboneInvalid(
                    f"the safetensors in {folder} lack {len(lacking)} of the backbone's tensors, {min(lacking)} first; "
                    "use the config.json that belongs to them"
                )
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            return hashlib.file_digest(file, "sha256").digest()
    except CheckpointInvalid as error:
        raise BackboneInvalid(str(error)) from None


def _config(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        # Its error lists the model types.
        return checked_config({"model_type": kind})
    if kind in CAUSAL_FAMILIES:
        try:
            return checked_config(flat_config(raw) | {"vocab_size": raw.get("vocab_size")})
        except CausalConfigInvalid as error:
            raise BackboneInvalid(f"{folder}: {str(error).removeprefix('backbone: ')}") from None
    if raw.get("sinusoidal_pos_embds") or raw.get("position_embedding_type", "absolute") != "absolute":
        raise BackboneInvalid(f"{folder}: it does not have one learned vector for each position; choose another base")
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise BackboneInvalid(f"{folder}: it is a decoder, which cannot read the text after a mask; choose another")
    known = {key: raw[key] for key in known_keys(kind) if raw.get(key) is not None}
    if kind == "t5":
        known.setdefault("num_decoder_layers", known.get("num_layers"))
        # Checkpoints from before transformers 5 express this by whether the tables are tied.
        known.setdefault("scale_decoder_outputs", raw.get("tie_word_embeddings") is not False)
        return checked_config(known | {"lm_head": _has_own_table(folder)})
    # First as if the head were there, to see whether its tensors are.
    whole = checked_config(known | {"masked_lm": True})
    layout, body = layout_of(whole), layout_of(whole | {"masked_lm": False})
    names = {_canonical(stored, kind, layout) for stored in _names(folder)}
    return whole | {"masked_lm": (layout.shapes.keys() - body.shapes.keys()) <= names}


def _has_own_table(folder: Path) -> bool:
    """Whether T5 scores words with a separate table. Some files have one table twice."""
    import numpy as np

    wanted = {"shared.weight", _T5_HEAD}
    if _T5_HEAD not in _names(folder):
        return False
    found = dict(read_tensors(folder, lambda stored: stored if stored in wanted else None))
    return "shared.weight" not in found or not np.array_equal(found["shared.weight"], found[_T5_HEAD])


def _names(folder: Path) -> set[str]:
    """The names of the tensors in the folder's safetensors; no tensor is read."""
    found: set[str] = set()

    def told(stored: str) -> None:
        found.add(stored)

    for _ in read_tensors(folder, told):
        pass
    return found


def _canonical(stored: str, kind: str, layout: Layout) -> str | None:
    """A tensor's name in the canonical file; None if it is left out. Raises CheckpointInvalid if it may not be."""
    name = present_name(stored)
    # A model without its head is saved without its model's prefix.
    names = (name, f"{_PREFIXES.get(kind, kind)}.{name}")
    for each in names:
        if each in layout.shapes:
            return each
    for each in names:
        check_left_out(stored, each, layout.shapes)
    return None


# ---- the canonical file ----------------------------------------------------------------------------------------


def read_backbone(path: Path, config: Mapping[str, Any]) -> StoredBackbone:
    """Maps a canonical file into memory.

    It looks at every value once, which takes about a second a gigabyte and no extra memory. No error names the path:
    the content of a file that the job's digest names is the job's fault.

    Args:
        path: The file.
        config: The config in a job's document.

    Raises:
        BackboneInvalid: The config is out of bounds, the file's length or tensors are not the config's, or a value is
            not finite or too large for weights.
        OSError: The file cannot be opened.
    """
    import numpy as np

    layout = layout_of(checked_config(config))
    with path.open("rb") as file:
        if (size := os.fstat(file.fileno()).st_size) != layout.size:
            raise BackboneInvalid(f"the backbone's file has {size} bytes, and its config needs {layout.size}")
        if file.read(len(layout.header)) != layout.header:
            raise BackboneInvalid("the backbone's file does not have the tensors of its config")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {}
    for name, shape in layout.shapes.items():
        values = np.frombuffer(mapped, "<f4", math.prod(shape), layout.places[name]).reshape(shape)
        _check_values(name, values, shape)
        # The pages stay in the system's cache, and no longer count as this process's memory.
        if hasattr(mmap, "MADV_DONTNEED"):
            start = layout.places[name] // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, start, layout.places[name] + values.nbytes - start)
        tensors[name] = values
    return StoredBackbone(library_config(config), tensors)


def _check_values(name: str, values: "NDArray[np.float32]", shape: tuple[int, ...]) -> None:
    """Checks shape and size of values. Values far larger than weights are made to break arithmetic, and so privacy."""
    if values.shape != shape:
        raise BackboneInvalid(f"the backbone's {name} has shape {values.shape}, and its config needs {shape}")
    # min() and max() make no copy of the tensor, and comparisons with nan are false.
    if not (float(values.min()) >= -LARGEST_WEIGHT and float(values.max()) <= LARGEST_WEIGHT):
        raise BackboneInvalid(
            f"the backbone's {name} has values that are not finite, or beyond {LARGEST_WEIGHT:g}; choose another"
        )
