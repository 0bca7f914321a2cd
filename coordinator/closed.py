"""The coordinator's folder is closed: nobody else on the machine reads its keys or changes what it serves from.

Checked before a key is read and before a port is opened, folders before the files in them, by the rules of
`toolkit.private_files`. Of the store only the outermost folder is looked at: what lies below is reached through it.
"""

from pathlib import Path

from coordinator.config import CoordinatorConfig, CoordinatorFolder
from toolkit.private_files import check_keys, check_private, check_unwritable

__all__ = ["check_folder", "check_storage", "database_file", "store_folder"]


def check_folder(folder: CoordinatorFolder) -> None:
    """What `coordinator init` made, but for the database and the store, which may lie elsewhere.

    Raises:
        NotPrivate: somebody else may use a folder or a key, or change a certificate or the configuration.
        OSError: something cannot be looked at.
    """
    check_private(folder.path)
    check_unwritable(folder.config_toml)
    check_unwritable(folder.database_mark)
    for inside in (folder.authority_key.parent, folder.server_key.parent, folder.operator):
        check_keys(inside)
    check_private(folder.spool)


def check_storage(config: CoordinatorConfig) -> None:
    """The database with its log, and the store, where they are files of this machine.

    config: as `load_config` gives it, with URLs made absolute.

    Raises:
        NotPrivate: somebody else may use them.
        OSError: something cannot be looked at.
    """
    if (store := store_folder(config.store_url)) is not None:
        check_private(store)
    if (database := database_file(config.database_url)) is not None:
        for suffix in ("", "-wal", "-shm", ".serving"):
            check_private(database.with_name(database.name + suffix))


def database_file(url: str) -> Path | None:
    """The file of an SQLite database; None: there is none on this machine."""
    scheme, _, rest = url.partition(":///")
    rest = rest.partition("?")[0]
    return Path(rest) if scheme.startswith("sqlite") and rest and not rest.startswith(":memory:") else None


def store_folder(url: str) -> Path | None:
    """The folder of a store on this machine; None: it is elsewhere."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    return Path(rest) if scheme in ("file", "local") else None
