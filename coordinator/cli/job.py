"""`coordinator job ...`: turns a job file into a model in training, and shows and steers the job."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coordinator.cli.asking import new_file
from coordinator.cli.backbone import FOLDER
from coordinator.cli.common import (
    CALL_SECONDS,
    Dir,
    Json,
    Operator,
    Yes,
    confirm,
    operator_at_hand,
    operator_folder,
    operator_stub,
    run,
    table,
)
from coordinator.cli.corpora import corpora
from coordinator.cli.creating import create_job
from coordinator.cli.job_questions import (
    Questions,
    read_epsilon,
    read_examples,
    read_labels,
    read_members,
    read_texts,
    read_two_numbers,
)
from coordinator.cli.plot import plot
from coordinator.cli.trying import try_job
from toolkit.console import ExitCode, fail, print_json, printable
from toolkit.install import install_with

if TYPE_CHECKING:
    from export.continuing import Earlier
    from tacit.job import JobDocument
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["app", "read_bundle_parts"]

app = typer.Typer(no_args_is_help=True)


Name = Annotated[str, typer.Argument(help="The job's name.")]


# The delta of members' policies unless they set another.
_USUAL_DELTA = 1e-6


@app.command()
def new(
    name: Name,
    out: Annotated[
        Path | None, typer.Option(help="The job file to write. Default: NAME.toml.", show_default=False)
    ] = None,
    labels: Annotated[str | None, typer.Option(help="The labels, as one line of CSV.", show_default=False)] = None,
    members: Annotated[int | None, typer.Option(min=3, help="How many members take part.", show_default=False)] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Examples of the member that has the fewest.", show_default=False)
    ] = None,
    epsilon: Annotated[
        str | None,
        typer.Option(
            help="What all rounds may cost a member in privacy, such as 8, 4 or 1; or none.", show_default=False
        ),
    ] = None,
    texts: Annotated[str | None, typer.Option(help="short, long or pairs.", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A backbone's name (minilm), words (a small model over a public list), or own (private vocabularies).",
            show_default=False,
        ),
    ] = None,
    words: Annotated[
        Path | None,
        typer.Option(
            help="With words: a public list, one entry a line. Default: the vocab.txt of the backbone minilm.",
            show_default=False,
        ),
    ] = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Write a job file: asks five questions, or takes the answers as options. Works offline."""
    import os

    from coordinator.cli.new_job import Answers, JobNotMade, check_answers, job_file

    target = new_file(name, out)
    if words is not None and not words.is_file():
        fail(f"{words} does not exist; name a public list of words, one a line, with --words", ExitCode.NOT_FOUND)
    given = {
        "--members": members,
        "--examples": examples,
        "--labels": labels,
        "--epsilon": epsilon,
        "--texts": texts,
        "--model": model,
    }
    asked = Questions([option for option, value in given.items() if not value])
    if not members and not examples:
        question = "Members, and examples of the one with the fewest (such as 3 300)"
        members, examples = asked.answer(question, read_two_numbers)
    members = members or asked.answer("Members", read_members)
    examples = examples or asked.answer("Examples of the member with the fewest", read_examples)
    where = operator_at_hand(operator, folder)
    pieces = words is None and where is not None
    if words is None and where is not None:
        words = where / FOLDER / "minilm" / "vocab.txt"
    told = Answers(
        name=name,
        labels=asked.given("--labels", labels, "Labels, separated by commas", read_labels),
        members=members,
        examples=examples,
        epsilon=asked.given(
            "--epsilon", epsilon, "Epsilon for all rounds, such as 8, 4 or 1, or none for no noise", read_epsilon, "8"
        ),
        texts=asked.given("--texts", texts, "Texts: short, long or pairs", read_texts, "short"),
        model=model or "",
        vocabulary=os.path.relpath(words, target.parent) if words is not None and words.is_file() else None,
        word_pieces=pieces,
    )

    def chosen(answer: str) -> Answers:
        made = replace(told, model=answer)
        check_answers(made)
        return made

    question = "Model: a backbone such as minilm, words, or own vocabularies"
    try:
        text = job_file(replace(told, model=model) if model else asked.answer(question, chosen, "minilm"))
    except ImportError as error:
        fail(
            f"choosing the noise needs the model libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}",
            ExitCode.USAGE,
        )
    except JobNotMade as error:
        fail(f"no job file was written: {error}", ExitCode.USAGE)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}; choose another file with --out", ExitCode.FAILED)
    if as_json:
        print_json({"job": name, "file": str(target)})
        return
    typer.echo(f"Wrote {target}. Read it, and change what you know better: docs/recipes.md has the choices.")
    typer.echo(f"Next: coordinator job bundle {target}")


