"""`coordinator audit ...`: shows and verifies the journal.

This machine recomputes the chain from the entries that it read, so verification trusts no sender. The entries come from
the running coordinator or, without it, from a backup or from the database itself.
"""

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.common import Dir, Json, Operator, operator_folder, operator_stub, run
from tacit.heads import KeptHead
from toolkit.console import ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    from coordinator.storage.chain import JournalEntry
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["app", "read_entries"]

app = typer.Typer(no_args_is_help=True)

Backup = Annotated[
    Path | None,
    typer.Option(
        "--backup",
        help="Read the newest snapshot in this backup instead of asking a running coordinator.",
        show_default=False,
    ),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="Read this database instead of asking a running coordinator: sqlite:////folder/tacit.db, or a PostgreSQL "
        "URL (keep its password in ~/.pgpass).",
        show_default=False,
    ),
]


@app.command()
def show(
    subject: Annotated[
        str | None, typer.Option(help="Show only entries about this member, job or operator.", show_default=False)
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="Show only what this operator did, or this user of the coordinator's machine (machine:NAME).",
            show_default=False,
        ),
    ] = None,
    after: Annotated[int, typer.Option(min=0, help="Start after the entry with this number.")] = 0,
    backup: Backup = None,
    database: DatabaseUrl = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Show who did what, and when. Entries appear as stored; run `coordinator audit verify` to check them."""
    shown = 0

    def take(entry: "JournalEntry") -> None:
        nonlocal shown
        if by is not None and entry.fields.get("by") != by:
            return
        shown += 1
        if as_json:
            print_json(_json(entry))
        else:
            typer.echo(printable(_line(entry)))

    _read(take, backup, database, operator, folder, after=after, subject=subject)
    if not shown and not as_json:
        typer.echo("No entries.")


@app.command()
def verify(
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HASH[:NUMBER]",
            help="A head that you kept elsewhere; it must still be in the journal. This command prints heads, and the "
            "coordinator logs them as journal_head. Repeatable.",
            show_default=False,
        ),
    ] = None,
    backup: Backup = None,
    database: DatabaseUrl = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Check that the entries form an unbroken chain from the first one, and print its head to keep elsewhere.

    The chain alone does not reveal that the tail was cut off, or that the owner of the database rewrote the whole
    journal. A head reveals both, if you kept it where they cannot write: pass it with --head.
    """
    from coordinator.storage import chain

    heads = [_head(text) for text in head or []]
    verifier, log = chain.Verifier(heads), chain.RosterOfJournal()

    def take(entry: "JournalEntry") -> None:
        verifier.take(entry)
        log.take(entry)

    try:
        _read(take, backup, database, operator, folder)
        verdict = verifier.verdict()
    except chain.ChainBroken as error:
        fail(f"the journal is not intact: {error}", ExitCode.FAILED)
    if as_json:
        found = {kept.hex(): number for kept, number in verdict.found.items()}
        print_json(
            {"entries": verdict.entries, "head": verdict.head.hex(), "head_entry": verdict.head_id, "found": found}
            | {"roster_log": {"entries": log.size, "root": log.root.hex()}}
        )
        return
    typer.echo(f"The chain is unbroken: {verdict.entries} entries, from the first one.")
    for kept, number in sorted(verdict.found.items(), key=lambda item: item[1]):
        typer.echo(
            f"  the head {kept.hex()} belongs to entry {number}: nothing up to it was changed, removed or inserted"
        )
    newest = max(verdict.found.values(), default=0)
    if newest < verdict.head_id:
        typer.echo(
            f"  this does not reveal whether entries after {newest} were cut off or rewritten: "
            "check with a head kept elsewhere (--head)"
        )
    typer.echo(f"Keep this head elsewhere: {KeptHead(verdict.head, verdict.head_id)}")
    typer.echo(f"The roster log that follows from the journal has {log.size} entries and the root {log.root.hex()};")
    typer.echo("`edge_client members --json` shows what members see.")


def _head(text: str) -> KeptHead:
    try:
        return KeptHead.read(text)
    except ValueError as error:
        fail(str(error), ExitCode.USAGE)


def _read(
    take: "Callable[[JournalEntry], None]",
    backup: Path | None,
    database: str | None,
    operator: Path | None,
    folder: Path | None,
    *,
    after: int = 0,
    subject: str | None = None,
) -> None:
    """Passes every entry to `take`, from whichever source the options name.

    Raises:
        CommandFailed: the source cannot be read. What `take` raises passes through.
    """
    if backup is not None and database is not None:
        fail("--backup and --database name two journals; pass one of them", ExitCode.USAGE)
    if backup is None and database is None:
        run(_from_coordinator(operator_folder(operator, folder), take, after, subject))
        return
    from coordinator.storage import snapshot
    from coordinator.storage.backup import newest, read_journal
    from coordinator.storage.errors import StorageError

    def take_wanted(entries: "Iterable[JournalEntry]") -> None:
        for entry in entries:
            if entry.id > after and subject in (None, entry.subject):
                take(entry)

    try:
        if backup is not None:
            take_wanted(read_journal(newest(backup)))
        else:
            with snapshot.of_database(str(database)) as connection:
                take_wanted(snapshot.journal(connection))
    except StorageError as error:
        fail(error.sentence, ExitCode.FAILED)


async def _from_coordinator(
    where: Path, take: "Callable[[JournalEntry], None]", after: int, subject: str | None
) -> None:
    async with operator_stub(where) as stub:
        await read_entries(stub, take, after=after, subject=subject)


async def read_entries(
    stub: "OperatorServiceStub",
    take: "Callable[[JournalEntry], None]",
    *,
    after: int = 0,
    subject: str | None = None,
) -> None:
    """Passes the running coordinator's entries to `take`, in order. What `take` raises passes through."""
    from coordinator.storage.chain import JournalEntry
    from tacit.blobs import moving
    from tacit.v1 import operator_pb2

    request = operator_pb2.ReadJournalRequest(after=after, subject=subject or "")
    async with contextlib.aclosing(moving(stub.ReadJournal(request))) as pages:
        async for page in pages:
            for entry in page.entries:
                fields = _fields(entry.fields)
                take(JournalEntry(entry.id, entry.at_ms, entry.kind, entry.subject, fields, entry.hash))


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        fail(
            "the coordinator sent an entry whose fields are not a JSON object; install its version of this software",
            ExitCode.FAILED,
        )
    return fields


def _json(entry: "JournalEntry") -> dict[str, Any]:
    return {
        "id": entry.id,
        "at_ms": entry.at_ms,
        "kind": entry.kind,
        "subject": entry.subject,
        "fields": dict(entry.fields),
        "hash": entry.hash.hex(),
    }


def _line(entry: "JournalEntry") -> str:
    from datetime import UTC, datetime

    at = f"{datetime.fromtimestamp(entry.at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    return f"{entry.id:>6}  {at}  {entry.kind:<19}  {entry.subject:<16}  {_told(entry.fields)}".rstrip()


def _told(fields: Any) -> str:
    """Formats fields for people. Digests are shortened; `--json` prints them in full."""
    parts = []
    for name, value in sorted(fields.items()):
        if value in (None, "", []):
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"{name}={text[:12] + '...' if len(text) == 64 else text}")
    return " ".join(parts)
