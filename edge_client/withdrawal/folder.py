"""HOME/withdrawals: what this member withdrew from, and the coordinator's signed answers.

    all.json          the withdrawal from all jobs, for good
    jobs/JOB.json     the withdrawal from one job and those that start from it
    earlier/          those of an earlier membership of this home, once this one withdraws from the same; not read

Guarantees:

- What is on the disk counts at once, whether the coordinator has heard of it or not, and at every later start.
- A file here that cannot be read allows nothing: the member takes part in no job until it can be read.
- An answer that was kept stays. One that says something else is kept beside it: together they show that the
  coordinator's journal is not the one that it signed before. `MAX_ANSWERS` bounds both the file and what a coordinator
  can write here; the first ones stay.

There is no way back. Whoever removes a file here can take part again, as far as this machine is concerned; the
coordinator asks for nothing more all the same.
"""

import errno
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import StringConstraints

from edge_client.identity.home import MemberIdentity
from edge_client.policy.policy import PolicyRefusal
from tacit.documents import AtMost, Document, DocumentInvalid, Part
from tacit.job import JobDocument
from tacit.limits import MAX_CERTIFICATE_BYTES
from tacit.measurement import Measurement
from tacit.reason import Reason
from tacit.withdrawal import WithdrawalRequest, WithdrawalTaken, request_bytes
from toolkit.durable import durable_file, make_folder, sync_folder
from toolkit.locks import held

__all__ = ["MAX_ANSWERS", "KeptWithdrawal", "TakenWithdrawal", "WithdrawalFolder", "WithdrawalsUnreadable"]

# Answers to one withdrawal that say different things. Each is some 8 KB.
MAX_ANSWERS = 8

# An RSA signature of 8192 bits has 1024 bytes.
_Signature = Annotated[str, StringConstraints(max_length=2048, pattern=r"^([0-9a-f]{2})+$")]
_Certificate = Annotated[str, StringConstraints(max_length=2 * MAX_CERTIFICATE_BYTES, pattern=r"^([0-9a-f]{2})+$")]


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
    request_signature: _Signature
    request_certificate: _Certificate
    taken: WithdrawalTaken
    signature: _Signature
    certificate: _Certificate

    @property
    def head(self) -> str:
        """The journal's head that the server signed, as `coordinator audit verify --head` takes it."""
        return f"{self.taken.entry_hash.hex()}:{self.taken.entry}"


