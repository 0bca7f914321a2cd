"""A passport: one file that says where a job's versions come from, and that anybody verifies offline.

The file is canonical JSON. Its sections are texts, each the exact bytes of a document. The seal, a text as well, names
every section with its SHA-256, and the operator's key signs the seal. So a changed section is found by name, and
openssl, jq and sha256sum are enough to verify the file (docs/passport.md).

    authorities    the federation's authorities (`tacit.authorities`), which prove themselves
    document       the job document
    job            `JobFacts`
    version-N      `VersionFacts`, one section for each version
    export-N       `ExportFacts`, one for each exported folder
    withdrawal-N   `WithdrawalFacts`, one for each withdrawal that concerns the job
    audit-N        `AuditFacts`, one for each member's audit that the operator put in
    measurement-N  `MeasurementFacts`, one for each measurement that the operator put in
    successor-N    `SuccessorFacts`, one for each job that started from a version of this one
    record         `RecordFacts`: the audit journal's head and the roster log's

What it proves: the holder of the operator's key signed it, and an authority of the federation that the verifier names
issued that operator's certificate. It repeats what the coordinator recorded, and proves none of that (docs/passport.md
says what members' own receipts can confirm). This module is pure: callers read files and know the time.
"""

import base64
import binascii
import math
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, StringConstraints, model_validator

from tacit.bundle import Averaged, BundledFile, FileName
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Label, Moment, Part, Short
from tacit.job_parts import Name
from tacit.measurement import MAX_BREAKDOWN

__all__ = [
    "ALWAYS",
    "MAX_AUDITS",
    "MAX_EVALUATIONS",
    "MAX_EXPORTS",
    "MAX_MEASUREMENTS",
    "MAX_PASSPORT_BYTES",
    "MAX_SECTIONS",
    "MAX_SUCCESSORS",
    "MAX_VERSIONS",
    "MAX_WITHDRAWALS",
    "SIGNED_PREFIX",
    "AuditFacts",
    "EstimateFacts",
    "EvaluationFacts",
    "ExportFacts",
    "JobFacts",
    "LabelEstimate",
    "MeasurementFacts",
    "NotAPassport",
    "Passport",
    "RecordFacts",
    "Seal",
    "SpendFacts",
    "SuccessorFacts",
    "VersionFacts",
    "WithdrawalFacts",
]

# A longer history leaves out its oldest versions, and says how many.
MAX_VERSIONS: Final = 5_000
# Evaluations of one version; a passport holds the newest.
MAX_EVALUATIONS: Final = 16
MAX_EXPORTS: Final = 16
MAX_WITHDRAWALS: Final = 1_000
MAX_AUDITS: Final = 64
MAX_MEASUREMENTS: Final = 64
MAX_SUCCESSORS: Final = 100
MAX_PASSPORT_BYTES: Final = 32 * 1024 * 1024
# Nothing else that an operator's key signs begins like this: no statement about a corpus and no TLS handshake.
SIGNED_PREFIX: Final = b"tacit/passport/v1\n"

_Section = Annotated[str, StringConstraints(max_length=MAX_PASSPORT_BYTES)]
_SectionName = Annotated[
    str,
    StringConstraints(
        pattern=r"^(authorities|document|job|record|(version|export|withdrawal|audit|measurement|successor)-[0-9]{1,7})$"
    ),
]
# The sections that a passport may have.
MAX_SECTIONS: Final = MAX_VERSIONS + MAX_EXPORTS + MAX_WITHDRAWALS + MAX_AUDITS + MAX_MEASUREMENTS + MAX_SUCCESSORS + 4
# The sections that every passport has.
ALWAYS: Final = ("authorities", "document", "job", "record")


class NotAPassport(ValueError):
    """The bytes are no passport at all, so there is nothing to verify. The text says why."""


class SpendFacts(Part):
    """What members of a sum told the coordinator of their ledgers. It is their word; only their ledgers decide.

    Args:
        reported: how many reported what the job has cost them so far.
        withheld: how many keep it back (`report_epsilon = false`).
        largest_epsilon: no report is above it. It is rounded up to one digit, because the exact number reveals how many
            examples that member has; None without a report.
        delta: the largest delta of the reports; None without a report.
    """

    reported: int = Field(ge=0)
    withheld: int = Field(ge=0)
    largest_epsilon: float | None = Field(default=None, ge=0)
    delta: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _reports_have_numbers(self) -> Self:
        if bool(self.reported) != (self.largest_epsilon is not None and self.delta is not None):
            raise ValueError("reports have an epsilon and a delta, and without reports there is neither")
        return self


