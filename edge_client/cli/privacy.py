"""`edge_client privacy plan` weighs noise, budget and accuracy against each other, before anyone joins."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edge_client.cli.options import Json, PersonCount
from tacit.rounding import rounded_down, rounded_up
from toolkit.console import ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    from learning.accounting.banded_plan import BandRow
    from learning.accounting.costs import Noised
    from learning.accounting.expected_noise import ExpectedNoise
    from learning.accounting.planning import Row, Setting
    from tacit.job import JobDocument, JobSpec
    from tacit.mechanism import DpSgd

__all__ = ["app", "counted_units"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

MechanismName = Literal["dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian"]


@app.callback()
def _group() -> None:
    """Plan what training costs in privacy."""


@app.command()
def plan(
    job: Annotated[
        Path | None,
        typer.Argument(help="A job file (.toml) or job document (.json), to see what it costs.", show_default=False),
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="How many examples you have (N).", show_default=False)
    ] = None,
    persons: PersonCount = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How many rounds you take part in (T).", show_default=False)
    ] = None,
    mechanism: Annotated[
        MechanismName | None, typer.Option(help="Default: dp-sgd.", show_default=False, case_sensitive=False)
    ] = None,
    lot: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Examples in a lot; give it several times for several rows.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps in a round, for dp-sgd. Default: 10.", show_default=False)
    ] = None,
    sampling: Annotated[
        Literal["poisson", "fixed"] | None,
        typer.Option(help="How gaussian-update draws its lot. Default: poisson.", show_default=False),
    ] = None,
    honest: Annotated[
        int | None,
        typer.Option(
            min=1, help="Shares of the noise that distributed-gaussian counts on (h). Default: 1.", show_default=False
        ),
    ] = None,
    unit: Annotated[
        Literal["example", "person", "member"] | None,
        typer.Option(
            help="What is protected: under dp-sgd example or person, under distributed-gaussian example or member. "
            "Default: example.",
            show_default=False,
        ),
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option(
            help="Privacy budget; give it several times for several rows. Default: 1 2 4 8.", show_default=False
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="Choose it well below 1 / examples.")] = 1e-6,
    clip: Annotated[
        float | None,
        typer.Option(
            help="Norm that updates are clipped to: shows the noise's standard deviation.", show_default=False
        ),
    ] = None,
    values: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many parameters are sent (d): compares the noise with an update.", show_default=False
        ),
    ] = None,
    members: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many members' updates are averaged. Default: the job's smallest cohort, or 1 without a job.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print how much noise each epsilon needs, for your number of examples.

    With that noise, an untouched ledger of that epsilon lets all rounds pass.
    It sends nothing and reads no data.
    """
    from learning.accounting.planning import Setting

    wanted = list(epsilon or (1.0, 2.0, 4.0, 8.0))
    chosen = {
        "--mechanism": mechanism, "--rounds": rounds, "--lot": lot, "--steps": steps, "--sampling": sampling,
        "--honest": honest, "--unit": unit, "--clip": clip,
    }  # fmt: skip
    if job is not None:
        given = [name for name, value in chosen.items() if value not in (None, [])]
        if given:
            fail(f"the job already sets {', '.join(given)}; leave out these options, or the job", ExitCode.USAGE)
        _plan_job(job, examples, persons, delta, values, members, wanted, as_json)
        return
    count = counted_units(unit or "example", examples, persons)
    if rounds is None:
        fail("give --rounds T, how many rounds you take part in, or name a job file", ExitCode.USAGE)
    templates = _templates(mechanism or "dp-sgd", chosen)
    try:
        _print_rows(templates, Setting(count, rounds, delta, values, members or 1), wanted, as_json, clip is not None)
    except ValueError as error:
        fail(_said(error), ExitCode.USAGE)


