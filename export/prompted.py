"""Prompted models as ONNX: one file with the prompt inside, or one backbone for many small prompts beside it.

    convert_prompted    input_ids (batch, sequence) to logits (batch, labels), the prompt a constant of the graph
    convert_backbone    input_ids and a prompt to features (batch, width); what the features are multiplied with, the
                        label words' rows or a head's, lies with the prompt
    PromptFile          a prompt, its rows and its labels: tens of kilobytes a task
    PromptedBackbone    runs both together, with onnxruntime and numpy alone

Guarantees: the graph holds neither what makes a prompt (P-tuning's encoder, a prefix's MLP) nor a row of the vocabulary
projection beyond the label words'; T5 has its one decoder pass in it; a prompt that does not belong to a backbone file
is refused, by the file's digest and the prompt's shape, and never gives wrong answers in silence.

Checking the file against the training stack is the caller's: `export.onnx` shows how.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from export.conversion import converted

if TYPE_CHECKING:
    from learning.prompts.model import PromptedModel

__all__ = ["PromptFile", "PromptInvalid", "PromptedBackbone", "convert_backbone", "convert_prompted", "prompt_file"]

_META = "tacit"
_ONE_FILE = (
    "LoRA changes the backbone's own layers, so that no other job shares them; export it as one file, without --split"
)


class PromptInvalid(ValueError):
    """A prompt that no backbone file, or not this one, can be run with. The text says what is wrong and what to do."""


def convert_prompted(module: "PromptedModel") -> bytes:
    """The bytes of an ONNX file: `input_ids` int64 (batch, sequence) to `logits` float32 (batch, labels)."""
    import torch

    prompt = _fixed_prompt(module)

    class Answering(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module
            self.prompt = None if prompt is None else torch.nn.Buffer(prompt)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            values = self.prompt
            return self.inner.answer(input_ids, None if values is None else values.expand(input_ids.shape[0], -1, -1))

    return _exported(Answering(), module, (_example(module),), ["input_ids"], "logits")


def convert_backbone(module: "PromptedModel") -> bytes:
    """The bytes of an ONNX file that serves every prompt of the module's kind, on its backbone: `input_ids` int64
    (batch, sequence) and `prompt` float32 (tokens, values) to `features` float32 (batch, width).

    Raises:
        PromptInvalid: a module without a prompt: LoRA's matrices lie inside the backbone.
    """
    import torch

    prompt = _fixed_prompt(module)
    if prompt is None:
        raise PromptInvalid(_ONE_FILE)

    class Reading(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, input_ids: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            return self.inner.features(input_ids, prompt[None].expand(input_ids.shape[0], -1, -1))

    # Neither 1 nor the text's length: torch would take such a size for a constant, or for the same one.
    example = torch.cat([prompt[0], prompt[0]])[:2] if len(prompt[0]) < 2 else prompt[0]
    return _exported(Reading(), module, (_example(module), example), ["input_ids", "prompt"], "features")


@dataclass(frozen=True)
class PromptFile:
    """One task on a backbone file.

    prompt: (tokens, values). rows, bias: (words, width), (words,): what features are multiplied with. words: how many
    rows each label has. backbone: SHA-256 of the backbone file.
    """

    prompt: NDArray[np.float32]
    rows: NDArray[np.float32]
    bias: NDArray[np.float32]
    words: tuple[int, ...]
    backbone: str

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        from safetensors.numpy import save

        facts = json.dumps({"words": self.words, "backbone": self.backbone}, sort_keys=True)
        arrays = {"prompt": self.prompt, "rows": self.rows, "bias": self.bias}
        return save({name: np.ascontiguousarray(each) for name, each in arrays.items()}, metadata={_META: facts})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` wrote.

        Raises:
            PromptInvalid: not such a file.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            arrays = load(data)
            length = int.from_bytes(data[:8], "little")
            facts = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_META])
            found = cls(
                arrays["prompt"],
                arrays["rows"],
                arrays["bias"],
                tuple(map(int, facts["words"])),
                str(facts["backbone"]),
            )
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise PromptInvalid(f"this is no prompt file ({type(error).__name__}); export the prompt again") from None
        shapes = (found.prompt.ndim, found.rows.ndim, found.bias.shape)
        if shapes != (2, 2, (len(found.rows),)) or sum(found.words) != len(found.rows) or min(found.words) < 1:
            raise PromptInvalid("the prompt file's parts do not fit together; export the prompt again")
        return found


def prompt_file(module: "PromptedModel", backbone: bytes) -> PromptFile:
    """The module's part beside the bytes that `convert_backbone` gave for a module on the same backbone.

    Raises:
        PromptInvalid: a module without a prompt.
    """
    prompt = _fixed_prompt(module)
    if prompt is None:
        raise PromptInvalid(_ONE_FILE)
    rows, bias, words = module.readout()
    return PromptFile(prompt[0].numpy(), rows, bias, words, hashlib.sha256(backbone).hexdigest())


class PromptedBackbone:
    """A backbone file at work: one of it in memory, any number of prompts."""

    def __init__(self, model: bytes, *, threads: int = 0) -> None:
        """threads: for one run; 0 is one for each core."""
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._session: Any = InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.digest = hashlib.sha256(model).hexdigest()
        self._values = self._session.get_inputs()[1].shape[1]
        self._width = self._session.get_outputs()[0].shape[1]

    def check(self, prompt: PromptFile) -> None:
        """Passes a prompt that this backbone file can be run with.

        Raises:
            PromptInvalid: it belongs to another one.
        """
        if prompt.backbone != self.digest:
            raise PromptInvalid(
                f"the prompt belongs to backbone {prompt.backbone[:12]}, this is {self.digest[:12]}; fetch that one"
            )
        if prompt.prompt.shape[1] != self._values or prompt.rows.shape[1] != self._width:
            raise PromptInvalid("the prompt's shapes are not the backbone's; export the prompt again")

    def logits(self, ids: NDArray[np.int64], prompt: PromptFile) -> NDArray[np.float32]:
        """(B, labels) for ids (B, S).

        Raises:
            PromptInvalid: a prompt for another backbone file.
        """
        self.check(prompt)
        (features,) = self._session.run(["features"], {"input_ids": ids, "prompt": prompt.prompt})
        return label_logits(features @ prompt.rows.T + prompt.bias, prompt.words)


def label_logits(scores: NDArray[np.float32], words: tuple[int, ...]) -> NDArray[np.float32]:
    """Scores of words (B, words) to logits of labels (B, labels): the logarithm of the mean of exp(score), over a
    label's words.
    """
    parts = []
    for columns in np.split(scores, np.cumsum(words)[:-1], axis=1):
        most = columns.max(axis=1)
        parts.append(most + np.log(np.exp(columns - most[:, None]).mean(axis=1)))
    return np.stack(parts, axis=1).astype(np.float32)


def _fixed_prompt(module: "PromptedModel") -> Any:
    """(1, tokens, values), a copy; None without a prompt."""
    import torch

    with torch.no_grad():
        values = module.prompt_values(1)
    return None if values is None else values.clone()


def _example(module: "PromptedModel") -> Any:
    """Ids (2, S) with masks and padding."""
    import torch

    example = torch.full((2, module.min_tokens + 3), module.pad_id, dtype=torch.int64)
    example[:, : module.min_tokens] = torch.arange(module.min_tokens)
    if module.mask_id is not None:
        example[:, 1] = module.mask_id
    return example


def _exported(whole: Any, module: "PromptedModel", example: tuple[Any, ...], inputs: list[str], output: str) -> bytes:
    import torch

    tokens = torch.export.Dim("tokens", max=4096)
    shapes: Mapping[str, dict[int, Any]] = {
        "input_ids": {
            0: torch.export.Dim("batch"),
            1: torch.export.Dim("sequence", min=module.min_tokens, max=module.room),
        },
        "prompt": {0: tokens},
    }
    training = module.training
    whole.eval()
    try:
        with torch.no_grad():
            return converted(whole, example, inputs, output, tuple(shapes[name] for name in inputs))
    finally:
        module.train(training)
