"""Converts torch modules to ONNX files, in the same way for every architecture."""

import contextlib
import functools
import gc
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["OPSET", "converted", "with_metadata"]

OPSET = 18


def converted(
    module: Any, example: tuple[Any, ...], inputs: list[str], output: str, dimensions: tuple[dict[int, Any], ...]
) -> bytes:
    """Converts a module to the bytes of an ONNX file.

    Args:
        module: a torch module in evaluation mode.
        example: one tensor for each input.
        inputs: the inputs' names in the file.
        output: the output's name in the file.
        dimensions: for each input, which axes are dynamic, as `torch.export.Dim`.

    Raises:
        RuntimeError: torch returned no program.
    """
    import torch

    _build_translations_once()
    with _quiet(), _uncollected():
        program = torch.onnx.export(
            module,
            example,
            input_names=inputs,
            output_names=[output],
            dynamic_shapes=dimensions,
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    return _without_traces(program.model_proto)


def _without_traces(proto: Any) -> bytes:
    """The model's bytes without the exporter's metadata: stack traces and paths of the machine that it ran on."""
    graphs = [proto.graph, *proto.functions]
    for owner in (proto, *graphs, *(node for graph in graphs for node in graph.node)):
        del owner.metadata_props[:]
        owner.doc_string = ""
    # Runtimes infer the shapes inside the graph, and the exporter's make quantisation fail.
    for graph in graphs:
        del graph.value_info[:]
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def with_metadata(model: bytes, facts: Mapping[str, str]) -> bytes:
    """Writes facts into an ONNX file, where every runtime can read them (`get_modelmeta().custom_metadata_map`).

    Args:
        model: the bytes of an ONNX file without metadata.
        facts: values by key.
    """
    import onnx

    proto = onnx.load_from_string(model)
    for key, value in sorted(facts.items()):
        proto.metadata_props.add(key=key, value=value)
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


@functools.cache
def _build_translations_once() -> None:
    """Lets all conversions of this process share torch's table of translations, which torch builds for each.

    Building it takes a quarter of a small model's conversion. The table depends on the operator set alone. Its name is
    private to torch: a version without it builds the table each time.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        shared = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
        ONNXRegistry.from_torchlib = shared  # type: ignore[method-assign]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collects no garbage meanwhile: a conversion makes many objects and keeps most of them to its end."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's prints, logs and warnings about its internals. Errors are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(before)
