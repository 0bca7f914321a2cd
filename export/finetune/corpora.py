"""Reads and verifies a folder of corpora, as `coordinator job corpora JOB --out FOLDER` writes it.

The folder holds MEMBER.jsonl and MEMBER.statement.json with signature and certificate for each member, and the list of
the federation's authorities.

Guarantees: each file agrees with its member's statement in bytes, rows and labels; all are of one job of one
federation; each statement is signed by its member, under an authority of that federation. If this cannot be shown
because a file is missing, the corpus is accepted only on request, and then promises nothing.

Left to others: which federation it is. Anyone who can write the folder can fill it under a federation of its own, which
has another name. So `read_corpora` compares the name with one that the caller knows; a caller that knows none shows it.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from learning.text.data import read_examples
from learning.text.examples import DataInvalid, Example
from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.certificates import certificate_from_pem
from tacit.corpus import CorpusStatement, Promise
from tacit.corpus_proof import AUTHORITIES, CERTIFICATE, SIGNATURE, STATEMENT, verify_statement
from tacit.documents import DocumentInvalid
from tacit.identity import CertificateInvalid

__all__ = [
    "CorporaInvalid",
    "MemberCorpus",
    "all_examples",
    "federation_of_corpora",
    "labels_of",
    "promise_of",
    "read_corpora",
    "same_texts",
]

_ROWS = ".jsonl"


class CorporaInvalid(ValueError):
    """A folder of corpora cannot be trained on. The text names the file and says what to do."""


@dataclass(frozen=True, slots=True)
class MemberCorpus:
    """One member's corpus.

    Args:
        member: the member's name.
        digest: SHA-256 of its file.
        examples: its rows.
        statement: the member's verified statement. None: it cannot be shown that anybody signed one.
    """

    member: str
    digest: bytes
    examples: tuple[Example, ...]
    statement: CorpusStatement | None

    @property
    def promise(self) -> Promise:
        """The promise of its texts; "none" without a statement."""
        return "none" if self.statement is None else self.statement.promise


def read_corpora(
    folder: Path, job: str, *, unverified: bool = False, federation: bytes | None = None
) -> list[MemberCorpus]:
    """Reads the corpora in a folder, sorted by the members' names.

    Args:
        folder: the folder.
        job: the job that they must be made for.
        unverified: also accept files without a statement, or with one that cannot be verified because its signature,
            the signer's certificate or the list of authorities is missing; it then counts as no statement. A proof that
            is there but wrong is refused in any case.
        federation: the federation that the statements must belong to, 32 bytes. None: the one that they name.

    Raises:
        CorporaInvalid: there is no such folder, or it holds no corpus; a file differs from its statement; a statement
            has no file or no proof, is not signed by its member, or is of another job or federation.
        DataInvalid: rows cannot be read.
    """
    if not folder.is_dir():
        raise CorporaInvalid(f"{folder} is not a folder; `coordinator job corpora {job} --out FOLDER` makes one")
    names = sorted(path.name.removesuffix(_ROWS) for path in folder.glob(f"*{_ROWS}"))
    stated = sorted(path.name.removesuffix(STATEMENT) for path in folder.glob(f"*{STATEMENT}"))
    if missing := [name for name in stated if name not in names]:
        raise CorporaInvalid(
            f"{folder / (missing[0] + STATEMENT)} belongs to a corpus that is missing; download the corpora again, or "
            "delete the statement too to leave this member's texts out"
        )
    if not names:
        raise CorporaInvalid(
            f"no member has released a corpus for job {job}, so there is nothing to train on; "
            f"`coordinator job corpora {job}` shows who declined and who is still awaited"
        )
    if not unverified and (alone := [name for name in names if name not in stated]):
        raise CorporaInvalid(
            f"{folder / (alone[0] + _ROWS)} has no statement beside it ({alone[0]}{STATEMENT}), so nothing says where "
            "its texts come from; download the corpora again, or accept it with --unverified"
        )
    corpora = [_read(folder, name, job, stated=name in stated) for name in names]
    _check_one_job(folder, [each.statement for each in corpora if each.statement is not None])
    authorities = _authorities(folder, federation_of_corpora(corpora))
    corpora = [_proven(folder, each, authorities, unverified=unverified) for each in corpora]
    _check_federation(folder, federation_of_corpora(corpora), federation)
    return corpora


def _read(folder: Path, name: str, job: str, *, stated: bool) -> MemberCorpus:
    path = folder / (name + _ROWS)
    try:
        data = path.read_bytes()
        statement = _statement(folder / (name + STATEMENT)) if stated else None
    except OSError as error:
        raise CorporaInvalid(f"{error.filename} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(data).digest()
    if statement is not None and (statement.corpus, statement.bytes) != (digest, len(data)):
        raise CorporaInvalid(f"{path} is not the file that its member's statement is about; download the corpora again")
    examples = tuple(read_examples(path))
    if statement is not None:
        _check_statement(path, name, job, examples, statement)
    return MemberCorpus(name, digest, examples, statement)


def _statement(path: Path) -> CorpusStatement:
    try:
        return CorpusStatement.from_file(path)
    except DocumentInvalid as error:
        raise CorporaInvalid(f"{error}; download the corpora again") from error


def _check_statement(path: Path, name: str, job: str, examples: Sequence[Example], statement: CorpusStatement) -> None:
    if statement.job != job:
        raise CorporaInvalid(
            f"{path} was made for job {statement.job}, not for {job}; name that job, or another folder"
        )
    if statement.member != name:
        raise CorporaInvalid(f"{path} was released by {statement.member}; give each file its member's name")
    counted = Counter(example.label for example in examples)
    said = {each.label: each.rows for each in statement.labels if each.rows}
    if statement.rows != len(examples) or said != dict(counted):
        raise CorporaInvalid(
            f"{path} holds other rows or labels than its member's statement counts ({statement.rows} rows); leave "
            "this member's texts out, and ask it what it sent"
        )


def _check_one_job(folder: Path, statements: Sequence[CorpusStatement]) -> None:
    if len({(each.federation, each.job_document) for each in statements}) > 1:
        raise CorporaInvalid(
            f"{folder} holds corpora of several federations, or of different jobs with one name; download each job's "
            "corpora into a folder of its own"
        )


def _authorities(folder: Path, federation: bytes | None) -> Authorities | None:
    """Reads the folder's list of authorities, which proves that it is of this federation. None: there is none, or no
    statement.
    """
    path = folder / AUTHORITIES
    if federation is None or not path.exists():
        return None
    try:
        return Authorities.read(path.read_bytes(), federation=federation, what=str(path))
    except AuthoritiesInvalid as error:
        raise CorporaInvalid(f"{error}; download the corpora again") from error
    except OSError as error:
        raise CorporaInvalid(f"{path} cannot be read: {error.strerror}") from error


def _proven(folder: Path, corpus: MemberCorpus, authorities: Authorities | None, *, unverified: bool) -> MemberCorpus:
    """Checks that the member signed the statement. If that cannot be checked, returns the corpus without it."""
    if corpus.statement is None:
        return corpus
    signature, certificate = (folder / (corpus.member + suffix) for suffix in (SIGNATURE, CERTIFICATE))
    needed = (folder / AUTHORITIES, signature, certificate)
    missing = next((path for path in needed if not path.exists()), None)
    if authorities is None or missing is not None:
        if unverified:
            return replace(corpus, statement=None)
        raise CorporaInvalid(
            f"{missing or needed[0]} is missing, so it cannot be checked whether {corpus.member} signed the statement "
            "about its file; download the corpora again (or make them again with `coordinator sample`), or accept them "
            "without a promise with --unverified"
        )
    try:
        der = certificate_from_pem(certificate.read_bytes()).public_bytes(serialization.Encoding.DER)
        verify_statement(corpus.statement, signature.read_bytes(), der, authorities)
    except OSError as error:
        raise CorporaInvalid(f"{error.filename} cannot be read: {error.strerror}") from error
    except (CertificateInvalid, ValueError) as error:
        said = error if isinstance(error, CertificateInvalid) else f"{certificate.name} holds no certificate"
        raise CorporaInvalid(
            f"{folder / (corpus.member + STATEMENT)} is not what {corpus.member} signed: {said}. The folder was "
            "changed; download the corpora again into another one"
        ) from error
    return corpus


def _check_federation(folder: Path, found: bytes | None, wanted: bytes | None) -> None:
    if None not in (found, wanted) and found != wanted:
        raise CorporaInvalid(
            f"{folder} and the operator's folder belong to different federations; name the right operator's folder "
            "with --operator, or download this federation's corpora"
        )


def federation_of_corpora(corpora: Sequence[MemberCorpus]) -> bytes | None:
    """The federation whose authorities certify the statements, 32 bytes. None: there are no statements."""
    return next((each.statement.federation for each in corpora if each.statement is not None), None)


def promise_of(corpora: Sequence[MemberCorpus]) -> Promise:
    """The promise of anything made from the union: differentially private only if every single corpus is."""
    private = bool(corpora) and all(corpus.promise == "differentially-private" for corpus in corpora)
    return "differentially-private" if private else "none"


def all_examples(corpora: Sequence[MemberCorpus]) -> list[Example]:
    """The union, member by member. A text that two members generated is there twice."""
    return [example for corpus in corpora for example in corpus.examples]


def labels_of(corpora: Sequence[MemberCorpus], job_labels: Sequence[str] | None = None) -> tuple[str, ...]:
    """The labels of a model of the union.

    Args:
        corpora: the corpora.
        job_labels: the job's labels. None: the job is not at hand.

    Returns:
        The job's labels in its order; without them, the labels in statements and rows, sorted.

    Raises:
        DataInvalid: a row has a label that the job does not know, or there are fewer than two labels.
    """
    found = {example.label for example in all_examples(corpora) if example.label is not None}
    if job_labels is not None:
        if unknown := sorted(found - set(job_labels)):
            raise DataInvalid(
                f"the corpora have labels that the job does not know, such as {unknown[0]!r}; download the corpora "
                "again"
            )
        return tuple(job_labels)
    found |= {each.label for corpus in corpora if corpus.statement for each in corpus.statement.labels}
    if len(found) < 2:
        raise DataInvalid(
            "all rows of the corpora have one label, but a classifier needs two; wait for other members' corpora, or "
            "leave out --corpora so that the job says which labels there are"
        )
    return tuple(sorted(found))


def same_texts(synthetic: Sequence[Example], test: Sequence[Example]) -> int:
    """Counts the test rows whose text is also a synthetic one, up to capitals and spaces.

    A short text may be generated by chance; many such rows suggest a test file that was trained on.
    """
    known = {_plain(example.text) for example in synthetic}
    return sum(_plain(example.text) in known for example in test)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