def _earlier(start: str, where: Path, as_json: bool) -> "Earlier":
    from coordinator.cli.continuing import fetch_earlier
    from tacit.job import earlier_version

    return fetch_earlier(where, *earlier_version(start), quiet=as_json)


@app.command()
def bundle(
    file: Annotated[Path, typer.Argument(help="The job file (TOML).")],
    out: Annotated[
        Path | None, typer.Option(help="The folder to create. Default: NAME.bundle.", show_default=False)
    ] = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Create a job's starting bundle from its file: manifest, starting weights, tokenizer.

    It works offline, unless the job starts from a version of an earlier job.
    """
    from tacit.documents import DocumentInvalid
    from tacit.job import JobSpec

    try:
        spec = JobSpec.from_toml(file)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    target = Path(f"{spec.name}.bundle") if out is None else out
    where = operator_at_hand(operator, folder)
    try:
        from export.bundle import make_job_bundle, read_job_bundle
        from learning.accounting.expected_noise import Values, expected_noise
        from learning.accounting.planning import cost_of_metrics_alone
        from learning.auditing.demanded import warning_of
        from learning.backbones.collection import Collection

        document = make_job_bundle(
            spec,
            file.parent,
            target,
            report=lambda sentence: typer.echo(f"  {sentence}", err=True),
            collection=None if where is None else Collection(where / FOLDER),
            earlier=_earlier(spec.start, where or operator_folder(operator, folder), as_json)
            if isinstance(spec.start, str)
            else None,
        )
    except ImportError as error:
        fail(
            f"creating a bundle needs the model libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}, or create the bundle on a machine that has them",
            ExitCode.USAGE,
        )
    except (ValueError, OSError) as error:
        fail(f"no bundle was made from {file}: {error}", ExitCode.USAGE)
    expected = expected_noise(document, Values.of(document, read_job_bundle(target).manifest))
    metrics = cost_of_metrics_alone(document, _USUAL_DELTA)
    warning = warning_of(document, _USUAL_DELTA)
    if as_json:
        print_json(
            {
                "job": spec.name,
                "bundle": str(target),
                "document": document.digest().hex(),
                "values": document.values,
                "expected_noise": None if expected is None else expected.as_json(),
                "metrics": None if metrics is None else metrics.as_json(),
                "audit_warning": warning,
            }
        )
        return
    typer.echo(f"Created {target}: job {spec.name}, {document.values} values, document {document.digest().hex()[:16]}.")
    for sentence in () if expected is None else expected.sentences:
        typer.echo(sentence)
    if metrics is not None:
        typer.echo(f"M{metrics.sentence[1:]}, for each member whose policy has a metrics_epsilon.")
    if warning is not None:
        typer.echo(warning)
    typer.echo(f"Next: coordinator job create --bundle {target}")


@app.command()
def create(
    bundle: Annotated[Path, typer.Option("--bundle", help="The folder that `coordinator job bundle` created.")],
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Upload a bundle and start its job. An interrupted upload continues where it stopped."""
    document, parts = read_bundle_parts(bundle)
    where = operator_folder(operator, folder)

    _show(
        create_job(where, document, parts, quiet=as_json),
        as_json,
        f"Job {document.name} is running; follow it with `coordinator status --watch`.",
    )


@app.command("list")
def list_jobs(operator: Operator = None, folder: Dir = None, as_json: Json = False) -> None:
    """Show all jobs."""
    where = operator_folder(operator, folder)

    async def work() -> "operator_pb2.StatusResponse":
        from tacit.v1 import operator_pb2

        async with operator_stub(where) as stub:
            answer: operator_pb2.StatusResponse = await stub.Status(operator_pb2.StatusRequest(), timeout=CALL_SECONDS)
            return answer

    jobs = list(run(work()).jobs)
    from coordinator.cli.shown import job_json
    from coordinator.cli.status import jobs_table

    if as_json:
        print_json({"jobs": [job_json(job) for job in jobs]})
    else:
        typer.echo(jobs_table(jobs) if jobs else "No jobs: `coordinator job bundle`, then `coordinator job create`.")


@app.command()
def show(
    name: Name,
    rounds: Annotated[int, typer.Option(min=1, help="How many of the newest rounds to show.")] = 20,
    version: Annotated[
        str | None,
        typer.Option(
            help="Show one version alone: its number, or best, the best by the members' estimates.", show_default=False
        ),
    ] = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Show a job with its server optimiser, rounds, dropouts and versions."""
    where = operator_folder(operator, folder)

    async def work() -> "tuple[operator_pb2.JobDetail, JobDocument | None]":
        from tacit.v1 import operator_pb2

        async with operator_stub(where) as stub:
            answer: operator_pb2.JobDetail = await stub.GetJob(
                operator_pb2.GetJobRequest(name=name), timeout=CALL_SECONDS
            )
            return answer, await _document_of(stub, answer.job.document)

    detail, document = run(work())
    if version is not None:
        _show_version(detail, version, as_json)
        return
    server = None if document is None else document.server
    earlier = None if document is None else document.earlier
    from coordinator.cli.estimated import estimates_lines
    from coordinator.cli.shown import approvals_words, detail_json, moment, optimiser_json

    if as_json:
        print_json(
            {
                **detail_json(detail),
                "server": None if server is None else optimiser_json(server),
                "tuned_on": None if document is None else document.tuned_on,
                "earlier": None if earlier is None else earlier.model_dump(mode="json"),
            }
        )
        return
    from coordinator.cli.status import jobs_table
    from tacit.question import kind_of

    typer.echo(jobs_table([detail.job]))
    if detail.job.HasField("approvals"):
        typer.echo(printable(f"\nMembers: {approvals_words(detail.job.approvals)}"))
    if earlier is not None:
        typer.echo(f"\nStarted from version {earlier.number} of {earlier.job}")
    if server is not None:
        said = {key: value for key, value in optimiser_json(server).items() if key != "optimiser"}
        numbers = ", ".join(f"{key} {value:g}" for key, value in said.items())
        typer.echo(f"\nServer optimiser: {server.optimiser}, {numbers}")
    if document is not None and document.tuned_on is not None:
        typer.echo("\nIts numbers were tuned on the operator's own private rows: that is in no epsilon.")
    if document is not None and document.question is not None:
        kind, command = kind_of(document.question)
        typer.echo(f"\nIt is a {kind}: `coordinator {command} show {name}` shows the answer.")
    if detail.rounds:
        typer.echo("\n" + _rounds_table(detail.rounds[-rounds:]))
    typer.echo("\n" + _versions_table(detail))
    if detail.acts:
        acts = [[moment(each.at_ms), each.by, each.act] for each in detail.acts]
        typer.echo("\n" + table(["WHEN", "BY", "ACT"], acts))
    for line in _withdrawal_lines(detail):
        typer.echo(printable(line))
    if lines := estimates_lines(detail, document):
        typer.echo("\n" + "\n".join(lines))


@app.command()
def pause(name: Name, operator: Operator = None, folder: Dir = None, as_json: Json = False) -> None:
    """Pause a job. Its current attempt is abandoned; `coordinator job resume` continues the job."""
    _change(name, "PAUSE", operator_folder(operator, folder), as_json, f"Job {name} is paused.")


@app.command()
def resume(name: Name, operator: Operator = None, folder: Dir = None, as_json: Json = False) -> None:
    """Continue a paused job."""
    _change(name, "RESUME", operator_folder(operator, folder), as_json, f"Job {name} is running.")


@app.command()
def abort(name: Name, yes: Yes = False, operator: Operator = None, folder: Dir = None, as_json: Json = False) -> None:
    """End a job permanently. Its versions stay and can be exported."""
    where = operator_folder(operator, folder)
    confirm(f"Abort {name}? You cannot resume it afterwards; its versions stay.", yes)
    _change(name, "ABORT", where, as_json, f"Job {name} is aborted.")


app.command()(corpora)
app.command()(plot)
app.command("try")(try_job)


async def _document_of(stub: "OperatorServiceStub", document: bytes) -> "JobDocument | None":
    """Reads the job document; None if it is lost or from newer software."""
    import grpc.aio

    from tacit.blobs import BlobDamaged, BlobNotThere, fetch_blob
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument

    data = bytearray()
    try:
        await fetch_blob(stub.FetchBlob, document, data)
        return JobDocument.from_json(bytes(data))
    except (BlobNotThere, BlobDamaged, DocumentInvalid, grpc.aio.AioRpcError):
        # The rest of the job is still worth showing; other commands report a broken document.
        return None


def _change(name: str, change: Literal["PAUSE", "RESUME", "ABORT"], where: Path, as_json: bool, done: str) -> None:
    async def work() -> "operator_pb2.Job":
        from tacit.v1 import operator_pb2

        async with operator_stub(where) as stub:
            request = operator_pb2.ChangeJobRequest(name=name, change=f"JOB_CHANGE_{change}")
            answer: operator_pb2.Job = await stub.ChangeJob(request, timeout=CALL_SECONDS)
            return answer

    _show(run(work()), as_json, done)


def _show(job: "operator_pb2.Job", as_json: bool, done: str) -> None:
    from coordinator.cli.shown import job_json

    if as_json:
        print_json(job_json(job))
    else:
        typer.echo(done)


def read_bundle_parts(folder: Path) -> "tuple[JobDocument, list[tuple[str, bytes | Path]]]":
    """Reads a bundle.

    Returns:
        The document, and each file that it names by digest: its bytes, or its path if it is too large for memory.

    Raises:
        CommandFailed: the folder is not a bundle, or its parts do not belong together.
    """
    from tacit.bundle import LARGE_FILES, BundleInvalid, read_bundle
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument

    if not folder.is_dir():
        fail(f"{folder} is not a folder; create a bundle with `coordinator job bundle`", ExitCode.NOT_FOUND)
    try:
        bundle = read_bundle(folder, "job", unread=LARGE_FILES)
        document = JobDocument.from_json(bundle.files["job.json"], what=str(folder / "job.json"))
    except BundleInvalid as error:
        fail(str(error), ExitCode.USAGE)
    except DocumentInvalid as error:
        fail(f"{error}; create the bundle again with `coordinator job bundle`", ExitCode.USAGE)
    for name, digest in document.files.items():
        if name not in bundle.index.files or bundle.index.files[name].sha256 != digest:
            fail(
                f"{folder / 'job.json'} names a different {name}; create the bundle again with "
                "`coordinator job bundle`",
                ExitCode.USAGE,
            )
    return document, [(name, bundle.files.get(name, folder / name)) for name in document.files]


def _named(dropout: "operator_pb2.Dropout") -> str:
    """The member's name if it is guilty of what it dealt, which is worth more than a count; or whom a victim names."""
    from tacit.reason import Reason

    if dropout.reason == Reason.REASON_COMPLAINT_UNANSWERED:
        return f" ({dropout.detail})"
    guilty = (Reason.REASON_DEALER_CONVICTED, Reason.REASON_COMPLAINTS_TOO_MANY, Reason.REASON_DEALER_SILENT)
    return f" ({dropout.member})" if dropout.reason in guilty else ""


def _rounds_table(rounds: "Sequence[operator_pb2.Round]") -> str:
    from coordinator.cli.shown import moment, percent
    from tacit.reason import from_word, word

    rows = []
    for item in rounds:
        lost = Counter(
            f"{dropout.phase} {word(from_word(word(dropout.reason)))}" + _named(dropout)
            for attempt in item.attempts
            for dropout in attempt.dropouts
        )
        last = item.attempts[-1] if item.attempts else None
        rows.append(
            [
                str(item.number),
                item.outcome,
                word(item.reason) if item.reason else "-",
                str(len(item.attempts)),
                f"{len(last.survivors)}/{len(last.cohort)}" if last else "-",
                percent(last.training.accuracy) if last and last.HasField("training") else "-",
                ", ".join(f"{count} x {what}" for what, count in sorted(lost.items())) or "-",
                moment(item.ended_ms),
            ]
        )
    return table(["ROUND", "OUTCOME", "REASON", "ATTEMPTS", "SUMMED", "TRAINING", "DROPOUTS", "ENDED"], rows)


def _show_version(detail: "operator_pb2.JobDetail", wanted: str, as_json: bool) -> None:
    """Shows one version."""
    from coordinator.cli.estimated import NOT_MEASURED, SELECTED, chosen_version, estimate_words, loss_words
    from coordinator.cli.shown import moment, percent, version_json

    item, job = chosen_version(detail, wanted), detail.job
    if as_json:
        print_json({"job": job.name, **version_json(item, job)})
        return
    typer.echo(f"Version {item.number} of {job.name}, {item.digest.hex()}")
    typer.echo(f"made {moment(item.created_ms)} UTC " + (f"by round {item.round}" if item.round else "as the start"))
    for measured in item.evaluations:
        typer.echo(
            f"evaluated {moment(measured.at_ms)} UTC: accuracy {percent(measured.accuracy)}, loss {measured.loss:.4f}, "
            f"{measured.examples} examples"
        )
    if not item.HasField("estimate"):
        typer.echo(f"estimate: {NOT_MEASURED}; a version is measured by the round that starts from it")
        return
    said = f"estimate: accuracy {estimate_words(item.estimate)}"
    if item.estimate.HasField("shown"):
        shown = item.estimate.shown
        said += f", loss {loss_words(item.estimate)}, {shown.units:.0f} ± {shown.units_error:.2g} units"
    typer.echo(f"{said}, from {item.estimate.members} members")
    if job.HasField("best") and job.best.version_number == item.number:
        typer.echo(f"It is the best measured version: {SELECTED}.")


def _withdrawal_lines(detail: "operator_pb2.JobDetail") -> Iterator[str]:
    """Says which versions hold updates of members that withdrew, and which jobs started from this one."""
    marked = [each for each in detail.versions if each.withdrawn]
    if marked:
        most = max(each.withdrawn for each in marked)
        who = "a member that withdrew" if most == 1 else f"{most} members that withdrew"
        yield f"\nVersions {marked[0].number} to {marked[-1].number} hold updates of {who}."
    for each in detail.successors:
        yield f"Job {each.job} started from version {each.version_number}; `coordinator job show {each.job}`."


def _versions_table(detail: "operator_pb2.JobDetail") -> str:
    from coordinator.cli.estimated import NOT_MEASURED, estimate_words, loss_words
    from coordinator.cli.shown import moment, percent

    measured_by_members = detail.job.HasField("estimate")
    rows = []
    for item in detail.versions:
        estimates = [NOT_MEASURED, "-"]
        if item.HasField("estimate"):
            best = detail.job.HasField("best") and detail.job.best.version_number == item.number
            estimates = [estimate_words(item.estimate) + (" best" if best else ""), loss_words(item.estimate)]
        measured = item.evaluations[-1] if item.evaluations else None
        rows.append(
            [
                str(item.number),
                item.digest.hex()[:16],
                str(item.round) if item.round else "start",
                moment(item.created_ms),
                percent(measured.accuracy) if measured else "-",
                f"{measured.loss:.4f}" if measured else "-",
                str(measured.examples) if measured else "-",
                f"{item.norm:.4g}" if item.norm else "-",
                f"{item.change:.4g}" if item.change else "-",
                *(estimates if measured_by_members else ()),
            ]
        )
    more = ["ESTIMATED ACCURACY", "ESTIMATED LOSS"] if measured_by_members else []
    return table(["VERSION", "DIGEST", "ROUND", "MADE", "ACCURACY", "LOSS", "EXAMPLES", "NORM", "CHANGE", *more], rows)
