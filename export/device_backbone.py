"""Makes the ONNX file of a frozen encoder's means, for members without torch (`learning.backbones.onnx_features`).

Guarantees: the file maps one row of ids, without padding, to the means that torch computes of it, compared on sample
texts before it is written. It holds no names of files or people, and no metadata of this machine. It has the backbone's
values and nothing that a job trains: what centres the features stays apart. int8 products are exact on every processor.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from export.conversion import converted
from learning.backbones.onnx_features import INPUT, OUTPUT
from tacit.documents import DocumentInvalid

if TYPE_CHECKING:
    from learning.prompts.model import PromptedModel as PromptedModule
    from learning.text.cloze import ClozeEncoder

__all__ = ["device_backbone"]

# Texts on which the file is compared with torch: a short one, punctuation, other scripts, and one that is cut.
_SAMPLES = ("ok", "A film that is, at 1,234 minutes, too long.", "Café, 你好, мир", "many words in a row " * 200)
# The largest difference of means, relative to the largest mean: last digits, or what a byte a weight costs at worst.
_TOLERANCE = {"float32": 1e-4, "int8": 0.2}


def device_backbone(
    module: "PromptedModule",
    encoder: "ClozeEncoder",
    precision: Literal["float32", "int8"],
    report: Callable[[str], None] = lambda _: None,
) -> bytes:
    """The ONNX file of a module's means.

    Args:
        module: A module that trains a head alone.
        encoder: Its encoder.
        precision: float32, or int8 for weights of matrices and word vectors.
        report: Called with a sentence about the file.

    Raises:
        DocumentInvalid: The file's means are not torch's.
    """
    import torch

    class Reading(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.inner.uncentred(input_ids)

    rows = [encoder.encode([(text, text) if encoder.pairs else text]) for text in _SAMPLES]
    # The example's length is neither 1 nor a size of the network, which torch would take for a constant.
    example = torch.full((1, module.min_tokens + 4), (module.pad_id + 1) % encoder.vocabulary_size, dtype=torch.int64)
    length = torch.export.Dim("sequence", min=module.min_tokens, max=module.room)
    made = converted(Reading().eval(), (example,), [INPUT], OUTPUT, ({1: length},))
    if precision == "int8":
        made = _quantised(made)
    with torch.no_grad():
        expected = [module.uncentred(torch.from_numpy(row)).numpy() for row in rows]
    difference = _difference(made, rows, expected)
    tolerance = _TOLERANCE[precision]
    if not difference <= tolerance:
        raise DocumentInvalid(
            f"model.onnx: the file's means differ from torch's by {difference:.3g}, more than {tolerance:g}; install "
            "the versions of torch, onnx and onnxruntime in constraints.txt"
            + (', or write onnx = "float32"' if precision == "int8" else "")
        )
    report(f"onnx: {precision}, {len(made) / 1e6:.1f} MB, means within {difference:.2g} of torch's")
    return made


def _quantised(model: bytes) -> bytes:
    """The same model with weights of one byte; activations are quantised as they come."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory(prefix="tacit-int8-") as scratch:
        whole, small = Path(scratch) / "whole.onnx", Path(scratch) / "small.onnx"
        whole.write_bytes(model)
        # Weights of 7 bits. Without VNNI an x86-64 processor adds two products of a byte and a weight in 16 bits, and
        # products of 8-bit weights saturate there: the file would have other features on such a processor.
        quantize_dynamic(whole, small, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)
        proto = onnx.load(small)
    # The tool's name and version are no part of the model.
    del proto.metadata_props[:]
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def _difference(model: bytes, rows: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference of any mean, relative to the largest mean of all."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    found = [session.run([OUTPUT], {INPUT: row})[0] for row in rows]
    largest = max(float(np.abs(each).max()) for each in expected)
    # np.max keeps a NaN, and the comparison then fails.
    return float(np.max([np.abs(one - other).max() for one, other in zip(found, expected, strict=True)])) / largest
