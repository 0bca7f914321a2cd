"""`coordinator init`: creates a new federation, ready to serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.machine import as_owner
from toolkit.console import ExitCode, fail, print_json

if TYPE_CHECKING:
    from coordinator.config import CoordinatorConfig

__all__ = ["init"]


def init(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The coordinator's new folder. Must not exist, or be empty.", envvar="TACIT_DIR"
        ),
    ] = Path("federation"),
    *,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address that members dial. Repeatable; join tokens carry the first. Without it, only "
            "members on this machine can join.",
            show_default=False,
        ),
    ] = None,
    listen_host: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",  # noqa: S104
    enrolment_port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port on which members enrol; 0: any free one.")
    ] = 7440,
    federation_port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port for members, operators and health; 0: any free one.")
    ] = 7441,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port of the metrics, on loopback; 0: any free one.")
    ] = 7442,
    database_url: Annotated[
        str | None,
        typer.Option(
            help="A PostgreSQL URL without its password, which belongs in ~/.pgpass. It goes into coordinator.toml, so "
            "every command on this machine finds the same database. Default: SQLite in DIR.",
            show_default=False,
        ),
    ] = None,
    operator: Annotated[str, typer.Option(help="The name of the first operator, an administrator.")] = "operator",
    authority_cert: Annotated[
        Path | None,
        typer.Option(help="Use your institution's own CA certificate (PEM), not a new one.", show_default=False),
    ] = None,
    authority_key: Annotated[
        Path | None, typer.Option(help="The key of --authority-cert (PEM).", show_default=False)
    ] = None,
    authority_passphrase_file: Annotated[
        Path | None,
        typer.Option(
            help="A file whose first line is the passphrase of the authority's key, here and in --authority-key. "
            "Otherwise TACIT_AUTHORITY_PASSPHRASE_FILE or TACIT_AUTHORITY_PASSPHRASE. Without any, the key is not "
            "encrypted.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="Print one JSON object.")
    ] = False,
) -> None:
    """Create a federation: authority, server and operator certificates, configuration, database."""
    import os

    from pydantic import ValidationError

    from coordinator.config import CoordinatorConfig, load_config
    from coordinator.storage.mark import place
    from tacit.documents import sentence_of
    from tacit.identity import name_is_valid

    if (authority_cert is None) is not (authority_key is None):
        fail("--authority-cert and --authority-key belong together; pass both or neither", ExitCode.USAGE)
    if not name_is_valid(operator):
        fail(
            f"{operator!r} is not a valid operator name; use 1 to 63 of a-z, 0-9, dot, dash, underscore", ExitCode.USAGE
        )
    try:
        database = CoordinatorConfig.model_fields["database_url"].default
        config = CoordinatorConfig(
            database_url=database if database_url is None else _without_password(database_url),
            advertise=tuple(host or ("localhost", "127.0.0.1")),
            listen_host=listen_host,
            enrolment_port=enrolment_port,
            federation_port=federation_port,
            metrics_port=metrics_port,
        )
    except ValidationError as error:
        fail(sentence_of(error), ExitCode.USAGE)
    own = (authority_cert, authority_key) if authority_cert is not None and authority_key is not None else None
    federation = _make(folder, config, operator, own, authority_passphrase_file)
    if as_json:
        print_json(
            {
                "dir": str(folder),
                "federation": federation.hex(),
                "operator": str(folder / "operator"),
                "enrolment_address": config.enrolment_address,
                "federation_address": config.federation_address,
            }
        )
        return
    typer.echo(f"Created the federation {federation.hex()} in {folder}:")
    typer.echo("  coordinator.toml   every setting, with comments")
    typer.echo("  authority/         the root certificate and its key: back it up, and show the key to nobody")
    typer.echo("  server/            the coordinator's own certificate, which `coordinator serve` renews")
    typer.echo("  operator/          your certificate; copy this folder to the machine you work on")
    effective = load_config(folder)
    if effective.database_url == load_config(folder, {}).database_url == f"sqlite:///{folder.resolve() / 'tacit.db'}":
        typer.echo("  tacit.db, store/   jobs, members, rounds; weights")
    else:
        typer.echo("  store/             weights")
        typer.echo(f"Jobs, members and rounds are in {place(effective.database_url)}.")
    if os.environ.get("TACIT_DATABASE_URL"):
        typer.echo("TACIT_DATABASE_URL names it: set it for the server, too, and for every command on this machine.")
    if not host:
        typer.echo("Members on other machines cannot join yet: add names to `advertise` in coordinator.toml.")
    typer.echo("Next:")
    typer.echo(f"  coordinator serve --dir {folder}")
    typer.echo("  coordinator member invite NAME")


def _without_password(url: str) -> str:
    """Returns the URL if it holds no password, so that it can be shown and stored.

    Raises:
        CommandFailed: it is not a database URL, or it holds a password.
    """
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        fail("--database-url is not a database URL; write postgresql+psycopg://USER@HOST/NAME", ExitCode.USAGE)
    if parsed.password is not None or any("password" in key for key in parsed.query):
        fail("--database-url holds a password; put it in ~/.pgpass (PGPASSFILE) instead", ExitCode.USAGE)
    return url


def _make(
    folder: Path,
    config: "CoordinatorConfig",
    operator: str,
    own: tuple[Path, Path] | None,
    passphrase_file: Path | None,
) -> bytes:
    """Fills the folder completely or, after a failure, removes everything again. Returns the federation's name."""
    import shutil

    from coordinator.pki import AuthorityUnusable, LifetimeOutOfRange
    from tacit.documents import DocumentInvalid

    existed = folder.exists()
    as_owner(folder)
    try:
        if existed and (not folder.is_dir() or any(entry.name != "lost+found" for entry in folder.iterdir())):
            fail(f"{folder} is not empty; choose another folder, or empty it first", ExitCode.USAGE)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        fail(f"{folder} cannot be created: {error.strerror}; choose another folder", ExitCode.USAGE)
    try:
        return _fill(folder, config, operator, own, passphrase_file)
    except BaseException as error:
        for entry in folder.iterdir():
            if entry.name != "lost+found":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not existed:
            folder.rmdir()
        if isinstance(error, AuthorityUnusable | LifetimeOutOfRange | DocumentInvalid):
            fail(str(error), ExitCode.USAGE)
        raise


