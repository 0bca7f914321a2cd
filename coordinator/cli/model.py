"""`coordinator evaluate` and `coordinator export`: measure a job's versions, and make them runnable elsewhere.

The server never runs a model. These commands fetch a version by digest, convert it to ONNX (or, for an export, to what
transformers and peft load) on this machine with the code of `export`, and measure the ONNX model, which is what an
export would ship. They need the export extra.
"""

import asyncio
import functools
import json
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.common import (
    CALL_SECONDS,
    Dir,
    Json,
    Operator,
    operator_folder,
    operator_stub,
    progress_bar,
    run,
)
from toolkit.console import CommandFailed, ExitCode, fail, print_json
from toolkit.install import install_with

if TYPE_CHECKING:
    from export.card import Origin
    from tacit.job import JobDocument
    from tacit.manifest import Manifest
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["Material", "Version", "evaluate", "export", "fetch_material"]

RECONNECT_SECONDS = 2.0
# Number of texts on which an evaluation compares its export with the trained model.
PARITY_SAMPLES = 16

Job = Annotated[str, typer.Argument(help="The job's name.")]
Version = Annotated[
    int | None,
    typer.Option("--version", min=0, help="The version's number. Default: the newest.", show_default=False),
]


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


class Format(StrEnum):
    """What an export is for: onnxruntime, or transformers and peft."""

    ONNX = "onnx"
    HF = "hf"


def evaluate(
    job: Job,
    data: Annotated[Path, typer.Option(help="Labelled examples: .jsonl, .csv or .tsv, plain or .gz.")],
    text: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    text_b: Annotated[
        str | None,
        typer.Option(
            help="The column of --data that holds a pair's second text, if the job reads pairs. Default: text_b, if "
            "that column exists.",
            show_default=False,
        ),
    ] = None,
    version: Version = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Also measure every new version until the job ends.")
    ] = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Measure a version on your own data. The coordinator stores the result and exports it as a metric."""
    if follow and version is not None:
        fail("--follow measures the newest version and all later ones; leave out --version", ExitCode.USAGE)
    tools = _tools()
    where = operator_folder(operator, folder)
    try:
        examples = tools.read_examples(data, text=text, label=label, text_b=text_b)
    except (ValueError, OSError) as error:
        fail(str(error), ExitCode.USAGE)
    with tempfile.TemporaryDirectory(prefix="tacit-evaluate-") as scratch:
        work = _Evaluation(tools, job, data, examples, Path(scratch), as_json)
        run(work.follow(where) if follow else work.once(where, version))


def export(
    job: Job,
    out: Annotated[Path, typer.Option(help="The folder to create.")],
    version: Version = None,
    format: Annotated[
        Format,
        typer.Option(
            help="onnx: for onnxruntime, without torch. hf: safetensors for transformers; for a LoRA job, an adapter "
            "for peft."
        ),
    ] = Format.ONNX,
    samples: Annotated[
        Path | None,
        typer.Option(
            help="Texts on which the export is compared with the trained model: .jsonl, .csv or .tsv. "
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
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Write a version as a folder that runs without this software: model, tokenizer, labels, and a README."""
    from tacit.bundle import BundleInvalid, check_place

    if split and format is Format.HF:
        fail("--split is for --format onnx; leave one of the two out", ExitCode.USAGE)
    tools = _tools()
    try:
        # Check before fetching gigabytes; writing checks again.
        check_place(out, "hf" if format is Format.HF else "prompt" if split else "model")
    except BundleInvalid as error:
        fail(str(error), ExitCode.USAGE)
    where = operator_folder(operator, folder)
    try:
        given = [] if samples is None else tools.read_examples(samples, text=text, label=None, text_b=text_b)
    except (ValueError, OSError) as error:
        fail(str(error), ExitCode.USAGE)

    with tempfile.TemporaryDirectory(prefix="tacit-export-") as scratch:

        async def work() -> Material:
            async with operator_stub(where) as stub:
                check = functools.partial(_check_format, format=format)
                return await fetch_material(stub, job, version, Path(scratch), quiet=as_json, check=check)

        material = run(work())
        report = _export(tools, material, out, given, split=split, format=format, origin=_origin(material))
    # The backbone's folder, which other prompts may share, and whether it was written just now.
    shared = report.shared if split else None
    if as_json:
        more = {} if shared is None else {"backbone": str(shared.folder), "backbone_written": shared.written}
        print_json(
            {
                "job": job,
                "version_number": material.number,
                "version": material.digest.hex(),
                "out": str(out),
                "format": format.value,
                "max_difference": report.max_difference,
                **more,
            }
        )
        return
    typer.echo(
        f"Wrote {out}: job {job}, version {material.number} ({material.digest.hex()[:16]}); largest "
        f"difference from the trained model {report.max_difference:.2g}. Its README.md says how to run it."
    )
    if shared is not None:
        typer.echo(
            f"It is a prompt of {sum(report.files.values()) / 1e3:,.0f} kB on the backbone {shared.folder}, "
            f"{sum(shared.files.values()) / 1e6:,.1f} MB, "
            f"{'written just now' if shared.written else 'already there'}; keep both folders side by side."
        )


