"""`coordinator job try` plays a job offline on public rows, and proposes numbers for it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coordinator.cli.backbone import FOLDER
from coordinator.cli.common import Dir, Json, Operator, operator_at_hand, table
from tacit.rounding import rounded_up
from toolkit.console import CommandFailed, ExitCode, fail, print_json
from toolkit.install import install_with

if TYPE_CHECKING:
    from simulation.sweep import Progress
    from simulation.trial import Rows
    from simulation.trying import Asked, Report
    from tacit.job import JobSpec

__all__ = ["try_job"]

# Recipes that the table shows; --json has all.
_MAX_ROWS = 12
# Options that have an effect only if data is read, or only if numbers are tuned.
_OF_DATA = (
    "rows",
    "partition",
    "alpha",
    "column",
    "text",
    "label",
    "text_b",
    "minutes",
    "cores",
    "seed",
    "search",
    "force",
)
_OF_TUNING = ("epsilon", "delta", "search", "out")
# Begins the note in a job file whose numbers are from a search that was cut.
_CUT = "# The time limit of `coordinator job try` cut the search for these numbers after"


def try_job(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="The job file (TOML).")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Labelled rows: .jsonl, .csv or .tsv (also .gz), .parquet, .arrow, or a datasets folder.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        Literal["public", "own-private"] | None,
        typer.Option(
            help="Whose rows these are. The tuned numbers depend on them. Default: public, which is said.",
            show_default=False,
        ),
    ] = None,
    members: Annotated[
        int | None, typer.Option(min=2, help="How many members share the rows.", show_default=False)
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            help="Each member's budget for the whole job. Default: what the job as written costs.",
            show_default=False,
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="Of the budget.")] = 1e-6,
    partition: Annotated[
        Literal["even", "label"],
        typer.Option(help="even: at random. label: in proportions that each member draws from Dir(--alpha)."),
    ] = "even",
    alpha: Annotated[float, typer.Option(min=1e-3, help="Of --partition label; small makes members unlike.")] = 1.0,
    column: Annotated[
        str | None,
        typer.Option(help="Makes a member of each value of this column, instead of --members.", show_default=False),
    ] = None,
    text: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    text_b: Annotated[
        str | None, typer.Option(help="The column that holds a pair's second text.", show_default=False)
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time limit of the sweep.")] = 10.0,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Processes that train. Default: all cores.", show_default=False)
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Give it several times. Default: 0 and 1.", show_default=False),
    ] = None,
    search: Annotated[bool, typer.Option(help="Search around the job as written and the suggestion.")] = True,
    suggest: Annotated[bool, typer.Option("--suggest", help="Propose numbers by rules alone, without data.")] = False,
    examples: Annotated[
        int | None,
        typer.Option(min=1, help="With --suggest: rows of the smallest member.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Try private rows, and mark the job.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The tuned job file, in the job file's folder. Default: NAME.tuned.toml.", show_default=False
        ),
    ] = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Try a job offline on public rows: virtual members, real training, clipping, noise and encoding.

    It tries recipes within the time limit, prints them beside the majority class, word counts and a
    head on the job's frozen encoder, says whether the job will end at chance, and writes the tuned
    job file. It sends nothing.
    """
    from tacit.documents import DocumentInvalid
    from tacit.job import JobSpec
    from tacit.method import keeps_state

    try:
        job = JobSpec.from_toml(file)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE if file.exists() else ExitCode.NOT_FOUND)
    target = file.with_name(f"{file.stem}.tuned.toml") if out is None else out
    if target.resolve().parent != file.resolve().parent:
        fail(f"{target}: paths in a job file are relative to its folder; choose --out in {file.parent}", ExitCode.USAGE)
    if target.resolve() == file.resolve():
        fail(f"{target} is the job file itself; choose another --out", ExitCode.USAGE)
    _check_effects(context, suggest=suggest, tunes=not keeps_state(job.method), partition=partition, column=column)
    writes_file = out is not None if suggest else not keeps_state(job.method)
    if writes_file and target.exists():
        fail(f"{target} is there already; choose another file with --out, or remove it", ExitCode.USAGE)
    if suggest:
        if data is not None:
            fail("--suggest needs no data; leave out --data, or leave out --suggest to try the job", ExitCode.USAGE)
        _suggest(job, file, target if out is not None else None, examples, members, epsilon, delta, as_json)
        return
    if data is None:
        fail("give --data FILE with labelled rows, or --suggest for numbers without data", ExitCode.USAGE)
    if members is not None and column is not None:
        fail(
            "--members and --column are both given, and each says who the members are; leave one of them out",
            ExitCode.USAGE,
        )
    if members is None and column is None:
        fail("give --members N, or --column NAME whose values are the members", ExitCode.USAGE)
    private = _declared(data, rows, force)
    try:
        # Loads torch, so that its absence is said before anything is read.
        from simulation.trying import Asked, read_rows
    except ImportError as error:
        fail(
            f"trying a job trains it, which needs the model libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}, or use --suggest, which needs none",
            ExitCode.USAGE,
        )
    written = _read_job(file)
    if writes_file:
        _check_editable(job, file, written)
    try:
        found = read_rows(data, job, text=text, label=label, text_b=text_b, column=column)
    except (ValueError, OSError) as error:
        fail(str(error), ExitCode.USAGE if data.exists() else ExitCode.NOT_FOUND)
    asked = Asked(
        members=members,
        epsilon=epsilon,
        delta=delta,
        partition=partition if column is None else "column",
        alpha=alpha,
        minutes=minutes,
        cores=cores or _usable_cores(),
        seeds=tuple(dict.fromkeys(seed or (0, 1))),
        search=search,
    )
    if keeps_state(job.method):
        _kept(job, file, found, asked, as_json, operator_at_hand(operator, folder))
        return
    report = _run(job, file, found, asked, as_json, operator_at_hand(operator, folder))
    _finish(job, written, report, target, private, as_json)