class EvaluationFacts(Part):
    """A version measured on the operator's own data; standard errors follow from accuracy and examples."""

    accuracy: float = Field(ge=0, le=1)
    # None: the model gave no number.
    loss: float | None
    examples: int = Field(ge=1)
    # SHA-256 of the file of examples.
    data: Digest | None
    at_ms: Moment

    @property
    def standard_error(self) -> float:
        """Of the accuracy, if the examples are independent draws."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.examples)


class EstimateFacts(Part):
    """A version measured by members of the round that started from it, under noise (docs/validation.md).

    Args:
        members: how many members' vectors were read.
        accuracy, accuracy_error: the estimate and its standard error, which is that of the noise.
        loss, loss_error: the same of the mean loss, in nats.
        units, units_error: the same of the number of units measured.
        selected: the version is the best of those measured. Its estimate is the largest of several noisy ones, so it is
            too high on average.

    The numbers are there together, or nothing is shown because too few units were measured.
    """

    members: int = Field(ge=1)
    accuracy: float | None = Field(default=None, ge=0, le=1)
    accuracy_error: float | None = Field(default=None, ge=0)
    loss: float | None = Field(default=None, ge=0)
    loss_error: float | None = Field(default=None, ge=0)
    units: float | None = Field(default=None, ge=0)
    units_error: float | None = Field(default=None, ge=0)
    selected: bool = False

    @model_validator(mode="after")
    def _shown_with_errors(self) -> Self:
        numbers = (self.accuracy, self.accuracy_error, self.loss, self.loss_error, self.units, self.units_error)
        if any(each is None for each in numbers) and any(each is not None for each in numbers):
            raise ValueError("an estimate has all its numbers and their errors, or none of them")
        if self.selected and self.accuracy is None:
            raise ValueError("only a version with an estimate is selected")
        return self


class JobFacts(Document):
    """The job, in numbers that the document does not hold or a reader looks for first."""

    name: Name
    # SHA-256 of the job document, the section `document`.
    document: Digest
    status: Literal["running", "paused", "finished", "aborted"]
    created_ms: Moment
    mechanism: Short
    # As the job document says: private rows on which the job's numbers were chosen, which is in no epsilon.
    tuned_on: Literal["own-private"] | None = None
    # The oldest versions beyond `MAX_VERSIONS`.
    versions_left_out: int = Field(default=0, ge=0)


class VersionFacts(Document):
    """One version: where its bytes come from. Version 0 is the start, and has no sum."""

    number: int = Field(ge=0)
    version: Digest
    at_ms: Moment
    # The journal's entry that recorded it: number and hash.
    entry: int = Field(ge=1)
    entry_hash: Digest
    mechanism: Short
    round: int = Field(ge=0)
    attempt: int | None = Field(default=None, ge=1)
    # Members of the attempt at its start, and members whose vectors are in the sum.
    cohort: int | None = Field(default=None, ge=1)
    summed: int | None = Field(default=None, ge=1)
    # SHA-256 over session, U3 and the sum: `result` in the receipts of these members.
    sum: Digest | None = None
    # None: the job has no mechanism, so no ledger was charged.
    spend: SpendFacts | None = None
    evaluations: Annotated[tuple[EvaluationFacts, ...], AtMost(MAX_EVALUATIONS)] = ()
    # None: no member measured it.
    estimate: EstimateFacts | None = None


class ExportFacts(Document):
    """A folder that `coordinator export` wrote.

    Args:
        number: the version that it was made from; of an average, the newest one in it.
        version: SHA-256 of the weights.
        averaged: the versions whose average these weights are, as the job document orders; empty for a version.
    """

    number: int = Field(ge=0)
    version: Digest
    averaged: Averaged = ()
    format: Literal["model", "prompt", "generator", "hf"]
    # bundle.json itself, and the files that it lists.
    index: Digest
    files: Annotated[dict[FileName, BundledFile], AtMost(64)]


class WithdrawalFacts(Document):
    """Members that withdrew after their updates went into a version. It names nobody.

    All versions from `first` on hold the updates, because each was made from the one before it.
    """

    at_ms: Moment
    # The journal's entry that marked the versions.
    entry: int = Field(ge=1)
    # 0: the job started from such a version.
    first: int = Field(ge=0)
    # In how many versions' own sums they were.
    sums: int = Field(ge=0)
    members: int = Field(ge=1)


class AuditFacts(Document):
    """A member's audit of a version, as the member signed it (`tacit.audit`). It names nobody."""

    # SHA-256 of the file that the member made.
    audit: Digest
    number: int = Field(ge=0)
    version: Digest
    verdict: Literal["sound", "above-claim", "cannot-tell"]
    # The lower bound on epsilon that the member's canaries prove, the one that they would have proved with all guesses
    # right, and the epsilon that it was charged, rounded up. All at this delta.
    lower_bound: float = Field(ge=0)
    possible: float = Field(ge=0)
    claim: float = Field(ge=0)
    delta: float = Field(gt=0, lt=1)
    confidence: float = Field(gt=0, lt=1)
    canaries: int = Field(ge=0)


class LabelEstimate(Part):
    """What members measured of the rows of one label. Its accuracy is the label's recall."""

    label: Label
    estimate: EstimateFacts


