"""`edge_client ledger ...` shows what this member's data has spent, verifies that record, and exports a copy of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.cli.options import Home, Json, SecondText, SkipInvalid
from tacit.rounding import percent_left, rounded_up
from toolkit.console import ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    from collections import Counter

    from edge_client.ledger.replay import LedgerState
    from edge_client.ledger.verification import LedgerVerdict
    from learning.accounting.events import PrivacyEvent
    from tacit.heads import KeptHead

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

DataName = Annotated[str | None, typer.Option(help="Your name for the data. Default: all ledgers.", show_default=False)]


@app.command()
def show(data_name: DataName = None, home: Home = None, as_json: Json = False) -> None:
    """Show the limits and how much of them each job has spent.

    Epsilon is what the gate counts against the limit. It holds even if later jobs are chosen knowing earlier results.
    """
    from edge_client.ledger.history import current
    from edge_client.ledger.store import LedgerError, reading

    shown = []
    try:
        for path in _ledgers(home, data_name):
            with reading(path) as store:
                state = current(store)
            shown.append((path.stem, None if state.opened is None else _summary(state)))
    except LedgerError as error:
        raise _failed(error) from error
    for name, summary in shown:
        if as_json:
            print_json(summary or {"data": name, "records": 0})
        elif summary is None:
            typer.echo(f"{name}: no record yet; its first start was interrupted")
        else:
            _print(summary)


@app.command()
def persons(
    data: Annotated[Path, typer.Option(help="Your examples, as for `edge_client run`.", show_default=False)],
    person: Annotated[str, typer.Option(help="The column that names whose row it is.", show_default=False)],
    text: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    text_b: SecondText = None,
    skip_invalid: SkipInvalid = False,
    max_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            help="The most rows that a person ever had in this data. --record needs it: what can be seen is a lower "
            "bound, which the command prints without it.",
            show_default=False,
        ),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Count persons from now on, for good. Without it, nothing changes.")
    ] = False,
    data_name: Annotated[str, typer.Option(help="Your name for the data.")] = "data",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show what a ledger of rows has spent of a person's privacy, and with --record count persons from then on.

    What was charged for one row is charged as for all rows of a person together (group privacy). If that is more than
    the limit, the ledger goes on counting rows.
    """
    from edge_client.ledger.by_person import Counted, count_persons
    from edge_client.ledger.store import LedgerError
    from learning.accounting.renyi import EventUnaccountable
    from learning.text.data import read_data
    from learning.text.examples import DataInvalid
    from toolkit.console import CommandFailed

    if record and max_rows is None:
        fail(
            "give --max-rows K, the most rows that a person ever had; without --record, this command prints the least",
            ExitCode.USAGE,
        )
    (path,) = _ledgers(home, data_name)
    try:
        rows = read_data(data, text=text, label=label, text_b=text_b, person=person, skip_invalid=skip_invalid)
        found: Counted = count_persons(path, data_name, rows.examples, person, max_rows, record=record)
    except DataInvalid as error:
        fail(str(error), ExitCode.USAGE)
    except EventUnaccountable as error:
        raise CommandFailed(str(error), ExitCode.REFUSED) from error
    except LedgerError as error:
        raise CommandFailed(str(error), ExitCode.REFUSED) from error
    if as_json:
        print_json(found.as_json())
    else:
        typer.echo(printable(found.sentence))


@app.command()
def verify(
    data_name: DataName = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Verify a file of `ledger export` instead of this machine's ledgers."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="HASH[:NUMBER]",
            help="A head of this ledger, which this command prints and you kept elsewhere: a record must have it.",
            show_default=False,
        ),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Verify hash chains, limits, pins, receipts and signatures, offline. Prints one line for each problem.

    The chain alone does not reveal that its tail was cut off, or that the ledger was made anew.
    The pin does, unless it was replaced too. A head kept away from this machine always does: give it with --head.

    The exit code is 0 if nothing is wrong and 1 otherwise. Notes are facts, not problems.
    """
    from edge_client.ledger import verification
    from edge_client.ledger.store import LedgerError

    if export is not None and (data_name is not None or home is not None):
        fail("give --export, or --data-name and --home, not both", ExitCode.USAGE)
    sound, kept = True, _head(head)
    try:
        if export is not None:
            _check_is_export(export)
            found = [(str(export), verification.verify_export(_lines(export), kept))]
        else:
            receipts, paths = _home(home) / "receipts", _ledgers(home, data_name)
            if kept is not None and len(paths) > 1:
                fail("a head belongs to one ledger; name that one with --data-name", ExitCode.USAGE)
            found = [(str(path), verification.verify(path, receipts, kept)) for path in paths]
    except LedgerError as error:
        raise _failed(error) from error
    for where, verdict in found:
        sound = sound and verdict.sound
        if as_json:
            print_json(_verdict_json(where, verdict))
        else:
            _print_verdict(where, verdict)
    raise typer.Exit(int(ExitCode.OK if sound else ExitCode.FAILED))


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="The file to write. It must not exist.")],
    data_name: Annotated[str, typer.Option(help="Your name for the data.")] = "data",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write a ledger with its receipts as JSON lines, for somebody else to verify.

    The file holds names of jobs and members, sizes, times and digests, and the column of persons if there is one.
    It holds no text, and nothing by which a text could be looked up.
    """
    from edge_client.ledger import verification
    from edge_client.ledger.store import LedgerError

    lines = 0
    try:
        (path,) = _ledgers(home, data_name)
        with file.open("xb") as out:
            try:
                for line in verification.export_lines(path, _home(home) / "receipts"):
                    out.write(line + b"\n")
                    lines += 1
            except BaseException:
                file.unlink()
                raise
    except FileExistsError:
        fail(f"{file} exists; choose another name", ExitCode.USAGE)
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}; choose another file", ExitCode.USAGE)
    except LedgerError as error:
        raise _failed(error) from error
    if as_json:
        print_json({"file": str(file), "lines": lines})
    else:
        typer.echo(f"Wrote {file}: {lines} lines. To verify it: `edge_client ledger verify --export {file}`.")


