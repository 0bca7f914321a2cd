"""`coordinator passport ...`: makes a job's passport, verifies one offline, and shows it as a page.

Making one reads the coordinator's whole journal, verifies it, and signs what follows from it with the operator's key.
Verifying and showing need no coordinator. `tacit.passport` says what a passport is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from coordinator.cli.audit import read_entries
from coordinator.cli.common import (
    CALL_SECONDS,
    Dir,
    Json,
    Operator,
    fetch_authorities,
    operator_channel,
    operator_folder,
    run,
    table,
)
from coordinator.cli.measure import measured_facts
from coordinator.cli.member_audits import Audits
from toolkit.console import ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    import grpc.aio
    from cryptography import x509

    from tacit.passport import ExportFacts, Passport, VersionFacts
    from tacit.passport_proof import Verified

__all__ = ["Group", "app", "gather_passport", "write_passport"]


class Group(TyperGroup):
    """Lets `coordinator passport JOB` stand for `coordinator passport make JOB`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """For click."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(no_args_is_help=True, cls=Group)

File = Annotated[Path, typer.Argument(help="The passport.", show_default=False)]
Federation = Annotated[
    str | None,
    typer.Option(
        help="The federation's name, 64 hexadecimal digits, as a member or the operator told you.", show_default=False
    ),
]
Authority = Annotated[
    Path | None,
    typer.Option(
        help="In place of --federation: the certificate of its first authority, PEM (root.pem in a member's or an "
        "operator's folder).",
        show_default=False,
    ),
]


@app.command()
def make(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Default: JOB.passport.json.", show_default=False)
    ] = None,
    export: Annotated[
        list[Path] | None,
        typer.Option(help="A folder that `coordinator export` wrote; its files go in. Repeatable.", show_default=False),
    ] = None,
    audit: Audits = None,
    measurement: Annotated[
        list[str] | None,
        typer.Option(
            help="The name of a measurement of one of the job's versions, which goes in. Repeatable.",
            show_default=False,
        ),
    ] = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Write a job's passport: where its versions come from, signed with the operator's key."""
    where = operator_folder(operator, folder)
    target = out or Path(f"{job}.passport.json")
    _refuse_existing(target)

    async def work() -> "Passport":
        async with operator_channel(where) as channel:
            return await gather_passport(
                channel, where, job, export or (), audits=audit or (), measurements=measurement or ()
            )

    passport = run(work())
    write_passport(target, passport)
    if as_json:
        from coordinator.cli.passport_page import summary

        print_json({"passport": str(target), **summary(passport)})
        return
    typer.echo(f"Wrote {target}: {len(passport.versions)} versions, {len(passport.exports)} exported folders.")
    typer.echo("Anybody verifies it with `coordinator passport verify FILE --federation NAME`.")


