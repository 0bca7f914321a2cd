"""Exports a version to a folder for transformers or peft (`coordinator export --format hf`).

    transformer classifiers,       a model for AutoModelForSequenceClassification, with the file of its class beside
    soft prompts with a head       it (`export.modeling_tacit`)
    LoRA                           an adapter for peft, on the base that the job was made with

Guarantees: before anything is written, transformers' own modules compute with exactly the tensors of the files, and the
logits are the trained model's within the limit of `checked_parity`. The same version gives the same bytes on every
machine, but for what torch computes: the values of a prompt's encoder, and the measured difference in the README.
Without the class file transformers refuses the folder, so nobody gets an untrained pooler instead of the mean that the
job trained.

Left out, with a sentence that names the format to use: models that transformers does not know, and prompts that peft
has no equivalent for.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export.card import README, UNKNOWN_ORIGIN, Origin, base_arguments, row_lines, transformers_card
from export.onnx import ExportReport, checked_parity
from learning.backbones.layout import library_config
from learning.text.cloze_tokenizer import FAMILIES
from tacit.bundle import check_place, write_bundle
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.model import Model, PromptedModel, RvaeModel, TransformerModel
from tacit.prompt import Cloze, LoRA, PrefixTuning

if TYPE_CHECKING:
    from torch import Tensor

    from learning.backbones.stored import StoredBackbone
    from learning.models import TextClassifier
    from learning.prompts.model import PromptedModel as PromptedModule
    from learning.text.cloze import ClozeEncoder
    from learning.text.encoder import TextEncoder
    from learning.text.examples import TextRow

    Encoder = TextEncoder | ClozeEncoder

__all__ = ["FormatRefused", "check_format", "export_hf"]

_MODELING = "modeling_tacit.py"
_Tensors = Mapping[str, NDArray[np.float32]]


class FormatRefused(ValueError):
    """The job's model has no form in this format. The text says why, and which format to use."""


def _is_adapter(model: Model) -> bool:
    """Whether peft can run the model as an adapter. Under a head over chosen layers LoRA's changes are merged."""
    return isinstance(model, PromptedModel) and isinstance(model.injection, LoRA) and not model.centred


def check_format(name: str, model: Model) -> None:
    """Checks that a job's model has a form for transformers or peft.

    Args:
        name: the job's name, for the sentence.
        model: the job's model.

    Raises:
        FormatRefused: it has none.
    """
    other = "export it with --format onnx"
    match model:
        case RvaeModel():
            raise FormatRefused(
                f"job {name} trains an rvae, which writes text and labels none; sample its texts with "
                f"`coordinator sample {name} --out FOLDER`"
            )
        case TransformerModel():
            return
        case PromptedModel(injection=LoRA()):
            return
        case PromptedModel(injection=PrefixTuning()):
            raise FormatRefused(f"transformers and peft have no equivalent of this job's prefix; {other}")
        case PromptedModel(task=Cloze(), injection=injection):
            raise FormatRefused(
                f"peft has no equivalent of {injection.name} that answers at a mask, as job {name} does; {other}"
            )
        case PromptedModel():
            return
        case _:
            raise FormatRefused(f"transformers knows no {model.architecture}, which job {name} trains; {other}")