def counted_units(unit: str, examples: int | None, persons: int | None) -> int:
    """Returns N: persons if these are protected, and else examples. Fails if it was not given, or the other was."""
    if unit == "person":
        if persons is None:
            fail(
                "give --persons N, how many persons your examples are of; the sampling rate follows from it",
                ExitCode.USAGE,
            )
        if examples is not None:
            fail("--examples counts rows, and persons are protected; leave it out", ExitCode.USAGE)
        return persons
    if persons is not None:
        fail(f"--persons counts persons, and one {unit} is protected; give --examples N", ExitCode.USAGE)
    if examples is None:
        fail("give --examples N, how many examples you have; the sampling rate follows from it", ExitCode.USAGE)
    return examples


def _plan_job(
    path: Path,
    examples: int | None,
    persons: int | None,
    delta: float,
    values: int | None,
    members: int | None,
    epsilons: list[float],
    as_json: bool,
) -> None:
    from learning.accounting.costs import LotTooSmall
    from learning.accounting.expected_noise import Values, expected_noise, values_of_file
    from learning.accounting.planning import Setting
    from learning.text.persons import unit_of_job
    from tacit.job import JobDocument
    from tacit.vector import max_in_sum

    job = _job(path)
    count = counted_units(unit_of_job(job), examples, persons)
    counted = members or job.rounds.min_members
    try:
        sent = Values(job.values) if isinstance(job, JobDocument) else None if values is None else Values(values)
        if sent is None and not isinstance(job, JobDocument):
            sent = values_of_file(job, path.parent)
        most = max_in_sum(job, job.rounds.target_members)
        setting = Setting(count, job.rounds.count, delta, None if sent is None else sent.shared, counted, most)
        noise = None if sent is None else expected_noise(job, sent, examples=count, members=counted)
        _print_job(job, setting, epsilons, noise, as_json)
    except LotTooSmall as error:
        fail(f"you would refuse job {job.name}: {error}", ExitCode.REFUSED)
    except ValueError as error:
        fail(_said(error), ExitCode.USAGE)


def _said(error: ValueError) -> str:
    """The error in our own words; pydantic's text names its own types and pages."""
    from pydantic import ValidationError

    from tacit.documents import sentence_of

    return sentence_of(error) if isinstance(error, ValidationError) else str(error)


def _job(path: Path) -> "JobDocument | JobSpec":
    """Reads a job's file or document."""
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument, JobSpec

    try:
        if path.suffix.lower() != ".json":
            return JobSpec.from_toml(path)
        try:
            return JobDocument.from_file(path)
        except FileNotFoundError:
            fail(f"{path} does not exist; check its path", ExitCode.NOT_FOUND)
        except OSError as error:
            fail(f"{path} cannot be read: {error.strerror}; check its path and permissions", ExitCode.USAGE)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE if path.exists() else ExitCode.NOT_FOUND)


# Which options each mechanism takes besides --rounds and --mechanism, and what it calls them.
_KNOWN: dict[str, dict[str, str]] = {
    "dp-sgd": {"--lot": "lot", "--steps": "steps", "--unit": "unit", "--clip": "clip"},
    "gaussian-update": {"--lot": "lot", "--sampling": "sampling", "--clip": "clip"},
    "laplace-update": {"--clip": "bound"},
    "distributed-gaussian": {"--honest": "honest", "--unit": "unit", "--clip": "clip"},
}


def _templates(name: MechanismName, chosen: dict[str, Any]) -> "list[Noised]":
    """Returns the mechanism once for each lot. Its multiplier is only a placeholder: the plan computes it."""
    from pydantic import TypeAdapter, ValidationError

    from tacit.documents import sentence_of
    from tacit.mechanism import Mechanism

    known = _KNOWN[name]
    strange = [
        option
        for option, value in chosen.items()
        if value not in (None, []) and option not in known and option not in ("--mechanism", "--rounds")
    ]
    if strange:
        fail(f"{name} does not take {', '.join(strange)}; leave it out, or choose another --mechanism", ExitCode.USAGE)
    numbers = {key: chosen[option] for option, key in known.items() if chosen[option] not in (None, [])}
    lots = numbers.pop("lot", [None])
    if numbers.get("unit") == "person" and name == "dp-sgd":
        # How many rows of a person a draw uses moves no figure of a plan.
        numbers["person"] = {"max_examples": 1}
    multiplier = {"epsilon": 1.0} if name == "laplace-update" else {"noise_multiplier": 1.0}
    adapter: TypeAdapter[Any] = TypeAdapter(Mechanism)
    try:
        return [
            adapter.validate_python({"name": name, **multiplier, **numbers, **({} if lot is None else {"lot": lot})})
            for lot in lots
        ]
    except ValidationError as error:
        fail(sentence_of(error), ExitCode.USAGE)


