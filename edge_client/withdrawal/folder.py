"""HOME/withdrawals: what this member withdrew from, and the coordinator's signed answers.

    all.json          the withdrawal from all jobs, for good
    jobs/JOB.json     the withdrawal from one job and those that start from it

Guarantees:

- What is on the disk counts at once, whether the coordinator has heard of it or not, and at every later start.
- A file here that cannot be read allows nothing: the member takes part in no job until it can be read.

There is no way back. Whoever removes a file here can take part again, as far as this machine is concerned; the
coordinator asks for nothing more all the same.
"""

import fcntl
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

from edge_client.identity.home import MemberIdentity
from edge_client.policy.policy import PolicyRefusal
from tacit.documents import Document, DocumentInvalid, Part
from tacit.job import JobDocument
from tacit.measurement import Measurement
from tacit.reason import Reason
from tacit.withdrawal import WithdrawalRequest, WithdrawalTaken, request_bytes
from toolkit.durable import durable_file, sync_folder

__all__ = ["KeptWithdrawal", "TakenWithdrawal", "WithdrawalFolder", "WithdrawalsUnreadable"]

# An RSA signature of 8192 bits has 1024 bytes, and a certificate a few kilobytes.
_Hex = Annotated[str, StringConstraints(max_length=32_768, pattern=r"^([0-9a-f]{2})+$")]


class WithdrawalsUnreadable(Exception):
    """What this member withdrew from cannot be read. The sentence says what to do."""


class TakenWithdrawal(Part):
    """The coordinator's answer.

    Args:
        request: the request that it is about: the kept one, or an earlier one of this member about the same.
        request_signature: this member's signature on it.
        request_certificate: the certificate whose key signed, DER.
        taken: what the server signed.
        signature: the server's signature.
        certificate: its certificate, DER.
    """

    request: WithdrawalRequest
    request_signature: _Hex
    request_certificate: _Hex
    taken: WithdrawalTaken
    signature: _Hex
    certificate: _Hex


class KeptWithdrawal(Document):
    """A withdrawal as it lies in a file.

    Args:
        request: what this member asked.
        signature: this member's signature on it.
        certificate: the certificate whose key signed, DER.
        answer: None: the coordinator has not answered yet.
        refused: what the coordinator answered if it does not take the request; it is not asked again by itself.
    """

    request: WithdrawalRequest
    signature: _Hex
    certificate: _Hex
    answer: TakenWithdrawal | None = None
    refused: Annotated[str, StringConstraints(max_length=2000)] = ""

    @classmethod
    def signed(cls, request: WithdrawalRequest, identity: MemberIdentity) -> "KeptWithdrawal":
        """Signs a request."""
        signature = identity.sign(request_bytes(request))
        return cls(request=request, signature=signature.hex(), certificate=identity.certificate.hex())

    def signed_by(self, identity: MemberIdentity) -> bool:
        """Whether the identity's present certificate is the one that signed."""
        return hashlib.sha256(bytes.fromhex(self.certificate)).digest() == identity.fingerprint


class WithdrawalFolder:
    """The withdrawals of one member of one federation. Those of an earlier membership of this home do not count."""

    def __init__(self, home: Path, federation: bytes, member: str) -> None:
        self.path = home / "withdrawals"
        self._federation = federation
        self._member = member

    def ask(self, identity: MemberIdentity, job: str | None) -> KeptWithdrawal:
        """Withdraws: signs a request and puts it on the disk. If there is one about the same, that one stays.

        Args:
            identity: this member.
            job: the job. None: all, for good.

        Raises:
            WithdrawalsUnreadable: an earlier one cannot be read.
            OSError: it cannot be written; nothing was withdrawn.
        """
        found = next((each for each in self.all() if each.request.job == job), None)
        if found is not None:
            return found
        request = WithdrawalRequest(
            federation=self._federation, member=self._member, job=job, asked_ms=time.time_ns() // 1_000_000
        )
        kept = KeptWithdrawal.signed(request, identity)
        self.put(kept)
        return kept

    def put(self, kept: KeptWithdrawal) -> None:
        """Writes a withdrawal to the disk, in place of the one about the same.

        Raises:
            OSError: it cannot be written.
        """
        path = self._file(kept.request.job)
        for folder in (self.path, path.parent):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
                sync_folder(folder.parent)
        # The command and a running client send, and keep the answer, at the same time.
        with (self.path / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            durable_file(path, kept.canonical())

    def all(self) -> tuple[KeptWithdrawal, ...]:
        """The withdrawals, that from all jobs first.

        Raises:
            WithdrawalsUnreadable: one cannot be read.
        """
        found = []
        try:
            for path in self._files():
                # Anything else would hang the reader.
                if not path.is_file():
                    raise WithdrawalsUnreadable(f"{path} is not a file; {_REMOVE}")
                kept = KeptWithdrawal.from_file(path)
                if self._file(kept.request.job) != path:
                    raise WithdrawalsUnreadable(f"{path} is about another job than its name says; {_REMOVE}")
                if (kept.request.federation, kept.request.member) == (self._federation, self._member):
                    found.append(kept)
        except OSError as error:
            raise WithdrawalsUnreadable(f"{error.filename} cannot be read: {error.strerror}; {_REMOVE}") from error
        except DocumentInvalid as error:
            raise WithdrawalsUnreadable(f"{error}; {_REMOVE}") from error
        return tuple(found)

    @property
    def for_good(self) -> KeptWithdrawal | None:
        """The withdrawal from all jobs, if there is one.

        Raises:
            WithdrawalsUnreadable: a withdrawal cannot be read.
        """
        return next((each for each in self.all() if each.request.job is None), None)

    def check(self, name: str, job: JobDocument | None = None) -> None:
        """Checks that this member has not withdrawn from a job, nor from the one that it starts from or measures.

        Args:
            name: the job's name.
            job: its document, once it is known.

        Raises:
            PolicyRefusal: it has, or what it withdrew from cannot be read. The coordinator reads the text.
        """
        try:
            scopes = {each.request.job for each in self.all()}
        except WithdrawalsUnreadable as error:
            raise PolicyRefusal(
                Reason.REASON_LEDGER_FAILING, "this member cannot read what it withdrew from"
            ) from error
        if None in scopes:
            raise PolicyRefusal(Reason.REASON_MEMBER_WITHDREW, "this member withdrew from all jobs")
        if name in scopes:
            raise PolicyRefusal(Reason.REASON_MEMBER_WITHDREW, f"this member withdrew from {name}")
        if job is not None and job.earlier is not None and job.earlier.job in scopes:
            raise PolicyRefusal(
                Reason.REASON_MEMBER_WITHDREW, f"this member withdrew from {job.earlier.job}, from which {name} starts"
            )

        if job is not None and isinstance(job.question, Measurement) and job.question.job in scopes:
            raise PolicyRefusal(
                Reason.REASON_MEMBER_WITHDREW, f"this member withdrew from {job.question.job}, which {name} measures"
            )

    def _file(self, job: str | None) -> Path:
        return self.path / "all.json" if job is None else self.path / "jobs" / f"{job}.json"

    def _files(self) -> Iterator[Path]:
        """The files that are there. A folder that cannot be listed is an error, a missing one is not."""
        for folder, wanted in ((self.path, "all.json"), (self.path / "jobs", None)):
            if folder.exists():
                names = sorted(path.name for path in folder.iterdir() if path.suffix == ".json")
                yield from (folder / name for name in names if wanted in (None, name) and not name.startswith("."))


_REMOVE = "put it back from a copy, or withdraw again with `edge_client withdraw` once it is moved away"