def _check_effects(context: typer.Context, *, suggest: bool, tunes: bool, partition: str, column: str | None) -> None:
    """Refuses options that were given and change nothing.

    Raises:
        CommandFailed: the sentence names them, and says why.
    """
    for useless, names, why in (
        (suggest, _OF_DATA, "--suggest reads no data and tries nothing"),
        (not suggest, ("examples",), "it belongs to --suggest"),
        (not suggest and not tunes, _OF_TUNING, "members of this job keep a part of the model, so nothing is tuned"),
        (column is not None, ("partition", "alpha"), "--column says who the members are"),
        (partition != "label", ("alpha",), "it belongs to --partition label"),
    ):
        given = [
            f"--{name.replace('_', '-')}"
            for name in names
            if useless and (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
        ]
        if given:
            said = ", ".join("--no-search" if name == "--search" else name for name in given)
            fail(f"{said}: {why}, so this changes nothing here; leave it out", ExitCode.USAGE)


def _kept(job: "JobSpec", file: Path, rows: "Rows", asked: "Asked", as_json: bool, operator: Path | None) -> None:
    """Tries a job whose members keep a part of the model, and prints what that part is worth. Writes no job."""
    from coordinator.rounds.in_memory import InMemory
    from learning.backbones.collection import Collection
    from learning.training.outcome import TrainingDiverged, TrainingLost
    from simulation.engines import WorkersDied
    from simulation.trying import try_kept

    def say(sentence: str) -> None:
        typer.echo(f"  {sentence}", err=True)

    try:
        collection = None if operator is None else Collection(operator / FOLDER)
        report = try_kept(job, file.parent, rows, asked, InMemory(), report=say, collection=collection)
    except (TrainingDiverged, TrainingLost, WorkersDied) as error:
        fail(f"{file} cannot be tried: {error}", ExitCode.FAILED)
    except (ValueError, OSError) as error:
        fail(f"{file} cannot be tried: {error}", ExitCode.USAGE)
    if as_json:
        print_json({"job": job.name, **report.as_json()})
        return
    train, test = report.rows
    sizes, (least, most) = [each.rows for each in report.members], report.measured
    typer.echo(
        f"{train} rows at {len(sizes)} members with {min(sizes)} to {max(sizes)} rows, of which {least} to {most} only "
        f"measure a member; {test} test rows; {len(report.seeds)} seeds. Figures are means over the seeds."
    )
    lines = [[name, f"{100 * each.own:.1f}", f"{100 * each.common:.1f}"] for name, each in report.variants.items()]
    typer.echo("\n" + table(["VARIANT", "OWN ROWS %", "TEST ROWS %"], lines) + "\n")
    if report.gains:
        typer.echo("Each member compared with itself, on the same own rows:")
    for each in report.gains:
        typer.echo(each.sentence)
    for sentence in report.ungrouped:
        typer.echo(sentence)
    for sentence in report.attacked:
        typer.echo(sentence)
    for sentence in report.failed:
        typer.echo(sentence)
    if report.cut:
        typer.echo("The time limit left some of it out; give more --minutes.")
    typer.echo("Nothing was tuned, and no job file was written.")


def _declared(data: Path, rows: str | None, force: bool) -> bool:
    """Returns whether the rows are private. Rows that nobody declared count as public, and a sentence says so.

    Refuses a member's own rows unless they are declared private, and private rows without --force.
    """
    from simulation.home import in_a_members_home

    home = in_a_members_home(data)
    if rows != "own-private" and home is not None:
        fail(f"{data} lies in a member's home ({home}), so its rows are not public; use public rows", ExitCode.REFUSED)
    if rows == "own-private" and not force:
        fail(
            "private rows are refused: the tuned numbers would depend on them, and no epsilon counts that. Use public "
            "rows or --suggest; with --force, the job and every model of it say so",
            ExitCode.REFUSED,
        )
    if rows is None:
        typer.echo(
            f"The rows of {data} count as public, because --rows does not say whose they are. If they are private, "
            "stop: the tuned numbers would depend on them, and no epsilon counts that (--rows own-private).",
            err=True,
        )
    return rows == "own-private"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(job: "JobSpec", file: Path, rows: "Rows", asked: "Asked", as_json: bool, operator: Path | None) -> "Report":
    from coordinator.rounds.in_memory import InMemory
    from learning.backbones.collection import Collection
    from simulation.engines import WorkersDied
    from simulation.sweep import NothingTried
    from simulation.trying import try_job as tried

    def say(sentence: str) -> None:
        typer.echo(f"  {sentence}", err=True)

    try:
        collection = None if operator is None else Collection(operator / FOLDER)
        with _progress(asked.minutes, quiet=as_json) as progress:
            return tried(
                job, file.parent, rows, asked, InMemory(), progress=progress, report=say, collection=collection
            )
    except NothingTried as error:
        fail(str(error), ExitCode.FAILED)
    except WorkersDied as error:
        fail(f"{file} cannot be tried: {error}", ExitCode.FAILED)
    except (ValueError, OSError) as error:
        fail(f"{file} cannot be tried: {error}", ExitCode.USAGE)


@contextmanager
def _progress(minutes: float, *, quiet: bool) -> "Iterator[Progress]":
    """Shows trials and the best accuracy so far on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(f"trying, at most {minutes:g} minutes", total=None)

        def update(done: int, planned: int, best: float | None) -> None:
            said = "" if best is None else f", best {100 * best:.1f} %"
            bar.update(task, completed=done, total=max(done, planned), description=f"trying{said}")

        yield update


def _read_job(file: Path) -> str:
    """Reads a job file's text, without a byte order mark."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be read: {error}", ExitCode.USAGE)


def _check_editable(job: "JobSpec", file: Path, text: str) -> None:
    """Refuses a job that cannot be tuned, or whose file cannot be edited, before the search."""
    from simulation import tuned
    from simulation.trying import check_job

    try:
        check_job(job)
        tuned.check_editable(text, job)
    except ValueError as error:
        fail(f"{file} cannot be tried: {error}", ExitCode.USAGE)


def _finish(job: "JobSpec", text: str, report: "Report", target: Path, private: bool, as_json: bool) -> None:
    """Writes the tuned job, and prints the report, also if the job cannot be written: the search may have been long."""
    from simulation.suggestion import changed

    failed: CommandFailed | None = None
    try:
        best = changed(report.best, tuned_on="own-private") if private else report.best
        _write_job(
            job, text, best, target, f"{_CUT} {report.trials} of {report.planned} trials" if report.cut else None
        )
    except CommandFailed as error:
        failed = error
    _print(job, report, target if failed is None else None, private, as_json)
    if failed is not None:
        raise failed


def _write_job(job: "JobSpec", text: str, wanted: "JobSpec", target: Path, note: str | None = None) -> None:
    """Writes the job file's text with the wanted numbers, below a note if there is one.

    Raises:
        CommandFailed: it cannot be edited to them, or the file cannot be written.
    """
    from simulation.tuned import NotEditable, tuned_text

    try:
        # A note of an earlier search is not true of this one.
        lines = [line for line in tuned_text(text, job, wanted).split("\n") if not line.startswith(_CUT)]
        target.write_text("\n".join([*([] if note is None else [note]), *lines]), encoding="utf-8")
    except NotEditable as error:
        fail(f"{target} was not written: {error}", ExitCode.FAILED)
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}; choose another --out", ExitCode.USAGE)


