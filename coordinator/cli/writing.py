"""What `coordinator export` does for a job whose model writes: ONNX with a cache, an adapter for peft, a merged folder.

Left to others: fetching the version (`coordinator.cli.model`), and everything that runs a model (`export`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from toolkit.console import ExitCode, fail
from toolkit.install import install_with

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from export.card import Origin
    from export.onnx_form import GraphPrecision
    from tacit.job import JobDocument
    from tacit.manifest import Manifest

__all__ = ["WriterFormat", "export_writer"]

WriterFormat = Literal["onnx", "hf", "peft"]


class Version(Protocol):
    """What an export needs of a version."""

    @property
    def document(self) -> "JobDocument": ...
    @property
    def manifest(self) -> "Manifest": ...
    @property
    def tokenizer(self) -> bytes: ...
    @property
    def weights(self) -> bytes: ...
    @property
    def backbone(self) -> Path | None: ...
    @property
    def frozen(self) -> "Mapping[str, NDArray[np.float32]]": ...
    @property
    def name(self) -> str: ...


def export_writer(
    version: Version,
    out: Path,
    given: Sequence[Any],
    made_up: Sequence[str],
    *,
    format: WriterFormat,
    precision: "GraphPrecision" = "float32",
    origin: "Origin | None" = None,
) -> Any:
    """Exports a version, and compares it with the trained model on `given`, or on made-up questions without examples.

    Args:
        version: The version.
        out: The folder to write.
        given: Examples with dialogues.
        made_up: Questions that stand in for examples.
        format: What the export is for.
        precision: Of an ONNX export's matrices.
        origin: What the coordinator says of the version.

    Raises:
        CommandFailed: it cannot be exported.
    """
    from export.generating import Dialogue
    from export.prompted_bundle import read_backbone
    from learning.text.corpus import usable_dialogues
    from learning.text.examples import DataInvalid
    from tacit.prompt import PromptedModel

    model = version.document.model
    if version.backbone is None or not isinstance(model, PromptedModel) or model.config is None:
        fail(f"job {version.document.name} has no backbone; fetch it again", ExitCode.FAILED)
    try:
        samples = usable_dialogues(version.document, given) if given else [Dialogue.of(text) for text in made_up]
    except DataInvalid as error:
        fail(str(error), ExitCode.USAGE)
    more: dict[str, Any] = {} if origin is None else {"origin": origin}
    parts = (version.document, version.manifest, version.weights, version.tokenizer)
    try:
        from export.causal_hugging_face import export_causal
        from export.generator import export_generator

        more |= {"backbone": read_backbone(version.backbone, model.config), "frozen": version.frozen}
        if format == "onnx":
            return export_generator(*parts, out, samples, precision=precision, **more)
        return export_causal(*parts, out, samples, format=format, **more)
    except ImportError as error:
        fail(f"this export needs {error.name or error}; {install_with('coordinator', 'export')}", ExitCode.USAGE)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"the {version.name} cannot be exported: {error}", ExitCode.FAILED)
