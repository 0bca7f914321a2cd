"""`coordinator redteam JOB` attacks a job's own software and numbers, with public rows or made texts.

No member's data has a part in it, so the result may be shown. It trains rounds of the job again on this machine, with
the training, clipping and noise that members use, and attacks the updates (`learning.auditing.rehearsal`).
"""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coordinator.cli.common import Dir, Json, Operator, operator_folder, operator_stub, run
from coordinator.cli.model import Job, Material, Tools, Version, fetch_material, load_tools
from toolkit.console import ExitCode, fail, json_requested, print_json, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from learning.auditing.report import Report
    from learning.text.examples import Example

__all__ = ["redteam"]

# Texts that are made if no rows are given.
_MADE = 400


def redteam(
    job: Job,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Labelled public rows: .jsonl, .csv, .tsv or .parquet. Default: random words.", show_default=False
        ),
    ] = None,
    rows: Annotated[
        Literal["public"] | None,
        typer.Option(help="Declares that the rows of --data are public. Required with --data.", show_default=False),
    ] = None,
    text: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    text_b: Annotated[
        str | None, typer.Option(help="The column that holds a pair's second text.", show_default=False)
    ] = None,
    version: Version = None,
    minutes: Annotated[
        float, typer.Option(min=0.0, max=1440.0, help="Roughly how long to train; at least two rehearsals are made.")
    ] = 5.0,
    delta: Annotated[float, typer.Option(min=1e-12, max=0.01, help="Of the claims and bounds.")] = 1e-6,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Attack one member's update of a job, rehearsed on public rows, and compare with the epsilon that it claims.

    It tests the job's numbers and this version of the software; what a member's own machine does,
    the member tests with `edge_client audit`. The exit code is 6 if a lower bound is above the claim.
    """
    own = _public(data, rows, text=text, label=label, text_b=text_b)
    tools = load_tools()
    where = operator_folder(operator, folder)
    with tempfile.TemporaryDirectory(prefix="tacit-redteam-") as scratch:

        async def work() -> Material:
            async with operator_stub(where) as stub:
                return await fetch_material(stub, job, version, Path(scratch), quiet=as_json)

        report = _attacked(tools, run(work()), own, 60 * minutes, delta)
    if as_json or json_requested():
        print_json(report.as_json())
    else:
        for line in report.sentences():
            typer.echo(printable(line))
    raise typer.Exit(int(ExitCode.ABOVE_CLAIM if report.verdict == "above-claim" else ExitCode.OK))


def _public(
    data: Path | None, rows: str | None, *, text: str, label: str, text_b: str | None
) -> "Sequence[Example] | None":
    """The rows to train on; None: made texts."""
    if data is None:
        return None
    from learning.text.data import read_data
    from learning.text.examples import DataInvalid
    from simulation.home import in_a_members_home

    if rows != "public":
        fail("say that the rows of --data are public: --rows public; a member audits with its own", ExitCode.USAGE)
    if (home := in_a_members_home(data)) is not None:
        fail(f"{data} lies in the member's home {home}, so it is not public; give other rows", ExitCode.USAGE)
    try:
        return read_data(data, text=text, label=label, text_b=text_b).examples
    except DataInvalid as error:
        fail(str(error), ExitCode.USAGE if data.exists() else ExitCode.NOT_FOUND)


def _attacked(
    tools: Tools, material: Material, own: "Sequence[Example] | None", seconds: float, delta: float
) -> "Report":
    import secure_agg
    from learning.auditing.audit import CONFIDENCE, UPDATE_TESTS, audit_update, memory_mib
    from learning.auditing.canaries import make_canaries
    from learning.auditing.report import Report
    from learning.auditing.statistics import each_confidence
    from learning.auditing.subject import Subject
    from learning.training.local import TrainingDiverged
    from learning.training.update import TrainingLost
    from tacit.model import PromptedModel
    from tacit.prompt import reads_pairs, writes

    began, document = time.monotonic(), material.document
    if writes(document.model):
        fail(
            f"the model of {document.name} writes, and these attacks need texts with a label; attack a job that labels "
            "texts",
            ExitCode.USAGE,
        )
    random = secure_agg.SystemRandom()
    try:
        backbone = None
        if material.backbone is not None and isinstance(document.model, PromptedModel):
            backbone = tools.read_backbone(material.backbone, document.model.config)
        subject = Subject(
            document,
            material.manifest,
            material.weights,
            material.tokenizer,
            frozen=material.frozen,
            backbone=backbone,
        )
        if own is None:
            words = subject.corpus([]).words()
            own = make_canaries(words, document.labels, _MADE, random, pairs=reads_pairs(document.model))
        outcomes, missing, rebuilt = audit_update(
            subject,
            own,
            random,
            seconds=seconds,
            delta=delta,
            confidence=each_confidence(CONFIDENCE, UPDATE_TESTS),
        )
    except (TrainingLost, TrainingDiverged, ValueError, RuntimeError) as error:
        fail(f"version {material.number} of {document.name} cannot be attacked: {error}", ExitCode.FAILED)
    return Report(
        job=document.name,
        document=document.digest(),
        versions={material.number: material.digest},
        delta=delta,
        confidence=CONFIDENCE,
        outcomes=outcomes,
        missing=missing,
        reconstruction=rebuilt,
        seconds=time.monotonic() - began,
        memory_mib=memory_mib(),
    )
