"""What a passport says of a job, taken from the audit journal's entries.

The journal is verified from its first entry on while it is read (`JobHistory.take`), so what the passport says follows
from the head that the passport names. Everything else comes from the job document and from exported folders.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.domain.validation import Measured, best_of
from coordinator.storage.chain import JournalEntry, RosterOfJournal, Verifier
from tacit.bundle import INDEX, WEIGHTS_FILE, BundleInvalid, read_bundle
from tacit.job import Average, JobDocument
from tacit.mechanism import NoMechanism
from tacit.passport import (
    MAX_EVALUATIONS,
    MAX_SUCCESSORS,
    MAX_VERSIONS,
    MAX_WITHDRAWALS,
    EstimateFacts,
    EvaluationFacts,
    ExportFacts,
    JobFacts,
    RecordFacts,
    SpendFacts,
    SuccessorFacts,
    VersionFacts,
    WithdrawalFacts,
)
from tacit.rounding import rounded_up

__all__ = ["ExportUnknown", "JobHistory", "export_facts"]

# Fields of an estimate, under the same names in the journal.
_ESTIMATED = ("accuracy", "accuracy_error", "loss", "loss_error", "units", "units_error")


class ExportUnknown(ValueError):
    """A folder cannot be in the passport; the text says why and what to do."""


@dataclass
class JobHistory:
    """Takes the whole journal in order, verifies it, and keeps what concerns one job."""

    job: str
    verifier: Verifier = field(default_factory=Verifier)
    roster: RosterOfJournal = field(default_factory=RosterOfJournal)
    created: JournalEntry | None = None
    status: str = "running"
    # By attempt: its cohort's size. By round: the entry of its published attempt. By number: entries of versions.
    _cohorts: dict[int, int] = field(default_factory=dict)
    _sums: dict[int, JournalEntry] = field(default_factory=dict)
    _versions: dict[int, JournalEntry] = field(default_factory=dict)
    _evaluations: dict[int, list[JournalEntry]] = field(default_factory=dict)
    # By number of the measured version, in order.
    _measured: dict[int, JournalEntry] = field(default_factory=dict)
    _withdrawals: list[JournalEntry] = field(default_factory=list)
    _successors: list[JournalEntry] = field(default_factory=list)

    def take(self, entry: JournalEntry) -> None:
        """Takes the next entry.

        Raises:
            ChainBroken: it does not follow the one before it.
        """
        self.verifier.take(entry)
        self.roster.take(entry)
        fields: Any = entry.fields
        if entry.kind == "job_created" and fields.get("earlier_job") == self.job:
            self._successors.append(entry)
        if entry.subject != self.job:
            return
        match entry.kind:
            case "job_created":
                self.created = self._versions[0] = entry
            case "job_status":
                self.status = fields["status"]
            case "attempt_opened":
                self._cohorts[fields["attempt"]] = len(fields["cohort"])
            case "attempt_ended" if fields["outcome"] == "published":
                self._sums[fields["round"]] = entry
            case "version_published":
                self._versions[fields["number"]] = entry
            case "evaluation_recorded":
                self._evaluations.setdefault(fields["number"], []).append(entry)
            case "version_measured":
                self._measured[fields["number"]] = entry
            case "version_withdrawn":
                self._withdrawals.append(entry)
            case _:
                pass

    def facts(self, document: JobDocument, digest: bytes) -> tuple[JobFacts, tuple[VersionFacts, ...]]:
        """The job and its versions, oldest first, without the oldest beyond `MAX_VERSIONS`.

        Args:
            document: the job document.
            digest: SHA-256 of the job document as it is stored.

        Raises:
            ValueError: the journal does not tell of this job.
        """
        if self.created is None:
            raise ValueError(f"the journal has no entry that created {self.job}")
        numbers = sorted(self._versions)
        job = JobFacts(
            name=self.job,
            document=digest,
            status=self.status,  # type: ignore[arg-type]  # Validated by the model.
            created_ms=self.created.at_ms,
            mechanism=document.mechanism.name,
            tuned_on=document.tuned_on,
            versions_left_out=max(0, len(numbers) - MAX_VERSIONS),
        )
        best = self._best()
        return job, tuple(self._version(number, document, number == best) for number in numbers[-MAX_VERSIONS:])

    def withdrawals(self) -> tuple[WithdrawalFacts, ...]:
        """The newest withdrawals that concern the job."""
        found = []
        for entry in self._withdrawals[-MAX_WITHDRAWALS:]:
            fields: Any = entry.fields
            of = {name: fields[name] for name in ("first", "sums", "members")}
            found.append(WithdrawalFacts(at_ms=entry.at_ms, entry=entry.id, **of))
        return tuple(found)

    def successors(self) -> tuple[SuccessorFacts, ...]:
        """The newest jobs that started from a version of this one."""
        found = []
        for entry in self._successors[-MAX_SUCCESSORS:]:
            fields: Any = entry.fields
            found.append(
                SuccessorFacts(
                    at_ms=entry.at_ms,
                    entry=entry.id,
                    job=entry.subject,
                    version=fields["earlier_version"],
                    withdrawn=fields["withdrawn"],
                )
            )
        return tuple(found)

    def record(self, made_ms: int, software: str) -> RecordFacts:
        """The heads of what was read.

        Raises:
            ChainBroken: see `Verifier.verdict`.
        """
        verdict = self.verifier.verdict()
        return RecordFacts(
            made_ms=made_ms,
            software=software,
            journal_entry=verdict.head_id,
            journal_head=verdict.head,
            roster_entries=self.roster.size,
            roster_root=self.roster.root,
        )

    def _version(self, number: int, document: JobDocument, best: bool) -> VersionFacts:
        entry = self._versions[number]
        fields: Any = entry.fields
        ended = self._sums.get(fields["round"]) if number else None
        of_sum: dict[str, Any] = {} if ended is None else self._sum(ended, document)
        return VersionFacts(
            number=number,
            version=bytes.fromhex(fields["version"]),
            at_ms=entry.at_ms,
            entry=entry.id,
            entry_hash=entry.hash,
            mechanism=document.mechanism.name,
            round=fields["round"] if number else 0,
            evaluations=tuple(_evaluation(each) for each in self._evaluations.get(number, [])[-MAX_EVALUATIONS:]),
            estimate=_estimate(self._measured[number], best) if number in self._measured else None,
            **of_sum,
        )

    def _best(self) -> int | None:
        """The number of the best measured version."""
        at = best_of([_accuracy(each) for each in self._measured.values()])
        return None if at is None else list(self._measured)[at]

    def _sum(self, ended: JournalEntry, document: JobDocument) -> dict[str, Any]:
        fields: Any = ended.fields
        summed = len(fields["survivors"])
        spend = None
        if not isinstance(document.mechanism, NoMechanism):
            epsilon, reported = fields.get("epsilon"), fields.get("reported") or 0
            spend = SpendFacts(
                reported=reported,
                withheld=summed - reported,
                largest_epsilon=None if epsilon is None else rounded_up(epsilon, 1),
                delta=fields.get("delta"),
            )
        return {
            "attempt": fields["attempt"],
            "cohort": self._cohorts.get(fields["attempt"]),
            "summed": summed,
            "sum": bytes.fromhex(fields["result"]),
            "spend": spend,
        }


def _estimate(entry: JournalEntry, selected: bool) -> EstimateFacts:
    fields: Any = entry.fields
    return EstimateFacts(selected=selected, **{name: fields[name] for name in ("members", *_ESTIMATED)})


def _accuracy(entry: JournalEntry) -> Measured | None:
    fields: Any = entry.fields
    return None if fields["accuracy"] is None else Measured(fields["accuracy"], fields["accuracy_error"])


def _evaluation(entry: JournalEntry) -> EvaluationFacts:
    fields: Any = entry.fields
    return EvaluationFacts(
        accuracy=fields["accuracy"],
        loss=fields["loss"],
        examples=fields["examples"],
        data=None if fields["data"] is None else bytes.fromhex(fields["data"]),
        at_ms=entry.at_ms,
    )


def export_facts(
    folder: Path,
    versions: tuple[VersionFacts, ...],
    version: bytes | None = None,
    averaged: tuple[int, ...] = (),
    average: Average | None = None,
) -> ExportFacts:
    """Reads an exported folder, and checks every file against its bundle.json.

    Args:
        folder: the folder.
        versions: the job's versions.
        version: the digest that it was made from, for a folder that does not say so.
        averaged: the numbers of the versions whose average it is, for such a folder.
        average: what the job document orders.

    Raises:
        BundleInvalid: it is no exported folder, or a file differs.
        ExportUnknown: it does not say which version it is, or is none of this job's.
    """
    bundle = read_bundle(folder, "model", "prompt", "generator", "hf", unread=(WEIGHTS_FILE,))
    facts = bundle.index.model or bundle.index.generator
    if (digest := version if facts is None else facts.version) is None:
        raise ExportUnknown(
            f"{folder} does not say which version it is, like every folder for transformers; `coordinator export` "
            "writes its passport with it"
        )
    averaged = averaged if facts is None else facts.averaged
    number = averaged[-1] if averaged else next((each.number for each in versions if each.version == digest), None)
    if averaged and (absent := set(averaged) - {each.number for each in versions}):
        raise ExportUnknown(f"{folder} is an average of version {min(absent)}, which this job does not have")
    if averaged and (average is None or averaged != tuple(average.weights(averaged[-1]))):
        raise ExportUnknown(f"{folder} is an average of other versions than this job orders; export it again")
    if number is None:
        raise ExportUnknown(f"{folder} was made from {digest.hex()}, and no version of this job has that digest")
    try:
        index = (folder / INDEX).read_bytes()
    except OSError as error:
        raise BundleInvalid(f"{folder / INDEX} cannot be read: {error.strerror}") from error
    return ExportFacts(
        number=number,
        version=digest,
        averaged=averaged,
        format=bundle.index.kind,  # type: ignore[arg-type]  # One of those that were asked for.
        index=hashlib.sha256(index).digest(),
        files=bundle.index.files,
    )
