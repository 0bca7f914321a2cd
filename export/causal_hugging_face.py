"""Exports a version of a job that writes to a folder for peft (`--format peft`) or transformers (`--format hf`).

    peft   LoRA, a soft prompt or a prefix, as an adapter for `PeftModel.from_pretrained` on the job's base
    hf     the base with LoRA merged into it, for `AutoModelForCausalLM.from_pretrained`

Guarantees: before anything is written, the library itself computes with exactly the files, and the logits differ from
the trained model's by at most `TOLERANCE`. The same version gives the same bytes on every machine, but for the measured
difference in the README. Merged weights go through memory one tensor at a time.

A soft prompt is no weight of the base, so it has no merged form: `check_causal_format` names the format to use.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from export.card import README, UNKNOWN_ORIGIN, Origin
from export.causal_changes import Change, lora_changes, stores_inwards
from export.causal_weights import write_weights
from export.generator import TOLERANCE, compared_ids, trained_arrays
from export.hugging_face import FormatRefused
from export.onnx import ExportReport, ParityFailed, check_numbers
from export.prompted_bundle import mapped
from export.writer_card import causal_card
from learning.causal.config import sizes_of
from learning.text.turns import Dialogue
from tacit.bundle import WEIGHTS_FILE, check_place, scratch_beside, write_bundle
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.prompt import Generate, LoRA, PrefixTuning, PromptedModel

if TYPE_CHECKING:
    from learning.backbones.stored import StoredBackbone
    from learning.causal.model import CausalModel
    from learning.text.dialogue import DialogueEncoder

__all__ = [
    "CausalFormat",
    "adapter_files",
    "check_causal_format",
    "common_files",
    "export_causal",
    "merged_config",
    "write_merged",
]

CausalFormat = Literal["peft", "hf"]
_ADAPTER = "adapter_model.safetensors"


def check_causal_format(document: JobDocument, format: CausalFormat) -> None:
    """Checks that a job that writes has a form for the library.

    Raises:
        FormatRefused: it has none.
    """
    model = document.model
    if not isinstance(model, PromptedModel) or not isinstance(model.task, Generate):
        raise FormatRefused(f"job {document.name} labels texts; export it with --format onnx or hf")
    if format == "hf" and not isinstance(model.injection, LoRA):
        raise FormatRefused(
            f"job {document.name} trains {model.injection.name}, which cannot be merged into its base; export it with "
            "--format peft"
        )


def export_causal(
    document: JobDocument,
    manifest: Manifest,
    weights: bytes,
    tokenizer: bytes,
    out: Path,
    samples: Sequence[Dialogue],
    *,
    format: CausalFormat,
    backbone: "StoredBackbone | None" = None,
    frozen: Mapping[str, NDArray[np.float32]] | None = None,
    origin: Origin = UNKNOWN_ORIGIN,
) -> ExportReport:
    """Writes the folder `out`. Arguments and errors are those of `export.generator.export_generator`, and:

    Args:
        format: the library that loads the folder.

    Raises:
        FormatRefused: the model has no form in this format.
    """
    check_causal_format(document, format)
    model = document.model
    if not isinstance(model, PromptedModel):  # Checked just now; for the type checker.
        raise TypeError(type(model).__name__)
    check_place(out, "hf")
    if not samples:
        raise ValueError("no dialogues to compare the exported model on; give at least one")
    from learning.models.assembly import NOTHING, whole_writer

    module, encoder = whole_writer(document, manifest, weights, tokenizer, backbone=backbone, frozen=frozen or NOTHING)
    alpha = model.injection.alpha if isinstance(model.injection, LoRA) else 1.0
    with scratch_beside(out) as folder:
        files = common_files(module, tokenizer, encoder, model)
        if format == "peft":
            files |= adapter_files(module, model)
        else:
            write_merged(module, alpha, folder / WEIGHTS_FILE)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        difference = _checked(module, folder, format, [compared_ids(encoder, each) for each in samples])
        files[README] = causal_card(
            document,
            hashlib.sha256(weights).digest(),
            origin,
            encoder,
            library=format,
            difference=difference,
            texts=len(samples),
        )
        if format == "peft":
            index = write_bundle(out, "hf", files)
        else:
            with mapped(folder / WEIGHTS_FILE) as data:
                index = write_bundle(out, "hf", {**files, WEIGHTS_FILE: data})
    return ExportReport(difference, len(samples), {name: file.size for name, file in index.files.items()})


def write_merged(module: "CausalModel", alpha: float, into: Path) -> None:
    """Writes the backbone's values with LoRA merged, under transformers' names."""
    config = module.backbone.config
    tensors = {name: each.numpy() for name, each in module.backbone.on("cpu").items()}
    changes = lora_changes(config, trained_arrays(module), alpha)
    write_weights(tensors, changes, into, inwards=stores_inwards(config))


# ---- adapters --------------------------------------------------------------------------------------------------


def adapter_files(module: "CausalModel", model: PromptedModel) -> dict[str, bytes]:
    """adapter_config.json and the adapter's values, as peft reads them."""
    from safetensors.numpy import save

    config, values = module.backbone.config, trained_arrays(module)
    base, _, revision = (model.hub or "").partition("@")
    told: dict[str, Any] = {
        "base_model_name_or_path": base or None,
        "revision": revision or None,
        "inference_mode": True,
        "task_type": "CAUSAL_LM",
    }
    if isinstance(model.injection, LoRA):
        matrices, ranks = _lora(lora_changes(config, values, model.injection.alpha), config)
        rank = max(ranks.values())
        told |= {
            "peft_type": "LORA",
            "r": rank,
            # Every module has the scale alpha / rank of the job.
            "lora_alpha": model.injection.alpha / model.injection.rank * rank,
            "rank_pattern": {name: each for name, each in ranks.items() if each != rank},
            "alpha_pattern": {
                name: model.injection.alpha / model.injection.rank * each
                for name, each in ranks.items()
                if each != rank
            },
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": stores_inwards(config),
            "target_modules": sorted(ranks),
        }
    else:
        sizes, prefix = sizes_of(config), isinstance(model.injection, PrefixTuning)
        matrices = {"prompt_embeddings": values["prompt.vectors.weight"]}
        told |= {
            "peft_type": "PREFIX_TUNING" if prefix else "PROMPT_TUNING",
            "num_virtual_tokens": module.ahead,
            "num_layers": sizes.layers,
            "num_transformer_submodules": 1,
            # A prefix has keys and values of the heads that keep them.
            "num_attention_heads": sizes.key_heads if prefix else sizes.heads,
            "token_dim": sizes.key_heads * sizes.head if prefix else sizes.width,
        }
        told |= {"prefix_projection": False} if prefix else {"prompt_tuning_init": "RANDOM"}
    data = save({name: np.ascontiguousarray(each) for name, each in sorted(matrices.items())}, {"format": "pt"})
    return {"adapter_config.json": _json(told), _ADAPTER: data}


