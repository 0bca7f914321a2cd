"""`coordinator backup` and `coordinator restore`, on the coordinator's own machine.

A backup can run beside the coordinator; a restore needs it stopped.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.common import Json, Yes, confirm
from coordinator.cli.machine import as_owner
from coordinator.cli.user import os_user
from toolkit.console import CommandFailed, ExitCode, fail, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

    from coordinator.config import CoordinatorConfig
    from coordinator.storage.backup import Snapshot
    from coordinator.storage.journal import Value

__all__ = ["backup", "restore"]

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The backup's folder.", show_default=False)]
CoordinatorDir = Annotated[
    Path, typer.Option("--dir", envvar="TACIT_DIR", help="The folder that `coordinator init` created.")
]

_KEY_FOLDERS = ("authority", "server", "operator")
_CONFIG = "coordinator.toml"
# By how much clocks of machines may differ; certificates are backdated by as much.
_CLOCKS_DIFFER_MS = 5 * 60 * 1000


def backup(
    folder: Folder,
    coordinator: CoordinatorDir = Path("federation"),
    *,
    with_keys: Annotated[
        bool,
        typer.Option(
            "--with-keys",
            help="Also copy coordinator.toml and the keys of authority, server and operator. Anyone who has such a "
            "backup can create members. Without this option, only rows and blobs are kept.",
        ),
    ] = False,
    keep: Annotated[int, typer.Option(min=1, help="How many backups to keep in FOLDER, including this one.")] = 7,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Go on if the store lost a blob. The backup lists lost blobs.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Make no backup; read every backup in FOLDER and check its digests. Beside the coordinator's folder, "
            "the journal says how it went.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Back up the database and every blob it names, even while the coordinator serves.

    Later backups into the same folder write only what is new. A backup can be restored to SQLite and to PostgreSQL.
    """
    from coordinator.storage.errors import StorageError

    try:
        if verify:
            _verify(folder, coordinator, as_json)
        else:
            _back_up(folder, coordinator, with_keys, keep, allow_missing, as_json)
    except StorageError as error:
        fail(error.sentence, ExitCode.FAILED)


def _verify(folder: Path, coordinator: Path, as_json: bool) -> None:
    from coordinator.storage.backup import checked
    from coordinator.storage.errors import BackupDamaged

    whole: list[Snapshot] = []
    damaged: dict[str, str] = {}
    newest = ""
    for path, found in checked(folder):
        newest = newest or path.stem
        if isinstance(found, BackupDamaged):
            damaged[path.name] = found.sentence
        else:
            whole.append(found)
        if not as_json:
            said = f"DAMAGED. {damaged[path.name]}" if path.name in damaged else f"whole. {_content(whole[-1])}"
            typer.echo(f"{path.name}: {said}")
    if (coordinator / _CONFIG).exists():
        _tell_verified(coordinator, newest, whole, damaged)
    if as_json:
        print_json({"whole": [each.path.name for each in reversed(whole)], "damaged": damaged})
    if damaged:
        newest = f"the newest whole one is {whole[0].path.name}" if whole else "none is whole"
        fail(
            f"{len(damaged)} of {len(damaged) + len(whole)} backups in {folder} are damaged, and {newest}; check the "
            "disk, then make another backup: it writes damaged blobs again. A snapshot that is still damaged after "
            "that cannot be restored",
            ExitCode.FAILED,
        )


def _tell_verified(coordinator: Path, newest: str, whole: "list[Snapshot]", damaged: dict[str, str]) -> None:
    """Notes in the journal how a verification went. If that fails, a sentence says so, and the verification counts.

    It notes only one of the folder whose newest backup is the journal's newest: figures and alerts are of that folder.

    Args:
        newest: the newest backup in the folder, whole or damaged.
    """
    import time

    from coordinator.config import CoordinatorFolder
    from coordinator.storage import mark, records
    from coordinator.storage.errors import StorageError
    from coordinator.storage.journal import newest_of

    names = CoordinatorFolder(coordinator)
    try:
        as_owner(coordinator)
        config = _config(coordinator)
        _closed(coordinator, config)
        if whole and whole[0].manifest.federation != _federation(names.authority_certificate):
            sys.stderr.write(f"not noted in the journal of {coordinator}: these are another federation's backups\n")
            return
        mark.check(names.database_mark, config.database_url)
        # To open a database makes it, and migrates it.
        _check_revision(config)
    except (CommandFailed, StorageError) as error:
        sys.stderr.write(f"not noted in the journal of {coordinator}: {error}\n")
        return
    now_ms = time.time_ns() // 1_000_000
    fields: dict[str, Value] = {
        # When the newest whole backup was made; 0 if there is none.
        "made_ms": whole[0].manifest.made_ms if whole else 0,
        "whole": len(whole),
        "damaged": len(damaged),
        "by": os_user(),
    }

    def note(s: "Session") -> None:
        made = newest_of(s, "backup_made", "restored")
        named = "none" if made is None else str(made.fields["backup"])
        if named == newest:
            records.note(s, "backup_verified", "coordinator", now_ms, **fields)
        else:
            sys.stderr.write(
                f"not noted in the journal of {coordinator}: its newest backup is {named}, and the newest in this "
                f"folder is {newest}\n"
            )

    _tell_journal(config, "backups were verified", note)