def _print(job: "JobSpec", report: "Report", target: Path | None, private: bool, as_json: bool) -> None:
    """Prints a report. target: where the tuned job was written; None: nowhere."""
    if as_json:
        out = None if target is None else str(target)
        print_json({"job": job.name, "out": out, "tuned_on_private_rows": private, **report.as_json()})
        return
    train, by, test = report.rows
    sizes = report.members
    typer.echo(
        f"{train} training rows at {len(sizes)} members with {min(sizes)} to {max(sizes)} rows, {by} rows to choose "
        f"by, {test} rows to test on."
    )
    if report.epsilon is not None:
        kept = f"epsilon {rounded_up(report.epsilon):g} at delta {report.delta:g}"
        typer.echo(f"All noised recipes keep {kept} for every member.")
    lines = [["-", each.name, f"{100 * each.validation:.1f}", "-", "-"] for each in report.baselines]
    for each in report.tried[:_MAX_ROWS]:
        accuracy = "-" if each.validation is None else f"{100 * each.validation:.1f}"
        ratio = "-" if each.noise_to_signal is None else f"{each.noise_to_signal:.2g}"
        lines.append([each.origin, each.recipe, accuracy, str(each.seeds), ratio])
    typer.echo("\n" + table(["FROM", "RECIPE", "VALIDATION %", "SEEDS", "NOISE : SIGNAL"], lines))
    if len(report.tried) > _MAX_ROWS:
        typer.echo(f"and {len(report.tried) - _MAX_ROWS} more; --json has all.")
    for problem in dict.fromkeys(each.problem for each in report.tried if each.problem):
        typer.echo(f"A recipe without accuracy: {problem}.")
    if report.cut:
        typer.echo(
            f"The time limit cut the search short after {report.trials} of {report.planned} trials; more --minutes may "
            "find better numbers."
        )
    typer.echo()
    for verdict in report.verdicts:
        typer.echo(f"{verdict.sentence[0].upper()}{verdict.sentence[1:]}.")
    beside = ", ".join(f"{known.name} {100 * known.test:.1f} %" for known in report.baselines[1:])
    typer.echo(f"Beside it on the test rows: {beside}.")
    if private:
        typer.echo("Private rows chose these numbers: no epsilon counts that, and the job says so (tuned_on).")
    if target is not None:
        typer.echo(f"Wrote {target}. Next: coordinator job bundle {target}")


