"""`coordinator job corpora`: shows and fetches the synthetic text that members released for a job, with its provenance.

The command verifies everything that can be verified: a file has the digest that its member signed, the statement is
about this job and member, the key of that member's certificate signed it, and an authority of the federation issued the
certificate. So write access to the coordinator's database is not enough to forge a statement; an authority's key is.
The folder appears complete, under its name, or not at all. A fetch that broke off continues where it stopped.

    FOLDER/
      MEMBER.jsonl             the file, as the member's owner read it before releasing it
      MEMBER.statement.json    the member's statement about it, canonical
      MEMBER.statement.sig     the signature over the statement; MEMBER.certificate.pem has the key's certificate
      authorities.json         the federation's authorities, one of which issued each certificate; it proves itself
      provenance.json          all of this in one place, with who declined and who has yet to answer
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.common import (
    CALL_SECONDS,
    Dir,
    Json,
    Operator,
    fetch_authorities,
    operator_channel,
    operator_folder,
    progress_bar,
    run,
    table,
)
from toolkit.console import ExitCode, fail, print_json

if TYPE_CHECKING:
    from tacit.authorities import Authorities
    from tacit.corpus import CorpusStatement
    from tacit.job import JobDocument
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["Listed", "corpora", "download_corpora", "fetch_corpora"]

NO_GUARANTEE = "no differential privacy guarantee"
_PROMISES = {"differentially-private": "differentially private, by the member's ledger", "none": NO_GUARANTEE}


@dataclass(frozen=True, slots=True)
class Listed:
    """A member that took part, and its answer: the verified statement about its file, if it released one."""

    member: str
    answer: str  # given, declined or awaited.
    at_ms: int
    size: int
    statement: "CorpusStatement | None"
    signature: bytes
    # DER.
    certificate: bytes

    def json(self) -> dict[str, Any]:
        """Returns the entry for `--json` and for provenance.json."""
        said = self.statement
        return {
            "member": self.member,
            "answer": self.answer,
            "at_ms": self.at_ms or None,
            "corpus": None if said is None else said.corpus.hex(),
            "bytes": None if said is None else said.bytes,
            "rows": None if said is None else said.rows,
            "labels": None if said is None else {each.label: each.rows for each in said.labels},
            "promise": None if said is None else said.promise,
            "mechanism": None if said is None else said.mechanism,
            "variant": None if said is None else said.variant,
            "histogram": None if said is None else said.histogram,
            "round": None if said is None else said.round,
            "version": None if said is None else said.version.hex(),
            "certificate": None if said is None else _fingerprint(self.certificate),
        }


@dataclass(frozen=True, slots=True)
class _List:
    status: str
    document: bytes
    job: "JobDocument"
    members: tuple[Listed, ...]
    authorities: "Authorities"


def corpora(
    name: Annotated[str, typer.Argument(help="The job's name.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder to create, with every released file.", show_default=False)
    ] = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Show which members released synthetic text for a job; --out also fetches it."""
    where = operator_folder(operator, folder)
    listed = run(download_corpora(where, name, out, quiet=as_json))
    if as_json:
        print_json(_provenance(name, listed, out))
        return
    _show(name, listed, out)


async def download_corpora(where: Path, job: str, out: Path | None, *, quiet: bool) -> _List:
    """Lists the members' answers for a job, and fetches the files into `out` if given.

    Args:
        where: The operator's folder.
        job: The job's name.
        out: The folder to create, or None to list only.
        quiet: Whether to hide the progress bar.

    Raises:
        CommandFailed: there is no such job, it orders nothing from its members, a file is not what its member signed,
            or `out` exists already.
    """
    if out is not None:
        _check_new(out)
    async with operator_channel(where) as channel:
        from tacit.v1.operator_pb2_grpc import OperatorServiceStub

        stub = OperatorServiceStub(channel)
        listed = await _list(stub, await fetch_authorities(channel, where), job)
        if out is not None:
            await fetch_corpora(stub, job, listed, out, quiet=quiet)
        return listed


def _check_new(out: Path) -> None:
    if out.exists():
        fail(f"{out} exists; name a new folder, so that no old file passes for a member's", ExitCode.USAGE)


async def _list(stub: "OperatorServiceStub", authorities: "Authorities", job: str) -> _List:
    from tacit.blobs import fetch_blob, moving
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument
    from tacit.v1 import operator_pb2

    answers: list[operator_pb2.MemberCorpus] = []
    status, digest = "", b""
    call = stub.ListCorpora(operator_pb2.ListCorporaRequest(job=job))
    async with contextlib.aclosing(moving(call, CALL_SECONDS)) as pages:
        async for page in pages:
            status = operator_pb2.JobStatus.Name(page.status).removeprefix("JOB_STATUS_").lower()
            digest = page.document
            answers += page.corpora
    data = bytearray()
    await fetch_blob(stub.FetchBlob, digest, data)
    try:
        document = JobDocument.from_json(bytes(data), what="the job document")
    except DocumentInvalid as error:
        fail(f"{error}; the coordinator may be newer than this software", ExitCode.FAILED)
    members = tuple(_listed(answer, document, digest, authorities) for answer in answers)
    if len({each.member for each in members}) != len(members):
        fail("the coordinator names a member twice; check its database", ExitCode.FAILED)
    return _List(status, digest, document, members, authorities)