def _head(text: str | None) -> "KeptHead | None":
    from tacit.heads import KeptHead

    try:
        return None if text is None else KeptHead.read(text)
    except ValueError as error:
        fail(str(error), ExitCode.USAGE)


def _home(option: Path | None) -> Path:
    from edge_client.identity.home import home_path

    return home_path(option)


def _ledgers(home: Path | None, data: str | None) -> list[Path]:
    """Returns the files of the chosen ledgers, at least one. Raises CommandFailed."""
    from edge_client.ledger.ledger import LedgerError, ledger_path

    folder = _home(home)
    try:
        found = sorted((folder / "ledgers").glob("*.db")) if data is None else [ledger_path(folder, data)]
    except LedgerError as error:
        fail(str(error), ExitCode.USAGE)
    if not found or not all(path.exists() for path in found):
        what = "no ledger" if data is None else f"no ledger of {data}"
        fail(
            f"{folder} holds {what}; `edge_client run` makes one when it first starts with a --data-name",
            ExitCode.NOT_FOUND,
        )
    return found


def _failed(error: Exception) -> Exception:
    from edge_client.ledger.store import LedgerMissing, LedgerNewer
    from toolkit.console import CommandFailed

    if isinstance(error, LedgerMissing):
        return CommandFailed(str(error), ExitCode.NOT_FOUND)
    return CommandFailed(str(error), ExitCode.USAGE if isinstance(error, LedgerNewer) else ExitCode.FAILED)


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as lines:
            for line in lines:
                yield line.removesuffix(b"\n")
    except FileNotFoundError:
        fail(f"{file} does not exist; check its path", ExitCode.NOT_FOUND)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}; check its path and permissions", ExitCode.USAGE)


def _check_is_export(file: Path) -> None:
    """Rejects a file that is something else as a whole, not line by line. Raises CommandFailed."""
    import json

    first = next(_lines(file), b"")
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        fail(f"{file} is not an export of a ledger; `edge_client ledger export FILE` writes one", ExitCode.USAGE)


def _summary(state: "LedgerState") -> dict[str, Any]:
    """Returns what `show` prints of one ledger."""
    from edge_client.ledger.gate import Gate
    from edge_client.ledger.replay import month_of
    from edge_client.ledger.store import LedgerDamaged

    opened, numbers = state.opened, state.limit
    if opened is None or numbers is None:
        raise LedgerDamaged("the ledger holds no record; run `edge_client ledger verify` for details")
    gate, month = Gate(numbers, state.monthly), month_of(_now_ms(state))
    limit = gate.limit

    jobs = [
        {"job": job, "releases": counts.total(), "epsilon_alone": gate.epsilon(counts)}
        for job, counts in _by_job(state).items()
    ]
    summary: dict[str, Any] = {
        "data": opened.name,
        "ledger": opened.ledger,
        "records": state.sequence,
        "head": state.head.hex(),
        "limit": {"epsilon": limit.epsilon, "delta": limit.delta, "adjacency": limit.adjacency, "unit": limit.unit},
        "spent": {"epsilon": gate.epsilon(state.spent())},
        "share_left": gate.share_left(state, month),
        "charged": sum(state.charged.values()),
        "reserved": sum(state.reserved.values()),
        "receipts": len(state.receipts),
        "jobs": jobs,
    }
    if state.persons is not None:
        seen = None if state.data_seen is None else state.data_seen.persons
        summary["persons"] = {"column": state.persons.column, "count": seen, "rows_before": state.persons.rows}
    if state.approvals:
        summary["approvals"] = [
            {
                "job": kept.statement.job,
                "document": kept.statement.document.hex(),
                "decision": kept.statement.decision,
                "steward": kept.statement.steward.hex(),
                "issued_ms": kept.statement.issued_ms,
                "expires_ms": kept.statement.expires_ms,
                "lapsed": digest in state.lapsed,
                "reason": kept.statement.reason or None,
            }
            for digest, kept in state.approvals.items()
        ]
    if state.monthly is not None:
        summary["month"] = {"month": month, "limit": state.monthly, "epsilon": gate.epsilon(state.spent_in(month))}
    return summary


