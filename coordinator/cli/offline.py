"""`coordinator authority requests | sign | import`: certificates by an authority whose key is on another machine.

The coordinator stores requests (`coordinator.storage.requests`). A file takes them to the machine with the key, where a
person reads each before it is signed, and another file brings the certificates back. Neither file holds a secret.
"""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from coordinator.cli.common import Json, Yes, confirm, table
from coordinator.cli.machine import CoordinatorDir, on_machine
from toolkit.console import ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    from datetime import datetime

    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    from coordinator.certificate_batches import RequestBatch, WaitingRequest
    from tacit.documents import Document
    from tacit.roster_copy import Copy

__all__ = ["import_certificates", "requests", "sign"]

Requests = Annotated[
    Path, typer.Argument(help="The file that `coordinator authority requests` wrote.", show_default=False)
]
Signed = Annotated[Path, typer.Argument(help="The file that `coordinator authority sign` wrote.", show_default=False)]
Out = Annotated[Path, typer.Option("--out", help="The file to write.", show_default=False)]


def requests(out: Out, folder: CoordinatorDir = Path("federation"), as_json: Json = False) -> None:
    """Write the requests that wait for the authority to a file, for `coordinator authority sign`."""
    from coordinator.authority import read_authorities
    from coordinator.certificate_batches import MAX_REQUESTS, RequestBatch, WaitingRequest
    from coordinator.storage.requests import asked

    with on_machine(folder) as machine:
        known = read_authorities(machine.folder)
        waiting = machine.database.run_now(asked)
    batch = RequestBatch(
        federation=known.federation,
        authority=known.newest,
        requests=tuple(
            WaitingRequest(
                member=each.member,
                kind="enrol" if each.token is not None else "renew",
                request=each.request.hex(),
                asked_ms=each.asked_ms,
            )
            for each in waiting[:MAX_REQUESTS]
        ),
    )
    _write(out, batch)
    if as_json:
        print_json({"requests": [each.member for each in batch.requests], "file": str(out)})
    elif not waiting:
        typer.echo("No request waits.")
    else:
        typer.echo(f"{len(batch.requests)} requests are in {out}. On the machine with the key, type:")
        typer.echo(f"  coordinator authority sign {out.name} --cert root.pem --key root.key --out certificates.json")


