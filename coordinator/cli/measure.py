"""`coordinator measure ...`: measures a version on members' own rows under noise, and shows the estimate."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.asking import DELTA, Answer, checked, fetch_answer, fetch_document, new_file, std_of, write
from coordinator.cli.common import CALL_SECONDS, Dir, Json, Operator, operator_folder, operator_stub, run, table
from coordinator.cli.creating import create_job
from toolkit.console import ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    from coordinator.domain.measurement import Result
    from coordinator.domain.validation import Estimate
    from export.measurement import Subject
    from tacit.measurement import Measurement
    from tacit.measurement_file import MeasurementSpec
    from tacit.mechanism import Unit
    from tacit.passport import EstimateFacts, MeasurementFacts
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["app", "measured_facts"]

app = typer.Typer(no_args_is_help=True)

# What counts once in an answer, by the unit that ledgers protect.
_COUNTED = {"example": "rows", "person": "persons", "member": "members"}

Name = Annotated[str, typer.Argument(help="The measurement's name.")]

# Jobs that a version comes from, one after another.
_MAX_ORIGINS = 100


@app.command()
def new(
    name: Name,
    version: Annotated[
        str | None, typer.Option(help="The version: JOB:NUMBER or JOB:best.", show_default=False)
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="A folder of `coordinator job bundle`, in place of a version.", show_default=False),
    ] = None,
    by_label: Annotated[bool, typer.Option("--by-label", help="Measure the rows of each label apart.")] = False,
    all_rows: Annotated[
        bool,
        typer.Option(
            "--all-rows", help="Measure all rows, also those that were trained on: more rows, but too good a number."
        ),
    ] = False,
    members: Annotated[int, typer.Option(min=2, help="The least number of members that answer.")] = 3,
    epsilon: Annotated[float, typer.Option(help="What the whole answer may cost a member in privacy.")] = 0.5,
    unit: Annotated[str, typer.Option(help="What members' ledgers protect: example, person or member.")] = "example",
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: NAME.toml.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Write a measurement's file, with noise for the given epsilon. Works offline."""
    import json
    import math
    import os

    from coordinator.domain.validation import MIN_RATIO, MIN_UNITS
    from tacit.measurement_file import MeasurementSpec
    from tacit.validation import HALF, distance_of

    target = new_file(name, out)
    if unit not in _COUNTED:
        fail(f"--unit {unit} is not one of {', '.join(_COUNTED)}", ExitCode.USAGE)
    if (version is None) == (bundle is None):
        fail("name what is measured: --version JOB:NUMBER, --version JOB:best or --bundle FOLDER", ExitCode.USAGE)
    if bundle is not None and not bundle.is_dir():
        fail(f"{bundle} is not a folder; create a bundle with `coordinator job bundle`", ExitCode.NOT_FOUND)
    source = f"version = {json.dumps(version)}" if bundle is None else f"bundle = {_path(bundle, target)}"
    keys = [source, *(['rows = "all"'] if all_rows else []), *(['by = "label"'] if by_label else [])]

    def text(std: float) -> str:
        return (
            "# A measurement: docs/measurements.md explains every key. `coordinator measure run` asks for it.\n"
            f"schema = 1\nname = {json.dumps(name, ensure_ascii=False)}\n" + "\n".join(keys) + "\n\n"
            f"# Each member adds noise of this standard deviation to each of its sums, in steps of 1/{2 * HALF}.\n"
            f'[noise]\nstd = {std:g}\nunit = "{unit}"\n\n'
            f"[rounds]\nmin_members = {members}\ntarget_members = {max(members, 200)}\n"
        )

    spec = checked(MeasurementSpec, text(1.0), target)
    distance = distance_of("add-remove")
    std = std_of("metrics", distance, epsilon, spec.noise.unit)
    _check_shown(checked(MeasurementSpec, text(std), target))
    write(text(std), target)
    noise = math.sqrt(members) * std / (2 * HALF)
    # An accuracy of one half has 2 points of error. Below the other two nothing is shown.
    rows = math.ceil(max(noise / 0.02, MIN_UNITS, MIN_RATIO * 2 * noise))
    if as_json:
        print_json({"measurement": name, "file": os.fspath(target), "std": std, "epsilon": epsilon, "rows": rows})
        return
    each = " of each label" if by_label else ""
    needed = f"{rows:,} members answer" if unit == "member" else f"they measure {rows:,} {_COUNTED[unit]}{each} in all"
    typer.echo(
        f"Wrote {target}. An answer costs an untouched ledger epsilon {epsilon:g} at delta {DELTA:g} (add-remove). "
        f"With the noise of {members} members, an accuracy of 50 % has a standard error of 2 points or less if "
        f"{needed}."
    )
    typer.echo(f"Next: coordinator measure run {target}")


