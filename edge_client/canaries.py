"""The canaries that this member plants in its own training, if a job asks for them and the policy agrees.

    HOME/canaries/DATA/JOB.json      0600; texts, labels and coins

Guarantees: the coins are on the disk before anything is trained on, and never change for a job. Canaries are made from
the job's vocabulary and random bytes alone. What they add to the data has the same number of rows whatever the coins
are (`learning.auditing.canaries`), so the charge does not depend on them.

Nothing here leaves the machine. `edge_client audit` reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import structlog
from pydantic import StringConstraints

from learning.auditing.canaries import TooFewWords, absent, coins_of, make_canaries, with_coins
from learning.text.examples import Example
from secure_agg import RandomSource
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Label, Part
from tacit.job import JobDocument
from tacit.job_parts import MAX_CANARIES
from tacit.prompt import reads_pairs
from toolkit.durable import durable_file, make_folder

__all__ = ["CanaryBook", "CanaryRecord", "CanaryRow", "Planted"]

log = structlog.get_logger("edge_client")

_Text = Annotated[str, StringConstraints(max_length=4096)]


class CanaryRow(Part):
    """One canary. `text_b`: its second text, if the job reads pairs. `present`: whether it is in the data."""

    text: _Text
    text_b: _Text | None = None
    label: Label
    present: bool


class CanaryRecord(Document):
    """The canaries of one job on one member's data."""

    max_bytes: ClassVar[int] = 64 * 1024 * 1024

    # SHA-256 of the job document.
    document: Digest
    rows: Annotated[tuple[CanaryRow, ...], AtMost(MAX_CANARIES)]


@dataclass(frozen=True)
class Planted:
    """A job's canaries. Its texts do not print."""

    examples: Sequence[Example] = field(repr=False)
    present: Sequence[bool] = field(repr=False)

    @property
    def rows(self) -> list[Example]:
        """The rows that they add to the data."""
        import numpy as np

        return with_coins(self.examples, np.array(self.present, dtype=np.bool_))


class CanaryBook:
    """The canaries of one data set.

    Args:
        home: The member's folder.
        data_name: The member's name for the data.
        most: The policy's `max_canaries`.
    """

    def __init__(self, home: Path, data_name: str, most: int) -> None:
        self._folder, self._most = home / "canaries" / data_name, most

    def count(self, job: JobDocument) -> int:
        """The rows that canaries add to the data for this job: 0 unless the job asks and the policy agrees."""
        return 0 if job.audit is None else min(job.audit.canaries, self._most)

    def examples(self, job: JobDocument, own: int) -> int:
        """N of this job: the member's own rows and the canaries. Charges, plans and approvals follow from it."""
        return own + self.count(job)

    def load(self, job: JobDocument) -> Planted | None:
        """The canaries planted for this job; None if there are none.

        Raises:
            DocumentInvalid: The file is damaged, or of another job of this name.
        """
        path = self._path(job)
        if not path.exists():
            return None
        record = CanaryRecord.from_file(path)
        if record.document != job.digest():
            raise DocumentInvalid(
                f"{path} has the canaries of another job of this name; move it away if that job is over"
            )
        rows = [Example(each.text, each.label, each.text_b) for each in record.rows]
        return Planted(rows, [each.present for each in record.rows])

    def plant(self, job: JobDocument, words: Sequence[str | None], random: RandomSource) -> list[Example]:
        """The rows to train on besides the member's own, `count` of them. The coins are on the disk on return.

        Args:
            job: The job.
            words: The vocabulary that the job's model reads with.
            random: Source of texts and coins.

        Raises:
            DocumentInvalid: As in `load`.
            OSError: The record cannot be written.
        """
        count = self.count(job)
        if not count:
            return []
        found = self.load(job)
        if found is None:
            try:
                made = make_canaries(words, job.labels, count, random, pairs=reads_pairs(job.model))
            except TooFewWords as error:
                log.warning("canaries_not_planted", job=job.name, why=str(error))
                return [absent(Example("", None))] * count
            found = Planted(made, coins_of(count, random).tolist())
            self._write(job, found)
            log.info("canaries_planted", job=job.name, canaries=count)
        # The policy may have become stricter: then as many rows count, and those beyond are out.
        rows = found.rows[:count]
        return rows + [absent(Example("", None))] * (count - len(rows))

    def _write(self, job: JobDocument, planted: Planted) -> None:
        rows = zip(planted.examples, planted.present, strict=True)
        record = CanaryRecord(
            document=job.digest(),
            rows=tuple(
                CanaryRow(text=each.text, text_b=each.text_b, label=each.label or "", present=there)
                for each, there in rows
            ),
        )
        make_folder(self._folder)
        durable_file(self._path(job), record.canonical())

    def _path(self, job: JobDocument) -> Path:
        return self._folder / f"{job.name}.json"
