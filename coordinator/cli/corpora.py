"""`coordinator job corpora`: the made-up text that members gave to a job, and where each file comes from.

Nothing is believed that can be checked: a file has the digest that its member signed, the statement is of this job and
member, the signature is by the key of that member's certificate, and an authority of the federation issued that. So who
can write the coordinator's database makes no statement; who has an authority's key can. The folder appears whole, under
its name, or not at all; what was fetched before a connection broke is not fetched again.

    FOLDER/
      MEMBER.jsonl             the file, as the member read it before giving it
      MEMBER.statement.json    what the member says of it, canonical
      MEMBER.statement.sig     its signature over that, and MEMBER.certificate.pem the certificate of the key
      authorities.json         the federation's authorities, one of which issued each certificate; it proves itself
      provenance.json          all of it in one place, with who declined and who is still awaited
"""

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
_PROMISES = {"differentially-private": "as the member's ledger has it", "none": NO_GUARANTEE}


@dataclass(frozen=True, slots=True)
class Listed:
    """A member that took part, and its answer: the statement of its file, verified, if it gave one."""

    member: str
    answer: str  # given, declined or awaited.
    at_ms: int
    size: int
    statement: "CorpusStatement | None"
    signature: bytes
    # DER.
    certificate: bytes

    def json(self) -> dict[str, Any]:
        """For people's programs, and for provenance.json."""
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
        Path | None, typer.Option(help="The folder to make, with every file that was given.", show_default=False)
    ] = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Show which members gave made-up text to a job, and with --out fetch it."""
    where = operator_folder(operator, folder)
    listed = run(download_corpora(where, name, out, quiet=as_json))
    if as_json:
        print_json(_provenance(name, listed, out))
        return
    _show(name, listed, out)


async def download_corpora(where: Path, job: str, out: Path | None, *, quiet: bool) -> _List:
    """Who gave what to the job; with `out` that folder is made, too. where: the operator's folder.

    Raises:
        CommandFailed: no such job, one that orders nothing of its members, a file that is not what its member signed,
            or a folder that is there already.
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
        fail(f"{out} exists; name a new folder, so that nothing of before is taken for a member's", ExitCode.USAGE)


async def _list(stub: "OperatorServiceStub", authorities: "Authorities", job: str) -> _List:
    from tacit.blobs import fetch_blob
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument
    from tacit.v1 import operator_pb2

    answers: list[operator_pb2.MemberCorpus] = []
    status, digest = "", b""
    async for page in stub.ListCorpora(operator_pb2.ListCorporaRequest(job=job), timeout=CALL_SECONDS):
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
        fail("the coordinator names a member twice; look at its database", ExitCode.FAILED)
    return _List(status, digest, document, members, authorities)


def _listed(
    answer: "operator_pb2.MemberCorpus", job: "JobDocument", document: bytes, authorities: "Authorities"
) -> Listed:
    from tacit.identity import name_is_valid

    # It becomes a file's name.
    if not name_is_valid(answer.member):
        fail(f"the coordinator names a member {answer.member!r}, which no member can be called", ExitCode.FAILED)
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
            f"what {answer.member} is said to have given does not hold: {error}; look at the coordinator's database",
            ExitCode.FAILED,
        )


async def fetch_corpora(stub: "OperatorServiceStub", job: str, listed: _List, out: Path, *, quiet: bool) -> None:
    """Makes the folder `out`, which is not there yet.

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
                    # A member that takes its file back is not waited for by those who are fetching it.
                    fail(
                        f"{each.member}'s file is not there: its member may have taken it back since it was listed; "
                        f"run this again ({partial} has what was fetched)",
                        ExitCode.NOT_FOUND,
                    )
            for name, content in files_beside(each.statement, each.signature, each.certificate).items():
                (partial / name).write_bytes(content)
                wanted.add(name)
            wanted.add(file.name)
        (partial / AUTHORITIES).write_bytes(listed.authorities.canonical())
        (partial / "provenance.json").write_bytes(_provenance_bytes(job, listed))
        # What an earlier try fetched of a member that has declined since.
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
    """Of all the files together: the weakest of theirs; None where there is none."""
    if not given:
        return None
    return "none" if any(each.promise == "none" for each in given) else "differentially-private"


def _show(name: str, listed: _List, out: Path | None) -> None:
    from coordinator.cli.shown import moment

    if listed.status != "finished":
        typer.echo(f"Job {name} is {listed.status}: members are asked once it is finished.")
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
        typer.echo(f"\nWrote {out}: {sum(each.rows for each in given)} rows of {len(given)} members.")


def _fingerprint(certificate: bytes) -> str:
    import hashlib

    return hashlib.sha256(certificate).hexdigest()