def _now_ms(state: "LedgerState") -> int:
    import time

    # The ledger itself decides in this way which month it is.
    return max(int(time.time() * 1000), state.at_ms)


def _by_job(state: "LedgerState") -> "dict[str, Counter[PrivacyEvent]]":
    from collections import Counter

    jobs: dict[str, Counter[PrivacyEvent]] = {}
    for reservation in state.reservations.values():
        if reservation.released is None:
            jobs.setdefault(reservation.purpose.job, Counter())[reservation.event] += 1
    return jobs


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    limit, spent = summary["limit"], summary["spent"]
    about = Table.grid(padding=(0, 2))
    about.add_row("data", f"{summary['data']} (ledger {summary['ledger']}, {summary['records']} records)")
    about.add_row(
        "limit", f"epsilon {limit['epsilon']:g} at delta {limit['delta']:g}, {limit['adjacency']}, one {limit['unit']}"
    )
    if (persons := summary.get("persons")) is not None:
        count = "" if persons["count"] is None else f"{persons['count']:,} "
        before = persons["rows_before"]
        group = "" if before is None else f"; rows charged before count as groups of {before:,}"
        about.add_row("persons", printable(f"{count}by column {persons['column']!r}{group}"))
    about.add_row("spent", _spent(spent, limit["epsilon"], f" at delta {limit['delta']:g}"))
    if "month" in summary:
        month = summary["month"]
        about.add_row(month["month"], _spent(month, month["limit"]))
    about.add_row(
        "releases", f"{summary['charged']} charged, {summary['reserved']} reserved, {summary['receipts']} receipts"
    )
    console = Console(highlight=False, markup=False)
    console.print(about)
    if summary["jobs"]:
        table = Table("job", "releases", "epsilon of this job alone")
        for job in summary["jobs"]:
            table.add_row(job["job"], str(job["releases"]), f"{rounded_up(job['epsilon_alone']):g}")
        console.print(table)
    if summary.get("approvals"):
        table = Table("job", "document", "decision", "steward's key", "signed (UTC)", "valid until")
        for said in summary["approvals"]:
            until = "-" if said["expires_ms"] is None else _moment(said["expires_ms"])
            table.add_row(
                said["job"],
                said["document"][:16],
                said["decision"],
                said["steward"][:16],
                _moment(said["issued_ms"]),
                f"{until}, over" if said["lapsed"] else until,
            )
        console.print(table)


def _moment(at_ms: int) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M}"


def _spent(figures: dict[str, Any], limit: float, at: str = "") -> str:
    """Says how much of the limit is spent and left."""
    left = max(0.0, 1 - figures["epsilon"] / limit)
    return f"epsilon {rounded_up(figures['epsilon']):g} of {limit:g}{at}; {percent_left(left)} left"


def _verdict_json(where: str, verdict: "LedgerVerdict") -> dict[str, Any]:
    return {
        "file": where,
        "data": verdict.name,
        "records": verdict.state.sequence,
        "head": verdict.state.head.hex(),
        "kept_head_record": verdict.kept,
        "receipts": len(verdict.state.receipts),
        "first_bad_record": verdict.record,
        "problems": [{"where": problem.where, "what": problem.what} for problem in verdict.problems],
        "notes": list(verdict.notes),
        "sound": verdict.sound,
    }


def _print_verdict(where: str, verdict: "LedgerVerdict") -> None:
    for problem in verdict.problems:
        typer.echo(printable(str(problem)))
    for note in verdict.notes:
        typer.echo(printable(f"note: {note}"))
    from tacit.heads import KeptHead

    state = verdict.state
    if verdict.sound and state.opened is None:
        typer.echo(f"{where}: no record yet")
    elif verdict.sound:
        typer.echo(f"{where}: sound; {state.sequence} records, {len(state.receipts)} receipts, from the first one on")
        if verdict.kept is not None:
            typer.echo(f"  the kept head is that of record {verdict.kept}: nothing up to it was changed or cut off")
        typer.echo(f"  head, to keep elsewhere: {KeptHead(state.head, state.sequence)}")
    else:
        typer.echo(f"{where}: {len(verdict.problems)} problems")
