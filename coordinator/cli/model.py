"""`coordinator export` makes a version of a job runnable elsewhere; `coordinator evaluate` uses the same parts.

The server never runs a model. Both commands fetch a version by digest and convert it on this machine with the code of
`export`: to ONNX, which is what is measured, or for an export to what transformers and peft load. They need the export
extra.
"""

import functools
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.common import (
    CALL_SECONDS,
    Dir,
    Json,
    Operator,
    fetch_authorities,
    operator_channel,
    operator_folder,
    operator_stub,
    progress_bar,
    run,
)
from coordinator.cli.member_audits import Audits
from coordinator.cli.writing import export_writer
from export.onnx_form import FormRefused, GraphPrecision, GraphPrecisionOption, check_onnx_form
from toolkit.console import ExitCode, fail, print_json
from toolkit.install import install_with
from toolkit.interruption import Interruption

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from export.card import Origin
    from tacit.job import JobDocument
    from tacit.manifest import Manifest
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = [
    "Job",
    "JobFiles",
    "Material",
    "Tools",
    "Version",
    "check_audits",
    "check_exportable",
    "export",
    "export_version",
    "fetch_files",
    "fetch_material",
    "fetch_version",
    "load_tools",
]

Job = Annotated[str, typer.Argument(help="The job's name.")]
Version = Annotated[
    str | None,
    typer.Option(
        "--version",
        help="The version's number, best (the best by the members' estimates), or average (of the newest, as the job "
        "orders). Default: the newest.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class JobFiles:
    """A job's state, and what all its versions need to run."""

    detail: "operator_pb2.JobDetail"
    document: "JobDocument"
    manifest: "Manifest"
    tokenizer: bytes
    # A prompted job's backbone in its canonical file; it exists while the command runs.
    backbone: Path | None = None
    # What the job freezes, by name.
    frozen: "Mapping[str, NDArray[np.float32]]" = field(default_factory=dict)


@dataclass(frozen=True)
class Material:
    """A version and everything needed to run it."""

    document: "JobDocument"
    manifest: "Manifest"
    tokenizer: bytes
    weights: bytes
    number: int
    digest: bytes
    # A prompted job's backbone in its canonical file; it exists while the command runs.
    backbone: Path | None = None
    # The round that made the version, when the coordinator stored it, and how many members' updates are in its sum. 0:
    # the coordinator no longer tells.
    round: int = 0
    created_ms: int = 0
    members: int = 0
    # Members that withdrew and whose updates it holds.
    withdrawn: int = 0
    # Jobs that started from a version of this one that holds updates of fewer of them.
    successors: tuple[str, ...] = ()
    # Of an average, the versions in it: number and digest, in order. All other numbers are then the newest one's.
    averaged: tuple[tuple[int, bytes], ...] = ()
    # What the job freezes, by name.
    frozen: "Mapping[str, NDArray[np.float32]]" = field(default_factory=dict)

    @property
    def averaged_numbers(self) -> tuple[int, ...]:
        """Of an average, the numbers of the versions in it, in order."""
        return tuple(number for number, _ in self.averaged)

    @property
    def name(self) -> str:
        """What a person calls it."""
        if not self.averaged:
            return f"version {self.number}"
        return f"average of versions {self.averaged[0][0]} to {self.averaged[-1][0]}"


class Format(StrEnum):
    """What an export is for: onnxruntime, transformers, or peft."""

    ONNX = "onnx"
    HF = "hf"
    PEFT = "peft"


def export(
    job: Job,
    out: Annotated[Path, typer.Option(help="The folder to create.")],
    version: Version = None,
    format: Annotated[
        Format,
        typer.Option(
            help="onnx: for onnxruntime, without torch. hf: safetensors for transformers; for a LoRA job that labels "
            "texts, an adapter for peft. peft: for a job that writes, an adapter."
        ),
    ] = Format.ONNX,
    precision: GraphPrecisionOption = "float32",
    samples: Annotated[
        Path | None,
        typer.Option(
            help="Texts on which the export is compared with the trained model: .jsonl, .csv, .tsv, .parquet. "
            "Default: random words of the vocabulary.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[str, typer.Option(help="The column of --samples that holds the text.")] = "text",
    text_b: Annotated[
        str | None,
        typer.Option(
            help="The column of --samples that holds a pair's second text, if the job reads pairs. Default: text_b, "
            "if that column exists.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split",
            help="For a prompted job: export only the prompt. Its backbone, which other prompts can share, is written "
            "beside --out unless it is already there.",
        ),
    ] = False,
    passport: Annotated[
        bool, typer.Option(help="Write passport.json beside the model: where it comes from, signed.")
    ] = True,
    audit: Audits = None,
    despite_audit: Annotated[
        bool,
        typer.Option(
            "--despite-audit",
            help="Export although the job demands an audit and a member's is above the claim, or there is none.",
        ),
    ] = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Write a version as a folder that runs without this software: model, tokenizer, labels, README, and a passport."""
    from tacit.bundle import BundleInvalid, check_place

    if split and format is not Format.ONNX:
        fail("--split is for --format onnx; leave one of the two out", ExitCode.USAGE)
    if precision != "float32" and format is not Format.ONNX:
        fail("--precision is for --format onnx; leave one of the two out", ExitCode.USAGE)
    tools = load_tools()
    try:
        # Check before fetching gigabytes; writing checks again.
        check_place(out, "hf" if format is not Format.ONNX else "prompt" if split else "model")
    except BundleInvalid as error:
        fail(str(error), ExitCode.USAGE)
    where = operator_folder(operator, folder)
    try:
        given = [] if samples is None else tools.read_examples(samples, text=text, label=None, text_b=text_b)
    except (ValueError, OSError) as error:
        fail(str(error), ExitCode.USAGE)

    # It and the folder that is made beside `out` hold whole models, so SIGTERM removes them, as Ctrl-C does.
    with Interruption(), tempfile.TemporaryDirectory(prefix="tacit-export-") as scratch:

        async def work() -> Material:
            async with operator_stub(where) as stub:
                check = functools.partial(check_exportable, format=format, split=split, precision=precision)
                return await fetch_material(
                    stub, job, version, Path(scratch), quiet=as_json, check=check, exported=True
                )

        material = run(work())
        run(check_audits(where, material, audit or (), despite=despite_audit))
        report = export_version(
            tools,
            material,
            out,
            given,
            split=split,
            format=format,
            precision=precision,
        )
    beside: dict[str, Any] = (
        {"passport": str(run(_passport(where, job, out, material, audit or ())))} if passport else {}
    )
    # The backbone's folder, which other prompts may share, and whether it was written just now.
    shared = report.shared if split else None
    if as_json:
        more = {} if shared is None else {"backbone": str(shared.folder), "backbone_written": shared.written}
        print_json(
            {
                "job": job,
                "version_number": material.number,
                "version": material.digest.hex(),
                "averaged": list(material.averaged_numbers),
                "out": str(out),
                "format": format.value,
                "max_difference": report.max_difference,
                **beside,
                **more,
            }
        )
        return
    typer.echo(
        f"Wrote {out}: job {job}, {material.name} ({material.digest.hex()[:16]}); largest "
        f"difference from the trained model {report.max_difference:.2g}. Its README.md says how to run it."
    )
    if passport:
        typer.echo(f"{beside['passport']} says where it comes from; `coordinator passport verify` checks it.")
    if shared is not None:
        typer.echo(
            f"It is a prompt of {sum(report.files.values()) / 1e3:,.0f} kB on the backbone {shared.folder}, "
            f"{sum(shared.files.values()) / 1e6:,.1f} MB, "
            f"{'written just now' if shared.written else 'already there'}; keep both folders side by side."
        )


async def _passport(where: Path, job: str, out: Path, material: Material, audits: Sequence[Path]) -> Path:
    """Writes the passport of an exported folder into it, and returns its path."""
    from coordinator.cli.passport import gather_passport, write_passport
    from tacit.bundle import PASSPORT

    async with operator_channel(where) as channel:
        made = await gather_passport(
            channel, where, job, [out], material.digest, averaged=material.averaged_numbers, audits=audits
        )
    write_passport(out / PASSPORT, made)
    return out / PASSPORT


async def check_audits(where: Path, material: Material, audits: Sequence[Path], *, despite: bool) -> None:
    """Refuses a version of a job that demands an audit, unless a member's audit of it is given and sound.

    Raises:
        CommandFailed: it is refused, or a file is no audit of this job.
    """
    from coordinator.cli.member_audits import check_version, read_audits

    document = material.document
    if not audits and (document.audit is None or despite):
        return
    async with operator_channel(where) as channel:
        authorities = await fetch_authorities(channel, where)
    found = read_audits(audits, authorities, document.digest())
    if document.audit is not None and not despite:
        # An average tells of every version in it.
        for number, digest in material.averaged or ((material.number, material.digest),):
            check_version(document.name, number, digest, found)


@dataclass(frozen=True)
class Tools:
    """The functions of `export`, imported once they are needed."""

    export_model: Any
    export_hf: Any
    answering: Any
    evaluate_bundle: Any
    evaluate_generator: Any
    read_data: Any
    read_examples: Any
    text_rows: Any
    read_backbone: Any


def load_tools() -> Tools:
    try:
        from export.evaluate import evaluate_bundle, read_data, read_examples, text_rows
        from export.evaluate_writing import Answering, evaluate_generator
        from export.hugging_face import export_hf
        from export.onnx import export_model
        from export.prompted_bundle import read_backbone
    except ImportError as error:
        fail(
            f"this command runs the model and needs its libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}, here or on another machine with the operator's folder",
            ExitCode.USAGE,
        )
    return Tools(
        export_model,
        export_hf,
        Answering,
        evaluate_bundle,
        evaluate_generator,
        read_data,
        read_examples,
        text_rows,
        read_backbone,
    )


def check_exportable(
    document: "JobDocument",
    format: Format = Format.ONNX,
    *,
    split: bool = False,
    precision: GraphPrecision = "float32",
) -> None:
    """Refuses a job whose model has no form in this format, before anything large is fetched.

    Raises:
        CommandFailed: the sentence says which format or command to use.
    """
    from export.causal_hugging_face import check_causal_format
    from export.hugging_face import FormatRefused, check_format
    from tacit.model import RvaeModel
    from tacit.prompt import writes

    try:
        if isinstance(document.model, RvaeModel):
            check_format(document.name, document.model)
        elif format is Format.ONNX:
            check_onnx_form(document, precision=precision, split=split)
        elif writes(document.model):
            check_causal_format(document, "peft" if format is Format.PEFT else "hf")
        elif format is Format.PEFT:
            fail(
                f"job {document.name} labels texts; for a LoRA job, --format hf writes the adapter for peft",
                ExitCode.USAGE,
            )
        else:
            check_format(document.name, document.model)
    except (FormatRefused, FormRefused) as error:
        fail(str(error), ExitCode.USAGE)


def _origin(material: Material) -> "Origin":
    from export.card import Origin

    return Origin(
        material.number,
        material.round,
        material.created_ms,
        material.members or None,
        material.withdrawn,
        material.successors,
        material.averaged_numbers,
    )


def export_version(
    tools: Tools,
    material: Material,
    out: Path,
    given: Sequence[Any],
    *,
    split: bool = False,
    format: Format = Format.ONNX,
    precision: GraphPrecision = "float32",
) -> Any:
    """Exports a version, and compares it with the trained model on `given`, or on random words without examples."""
    from tacit.model import PromptedModel
    from tacit.prompt import reads_pairs, writes

    if writes(material.document.model):
        made_up = synthetic_texts(material.tokenizer)[::4]
        return export_writer(
            material, out, given, made_up, format=format.value, precision=precision, origin=_origin(material)
        )
    # Only the model of a prompted job has a backbone to split off or to pass on.
    more: dict[str, Any] = {"split": True} if split else {}
    pairs = reads_pairs(material.document.model)
    try:
        samples: Sequence[Any] = tools.text_rows(given, pairs=pairs)
    except ValueError as error:
        fail(str(error), ExitCode.USAGE)
    if not samples:
        samples = synthetic_texts(material.tokenizer)
        if pairs:
            # Shift the list by one, so that pairs mix long and short texts.
            samples = list(zip(samples, [*samples[1:], samples[0]], strict=True))
    try:
        if material.backbone is not None and isinstance(material.document.model, PromptedModel):
            more["backbone"] = tools.read_backbone(material.backbone, material.document.model.config)
        return (tools.export_hf if format is Format.HF else tools.export_model)(
            material.document,
            material.manifest,
            material.weights,
            material.tokenizer,
            out,
            samples,
            frozen=material.frozen,
            origin=_origin(material),
            **more,
        )
    except ImportError as error:
        what = "an ONNX file" if format is Format.ONNX else "a model for transformers"
        fail(f"writing {what} needs {error.name or error}; {install_with('coordinator', 'export')}", ExitCode.USAGE)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"the {material.name} cannot be exported: {error}", ExitCode.FAILED)


def synthetic_texts(tokenizer: bytes) -> list[str]:
    """Draws texts of many lengths from the public vocabulary, to compare models without real texts."""
    vocabulary = json.loads(tokenizer)["model"]["vocab"]
    # In a unigram tokenizer, each entry is a pair of a token and its score.
    entries = vocabulary if isinstance(vocabulary, dict) else [entry[0].lstrip("\u2581") for entry in vocabulary]
    words = [word for word in entries if word.isalpha()] or ["text"]
    choose = random.Random(0)
    return [" ".join(choose.choices(words, k=2**size)) for size in range(6) for _ in range(4)]


async def fetch_material(
    stub: "OperatorServiceStub",
    job: str,
    version: str | None,
    scratch: Path,
    *,
    quiet: bool,
    check: "Callable[[JobDocument], None] | None" = None,
    exported: bool = False,
) -> Material:
    """Fetches a version and everything it needs. Arguments and errors are those of the two functions that it calls."""
    files = await fetch_files(stub, job, scratch, quiet=quiet, check=check)
    return await fetch_version(stub, files, version, quiet=quiet, exported=exported)


async def fetch_files(
    stub: "OperatorServiceStub",
    job: str,
    scratch: Path,
    *,
    quiet: bool,
    check: "Callable[[JobDocument], None] | None" = None,
) -> JobFiles:
    """Fetches what all versions of a job need, and verifies each part by its digest.

    Args:
        stub: The operator's service.
        job: The job's name.
        scratch: The folder for a backbone, which may already be there.
        quiet: Whether to hide progress bars.
        check: Called with the job document before anything large is fetched; raises CommandFailed to refuse it.

    Raises:
        CommandFailed: there is no such job, its documents cannot be read, or it shares only a part of its model.
    """
    from learning.plugins.loading import admit
    from tacit.blobs import fetch_blob
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument
    from tacit.manifest import Manifest
    from tacit.model import PromptedModel
    from tacit.prompt import MAX_BACKBONE_BYTES
    from tacit.question import kind_of
    from tacit.v1 import operator_pb2

    detail: operator_pb2.JobDetail = await stub.GetJob(operator_pb2.GetJobRequest(name=job), timeout=CALL_SECONDS)
    try:
        document = JobDocument.from_json(await _blob(stub, detail.job.document), what="the job document")
        manifest = Manifest.from_json(await _blob(stub, document.manifest), what="the manifest")
        frozen: Mapping[str, NDArray[np.float32]] = {}
        if (part := document.frozen) is not None:
            listed = Manifest.from_json(await _blob(stub, part.manifest), what="the frozen parameters' manifest")
            values = await _blob(stub, part.weights, "the frozen parameters", quiet=quiet)
            frozen = listed.unflatten(listed.decode(values))
    except DocumentInvalid as error:
        fail(f"{error}; the coordinator may be newer than this software", ExitCode.FAILED)
    if document.question is not None:
        kind, see = kind_of(document.question)
        fail(f"job {job} is a {kind} and trains no model; see `coordinator {see} show {job}`", ExitCode.USAGE)
    if not document.complete or document.tokenizer is None:
        fail(
            f"job {job} shares only a part of its model ({document.method.name}), and its members keep the rest, so it "
            "cannot run here; a member exports its own model with `edge_client export`, and measures it with "
            "`edge_client evaluate`",
            ExitCode.REFUSED,
        )
    if check is not None:
        check(document)
    # It is the operator's own job, and its plugin is loaded only if these very files are installed here.
    admit(document.model)
    backbone = None
    if isinstance(document.model, PromptedModel) and (named := document.model.backbone) is not None:
        backbone = scratch / named.hex()
        with progress_bar("fetching the backbone", quiet=quiet) as progress:
            await fetch_blob(stub.FetchBlob, named, backbone, limit=MAX_BACKBONE_BYTES, progress=progress)
    return JobFiles(detail, document, manifest, await _blob(stub, document.tokenizer), backbone, frozen)


async def fetch_version(
    stub: "OperatorServiceStub", files: JobFiles, version: str | None, *, quiet: bool, exported: bool = False
) -> Material:
    """Fetches a version, and verifies it by its digest.

    Args:
        stub: The operator's service.
        files: What the job's versions need.
        version: The version's number, `best`, `average`, or None for the newest.
        quiet: Whether to hide the progress bar.
        exported: Whether it is fetched for an export, so that the coordinator keeps it.

    Raises:
        CommandFailed: there is no such version, or no measured one to choose the best from.
        BlobNotThere: the coordinator's store does not hold it.
    """
    import hashlib

    from coordinator.cli.estimated import AVERAGE, chosen_version, members_of
    from export.averaging import RunningAverage

    averaged: tuple[operator_pb2.Version, ...] = ()
    if version == AVERAGE:
        shares = _average_of(files)
        averaged = tuple(chosen_version(files.detail, str(number)) for number in shares)
        found = averaged[-1]
        mean = RunningAverage(files.manifest)
        for each in averaged:
            part = await _blob(stub, each.digest, f"version {each.number}", quiet=quiet, exported=exported)
            mean.add(part, shares[each.number])
        weights = mean.encoded()
    else:
        found = chosen_version(files.detail, version)
        weights = await _blob(stub, found.digest, f"version {found.number}", quiet=quiet, exported=exported)
    return Material(
        document=files.document,
        manifest=files.manifest,
        tokenizer=files.tokenizer,
        weights=weights,
        number=found.number,
        digest=hashlib.sha256(weights).digest() if averaged else found.digest,
        backbone=files.backbone,
        frozen=files.frozen,
        round=found.round,
        created_ms=found.created_ms,
        members=members_of(files.detail, found.round),
        withdrawn=found.withdrawn,
        successors=_successors(files.detail, found.withdrawn),
        averaged=tuple((each.number, each.digest) for each in averaged),
    )


def _average_of(files: JobFiles) -> dict[int, float]:
    """The weights of the versions in the job's average.

    Raises:
        CommandFailed: the job has none, or has no version to average yet.
    """
    document, newest = files.document, files.detail.job.version_number
    if document.average is None:
        fail(
            f"job {document.name} orders no average: its job file has no [average] table; name a version by its number",
            ExitCode.USAGE,
        )
    if newest == 0:
        fail(f"job {document.name} has no version to average yet; wait for its first round", ExitCode.NOT_FOUND)
    return document.average.weights(newest)


def _successors(detail: "operator_pb2.JobDetail", withdrawn: int) -> tuple[str, ...]:
    """The jobs that started from a version that holds updates of fewer members that withdrew."""
    held = {each.number: each.withdrawn for each in detail.versions}
    return tuple(each.job for each in detail.successors if held.get(each.version_number, withdrawn) < withdrawn)


async def _blob(
    stub: "OperatorServiceStub", digest: bytes, what: str = "", *, quiet: bool = True, exported: bool = False
) -> bytes:
    """Fetches a blob into memory, with a progress bar if it is not quiet. Raises BlobNotThere and BlobDamaged."""
    from tacit.blobs import fetch_blob

    data = bytearray()
    with progress_bar(f"fetching {what}", quiet=quiet) as progress:
        await fetch_blob(stub.FetchBlob, digest, data, progress=progress, exported=exported)
    return bytes(data)
