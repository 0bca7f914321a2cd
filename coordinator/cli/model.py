"""`coordinator evaluate` and `coordinator export`: a job's versions, measured and made runnable from outside.

The server never runs a model. These commands fetch a version by digest, turn it into ONNX with the code of
`export` on this machine, and measure that: what is measured is what would be shipped. They need the edge
extra.
"""

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
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
    from tacit.job import JobDocument
    from tacit.manifest import Manifest
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["Material", "Version", "evaluate", "export", "fetch_material"]

RECONNECT_SECONDS = 2.0
# Texts on which an evaluation's export is compared with the model it came from.
PARITY_SAMPLES = 16

Job = Annotated[str, typer.Argument(help="The job's name.")]
Version = Annotated[
    int | None,
    typer.Option("--version", min=0, help="Which version. Default: the newest.", show_default=False),
]


@dataclass(frozen=True)
class Material:
    """A version with all that is needed to run it."""

    document: "JobDocument"
    manifest: "Manifest"
    tokenizer: bytes
    weights: bytes
    number: int
    digest: bytes
    # The canonical file of a prompted job, for as long as the command runs.
    backbone: Path | None = None


def evaluate(
    job: Job,
    data: Annotated[Path, typer.Option(help="Labelled examples: .jsonl, .csv or .tsv, plain or .gz.")],
    text: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    text_b: Annotated[
        str | None,
        typer.Option(
            help="The column of --data that holds a pair's second text, where the job reads pairs. Default: text_b, if "
            "there is one.",
            show_default=False,
        ),
    ] = None,
    version: Version = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with every new version until the job ends.")] = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Measure a version on data of your own; the result is stored with it and shown as a metric."""
    if follow and version is not None:
        fail("--follow measures every version from the newest on; leave out --version", ExitCode.USAGE)
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
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    version: Version = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            help="Texts on which the export is compared with the trained model: .jsonl, .csv or .tsv. "
            "Default: made up from the vocabulary.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[str, typer.Option(help="The column of --samples that holds the text.")] = "text",
    text_b: Annotated[
        str | None,
        typer.Option(
            help="The column of --samples that holds a pair's second text, where the job reads pairs. Default: text_b, "
            "if there is one.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split",
            help="Of a prompted job: the prompt alone, beside its backbone, which all prompts on it share. The "
            "backbone is written beside --out unless it is there.",
        ),
    ] = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Write a version as a folder that runs without this software: ONNX, tokenizer, labels."""
    from tacit.bundle import BundleInvalid, check_place

    tools = _tools()
    try:
        # Before gigabytes are fetched; writing looks again.
        check_place(out, "prompt" if split else "model")
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
                return await fetch_material(stub, job, version, Path(scratch), quiet=as_json)

        material = run(work())
        report = _export(tools, material, out, given, split=split)
    # The folder of a backbone that others may share, and whether it was there already.
    shared = report.shared if split else None
    if as_json:
        more = {} if shared is None else {"backbone": str(shared.folder), "backbone_written": shared.written}
        print_json(
            {
                "job": job,
                "version_number": material.number,
                "version": material.digest.hex(),
                "out": str(out),
                "max_difference": report.max_difference,
                **more,
            }
        )
        return
    typer.echo(
        f"Wrote {out}: job {job}, version {material.number} ({material.digest.hex()[:16]}); largest "
        f"difference from the trained model {report.max_difference:.2g}."
    )
    if shared is not None:
        typer.echo(
            f"It is a prompt of {sum(report.files.values()) / 1e3:,.0f} kB on the backbone {shared.folder}, "
            f"{sum(shared.files.values()) / 1e6:,.1f} MB, "
            f"{'written just now' if shared.written else 'which was there'}; keep them beside each other."
        )


class _Evaluation:
    """One file of examples, measured against one version after another."""

    def __init__(
        self, tools: "_Tools", job: str, data: Path, examples: Sequence[Any], scratch: Path, as_json: bool
    ) -> None:
        """scratch: an empty folder for what is fetched once for all versions, and for what is made of each."""
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
        """From the newest version on, each once; a coordinator that restarts is waited for."""
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
                    f"there is no job named {self._job}; `coordinator job list` shows those there are",
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
            # When it was stored is the coordinator's to say.
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
    """The functions of `export`, once it is certain that they are there."""

    export_model: Any
    evaluate_bundle: Any
    read_examples: Any
    text_rows: Any
    read_backbone: Any


def _tools() -> _Tools:
    try:
        from export.evaluate import evaluate_bundle, read_examples, text_rows
        from export.onnx import export_model
        from export.prompted_bundle import read_backbone
    except ImportError as error:
        fail(
            f"this command runs the model and needs the libraries for that ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}, here or on another machine with the operator's folder",
            ExitCode.USAGE,
        )
    return _Tools(export_model, evaluate_bundle, read_examples, text_rows, read_backbone)


def _export(tools: _Tools, material: Material, out: Path, given: Sequence[Any], *, split: bool = False) -> Any:
    """given: examples to compare on; none: texts are made up."""
    from tacit.model import PromptedModel
    from tacit.prompt import reads_pairs

    # Any other job's model is whole by itself.
    more: dict[str, Any] = {"split": True} if split else {}
    pairs = reads_pairs(material.document.model)
    try:
        samples: Sequence[Any] = tools.text_rows(given, pairs=pairs)
    except ValueError as error:
        fail(str(error), ExitCode.USAGE)
    if not samples:
        samples = synthetic_texts(material.tokenizer)
        if pairs:
            # Long ones with short ones, and with each other.
            samples = list(zip(samples, [*samples[1:], samples[0]], strict=True))
    try:
        if material.backbone is not None and isinstance(material.document.model, PromptedModel):
            more["backbone"] = tools.read_backbone(material.backbone, material.document.model.config)
        return tools.export_model(
            material.document,
            material.manifest,
            material.weights,
            material.tokenizer,
            out,
            samples,
            **more,
        )
    except ImportError as error:
        fail(
            f"making an ONNX file needs {error.name or error}; {install_with('coordinator', 'export')}",
            ExitCode.USAGE,
        )
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"version {material.number} cannot be exported: {error}", ExitCode.FAILED)


def synthetic_texts(tokenizer: bytes) -> list[str]:
    """Texts of many lengths out of the public vocabulary, for a comparison where nobody gave real ones."""
    vocabulary = json.loads(tokenizer)["model"]["vocab"]
    # Of unigrams the entries are pairs, with their scores.
    entries = vocabulary if isinstance(vocabulary, dict) else [entry[0].lstrip("\u2581") for entry in vocabulary]
    words = [word for word in entries if word.isalpha()] or ["text"]
    choose = random.Random(0)
    return [" ".join(choose.choices(words, k=2**size)) for size in range(6) for _ in range(4)]


async def fetch_material(
    stub: "OperatorServiceStub", job: str, version: int | None, scratch: Path, *, quiet: bool
) -> Material:
    """A version and all it needs, each part verified by its digest. scratch: where a backbone goes, or lies already."""
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
            f"job {job} shares a part of its model only ({document.method.name}): the rest stays with its members, so "
            "that nothing here runs alone; a member makes its own model with `edge_client export`",
            ExitCode.REFUSED,
        )
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
    )


def _over(job: "operator_pb2.Job") -> bool:
    from tacit.v1 import operator_pb2

    return job.status in (operator_pb2.JOB_STATUS_FINISHED, operator_pb2.JOB_STATUS_ABORTED)