def _listed(
    answer: "operator_pb2.MemberCorpus", job: "JobDocument", document: bytes, authorities: "Authorities"
) -> Listed:
    from tacit.identity import name_is_valid

    # The member's name becomes a file name.
    if not name_is_valid(answer.member):
        fail(f"the coordinator sent {answer.member!r}, which is not a valid member name", ExitCode.FAILED)
    if not answer.digest:
        said = "declined" if answer.declined else "awaited"
        return Listed(answer.member, said, answer.at_ms, 0, None, b"", b"")
    statement = _verified(answer, job, document, authorities)
    return Listed(
        answer.member, "given", answer.at_ms, statement.bytes, statement, answer.signature, answer.certificate
    )


def _verified(
    answer: "operator_pb2.MemberCorpus", job: "JobDocument", document: bytes, authorities: "Authorities"
) -> "CorpusStatement":
    from coordinator.corpus_rules import CorpusInvalid, check_statement
    from tacit.corpus_proof import verify_member
    from tacit.identity import CertificateInvalid

    try:
        signer = verify_member(answer.certificate, authorities, answer.member)
        return check_statement(
            answer.statement,
            answer.signature,
            federation=authorities.federation,
            job=job,
            document=document,
            member=answer.member,
            key=signer.key,
            corpus=answer.digest,
            size=answer.size,
        )
    except (CorpusInvalid, CertificateInvalid) as error:
        fail(
            f"the corpus attributed to {answer.member} does not verify: {error}; check the coordinator's database",
            ExitCode.FAILED,
        )


async def fetch_corpora(stub: "OperatorServiceStub", job: str, listed: _List, out: Path, *, quiet: bool) -> None:
    """Creates the folder `out`, which must not exist.

    Raises:
        CommandFailed: a file is not what its member signed, or the folder cannot be written.
    """
    from tacit.blobs import BlobNotThere, fetch_blob
    from tacit.corpus_proof import AUTHORITIES, files_beside

    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = {"provenance.json", AUTHORITIES}
        for each in listed.members:
            if each.statement is None:
                continue
            file = partial / f"{each.member}.jsonl"
            with progress_bar(f"fetching {each.member}'s file", quiet=quiet) as progress:
                try:
                    await fetch_blob(
                        stub.FetchBlob, each.statement.corpus, file, limit=each.statement.bytes, progress=progress
                    )
                except BlobNotThere:
                    # A member may withdraw its file while it is being fetched.
                    fail(
                        f"{each.member}'s file is gone; the member may have withdrawn it just now. Run this again: "
                        f"{partial} keeps what was fetched",
                        ExitCode.NOT_FOUND,
                    )
            for name, content in files_beside(each.statement, each.signature, each.certificate).items():
                (partial / name).write_bytes(content)
                wanted.add(name)
            wanted.add(file.name)
        (partial / AUTHORITIES).write_bytes(listed.authorities.canonical())
        (partial / "provenance.json").write_bytes(_provenance_bytes(job, listed))
        # Remove what an earlier run fetched from a member that has declined since.
        for path in partial.iterdir():
            if path.name not in wanted:
                path.unlink()
        os.replace(partial, out)
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}; check free space and permissions", ExitCode.FAILED)


def _provenance(job: str, listed: _List, out: Path | None = None) -> dict[str, Any]:
    given = [each.statement for each in listed.members if each.statement is not None]
    more = {} if out is None else {"out": str(out)}
    return {
        "schema": 1,
        "job": job,
        "status": listed.status,
        "job_document": listed.document.hex(),
        "promise": _promise(given),
        "members": [each.json() for each in listed.members],
        **more,
    }


def _provenance_bytes(job: str, listed: _List) -> bytes:
    import json

    return json.dumps(_provenance(job, listed), indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _promise(given: "Sequence[CorpusStatement]") -> str | None:
    """Returns the weakest promise among the files, which is the promise of all together; None without files."""
    if not given:
        return None
    return "none" if any(each.promise == "none" for each in given) else "differentially-private"


def _show(name: str, listed: _List, out: Path | None) -> None:
    from coordinator.cli.shown import moment

    if listed.status != "finished":
        typer.echo(f"Job {name} is {listed.status}. The coordinator asks its members once it is finished.")
    if not listed.members:
        typer.echo("No member has taken part yet.")
        return
    rows = [
        [
            each.member,
            each.answer,
            moment(each.at_ms),
            "-" if each.statement is None else str(each.statement.rows),
            "-"
            if each.statement is None
            else ", ".join(f"{label.label} {label.rows}" for label in each.statement.labels),
            "-" if each.statement is None else _PROMISES[each.statement.promise],
        ]
        for each in listed.members
    ]
    typer.echo(table(["MEMBER", "ANSWER", "AT", "ROWS", "LABELS", "PROMISE"], rows))
    given = [each.statement for each in listed.members if each.statement is not None]
    if _promise(given) == "none":
        typer.echo(f"\nAll together: {NO_GUARANTEE}.")
    if out is not None:
        typer.echo(f"\nWrote {out}: {sum(each.rows for each in given)} rows from {len(given)} members.")


def _fingerprint(certificate: bytes) -> str:
    import hashlib

    return hashlib.sha256(certificate).hexdigest()
