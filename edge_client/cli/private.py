"""`edge_client private ...` shows, backs up, restores, removes and seals this member's private parameters.

No command prints a value or a word: only names of parameters, shapes, counts and sizes.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.cli.options import Home, Json
from toolkit.console import CommandFailed, ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    from edge_client.identity.home import IdentityDocument
    from edge_client.private_store.container import PrivateState, StateHeader
    from edge_client.private_store.sealing import StoreKey
    from edge_client.private_store.upkeep import Held

__all__ = ["app", "sentences"]

app = typer.Typer(
    help="Look after your private parameters: your vocabulary and your embedding. TACIT_PASSPHRASE opens sealed ones.",
    no_args_is_help=True,
)

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--private-key-file", help="The key file that seals the states, if not a passphrase.", show_default=False
    ),
]
OneJob = Annotated[str | None, typer.Option("--job", help="Only this job. Default: all jobs.", show_default=False)]


@app.command("list")
def list_(home: Home = None, as_json: Json = False) -> None:
    """List the jobs that have a private state here."""
    from edge_client.private_store.upkeep import held_all

    with sentences():
        found = held_all(_home(home))
    for each in found:
        if as_json:
            print_json(_held_json(each))
        elif each.header is None:
            typer.echo(printable(f"{each.job}: {each.problem or f'nothing committed yet, {each.staged} staged'}"))
        else:
            typer.echo(f"{each.job}: round {each.header.round}, {_megabytes(each.bytes)}, {_kept(each.header)}")
    if not found and not as_json:
        typer.echo(f"{_home(home)} holds no private state of any job.")


@app.command()
def show(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    key_file: KeyFile = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Check a job's private state; show its round, the names and shapes of its arrays, and its vocabulary's size.

    Without the passphrase or key file, a sealed state shows only its round and version.
    """
    from edge_client.private_store.upkeep import held, look

    folder = _home(home)
    with sentences():
        about = held(folder, job)
        header, state = look(folder, job, _key(key_file))
    summary = {**_held_json(about), **_header_json(header), **(_content_json(state) if state else {})}
    if as_json:
        print_json(summary)
    else:
        _print(summary)


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The file to write. It must not exist.")],
    job: OneJob = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write private states into one file, to store elsewhere or to move to another machine of this member.

    Sealed states stay sealed in it. The command needs no key and may run beside `edge_client run`.
    """
    from edge_client.private_store.backup import back_up

    folder = _home(home)
    if file.exists():
        fail(f"{file} exists; choose another name", ExitCode.USAGE)
    identity = _identity(folder)
    with sentences():
        about = back_up(folder, file, member=identity.member if identity else None, job=job)
    jobs = [entry.job for entry in about.states]
    open_ones = [entry.job for entry in about.states if not entry.sealed]
    if as_json:
        print_json({"file": str(file), "jobs": jobs, "not_sealed": open_ones})
        return
    typer.echo(f"Wrote {file}: {', '.join(jobs)}. Put it back with `edge_client private restore {file}`.")
    if open_ones:
        typer.echo(
            f"Not sealed: {', '.join(open_ones)}. Anyone who has the file can read your vocabulary. Protect it like "
            "your data, or seal the states with `edge_client private rekey` and back up again."
        )


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="A file that `edge_client private backup` wrote.")],
    job: OneJob = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace even a newer state, or one of another job document, federation or data."),
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Put back the private states of a backup, after verifying all of it. Drops updates staged for these jobs."""
    from edge_client.private_store.backup import restore as restored

    folder = _home(home)
    identity = _identity(folder)
    if identity is None:
        fail(f"{folder} holds no identity; first join the federation with `edge_client enrol`", ExitCode.USAGE)
    with sentences():
        done = restored(folder, file, federation=identity.federation, member=identity.member, job=job, force=force)
    if as_json:
        print_json({"restored": list(done.restored), "unchanged": list(done.unchanged)})
        return
    for name in done.restored:
        typer.echo(f"Restored {name}.")
    for name in done.unchanged:
        typer.echo(f"{name}: the same state is there already.")