def _suggest(
    job: "JobSpec",
    file: Path,
    target: Path | None,
    examples: int | None,
    members: int | None,
    epsilon: float | None,
    delta: float,
    as_json: bool,
) -> None:
    from learning.accounting.expected_noise import values_of_file
    from simulation.suggestion import Situation, budget_of, suggest, why_weaker
    from simulation.sweep import described
    from tacit.prompt import writes

    if examples is None:
        fail("give --examples N, the rows of the smallest member; lot and noise follow from it", ExitCode.USAGE)
    try:
        values = values_of_file(job, file.parent)
        counted = members or job.rounds.min_members
        if weaker := why_weaker(job):
            raise ValueError(weaker)
        budget = epsilon or budget_of(job, examples, counted, delta=delta, values=values)
        found = suggest(job, Situation(examples, counted, budget, values, delta))
    except ValueError as error:
        fail(f"no numbers for {file}: {error}", ExitCode.USAGE)
    if target is not None:
        _write_job(job, _read_job(file), found.job, target)
    if as_json:
        numbers = {name: getattr(found.job, name).model_dump(mode="json") for name in ("mechanism", "training")}
        print_json(
            {
                "job": job.name,
                **numbers,
                "rounds": found.job.rounds.count,
                "freeze_embedding": found.job.model.freeze_embedding,
                "noise_to_signal": found.noise_to_signal,
                "reasons": list(found.reasons),
                "out": None if target is None else str(target),
            }
        )
        return
    typer.echo(f"Suggested: {described(found.job)}")
    for reason in found.reasons:
        typer.echo(f"  {reason}")
    if found.noise_to_signal is not None:
        typer.echo(f"  expected noise to signal: {found.noise_to_signal:.2g} in a round")
    elif values is None:
        typer.echo("  how many values the job shares is known once its bundle is made, so noise to signal is not")
    measures = (
        "`coordinator evaluate` measures its versions"
        if writes(job.model)
        else "`coordinator job try --data` measures the job"
    )
    typer.echo(f"No data was read. {measures}." if target is None else f"Wrote {target}.")
