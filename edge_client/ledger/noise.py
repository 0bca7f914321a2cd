"""The noise that a member's next steps take back, where a job's noise is correlated: HOME/noise/DATA/JOB.noise.

A file holds where the job's steps stand, the last b - 1 rows of noise, and the key of its classes
(`learning.mechanisms.correlated`). Guarantees, together with the ledger's records of steps (`Stepped`):

- Steps that may have left are never taken again. Before their bytes may leave, the file that continues after them is
  on the disk, and then the ledger's record. So the file is never behind the ledger, unless somebody put back an older
  one or removed it. Then the job's steps end on this machine (`NoiseLost`).
- A process that dies before that leaves everything as it was, and the steps are taken with new noise: nothing of the
  former ones had left. One that dies between the two skips the steps.
- Nothing in the file says what the noise of a later step will be, and rows older than the band are gone from it. Who
  reads it can take off the noise of the last b - 1 steps. A file system may keep what was replaced: encrypt the disk.
"""

import contextlib
import hashlib
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from learning.mechanisms.correlated import CorrelatedSteps
from tacit.documents import Digest, Document, DocumentInvalid, Short
from tacit.mechanism import MAX_BAND
from toolkit.durable import Faults, durable_file, make_folder, no_faults

__all__ = ["NoiseHeader", "NoiseLost", "NoiseStore", "forget_noise"]


class NoiseLost(ValueError):
    """The file is missing, damaged or older than the ledger, so the steps of its job cannot go on."""


class NoiseHeader(Document):
    """The first line of a file. The rows follow it: float64, little-endian, one after another."""

    max_bytes: ClassVar[int] = 4096

    # Id (hexadecimal) of the ledger, and the reservation there.
    ledger: Short
    reservation: int = Field(ge=1)
    job_document: Digest
    # The next step.
    step: int = Field(ge=0)
    # Secret of the job's classes, hexadecimal.
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    # How many rows follow, and their length.
    rows: int = Field(ge=1, lt=MAX_BAND)
    values: int = Field(ge=1)
    # SHA-256 over this line, with zeros in this place, and the rows.
    rows_digest: Digest