def _lora(
    changes: Mapping[str, Sequence[Change]], config: Mapping[str, Any]
) -> tuple[dict[str, NDArray[np.float32]], dict[str, int]]:
    """The matrices by peft's names, and the rank of each module.

    Several parts of one matrix become one change whose rank is the sum of theirs: A stacked, B in blocks.
    """
    width = sizes_of(config).width
    matrices, ranks = {}, {}
    for module, parts in changes.items():
        down = np.concatenate([each.down for each in parts])
        outputs = 3 * width if module.endswith("c_attn") else len(parts[0].up)
        up, at = np.zeros((outputs, len(down)), dtype=np.float32), 0
        for each in parts:
            rank = len(each.down)
            up[each.first : each.first + len(each.up), at : at + rank] = each.up
            at += rank
        ranks[module] = len(down)
        matrices[f"base_model.model.{module}.lora_A.weight"] = down
        matrices[f"base_model.model.{module}.lora_B.weight"] = up
    return matrices, ranks


# ---- what both have --------------------------------------------------------------------------------------------


def merged_config(module: "CausalModel", encoder: "DialogueEncoder") -> dict[str, Any]:
    """config.json of the base."""
    from learning.causal.backbone import library_config

    made = library_config(module.backbone.config, module.backbone.vocabulary_size)
    told: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    # What only the library's own session knows, such as its version.
    for key in ("transformers_version", "_name_or_path", "torch_dtype", "bos_token_id", "pad_token_id"):
        told.pop(key, None)
    kind = type(made).__name__.removesuffix("Config")
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return {**told, "architectures": [head], "dtype": "float32", "eos_token_id": encoder.end_id}


def common_files(
    module: "CausalModel", tokenizer: bytes, encoder: "DialogueEncoder", model: PromptedModel
) -> dict[str, bytes]:
    """The config, how the model writes, and the tokenizer's files."""
    names = encoder.words()
    settings = {
        "clean_up_tokenization_spaces": False,
        "eos_token": encoder.end,
        "model_max_length": min(module.room, encoder.max_tokens),
        "pad_token": names[encoder.pad_id],
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    task = model.task
    written = {"eos_token_id": sorted(encoder.end_ids), "pad_token_id": encoder.pad_id, "do_sample": False}
    if isinstance(task, Generate):
        written["max_new_tokens"] = task.max_new_tokens
    return {
        "config.json": _json(merged_config(module, encoder)),
        "generation_config.json": _json(written),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _json(settings),
    }


def _checked(module: "CausalModel", folder: Path, format: CausalFormat, rows: Sequence[Sequence[int]]) -> float:
    """Loads the folder with the library, and returns the largest difference of any logit.

    Raises:
        ParityFailed: it is more than TOLERANCE.
    """
    import torch

    loaded = _loaded(module, folder, format)
    largest = 0.0
    with torch.no_grad():
        for ids in rows:
            given = torch.tensor([ids])
            found = loaded(input_ids=given, attention_mask=torch.ones_like(given)).logits[:, -len(ids) :]
            expected = module(given)
            check_numbers(expected.numpy())
            largest = float(np.maximum(largest, (found - expected).abs().max().item()))
    if not largest <= TOLERANCE:  # Written so that a NaN fails.
        raise ParityFailed(
            f"the exported model's logits differ from the trained model's by {largest:.3g}, more than {TOLERANCE:g}; "
            "nothing was written. Install the versions of torch, transformers and peft in constraints.txt"
        )
    return largest


def _loaded(module: "CausalModel", folder: Path, format: CausalFormat) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    if format == "hf":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    from peft import PeftModel

    from learning.causal.backbone import library_config

    base = AutoModelForCausalLM.from_config(
        library_config(module.backbone.config, module.backbone.vocabulary_size), dtype=torch.float32
    )
    base.load_state_dict(dict(module.backbone.on("cpu")), strict=False)
    base.tie_weights()
    return PeftModel.from_pretrained(base, folder).eval()


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n").encode()
