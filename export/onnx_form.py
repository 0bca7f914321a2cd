"""Which ONNX form a job's model leaves in: the option of both export commands, and what has no such form.

It imports no model and no library of one, so a command reads its options from here before it starts.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from tacit.job import JobDocument

__all__ = ["FormRefused", "GraphPrecision", "GraphPrecisionOption", "check_graph", "check_onnx_form"]

# Of an exported model's matrices.
GraphPrecision = Literal["float32", "int8"]
GraphPrecisionOption = Annotated[
    GraphPrecision,
    typer.Option(
        "--precision",
        help="For a job that writes: int8 makes its ONNX export a quarter as large, and less exact.",
    ),
]

# onnxruntime's attention with a cache works on pieces of this many values.
_HEAD_MULTIPLE = 16


class FormRefused(ValueError):
    """The model has no such ONNX form. The text says why, and what to ask for instead."""


def check_onnx_form(document: "JobDocument", *, precision: GraphPrecision = "float32", split: bool = False) -> None:
    """Checks that a job's model has the ONNX form that is asked for. The document tells, before anything is fetched.

    Args:
        document: the job.
        precision: of the matrices.
        split: whether a prompt is to be written alone, beside its backbone.

    Raises:
        FormRefused: it has not.
    """
    from tacit.prompt import writes

    if writes(document.model):
        if split:
            raise FormRefused(f"job {document.name} writes text, and its export has one form; leave out --split")
        check_graph(getattr(document.model, "config", None) or {})
    elif precision != "float32":
        raise FormRefused(f"job {document.name} labels texts, and its export is float32; leave out --precision")


def check_graph(config: Mapping[str, Any]) -> None:
    """Checks that onnxruntime can run a model that writes, with a cache.

    Raises:
        FormRefused: it cannot.
    """
    from learning.causal.config import sizes_of

    if (size := sizes_of(config).head) % _HEAD_MULTIPLE:
        raise FormRefused(
            f"onnxruntime's attention needs heads of a multiple of {_HEAD_MULTIPLE} values, and this model's have "
            f"{size}; export it with --format peft"
        )
