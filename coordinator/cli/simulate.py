"""`coordinator simulate` plays a whole job offline over virtual members, on this machine or a Ray cluster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coordinator.cli.backbone import FOLDER
from coordinator.cli.common import Dir, Json, Operator, operator_at_hand, table
from toolkit.console import ExitCode, fail, print_json
from toolkit.install import install_with

if TYPE_CHECKING:
    from coordinator.rounds.masked_sum import MaskedSums
    from simulation.simulate import Played, Simulation
    from tacit.job import JobSpec

__all__ = ["simulate"]

# Rounds that the table shows; rounds.jsonl has all.
_MAX_ROWS = 20


def simulate(
    file: Annotated[Path, typer.Argument(help="The job file (TOML).")],
    data: Annotated[
        Path, typer.Option(help="Labelled public rows, in any format that members' data may have.", show_default=False)
    ],
    members: Annotated[int, typer.Option(min=2, help="How many members share the rows.")] = 10,
    partition: Annotated[
        str,
        typer.Option(
            help="even; label or quantity, in shares from Dir(--alpha); ratios:1,1,3; or column, with --column."
        ),
    ] = "even",
    alpha: Annotated[float, typer.Option(min=1e-3, help="Of label and quantity; small makes members unlike.")] = 1.0,
    column: Annotated[
        str | None, typer.Option(help="With --partition column: its values are the members.", show_default=False)
    ] = None,
    test_data: Annotated[
        Path | None,
        typer.Option(help="Rows to score versions on. Default: a share of --data, --test.", show_default=False),
    ] = None,
    test: Annotated[float, typer.Option(min=0.01, max=0.9, help="Share of the rows that no member gets.")] = 0.2,
    cohort: Annotated[
        int | None,
        typer.Option(min=2, help="Members of a round. Default: the job's rounds.target_members.", show_default=False),
    ] = None,
    dropout: Annotated[
        str, typer.Option(help="Members that send nothing: none, random:0.1 in each round, or fixed:0.1 always.")
    ] = "none",
    secure: Annotated[
        bool, typer.Option("--secure", help="Add vectors by the real protocol: keys, masks, losses, unmasking.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the partition, cohorts, losses, training and noise.")] = 0,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="local: processes of this machine. ray: actors of a Ray cluster.")
    ] = "local",
    workers: Annotated[int, typer.Option(min=1, help="Processes or actors that train members.")] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option(help="A Ray cluster (auto: a running one). Default: Ray on this machine.", show_default=False),
    ] = None,
    gpus: Annotated[float, typer.Option(min=0, help="With ray: share of a GPU that each actor has.")] = 0.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "cpu",
    score_every: Annotated[int, typer.Option(min=1, help="Rounds between scores.")] = 1,
    text: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    text_b: Annotated[
        str | None, typer.Option(help="The column that holds a pair's second text.", show_default=False)
    ] = None,
    person: Annotated[
        str | None,
        typer.Option(
            help="The column that says whose row it is. A person's rows go to one member, or to the test.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="The column of a prompt, for a model that writes. Default: prompt.", show_default=False),
    ] = None,
    response: Annotated[
        str | None, typer.Option(help="The column of the response. Default: response.", show_default=False)
    ] = None,
    messages: Annotated[
        str | None, typer.Option(help="The column of a dialogue's turns. Default: messages.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the results; one that exists goes on. Default: NAME.simulation.", show_default=False
        ),
    ] = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Play a job offline: virtual members, real training, clipping, noise, encoding and sums.

    Results lie in a folder: rounds.jsonl and the versions. The same command goes on where an
    interrupted one stopped. It sends nothing.
    """
    from tacit.documents import DocumentInvalid
    from tacit.job import JobSpec

    try:
        job = JobSpec.from_toml(file)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE if file.exists() else ExitCode.NOT_FOUND)
    if (partition == "column") != (column is not None):
        fail("--partition column and --column NAME go together", ExitCode.USAGE)
    target = Path(f"{job.name}.simulation") if out is None else out
    try:
        # Loads torch, so that its absence is said before anything is read.
        from learning.training.device import DeviceUnavailable, pick_device
        from simulation.engines import WorkersDied
        from simulation.preparing import Engines, Shares, opened, parts_of, prepared
        from simulation.simulate import Losses, Plan, RoundFailed, check_simulated
        from simulation.trying import read_rows
    except ImportError as error:
        fail(
            f"a simulation trains models, which needs the model libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}",
            ExitCode.USAGE,
        )
    from coordinator.rounds.in_memory import InMemory
    from learning.backbones.collection import Collection
    from simulation.home import in_a_members_home

    for each in (data, test_data):
        if each is not None and not each.exists():
            fail(f"{each} does not exist; name a file of labelled rows", ExitCode.NOT_FOUND)
        if each is not None and (home := in_a_members_home(each)) is not None:
            fail(
                f"{each} lies in a member's home ({home}), so its rows are not public; use public rows",
                ExitCode.REFUSED,
            )
    where = operator_at_hand(operator, folder)
    try:
        check_simulated(job)
        plan = Plan(seed=seed, cohort=cohort, losses=Losses.read(dropout), score_every=score_every)
        shares = Shares.read(partition, members, alpha)
        more = {"text_b": text_b, "prompt": prompt, "response": response, "messages": messages}
        rows = read_rows(data, job, text=text, label=label, person=person, column=column, **more)
        if test_data is None:
            rows, apart = parts_of(rows, test=test, seed=seed)
        else:
            apart = read_rows(test_data, job, text=text, label=label, **more).examples
        made = prepared(
            job,
            file.parent,
            rows,
            apart,
            shares,
            target,
            seed=seed,
            report=_say,
            collection=None if where is None else Collection(where / FOLDER),
        )
        engines = Engines(engine, workers, ray_address, gpus, pick_device(device))
        with opened(
            made, plan, engines, InMemory(), target, summing=_masked if secure else None, report=_say
        ) as simulation:
            _play(simulation, job, target, as_json)
    except WorkersDied as error:
        fail(str(error), ExitCode.FAILED)
    except RoundFailed as error:
        fail(f"{file} cannot be simulated: {error}", ExitCode.FAILED)
    except DeviceUnavailable as error:
        fail(str(error), ExitCode.USAGE)
    except (ValueError, OSError) as error:
        fail(f"{file} cannot be simulated: {error}", ExitCode.USAGE)