def _back_up(folder: Path, coordinator: Path, with_keys: bool, keep: int, allow_missing: bool, as_json: bool) -> None:
    import time

    from coordinator.closed import store_folder
    from coordinator.config import CoordinatorFolder
    from coordinator.storage import mark, records
    from coordinator.storage.backup import make
    from coordinator.storage.object_store import open_store
    from tacit import __version__
    from toolkit.logs import configure

    as_owner(coordinator)
    config = _config(coordinator)
    _closed(coordinator, config)
    if (store := store_folder(config.store_url)) is not None and folder.resolve().is_relative_to(store.resolve()):
        # Whatever takes the store takes the backup with it.
        fail(f"{folder} is in the store that it would copy; name a folder outside of {store}", ExitCode.USAGE)
    mark.check(CoordinatorFolder(coordinator).database_mark, config.database_url)
    configure("console", "warning")
    federation = _federation(CoordinatorFolder(coordinator).authority_certificate)
    _check_revision(config)
    now_ms, by = time.time_ns() // 1_000_000, os_user()
    # First, so that the backup contains the entry, and keys are copied by nobody whom the journal does not name.
    _tell_journal(
        config,
        "this backup was begun",
        lambda s: records.note(s, "backup_begun", "coordinator", now_ms, keys=with_keys, by=by),
    )
    made = make(
        config.database_url,
        open_store(config, CoordinatorFolder(coordinator)),
        folder,
        federation=federation,
        software=__version__,
        now_ms=now_ms,
        keys=_keys(coordinator) if with_keys else None,
        keep=keep,
        allow_missing=allow_missing,
    )
    # Last, because this is what counts as a backup.
    told: dict[str, Value] = {
        "backup": made.snapshot.path.stem,
        "made_ms": now_ms,
        "missing": len(made.snapshot.manifest.missing),
        "keys": with_keys,
        "by": by,
    }
    ended_ms = time.time_ns() // 1_000_000
    _tell_journal(
        config, "this backup is complete", lambda s: records.note(s, "backup_made", "coordinator", ended_ms, **told)
    )
    if made.not_removed:
        sys.stderr.write(f"older backups were not removed: {made.not_removed}\n")
    manifest = made.snapshot.manifest
    if as_json:
        print_json(
            {
                "snapshot": made.snapshot.path.name,
                "rows": sum(part.rows for part in manifest.tables),
                "blobs": len(manifest.blobs),
                "blobs_written": made.blobs_written,
                "blobs_mended": made.blobs_mended,
                "missing": [digest.hex() for digest in manifest.missing],
                "keys": len(manifest.keys),
                "removed": made.removed,
                "head": manifest.head.hex(),
            }
        )
        return
    typer.echo(f"{made.snapshot.path}: {_content(made.snapshot)}")
    typer.echo(f"  blobs: {made.blobs_written} written, {made.blobs_kept} already there")
    if made.blobs_mended:
        typer.echo(f"  MENDED: {made.blobs_mended} blobs were damaged in {folder}; check its disk")
    for digest in manifest.missing:
        typer.echo(f"  MISSING, because the store lost it: {digest.hex()}")
    if manifest.keys:
        typer.echo(
            "  with the federation's keys: anyone who has this folder can create members; guard it like the authority"
        )
    else:
        typer.echo("  without keys: copy authority/, operator/ and coordinator.toml elsewhere (or pass --with-keys)")


def _content(of: "Snapshot") -> str:
    manifest = of.manifest
    size = (sum(part.size for part in manifest.tables) + sum(part.size for part in manifest.blobs)) / 1e6
    return (
        f"{sum(part.rows for part in manifest.tables)} rows, {len(manifest.blobs)} blobs, {size:.1f} MB; journal to "
        f"entry {manifest.head_entry}, head {manifest.head.hex()}"
    )


