"""`coordinator init`: a new federation, ready to serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.console import ExitCode, fail, print_json

if TYPE_CHECKING:
    from coordinator.config import CoordinatorConfig

__all__ = ["init"]


def init(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Where everything is kept. Must not exist, or be empty.", envvar="TACIT_DIR"
        ),
    ] = Path("federation"),
    *,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address that members dial; may be given several times, the first goes into join "
            "tokens. Without it only this machine can join.",
            show_default=False,
        ),
    ] = None,
    listen_host: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",  # noqa: S104
    enrolment_port: Annotated[int, typer.Option(min=0, max=65535)] = 7440,
    federation_port: Annotated[int, typer.Option(min=0, max=65535)] = 7441,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535)] = 7442,
    operator: Annotated[str, typer.Option(help="The first operator's name.")] = "operator",
    authority_cert: Annotated[
        Path | None,
        typer.Option(help="Your institution's own CA certificate (PEM) in place of a new one.", show_default=False),
    ] = None,
    authority_key: Annotated[
        Path | None, typer.Option(help="The key of --authority-cert (PEM).", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="Print one JSON object.")
    ] = False,
) -> None:
    """Make a federation: authority, server and operator certificates, configuration, database."""
    from pydantic import ValidationError

    from coordinator.config import CoordinatorConfig
    from tacit.documents import sentence_of
    from tacit.identity import name_is_valid

    if (authority_cert is None) is not (authority_key is None):
        fail("--authority-cert and --authority-key belong together; give both or neither", ExitCode.USAGE)
    if not name_is_valid(operator):
        fail(f"{operator!r} is no operator's name: 1 to 63 of a-z, 0-9, dot, dash, underscore", ExitCode.USAGE)
    try:
        config = CoordinatorConfig(
            advertise=tuple(host or ("localhost", "127.0.0.1")),
            listen_host=listen_host,
            enrolment_port=enrolment_port,
            federation_port=federation_port,
            metrics_port=metrics_port,
        )
    except ValidationError as error:
        fail(sentence_of(error), ExitCode.USAGE)
    federation = _make(folder, config, operator, authority_cert, authority_key)
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
    typer.echo(f"Made the federation {federation.hex()} in {folder}:")
    typer.echo("  coordinator.toml   every setting, with comments")
    typer.echo("  authority/         the root certificate and its key: back it up, show the key to nobody")
    typer.echo("  server/            the coordinator's own certificate; renewed when it serves")
    typer.echo("  operator/          your certificate; copy this folder to the machine you work on")
    typer.echo("  tacit.db, store/   jobs, members, rounds; weights")
    if not host:
        typer.echo("Members on other machines cannot join yet: add names to `advertise` in coordinator.toml.")
    typer.echo("Next:")
    typer.echo(f"  coordinator serve --dir {folder}")
    typer.echo("  coordinator member invite NAME")


def _make(
    folder: Path,
    config: "CoordinatorConfig",
    operator: str,
    authority_cert: Path | None,
    authority_key: Path | None,
) -> bytes:
    """Everything in the folder, or nothing: what a failure leaves half made is taken away again."""
    import shutil

    from coordinator.pki import AuthorityUnusable, LifetimeOutOfRange
    from tacit.documents import DocumentInvalid

    existed = folder.exists()
    try:
        if existed and (not folder.is_dir() or any(entry.name != "lost+found" for entry in folder.iterdir())):
            fail(f"{folder} is not empty; choose another folder, or empty it first", ExitCode.USAGE)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        fail(f"{folder} cannot be made: {error.strerror}; choose another folder", ExitCode.USAGE)
    try:
        return _fill(folder, config, operator, authority_cert, authority_key)
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
    authority_cert: Path | None,
    authority_key: Path | None,
) -> bytes:
    from datetime import UTC, datetime

    from coordinator.config import (
        CoordinatorFolder,
        OperatorConfig,
        load_config,
        operator_toml,
        write_config,
    )
    from coordinator.pki import Authority, key_pem, new_key, pem
    from coordinator.services.credentials import refresh_server_certificate
    from coordinator.storage.database import open_database
    from tacit.console import secret_file
    from tacit.identity import Role

    now = datetime.now(UTC)
    names = CoordinatorFolder(folder)
    if authority_cert is not None and authority_key is not None:
        authority = Authority.load(authority_cert, authority_key, now=now)
    else:
        authority = Authority.create(now=now)
    for path in (names.authority_certificate.parent, names.operator, names.store):
        path.mkdir(mode=0o700)
    authority.store(names.authority_certificate, names.authority_key)
    write_config(names.config_toml, config)
    effective = load_config(folder)
    refresh_server_certificate(names, effective, authority, now)

    key = new_key()
    certificate = authority.issue(key.public_key(), Role.OPERATOR, operator, now=now)
    secret_file(names.operator / "key.pem", key_pem(key))
    (names.operator / "cert.pem").write_bytes(pem(certificate))
    (names.operator / "root.pem").write_bytes(pem(authority.certificate))
    address = OperatorConfig(address=effective.federation_address, federation=authority.federation)
    (names.operator / "operator.toml").write_text(operator_toml(address), encoding="utf-8")

    open_database(effective.database_url).close()
    return authority.federation
