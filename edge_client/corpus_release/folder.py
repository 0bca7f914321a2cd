"""HOME/corpora/JOB: a corpus that a member made, how far it came, and what its owner decided. Without torch.

    corpus.jsonl      the texts, 0600
    statement.json    what this member says of them (`tacit.corpus.CorpusStatement`), canonical
    state.json        how far it came; written after both, so that a corpus without it is made again
    decision.json     what the owner decided, of exactly this file

Two processes write here: the running client everything but the decision, `edge_client corpus` the decision alone; a
veto takes the texts away at once, whoever carries it out first. Whoever acts on what the other one writes holds `lock`
meanwhile: a veto that was taken is carried out, also of a file that is on its way.
"""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from tacit.corpus import CorpusStatement
from tacit.documents import Digest, Document, DocumentInvalid, Part, Short
from toolkit.durable import Faults, durable_file, no_faults, sync_folder

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

# made: waits for its owner; sending: its first byte may have left; received, refused: what the coordinator said of it;
# vetoed: by its owner, the texts are gone; withheld: likewise, or none was made, since the policy allows it no more or
# nothing came.
Stage = Literal["made", "sending", "received", "refused", "vetoed", "withheld"]
Choice = Literal["approve", "veto"]


class CorpusUnusable(Exception):
    """A corpus that is not there, or not as it was made; the sentence says what to do."""


class CorpusLost(CorpusUnusable):
    """Its file or its statement is gone, or is not what was made: trying again brings nothing."""


class CorpusFile(Part):
    """The file, its statement, and the reservations of what made them."""

    corpus: Digest
    bytes: int
    rows: int
    statement: Digest
    # What training the model was charged to; None under a mechanism that promises nothing.
    trained: int | None
    # What the histogram of labels was charged to; None where labels stand there equally often.
    histogram: int | None


class CorpusState(Document):
    """state.json."""

    federation: Digest
    job: Short
    job_document: Digest
    stage: Stage
    # None: none was made, and it is `withheld`.
    made: CorpusFile | None
    # Whether the coordinator was told of a veto, or that there is none.
    told: bool = False
    # What the coordinator refused, or why there is none.
    detail: str = Field(default="", max_length=2000)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do for it."""
        return self.stage in ("received", "refused") or (self.stage in ("vetoed", "withheld") and self.told)


class Decision(Document):
    """decision.json."""

    # SHA-256 of the file that was decided on: a later one is asked about anew.
    corpus: Digest
    choice: Choice
    at_ms: int = Field(ge=0, le=2**63 - 1)


class CorpusFolder:
    """One job's corpus. Documents that cannot be read count as not there: what they stood for is made again."""

    def __init__(self, home: Path, job: str, faults: Faults = no_faults) -> None:
        self.job = job
        self.path = home / "corpora" / job
        self._faults = faults

    @property
    def file(self) -> Path:
        """The texts."""
        return self.path / "corpus.jsonl"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time, and one `lock` at a time in each. Waits for the other one's step. Raises OSError."""
        with (self.path / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def prepare(self) -> None:
        """Makes the folder, for its owner alone. Raises OSError."""
        for folder in (self.path.parent, self.path):
            if not folder.exists():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(folder.parent)

    def state(self) -> CorpusState | None:
        """How far it came."""
        return _read(CorpusState, self.path / "state.json")

    def decision(self, state: CorpusState) -> Choice | None:
        """What the owner decided of the corpus that the state is about."""
        found = _read(Decision, self.path / "decision.json")
        if found is None or state.made is None or found.corpus != state.made.corpus:
            return None
        return found.choice

    def stage(self, state: CorpusState) -> Stage:
        """As its owner sees it: a veto counts before the running client has heard of it."""
        return "vetoed" if state.stage in _OPEN and self.decision(state) == "veto" else state.stage

    def statement(self, state: CorpusState) -> CorpusStatement:
        """Raises: CorpusLost: it is not there, or not the one that was made."""
        path = self.path / "statement.json"
        found = _read(CorpusStatement, path)
        if found is None or state.made is None or found.digest() != state.made.statement:
            raise CorpusLost(f"{path} is not the statement that was made of the corpus of {self.job}; {self._again()}")
        return found

    def texts(self, state: CorpusState) -> bytes:
        """The file's bytes, as they were made.

        Raises:
            CorpusLost: they are not there, or were changed. CorpusUnusable: the disk does not give them.
        """
        try:
            data = self.file.read_bytes()
        except FileNotFoundError as error:
            raise CorpusLost(f"{self.file} is not there any more; {self._again()}") from error
        except OSError as error:
            raise CorpusUnusable(f"{self.file} cannot be read ({error.strerror}); {self._again()}") from error
        if state.made is None or sha256(data).digest() != state.made.corpus:
            raise CorpusLost(
                f"{self.file} was changed since it was made, and its statement is of the file as it was: a corpus is "
                f"given away whole or not at all. Put the file back as it was, or {self._again()}"
            )
        return data

    def _again(self) -> str:
        return f"give it up with `edge_client corpus veto {self.job}`"

    def write_state(self, state: CorpusState) -> None:
        """Raises OSError."""
        durable_file(self.path / "state.json", state.canonical(), "corpus-state", self._faults)

    def write_statement(self, statement: CorpusStatement) -> None:
        """Raises OSError."""
        durable_file(self.path / "statement.json", statement.canonical(), "statement", self._faults)

    def decide(self, state: CorpusState, choice: Choice) -> None:
        """On the disk when it returns; with a veto the texts are gone from it, too. state: what the owner has seen.

        Raises:
            CorpusUnusable: it cannot be decided any more, or the file is not the one that was made. OSError.
        """
        with self.lock():
            now = self.state()
            if now is None or now.made != state.made:
                raise CorpusUnusable(
                    f"the corpus of {self.job} is another one by now; "
                    f"read that with `edge_client corpus show {self.job}`"
                )
            self._decide(now, choice)

    def _decide(self, state: CorpusState, choice: Choice) -> None:
        if state.made is None:
            raise CorpusUnusable(f"no corpus of {self.job} was made: {state.detail}")
        stage = self.stage(state)
        if stage == "vetoed" and choice == "veto":
            return
        if stage != "made" and (stage, choice) != ("sending", "veto"):
            raise CorpusUnusable(f"the corpus of {self.job} is {_TOO_LATE[stage]}")
        if choice == "approve":
            self.statement(state)
            self.texts(state)
        decision = Decision(corpus=state.made.corpus, choice=choice, at_ms=time.time_ns() // 1_000_000)
        durable_file(self.path / "decision.json", decision.canonical(), "decision", self._faults)
        if choice == "veto":
            self.forget()

    def forget(self) -> None:
        """The texts and what was said of them are gone from the disk; what became of them stays. Raises OSError."""
        for path in (self.file, self.path / "statement.json", *self.path.glob(".*.partial")):
            path.unlink(missing_ok=True)
        sync_folder(self.path)


# Where a veto still counts.
_OPEN: tuple[Stage, ...] = ("made", "sending")

_TOO_LATE: dict[Stage, str] = {
    "sending": "approved, and on its way to the coordinator already",
    "received": "with the coordinator already; ask its operator to leave it out, or to delete it",
    "refused": "refused by the coordinator; there is nothing left to decide",
    "vetoed": "vetoed, and its texts are deleted: there is nothing left to approve",
    "withheld": "withheld; there is nothing to decide",
}


def corpora(home: Path) -> Iterator[CorpusFolder]:
    """Of all jobs that something is there for."""
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