def restore(
    folder: Folder,
    coordinator: CoordinatorDir = Path("federation"),
    *,
    name: Annotated[
        str | None,
        typer.Option("--snapshot", help="Which backup in FOLDER. Default: the newest.", show_default=False),
    ] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MEMBER",
            help="Revoke this member at once. Members revoked after the backup are still enrolled in it. Repeatable.",
            show_default=False,
        ),
    ] = None,
    new_database: Annotated[
        bool,
        typer.Option(
            "--new-database", help="Restore into a different database from the one that this folder's coordinator used."
        ),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Restore a backup: blobs into the store, rows into an empty database. Stop the coordinator first.

    It reads and checks the whole backup before it writes anything.
    """
    import time

    from coordinator.storage.backup import newest
    from coordinator.storage.errors import DatabaseInUse, StorageError

    as_owner(coordinator)
    try:
        found = newest(folder, name)
        found.check()
        # Without a folder there is nothing yet that could refuse.
        if (coordinator / _CONFIG).exists():
            _check_target(found, coordinator, revoke or [], new_database)
        if found.manifest.made_ms > time.time_ns() // 1_000_000 + _CLOCKS_DIFFER_MS:
            sys.stderr.write(
                f"{found.path.name} shows a time that is still to come: a clock was ahead then, or is behind now. "
                "Members that renewed their certificate since are refused and need a new invitation; --snapshot names "
                "another\n"
            )
        confirm(f"Restore {found.path.name} ({_content(found)}) to {coordinator}?", yes)
        _restore(found, coordinator, revoke or [], new_database, as_json)
    except DatabaseInUse:
        fail(
            f"a coordinator serves from the database of {coordinator}; stop it, then restore into an empty database",
            ExitCode.FAILED,
        )
    except StorageError as error:
        fail(error.sentence, ExitCode.FAILED)


def _check_target(found: "Snapshot", coordinator: Path, revoke: list[str], new_database: bool) -> "CoordinatorConfig":
    """Checks that a backup may be restored into a coordinator's folder and its database.

    The database must be empty, or this command has restored the backup before.

    Raises:
        CommandFailed: the folder is of another federation, or open to others.
        StorageError: the database is another one, is served from, or holds other rows.
    """
    from coordinator.closed import database_file
    from coordinator.config import CoordinatorFolder
    from coordinator.storage import mark
    from coordinator.storage.database import open_database
    from coordinator.storage.restore import check_target, check_unopened
    from coordinator.storage.target import check_no_links
    from toolkit.logs import configure

    configure("console", "warning")
    check_no_links(coordinator)
    config = _config(coordinator)
    _closed(coordinator, config)
    names = CoordinatorFolder(coordinator)
    if not new_database:
        mark.check_place(names.database_mark, config.database_url)
    federation = _federation(names.authority_certificate)
    if federation != found.manifest.federation:
        fail(
            f"this backup belongs to federation {found.manifest.federation.hex()[:16]}, but {coordinator} to "
            f"{federation.hex()[:16]}, which would refuse its members; restore into a folder with that authority",
            ExitCode.REFUSED,
        )
    # To open a database makes it, and fills another program's with tables. The question is not answered yet.
    file = database_file(config.database_url)
    if (file is None or file.exists()) and check_unopened(config.database_url):
        database = open_database(config.database_url, sole=True)
        try:
            check_target(database, found, revoke)
        finally:
            database.close()
    return config


def _restore(found: "Snapshot", coordinator: Path, revoke: list[str], new_database: bool, as_json: bool) -> None:
    import time

    from coordinator.config import CoordinatorFolder
    from coordinator.storage import mark, records
    from coordinator.storage.database import open_database
    from coordinator.storage.errors import DatabaseUnusable
    from coordinator.storage.object_store import open_store
    from coordinator.storage.restore import check_target, restore_blobs, restore_rows
    from coordinator.storage.store_work import store_work
    from coordinator.storage.target import check_no_links

    check_no_links(coordinator)
    keys = _put_keys(found, coordinator)
    config = _check_target(found, coordinator, revoke, new_database)
    names = CoordinatorFolder(coordinator)
    database = open_database(config.database_url, sole=True)
    try:
        # Again, and before copying gigabytes: the question may have stood for hours.
        check_target(database, found, revoke)
        store = open_store(config, names)
        # No row names the blobs before the end, so a pruning might remove them.
        with store.unpruned(), store_work(config.database_url, alone=False):
            blobs = restore_blobs(found, store)
            done = restore_rows(found, database, revoke=revoke, now_ms=time.time_ns() // 1_000_000, by=os_user())
        try:
            mark.keep(names.database_mark, config.database_url, database.run_now(records.head))
        except DatabaseUnusable as error:
            fail(f"everything is restored, but {error.sentence}, then type the restore again", ExitCode.FAILED)
    finally:
        database.close()
    if as_json:
        print_json(
            {
                "snapshot": found.path.name,
                "rows": done.rows,
                "blobs": blobs,
                "keys": keys,
                "jobs": dict(done.jobs),
                "revoked": list(done.revoked),
            }
        )
        return
    typer.echo(f"Restored {found.path.name}: {done.rows} rows, {blobs} blobs, {keys} key files.")
    for job, number in done.jobs:
        typer.echo(f"  job {job} is paused at version {number}; its rounds and attempts continue a million higher")
    steps = [
        (f"member import-log FILE --dir {coordinator}", "from a member: `edge_client members --offline --export FILE`"),
        (f"serve --dir {coordinator}", ""),
        (f"operator revoke NAME --dir {coordinator}", "each that was revoked since the backup"),
        ("member revoke NAME", "each that was revoked since the backup, if --revoke did not"),
        ("member invite NAME", "each that enrolled since the backup"),
    ]
    if config.store_url.startswith("s3://"):
        steps.insert(
            0, (f"store take-over --dir {coordinator}", "if this database replaces the one that the bucket belonged to")
        )
    if done.jobs:
        steps.append(("job resume NAME", "once `coordinator member list` shows all members connected"))
    typer.echo("Open invitations are withdrawn. Next:")
    for command, when in steps:
        typer.echo(f"  coordinator {command}{f': {when}' if when else ''}")


def _put_keys(found: "Snapshot", coordinator: Path) -> int:
    """Restores the coordinator's folder if there is none, and returns the number of files.

    It writes the configuration last, so an interrupted restore leaves nothing that passes for a folder.
    """
    from coordinator.storage.target import write_secret

    if (coordinator / _CONFIG).exists():
        return 0
    if not found.manifest.keys:
        fail(
            f"{coordinator} is not a coordinator's folder, and this backup has no keys; copy your authority/ and "
            f"{_CONFIG} there first, or restore a backup made with --with-keys",
            ExitCode.USAGE,
        )
    try:
        coordinator.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in sorted(found.manifest.keys, key=lambda part: part.path == _CONFIG):
            write_secret(coordinator, part.path, found.read_key(part))
    except OSError as error:
        fail(f"{error.filename or coordinator} cannot be written: {error.strerror}; check permissions", ExitCode.FAILED)
    return len(found.manifest.keys)


def _keys(coordinator: Path) -> dict[str, Path]:
    """The files that make up a coordinator's folder, by their path below it."""
    found = [coordinator / _CONFIG]
    for name in _KEY_FOLDERS:
        found += sorted(path for path in (coordinator / name).rglob("*") if path.is_file())
    return {path.relative_to(coordinator).as_posix(): path for path in found}


def _config(coordinator: Path) -> "CoordinatorConfig":
    from coordinator.config import load_config
    from tacit.documents import DocumentInvalid

    try:
        return load_config(coordinator)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)


