"""`coordinator evaluate` measures a job's versions on the operator's own data.

It measures the ONNX model that `coordinator export` would write. The coordinator stores accuracy, loss and the number
of examples of each version (for a model that writes: token accuracy and loss per token); all other figures are only
printed.

An evaluation that is cut off (Ctrl-C, SIGTERM, a coordinator that no longer answers) prints what it has measured and
what is missing. The coordinator stores no figures of a version whose rows were not all measured.
"""

import asyncio
import concurrent.futures
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.cli.common import CALL_SECONDS, Dir, Json, Operator, operator_folder, operator_stub, run
from coordinator.cli.model import (
    Job,
    JobFiles,
    Material,
    Tools,
    Version,
    check_exportable,
    export_version,
    fetch_files,
    fetch_version,
    load_tools,
)
from toolkit.console import CommandFailed, ExitCode, fail, print_json

if TYPE_CHECKING:
    from export.evaluate_writing import Answering, WritingFigures
    from export.figures import Figures
    from tacit.job import JobDocument
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["evaluate"]

RECONNECT_SECONDS = 2.0
# How long a measurement that is cut off may take to hand over what it has.
CUT_SECONDS = 20.0
# Number of texts on which an evaluation compares its export with the trained model.
PARITY_SAMPLES = 16
# Characters of a line if standard output is not a terminal.
_MAX_WIDTH = 160
_NONE_MEASURED = "no version of job {job} could be measured; the sentences above say why"