class MeasurementFacts(Document):
    """A version measured on members' rows under noise, in a job of its own (docs/measurements.md)."""

    max_bytes: ClassVar[int] = 1024 * 1024

    name: Name
    # SHA-256 of the measurement's document, and of the published mean of its answers.
    document: Digest
    answer: Digest
    number: int = Field(ge=0)
    version: Digest
    rows: Literal["kept-back", "all"]
    # How many members in the sum have updates in the version. None: a part of its history is not known.
    trained: int | None = Field(default=None, ge=0)
    # Over all rows.
    whole: EstimateFacts
    by_label: Annotated[tuple[LabelEstimate, ...], AtMost(MAX_BREAKDOWN)] = ()


class SuccessorFacts(Document):
    """A job that started from a version of this one."""

    at_ms: Moment
    # The journal's entry that created it.
    entry: int = Field(ge=1)
    job: Name
    # The version of this job that it started from.
    version: int = Field(ge=0)
    # Members that had withdrawn by then and whose updates that version holds.
    withdrawn: int = Field(ge=0)


class RecordFacts(Document):
    """Heads of what the coordinator keeps append-only, when the passport was made."""

    made_ms: Moment
    software: Short
    # The audit journal's newest entry and its hash.
    journal_entry: int = Field(ge=0)
    journal_head: Digest
    # The roster log that follows from the journal; members hold copies of it.
    roster_entries: int = Field(ge=0)
    roster_root: Digest


class Seal(Document):
    """What is signed: whose passport it is, who signs, and the SHA-256 of every section."""

    max_bytes: ClassVar[int] = 2 * 1024 * 1024

    kind: Literal["tacit-passport-seal"] = "tacit-passport-seal"
    federation: Digest
    job: Name
    operator: Short
    # SHA-256 of the operator's certificate.
    certificate: Digest
    made_ms: Moment
    sections: Annotated[dict[_SectionName, Digest], AtMost(MAX_SECTIONS)]


def _signature(value: object) -> bytes:
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError("it is not base64") from error
    if not isinstance(value, bytes):
        raise ValueError("it is not base64")
    return value


class Passport(Document):
    """The file."""

    max_bytes: ClassVar[int] = MAX_PASSPORT_BYTES

    kind: Literal["tacit-passport"] = "tacit-passport"
    seal: Annotated[str, StringConstraints(max_length=Seal.max_bytes)]
    # By the operator's key over `SIGNED_PREFIX` and the seal: RSA-PSS, SHA-256, a salt of 32 bytes.
    signature: Annotated[
        bytes,
        PlainValidator(_signature),
        Field(max_length=1024),
        PlainSerializer(lambda value: base64.b64encode(value).decode(), return_type=str),
    ]
    # PEM.
    certificate: Annotated[str, StringConstraints(max_length=8192)]
    sections: Annotated[dict[_SectionName, _Section], AtMost(MAX_SECTIONS)]

    def to_bytes(self) -> bytes:
        """The file's content: the canonical form and a line end."""
        return self.canonical() + b"\n"

    def section(self, name: str) -> bytes:
        """A section's exact bytes. Raises: KeyError: there is none of that name."""
        return self.sections[name].encode()

    @property
    def versions(self) -> tuple[VersionFacts, ...]:
        """The versions in order. Raises: DocumentInvalid: a section is not what its name says."""
        return tuple(VersionFacts.from_json(self.section(name), what=name) for name in self._named("version"))

    @property
    def exports(self) -> tuple[ExportFacts, ...]:
        """The exported folders in order. Raises: DocumentInvalid: a section is not what its name says."""
        return tuple(ExportFacts.from_json(self.section(name), what=name) for name in self._named("export"))

    @property
    def withdrawals(self) -> tuple[WithdrawalFacts, ...]:
        """The withdrawals in order. Raises: DocumentInvalid: a section is not what its name says."""
        return tuple(WithdrawalFacts.from_json(self.section(name), what=name) for name in self._named("withdrawal"))

    @property
    def audits(self) -> tuple[AuditFacts, ...]:
        """The audits in order. Raises: DocumentInvalid: a section is not what its name says."""
        return tuple(AuditFacts.from_json(self.section(name), what=name) for name in self._named("audit"))

    @property
    def measurements(self) -> tuple[MeasurementFacts, ...]:
        """The measurements in order. Raises: DocumentInvalid: a section is not what its name says."""
        return tuple(MeasurementFacts.from_json(self.section(name), what=name) for name in self._named("measurement"))

    @property
    def successors(self) -> tuple[SuccessorFacts, ...]:
        """The jobs that started from this one, in order. Raises: DocumentInvalid: a section is not what it says."""
        return tuple(SuccessorFacts.from_json(self.section(name), what=name) for name in self._named("successor"))

    def _named(self, kind: str) -> list[str]:
        found = [name for name in self.sections if name.startswith(f"{kind}-")]
        return sorted(found, key=lambda name: int(name.rpartition("-")[2]))

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Reads a passport without verifying it.

        Raises:
            NotAPassport: it is too long or another file.
            DocumentInvalid: it is a passport that was damaged.
        """
        try:
            return cls.from_json(data, what="the file")
        except DocumentInvalid as error:
            if len(data) > cls.max_bytes or b"tacit-passport" not in data:
                raise NotAPassport(f"it is not a passport: {error}") from error
            raise
