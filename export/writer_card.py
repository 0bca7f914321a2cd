"""Writes the README of an exported model that writes: what it is, where it comes from, and how to run it.

Guarantees: as in `export.card`. The program for ONNX needs onnxruntime, tokenizers and numpy, and nothing of this
software. It gives the tokens that `edge_client generate` gives at temperature 0, and makes no special token from text.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from export.card import (
    NO_TELEMETRY,
    Origin,
    base_arguments,
    file_lines,
    page,
    privacy_lines,
    provenance_lines,
    trained_by,
)
from learning.backbones.packaged import packaged_as
from learning.text.turns import Dialogue
from tacit.bundle import CACHE_FILE, WEIGHTS_FILE, GeneratorFacts
from tacit.job import JobDocument
from tacit.prompt import Generate, PromptedModel

if TYPE_CHECKING:
    from learning.text.dialogue import DialogueEncoder

__all__ = ["causal_card", "generator_card", "prompt_frame"]

_TOKENIZER = "the tokenizer, for the tokenizers library"


def generator_card(document: JobDocument, facts: GeneratorFacts, origin: Origin, encoder: "DialogueEncoder") -> bytes:
    """The README of a version as ONNX.

    Args:
        document: the job document.
        facts: what bundle.json says of the model.
        origin: what the coordinator says of the version.
        encoder: of the job.
    """
    files = {
        "model.onnx": "the graph, for prefill and for steps",
        WEIGHTS_FILE: f"the weights, {facts.precision}; the graph reads them",
        **({CACHE_FILE: "keys and values of the soft prompt before every dialogue"} if facts.soft else {}),
        "tokenizer.json": _TOKENIZER,
        "bundle.json": "each file's size and SHA-256, the template, and the comparison with the trained model",
    }
    run = [
        "`pip install onnxruntime tokenizers`, save this as `answer.py` in this folder, and run "
        '`python answer.py "a question"`:',
        "",
        "```python",
        *_onnx_program(facts, encoder),
        "```",
        "",
        '`edge_client generate --bundle FOLDER "a question"` does the same, is faster, streams and samples.',
    ]
    return _whole(document, facts.version, origin, files, run, "onnx", facts.parity, facts.texts)


def causal_card(
    document: JobDocument,
    version: bytes,
    origin: Origin,
    encoder: "DialogueEncoder",
    *,
    library: Literal["peft", "hf"],
    difference: float,
    texts: int,
) -> bytes:
    """The README of a version for peft or transformers.

    Args:
        document: the job document.
        version: the digest of the version.
        origin: what the coordinator says of the version.
        encoder: of the job.
        library: what loads it.
        difference: the largest difference between its logits and the trained model's.
        texts: the number of dialogues over which that was measured.
    """
    model = document.model
    hub = model.hub if isinstance(model, PromptedModel) else None
    name, _, commit = (hub or "").partition("@")
    files = {
        "config.json": "the sizes",
        "generation_config.json": "how the model writes unless told otherwise",
        "tokenizer.json": _TOKENIZER,
        "tokenizer_config.json": "its settings",
    }
    if library == "peft":
        files = {"adapter_model.safetensors": "the trained values", "adapter_config.json": "their settings", **files}
        known = packaged_as(model.backbone) if isinstance(model, PromptedModel) and model.backbone else None
        if known is not None:
            where = f"{known.title}, which `coordinator backbone add {known.name}` makes"
        else:
            where = f"`{name}` at commit `{commit}`" if name else "the base that the operator's job file names"
        given = f'`python answer.py BASE "a question"`, where BASE is the folder or name of {where}'
    else:
        files = {WEIGHTS_FILE: "the weights, with what was trained merged in", **files}
        given = '`python answer.py "a question"`'
    run = [
        f"`pip install torch transformers{' peft' if library == 'peft' else ''}`, save this as `answer.py` in this "
        f"folder, and run {given}:",
        "",
        "```python",
        *_library_program(document, encoder, library, commit),
        "```",
    ]
    named = "peft" if library == "peft" else "transformers"
    return _whole(document, version, origin, files, run, named, difference, texts)


def prompt_frame(encoder: "DialogueEncoder") -> tuple[list[int], list[int], bool]:
    """The ids before and after the text of a single question, and whether a space comes before the text."""
    bare = encoder.prompt_ids(Dialogue.of(""))
    given = {text: encoder.prompt_ids(Dialogue.of(text)) for text in ("x", "9")}
    for place in range(len(bare) + 1):
        before, after = bare[:place], bare[place:]
        inside = {
            text: ids[place : len(ids) - len(after)]
            for text, ids in given.items()
            if ids[:place] == before and ids[len(ids) - len(after) :] == after
        }
        if len(inside) == len(given):
            spaced = all(encoder.decode(ids).startswith(" ") for ids in inside.values())
            return before, after, spaced
    raise ValueError("the template's tokens depend on the text; report this as a bug of Tacit")


def _whole(
    document: JobDocument,
    version: bytes,
    origin: Origin,
    files: dict[str, str],
    run: Sequence[str],
    library: str,
    difference: float,
    texts: int,
) -> bytes:
    model = document.model
    kind, how, template, cut = "", "", "", 0
    if isinstance(model, PromptedModel) and isinstance(model.task, Generate):
        kind, how = str((model.config or {}).get("model_type")), model.injection.name
        template = json.dumps(model.task.template.model_dump(mode="json"), ensure_ascii=False, sort_keys=True)
        cut = model.max_tokens
    bounded = "" if origin.simulated else " Only noise bounds that, and only as far as each member's own epsilon says."
    return page(
        document.name,
        library,
        [
            f"It writes a response to a prompt. {trained_by(document, origin)} method `{document.method.name}`, "
            f"`{how}` on a frozen `{kind}`, {document.values:,} shared values.",
            "",
            *provenance_lines(document, version, origin),
            *privacy_lines(document, origin),
            f"A model that writes can repeat what it was trained on.{bounded}",
            "",
            *file_lines(files),
            "## Template",
            "",
            "What stands around the turns of a dialogue; `{TOKEN}` is a special token, and no text becomes one:",
            "",
            "```json",
            template,
            "```",
            "",
            f"In training, a dialogue had at most {cut} tokens.",
            "",
            "## How to run it",
            "",
            *run,
            "",
            f"On {texts} dialogue{'' if texts == 1 else 's'}, its logits differ from the trained model's by at most "
            f"{difference:.2g}.",
        ],
        task="text-generation",
    )


def _prompt_lines(encoder: "DialogueEncoder", argument: int) -> list[str]:
    before, after, spaced = prompt_frame(encoder)
    text = ('" " + ' if spaced else "") + f"sys.argv[{argument}].strip()"
    return [
        'tokenizer = Tokenizer.from_file("tokenizer.json")',
        "tokenizer.encode_special_tokens = True",
        f"text = tokenizer.encode({text}, add_special_tokens=False).ids",
        f"ids = {before} + text + {after}",
    ]


def _onnx_program(facts: GeneratorFacts, encoder: "DialogueEncoder") -> list[str]:
    start = (
        [f'cache = dict(np.load("{CACHE_FILE}"))']
        if facts.soft
        else [
            'past = [each for each in session.get_inputs() if each.name.startswith("past.")]',
            "cache = {each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32) for each in past}",
        ]
    )
    return [
        "import os, sys",
        NO_TELEMETRY,
        "import numpy as np",
        "from onnxruntime import InferenceSession",
        "from tokenizers import Tokenizer",
        "",
        'session = InferenceSession("model.onnx")',
        *_prompt_lines(encoder, 1),
        *start,
        f"length, written = {facts.soft}, []",
        f"while len(written) < {facts.max_new_tokens}:",
        "    length += len(ids)",
        '    new = {"ids": [ids], "lengths": [length], "wanted": [[len(ids) - 1]]}',
        "    new = {name: np.array(value, dtype=np.int64) for name, value in new.items()}",
        "    logits, *present = session.run(None, {**cache, **new})",
        "    cache, token = dict(zip(cache, present)), int(logits[0, 0].argmax())",
        f"    if token in {list(facts.end_ids)}:",
        "        break",
        "    written, ids = [*written, token], [token]",
        "print(tokenizer.decode(written))",
    ]


def _library_program(
    document: JobDocument, encoder: "DialogueEncoder", library: Literal["peft", "hf"], commit: str
) -> list[str]:
    model: Any = document.model
    peft = library == "peft"
    where = base_arguments(commit) if peft else '"."'
    return [
        "import sys",
        "import torch",
        *(["from peft import PeftModel"] if peft else []),
        "from tokenizers import Tokenizer",
        "from transformers import AutoModelForCausalLM",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({where})",
        *(['model = PeftModel.from_pretrained(model, ".")'] if peft else []),
        *_prompt_lines(encoder, 2 if peft else 1),
        "given = torch.tensor([ids])",
        "written = model.eval().generate(",
        "    input_ids=given, attention_mask=torch.ones_like(given), do_sample=False,",
        f"    max_new_tokens={model.task.max_new_tokens}, eos_token_id={sorted(encoder.end_ids)}, "
        f"pad_token_id={encoder.pad_id},",
        ")",
        "print(tokenizer.decode(written[0, len(ids) :].tolist()))",
    ]
