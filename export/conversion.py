"""Converts torch modules to ONNX files, in the same way for every architecture."""

import contextlib
import functools
import gc
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Set
from contextvars import ContextVar
from typing import Any

__all__ = ["OPSET", "converted", "with_metadata"]

OPSET = 18
# Whether this thread is in `converted`. Other callers of torch's exporter in this process get all of torch's passes.
_CONVERTING: ContextVar[bool] = ContextVar("converting", default=False)


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
    _decompose_at_need()
    with _quiet(), _uncollected(), _converting():
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
def _converting() -> Iterator[None]:
    token = _CONVERTING.set(True)
    try:
        yield
    finally:
        _CONVERTING.reset(token)


@functools.cache
def _decompose_at_need() -> None:
    """Lets our conversions skip torch's decomposition pass if it would leave every operator as it is.

    The pass traces the whole graph twice more, which takes half of a conversion. Our models use operators that torch
    translates directly, and a few that only name their input. Any other operator gets the pass. Its name is private to
    torch: a version without it makes the pass each time.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch.onnx._internal.exporter import _decomp, _fx_passes

        whole = _fx_passes.decompose_with_registry

        def at_need(program: Any, registry: Any) -> Any:
            if _CONVERTING.get():
                translated = set(_decomp.get_onnx_implemented_overloads(registry))
                if _translatable(program.graph_module, translated):
                    return program
            return whole(program, registry)

        _fx_passes.decompose_with_registry = at_need  # type: ignore[assignment]


def _translatable(module: Any, translated: Set[Any]) -> bool:
    """Whether torch translates a graph's operators as they are, once those that only name their input are replaced.

    Args:
        module: a `torch.fx.GraphModule`. It is unchanged if the answer is false.
        translated: the operators that torch translates to ONNX.
    """
    import torch

    aten = torch.ops.aten
    # They return their input, or a copy of it that nothing changes.
    names = {
        aten.alias.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.detach_.default,
        aten.lift_fresh_copy.default,
    }
    casts, checks = {aten.to.dtype}, {aten._assert_tensor_metadata.default}
    same = {aten.__and__.Tensor: aten.bitwise_and.Tensor, aten.min.other: aten.minimum.default}
    squares = {aten.square.default}
    additions = {aten.add_.Tensor}
    graph = module.graph
    called = [node for node in graph.nodes if node.op == "call_function"]
    for node in called:
        if node.target in names | casts | checks | squares | same.keys():
            # The program knows its outputs by name.
            replaceable = all(user.op != "output" for user in node.users)
        elif node.target in additions:
            replaceable = _changes_only_its_own(node)
        else:
            # A branch or a loop has graphs of its own.
            nested = isinstance(node.target, torch._ops.HigherOrderOperator)
            changes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
            replaceable = node.target in translated and not nested and not changes
        if not replaceable:
            return False
    for node in called:
        if node.target in checks:
            graph.erase_node(node)
        elif node.target in names or (
            node.target in casts and node.args[0].meta["val"].dtype == node.meta["val"].dtype
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in casts:
            node.target, node.args, node.kwargs = (
                aten._to_copy.default,
                node.args[:1],
                {"dtype": node.meta["val"].dtype},
            )
        elif node.target in squares:
            node.target, node.args = aten.mul.Tensor, (node.args[0], node.args[0])
        elif node.target in additions:
            node.target = aten.add.Tensor
        else:
            node.target = same.get(node.target, node.target)
    module.recompile()
    return True


def _changes_only_its_own(node: Any) -> bool:
    """Whether an operator changes, in place, a new tensor that nothing else reads. Then it may return another one.

    T5 adds the halves of its relative positions in this way. Of equal types, the sum has that type, too.
    """
    import torch

    changed, other = node.args
    if not isinstance(other, torch.fx.Node) or other is changed or changed.users.keys() != {node}:
        return False
    # A new tensor: no input of the graph, and no view of one.
    made = isinstance(changed.target, torch._ops.OpOverload) and not any(
        each.alias_info for each in changed.target._schema.returns
    )
    return made and changed.meta["val"].dtype == other.meta["val"].dtype


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