def _print_rows(
    templates: "list[Noised]", setting: "Setting", epsilons: list[float], as_json: bool, with_std: bool
) -> None:
    from dataclasses import asdict

    from learning.accounting.costs import adjacency_of
    from learning.accounting.planning import rows_of

    rows = [row for template in templates for row in rows_of(template, setting, epsilons)]
    first = templates[0]
    if as_json:
        print_json(
            {
                "mechanism": first.name,
                "adjacency": adjacency_of(first),
                "unit": first.unit,
                **asdict(setting),
                "steps": getattr(first, "steps", 1),
                "rows": [asdict(row) for row in rows],
            }
        )
        return
    laplace, central = first.name == "laplace-update", any(row.central is not None for row in rows)
    columns = {
        "LOT": [_whole(row.lot) for row in rows],
        "RATE": [f"{row.rate:.3g}" for row in rows],
        "EPSILON": [f"{row.epsilon:g}" for row in rows],
        "NOISE": [_digits(row.gate) for row in rows],
        "NOISE (ALL SHARES)": [_digits(row.central) for row in rows] if central else [],
        "EPSILON A ROUND": [_below(row.gate) for row in rows] if laplace else [],
        "NOISE STD": [_digits(row.std) for row in rows] if with_std else [],
        "NOISE : UPDATE": [_digits(row.noise_to_signal) for row in rows],
    }
    _echo(
        f"{_described(first, setting)}, delta {setting.delta:g}, {adjacency_of(first)} neighbours of one {first.unit}"
    )
    _echo_table({name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)})
    for sentence in _remarks(rows, first, setting):
        _echo(sentence)