def _fill(
    folder: Path,
    config: "CoordinatorConfig",
    operator: str,
    own: tuple[Path, Path] | None,
    passphrase_file: Path | None,
) -> bytes:
    import os
    from contextlib import closing
    from datetime import UTC, datetime

    from coordinator.authority import AuthorityBook
    from coordinator.config import CoordinatorFolder, load_config, write_config
    from coordinator.operators import issue_operator
    from coordinator.pki import Authority, authority_passphrase
    from coordinator.services.credentials import refresh_server_certificate
    from coordinator.storage import mark, records
    from coordinator.storage.database import open_database
    from tacit.identity import Role

    now = datetime.now(UTC)
    names = CoordinatorFolder(folder)
    passphrase = authority_passphrase(os.environ, passphrase_file)
    authority = Authority.load(*own, now=now, passphrase=passphrase) if own is not None else Authority.create(now=now)
    for path in (names.authority_certificate.parent, names.operator, names.store):
        path.mkdir(mode=0o700)
    authority.store(names.authority_certificate, names.authority_key, passphrase=passphrase)
    write_config(names.config_toml, config)
    effective = load_config(folder)
    refresh_server_certificate(names, effective, authority, now)
    with closing(open_database(effective.database_url)) as database:
        book = AuthorityBook.of(authority)
        issue_operator(
            names.operator, operator, Role.ADMINISTRATOR, effective, book, database, now=now, by="coordinator init"
        )
        mark.keep(names.database_mark, effective.database_url, database.run_now(records.head))
    return authority.federation