def _check_shown(spec: "MeasurementSpec") -> None:
    """Refuses a measurement that members would pay for and that would never show anything."""
    from coordinator.domain.validation import MIN_UNITS

    if spec.noise.unit == "member" and spec.rounds.target_members < MIN_UNITS:
        fail(
            f"rounds.target_members: with unit member each member counts once, and nothing is shown of fewer than "
            f"{MIN_UNITS:.0f}; raise it from {spec.rounds.target_members}",
            ExitCode.USAGE,
        )


def _path(folder: Path, target: Path) -> str:
    import json
    import os

    return json.dumps(os.path.relpath(folder, target.parent))


@app.command("run")
def run_measurement(
    file: Annotated[Path, typer.Argument(help="The measurement's file (TOML).")],
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Ask for a measurement: upload it and start its one round. Members whose policy admits it measure."""
    from tacit.documents import DocumentInvalid
    from tacit.measurement_file import MeasurementSpec

    if not file.exists():
        fail(f"{file} does not exist; write one with `coordinator measure new`", ExitCode.NOT_FOUND)
    try:
        spec = MeasurementSpec.from_toml(file)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    _check_shown(spec)
    where = operator_folder(operator, folder)
    from export.measurement import Subject, make_measurement

    parts: list[tuple[str, bytes | Path]] = []
    if spec.subject is not None:
        subject = run(_version_of(where, *spec.subject))
    else:
        from coordinator.cli.job import read_bundle_parts

        document, parts = read_bundle_parts(file.parent / (spec.bundle or ""))
        subject = Subject(document, document.weights)
    try:
        made = make_measurement(spec, subject)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    job = create_job(where, made.document, [*parts, *made.files.items()], quiet=as_json)
    from coordinator.cli.shown import job_status

    if as_json:
        print_json(
            {
                "measurement": job.name,
                "document": made.document.digest().hex(),
                "job": subject.document.name,
                "version_number": subject.number,
                "status": job_status(job),
            }
        )
        return
    typer.echo(
        f"Measurement {spec.name} of {_named(subject.document.name, subject.number)} is asked for; see the estimate "
        f"with `coordinator measure show {spec.name}`."
    )


async def _version_of(where: Path, job: str, wanted: str) -> "Subject":
    from coordinator.cli.estimated import chosen_version
    from export.measurement import Subject
    from tacit.v1 import operator_pb2

    async with operator_stub(where) as stub:
        detail: operator_pb2.JobDetail = await stub.GetJob(operator_pb2.GetJobRequest(name=job), timeout=CALL_SECONDS)
        found = chosen_version(detail, wanted)
        if found.pruned:
            fail(
                f"version {found.number} of {job} was pruned, so nobody can measure it; put it back from a backup, or "
                "name another version",
                ExitCode.NOT_FOUND,
            )
        return Subject(await fetch_document(stub, detail), found.digest, found.number)


@app.command()
def show(name: Name, operator: Operator = None, folder: Dir = None, as_json: Json = False) -> None:
    """Show a measurement's estimates with their errors, and whether members had trained the version."""
    where = operator_folder(operator, folder)

    async def work() -> tuple[Answer, int | None]:
        from tacit.measurement import Measurement

        async with operator_stub(where) as stub:
            found = await fetch_answer(stub, name)
            question = found.document.question
            asked = isinstance(question, Measurement) and found.total is not None
            return found, await _trained(stub, question, found) if asked else None

    fetched, trained = run(work())
    from coordinator.cli.shown import job_status
    from coordinator.domain.measurement import result_of
    from tacit.measurement import Measurement
    from tacit.mechanism import OwnDiscreteGaussian
    from tacit.reason import sentence

    detail, question, mechanism = fetched.detail, fetched.document.question, fetched.document.mechanism
    if not isinstance(question, Measurement) or not isinstance(mechanism, OwnDiscreteGaussian):
        if question is not None:
            fail(f"{name} is a survey; see it with `coordinator survey show {name}`", ExitCode.USAGE)
        fail(f"{name} is a job that trains; see it with `coordinator job show {name}`", ExitCode.USAGE)
    found = None
    if fetched.total is not None:
        try:
            found = result_of(question, mechanism, fetched.total, fetched.members)
        except ValueError as error:
            fail(f"the answer to {name} cannot be read: {error}", ExitCode.FAILED)
    if as_json:
        print_json(
            {
                "measurement": name,
                "status": job_status(detail.job),
                "document": detail.job.document.hex(),
                "question": question.model_dump(mode="json"),
                "noise": mechanism.model_dump(mode="json"),
                "result": None if found is None else asdict(found),
                "members_that_trained": trained,
            }
        )
        return
    if found is None:
        why = f": {sentence(detail.job.reason)}" if detail.job.reason else ""
        typer.echo(f"Measurement {name} is {job_status(detail.job)}{why}. There is no estimate yet.")
        typer.echo(f"`coordinator job show {name}` shows its round and the members that decline it.")
        return
    for line in _lines(name, question, mechanism.unit, found, trained):
        typer.echo(printable(line))


async def _trained(stub: "OperatorServiceStub", question: Any, answer: Answer) -> int | None:
    """How many members of an answer's sum have updates in the version, or in one that it started from.

    None: a part of its history is not at this coordinator.
    """
    if question.number is None:
        return None
    import grpc

    from tacit.v1 import operator_pb2

    if not (measured := _survivors(answer.detail, answer.detail.versions[-1].round)):
        return None
    trained: set[str] = set()
    job, number, digest = question.job, question.number, question.document
    for _ in range(_MAX_ORIGINS):
        try:
            request = operator_pb2.GetJobRequest(name=job)
            detail: operator_pb2.JobDetail = await stub.GetJob(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise
        versions = {each.number: each for each in detail.versions if each.number <= number}
        # Of a long history the coordinator sends the newest rounds. What is not there may hold anybody's updates.
        if detail.job.document != digest or len(versions) != number + 1:
            return None
        for at in range(1, number + 1):
            if not (there := _survivors(detail, versions[at].round)):
                return None
            trained |= there
        earlier = (await fetch_document(stub, detail)).earlier
        if earlier is None:
            return len(measured & trained)
        job, number, digest = earlier.job, earlier.number, earlier.document
    return None


async def measured_facts(
    stub: "OperatorServiceStub", names: Sequence[str], subject: "operator_pb2.JobDetail"
) -> "list[MeasurementFacts]":
    """What a passport says of measurements.

    Args:
        stub: The operator's service.
        names: The measurements.
        subject: The job whose passport it is.

    Raises:
        CommandFailed: One is no measurement of a version of that job, or has no estimate yet; or there are too many.
    """
    from tacit.passport import MAX_MEASUREMENTS

    if len(names) > MAX_MEASUREMENTS:
        fail(f"a passport names at most {MAX_MEASUREMENTS} measurements; leave some out", ExitCode.USAGE)
    return [await _measured_facts(stub, name, subject) for name in names]


async def _measured_facts(
    stub: "OperatorServiceStub", name: str, subject: "operator_pb2.JobDetail"
) -> "MeasurementFacts":
    from coordinator.domain.measurement import result_of
    from tacit.measurement import Measurement
    from tacit.mechanism import OwnDiscreteGaussian
    from tacit.passport import LabelEstimate, MeasurementFacts

    fetched = await fetch_answer(stub, name)
    question, mechanism = fetched.document.question, fetched.document.mechanism
    if not isinstance(question, Measurement) or not isinstance(mechanism, OwnDiscreteGaussian):
        fail(f"{name} is no measurement; `coordinator job list` names all jobs", ExitCode.USAGE)
    version = next((each for each in subject.versions if each.digest == question.weights), None)
    if question.document != subject.job.document or version is None:
        fail(f"{name} measured a version of {question.job}, and not one of {subject.job.name}", ExitCode.USAGE)
    if fetched.total is None:
        fail(f"{name} has no estimate yet; see `coordinator measure show {name}`", ExitCode.NOT_FOUND)
    try:
        found = result_of(question, mechanism, fetched.total, fetched.members)
    except ValueError as error:
        fail(f"the answer to {name} cannot be read: {error}", ExitCode.FAILED)
    return MeasurementFacts(
        name=name,
        document=fetched.detail.job.document,
        answer=fetched.detail.versions[-1].digest,
        number=version.number,
        version=version.digest,
        rows=question.rows,
        trained=await _trained(stub, question, fetched),
        whole=_estimate_facts(found.whole, found.members),
        by_label=tuple(
            LabelEstimate(label=each.label, estimate=_estimate_facts(each.estimate, found.members))
            for each in found.by_label
        ),
    )


def _estimate_facts(estimate: "Estimate | None", members: int) -> "EstimateFacts":
    from tacit.passport import EstimateFacts

    if estimate is None:
        return EstimateFacts(members=members)
    accuracy, loss, units = estimate.accuracy, estimate.loss, estimate.units
    return EstimateFacts(
        members=members,
        accuracy=accuracy.value,
        accuracy_error=accuracy.error,
        loss=loss.value,
        loss_error=loss.error,
        units=units.value,
        units_error=units.error,
    )


def _survivors(detail: "operator_pb2.JobDetail", round: int) -> set[str]:
    attempts = [attempt for each in detail.rounds if each.number == round for attempt in each.attempts]
    return {name for each in attempts if each.outcome == "published" for name in each.survivors}


def _named(job: str, number: int | None) -> str:
    return f"the start of {job}" if number is None else f"version {number} of {job}"


def _lines(name: str, question: "Measurement", unit: "Unit", found: "Result", trained: int | None) -> list[str]:
    units = _COUNTED[unit]
    rows = "all their rows" if question.rows == "all" else "rows that they keep back from every training"
    lines = [f"Measurement {name}: {found.members} members measured {_named(question.job, question.number)} on {rows}."]
    if found.whole is None:
        lines.append(f"There are too few {units} beside the noise to show an estimate.")
    else:
        accuracy, loss, counted = _words(found.whole)
        lines.append(f"Accuracy {accuracy}, loss {loss}, over {counted} {units}.")
    if found.by_label:
        cells = [[each.label, *_row(each.estimate)] for each in found.by_label]
        lines += ["", table(["LABEL", "RECALL", "LOSS", "ROWS"], cells), ""]
    lines.append(f"Errors are those of the noise. The {units} are a sample, whose error comes on top.")
    return [*lines, _optimism(question, found.members, trained)]


def _row(estimate: "Estimate | None") -> list[str]:
    return ["too few rows", "-", "-"] if estimate is None else list(_words(estimate))


def _words(estimate: "Estimate") -> tuple[str, str, str]:
    from coordinator.cli.estimated import with_error

    loss, units = estimate.loss, estimate.units
    return (
        with_error(estimate.accuracy.value, estimate.accuracy.error),
        f"{loss.value:.3f} ± {loss.error:.2g}",
        f"{units.value:,.0f} ± {units.error:.2g}",
    )


def _optimism(question: "Measurement", members: int, trained: int | None) -> str:
    """Says whether the version may have been trained on the rows that it was measured on."""
    if trained == 0:
        return "None of these members has an update in the version."
    who = "These members may have" if trained is None else f"{trained} of these {members} members have"
    if question.rows == "kept-back":
        return (
            f"{who} updates in the version. Their rows were kept back from training since each member's policy has a "
            "metrics_epsilon."
        )
    return f"{who} updates in the version, and rows that were trained on are measured: the estimate is too good."