class _Evaluation:
    """Measures versions, one after another, on one file of examples."""

    def __init__(
        self, tools: "_Tools", job: str, data: Path, examples: Sequence[Any], scratch: Path, as_json: bool
    ) -> None:
        """`scratch` is an empty folder for files fetched once for all versions, and for each version's export."""
        import hashlib

        self._tools = tools
        self._job = job
        self._examples = examples
        self._scratch = scratch
        self._as_json = as_json
        with data.open("rb") as file:
            self._digest = hashlib.file_digest(file, "sha256").digest()

    async def once(self, where: Path, version: int | None) -> None:
        async with operator_stub(where) as stub:
            await self._measure(stub, version)

    async def follow(self, where: Path) -> None:
        """Measures the newest version and every later one, once each. It waits for a coordinator that restarts."""
        following: int | None = None
        while True:
            try:
                async with operator_stub(where) as stub:
                    async for job in self._watch(stub):
                        following = job.version_number if following is None else following
                        while following <= job.version_number:
                            await self._measure(stub, following)
                            following += 1
                        if _over(job):
                            return
            except CommandFailed as error:
                if following is None or error.code is not ExitCode.UNREACHABLE:
                    raise
                typer.echo(f"{error.sentence}; trying again", err=True)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _watch(self, stub: "OperatorServiceStub") -> "AsyncIterator[operator_pb2.Job]":
        from tacit.v1 import operator_pb2

        async for status in stub.Watch(operator_pb2.StatusRequest()):
            job = next((job for job in status.jobs if job.name == self._job), None)
            if job is None:
                fail(
                    f"there is no job named {self._job}; list the jobs with `coordinator job list`",
                    ExitCode.NOT_FOUND,
                )
            yield job

    async def _measure(self, stub: "OperatorServiceStub", version: int | None) -> None:
        from tacit.v1 import operator_pb2

        material = await fetch_material(stub, self._job, version, self._scratch, quiet=self._as_json)
        found = await asyncio.to_thread(self._run, material)
        evaluation = operator_pb2.Evaluation(
            version_number=material.number,
            version=material.digest,
            accuracy=found.accuracy,
            loss=found.loss,
            examples=found.examples,
            data=self._digest,
        )
        await stub.RecordEvaluation(
            operator_pb2.RecordEvaluationRequest(job=self._job, evaluation=evaluation), timeout=CALL_SECONDS
        )
        if self._as_json:
            from coordinator.cli.shown import evaluation_json

            shown = evaluation_json(evaluation)
            # Only the coordinator knows when it stored the result.
            del shown["at_ms"]
            print_json({"job": self._job, **shown})
        else:
            typer.echo(
                f"version {material.number}: accuracy {100 * found.accuracy:.2f} %, loss {found.loss:.4f}, "
                f"{found.examples} examples"
            )

    def _run(self, material: Material) -> Any:
        with tempfile.TemporaryDirectory(dir=self._scratch) as made:
            out = Path(made) / "model"
            _export(self._tools, material, out, self._examples[:PARITY_SAMPLES])
            try:
                return self._tools.evaluate_bundle(out, self._examples)
            except ValueError as error:
                fail(str(error), ExitCode.USAGE)


@dataclass(frozen=True)
class _Tools:
    """The functions of `export`, imported once they are needed."""

    export_model: Any
    export_hf: Any
    evaluate_bundle: Any
    read_examples: Any
    text_rows: Any
    read_backbone: Any


def _tools() -> _Tools:
    try:
        from export.evaluate import evaluate_bundle, read_examples, text_rows
        from export.hugging_face import export_hf
        from export.onnx import export_model
        from export.prompted_bundle import read_backbone
    except ImportError as error:
        fail(
            f"this command runs the model and needs its libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}, here or on another machine with the operator's folder",
            ExitCode.USAGE,
        )
    return _Tools(export_model, export_hf, evaluate_bundle, read_examples, text_rows, read_backbone)


def _check_format(document: "JobDocument", format: Format) -> None:
    """Refuses a job whose model has no form in this format, before anything large is fetched."""
    from export.hugging_face import FormatRefused, check_format
    from tacit.model import RvaeModel

    # ONNX has a form for every model that labels texts.
    if format is Format.ONNX and not isinstance(document.model, RvaeModel):
        return
    try:
        check_format(document.name, document.model)
    except FormatRefused as error:
        fail(str(error), ExitCode.USAGE)


