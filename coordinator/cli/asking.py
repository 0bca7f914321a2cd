"""What the commands share that write a checked file or ask a question: names, labels, noise, and fetching an answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from coordinator.cli.common import CALL_SECONDS
from toolkit.console import ExitCode, fail, printable
from toolkit.install import install_with

if TYPE_CHECKING:
    from learning.accounting.events import Holds
    from tacit.job import JobDocument
    from tacit.measurement_file import MeasurementSpec
    from tacit.mechanism import Unit
    from tacit.survey_file import SurveySpec
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

    Spec = TypeVar("Spec", SurveySpec, MeasurementSpec)

__all__ = ["DELTA", "Answer", "checked", "fetch_answer", "fetch_document", "labels_of", "new_file", "std_of", "write"]

# The delta of a policy that says nothing.
DELTA = 1e-6


def new_file(name: str, out: Path | None) -> Path:
    """The file to write for a job or a question of this name.

    Raises:
        CommandFailed: It is there already, or nothing can have this name.
    """
    from pydantic import TypeAdapter, ValidationError

    from tacit.job_parts import Name

    try:
        TypeAdapter[str](Name).validate_python(name)
    except ValidationError:
        fail(
            f"{printable(name)!r}: a name is 1 to 63 of a-z, 0-9, dot, dash, underscore, and begins with a letter or a "
            "digit",
            ExitCode.USAGE,
        )
    target = Path(f"{name}.toml") if out is None else out
    if target.exists():
        fail(f"{target} is there already; choose another file with --out, or remove it", ExitCode.USAGE)
    return target


def labels_of(told: str) -> tuple[str, ...]:
    """The labels in one line of CSV, so that one with a comma can be written in quotes.

    Raises:
        ValueError: It is not one line of CSV.
    """
    import csv

    try:
        rows = list(csv.reader(told.splitlines(keepends=True), strict=True, skipinitialspace=True))
    except csv.Error:
        rows = []
    if len(rows) != 1:
        raise ValueError(f"{told!r} is not one line of CSV; write labels as good,bad, and one with a comma in quotes")
    return tuple(each.strip() for each in rows[0])


def checked(kind: "type[Spec]", text: str, target: Path) -> "Spec":
    """Reads a file's text before it is written, as `run` will.

    Raises:
        CommandFailed: it cannot be used.
    """
    import tempfile

    from tacit.documents import DocumentInvalid

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / target.name
        try:
            path.write_text(text, encoding="utf-8")
        except UnicodeEncodeError:
            fail("no file was written: a name or a label is not UTF-8 text; type it again", ExitCode.USAGE)
        try:
            return kind.from_toml(path)
        except DocumentInvalid as error:
            fail(f"no file was written: {str(error).replace(str(path), target.name)}", ExitCode.USAGE)


def std_of(vector: "Holds", distance: float, epsilon: float, unit: "Unit") -> float:
    """Computes the noise with which an answer costs this epsilon (add-remove), rounded up to four digits.

    Args:
        vector: What the answer holds.
        distance: How far one unit can move it.
        epsilon: The epsilon.
        unit: What members' ledgers protect.

    Raises:
        CommandFailed: no noise is enough, the epsilon is not positive, or the accounting libraries are missing.
    """
    import math

    try:
        from learning.accounting.calibration import NotAffordable
        from learning.survey.answer import std_for
    except ImportError as error:
        fail(
            f"choosing the noise needs the accounting libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}",
            ExitCode.USAGE,
        )
    if not (math.isfinite(epsilon) and epsilon > 0):
        fail(f"--epsilon {epsilon:g}: must be a positive number; 0.5 is usual", ExitCode.USAGE)
    try:
        exact = std_for(vector, distance, epsilon, DELTA, unit=unit)
    except NotAffordable:
        fail(f"--epsilon {epsilon:g}: not enough for an answer at any noise; raise epsilon", ExitCode.USAGE)
    digits = 10 ** (3 - math.floor(math.log10(exact)))
    return float(math.ceil(exact * digits) / digits)


def write(text: str, target: Path) -> None:
    """Writes a file. Raises CommandFailed if that cannot be done."""
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}; choose another file with --out", ExitCode.FAILED)


@dataclass(frozen=True)
class Answer:
    """A question's job. total: (B,) the sums over its members; None: there is no answer yet. members: in the sum."""

    detail: "operator_pb2.JobDetail"
    document: "JobDocument"
    total: list[float] | None
    members: int


async def fetch_answer(stub: "OperatorServiceStub", name: str) -> Answer:
    """Fetches a job and, if it asks and has an answer, the answer. Raises CommandFailed if they cannot be read."""
    from coordinator.cli.estimated import members_of
    from tacit.documents import DocumentInvalid
    from tacit.manifest import Manifest
    from tacit.v1 import operator_pb2

    detail: operator_pb2.JobDetail = await stub.GetJob(operator_pb2.GetJobRequest(name=name), timeout=CALL_SECONDS)
    document = await fetch_document(stub, detail)
    newest = detail.versions[-1] if detail.versions else None
    if document.question is None or newest is None or newest.number == 0:
        return Answer(detail, document, None, 0)
    try:
        manifest = Manifest.from_json(await _blob(stub, document.manifest), what="the manifest")
        values = manifest.decode(await _blob(stub, newest.digest))
    except DocumentInvalid as error:
        fail(f"{error}; the coordinator may be newer than this software", ExitCode.FAILED)
    members = members_of(detail, newest.round)
    # A version is the mean answer. Its float32 values are off by 2^-24 of themselves at most.
    return Answer(detail, document, [float(each) * members for each in values], members)


async def fetch_document(stub: "OperatorServiceStub", detail: "operator_pb2.JobDetail") -> "JobDocument":
    """Fetches a job's document. Raises CommandFailed if it cannot be read."""
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument

    try:
        return JobDocument.from_json(await _blob(stub, detail.job.document), what="the job document")
    except DocumentInvalid as error:
        fail(f"{error}; the coordinator may be newer than this software", ExitCode.FAILED)


async def _blob(stub: "OperatorServiceStub", digest: bytes) -> bytes:
    from tacit.blobs import fetch_blob

    data = bytearray()
    await fetch_blob(stub.FetchBlob, digest, data)
    return bytes(data)