class NoiseStore:
    """The noise of the jobs on one data set of a home, which has a ledger of that name."""

    def __init__(self, home: Path, data: str, ledger: bytes, faults: Faults = no_faults) -> None:
        """Joins home, data and ledger. ledger: its id, 16 bytes."""
        self._root = home / "noise" / data
        self._ledger = ledger.hex()
        self._faults = faults

    def begun(self, coefficients: tuple[float, ...], multiplier: float, rate: float, values: int) -> CorrelatedSteps:
        """The steps of a job that has taken none, under a new key. Nothing is written."""
        return CorrelatedSteps.begun(coefficients, multiplier, rate, secrets.token_bytes(32), values)

    def step(self, job: str, document: bytes, reservation: int) -> int:
        """The number of the next step; 0 if there is no file of this reservation. Raises NoiseLost if it is damaged."""
        found = self._read(job, document, reservation)
        return 0 if found is None else found[0].step

    def load(
        self,
        job: str,
        document: bytes,
        reservation: int,
        coefficients: tuple[float, ...],
        multiplier: float,
        rate: float,
    ) -> CorrelatedSteps | None:
        """The steps of a job as the file has them. None: there is no file of this reservation.

        Args:
            job: The job's name.
            document: SHA-256 of its document.
            reservation: Number of the reservation.
            coefficients: As in the job.
            multiplier: As the reservation has it.
            rate: As the reservation has it.

        Raises:
            NoiseLost: The file is damaged, or has rows of another matrix.
        """
        found = self._read(job, document, reservation)
        if found is None:
            return None
        header, rows = found
        if header.rows != len(coefficients) - 1:
            raise NoiseLost(
                f"{self._path(job)} has {header.rows} rows, but the job's noise needs {len(coefficients) - 1}"
            )
        held = np.frombuffer(rows, dtype="<f8").astype(np.float64).reshape(header.rows, header.values)
        return CorrelatedSteps(coefficients, multiplier, rate, bytes.fromhex(header.key), header.step, held)

    def keep(self, job: str, document: bytes, reservation: int, steps: CorrelatedSteps) -> None:
        """Writes where the steps stand; on the disk when this returns. What was there is replaced.

        Raises:
            OSError: The disk does not take it.
        """
        rows = np.ascontiguousarray(steps.rows, dtype="<f8").tobytes()
        header = NoiseHeader(
            ledger=self._ledger,
            reservation=reservation,
            job_document=document,
            step=steps.step,
            key=steps.key.hex(),
            rows=steps.rows.shape[0],
            values=steps.rows.shape[1],
            rows_digest=bytes(32),
        )
        header = header.model_copy(update={"rows_digest": _digest(header, rows)})
        make_folder(self._root)
        durable_file(self._path(job), header.canonical() + b"\n" + rows, "noise", self._faults)

    def forget(self, job: str) -> None:
        """Deletes the noise of a job that is over."""
        path = self._path(job)
        # A process that died while it wrote leaves a partial file with rows.
        for each in (path, path.with_name(f".{path.name}.partial")):
            with contextlib.suppress(OSError):
                each.unlink(missing_ok=True)

    def tidy(self, wanted: Collection[tuple[str, int, bytes]]) -> None:
        """Deletes what no job of this ledger goes on from, and what a process that died left half written.

        A damaged file of a job that is wanted stays, so that its next round says so.

        Args:
            wanted: (job, number, SHA-256 of the job's document) of each reservation that was not released.
        """
        if not self._root.is_dir():
            return
        for path in self._root.iterdir():
            if not self._belongs(path, wanted):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _belongs(self, path: Path, wanted: Collection[tuple[str, int, bytes]]) -> bool:
        # A partial file's name is no job's.
        job = path.name.removesuffix(".noise")
        try:
            with path.open("rb") as file:
                header = NoiseHeader.from_json(file.readline(NoiseHeader.max_bytes + 1).rstrip(b"\n"), what=str(path))
        except (OSError, DocumentInvalid):
            return any(job == each for each, _, _ in wanted)
        return header.ledger == self._ledger and (job, header.reservation, header.job_document) in wanted

    def _path(self, job: str) -> Path:
        return self._root / f"{job}.noise"

    def _read(self, job: str, document: bytes, reservation: int) -> tuple[NoiseHeader, bytes] | None:
        path = self._path(job)
        try:
            first, _, rows = path.read_bytes().partition(b"\n")
            header = NoiseHeader.from_json(first, what=str(path))
        except FileNotFoundError:
            return None
        except (OSError, DocumentInvalid) as error:
            raise NoiseLost(f"{path} cannot be read ({error}); this job takes no more steps here") from error
        if (header.ledger, header.reservation, header.job_document) != (self._ledger, reservation, document):
            # A reservation that was released: nothing of it ever left.
            return None
        if len(rows) != 8 * header.rows * header.values or _digest(header, rows) != header.rows_digest:
            raise NoiseLost(f"{path} is damaged; this job takes no more steps here")
        return header, rows


def forget_noise(home: Path, job: str | None) -> None:
    """Deletes the noise of a job that the member withdrew from, on every data set of a home. job: None: of all jobs.

    Raises:
        OSError: A file cannot be deleted.
    """
    for path in (home / "noise").glob("*/*"):
        if job is None or path.name in (f"{job}.noise", f".{job}.noise.partial"):
            path.unlink(missing_ok=True)


def _digest(header: NoiseHeader, rows: bytes) -> bytes:
    bare = header.model_copy(update={"rows_digest": bytes(32)})
    return hashlib.sha256(bare.canonical() + b"\n" + rows).digest()
