"""Reads base models, a job's starting point, from a folder of the transformers library or from the hub.

Guarantees: every tensor of the encoder was there, finite and in its shape. Every error starts with `model.base:`, the
job's key that names the base. The hub is asked only for names, never for a path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learning.backbones.checkpoint import (
    CheckpointInvalid,
    check_left_out,
    present_name,
    read_config,
    read_entries,
    read_object,
    read_tensors,
)
from learning.backbones.hub import checkpoint_folder
from learning.models.transformer import FAMILIES, EncoderInvalid, bare_encoder, check_config

__all__ = ["Base", "read_base"]

_WORDS = "embeddings.word_embeddings.weight"
_SAVE = "name a folder that transformers' save_pretrained wrote"


@dataclass(frozen=True, slots=True)
class Base:
    """A pretrained encoder.

    Attributes:
        config: For the job's document.
        parameters: float32, by the names of `TransformerClassifier`, without the head's.
        vocabulary: Word pieces in the order of the embedding's rows; None if the base has none (RoBERTa).
        tokenizer: The bytes of tokenizer.json, if there is one.
        lower_case: Whether texts must be in lower case; None if the base does not say.
    """

    config: dict[str, Any]
    parameters: dict[str, NDArray[np.float32]]
    vocabulary: tuple[str, ...] | None
    tokenizer: bytes | None
    lower_case: bool | None


def read_base(base: str, max_tokens: int) -> Base:
    """Reads an encoder as transformers saves it, from a folder or, if there is no such folder, from the hub.

    Raises:
        EncoderInvalid: It does not exist, has another model type or no safetensors, is quantised, or its tensors do
            not fit its config.
    """
    try:
        return _read(checkpoint_folder(base), base, max_tokens)
    except CheckpointInvalid as error:
        raise _invalid(str(error)) from None


def _invalid(sentence: str) -> EncoderInvalid:
    return EncoderInvalid(f"model.base: {sentence}")


def _read(folder: Path, base: str, max_tokens: int) -> Base:
    raw = read_config(folder)
    if raw is None:
        raise _invalid(f"{base} has no config.json; {_SAVE}")
    config = _config_of(raw, max_tokens)
    shapes = {name: tuple(each.shape) for name, each in bare_encoder(config).named_parameters()}
    tokenizer = folder / "tokenizer.json"
    return Base(
        config,
        _read_parameters(folder, config, shapes),
        _read_vocabulary(folder),
        tokenizer.read_bytes() if tokenizer.is_file() else None,
        _lower_case(folder),
    )


def _config_of(raw: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """What a job needs of a config.json."""
    kind = raw.get("model_type")
    if raw.get("sinusoidal_pos_embds") or raw.get("position_embedding_type", "absolute") != "absolute":
        raise _invalid("it does not have one learned vector for each position; choose another base")
    if raw.get("is_decoder") or raw.get("add_cross_attention") or raw.get("is_encoder_decoder"):
        raise _invalid("it is not a plain encoder (is_decoder, or cross attention); choose another base")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    known = {key: raw[key] for key in raw if family is None or key in family.keys}
    return check_config(known, max_tokens, named="model.base")


def _read_parameters(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, NDArray[np.float32]]:
    """The encoder's parameters of these shapes and the word embedding, in the order of `TransformerClassifier`."""
    prefix, names = f"{config['model_type']}.", {_WORDS, *shapes}

    def wanted(stored: str) -> str | None:
        name = present_name(stored.removeprefix(prefix))
        if name in names:
            return name
        check_left_out(stored, name, names)
        return None

    found = {name: np.ascontiguousarray(values) for name, values in read_tensors(folder, wanted)}
    if missing := [name for name in (_WORDS, *shapes) if name not in found]:
        raise _invalid(
            f"its safetensors lack {len(missing)} of the encoder's tensors, {missing[0]} first; use the config.json "
            "that belongs to them"
        )
    hidden = config[FAMILIES[config["model_type"]].hidden]
    if found[_WORDS].ndim != 2 or found[_WORDS].shape[1] != hidden:
        raise _invalid(
            f"its {_WORDS} has shape {found[_WORDS].shape}, and its config.json needs {hidden} columns; use the "
            "config.json that belongs to it"
        )
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise _invalid(
                f"its {name} has shape {found[name].shape}, and its config.json needs {shape}; use the config.json "
                "that belongs to it"
            )
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise _invalid(f"its {name} has values that are not finite; download it again")
    return {"embedding.weight": found[_WORDS]} | {f"encoder.{name}": found[name] for name in shapes}


def _read_vocabulary(folder: Path) -> tuple[str, ...] | None:
    """Word pieces in the order of the embedding's rows."""
    entries = read_entries(folder)
    if entries.kind != "WordPiece":
        return None
    if [row for _, row in entries.rows] != list(range(len(entries.rows))):
        raise _invalid("the ids in its tokenizer.json have gaps; give it a vocab.txt, one piece a line")
    return tuple(entry for entry, _ in entries.rows)


def _lower_case(folder: Path) -> bool | None:
    said = (read_object(folder / "tokenizer_config.json") or {}).get("do_lower_case")
    if said is None:
        normaliser = (read_object(folder / "tokenizer.json") or {}).get("normalizer")
        said = normaliser.get("lowercase") if isinstance(normaliser, dict) else None
    return None if said is None else bool(said)
