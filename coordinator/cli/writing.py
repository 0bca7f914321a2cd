"""What `coordinator export` does for a job whose model writes: ONNX with a cache, an adapter for peft, a merged folder.

Left to others: fetching the version (`coordinator.cli.model`), and everything that runs a model (`export`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.console import ExitCode, fail
from toolkit.install import install_with

if TYPE_CHECKING:
    from coordinator.cli.model import Format, Material
    from export.card import Origin
    from tacit.job import JobDocument

__all__ = ["check_writer_format", "export_writer"]


def check_writer_format(document: "JobDocument", format: "Format", *, split: bool) -> None:
    """Refuses a format in which the job's model has no form, before anything large is fetched.

    Raises:
        CommandFailed: it has none.
    """
    from coordinator.cli.model import Format
    from export.causal_hugging_face import check_causal_format
    from export.generator import GraphRefused, check_graph
    from export.hugging_face import FormatRefused

    if split:
        fail(f"job {document.name} writes text, and its export has one form; leave out --split", ExitCode.USAGE)
    try:
        if format is Format.ONNX:
            check_graph(getattr(document.model, "config", None) or {})
        else:
            check_causal_format(document, "peft" if format is Format.PEFT else "hf")
    except (FormatRefused, GraphRefused) as error:
        fail(str(error), ExitCode.USAGE)


def export_writer(
    material: "Material",
    out: Path,
    given: Sequence[Any],
    *,
    format: "Format",
    precision: Any = "float32",
    origin: "Origin | None" = None,
) -> Any:
    """Exports a version, and compares it with the trained model on `given`, or on made-up questions without examples.

    Args:
        material: The version.
        out: The folder to write.
        given: Examples with dialogues.
        format: What the export is for.
        precision: Of an ONNX export's matrices.
        origin: What the coordinator says of the version.

    Raises:
        CommandFailed: it cannot be exported.
    """
    from coordinator.cli.model import Format, synthetic_texts
    from export.generating import Dialogue
    from export.prompted_bundle import read_backbone
    from tacit.prompt import PromptedModel

    model = material.document.model
    if material.backbone is None or not isinstance(model, PromptedModel) or model.config is None:
        fail(f"job {material.document.name} has no backbone; fetch it again", ExitCode.FAILED)
    samples = [each.dialogue for each in given if each.dialogue is not None]
    if given and not samples:
        fail("the samples have no dialogues; give rows with a prompt and a response, or messages", ExitCode.USAGE)
    samples = samples or [Dialogue.of(text) for text in synthetic_texts(material.tokenizer)[::4]]
    more: dict[str, Any] = {} if origin is None else {"origin": origin}
    parts = (material.document, material.manifest, material.weights, material.tokenizer)
    try:
        from export.causal_hugging_face import export_causal
        from export.generator import export_generator

        more |= {"backbone": read_backbone(material.backbone, model.config), "frozen": material.frozen}
        if format is Format.ONNX:
            return export_generator(*parts, out, samples, precision=precision, **more)
        return export_causal(*parts, out, samples, format="peft" if format is Format.PEFT else "hf", **more)
    except ImportError as error:
        fail(f"this export needs {error.name or error}; {install_with('coordinator', 'export')}", ExitCode.USAGE)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"the {material.name} cannot be exported: {error}", ExitCode.FAILED)