def evaluate(
    job: Job,
    data: Annotated[
        Path,
        typer.Option(
            help="Labelled examples, or prompts and responses for a model that writes: .jsonl, .csv or .tsv (also "
            ".gz), .parquet, .arrow, or a datasets folder."
        ),
    ],
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
    prompt: Annotated[
        str | None,
        typer.Option(help="The column of a prompt, for a model that writes. Default: prompt.", show_default=False),
    ] = None,
    response: Annotated[
        str | None,
        typer.Option(help="The column of a prompt's response. Default: response.", show_default=False),
    ] = None,
    messages: Annotated[
        str | None,
        typer.Option(
            help="The column of a dialogue's turns, in place of prompt and response. Default: messages.",
            show_default=False,
        ),
    ] = None,
    generate: Annotated[
        bool,
        typer.Option(
            "--generate",
            help="Also let a model that writes answer the prompts, and compare: BLEU, ROUGE-L, exact match.",
        ),
    ] = False,
    answers: Annotated[
        int | None,
        typer.Option(min=1, help="With --generate: answer only this many prompts, the first of the file."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, max=100, help="With --generate: the temperature of the sampled answers.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="With --generate: the seed of the sampled answers.")] = 0,
    version: Version = None,
    versions: Annotated[
        Literal["all"] | None,
        typer.Option(help="all: measure every version that the coordinator's store holds, and mark the best."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Also measure every new version until the job ends.")
    ] = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Measure versions on your own data. The coordinator stores accuracy and loss, and exports them as metrics.

    Beside these it prints a 95 % confidence interval of the accuracy (Wilson),
    the accuracy of the majority class, balanced accuracy, macro F1,
    the expected calibration error (15 bins of equal width), and the confusion matrix.

    Of a model that writes it measures loss, perplexity and accuracy per response token;
    with --generate also BLEU, ROUGE-L and exact match of greedy and of sampled answers.
    Rows with the same prompt are references of one answer.

    Ctrl-C, or SIGTERM, prints what has been measured so far and what is missing.
    """
    if (answers is not None or temperature != 1.0 or seed) and not generate:
        fail("--answers, --temperature and --seed are of generated answers; add --generate", ExitCode.USAGE)
    if follow and version is not None:
        fail("--follow measures the newest version and all later ones; leave out --version", ExitCode.USAGE)
    if versions is not None and (follow or version is not None):
        fail("--versions all measures every version; leave out --version and --follow", ExitCode.USAGE)
    tools = load_tools()
    where = operator_folder(operator, folder)
    try:
        examples = tools.read_data(
            data,
            text=text,
            label=label,
            text_b=text_b,
            prompt=prompt,
            response=response,
            messages=messages,
            rows_for="texts or dialogues",
        ).examples
    except (ValueError, OSError) as error:
        fail(str(error), ExitCode.USAGE if data.exists() else ExitCode.NOT_FOUND)
    # A measurement that was cut off may still write there.
    with tempfile.TemporaryDirectory(prefix="tacit-evaluate-", ignore_cleanup_errors=True) as scratch:
        asked = tools.answering(answers, temperature, seed) if generate else None
        work = _Evaluation(tools, job, data, examples, Path(scratch), as_json, asked)
        if versions is not None:
            run(_ended_by_sigterm(work.all(where)))
        else:
            run(_ended_by_sigterm(work.follow(where) if follow else work.once(where, version)))


async def _ended_by_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """Runs the work, which SIGTERM cancels as Ctrl-C does.

    Raises:
        CommandFailed: SIGTERM ended it, or the work failed.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only there does Python handle signals.
        return await work
    task, asked = asyncio.current_task(), False

    def end() -> None:
        nonlocal asked
        asked = True
        if task is not None:
            task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        await work
    except asyncio.CancelledError:
        if asked:
            fail("interrupted", ExitCode.INTERRUPTED)
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@dataclass(frozen=True)
class _Measured:
    """A version, without its weights, and its figures."""

    number: int
    digest: bytes
    figures: "Figures | WritingFigures"
    # Of an average, the numbers of the versions in it; `number` is then the newest.
    averaged: tuple[int, ...] = ()


class _Evaluation:
    """Measures versions, one after another, on one file of examples."""

    def __init__(
        self,
        tools: Tools,
        job: str,
        data: Path,
        examples: Sequence[Any],
        scratch: Path,
        as_json: bool,
        answering: "Answering | None" = None,
    ) -> None:
        """Prepares.

        Args:
            scratch: an empty folder for files fetched once for all versions, and for each version's export.
            answering: how a model that writes answers; None: it does not.
        """
        from learning.text.data import data_digest

        self._tools = tools
        self._job = job
        self._examples = examples
        self._scratch = scratch
        self._as_json = as_json
        self._answering = answering
        self._digest = data_digest(data)

    async def once(self, where: Path, version: str | None) -> None:
        """Measures one version, and shows all its figures."""
        async with operator_stub(where) as stub:
            found = await self._measure(stub, await self._files(stub), version)
        self._show_whole(found)

    async def all(self, where: Path) -> None:
        """Measures every version that the store holds, in order, and shows them beside each other."""
        measured: list[_Measured] = []
        waiting: list[int] = []
        total = 0
        try:
            async with operator_stub(where) as stub:
                files = await self._files(stub)
                waiting = sorted(item.number for item in files.detail.versions)
                total, last = len(waiting), max(waiting, default=0)
                while waiting:
                    found = await self._tried(stub, files, waiting[0])
                    number = waiting.pop(0)
                    if found is None:
                        continue
                    measured.append(found)
                    if not self._as_json:
                        said = _report(found.figures).headline(found.figures)
                        typer.echo(f"version {number} of {last}: {said}", err=True)
        except (asyncio.CancelledError, CommandFailed):
            self._show_cut(measured, waiting, total)
            raise
        if not measured:
            fail(_NONE_MEASURED.format(job=self._job))
        self._show_compared(measured)

    def _show_cut(self, measured: Sequence[_Measured], waiting: Sequence[int], total: int) -> None:
        """Prints what an evaluation of `total` versions had measured when it was cut off, and what is missing."""
        if measured:
            self._show_compared(measured)
        if waiting:
            numbers = f"{waiting[0]} to {waiting[-1]}" if len(waiting) > 1 else f"{waiting[0]}"
            typer.echo(
                f"cut off after {len(measured)} of {total} versions; not measured to the end: {numbers}; measure these "
                "with `--version`, or all again",
                err=True,
            )

    def _show_compared(self, measured: Sequence[_Measured]) -> None:
        """Prints the figures of several versions beside each other."""
        figures = [each.figures for each in measured]
        report = _report(figures[0])
        if self._as_json:
            best = measured[report.best_of(figures)]
            for each in measured:
                print_json({**self._json(each), "best": each is best})
            return
        for line in report.versions_lines([each.number for each in measured], figures):
            typer.echo(line)

    async def follow(self, where: Path) -> None:
        """Measures the newest version and every later one, once each. It waits for a coordinator that restarts."""
        following: int | None = None
        measured = False
        while True:
            try:
                async with operator_stub(where) as stub:
                    async for job in self._watch(stub):
                        following = job.version_number if following is None else following
                        while following <= job.version_number:
                            found = await self._tried(stub, await self._files(stub), following)
                            if found is not None:
                                measured = True
                                self._show(found, verdict=True)
                            following += 1
                        if _over(job):
                            if not measured:
                                fail(_NONE_MEASURED.format(job=self._job))
                            return
            except CommandFailed as error:
                if following is None or error.code is not ExitCode.UNREACHABLE:
                    raise
                typer.echo(f"{error.sentence}; trying again", err=True)
            await asyncio.sleep(RECONNECT_SECONDS)

    def _show_whole(self, found: _Measured) -> None:
        """Prints all figures of a version."""
        self._show(found)
        if not self._as_json:
            for line in _report(found.figures).all_lines(found.figures, _width()):
                typer.echo(line)

    def _show(self, found: _Measured, *, verdict: bool = False) -> None:
        """Prints a version's JSON, or its headline and, if asked for, a verdict on a model at the majority class."""
        if self._as_json:
            print_json(self._json(found))
            return
        name = (
            f"average of {found.averaged[0]} to {found.averaged[-1]}" if found.averaged else f"version {found.number}"
        )
        typer.echo(f"{name}: {_report(found.figures).headline(found.figures)}")
        if verdict and (said := _report(found.figures).warning(found.figures)):
            typer.echo(f"  {said}")

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

    async def _files(self, stub: "OperatorServiceStub") -> JobFiles:
        return await fetch_files(stub, self._job, self._scratch, quiet=self._as_json, check=check_exportable)

    async def _tried(self, stub: "OperatorServiceStub", files: JobFiles, number: int) -> _Measured | None:
        """Measures one version of several; None, after a sentence, if this one cannot be measured.

        Raises:
            CommandFailed: what failed is the same for all versions.
        """
        from tacit.blobs import BlobDamaged, BlobNotThere

        try:
            return await self._measure(stub, files, str(number))
        except BlobNotThere:
            why = f"version {number} is not in the coordinator's store"
        except BlobDamaged as error:
            why = f"version {number} did not arrive as it should ({error})"
        except CommandFailed as error:
            if error.code is not ExitCode.FAILED:
                raise
            why = error.sentence
        typer.echo(f"{why}; it is left out", err=True)
        return None

    async def _measure(self, stub: "OperatorServiceStub", files: JobFiles, version: str | None) -> _Measured:
        """Fetches a version, measures it, and has accuracy, loss and number of examples stored."""
        from tacit.v1 import operator_pb2

        material = await fetch_version(stub, files, version, quiet=self._as_json)
        found, cut = await self._figures(material)
        if found is None:
            raise asyncio.CancelledError
        measured = _Measured(material.number, material.digest, found, material.averaged_numbers)
        if cut:
            self._show_whole(measured)
            raise asyncio.CancelledError
        if material.averaged:
            # The coordinator stores figures of versions only.
            return measured
        accuracy, loss, examples = _report(found).stored(found)
        evaluation = operator_pb2.Evaluation(
            version_number=material.number,
            version=material.digest,
            accuracy=accuracy,
            loss=loss,
            examples=examples,
            data=self._digest,
        )
        await stub.RecordEvaluation(
            operator_pb2.RecordEvaluationRequest(job=self._job, evaluation=evaluation), timeout=CALL_SECONDS
        )
        return measured

    def _json(self, found: _Measured) -> dict[str, Any]:
        return {
            "job": self._job,
            "version_number": found.number,
            "version": found.digest.hex(),
            **({"averaged": list(found.averaged)} if found.averaged else {}),
            "data": self._digest.hex(),
            **_report(found.figures).figures_json(found.figures),
        }

    async def _figures(self, material: Material) -> "tuple[Figures | WritingFigures | None, bool]":
        """Measures a version in a thread.

        Returns:
            The figures, and whether the caller was cancelled meanwhile. Then they are of what was measured in time, or
            None.
        """
        cancelled = threading.Event()
        told: concurrent.futures.Future[Figures | WritingFigures] = concurrent.futures.Future()

        def work() -> None:
            try:
                told.set_result(self._run(material, cancelled.is_set))
            except BaseException as error:  # noqa: BLE001 - the command's own thread raises it.
                told.set_exception(error)

        # A daemon: a step that cannot be cut off, such as an export, keeps nobody from leaving.
        threading.Thread(target=work, name="evaluation", daemon=True).start()
        found = asyncio.wrap_future(told)
        try:
            return await asyncio.shield(found), False
        except asyncio.CancelledError:
            cancelled.set()
            typer.echo(f"stopping; what has been measured follows within {CUT_SECONDS:.0f} seconds", err=True)
            await asyncio.wait({found}, timeout=CUT_SECONDS)
            if not found.done() or found.exception() is not None:
                return None, True
            return found.result(), True

    def _run(self, material: Material, cancelled: Callable[[], bool]) -> "Figures | WritingFigures":
        from tacit.prompt import writes

        with tempfile.TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True) as made:
            out = Path(made) / "model"
            export_version(self._tools, material, out, compared_examples(material.document, self._examples))
            try:
                if writes(material.document.model):
                    dialogues = [each.dialogue for each in self._examples if each.dialogue is not None]
                    written: WritingFigures = self._tools.evaluate_generator(
                        out, dialogues, self._answering, cancelled=cancelled
                    )
                    return written
                if self._answering is not None:
                    fail(
                        f"job {self._job} labels texts and writes none; leave out --generate",
                        ExitCode.USAGE,
                    )
                found: Figures = self._tools.evaluate_bundle(out, self._examples, cancelled=cancelled)
                return found
            except ValueError as error:
                fail(str(error), ExitCode.USAGE)
            except RuntimeError as error:
                fail(f"the {material.name} cannot be measured: {error}")


def compared_examples(document: "JobDocument", examples: Sequence[Any]) -> Sequence[Any]:
    """The first examples on which a version's export is compared with the trained model: those that its model reads.

    If there are none, they are the first of all, and the export says what is lacking.
    """
    from learning.text.examples import dialogue_of
    from tacit.prompt import Generate, PromptedModel

    model = document.model
    if isinstance(model, PromptedModel) and isinstance(model.task, Generate):
        roles = model.task.template.roles
        examples = [each for each in examples if dialogue_of(each, roles) is not None] or examples
    return examples[:PARITY_SAMPLES]


def _report(found: "Figures | WritingFigures") -> Any:
    """The module that shows figures of this kind; both have the same functions."""
    from export import answer_report, figures_report
    from export.figures import Figures

    return figures_report if isinstance(found, Figures) else answer_report


def _width() -> int:
    """The characters of a line of standard output."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _MAX_WIDTH


def _over(job: "operator_pb2.Job") -> bool:
    from tacit.v1 import operator_pb2

    return job.status in (operator_pb2.JOB_STATUS_FINISHED, operator_pb2.JOB_STATUS_ABORTED)
