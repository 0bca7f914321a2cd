"""The last model that this member trained itself for a job that orders synthetic text: HOME/synthesis/JOB.

    job.json, tokenizer.json    the job's, so that nothing has to be fetched again
    model.safetensors           weights by name; in its header round, version and the reservation that it was charged to
    histogram.json              a noised histogram of labels, and the reservation that it was charged to

Guarantees: a model is stored whole or not at all; `load` never returns a model without the charge that its mechanism
requires (it asks the ledger); an earlier round's model never replaces a later one's. Only the owner can read the
folder, because under `none` a model holds the texts without any noise.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import structlog

from edge_client.ledger.receipts import HISTOGRAM
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Short
from tacit.job import JobDocument
from tacit.limits import MAX_LABELS
from tacit.mechanism import NoMechanism
from toolkit.durable import Faults, durable_file, make_folder, no_faults

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "KeptModel",
    "LastModels",
    "NoisedHistogram",
    "TrainedModel",
    "forget_model",
    "job_of_model",
    "jobs_with_models",
]

log = structlog.get_logger("edge_client")

# paid(reservation, job, document, mechanism): whether the ledger holds that charge (`Budget.paid`).
Paid = Callable[[int, str, bytes, str], bool]


@dataclass(frozen=True)
class TrainedModel:
    """The result of one round on this machine: the version that it started from plus this member's protected update."""

    job: JobDocument
    tokenizer: bytes
    round: int
    # Digest of the version that training started from.
    version: bytes
    arrays: "Mapping[str, NDArray[np.float32]]" = field(repr=False)


@dataclass(frozen=True)
class KeptModel:
    """A model that may be sampled from. trained: the reservation that it was charged to. None: mechanism `none`."""

    model: TrainedModel
    trained: int | None


class NoisedHistogram(Document):
    """The content of histogram.json: noised counts of labels, in the order of the job's labels."""

    max_bytes: ClassVar[int] = 1024 * 1024

    job_document: Digest
    # Id (hexadecimal) of the ledger that it was charged to, and the reservation there.
    ledger: Short
    reservation: int
    counts: Annotated[tuple[int, ...], AtMost(MAX_LABELS)]


def jobs_with_models(home: Path) -> Iterator[str]:
    """Yields the names of jobs of which HOME/synthesis holds anything."""
    with contextlib.suppress(FileNotFoundError):
        yield from sorted(path.name for path in (home / "synthesis").iterdir() if path.is_dir())


def job_of_model(home: Path, job: str) -> JobDocument | None:
    """The document of a job with a stored model. None: there is none, or it cannot be read."""
    try:
        return JobDocument.from_file(home / "synthesis" / job / "job.json", what="job.json")
    except (OSError, DocumentInvalid):
        return None


def forget_model(home: Path, job: str) -> None:
    """Deletes what HOME/synthesis holds of a job, whichever federation and ledger it belongs to.

    Raises:
        OSError: something cannot be deleted.
    """
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(home / "synthesis" / job)


class LastModels:
    """The models of one home, for one federation and one ledger. Thread-safe."""

    def __init__(self, home: Path, federation: bytes, ledger: bytes, faults: Faults = no_faults) -> None:
        self._root = home / "synthesis"
        self._federation = federation
        self._ledger = ledger
        self._faults = faults
        self._turn = threading.Lock()
        # By job: document, round and reservation of the model written last.
        self._last: dict[str, tuple[bytes, int, int | None]] = {}

    def jobs(self) -> Iterator[str]:
        """Yields the names of jobs with a stored model, whichever federation or ledger it belongs to."""
        with contextlib.suppress(FileNotFoundError):
            yield from sorted(path.parent.name for path in self._root.glob("*/model.safetensors"))

    def keep(self, model: TrainedModel, reservation: int | None) -> None:
        """Stores a model in place of the earlier round's. Only for an attempt whose charge is in the ledger.

        Raises:
            OSError: the disk does not take it; the earlier round's model stays.
        """
        from safetensors.numpy import save

        self._faults("model.charged")
        document = model.job.digest()
        this = (document, model.round, reservation)
        with self._turn:
            last = self._last.get(model.job.name)
            if last is not None and last[0] == document and (last[1] > model.round or last == this):
                return
            folder = self._root / model.job.name
            make_folder(folder)
            for name, content in (("job.json", model.job.canonical()), ("tokenizer.json", model.tokenizer)):
                path = folder / name
                if not path.exists() or path.read_bytes() != content:
                    durable_file(path, content, "material")
            header = {
                "federation": self._federation.hex(),
                "ledger": self._ledger.hex(),
                "job_document": document.hex(),
                "round": str(model.round),
                "version": model.version.hex(),
                "reservation": "" if reservation is None else str(reservation),
            }
            durable_file(folder / "model.safetensors", save(dict(model.arrays), header), "model", self._faults)
            self._last[model.job.name] = this

    def document(self, job: str) -> JobDocument | None:
        """The stored document of a job. None: there is none, or it cannot be read."""
        return job_of_model(self._root.parent, job)

    def load(self, job: str, paid: Paid) -> KeptModel | None:
        """Loads the model that may be sampled from.

        Returns:
            None if there is none, if it belongs to another federation, ledger or job, or if the ledger does not hold
            its charge.
        """
        from safetensors import SafetensorError, safe_open

        folder = self._root / job
        path = folder / "model.safetensors"
        try:
            with safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
            document = JobDocument.from_file(folder / "job.json", what="job.json")
            tokenizer = (folder / "tokenizer.json").read_bytes()
            round_, version = int(header["round"]), bytes.fromhex(header["version"])
            reservation = int(header["reservation"]) if header["reservation"] else None
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, DocumentInvalid, KeyError, ValueError) as error:
            log.warning("model_unusable", job=job, path=str(path), why=str(error))
            return None
        ours = (self._federation.hex(), self._ledger.hex(), document.digest().hex())
        if (header.get("federation"), header.get("ledger"), header.get("job_document")) != ours:
            # It belongs to an earlier enrolment, to other data, or to an earlier job with this name.
            return None
        if reservation is None and not isinstance(document.mechanism, NoMechanism):
            return None
        if reservation is not None and not paid(reservation, job, document.digest(), document.mechanism.name):
            log.error("model_not_paid", job=job, reservation=reservation)
            return None
        return KeptModel(TrainedModel(document, tokenizer, round_, version, arrays), reservation)

    def histogram(self, model: KeptModel, paid: Paid) -> NoisedHistogram | None:
        """The stored histogram for this job. None: there is none, or its charge is not in the ledger."""
        job = model.model.job
        try:
            found = NoisedHistogram.from_file(self._root / job.name / "histogram.json", what="histogram.json")
        except (OSError, DocumentInvalid):
            return None
        document = job.digest()
        ours = (document, self._ledger.hex(), len(job.labels))
        if (found.job_document, found.ledger, len(found.counts)) != ours:
            return None
        return found if paid(found.reservation, job.name, document, HISTOGRAM) else None

    def keep_histogram(self, job: str, histogram: NoisedHistogram) -> None:
        """Stores a histogram whose charge is in the ledger.

        Raises:
            OSError: the disk does not take it.
        """
        path = self._root / job / "histogram.json"
        durable_file(path, histogram.canonical(), "histogram", self._faults)

    def forget(self, job: str) -> None:
        """Deletes the model and the histogram, once the corpus is released or given up."""
        with self._turn:
            shutil.rmtree(self._root / job, ignore_errors=True)
            self._last.pop(job, None)