@app.command()
def remove(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Delete a job's private state. Without a backup, this member's own model of the job is lost."""
    from edge_client.private_store.upkeep import held
    from edge_client.private_store.upkeep import remove as removed

    folder = _home(home)
    with sentences():
        held(folder, job)
        _confirm(f"Delete the private state of {job}? Without a backup it cannot be recovered.", yes)
        removed(folder, job)
    if as_json:
        print_json({"removed": job})
    else:
        typer.echo(f"Removed {job}.")


@app.command()
def rekey(
    key_file: KeyFile = None,
    new_key_file: Annotated[
        Path | None, typer.Option("--new-private-key-file", help="The new key file.", show_default=False)
    ] = None,
    unseal: Annotated[bool, typer.Option("--unseal", help="Store the states without a key.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Seal all private states, change their passphrase or key file, or unseal them.

    Give the present key as usual: TACIT_PASSPHRASE, --private-key-file, or neither.
    Give the new one as TACIT_NEW_PASSPHRASE in the environment, or as --new-private-key-file.
    If the command is interrupted, run it again.
    """
    from edge_client.private_store.upkeep import rekey as rekeyed

    with sentences():
        old, new = _key(key_file), _key(new_key_file, "TACIT_NEW_PASSPHRASE")
        if unseal == (new is not None):
            fail(
                "give the new key as TACIT_NEW_PASSPHRASE in the environment or with --new-private-key-file, or give "
                "--unseal for no key",
                ExitCode.USAGE,
            )
        jobs = rekeyed(_home(home), old, new)
    how = "not sealed" if new is None else f"sealed with the new {new.kind.replace('-', ' ')}"
    if as_json:
        print_json({"changed": jobs, "sealed": None if new is None else new.kind})
    elif jobs:
        typer.echo(f"{', '.join(jobs)}: {how} from now on. Earlier backups keep their old key.")
    else:
        typer.echo(f"Nothing to change: every private state is {how}.")


def _home(option: Path | None) -> Path:
    from edge_client.identity.home import home_path

    return home_path(option)


def _key(file: Path | None, variable: str = "TACIT_PASSPHRASE") -> "StoreKey | None":
    from edge_client.private_store.sealing import store_key

    return store_key(file, variable=variable)


def _identity(folder: Path) -> "IdentityDocument | None":
    """Returns whose home this is, even if the certificate has expired. Raises CommandFailed if it cannot be read."""
    from edge_client.identity.home import Home as MemberHome
    from edge_client.identity.home import IdentityDocument
    from tacit.documents import DocumentInvalid

    path = MemberHome(folder).identity.document
    try:
        return IdentityDocument.from_file(path)
    except FileNotFoundError:
        return None
    except (OSError, DocumentInvalid) as error:
        fail(f"{path} cannot be read ({error}); `edge_client doctor` says what to do", ExitCode.FAILED)


@contextmanager
def sentences() -> Iterator[None]:
    """Turns what is wrong with a private state into CommandFailed."""
    from edge_client.private_store import errors

    usage = (errors.KeyUnusable, errors.StateSealed, errors.StateConflict, errors.StateForeign, errors.StateNewer)
    try:
        yield
    except errors.StateMissing as error:
        raise CommandFailed(str(error), ExitCode.NOT_FOUND) from error
    except usage as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    except errors.StoreError as error:
        raise CommandFailed(str(error), ExitCode.FAILED) from error


def _confirm(question: str, yes: bool) -> None:
    """Asks before what cannot be undone. Raises CommandFailed without consent, or without `--yes` or a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{question} Confirm with --yes.", ExitCode.USAGE)
    if not typer.confirm(question):
        fail("nothing was changed", ExitCode.REFUSED)


def _held_json(held: "Held") -> dict[str, Any]:
    found: dict[str, Any] = {"job": held.job, "bytes": held.bytes, "staged": held.staged, "problem": held.problem}
    return found if held.header is None else {**found, **_header_json(held.header)}


def _header_json(header: "StateHeader") -> dict[str, Any]:
    return {
        "job": header.job,
        "document": header.document.hex(),
        "federation": header.federation.hex(),
        "data": header.data,
        "round": header.round,
        "version": header.version.hex(),
        "counter": header.counter,
        "flags": list(header.flags),
        "sealed": None if header.sealing is None else header.sealing.kind,
    }


def _content_json(state: "PrivateState") -> dict[str, Any]:
    arrays = {name: list(array.shape) for name, array in state.arrays.items()}
    values = sum(array.size for array in state.arrays.values())
    return {"arrays": arrays, "values": values, "tokenizer": _tokenizer_json(state.tokenizer)}


def _tokenizer_json(tokenizer: bytes | None) -> dict[str, Any] | None:
    """Returns a vocabulary's size, and none of its entries."""
    import json

    if tokenizer is None:
        return None
    try:
        entries = len(json.loads(tokenizer)["model"]["vocab"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"bytes": len(tokenizer), "entries": None}
    return {"bytes": len(tokenizer), "entries": entries}


def _kept(header: "StateHeader") -> str:
    words = ["not sealed" if header.sealing is None else f"sealed with a {header.sealing.kind.replace('-', ' ')}"]
    return ", ".join([*words, *header.flags])


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    about = Table.grid(padding=(0, 2))
    about.add_row("job", f"{summary['job']} (document {summary['document'][:16]}...)")
    about.add_row("data", summary["data"])
    about.add_row("round", f"{summary['round']}, from version {summary['version'][:16]}...")
    about.add_row("saved", f"{summary['counter']} times, {_megabytes(summary['bytes'])}, {summary['staged']} staged")
    about.add_row("sealed", f"with a {summary['sealed'].replace('-', ' ')}" if summary["sealed"] else "no")
    if summary["flags"]:
        about.add_row("flags", ", ".join(summary["flags"]))
    console = Console(highlight=False, markup=False)
    if "arrays" not in summary:
        console.print(about)
        typer.echo("Give the passphrase or the key file to see the arrays and the vocabulary.")
        return
    tokenizer = summary["tokenizer"]
    entries = "the job's" if tokenizer is None else f"own, {tokenizer['entries']} entries, {tokenizer['bytes']} bytes"
    about.add_row("vocabulary", entries)
    about.add_row("values", f"{summary['values']:,}")
    console.print(about)
    table = Table("array", "shape")
    for name, shape in summary["arrays"].items():
        table.add_row(name, " x ".join(map(str, shape)))
    console.print(table)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 50_000 else f"{count} bytes"
