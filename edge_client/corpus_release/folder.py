"""HOME/corpora/JOB: a member's corpus, its stage, and its owner's decision. Does not import torch.

    corpus.jsonl      the texts, mode 0600
    statement.json    this member's statement about them (`tacit.corpus.CorpusStatement`), canonical
    state.json        the stage; written after both, so that a corpus without it is made again
    decision.json     what the owner decided about exactly this file

A member has one corpus for a job, whichever of its data sets it comes from, and only a run of that one goes on with it.

Two processes write here: `edge_client corpus` only the decision, the running client everything else. Either of them
deletes the texts of a vetoed corpus at once. A process holds `lock` while it acts on what the other one writes. So a
veto that was accepted is carried out, even for a file that is on its way.
"""

import contextlib
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from edge_client.corpus_release.models import job_of_model
from edge_client.policy.policy import PolicyRefusal
from edge_client.withdrawal.folder import WithdrawalFolder
from tacit.corpus import CorpusStatement
from tacit.documents import Digest, Document, DocumentInvalid, Moment, Part, Short
from toolkit.durable import Faults, durable_file, make_folder, no_faults, sync_folder
from toolkit.locks import held

__all__ = [
    "Choice",
    "CorpusFile",
    "CorpusFolder",
    "CorpusLost",
    "CorpusState",
    "CorpusUnusable",
    "Decision",
    "Stage",
    "corpora",
]

# made: waits for its owner. sending: its first byte may have left. received, refused: the coordinator's answer. vetoed:
# its owner vetoed it or withdrew from the job, and the texts are deleted. withheld: the policy no longer allows it or
# no text came, so the texts are deleted or were never made.
Stage = Literal["made", "sending", "received", "refused", "vetoed", "withheld"]
Choice = Literal["approve", "veto"]


class CorpusUnusable(Exception):
    """A corpus is missing, or differs from what was made. The sentence says what to do."""


class CorpusLost(CorpusUnusable):
    """The file or its statement is gone, or differs from what was made. Trying again does not help."""


class CorpusFile(Part):
    """The file, its statement, and the reservations that paid for them."""

    corpus: Digest
    bytes: int
    rows: int
    statement: Digest
    # The reservation that the model's training was charged to. None: the mechanism promises nothing.
    trained: int | None
    # The reservation that the histogram of labels was charged to. None: the file has each label equally often.
    histogram: int | None