def _closed(coordinator: Path, config: "CoordinatorConfig") -> None:
    """Checks that no other user has access to what is read or written.

    Raises:
        CommandFailed: another user has access.
    """
    from coordinator.closed import check_folder, check_storage
    from coordinator.config import CoordinatorFolder
    from toolkit.private_files import NotPrivate

    try:
        check_folder(CoordinatorFolder(coordinator))
        check_storage(config)
    except NotPrivate as error:
        fail(str(error), ExitCode.USAGE)


def _federation(root: Path) -> bytes:
    """Returns the name of the federation: the SHA-256 of its first authority."""
    from tacit.certificates import certificate_from_pem
    from tacit.identity import federation_of

    try:
        return federation_of(certificate_from_pem(root.read_bytes()))
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{root} cannot be read: {error}; put the authority's certificate there") from error


def _check_revision(config: "CoordinatorConfig") -> None:
    """Raises BackupRefused if other software serves the database than this one."""
    from coordinator.storage import snapshot
    from coordinator.storage.database import scripts
    from coordinator.storage.errors import BackupRefused

    with snapshot.of_database(config.database_url) as connection:
        revision = snapshot.revision_of(connection)
    newest = scripts()[1].get_current_head()
    if revision != newest:
        raise BackupRefused(
            f"the database is at revision {revision}, this software at {newest}; back it up with the software that "
            "serves it, or start this coordinator on it once"
        )


def _tell_journal(config: "CoordinatorConfig", what: str, note: "Callable[[Session], None]") -> None:
    """Writes an entry, which says `what`. A database that cannot be written is still backed up."""
    from coordinator.storage.database import open_database
    from coordinator.storage.errors import DatabaseUnusable

    try:
        database = open_database(config.database_url)
        try:
            database.run_now(note)
        finally:
            database.close()
    except DatabaseUnusable as error:
        sys.stderr.write(f"the journal does not say that {what}: {error.sentence}\n")
