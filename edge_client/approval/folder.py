"""HOME/approvals/DATA/JOB: what a running member asks its stewards about a job, and what they answered.

    request.json      the job document, the policy and the dry run, written by the running member
    DIGEST.json       a steward's signed statement, named by its digest

`edge_client job` only adds statements; the running member writes everything else, and takes statements up into its
ledger, which decides. So a statement that is removed here later still counts.
"""

import contextlib
import errno
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, StringConstraints

from edge_client.approval.rules import Question, Terms
from edge_client.approval.statement import ApprovalStatement, SignedStatement
from edge_client.policy.document import PolicyDocument
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Moment
from tacit.job import JobDocument
from tacit.limits import MAX_TENSORS
from toolkit.durable import durable_file, make_folder

__all__ = ["LONGEST_LINE", "ApprovalFolder", "ApprovalRequest", "folders"]

_REQUEST = "request.json"
# Statements that are read of one job: each steward decides a few times.
_MAX_STATEMENTS = 1000
# The dry run names each shared parameter.
LONGEST_LINE = 4000
_MAX_LINES = 2 * MAX_TENSORS

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


def _is_table(text: str) -> str:
    try:
        if not isinstance(json.loads(text), dict):
            raise ValueError
    except (ValueError, RecursionError) as error:
        raise ValueError("is not a JSON object") from error
    return text


class ApprovalRequest(Document):
    """What a member asks: the whole job document and policy, and what its machine says of the job beside its data."""

    # A policy may pin 10,000 members, and a job document has a megabyte at most.
    max_bytes: ClassVar[int] = 8 * 1024 * 1024

    federation: Digest
    member: _Name
    data: _Name
    document: JobDocument
    policy: PolicyDocument
    # The dry run for people, and as JSON.
    lines: Annotated[tuple[Annotated[str, StringConstraints(max_length=LONGEST_LINE)], ...], AtMost(_MAX_LINES)]
    plan: Annotated[str, StringConstraints(max_length=2 * 1024 * 1024), AfterValidator(_is_table)]
    asked_ms: Moment

    @property
    def question(self) -> Question:
        """What is asked."""
        return Question.of(
            self.document, self.policy.digest(), federation=self.federation, member=self.member, data=self.data
        )

    @property
    def terms(self) -> Terms:
        """What the policy asks of approvals."""
        return Terms.of(self.policy)

    def dry_run(self) -> dict[str, Any]:
        """The dry run as JSON."""
        found: dict[str, Any] = json.loads(self.plan)
        return found

    def about(self, statement: ApprovalStatement) -> bool:
        """Whether a statement answers exactly this request."""
        question = self.question
        return (
            question.is_of(statement)
            and dict(statement.files) == dict(question.files)
            and statement.policy == question.policy
        )


class ApprovalFolder:
    """The folder of one job and one data set."""

    def __init__(self, home: Path, data: str, job: str) -> None:
        self.data, self.job = data, job
        self.path = home / "approvals" / data / job

    def request(self) -> ApprovalRequest | None:
        """The newest request. None: there is none that can be read."""
        try:
            return ApprovalRequest.from_file(_a_file(self.path / _REQUEST))
        except (OSError, DocumentInvalid):
            return None

    def ask(self, request: ApprovalRequest) -> None:
        """Writes the request to the disk, in place of an earlier one.

        Raises:
            OSError: it cannot be written.
        """
        make_folder(self.path)
        durable_file(self.path / _REQUEST, request.canonical())

    def put(self, signed: SignedStatement) -> Path:
        """Writes a steward's statement to the disk.

        Raises:
            OSError: it cannot be written, or the folder holds more files than are read.
        """
        if len(self.names()) >= _MAX_STATEMENTS:
            raise OSError(
                errno.ENOSPC, f"holds {_MAX_STATEMENTS} files or more; take away those of no steward", self.path
            )
        make_folder(self.path)
        path = self.path / f"{signed.digest().hex()}.json"
        durable_file(path, signed.canonical())
        return path

    def names(self, known: Collection[str] = ()) -> tuple[str, ...]:
        """The names of the files with statements, sorted, at most a thousand that are not among `known`."""
        skipped = {_REQUEST, *known}
        try:
            found = (path.name for path in self.path.iterdir() if path.suffix == ".json")
            return tuple(sorted(name for name in found if name not in skipped)[:_MAX_STATEMENTS])
        except OSError:
            return ()

    def statement(self, name: str) -> SignedStatement:
        """Reads a file with a statement.

        Raises:
            OSError, DocumentInvalid: it cannot be read.
        """
        return SignedStatement.from_file(_a_file(self.path / name))

    def statements(self, known: Collection[bytes] = ()) -> Iterator[SignedStatement]:
        """Yields the statements that can be read, those that were signed first coming first.

        Args:
            known: digests of statements that are known already. Files that are named by one are not read.
        """
        found = []
        for name in self.names({f"{digest.hex()}.json" for digest in known}):
            with contextlib.suppress(OSError, DocumentInvalid):
                found.append(self.statement(name))
        yield from sorted(found, key=lambda each: (each.statement.issued_ms, each.signature))


def _a_file(path: Path) -> Path:
    """Raises OSError unless it is a file: reading a pipe would hang the running member."""
    if not path.is_file():
        raise OSError(errno.EINVAL, "is not a file", path)
    return path


def folders(home: Path) -> Iterator[ApprovalFolder]:
    """Yields the folder of every job that was asked about."""
    root = home / "approvals"
    with contextlib.suppress(OSError):
        for data in sorted(root.iterdir()):
            for job in sorted(data.iterdir()):
                if job.is_dir():
                    yield ApprovalFolder(home, data.name, job.name)