@app.command()
def verify(
    file: File,
    federation: Federation = None,
    authority: Authority = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Also compare the files of this exported folder with the passport.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a passport offline, against the federation that you name.

    It proves that an operator of that federation signed it and that nothing was changed since. It does not prove what
    the coordinator recorded; members' own receipts can confirm the sums.
    """
    named = _federation(federation, authority)
    verdict = _verified(file, named)
    findings = [*verdict.findings]
    if export is not None and verdict.passport is not None and not findings:
        findings += _compare(export, verdict.passport)
    if findings:
        if as_json:
            listed = [{"part": each.part, "finding": each.sentence} for each in findings]
            print_json({"passport": str(file), "valid": False, "findings": listed})
            raise typer.Exit(int(ExitCode.FAILED))
        lines = "; ".join(f"{each.part}: {each.sentence}" for each in findings)
        fail(f"{file} does not hold. {lines}", ExitCode.FAILED)
    _show(file, verdict, export, as_json)


@app.command()
def page(
    file: File,
    out: Annotated[
        Path | None, typer.Option(help="The page to write. Default: FILE with .html.", show_default=False)
    ] = None,
    federation: Federation = None,
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """Write a passport as a page to read: HTML without scripts. It is verified first."""
    from coordinator.cli.passport_page import page_of

    named = _federation(federation, authority)
    verdict = _verified(file, named)
    if verdict.findings or verdict.passport is None or verdict.seal is None:
        lines = "; ".join(f"{each.part}: {each.sentence}" for each in verdict.findings)
        fail(f"{file} does not hold, so no page was made. {lines}", ExitCode.FAILED)
    target = out or file.with_suffix(".html")
    _refuse_existing(target)
    _write(target, page_of(verdict.passport, verdict.seal).encode())
    if as_json:
        print_json({"page": str(target), "passport": str(file)})
    else:
        typer.echo(f"Wrote {target}.")


# ---- making ------------------------------------------------------------------------------------------------------


def _signer(certificate: "x509.Certificate") -> str:
    """Returns the operator's name. Raises CommandFailed if no passport with its signature would hold."""
    from tacit.identity import SEALING_ROLES, Identity

    signer = Identity.of(certificate)
    if signer.role not in SEALING_ROLES:
        fail(
            f"operator {signer.name} has the role {signer.role}, and a passport holds only with the signature of an "
            "operator or administrator; use such an operator's folder (--operator)",
            ExitCode.REFUSED,
        )
    return signer.name


async def gather_passport(
    channel: "grpc.aio.Channel",
    where: Path,
    job: str,
    exports: Sequence[Path],
    version: bytes | None = None,
    *,
    averaged: tuple[int, ...] = (),
    audits: Sequence[Path] = (),
    measurements: Sequence[str] = (),
) -> "Passport":
    """Reads the journal, and signs a job's passport.

    Args:
        channel: the connection to the coordinator.
        where: the operator's folder.
        job: the job's name.
        exports: exported folders whose files go in.
        version: the digest that they were made from, for folders that do not say so.
        averaged: the numbers of the versions whose average they are, for such folders.
        audits: files of members' audits that go in.
        measurements: names of measurements that go in.

    Raises:
        CommandFailed: there is no such job, the journal is not intact, or a folder is not one of its exports.
    """
    import time

    from cryptography.hazmat.primitives.asymmetric import rsa
    from pydantic import ValidationError

    from coordinator.cli.member_audits import facts_of, read_audits
    from coordinator.cli.passport_facts import ExportUnknown, JobHistory, export_facts
    from coordinator.config import load_operator
    from coordinator.storage.chain import ChainBroken
    from tacit import __version__
    from tacit.blobs import fetch_blob
    from tacit.bundle import BundleInvalid
    from tacit.certificates import certificate_from_pem
    from tacit.documents import DocumentInvalid, sentence_of
    from tacit.identity import own_key
    from tacit.job import JobDocument
    from tacit.passport import MAX_EXPORTS
    from tacit.passport_proof import make_passport
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

    if len(exports) > MAX_EXPORTS:
        fail(f"a passport names at most {MAX_EXPORTS} exported folders; leave some out", ExitCode.USAGE)
    identity = load_operator(where)
    certificate = certificate_from_pem(identity.certificate_pem)
    name = _signer(certificate)
    stub = OperatorServiceStub(channel)
    detail = await stub.GetJob(operator_pb2.GetJobRequest(name=job), timeout=CALL_SECONDS)
    data, history = bytearray(), JobHistory(job)
    await fetch_blob(stub.FetchBlob, detail.job.document, data)
    try:
        document = JobDocument.from_json(bytes(data), what="the job document")
        await read_entries(stub, history.take)
        facts, versions = history.facts(document, detail.job.document)
        record = history.record(time.time_ns() // 1_000_000, __version__)
        folders: list[ExportFacts] = [
            export_facts(each, versions, version, averaged, document.average) for each in exports
        ]
        key = own_key(identity.key_pem)
    except ChainBroken as error:
        fail(f"the journal is not intact, so no passport is made from it: {error}", ExitCode.FAILED)
    except ExportUnknown as error:
        fail(str(error), ExitCode.USAGE)
    except BundleInvalid as error:
        fail(str(error), ExitCode.NOT_FOUND)
    except ValidationError as error:
        fail(f"the journal tells what no passport holds: {sentence_of(error)}", ExitCode.FAILED)
    except DocumentInvalid as error:
        fail(f"{error}; the coordinator may be newer than this software", ExitCode.FAILED)
    except (ValueError, KeyError, TypeError) as error:
        fail(f"no passport can be made of job {job}: {error}", ExitCode.FAILED)
    if not isinstance(key, rsa.RSAPrivateKey):
        fail(f"{where / 'key.pem'} is not an RSA key; issue the operator's folder again", ExitCode.USAGE)
    return make_passport(
        key=key,
        certificate=certificate,
        operator=name,
        authorities=(authorities := await fetch_authorities(channel, where)),
        document=bytes(data),
        job=facts,
        versions=versions,
        exports=folders,
        record=record,
        withdrawals=history.withdrawals(),
        audits=facts_of(read_audits(audits, authorities, detail.job.document)),
        measurements=await measured_facts(stub, measurements, detail),
        successors=history.successors(),
    )


def write_passport(path: Path, passport: "Passport") -> None:
    """Writes the file, whole or not at all. Raises: CommandFailed: it cannot be written."""
    _write(path, passport.to_bytes())


def _refuse_existing(path: Path) -> None:
    """Refuses to write over a file, which may be the passport itself or part of an exported folder."""
    if path.exists():
        fail(f"{path} exists already; name another file with --out, or remove it", ExitCode.USAGE)


def _write(path: Path, content: bytes) -> None:
    from toolkit.durable import durable_file

    try:
        durable_file(path, content)
        # It is made to be handed on.
        path.chmod(0o644)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}; make room or name another place", ExitCode.FAILED)


# ---- verifying ---------------------------------------------------------------------------------------------------


def _federation(name: str | None, authority: Path | None) -> bytes:
    """The federation that the verifier trusts."""
    from tacit.certificates import certificate_from_pem
    from tacit.identity import federation_of

    if (name is None) == (authority is None):
        fail(
            "name the federation that you trust: --federation NAME or --authority root.pem; a passport alone proves "
            "only that somebody signed it",
            ExitCode.USAGE,
        )
    if authority is not None:
        try:
            return federation_of(certificate_from_pem(authority.read_bytes()))
        except OSError as error:
            fail(f"{authority} cannot be read: {error.strerror}; check the path", ExitCode.USAGE)
        except ValueError:
            fail(f"{authority} holds no certificate in PEM; name the root.pem of the federation", ExitCode.USAGE)
    try:
        digest = bytes.fromhex(str(name))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        fail(f"{name!r} is not a federation's name, which has 64 hexadecimal digits", ExitCode.USAGE)
    return digest


def _verified(file: Path, federation: bytes) -> "Verified":
    from tacit.passport import MAX_PASSPORT_BYTES, NotAPassport
    from tacit.passport_proof import verify_passport
    from tacit.reading import DocumentInvalid, read_bytes

    if file.exists() and not file.is_file():
        fail(
            f"{file} is not a file that can be read as a passport; name one that `coordinator passport` wrote",
            ExitCode.USAGE,
        )
    try:
        return verify_passport(read_bytes(file, MAX_PASSPORT_BYTES, str(file)), federation)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}; check the path", ExitCode.USAGE)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    except NotAPassport as error:
        fail(f"{file}: {error}; `coordinator passport JOB` makes one", ExitCode.USAGE)


