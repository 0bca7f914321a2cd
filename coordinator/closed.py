"""Checks that no other user of the machine can read the coordinator's keys or change the files that it serves from.

The checks run before a key is read and before a port is opened, folders before their files, by the rules of
`toolkit.private_files`. For the store they look only at the outermost folder, which leads to everything below.
"""

from pathlib import Path

from coordinator.config import CoordinatorConfig, CoordinatorFolder
from toolkit.private_files import check_keys, check_private, check_unwritable

__all__ = ["check_folder", "check_storage", "database_file", "store_folder"]


def check_folder(folder: CoordinatorFolder) -> None:
    """Checks what `coordinator init` created, except for the database and the store, which may be elsewhere.

    Raises:
        NotPrivate: another user may use a folder or a key, or change a certificate or the configuration.
        OSError: a file cannot be examined.
    """
    check_private(folder.path)
    check_unwritable(folder.config_toml)
    check_unwritable(folder.database_mark)
    for inside in (folder.authority_key.parent, folder.server_key.parent, folder.operator):
        check_keys(inside)
    check_private(folder.spool)


def check_storage(config: CoordinatorConfig) -> None:
    """Checks the database with its log, and the store, if they are files on this machine.

    Args:
        config: The configuration from `load_config`, with absolute URLs.

    Raises:
        NotPrivate: another user may use them.
        OSError: a file cannot be examined.
    """
    if (store := store_folder(config.store_url)) is not None:
        check_private(store)
    if (database := database_file(config.database_url)) is not None:
        for suffix in ("", "-wal", "-shm", ".serving"):
            check_private(database.with_name(database.name + suffix))


def database_file(url: str) -> Path | None:
    """Returns the file of an SQLite database, or None if the database is not a file."""
    scheme, _, rest = url.partition(":///")
    rest = rest.partition("?")[0]
    return Path(rest) if scheme.startswith("sqlite") and rest and not rest.startswith(":memory:") else None


def store_folder(url: str) -> Path | None:
    """Returns the folder of a store on this machine, or None if the store is elsewhere."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    return Path(rest) if scheme in ("file", "local") else None