class KeptWithdrawal(Document):
    """A withdrawal as it lies in a file.

    Args:
        request: what this member asked.
        signature: this member's signature on it.
        certificate: the certificate whose key signed, DER.
        answers: the coordinator's answers that say different things, as they came. Empty: it has not answered yet.
        refused: what the coordinator answered if it does not take the request; it is not asked again by itself.
    """

    # `MAX_ANSWERS` of the longest signatures and certificates.
    max_bytes: ClassVar[int] = 256 * 1024

    request: WithdrawalRequest
    signature: _Signature
    certificate: _Certificate
    answers: Annotated[tuple[TakenWithdrawal, ...], AtMost(MAX_ANSWERS)] = ()
    refused: Annotated[str, StringConstraints(max_length=2000)] = ""

    @property
    def answer(self) -> TakenWithdrawal | None:
        """The answer that was kept last, if there is one."""
        return self.answers[-1] if self.answers else None

    @property
    def heads(self) -> tuple[str, ...]:
        """The journal's heads that the server signed. With more than one, its journal was rewritten or restored."""
        return tuple(each.head for each in self.answers)

    @classmethod
    def signed(cls, request: WithdrawalRequest, identity: MemberIdentity) -> "KeptWithdrawal":
        """Signs a request."""
        signature = identity.sign(request_bytes(request))
        return cls(request=request, signature=signature.hex(), certificate=identity.certificate.hex())

    def signed_anew(self, identity: MemberIdentity) -> "KeptWithdrawal":
        """The same with a signature of the identity's present certificate."""
        signature = identity.sign(request_bytes(self.request))
        return self.model_copy(update={"signature": signature.hex(), "certificate": identity.certificate.hex()})

    def has(self, answer: TakenWithdrawal) -> bool:
        """Whether an answer that says the same is kept. The server signs anew each time it says it."""
        return any(each.taken == answer.taken for each in self.answers)

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
        found = self._find(job)
        if found is not None:
            return found
        request = WithdrawalRequest(
            federation=self._federation, member=self._member, job=job, asked_ms=time.time_ns() // 1_000_000
        )
        kept = KeptWithdrawal.signed(request, identity)
        with self._locked(job) as path:
            # Another process may have asked in the meantime.
            found = self._find(job)
            if found is not None:
                return found
            if path.exists():
                self._set_aside(path)
            durable_file(path, kept.canonical())
        return kept

    def answered(self, sent: KeptWithdrawal, answer: TakenWithdrawal) -> KeptWithdrawal:
        """Keeps an answer that was checked, beside those that say something else.

        Args:
            sent: the withdrawal as it was sent.
            answer: the answer.

        Returns:
            The withdrawal as it is on the disk now. `has` says whether the answer was kept: there was room, and the
            request on the disk is the one that was sent.

        Raises:
            OSError: the answer cannot be written.
        """

        def change(now: KeptWithdrawal) -> KeptWithdrawal:
            if now.request != sent.request:
                # Another process asked anew meanwhile: the answer says nothing about that.
                return now
            fits = not now.has(answer) and len(now.answers) < MAX_ANSWERS
            answers = (*now.answers, answer) if fits else now.answers
            said = {"signature": sent.signature, "certificate": sent.certificate}
            return now.model_copy(update={"answers": answers, "refused": ""} | said)

        return self._change(sent, change)

    def refused(self, sent: KeptWithdrawal, why: str) -> KeptWithdrawal:
        """Keeps why the coordinator does not take a withdrawal.

        Raises:
            OSError: it cannot be written.
        """
        return self._change(sent, lambda now: now.model_copy(update={"refused": why}))

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

    def _find(self, job: str | None) -> KeptWithdrawal | None:
        return next((each for each in self.all() if each.request.job == job), None)

    def _change(self, sent: KeptWithdrawal, change: Callable[[KeptWithdrawal], KeptWithdrawal]) -> KeptWithdrawal:
        """Changes what is on the disk now: the command and a running client send at the same time."""
        with self._locked(sent.request.job) as path:
            try:
                now = KeptWithdrawal.from_file(path)
            except FileNotFoundError:
                # Somebody moved it away. What was asked stays asked.
                now = sent
                durable_file(path, now.canonical())
            except DocumentInvalid as error:
                raise OSError(errno.EIO, f"what is there cannot be read: {error}", str(path)) from error
            changed = change(now)
            # A repeat says nothing new, as a rule.
            if changed != now:
                durable_file(path, changed.canonical())
        return changed

    @contextmanager
    def _locked(self, job: str | None) -> Iterator[Path]:
        """Yields the path of a withdrawal's file, in a folder that is there. No other process writes here meanwhile."""
        path = self._file(job)
        make_folder(path.parent)
        with held(self.path / "lock"):
            yield path

    def _set_aside(self, path: Path) -> None:
        """Moves the withdrawal of an earlier membership, which is its proof, out of the way."""
        aside = self.path / "earlier"
        make_folder(aside)
        path.rename(aside / f"{hashlib.sha256(path.read_bytes()).hexdigest()}.json")
        sync_folder(aside)

    def _file(self, job: str | None) -> Path:
        return self.path / "all.json" if job is None else self.path / "jobs" / f"{job}.json"

    def _files(self) -> Iterator[Path]:
        """The files that are there. A folder that cannot be listed is an error, a missing one is not."""
        for folder, wanted in ((self.path, "all.json"), (self.path / "jobs", None)):
            if folder.exists():
                names = sorted(path.name for path in folder.iterdir() if path.suffix == ".json")
                yield from (folder / name for name in names if wanted in (None, name) and not name.startswith("."))


_REMOVE = "put it back from a copy, or withdraw again with `edge_client withdraw` once it is moved away"