def _compare(folder: Path, passport: "Passport") -> list[Any]:
    """Compares an exported folder's files with the passport."""
    import hashlib
    import stat

    from tacit.bundle import INDEX
    from tacit.passport_proof import Finding

    try:
        index = hashlib.sha256((folder / INDEX).read_bytes()).digest()
        found = next((each for each in passport.exports if each.index == index), None)
        if found is None:
            return [Finding(str(folder / INDEX), "no exported folder of the passport has this file")]
        # Libraries read some files by their names alone, so a file more can change a model.
        findings = [
            Finding(str(path), "it is not among the files that the passport names; take it away")
            for path in sorted(folder.rglob("*"))
            if (path.is_symlink() or not path.is_dir())
            and path.relative_to(folder).as_posix() not in {*found.files, INDEX, "passport.json"}
        ]
        for name, listed in found.files.items():
            if not stat.S_ISREG((folder / name).lstat().st_mode):
                findings.append(Finding(str(folder / name), "it is no regular file"))
                continue
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").digest() != listed.sha256:
                    findings.append(Finding(str(folder / name), "it is not the file that the passport names"))
        return findings
    except OSError as error:
        fail(f"{error.filename or folder} cannot be read: {error.strerror}; check the path", ExitCode.NOT_FOUND)


def _show(file: Path, verdict: "Verified", export: Path | None, as_json: bool) -> None:
    from coordinator.cli.passport_page import (
        audit_text,
        measurement_lines,
        successor_text,
        summary,
        tuning_of,
        withdrawal_text,
    )
    from coordinator.cli.shown import moment
    from tacit.passport import JobFacts

    passport, seal = verdict.passport, verdict.seal
    if passport is None or seal is None:
        raise RuntimeError("a passport without findings was read")
    if as_json:
        print_json({"passport": str(file), "valid": True, **summary(passport)})
        return
    versions = passport.versions
    typer.echo(
        f"{file} holds: operator {printable(seal.operator)} of the federation {seal.federation.hex()} signed it at "
        f"{moment(seal.made_ms)} UTC, and nothing in it was changed."
    )
    typer.echo(f"Job {printable(seal.job)}, document {_hash_of(passport)}:\n")
    headings = ["VERSION", "SHA-256", "COHORT", "IN SUM", "MECHANISM", "SPENT", "ACCURACY", "ESTIMATE"]
    typer.echo(table(headings, _rows(versions)))
    if (tuned := tuning_of(JobFacts.from_json(passport.section("job"), what="the section job"))) is not None:
        typer.echo(f"\n{tuned}")
    for each in passport.withdrawals:
        typer.echo(f"\n{withdrawal_text(each)}")
    for audit in passport.audits:
        typer.echo(f"\n{audit_text(audit)}")
    for measured in passport.measurements:
        typer.echo(printable("\n" + "\n".join(measurement_lines(measured))))
    for follower in passport.successors:
        typer.echo(printable(f"\n{successor_text(follower)}"))
    if export is not None:
        typer.echo(f"\nThe files of {export} are the ones that the passport names.")
    typer.echo("\nThe operator says this of what the coordinator recorded; `docs/passport.md` says what that proves.")


def _hash_of(passport: "Passport") -> str:
    """SHA-256 of the job document, in hexadecimal."""
    import hashlib

    return hashlib.sha256(passport.section("document")).hexdigest()


def _rows(versions: "Sequence[VersionFacts]") -> list[list[str]]:
    from coordinator.cli.passport_page import accuracy_of, estimate_of, spend_of

    return [
        [
            str(each.number),
            each.version.hex()[:16],
            "-" if each.cohort is None else str(each.cohort),
            "-" if each.summed is None else str(each.summed),
            printable(each.mechanism),
            spend_of(each),
            accuracy_of(each),
            estimate_of(each),
        ]
        for each in versions
    ]