def sign(
    file: Requests,
    cert: Annotated[Path, typer.Option(help="The authority's certificate (PEM).", show_default=False)],
    key: Annotated[Path, typer.Option(help="The authority's key (PEM).", show_default=False)],
    out: Out,
    *,
    federation: Annotated[
        str | None,
        typer.Option(help="The federation's name, if this is not its first authority.", show_default=False),
    ] = None,
    known: Annotated[
        Path | None,
        typer.Option(
            "--known",
            help="A copy of the roster log (`edge_client members --export`). A renewal must then be of a key in it.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[float, typer.Option(help="How long the certificates are valid.", min=1 / 1440, max=397)] = 14.0,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Show each request, refuse those that do not fit, and sign the others. Runs where the authority's key is."""
    import os
    from datetime import UTC, datetime, timedelta

    from cryptography.hazmat.primitives import serialization

    from coordinator.certificate_batches import CertificateBatch, RequestBatch
    from coordinator.pki import Authority, AuthorityUnusable, LifetimeOutOfRange, authority_passphrase
    from tacit.identity import Role
    from tacit.roster_copy import CopyInvalid, read_copy

    now = datetime.now(UTC)
    batch = _read(RequestBatch, file)
    try:
        name = None if federation is None else bytes.fromhex(federation)
        authority = Authority.load(cert, key, now=now, passphrase=authority_passphrase(os.environ), of=name)
        copy = None if known is None else read_copy(known, authority.federation)
    except (AuthorityUnusable, CopyInvalid) as error:
        fail(str(error), ExitCode.USAGE)
    except ValueError:
        fail("--federation takes 64 hexadecimal digits, as `coordinator authority status` prints them", ExitCode.USAGE)
    if batch.authority != authority.fingerprint or batch.federation != authority.federation:
        fail(
            f"{file} is for the authority {batch.authority.hex()[:16]} of the federation {batch.federation.hex()[:16]}"
            f", and this is {authority.fingerprint.hex()[:16]} of {authority.federation.hex()[:16]}; pass the right "
            "--cert and --key, and --federation after a rotation",
            ExitCode.REFUSED,
        )
    judged = [(each, *_judged(each, batch, copy)) for each in batch.requests]
    rows = [
        [each.member, each.kind, fingerprint.hex()[:16], f"{_moment(each.asked_ms):%Y-%m-%d %H:%M}", said]
        for each, fingerprint, said, _ in judged
    ]
    if not as_json:
        typer.echo(printable(table(["MEMBER", "KIND", "KEY", "ASKED (UTC)", "VERDICT"], rows)))
    fit = [(each, public) for each, _, _, public in judged if public is not None]
    if fit:
        confirm(f"Sign these {len(fit)} certificates? You vouch for each name.", yes)
    try:
        made = [
            authority.issue(public, Role.MEMBER, each.member, timedelta(days=days), now=now) for each, public in fit
        ]
    except LifetimeOutOfRange as error:
        fail(str(error), ExitCode.FAILED)
    certificates = tuple(each.public_bytes(serialization.Encoding.DER).hex() for each in made)
    _write(out, CertificateBatch(federation=batch.federation, certificates=certificates))
    refused = len(judged) - len(fit)
    if as_json:
        signed = [each.member for each, _ in fit]
        print_json({"signed": signed, "refused": [row[0] for row in rows if row[4] != "fits"]})
    else:
        typer.echo(f"{len(fit)} certificates are in {out}; {refused} requests were refused.")
        typer.echo(f"On the coordinator's machine, type `coordinator authority import {out.name}`.")
    if refused:
        raise typer.Exit(int(ExitCode.REFUSED))


def _judged(
    asked: "WaitingRequest", batch: "RequestBatch", known: "Copy | None"
) -> "tuple[bytes, str, RSAPublicKey | None]":
    """Returns the fingerprint of the request's key, a verdict, and the key if the request fits."""
    import hashlib

    from cryptography.hazmat.primitives import serialization

    from coordinator.pki import RequestUnsuitable, certify_request

    form = serialization.PublicFormat.SubjectPublicKeyInfo
    try:
        public = certify_request(bytes.fromhex(asked.request))
    except RequestUnsuitable as error:
        return b"", f"REFUSED: {error}", None
    fingerprint = hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).digest()
    if Counter(each.member for each in batch.requests)[asked.member] > 1:
        return fingerprint, "REFUSED: two requests under this name", None
    if Counter(each.request for each in batch.requests)[asked.request] > 1:
        return fingerprint, "REFUSED: two names with this request", None
    if known is not None:
        names = {each.name for each in known.entries if each.key == fingerprint}
        if names - {asked.member}:
            return fingerprint, f"REFUSED: this key is that of {sorted(names)[0]}", None
        if asked.kind == "renew" and asked.member not in names:
            return fingerprint, "REFUSED: the log has no such key under this name", None
    return fingerprint, "fits", public


def import_certificates(file: Signed, folder: CoordinatorDir = Path("federation"), as_json: Json = False) -> None:
    """Record signed certificates. Members get them when they next ask, and the roster log gets an entry for each."""
    import hashlib
    from datetime import UTC, datetime
    from functools import partial

    from coordinator.authority import read_authorities
    from coordinator.certificate_batches import CertificateBatch
    from coordinator.storage.requests import AnswerUnfit, answer
    from tacit.identity import CertificateInvalid, Role, verify_certificate

    now = datetime.now(UTC)
    batch = _read(CertificateBatch, file)
    done, refused = list[str](), list[str]()
    with on_machine(folder) as machine:
        known = read_authorities(machine.folder)
        root = known.certificates[0]
        for text in batch.certificates:
            der = bytes.fromhex(text)
            try:
                found = verify_certificate(der, root, federation=known.federation, role=Role.MEMBER, now=now)
                member, key = found.identity.name, hashlib.sha256(found.public).digest()
                chain = (der, known.roots[-1])
                record = partial(answer, member=member, chain=chain, key=key, expires=found.expires, now=now)
                machine.database.run_now(record)
            except (CertificateInvalid, AnswerUnfit) as error:
                refused.append(str(error))
            else:
                done.append(member)
    if as_json:
        print_json({"imported": done, "refused": refused})
    else:
        typer.echo(printable(f"{len(done)} certificates were recorded: {', '.join(done) or 'none'}."))
        for each in refused:
            typer.echo(printable(f"refused: {each}"), err=True)
    if refused:
        raise typer.Exit(int(ExitCode.REFUSED))


def _moment(ms: int) -> "datetime":
    from datetime import UTC, datetime

    return datetime.fromtimestamp(min(ms, 2**41) / 1000, UTC)


_T = TypeVar("_T", bound="Document")


def _read(kind: type[_T], path: Path) -> _T:
    from tacit.documents import DocumentInvalid

    try:
        return kind.from_file(path)
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}; check the path", ExitCode.USAGE)
    except DocumentInvalid as error:
        fail(f"{error}; pass the file that the command before this one wrote", ExitCode.USAGE)


def _write(path: Path, document: "Document") -> None:
    from toolkit.durable import durable_file

    try:
        durable_file(path, document.canonical() + b"\n")
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}; check the path and free space", ExitCode.FAILED)