def _print_job(
    job: "JobDocument | JobSpec",
    setting: "Setting",
    epsilons: list[float],
    noise: "ExpectedNoise | None",
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from learning.accounting.costs import Noised, steps_of_round
    from learning.accounting.planning import cost_of_job
    from tacit.mechanism import DpSgd

    cost = cost_of_job(job, setting, epsilons)
    mechanism = job.mechanism
    if not isinstance(mechanism, Noised):
        raise TypeError("a mechanism without noise has no plan")
    steps = steps_of_round(job, mechanism) if isinstance(mechanism, DpSgd) else None
    bands = _bands(job, setting, epsilons)
    if as_json:
        charged: dict[str, Any] = {} if steps is None else {"steps": steps}
        if bands:
            charged["bands"] = [{"epsilon": epsilon, "rows": [asdict(row) for row in rows]} for epsilon, rows in bands]
        about = {"job": job.name, "mechanism": mechanism.model_dump(), **charged}
        lower = {} if noise is None else {"lower": list(noise.lower)}
        print_json({**about, **asdict(setting), **asdict(cost), **lower})
        return
    described = _described(mechanism, setting, steps)
    _echo(f"Job {job.name}: {described}, {cost.adjacency} neighbours of one {mechanism.unit}")
    _echo(
        f"To pass your ledger, all rounds together need a limit of epsilon {rounded_up(cost.gate):g} "
        f"at delta {setting.delta:g}."
    )
    _echo_table(
        {
            "EPSILON": [f"{row.epsilon:g}" for row in cost.rows],
            "ROUNDS THAT PASS": [f"{row.rounds} of {setting.rounds}" for row in cost.rows],
            "NOISE FOR ALL": [_digits(row.gate) for row in cost.rows],
        }
    )
    for sentence in _job_remarks(mechanism, setting, steps, noise):
        _echo(sentence)
    _echo_bands(bands)
    if cost.metrics is not None:
        _echo(f"M{cost.metrics.sentence[1:]}. Without metrics_epsilon in your policy, you send noise alone.")
    if (histogram := _histogram_remark(job, setting)) is not None:
        _echo(histogram)


def _bands(
    job: "JobDocument | JobSpec", setting: "Setting", epsilons: list[float]
) -> "list[tuple[float, list[BandRow]]]":
    """The error of correlated noise at each epsilon, beside that of independent noise. Empty if it is not possible."""
    from learning.accounting.banded_plan import bands_of
    from learning.accounting.calibration import NotAffordable
    from learning.accounting.costs import adjacency_of
    from learning.accounting.filter import Limit
    from tacit.method import FedAvg
    from tacit.model import RvaeModel

    mechanism = job.mechanism
    possible = isinstance(job.method, FedAvg) and not isinstance(job.model, RvaeModel)
    if mechanism.name != "dp-sgd" or not possible or job.metrics is not None or job.audit is not None:
        return []
    # Classes are drawn by row, so persons have no correlated noise.
    if mechanism.unit != "example":
        return []
    found = []
    for epsilon in epsilons:
        limit = Limit(epsilon, setting.delta, adjacency_of(mechanism), mechanism.unit)
        with contextlib.suppress(NotAffordable):
            found.append((epsilon, bands_of(mechanism, setting.examples, setting.rounds, limit)))
    return found


def _echo_bands(bands: "list[tuple[float, list[BandRow]]]") -> None:
    """Prints where correlated noise leaves less than independent noise, and what to write into the job for it."""
    from learning.accounting.banded_plan import best_of

    if not bands:
        return
    best = [(epsilon, rows[0], best_of(rows)) for epsilon, rows in bands]
    _echo("Correlated noise (mechanism.coefficients), at the bands of least error, beside independent noise:")
    _echo_table(
        {
            "EPSILON": [f"{epsilon:g}" for epsilon, _, _ in best],
            "BANDS": [str(least.band) for _, _, least in best],
            "NOISE": [_digits(least.multiplier) for _, _, least in best],
            "ERROR": [_digits(least.error) for _, _, least in best],
            "ERROR OF DP-SGD": [_digits(independent.error) for _, independent, _ in best],
        }
    )
    for epsilon, _, least in best:
        if least.band > 1:
            _echo(
                f"For epsilon {epsilon:g}: noise_multiplier = {least.multiplier:g}, "
                f"coefficients = {list(least.coefficients)}, spare_rounds = {least.spare_rounds}"
            )
    if all(least.band == 1 for _, _, least in best):
        _echo("Independent noise is best here: leave coefficients out.")


def _histogram_remark(job: "JobDocument | JobSpec", setting: "Setting") -> str | None:
    """Says what a noised histogram of labels costs on top of the rounds. None if the job orders none from members."""
    from edge_client.corpus_release.making import order_of
    from learning.accounting.calibration import epsilon_at_gate
    from learning.accounting.costs import Noised, adjacency_of
    from learning.synthesis.labels import histogram_event

    order = order_of(job)
    if order is None or order.histogram_std is None or not isinstance(job.mechanism, Noised):
        return None
    if job.mechanism.unit != "example":
        return "A ledger with unit member has no formula for the histogram of labels, so all labels get equal parts."
    adjacency = adjacency_of(job.mechanism)
    event = histogram_event(order.histogram_std, len(job.labels), adjacency)
    return (
        "When the job is finished, the histogram of your labels is charged too: alone it costs epsilon "
        f"{rounded_up(epsilon_at_gate(event, setting.delta, adjacency)):g}. "
        "The synthetic texts cost nothing more."
    )


def _described(mechanism: "Noised", setting: "Setting", steps: int | None = None) -> str:
    """Describes the plan. `steps` are those that a dp-sgd round charges, which may exceed the mechanism's own."""
    from learning.accounting.costs import rate_of
    from tacit.mechanism import DistributedGaussian, DpSgd

    said = f"{mechanism.name}, {setting.rounds} rounds"
    if isinstance(mechanism, DpSgd):
        said += f" of {steps or mechanism.steps} steps"
    if isinstance(mechanism, DistributedGaussian):
        said += f", h = {mechanism.honest}"
    rate = rate_of(mechanism, setting.examples)
    return f"{said}, {setting.examples} {'persons' if mechanism.unit == 'person' else 'examples'}" + (
        "" if rate < 1 else ", all of them each time"
    )


def _remarks(rows: "list[Row]", mechanism: "Noised", setting: "Setting") -> list[str]:
    named = "the noise multiplier that a job sets"
    if mechanism.name == "laplace-update":
        named = "the scale divided by 2 B, that is 1 / the epsilon of a round, which a job sets"
    said = [f"NOISE is {named}. With it, all rounds pass an untouched ledger."]
    if any(row.gate is None for row in rows):
        said.append(
            "A - means that no noise is enough for that many rounds: raise epsilon, or lower rounds, steps, lot or "
            "parameters."
        )
    if mechanism.name == "gaussian-update":
        said.append("One example can reverse the whole clipped update, so sigma is accounted for as sigma / 2.")
    if mechanism.name == "distributed-gaussian":
        said.append(
            "NOISE counts only your own share of the noise; ALL SHARES applies if your policy trusts the others'."
        )
    if setting.values is None:
        said.append("Give --values D (how many parameters are sent) to compare the noise with an update.")
    said += _noise_remarks([row.noise_to_signal for row in rows], setting)
    return said


def _job_remarks(
    mechanism: "Noised", setting: "Setting", steps: int | None, noise: "ExpectedNoise | None"
) -> list[str]:
    from tacit.mechanism import DpSgd

    said = []
    if isinstance(mechanism, DpSgd) and mechanism.band > 1:
        said.append(_room(mechanism, setting.rounds))
    if isinstance(mechanism, DpSgd) and steps != mechanism.steps:
        said.append(
            f"Adaptive updating takes {mechanism.steps} noised steps a round on the private embedding alone, and "
            f"{mechanism.steps} over everything. The ledger charges both."
        )
    if mechanism.name == "gaussian-update":
        said.append("One example can reverse the whole clipped update, so sigma is accounted for as sigma / 2.")
    if noise is None:
        said.append("Make the job's bundle and name its job.json, or give --values D, to compare noise with an update.")
    else:
        said += noise.sentences
    return said + _noise_remarks([], setting)


def _room(mechanism: "DpSgd", rounds: int) -> str:
    """Says how many failed rounds a job with correlated noise can bear."""
    from learning.accounting.banded_plan import room_for_failures

    room = room_for_failures(mechanism, rounds)
    if room == 0:
        return (
            "No room for failed rounds: if a round fails after you sent your vector, you decline the last one, and the "
            "job may never finish. Set mechanism.spare_rounds to 1 or more."
        )
    return (
        f"You can take part to the end if at most {room} rounds fail after you sent your vector. That is charged too."
    )


def _noise_remarks(ratios: list[float | None], setting: "Setting") -> list[str]:
    from learning.accounting.expected_noise import DROWNED

    said = []
    if any(ratio is not None and ratio >= DROWNED for ratio in ratios):
        said.append(
            "NOISE : UPDATE is the length of the noise over that of the longest clipped update. If it is far above 1, "
            "the model will not learn: send fewer parameters, or take more examples, members or epsilon."
        )
    if setting.delta * setting.examples >= 1:
        said.append(
            f"Delta {setting.delta:g} is not below 1 / {setting.examples}, which would allow publishing an example."
        )
    return said


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _below(multiplier: float | None) -> str:
    """An epsilon of a round of laplace-update that needs no larger multiplier."""
    return "-" if multiplier is None else f"{rounded_down(1 / multiplier):g}"


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def _echo(sentence: str) -> None:
    typer.echo(printable(sentence))


def _echo_table(columns: dict[str, list[str]]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    # A pipe has no width, and a table cut to 80 columns would be useless.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False, markup=False).print(table)
