"""Exports prompted models to ONNX: one file with the prompt inside, or one backbone with many small prompts beside it.

    convert_prompted    input_ids (batch, sequence) to logits (batch, labels), the prompt a constant of the graph
    convert_backbone    input_ids and a prompt to features (batch, width); the rows that the features are multiplied
                        with (the label words' or a head's) are in the prompt's file
    PromptFile          a prompt, its rows and its labels: tens of kilobytes a task
    PromptedBackbone    runs both together, with only onnxruntime and numpy

Guarantees: the graph holds neither the modules that make a prompt (P-tuning's encoder, a prefix's MLP) nor any row of
the vocabulary projection except the label words'; for T5 it includes the one decoder pass; a prompt that does not
belong to a backbone file is refused, by the file's digest and the prompt's shape, and never silently gives wrong
answers.

Left to the caller: checking the file against the training stack, as `export.onnx` does.
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
    "the job has no prompt apart from its backbone and head, so there is nothing to split; export it as one file, "
    "without --split"
)


class PromptInvalid(ValueError):
    """A prompt cannot be run with this backbone file, or with any. The text says what is wrong and what to do."""


def convert_prompted(module: "PromptedModel") -> bytes:
    """Converts to an ONNX file: `input_ids` int64 (batch, sequence) to `logits` float32 (batch, labels)."""
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
    """Converts to an ONNX file that serves every prompt of the module's kind on its backbone.

    The file maps `input_ids` int64 (batch, sequence) and `prompt` float32 (tokens, values) to `features` float32
    (batch, width).

    Raises:
        PromptInvalid: the module has no prompt, since LoRA's matrices and biases are inside the backbone.
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

    # The prompt's length is neither 1 nor the text's: torch would take it for a constant, or both for the same size.
    example = torch.cat([prompt[0], prompt[0]])[:2] if len(prompt[0]) < 2 else prompt[0]
    return _exported(Reading(), module, (_example(module), example), ["input_ids", "prompt"], "features")


@dataclass(frozen=True)
class PromptFile:
    """One task on a backbone file.

    Args:
        prompt: (tokens, values).
        rows: (words, width); features are multiplied with them.
        bias: (words,); added to the products.
        words: number of rows of each label.
        backbone: SHA-256 of the backbone file, in hexadecimal.
    """

    prompt: NDArray[np.float32]
    rows: NDArray[np.float32]
    bias: NDArray[np.float32]
    words: tuple[int, ...]
    backbone: str

    def to_bytes(self) -> bytes:
        """The bytes of a safetensors file."""
        from safetensors.numpy import save

        facts = json.dumps({"words": self.words, "backbone": self.backbone}, sort_keys=True)
        arrays = {"prompt": self.prompt, "rows": self.rows, "bias": self.bias}
        return save({name: np.ascontiguousarray(each) for name, each in arrays.items()}, metadata={_META: facts})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` wrote.

        Raises:
            PromptInvalid: the bytes are not such a file.
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
            raise PromptInvalid(
                f"this is not a prompt file ({type(error).__name__}); export the prompt again"
            ) from None
        shapes = (found.prompt.ndim, found.rows.ndim, found.bias.shape)
        if shapes != (2, 2, (len(found.rows),)) or sum(found.words) != len(found.rows) or min(found.words) < 1:
            raise PromptInvalid("the prompt file's parts do not fit together; export the prompt again")
        return found


def prompt_file(module: "PromptedModel", backbone: bytes) -> PromptFile:
    """Makes the prompt file of a module. backbone: what `convert_backbone` returned for a module on the same backbone.

    Raises:
        PromptInvalid: the module has no prompt.
    """
    prompt = _fixed_prompt(module)
    if prompt is None:
        raise PromptInvalid(_ONE_FILE)
    rows, bias, words = module.readout()
    return PromptFile(prompt[0].numpy(), rows, bias, words, hashlib.sha256(backbone).hexdigest())


class PromptedBackbone:
    """A loaded backbone file: one copy in memory runs any number of prompts."""

    def __init__(self, model: bytes, *, threads: int = 0) -> None:
        """Loads a backbone file. threads: threads for one run; 0: one for each core."""
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._session: Any = InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.digest = hashlib.sha256(model).hexdigest()
        self._values = self._session.get_inputs()[1].shape[1]
        self._width = self._session.get_outputs()[0].shape[1]

    def check(self, prompt: PromptFile) -> None:
        """Checks that a prompt belongs to this backbone file.

        Raises:
            PromptInvalid: it belongs to another one.
        """
        if prompt.backbone != self.digest:
            raise PromptInvalid(
                f"the prompt belongs to backbone {prompt.backbone[:12]}, but this is {self.digest[:12]}; fetch that one"
            )
        if prompt.prompt.shape[1] != self._values or prompt.rows.shape[1] != self._width:
            raise PromptInvalid("the prompt's shapes are not the backbone's; export the prompt again")

    def logits(self, ids: NDArray[np.int64], prompt: PromptFile) -> NDArray[np.float32]:
        """Computes logits (B, labels) for ids (B, S).

        Raises:
            PromptInvalid: the prompt belongs to another backbone file.
        """
        self.check(prompt)
        (features,) = self._session.run(["features"], {"input_ids": ids, "prompt": prompt.prompt})
        return label_logits(features @ prompt.rows.T + prompt.bias, prompt.words)


def label_logits(scores: NDArray[np.float32], words: tuple[int, ...]) -> NDArray[np.float32]:
    """Turns scores of words (B, words) into logits of labels (B, labels).

    A label's logit is the logarithm of the mean of exp(score) over its words.
    """
    parts = []
    for columns in np.split(scores, np.cumsum(words)[:-1], axis=1):
        most = columns.max(axis=1)
        parts.append(most + np.log(np.exp(columns - most[:, None]).mean(axis=1)))
    return np.stack(parts, axis=1).astype(np.float32)


def _fixed_prompt(module: "PromptedModel") -> Any:
    """A copy of the module's prompt, (1, tokens, values). None: it has none."""
    import torch

    with torch.no_grad():
        values = module.prompt_values(1)
    return None if values is None else values.clone()


def _example(module: "PromptedModel") -> Any:
    """Example ids (2, S) with masks and padding."""
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
