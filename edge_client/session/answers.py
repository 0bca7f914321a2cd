"""Answers to questions that this member has noised, on the disk: HOME/answers/DATA/JOB.json.

An answer is written before it is charged, and read again after a restart. So a question is answered with one draw of
noise however often the coordinator asks for it, and a process that was killed sends the same numbers again. A file
holds noised counts and nothing else of the data. It counts only if the ledger holds its charge (`Budget.held_answer`):
what was never charged never left, and a new answer takes its place.
"""

import contextlib
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import structlog
from numpy.typing import NDArray
from pydantic import Field

from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Short
from tacit.limits import MAX_LABELS
from toolkit.durable import Faults, durable_file, make_folder, no_faults

__all__ = ["HeldAnswer", "HeldAnswers"]

log = structlog.get_logger("edge_client")

# Bins of all histograms of a question: labels and other, and three times the most bounds.
_MAX_BINS = MAX_LABELS + 1 + 3 * 101


class HeldAnswer(Document):
    """The content of a file: an answer with its noise, and the reservation that it is charged to."""

    max_bytes: ClassVar[int] = 1024 * 1024

    job_document: Digest
    # Id (hexadecimal) of the ledger, and the reservation there.
    ledger: Short
    reservation: int
    # Within what float32 holds exactly, in which an answer travels.
    values: Annotated[tuple[Annotated[int, Field(ge=-(2**24), le=2**24)], ...], AtMost(_MAX_BINS)]

    @property
    def array(self) -> NDArray[np.int64]:
        """The noised counts, (B,)."""
        return np.array(self.values, dtype=np.int64)


class HeldAnswers:
    """The answers from one data set of a home, which has a ledger of that name."""

    def __init__(self, home: Path, data: str, faults: Faults = no_faults) -> None:
        self._root = home / "answers" / data
        self._faults = faults

    def load(self, job: str, document: bytes, ledger: bytes, values: int) -> HeldAnswer | None:
        """The answer for exactly this job document and ledger, if there is one.

        Args:
            job: The job's name.
            document: SHA-256 of its document.
            ledger: The ledger's id.
            values: The length of an answer.
        """
        try:
            found = HeldAnswer.from_file(self._root / f"{job}.json", what=f"{job}.json")
        except FileNotFoundError:
            return None
        except (OSError, DocumentInvalid) as error:
            log.warning("answer_unusable", job=job, why=str(error))
            return None
        ours = (document, ledger.hex(), values)
        return found if (found.job_document, found.ledger, len(found.values)) == ours else None

    def keep(self, job: str, answer: HeldAnswer) -> None:
        """Writes an answer, durably.

        Raises:
            OSError: the disk does not take it.
        """
        make_folder(self._root)
        durable_file(self._root / f"{job}.json", answer.canonical(), "answer", self._faults)

    def forget(self, job: str) -> None:
        """Deletes the answer of a job that is over."""
        with contextlib.suppress(OSError):
            (self._root / f"{job}.json").unlink(missing_ok=True)