def _say(sentence: str) -> None:
    typer.echo(f"  {sentence}", err=True)


def _masked(cohort: int) -> "MaskedSums":
    from coordinator.rounds.masked_sum import MaskedSums

    return MaskedSums(cohort)


def _play(simulation: "Simulation", job: "JobSpec", target: Path, as_json: bool) -> None:
    known = len(simulation.played)
    if known and not as_json:
        typer.echo(f"{target} has {known} of {job.rounds.count} rounds; going on.", err=True)
    with _progress(job.rounds.count, known, quiet=as_json) as update:
        for played in simulation.run():
            update(played)
            if as_json:
                print_json({"job": job.name, **vars(played)})
    if as_json:
        if known == job.rounds.count:
            print_json({"job": job.name, **vars(simulation.played[-1])})
        return
    shown = simulation.played[-_MAX_ROWS:]
    rows = [_row(each) for each in shown]
    typer.echo(table(["ROUND", "SENT", "LOST", "ACCURACY %", "MACRO F1 %", "LOSS", "SECONDS"], rows))
    if len(simulation.played) > len(shown):
        typer.echo(f"and {len(simulation.played) - len(shown)} rounds before; {target / 'rounds.jsonl'} has all.")
    scored = [each for each in simulation.played if each.accuracy is not None]
    if scored:
        best = max(scored, key=lambda each: each.accuracy or 0.0)
        typer.echo(
            f"Last version: {_percent(scored[-1].accuracy)} %. Best: {_percent(best.accuracy)} % after round "
            f"{best.round}. Choosing the best by these rows makes its figure too high."
        )
    elif not simulation.job.complete:
        typer.echo("Members keep a part of the model, so there is no one model to score.")
    typer.echo(f"Results: {target}")


def _row(each: "Played") -> list[str]:
    counts = str(each.round), str(each.cohort - each.lost), str(each.lost)
    loss = "-" if each.loss is None else f"{each.loss:.3f}"
    return [*counts, _percent(each.accuracy), _percent(each.macro_f1), loss, f"{each.seconds:.1f}"]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


@contextmanager
def _progress(rounds: int, known: int, *, quiet: bool) -> "Iterator[Callable[[Played], None]]":
    """Shows rounds and the newest accuracy on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("simulating", total=rounds, completed=known)

        def update(played: "Played") -> None:
            said = "" if played.accuracy is None else f", {100 * played.accuracy:.1f} %"
            bar.update(task, completed=played.round, description=f"simulating{said}")

        yield update
