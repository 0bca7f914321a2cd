"""Made-up corpora as `coordinator job corpora JOB --out FOLDER` lays them down: MEMBER.jsonl, MEMBER.statement.json,
its signature and certificate, and once the federation's authorities.

Guarantees: a file is what its member's statement says, in bytes, rows and labels, all of them are of one job of one
federation, and each statement is signed by its member, up to an authority of that federation; a corpus of which that
cannot be shown, since a file is missing, is taken only if that was asked for, and then promises nothing.

Leaves to others: which federation it is. Whoever can write a folder can make one of a federation of its own, whose name
is then another one: `read_corpora` compares it with a name that the caller knows, and the caller shows it where it
knows none.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from learning.text.data import DataInvalid, Example, read_examples
from tacit.authorities import Authorities, AuthoritiesInvalid
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
    """A folder of corpora that cannot be trained on; the text says which file and what to do."""


@dataclass(frozen=True, slots=True)
class MemberCorpus:
    """One member's corpus. digest: SHA-256 of its file. statement: what its member signed of it, verified; None where
    nobody can be shown to have signed anything.
    """

    member: str
    digest: bytes
    examples: tuple[Example, ...]
    statement: CorpusStatement | None

    @property
    def promise(self) -> Promise:
        """What stands behind its texts: of what nobody signed, nothing."""
        return "none" if self.statement is None else self.statement.promise


def read_corpora(
    folder: Path, job: str, *, unverified: bool = False, federation: bytes | None = None
) -> list[MemberCorpus]:
    """The corpora in a folder, in the order of the members' names.

    unverified: also files without a statement, or whose statement cannot be verified, since its signature, the signer's
    certificate or the list of authorities is missing; it counts as none. What is there and does not hold is refused.
    federation: the one that statements have to be of, 32 bytes; None: whichever they name.

    Raises:
        CorporaInvalid: no such folder, no corpus in it, a file that is not its statement's, a statement without its
            file, without what proves it, not signed by its member, of another federation, or of another job or
            federation than the others. DataInvalid: rows that cannot be read.
    """
    if not folder.is_dir():
        raise CorporaInvalid(f"{folder} is not a folder; `coordinator job corpora {job} --out FOLDER` makes one")
    names = sorted(path.name.removesuffix(_ROWS) for path in folder.glob(f"*{_ROWS}"))
    stated = sorted(path.name.removesuffix(STATEMENT) for path in folder.glob(f"*{STATEMENT}"))
    if missing := [name for name in stated if name not in names]:
        raise CorporaInvalid(
            f"{folder / (missing[0] + STATEMENT)} speaks of a corpus that is not there; download the corpora again, "
            "or take the statement away, too, if this member's texts are to be left out"
        )
    if not names:
        raise CorporaInvalid(
            f"no member has given a corpus for job {job}, so that there is nothing to train on; "
            f"`coordinator job corpora {job}` says who declined and who is still awaited"
        )
    if not unverified and (alone := [name for name in names if name not in stated]):
        raise CorporaInvalid(
            f"{folder / (alone[0] + _ROWS)} has no statement beside it ({alone[0]}{STATEMENT}), so that nobody says "
            "where its texts come from; download the corpora again, or take it as it is with --unverified"
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
        raise CorporaInvalid(
            f"{path} is not the file that its member signed a statement of; download the corpora again"
        )
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
        raise CorporaInvalid(f"{path} was given by {statement.member}; let files have their members' names")
    counted = Counter(example.label for example in examples)
    said = {each.label: each.rows for each in statement.labels if each.rows}
    if statement.rows != len(examples) or said != dict(counted):
        raise CorporaInvalid(
            f"{path} holds other rows, or labels, than its member's statement counts ({statement.rows} rows); leave "
            "this member's texts out, and ask it what it sent"
        )


def _check_one_job(folder: Path, statements: Sequence[CorpusStatement]) -> None:
    if len({(each.federation, each.job_document) for each in statements}) > 1:
        raise CorporaInvalid(
            f"{folder} holds corpora of several federations, or of jobs that have one name and differ; download each "
            "job's into a folder of its own"
        )


def _authorities(folder: Path, federation: bytes | None) -> Authorities | None:
    """The folder's list, which proves itself to be of this federation; None where there is none, or no statement."""
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
    """The corpus, once its member is found to have signed its statement; without it where that cannot be seen."""
    if corpus.statement is None:
        return corpus
    signature, certificate = (folder / (corpus.member + suffix) for suffix in (SIGNATURE, CERTIFICATE))
    needed = (folder / AUTHORITIES, signature, certificate)
    missing = next((path for path in needed if not path.exists()), None)
    if authorities is None or missing is not None:
        if unverified:
            return replace(corpus, statement=None)
        raise CorporaInvalid(
            f"{missing or needed[0]} is not there, so that nobody can see whether {corpus.member} signed what is said "
            "of its file; download the corpora again (or make them again with `coordinator sample`), or take them as "
            "they are, without a promise, with --unverified"
        )
    try:
        der = x509.load_pem_x509_certificate(certificate.read_bytes()).public_bytes(serialization.Encoding.DER)
        verify_statement(corpus.statement, signature.read_bytes(), der, authorities)
    except OSError as error:
        raise CorporaInvalid(f"{error.filename} cannot be read: {error.strerror}") from error
    except (CertificateInvalid, ValueError) as error:
        said = error if isinstance(error, CertificateInvalid) else f"{certificate.name} holds no certificate"
        raise CorporaInvalid(
            f"{folder / (corpus.member + STATEMENT)} is not what {corpus.member} signed: {said}; somebody changed the "
            "folder: download the corpora again, into another one"
        ) from error
    return corpus


