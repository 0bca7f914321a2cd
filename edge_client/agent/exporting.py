"""`edge_client export` writes a version of a job's model, with this member's private parameters, as an ONNX bundle.

It first checks the place, the tools and whether the model has the form that is asked for, since the rest takes long.
Then it makes the member's own model (`edge_client.agent.own_model`), and writes the bundle.
"""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.agent.own_model import UNWATCHED, Fetched, OwnModel, Watch, fetch_own, own_model
from edge_client.agent.runner import Member, RunOptions, load_member
from export.onnx_form import FormRefused, GraphPrecision, check_onnx_form
from learning.text.corpus import usable_dialogues
from learning.text.examples import DataInvalid, text_rows
from tacit.bundle import INDEX, WEIGHTS_FILE, BundleInvalid, read_bundle
from tacit.job import JobDocument
from tacit.prompt import reads_pairs, writes
from toolkit.console import ExitCode, fail
from toolkit.install import install_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from export.onnx import ExportReport
    from learning.text.turns import Dialogue

__all__ = ["Exported", "check_form", "check_tools", "export_own", "write_generator"]

# Packages that making and comparing an ONNX file needs beyond those of training.
_TOOLS = ("onnx", "onnxscript", "onnxruntime")
_INSTALL = install_with("edge", "export")
# How many texts the ONNX file is compared on with the model it came from.
_SAMPLES = 64


@dataclass(frozen=True)
class Exported:
    """What was exported: the version's number and digest, and how many values of the bundle are private."""

    job: str
    version: int
    digest: bytes
    private: int
    report: "ExportReport"
    # Whether the model writes.
    writes: bool = False


def export_own(
    name: str,
    options: RunOptions,
    out: Path,
    *,
    epochs: int | None = None,
    split: bool = False,
    precision: GraphPrecision = "float32",
    watch: Watch = UNWATCHED,
) -> Exported:
    """Writes the bundle `out`.

    Args:
        name: The job's name.
        options: Whose data and machine it is, as for `edge_client run`.
        out: The folder to write.
        epochs: How long private parameters are adapted to the version; 0: not at all; None: as the job's method has it
            (`training.personal`).
        split: Writes the prompt of a prompted job alone, beside its backbone.
        precision: Of the matrices of a model that writes.
        watch: Callbacks for progress.

    Raises:
        CommandFailed: The input cannot be used, the coordinator cannot be reached, there is nothing to export, or the
            model cannot be exported.
        StoreError: The member's private state cannot be opened.
    """
    _check_place(out)
    check_tools()
    member = load_member(options)
    if member.skipped:
        watch.say(member.skipped.sentence(len(member.examples)))
    check = functools.partial(check_form, precision=precision, split=split)
    own = own_model(fetch_own(name, member, options, check=check), member, epochs=epochs, watch=watch)
    if writes(own.fetched.job.model):
        return _written_writer(own, member, out, precision, watch)
    return _written(own, member, out, split, watch)


def _check_place(out: Path) -> None:
    """Refuses what the bundle could not replace. Writing checks again."""
    try:
        if not out.exists() and not out.is_symlink():
            return
        if out.is_symlink() or not out.is_dir():
            fail(f"{out} is not a folder; name a new one with --out", ExitCode.USAGE)
        present = {entry.name for entry in out.iterdir()}
        files = read_bundle(out, "model", "prompt", "generator", unread=(WEIGHTS_FILE,)).index.files if present else {}
        foreign = sorted(present - {INDEX, *files})
    except OSError as error:
        fail(f"{out} cannot be read ({error.strerror}); name another folder with --out", ExitCode.USAGE)
    except BundleInvalid:
        fail(f"{out} is neither empty nor a complete earlier export; name a new folder with --out", ExitCode.USAGE)
    if foreign:
        fail(
            f"{out} would be replaced and holds other files ({', '.join(foreign[:3])}); name a new folder with --out",
            ExitCode.USAGE,
        )


def check_form(job: JobDocument, *, precision: GraphPrecision = "float32", split: bool = False) -> None:
    """Refuses a job whose model has no such ONNX form.

    Raises:
        CommandFailed: It has none.
    """
    try:
        check_onnx_form(job, precision=precision, split=split)
    except FormRefused as error:
        fail(str(error), ExitCode.USAGE)


def check_tools() -> None:
    """Raises CommandFailed if a package that writes or runs an ONNX file is missing."""
    missing = [name for name in _TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"making an ONNX file needs {', '.join(missing)}; {_INSTALL}", ExitCode.USAGE)


def _written(own: OwnModel, member: Member, out: Path, split: bool, watch: Watch) -> Exported:
    found = own.fetched
    job, number = found.job, found.number
    pairs = reads_pairs(job.model)
    # Rows without a second text are skipped, as in training. If none is left, the error says what is missing.
    rows = [each for each in member.examples if each.text_b is not None or not pairs] or member.examples
    try:
        texts = text_rows(rows[:_SAMPLES], pairs=pairs)
    except DataInvalid as error:
        fail(str(error), ExitCode.USAGE)
    try:
        from export.card import Origin
        from export.onnx import export_model

        watch.say(f"making the ONNX file of version {number} and comparing it with the model on {len(texts)} texts")
        report = export_model(
            job,
            found.manifest,
            found.version,
            found.tokenizer,
            out,
            texts,
            own.private,
            mixture=own.mixture,
            backbone=found.backbone,
            frozen=found.frozen,
            split=split,
            origin=Origin(number),
        )
    except ImportError as error:
        fail(f"making an ONNX file needs {error.name or error}; {_INSTALL}", ExitCode.USAGE)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"version {number} of {job.name} cannot be exported: {error}", ExitCode.FAILED)
    return Exported(job.name, number, found.digest, own.private_values, report)


def _written_writer(own: OwnModel, member: Member, out: Path, precision: GraphPrecision, watch: Watch) -> Exported:
    """As `_written`, for a job whose model writes."""
    found = own.fetched
    job, number = found.job, found.number
    try:
        samples = usable_dialogues(job, member.examples)[:_SAMPLES]
    except DataInvalid as error:
        fail(str(error), ExitCode.USAGE)
    watch.say(f"making the ONNX file of version {number} and comparing it with the model on {len(samples)} rows")
    report = write_generator(found, out, samples, precision)
    return Exported(job.name, number, found.digest, own.private_values, report, writes=True)


def write_generator(
    found: Fetched, out: Path, samples: "Sequence[Dialogue]", precision: GraphPrecision = "float32"
) -> "ExportReport":
    """Writes the bundle `out` of a job whose model writes, and compares it with the trained model on `samples`.

    Raises:
        CommandFailed: It cannot be exported, or a package is missing.
    """
    job, number = found.job, found.number
    try:
        from export.card import Origin
        from export.generator import export_generator

        return export_generator(
            job,
            found.manifest,
            found.version,
            found.tokenizer,
            out,
            samples,
            backbone=found.backbone,
            frozen=found.frozen,
            precision=precision,
            origin=Origin(number),
        )
    except ImportError as error:
        fail(f"making an ONNX file needs {error.name or error}; {_INSTALL}", ExitCode.USAGE)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"version {number} of {job.name} cannot be exported: {error}", ExitCode.FAILED)