def _origin(material: Material) -> "Origin":
    from export.card import Origin

    return Origin(material.number, material.round, material.created_ms, material.members or None)


def _export(
    tools: _Tools,
    material: Material,
    out: Path,
    given: Sequence[Any],
    *,
    split: bool = False,
    format: Format = Format.ONNX,
    origin: "Origin | None" = None,
) -> Any:
    """Exports a version, and compares it with the trained model on `given`, or on random words without examples."""
    from tacit.model import PromptedModel
    from tacit.prompt import reads_pairs

    # Only the model of a prompted job has a backbone to split off or to pass on.
    more: dict[str, Any] = {"split": True} if split else {}
    if origin is not None:
        more["origin"] = origin
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
            **more,
        )
    except ImportError as error:
        what = "an ONNX file" if format is Format.ONNX else "a model for transformers"
        fail(f"writing {what} needs {error.name or error}; {install_with('coordinator', 'export')}", ExitCode.USAGE)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"version {material.number} cannot be exported: {error}", ExitCode.FAILED)


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
    version: int | None,
    scratch: Path,
    *,
    quiet: bool,
    check: "Callable[[JobDocument], None] | None" = None,
) -> Material:
    """Fetches a version and everything it needs, and verifies each part by its digest.

    Args:
        stub: The operator's service.
        job: The job's name.
        version: The version's number, or None for the newest.
        scratch: The folder for a backbone, which may already be there.
        quiet: Whether to hide progress bars.
        check: Called with the job document before anything large is fetched; raises CommandFailed to refuse it.

    Raises:
        CommandFailed: there is no such version, its documents cannot be read, or the job shares only a part of its
            model.
    """
    from tacit.blobs import fetch_blob
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument
    from tacit.manifest import Manifest
    from tacit.model import PromptedModel
    from tacit.prompt import MAX_BACKBONE_BYTES
    from tacit.v1 import operator_pb2

    async def blob(digest: bytes, what: str = "") -> bytes:
        data = bytearray()
        with progress_bar(f"fetching {what}", quiet=quiet or not what) as progress:
            await fetch_blob(stub.FetchBlob, digest, data, progress=progress)
        return bytes(data)

    detail: operator_pb2.JobDetail = await stub.GetJob(operator_pb2.GetJobRequest(name=job), timeout=CALL_SECONDS)
    wanted = detail.job.version_number if version is None else version
    found = next((item for item in detail.versions if item.number == wanted), None)
    if found is None:
        fail(
            f"job {job} has no version {wanted}; the newest is {detail.job.version_number}",
            ExitCode.NOT_FOUND,
        )
    try:
        document = JobDocument.from_json(await blob(detail.job.document), what="the job document")
        manifest = Manifest.from_json(await blob(document.manifest), what="the manifest")
    except DocumentInvalid as error:
        fail(f"{error}; the coordinator may be newer than this software", ExitCode.FAILED)
    if not document.complete or document.tokenizer is None:
        fail(
            f"job {job} shares only a part of its model ({document.method.name}), and its members keep the rest, so it "
            "cannot run here; a member exports its own model with `edge_client export`",
            ExitCode.REFUSED,
        )
    if check is not None:
        check(document)
    backbone = None
    if isinstance(document.model, PromptedModel) and (named := document.model.backbone) is not None:
        backbone = scratch / named.hex()
        with progress_bar("fetching the backbone", quiet=quiet) as progress:
            await fetch_blob(stub.FetchBlob, named, backbone, limit=MAX_BACKBONE_BYTES, progress=progress)
    return Material(
        document=document,
        manifest=manifest,
        tokenizer=await blob(document.tokenizer),
        weights=await blob(found.digest, f"version {wanted}"),
        number=wanted,
        digest=found.digest,
        backbone=backbone,
        round=found.round,
        created_ms=found.created_ms,
        members=_members(detail, found.round),
    )


def _members(detail: "operator_pb2.JobDetail", number: int) -> int:
    """How many members' updates are in a round's sum; 0 if no sum was published, or the answer has no such round."""
    attempts = [attempt for each in detail.rounds if each.number == number for attempt in each.attempts]
    return sum(len(attempt.survivors) for attempt in attempts if attempt.outcome == "published")


def _over(job: "operator_pb2.Job") -> bool:
    from tacit.v1 import operator_pb2

    return job.status in (operator_pb2.JOB_STATUS_FINISHED, operator_pb2.JOB_STATUS_ABORTED)