def export_hf(
    document: JobDocument,
    manifest: Manifest,
    weights: bytes,
    tokenizer: bytes,
    out: Path,
    samples: "Sequence[TextRow]",
    *,
    backbone: "StoredBackbone | None" = None,
    frozen: Mapping[str, NDArray[np.float32]] | None = None,
    origin: Origin = UNKNOWN_ORIGIN,
) -> ExportReport:
    """Writes the folder `out`.

    Args:
        document: the job document.
        manifest: the job's manifest.
        weights: the version's bytes.
        tokenizer: the bytes of tokenizer.json.
        out: the folder.
        samples: texts to compare on (pairs, if the job reads pairs).
        backbone: the backbone of a prompted job.
        frozen: the parameters that the job freezes, by name.
        origin: what the README says of the version besides its digest.

    Raises:
        FormatRefused: the model has no form in this format.
        ParityFailed: as for `export_model`. `out` is unchanged.
        BundleInvalid: a folder is in the way. Nothing was written.
        DocumentInvalid, ParametersDiffer, TokenizerInvalid: the files do not belong together.
        ValueError: there are no samples.
    """
    check_format(document.name, document.model)
    check_place(out, "hf")
    if not samples:
        raise ValueError("no texts to compare the exported model on; give at least one")
    from learning.models.assembly import whole_model

    module, encoder = whole_model(document, manifest, weights, tokenizer, backbone=backbone, frozen=frozen)
    adapter = _is_adapter(document.model)
    made = _adapter(document, module, encoder) if adapter else _model(document, module, encoder)
    difference = checked_parity(module, made.run, encoder, samples, only_texts=True)
    apart = encoder.pairs and isinstance(document.model, PromptedModel) and _tells_apart(document.model.config or {})
    headed = not (isinstance(document.model, PromptedModel) and isinstance(document.model.task, Cloze))
    files = made.files | _tokenizer_files(tokenizer, encoder, apart=apart, headed=headed)
    files[README] = transformers_card(
        document,
        hashlib.sha256(weights).digest(),
        origin,
        library="peft" if adapter else "transformers",
        files={name: what for name, what in _FILES.items() if name in files},
        run=made.usage,
        difference=difference,
    )
    index = write_bundle(out, "hf", files)
    return ExportReport(difference, len(samples), {name: file.size for name, file in index.files.items()})


_FILES = {
    "model.safetensors": "the weights",
    "adapter_model.safetensors": "the adapter's matrices",
    "head.safetensors": "`weight` and `bias` of the linear layer over the mean of the text's states",
    "config.json": "the sizes, and the labels (`id2label`)",
    "adapter_config.json": "the adapter's settings",
    "modeling_tacit.py": "the model's class, for transformers",
    "tokenizer.json": "the tokenizer",
    "tokenizer_config.json": "its settings",
}


@dataclass(frozen=True, slots=True)
class _Made:
    """A converted model: its files, the lines of its README, and what maps ids (B, S) to logits with these files."""

    files: dict[str, bytes]
    usage: list[str]
    run: Callable[[NDArray[np.int64]], NDArray[np.float32]]


# ---- models ----------------------------------------------------------------------------------------------------