def _check_federation(folder: Path, found: bytes | None, wanted: bytes | None) -> None:
    if None not in (found, wanted) and found != wanted:
        raise CorporaInvalid(
            f"{folder} holds corpora of another federation than the operator's folder is of; name that one's with "
            "--operator, or download this one's"
        )


def federation_of_corpora(corpora: Sequence[MemberCorpus]) -> bytes | None:
    """The federation whose authorities stand behind the statements, 32 bytes; None where there are none."""
    return next((each.statement.federation for each in corpora if each.statement is not None), None)


def promise_of(corpora: Sequence[MemberCorpus]) -> Promise:
    """What holds for all that is made of the union: differentially private only if every single corpus is."""
    private = bool(corpora) and all(corpus.promise == "differentially-private" for corpus in corpora)
    return "differentially-private" if private else "none"


def all_examples(corpora: Sequence[MemberCorpus]) -> list[Example]:
    """The union, member by member. A text that two members made up stands there twice."""
    return [example for corpus in corpora for example in corpus.examples]


def labels_of(corpora: Sequence[MemberCorpus], job_labels: Sequence[str] | None = None) -> tuple[str, ...]:
    """The labels of a model of the union: the job's, in its order; where the job is not at hand those that the
    statements name and those that stand in rows, in alphabetical order.

    Raises:
        DataInvalid: a row with a label that the job does not know, or fewer than two labels.
    """
    found = {example.label for example in all_examples(corpora) if example.label is not None}
    if job_labels is not None:
        if unknown := sorted(found - set(job_labels)):
            raise DataInvalid(
                f"the corpora have labels that the job does not know, {unknown[0]!r} first; download the corpora again"
            )
        return tuple(job_labels)
    found |= {each.label for corpus in corpora if corpus.statement for each in corpus.statement.labels}
    if len(found) < 2:
        raise DataInvalid(
            "all rows of the corpora have one label, and a classifier needs two; wait for other members' corpora, or "
            "leave out --corpora, so that the job says which labels there are"
        )
    return tuple(sorted(found))


def same_texts(synthetic: Sequence[Example], test: Sequence[Example]) -> int:
    """How many test rows have a text that stands among the made-up ones, but for capitals and spaces.

    A short text may well be made up by chance; many point to a test file that was trained on.
    """
    known = {_plain(example.text) for example in synthetic}
    return sum(_plain(example.text) in known for example in test)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
