"""`coordinator migrate`: brings the database to this version's schema while no coordinator serves."""

from pathlib import Path

import typer

from coordinator.cli.common import Json
from coordinator.cli.machine import CoordinatorDir, as_owner
from toolkit.console import ExitCode, fail, print_json

__all__ = ["migrate"]


def migrate(folder: CoordinatorDir = Path("federation"), as_json: Json = False) -> None:
    """Bring the database to this version's schema, and end. `coordinator serve` does the same at its start.

    Refuses while a coordinator serves from the database. Make a backup first.
    """
    from coordinator.closed import check_folder, check_storage
    from coordinator.config import CoordinatorFolder, load_config
    from coordinator.storage import mark, snapshot
    from coordinator.storage.database import open_database
    from coordinator.storage.errors import DatabaseInUse, StorageError
    from tacit.documents import DocumentInvalid
    from toolkit.private_files import NotPrivate

    as_owner(folder)
    names = CoordinatorFolder(folder)
    try:
        config = load_config(folder)
        check_folder(names)
        check_storage(config)
        mark.check(names.database_mark, config.database_url)
        open_database(config.database_url, sole=True).close()
        with snapshot.of_database(config.database_url) as connection:
            revision = snapshot.revision_of(connection)
    except (DocumentInvalid, NotPrivate) as error:
        fail(str(error), ExitCode.USAGE)
    except DatabaseInUse as error:
        fail(error.sentence, ExitCode.REFUSED)
    except StorageError as error:
        fail(error.sentence, ExitCode.FAILED)
    if as_json:
        print_json({"revision": revision})
    else:
        typer.echo(f"The database has schema {revision}.")