def _model(document: JobDocument, module: "TextClassifier", encoder: "Encoder") -> _Made:
    from export.modeling_tacit import TacitConfig, TacitForSequenceClassification
    from learning.models.transformer import first_position

    sizes, tensors, prompt = _parts(document.model, module)
    config: dict[str, Any] = {
        "architectures": ["TacitForSequenceClassification"],
        "auto_map": {
            "AutoConfig": "modeling_tacit.TacitConfig",
            "AutoModelForSequenceClassification": "modeling_tacit.TacitForSequenceClassification",
        },
        "model_type": TacitConfig.model_type,
        "encoder": sizes,
        "first_position": 0 if sizes["model_type"] == "electra" else first_position(sizes),
        "prompt_tokens": 0 if prompt is None else len(prompt),
        "head_layers": list(getattr(module, "head_layers", ())),
        "pad_token_id": encoder.pad_id,
        "dtype": "float32",
        **_labels(document.labels),
    }
    data = _safetensors(tensors)
    made = TacitForSequenceClassification(TacitConfig(**{key: config[key] for key in config if key not in _NOT_SIZES}))
    _load(made, data)

    def run(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        import torch

        given = torch.from_numpy(ids)
        with torch.no_grad():
            found = made(given, attention_mask=given != encoder.pad_id, token_type_ids=_types(given, module)).logits
        logits: NDArray[np.float32] = found.numpy()
        return logits

    files = {
        "config.json": _json(config),
        "model.safetensors": data,
        _MODELING: (Path(__file__).parent / _MODELING).read_bytes(),
    }
    return _Made(files, _model_usage(encoder.pairs), run)


_NOT_SIZES = ("architectures", "auto_map", "model_type", "dtype")


def _parts(model: Model, module: "TextClassifier") -> "tuple[dict[str, Any], _Tensors, NDArray[np.float32] | None]":
    """The encoder's config, all tensors by the class's names, and the prompt (tokens, width) if there is one."""
    from learning.models.transformer import TransformerClassifier
    from learning.prompts.backbone import tensor_shapes
    from learning.prompts.model import PromptedModel as PromptedModule

    # A smaller vocabulary need not have the ids that the library gives to its special tokens.
    none = {"bos_token_id": None, "eos_token_id": None}
    tensors: dict[str, NDArray[np.float32]] = {}
    prompt = None
    if isinstance(module, TransformerClassifier) and isinstance(model, TransformerModel):
        sizes = {**none, **dict(model.config or {}), "vocab_size": module.embedding.num_embeddings}
        tensors["encoder.embeddings.word_embeddings.weight"] = module.embedding.weight.detach().numpy()
        tensors |= {f"encoder.{name}": each.detach().numpy() for name, each in module.encoder.named_parameters()}
    elif isinstance(module, PromptedModule) and isinstance(model, PromptedModel):
        sizes = {**none, **library_config(model.config or {})}
        known = module.backbone.on("cpu")
        body = tensor_shapes(module.backbone.config, module.backbone.vocabulary_size).body
        tensors |= {f"encoder.{name}": known[name].numpy() for name in body}
        tensors |= _changed(module)
        if module.head_layers:
            tensors["centre"] = module.centre.detach().numpy()
        values = module.prompt_values(1)
        if values is not None:
            prompt = tensors["prompt"] = values[0].detach().numpy()
    else:
        raise TypeError(f"{type(module).__name__} has no form for transformers")
    head = module.get_submodule("output")
    tensors |= {f"classifier.{name}": each.detach().numpy() for name, each in head.named_parameters()}
    return sizes, tensors, prompt


def _changed(module: "PromptedModule") -> dict[str, NDArray[np.float32]]:
    """The encoder's tensors that training changed: biases, and matrices with LoRA's change added."""
    from learning.prompts.injectors import Adapted

    found = {}
    for name, layer in module.layers.named_modules():
        if isinstance(layer, Adapted):
            found[f"encoder.{name}.weight"] = layer.merged()
        elif not name.endswith((".up", ".down")):
            found |= {
                f"encoder.{name}.{short}": each.detach().numpy()
                for short, each in layer.named_parameters(recurse=False)
            }
    return found


def _model_usage(pairs: bool) -> list[str]:
    given = '"a text", "another text"' if pairs else '"a text"'
    return [
        "## How to run it",
        "",
        "`pip install torch transformers`, and in this folder:",
        "",
        "```python",
        "import torch",
        "from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast",
        "",
        'tokenizer = PreTrainedTokenizerFast.from_pretrained(".")',
        'model = AutoModelForSequenceClassification.from_pretrained(".", trust_remote_code=True).eval()',
        f'given = tokenizer({given}, return_tensors="pt", truncation=True)',
        "with torch.no_grad():",
        "    odds = model(**given).logits[0].softmax(dim=0)",
        "print(model.config.id2label[int(odds.argmax())], float(odds.max()))",
        "```",
        "",
        "`trust_remote_code=True` runs `modeling_tacit.py` of this folder; read it first. It is needed because "
        "transformers' own classifiers of this encoder read the first token through a layer that this model does not "
        "have. This model reads means over the text's tokens.",
        *(
            ["", "If a pair is too long, transformers may keep one token more of one text than training did."]
            if pairs
            else []
        ),
    ]


# ---- adapters --------------------------------------------------------------------------------------------------


def _adapter(document: JobDocument, module: "TextClassifier", encoder: "Encoder") -> _Made:
    from learning.prompts.injectors import Adapted
    from learning.prompts.model import PromptedModel as PromptedModule
    from learning.text.cloze import ClozeEncoder

    model = document.model
    if not (
        isinstance(module, PromptedModule)
        and isinstance(encoder, ClozeEncoder)
        and isinstance(model, PromptedModel)
        and isinstance(model.injection, LoRA)
    ):
        raise TypeError(f"{type(module).__name__} has no adapter")
    kind, cloze = module.backbone.kind, isinstance(model.task, Cloze)
    # The library's models with a language model's head name the encoder inside; bare ones, and T5, do not.
    inside = f"{kind}." if cloze and kind != "t5" else ""
    adapted = {inside + name: each for name, each in module.layers.named_modules() if isinstance(each, Adapted)}
    matrices = {}
    for name, each in sorted(adapted.items()):
        matrices[f"base_model.model.{name}.lora_A.weight"] = each.down.weight.detach().numpy()
        matrices[f"base_model.model.{name}.lora_B.weight"] = each.up.weight.detach().numpy()
    data = _safetensors(matrices)
    base, _, revision = (model.hub or "").partition("@")
    settings = {
        "base_model_name_or_path": base or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": model.injection.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": model.injection.rank,
        "revision": revision or None,
        "target_modules": _targets(model.injection, list(adapted)),
        "task_type": None,
    }
    config = {**library_config(model.config or {}), **_labels(document.labels)}
    files = {"adapter_config.json": _json(settings), "adapter_model.safetensors": data, "config.json": _json(config)}
    words = None
    if isinstance(model.task, Cloze):
        words = encoder.label_words(model.label_words(document.labels) or ())
    else:
        weight, bias, _ = module.readout()
        files["head.safetensors"] = _safetensors({"weight": weight, "bias": bias})
    usage = _adapter_usage(document, module, encoder, words, (base, revision))
    return _Made(files, usage, _running(module, files, words))


def _targets(injection: LoRA, names: list[str]) -> list[str]:
    """Names for peft: short if they mean every layer's, else each matrix's own, since several are called dense."""
    if injection.last_layers is None and set(injection.matrices) <= {"query", "key", "value"}:
        return sorted({name.rpartition(".")[2] for name in names})
    return sorted(names)


def _running(
    module: "PromptedModule", files: Mapping[str, bytes], words: Sequence[Sequence[int]] | None
) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
    """Runs the library's model of the base with the adapter's matrices added, as peft adds them."""
    import torch
    from safetensors.torch import load

    base, settings = _base(module, bare=words is None), json.loads(files["adapter_config.json"])
    matrices = load(files["adapter_model.safetensors"])
    with torch.no_grad():
        for name in matrices:
            if name.endswith(".lora_A.weight"):
                place = name.removesuffix(".lora_A.weight")
                layer = base.get_submodule(place.removeprefix("base_model.model."))
                layer.weight += (
                    settings["lora_alpha"] / settings["r"] * (matrices[f"{place}.lora_B.weight"] @ matrices[name])
                )
    head = load(files["head.safetensors"]) if words is None else {}

    def run(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        given = torch.from_numpy(ids)
        seen, rows = given != module.pad_id, torch.arange(len(given))
        more = {"attention_mask": seen.long()}
        if module.backbone.kind == "t5":
            begun = torch.tensor([[module.backbone.config["decoder_start_token_id"], module.mask_id]])
            more["decoder_input_ids"] = begun.repeat(len(given), 1)
        elif (types := _types(given, module)) is not None:
            more["token_type_ids"] = types
        with torch.no_grad():
            found = base(input_ids=given, **more)
            if words is None:
                states = found.last_hidden_state.masked_fill(~seen[:, :, None], 0)
                logits = states.sum(dim=1) / seen.sum(dim=1, keepdim=True) @ head["weight"].T + head["bias"]
            else:
                place = torch.eq(given, module.mask_id or 0).int().argmax(dim=1)
                scores = found.logits[rows, -1 if module.backbone.kind == "t5" else place]
                each = [scores[:, list(ids)].logsumexp(dim=1) - math.log(len(ids)) for ids in words]
                logits = torch.stack(each, dim=1)
        answered: NDArray[np.float32] = logits.numpy()
        return answered

    return run


def _base(module: "PromptedModule", *, bare: bool) -> Any:
    """The library's model of the backbone, with its own copy of the values."""
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    backbone, values = module.backbone, dict(module.backbone.on("cpu"))
    none = {} if backbone.kind == "t5" else {"bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(**{**none, **backbone.config, "vocab_size": backbone.vocabulary_size})
    if backbone.kind == "t5":
        config.scale_decoder_outputs = backbone.config["scale_decoder_outputs"]
        config.tie_word_embeddings = backbone.answers_name == backbone.words_name
        base = AutoModelForSeq2SeqLM.from_config(config)
    else:
        base = (AutoModel if bare else AutoModelForMaskedLM).from_config(config)
        heads = {f"{name}.{part}" for name in backbone.head_names for part in ("weight", "bias")}
        heads.add(backbone.head_names[2])
        if not bare:
            values = {name if name in heads else f"{backbone.kind}.{name}": each for name, each in values.items()}
    base.load_state_dict(values, strict=False)
    base.tie_weights()
    return base.eval()


def _adapter_usage(
    document: JobDocument,
    module: "PromptedModule",
    encoder: "ClozeEncoder",
    words: Sequence[Sequence[int]] | None,
    base: tuple[str, str],
) -> list[str]:
    kind, pairs = module.backbone.kind, encoder.pairs
    loader = "AutoModel" if words is None else "AutoModelForSeq2SeqLM" if kind == "t5" else "AutoModelForMaskedLM"
    name, commit = base
    where = f"`{name}` at commit `{commit}`" if name else "the base that the operator's job file names"
    given = '"a text" "another text"' if pairs else '"a text"'
    more = ""
    if words is None and pairs and _tells_apart(module.backbone.config):
        ends = f"(ids == {module.separator_id}).long()"
        more = f", token_type_ids=({ends}.cumsum(1) - {ends}).clamp(max=1)"
    if kind == "t5":
        begun = [module.backbone.config["decoder_start_token_id"], module.mask_id]
        more = f", decoder_input_ids=torch.tensor([{begun}])"
    return [
        "## How to run it",
        "",
        f"The adapter belongs on {where}, whose values have the digest above. `pip install torch transformers peft`, "
        f"save this as `classify.py` in this folder, and run `python classify.py BASE {given}`, where BASE is the "
        "base's folder or name:",
        "",
        "```python",
        "import json, math, sys",
        "import torch",
        "from peft import PeftModel",
        *(["from safetensors.torch import load_file"] if words is None else []),
        "from tokenizers import Tokenizer",
        f"from transformers import {loader}",
        "",
        f"base = {loader}.from_pretrained({base_arguments(commit)})",
        'model = PeftModel.from_pretrained(base, ".").eval()',
        'tokenizer = Tokenizer.from_file("tokenizer.json")',
        "",
        *row_lines(encoder.layout, first=2),
        "ids = torch.tensor([ids])",
        "with torch.no_grad():",
        f"    found = model(input_ids=ids{more})",
        *_answer_lines(module, words),
        "odds = logits.softmax(dim=0)",
        'labels = json.load(open("config.json", encoding="utf-8"))["id2label"]',
        "print(json.dumps([labels[str(int(odds.argmax()))], float(odds.max())]))",
        "```",
        "",
        *_task_lines(document.model, words),
    ]


def _answer_lines(module: "PromptedModule", words: Sequence[Sequence[int]] | None) -> list[str]:
    if words is None:
        return [
            'head = load_file("head.safetensors")',
            'logits = head["weight"] @ found.last_hidden_state[0].mean(dim=0) + head["bias"]',
        ]
    place = "-1" if module.backbone.kind == "t5" else f"int((ids[0] == {module.mask_id}).int().argmax())"
    return [
        f"scores = found.logits[0, {place}]",
        f"words = {[list(each) for each in words]}",
        "logits = torch.stack([scores[each].logsumexp(dim=0) - math.log(len(each)) for each in words])",
    ]


def _task_lines(model: Model, words: Sequence[Sequence[int]] | None) -> list[str]:
    if words is None or not isinstance(model, PromptedModel) or not isinstance(model.task, Cloze):
        return [
            "A linear layer over the mean of the text's states (`head.safetensors`) gives the logits of the labels."
        ]
    return [
        "The language model fills in a word. A label's logit is the logarithm of the mean of exp(score) over its "
        "words:",
        "",
        "```json",
        json.dumps({label: list(each) for label, each in sorted(model.task.verbaliser.items())}, ensure_ascii=False),
        "```",
    ]


# ---- what both have --------------------------------------------------------------------------------------------


def _tokenizer_files(tokenizer: bytes, encoder: "Encoder", *, apart: bool, headed: bool) -> dict[str, bytes]:
    """The tokenizer as transformers loads it, with the special tokens around a text.

    Args:
        tokenizer: the job's tokenizer.json.
        encoder: the model's encoder.
        apart: whether the second text of a pair has a token type of its own.
        headed: whether nothing but special tokens stands around a text.
    """
    from tokenizers import Tokenizer, normalizers, processors

    family = getattr(encoder, "family", FAMILIES["WordPiece"])
    made: Any = Tokenizer.from_buffer(tokenizer)
    first, last = family.first, family.last
    before = f"{first} " if first else ""
    between = f"{last} {last}" if family.kind == "BPE" else last
    second = 1 if apart else 0
    made.post_processor = processors.TemplateProcessing(
        single=f"{before}$A {last}",
        pair=f"{before}$A {between} $B:{second} {last}:{second}",
        special_tokens=[(each, made.token_to_id(each)) for each in (first, last) if each is not None],
    )
    if headed and family.kind == "BPE":
        # White space around a text changes its tokens in this family, and training strips it.
        made.normalizer = normalizers.Strip()
    config = {
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *(["token_type_ids"] if apart else []), "attention_mask"],
        "model_max_length": encoder.max_tokens,
        "pad_token": family.pad,
        "padding_side": "right",
        # A text that spells a special token gets its characters, as in training.
        "split_special_tokens": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": family.unknown,
    }
    config |= {"sep_token": last} if first else {"eos_token": last}
    config |= {"cls_token": first} if first else {}
    config |= {"mask_token": family.mask} if made.token_to_id(family.mask) is not None else {}
    return {"tokenizer.json": made.to_str(pretty=False).encode(), "tokenizer_config.json": _json(config)}


def _tells_apart(config: Mapping[str, Any]) -> bool:
    """Whether the encoder has a token type for the second text of a pair, and was trained with it."""
    return config["model_type"] != "roberta" and int(config.get("type_vocab_size", 1)) > 1


def _types(given: "Tensor", module: "TextClassifier") -> "Tensor | None":
    """(B, S) The number of each token's text, as transformers' tokenizer gives it. None: the model reads no pairs."""
    separator = getattr(module, "separator_id", None)
    backbone = getattr(module, "backbone", None)
    if separator is None or backbone is None or not _tells_apart(backbone.config):
        return None
    ends = given.eq(separator).long()
    return (ends.cumsum(dim=1) - ends).clamp(max=1)


def _labels(labels: Sequence[str]) -> dict[str, Any]:
    return {"id2label": {str(at): label for at, label in enumerate(labels)}, "label2id": _places(labels)}


def _places(labels: Sequence[str]) -> dict[str, int]:
    return {label: at for at, label in enumerate(labels)}


def _load(made: Any, data: bytes) -> None:
    """Loads the file's tensors. Raises RuntimeError if one is missing or surplus."""
    from safetensors.torch import load

    made.load_state_dict(load(data))
    made.eval()


def _safetensors(tensors: _Tensors) -> bytes:
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(each) for name, each in sorted(tensors.items())}
    return save(arrays, metadata={"format": "pt"})


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n").encode()
