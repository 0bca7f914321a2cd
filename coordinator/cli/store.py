"""`coordinator store ...`: checks the store, and removes what nothing needs any more from it.

It runs on the coordinator's own machine, also while the coordinator serves.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.common import Json, Yes, confirm
from coordinator.cli.machine import CoordinatorDir, as_owner, on_machine
from coordinator.cli.user import os_user
from toolkit.console import ExitCode, fail, print_json

if TYPE_CHECKING:
    from coordinator.storage.prune import Pruned

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, and say what would go.")] = False,
    grace_hours: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="How long a blob stays that nothing names. Default: prune_grace_hours in coordinator.toml.",
            show_default=False,
        ),
    ] = None,
    grace_seconds: Annotated[float | None, typer.Option(min=1, hidden=True, help="For tests.")] = None,
    yes: Yes = False,
    folder: CoordinatorDir = Path("federation"),
    as_json: Json = False,
) -> None:
    """Remove versions that the retention policy lets go, and every blob that nothing names.

    The policy is in coordinator.toml: keep_versions, keep_best, keep_exported, keep_restarts,
    keep_named. Without one all stay.
    """
    import time

    from coordinator.storage.errors import NotFound, StoreInUse, StoreNotOwned
    from coordinator.storage.object_store import open_store
    from coordinator.storage.prune import Retention
    from coordinator.storage.prune import prune as prune_store

    with on_machine(folder) as machine:
        config = machine.config
        if not dry_run and config.keep_versions:
            confirm("Prune the store? Versions that the policy lets go cannot be fetched or evaluated any more.", yes)
        named = (text.rpartition("/") for text in config.keep_named)
        policy = Retention(
            newest=config.keep_versions,
            best=config.keep_best,
            exported=config.keep_exported,
            restarts=config.keep_restarts,
            named=frozenset((job, int(number)) for job, _, number in named),
        )
        hours = config.prune_grace_hours if grace_hours is None else grace_hours
        seconds = hours * 3600 if grace_seconds is None else grace_seconds
        try:
            done = prune_store(
                machine.database,
                open_store(config, machine.folder),
                policy,
                now_ms=time.time_ns() // 1_000_000,
                grace_seconds=seconds,
                by=os_user(),
                dry_run=dry_run,
            )
        except (StoreInUse, StoreNotOwned) as error:
            fail(str(error), ExitCode.REFUSED)
        except NotFound as error:
            fail(f"keep_named in coordinator.toml: {error}; nothing was pruned", ExitCode.USAGE)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "versions": {job: list(numbers) for job, numbers in done.versions.items()},
                "states": done.states,
                "blobs": done.blobs,
                "bytes": done.freed,
                "young": done.young,
                "kept_blobs": done.kept_blobs,
                "kept_bytes": done.kept_bytes,
                "missing": [digest.hex() for digest in done.missing],
            }
        )
    else:
        _show(done, dry_run)
    if done.missing:
        fail(
            f"the store lacks {len(done.missing)} blobs that rows name, {done.missing[0].hex()} first; pruning removed "
            "none of them: put them back from a backup",
            ExitCode.FAILED,
        )


@app.command("take-over")
def take_over(yes: Yes = False, folder: CoordinatorDir = Path("federation"), as_json: Json = False) -> None:
    """Make a bucket's prefix this database's own that belongs to another one, or to a later history.

    After a restore, for example. Stop the other coordinator for good first: it then serves and prunes
    no more, and what only its database names is removed by your next pruning.
    """
    import time

    from coordinator.storage.errors import StoreNotOwned
    from coordinator.storage.object_store import open_store
    from coordinator.storage.ownership import Ownership
    from coordinator.storage.prune import named_blobs

    with on_machine(folder) as machine:
        confirm(f"Take {machine.config.store_url} over? Is the coordinator that used it stopped for good?", yes)
        store = open_store(machine.config, machine.folder)
        named = sorted(named_blobs(machine.database, store))
        try:
            taken = Ownership(machine.database, store).take_over(time.time_ns() // 1_000_000, os_user(), named)
        except StoreNotOwned as error:
            fail(f"another coordinator is still running there: {error}", ExitCode.REFUSED)
    if as_json:
        found = [{"entry": each.entry, "head": each.head.hex()} for each in taken.marks]
        missing = [digest.hex() for digest in taken.missing]
        print_json({"found": found, "held": taken.held, "missing": missing})
    elif taken.marks:
        typer.echo(f"{machine.config.store_url} belongs to this database now. {taken.held} blobs are held for it.")
    else:
        typer.echo(f"{machine.config.store_url} belongs to no other database; nothing was changed.")
    if taken.missing:
        fail(
            f"the store lacks {len(taken.missing)} blobs that rows name, {taken.missing[0].hex()} first; put them back "
            "from a backup",
            ExitCode.FAILED,
        )


@app.command()
def check(folder: CoordinatorDir = Path("federation"), as_json: Json = False) -> None:
    """Check that the store can be listed, written, read and deleted from, as `serve` does at its start.

    For an S3 store it says what is missing: the bucket, a right, the region, trust in its certificate,
    a clock that is right.
    """
    from coordinator.closed import check_folder
    from coordinator.config import CoordinatorFolder, load_config
    from coordinator.storage.errors import StorageError
    from coordinator.storage.object_store import open_store
    from tacit.documents import DocumentInvalid
    from toolkit.private_files import NotPrivate

    as_owner(folder)
    try:
        config = load_config(folder)
        check_folder(CoordinatorFolder(folder))
        advice = open_store(config, CoordinatorFolder(folder)).check()
    except (DocumentInvalid, NotPrivate) as error:
        fail(str(error), ExitCode.USAGE)
    except StorageError as error:
        fail(error.sentence, ExitCode.FAILED)
    if as_json:
        print_json({"store": config.store_url, "advice": advice})
        return
    typer.echo(f"{config.store_url} can be used.")
    for each in advice:
        typer.echo(f"  {each}")


def _show(done: "Pruned", dry_run: bool) -> None:
    for job, numbers in sorted(done.versions.items()):
        which = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        typer.echo(f"{job}: {len(numbers)} versions {'would go' if dry_run else 'are let go'}, {which}")
    verb = "would be removed" if dry_run else "removed"
    typer.echo(f"{done.blobs} blobs {verb}, {done.freed / 1e6:,.1f} MB.")
    typer.echo(f"{done.kept_blobs} blobs stay, {done.kept_bytes / 1e6:,.1f} MB.")
    if dry_run and done.versions:
        typer.echo("Blobs of versions that would go are among those that would be removed once they are old enough.")
    if done.young:
        typer.echo(f"{done.young} blobs that nothing names are younger than the grace period, and stay for now.")
