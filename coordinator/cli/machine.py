"""Shared by the commands that work on the coordinator's own folder and database, with or without a running server."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.console import ExitCode, fail

if TYPE_CHECKING:
    from coordinator.authority import AuthorityBook
    from coordinator.config import CoordinatorConfig, CoordinatorFolder
    from coordinator.storage.database import Database

__all__ = ["CoordinatorDir", "Machine", "as_owner", "on_machine"]

CoordinatorDir = Annotated[
    Path, typer.Option("--dir", envvar="TACIT_DIR", help="The coordinator's folder, on its own machine.")
]


@dataclass(frozen=True)
class Machine:
    """The coordinator's opened folder and database."""

    folder: "CoordinatorFolder"
    config: "CoordinatorConfig"
    database: "Database"
    passphrase: bytes | None
    _book: "AuthorityBook | None"

    @property
    def book(self) -> "AuthorityBook":
        """The authorities with their keys, if `on_machine` was called with `keys`."""
        if self._book is None:
            raise RuntimeError("open the machine with keys=True to use the authorities' keys")
        return self._book


def as_owner(path: Path) -> None:
    """Refuses to run as a user other than the folder's owner.

    Files that another user writes with mode 0600 would lock the server out of its own folder. A missing folder passes;
    others report it.

    Raises:
        CommandFailed: another user owns the folder.
    """
    import os
    import shlex
    import sys

    from toolkit.private_files import user_name

    try:
        owner = path.stat().st_uid
    except OSError:
        return
    if owner == os.geteuid():
        return
    name = user_name(owner)
    line = shlex.join(["sudo", "-u", name, *sys.argv])
    fail(
        f"{path} belongs to user {name}, who cannot read files that another user writes there; run `{line}`",
        ExitCode.USAGE,
    )


@contextlib.contextmanager
def on_machine(path: Path, *, keys: bool = False) -> Iterator[Machine]:
    """Opens the configuration and the database, and with `keys` the authorities.

    It opens them only as the folder's owner, only if the folder is closed to others, and only the database that the
    coordinator serves from.

    Raises:
        CommandFailed: one of these does not hold, or something cannot be read.
    """
    import os
    from datetime import UTC, datetime

    from coordinator.authority import load_authorities
    from coordinator.closed import check_folder, check_storage
    from coordinator.config import CoordinatorFolder, load_config
    from coordinator.pki import AuthorityUnusable, LifetimeOutOfRange, authority_passphrase
    from coordinator.storage import mark
    from coordinator.storage.database import open_database
    from coordinator.storage.errors import StorageError
    from tacit.documents import DocumentInvalid
    from toolkit.private_files import NotPrivate

    folder = CoordinatorFolder(path)
    as_owner(path)
    try:
        check_folder(folder)
        config = load_config(path)
        check_storage(config)
        mark.check(folder.database_mark, config.database_url)
        passphrase = authority_passphrase(os.environ)
        if keys and config.authority_elsewhere:
            fail(
                "this needs the authority's key, which is on another machine (authority_elsewhere in coordinator.toml);"
                " bring authority/ back for it and remove that line, then move the key away again",
                ExitCode.REFUSED,
            )
        book = load_authorities(folder, now=datetime.now(UTC), passphrase=passphrase) if keys else None
        database = open_database(config.database_url)
        with contextlib.closing(database):
            yield Machine(folder, config, database, passphrase, book)
    except (DocumentInvalid, AuthorityUnusable, LifetimeOutOfRange, NotPrivate) as error:
        fail(str(error), ExitCode.USAGE)
    except StorageError as error:
        fail(str(error), ExitCode.FAILED)
    except OSError as error:
        fail(
            f"{error.filename or path} cannot be read or written: {error.strerror}; check permissions and free space",
            ExitCode.FAILED,
        )