class CorpusState(Document):
    """The content of state.json."""

    federation: Digest
    # Id (hexadecimal) of the ledger that everything about it was and will be recorded in, and the member's own name for
    # the data.
    ledger: Short
    data: Short
    job: Short
    job_document: Digest
    stage: Stage
    # None: no file was made, and the stage is `withheld`.
    made: CorpusFile | None
    # Whether the coordinator was told that no file will come.
    told: bool = False
    # Why the coordinator refused, or why there is no file now.
    detail: str = Field(default="", max_length=2000)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do for this corpus."""
        return self.stage in ("received", "refused") or (self.stage in ("vetoed", "withheld") and self.told)


class Decision(Document):
    """The content of decision.json."""

    # SHA-256 of the file that was decided on. A later file needs a new decision.
    corpus: Digest
    choice: Choice
    at_ms: Moment


class CorpusFolder:
    """The folder of one job's corpus. An unreadable document counts as missing, and its content is made again."""

    def __init__(self, home: Path, job: str, faults: Faults = no_faults) -> None:
        self.job = job
        self.path = home / "corpora" / job
        self._home = home
        self._faults = faults

    @property
    def file(self) -> Path:
        """The file of texts."""
        return self.path / "corpus.jsonl"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for one caller at a time, across processes. Waits until the other one's step is done.

        Raises:
            OSError: the lock file cannot be opened.
        """
        with held(self.path / "lock"):
            yield

    def prepare(self) -> None:
        """Creates the folder, readable only by its owner.

        Raises:
            OSError: the folder cannot be created.
        """
        make_folder(self.path)

    def state(self) -> CorpusState | None:
        """The stored state. None: there is none."""
        return _read(CorpusState, self.path / "state.json")

    def decision(self, state: CorpusState) -> Choice | None:
        """The owner's decision about the file in the state. None: there is none."""
        found = _read(Decision, self.path / "decision.json")
        if found is None or state.made is None or found.corpus != state.made.corpus:
            return None
        return found.choice

    def check_decision(self) -> None:
        """Checks that the disk returns the owner's decision, if there is one.

        Raises:
            OSError: it does not, so nobody knows whether there is one.
        """
        with contextlib.suppress(FileNotFoundError), (self.path / "decision.json").open("rb") as file:
            file.read(1)

    def stage(self, state: CorpusState) -> Stage:
        """The stage as its owner sees it: a veto counts before the running client has seen it."""
        return "vetoed" if state.stage in _OPEN and self.decision(state) == "veto" else state.stage

    def statement(self, state: CorpusState) -> CorpusStatement:
        """The statement about the file in the state.

        Raises:
            CorpusLost: it is missing, or not the one that was made.
        """
        path = self.path / "statement.json"
        found = _read(CorpusStatement, path)
        if found is None or state.made is None or found.digest() != state.made.statement:
            raise CorpusLost(f"{path} is not the statement that was made for the corpus of {self.job}; {self._again()}")
        return found

    def texts(self, state: CorpusState) -> bytes:
        """The file's bytes, as they were made.

        Raises:
            CorpusLost: the file is missing or was changed.
            CorpusUnusable: the disk does not return it.
        """
        try:
            data = self.file.read_bytes()
        except FileNotFoundError as error:
            raise CorpusLost(f"{self.file} is missing; {self._again()}") from error
        except OSError as error:
            raise CorpusUnusable(f"{self.file} cannot be read ({error.strerror}); {self._again()}") from error
        if state.made is None or sha256(data).digest() != state.made.corpus:
            raise CorpusLost(
                f"{self.file} was changed since it was made, so its statement no longer fits, and a corpus is released "
                f"whole or not at all. Put the original file back, or {self._again()}"
            )
        return data

    def _again(self) -> str:
        return f"give it up with `edge_client corpus veto {self.job}`"

    def write_state(self, state: CorpusState) -> None:
        """Writes the state to the disk.

        Raises:
            OSError: the file cannot be written.
        """
        durable_file(self.path / "state.json", state.canonical(), "corpus-state", self._faults)

    def write_statement(self, statement: CorpusStatement) -> None:
        """Writes the statement to the disk.

        Raises:
            OSError: the file cannot be written.
        """
        durable_file(self.path / "statement.json", statement.canonical(), "statement", self._faults)

    def decide(self, state: CorpusState, choice: Choice) -> None:
        """Writes the owner's decision to the disk. A veto also deletes the texts before this returns.

        Args:
            state: the state that the owner has seen.
            choice: the decision.

        Raises:
            CorpusUnusable: it is too late to decide, or the file is not the one that was made.
            OSError: the disk does not take the decision.
        """
        with self.lock():
            now = self.state()
            if now is None or now.made != state.made:
                raise CorpusUnusable(
                    f"the corpus of {self.job} was replaced meanwhile; "
                    f"read the new one with `edge_client corpus show {self.job}`"
                )
            self._decide(now, choice)

    def _decide(self, state: CorpusState, choice: Choice) -> None:
        if state.made is None:
            raise CorpusUnusable(f"job {self.job} has no corpus: {state.detail}")
        stage = self.stage(state)
        if stage == "vetoed" and choice == "veto":
            return
        if stage != "made" and (stage, choice) != ("sending", "veto"):
            raise CorpusUnusable(f"the corpus of {self.job} is {_TOO_LATE[stage]}")
        if choice == "approve":
            self._check_not_withdrawn(state, self.statement(state).member)
            self.texts(state)
        decision = Decision(corpus=state.made.corpus, choice=choice, at_ms=time.time_ns() // 1_000_000)
        durable_file(self.path / "decision.json", decision.canonical(), "decision", self._faults)
        if choice == "veto":
            self.forget()

    def _check_not_withdrawn(self, state: CorpusState, member: str) -> None:
        withdrawals = WithdrawalFolder(self._home, state.federation, member)
        try:
            withdrawals.check(self.job, job_of_model(self._home, self.job))
        except PolicyRefusal as refusal:
            raise CorpusUnusable(f"{refusal.detail}, so its text does not leave; {self._again()}") from refusal

    def forget(self) -> None:
        """Deletes the texts and their statement from the disk. The state stays.

        Raises:
            OSError: a file cannot be deleted.
        """
        self._delete(self.file, self.path / "statement.json", *self.path.glob(".*.partial"))

    def forget_unsent(self) -> None:
        """Deletes what a process wrote before it was killed. A file that was received stays, with its statement.

        Raises:
            CorpusUnusable: the disk does not return the file.
            OSError: a file cannot be deleted.
        """
        state = self.state()
        if state is None or state.stage != "received":
            return self.forget()
        try:
            self.texts(state)
        except CorpusLost:
            # Later texts took its place.
            return self.forget()
        return self._delete(*self.path.glob(".*.partial"))

    def _delete(self, *paths: Path) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
        sync_folder(self.path)


# Stages at which a veto still counts.
_OPEN: tuple[Stage, ...] = ("made", "sending")

# Completes "the corpus of JOB is ...".
_TOO_LATE: dict[Stage, str] = {
    "sending": "already approved and on its way to the coordinator",
    "received": "already with the coordinator; ask its operator to leave it out or to delete it",
    "refused": "refused by the coordinator; there is nothing left to decide",
    "vetoed": "vetoed and its texts are deleted; there is nothing left to approve",
    "withheld": "withheld; there is nothing to decide",
}


def corpora(home: Path) -> Iterator[CorpusFolder]:
    """Yields the folder of each job that has one."""
    root = home / "corpora"
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(root.iterdir()):
            if path.is_dir():
                yield CorpusFolder(home, path.name)


_D = TypeVar("_D", bound=Document)


def _read(kind: type[_D], path: Path) -> _D | None:
    try:
        return kind.from_file(path)
    except (OSError, DocumentInvalid):
        return None
