"""`edge_client audit`: what an attacker would learn from this member's updates and from the published version.

Nothing is sent, and no ledger is charged: rehearsals train in memory, and their updates are dropped. Private parameters
are read and not changed. The ledger is only read, for what the job has claimed so far.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import secure_agg
from edge_client.agent.own_model import UNWATCHED, Fetched, Watch, fetch_own, fetch_start
from edge_client.agent.runner import Member, RunOptions, load_member
from edge_client.canaries import Planted
from learning.text.data import read_data
from learning.text.examples import DataInvalid, Example
from learning.text.persons import unit_of_job
from tacit.documents import DocumentInvalid
from tacit.mechanism import NoMechanism
from tacit.method import keeps_anything
from tacit.prompt import writes
from toolkit.console import ExitCode, fail

if TYPE_CHECKING:
    from learning.accounting.events import PrivacyEvent
    from learning.auditing.report import Outcome, Report
    from tacit.audit import SignedAudit

__all__ = ["AuditOptions", "audit_own", "release"]

# Without it the version says nothing, and with it the scores depend on what no noise protects.
_KEPT = "members of this job keep parameters, which were trained without noise on canaries and rows"


@dataclass(frozen=True)
class AuditOptions:
    """How to audit.

    Attributes:
        minutes: Roughly how long rehearsals may take.
        held_out: A file of rows that the member did not train on.
        release: The file to write what may leave to.
    """

    minutes: float = 5.0
    held_out: Path | None = None
    release: Path | None = None


def audit_own(
    name: str, options: RunOptions, audit: AuditOptions, *, watch: Watch = UNWATCHED
) -> "tuple[Report, SignedAudit | None]":
    """Audits a job on this machine. Everything that could be refused is checked before anything is trained.

    Args:
        name: The job's name.
        options: Whose data and machine it is, as for `edge_client run`.
        audit: How to audit.
        watch: Callbacks for progress.

    Returns:
        What was found, and what may leave of it if that is asked for.

    Raises:
        CommandFailed: The input cannot be used, the coordinator cannot be reached, or the training fails.
        StoreError: The member's private state cannot be opened.
    """
    began = time.monotonic()
    if audit.release is not None:
        _check_place(audit.release)
    member = load_member(options)
    if member.skipped:
        watch.say(f"{options.data}: {member.skipped.sentence(len(member.examples))}")
    held_out = [] if audit.held_out is None else _held_out(audit.held_out, options)
    found = fetch_own(name, member, options, generators=True)
    if unit_of_job(found.job) == "person":
        fail(
            f"{name} protects persons, and an audit's canaries are rows: a rehearsal by row would test another "
            "mechanism than the one that ran; audit a job by row",
            ExitCode.USAGE,
        )
    if writes(found.job.model):
        fail(
            f"the model of {name} writes, and an audit's canaries are texts with a label; a job that labels texts can "
            "be audited",
            ExitCode.USAGE,
        )
    planted = _planted(found, member)
    start = fetch_start(found, member) if found.number and (planted is not None or held_out) else None
    claim = _claimed(found, member, options)
    if audit.release is not None:
        _check_releasable(found, planted, start, claim)

    from learning.auditing.audit import CONFIDENCE, memory_mib
    from learning.auditing.published import check_rows
    from learning.auditing.report import Report
    from learning.training.local import TrainingDiverged
    from learning.training.update import TrainingLost

    if held_out and start is not None:
        try:
            check_rows(found.job, member.examples, held_out)
        except ValueError as error:
            fail(str(error), ExitCode.USAGE)
    watch.say(f"rehearsing a round of {name} from version {found.number}, about {audit.minutes:g} minutes")
    try:
        work = _Work(found, member, planted, held_out, start)
        outcomes, missing, rebuilt = work.outcomes(60 * audit.minutes, claim, watch)
    except (TrainingLost, TrainingDiverged) as error:
        fail(f"a rehearsal of {name} failed: {error}", ExitCode.FAILED)
    except (ValueError, RuntimeError) as error:
        fail(f"version {found.number} of {name} cannot be audited: {error}", ExitCode.FAILED)
    report = Report(
        job=name,
        document=found.job.digest(),
        versions={found.number: found.digest},
        delta=member.policy.delta,
        confidence=CONFIDENCE,
        outcomes=outcomes,
        missing=missing,
        reconstruction=rebuilt,
        seconds=time.monotonic() - began,
        memory_mib=memory_mib(),
    )
    return report, None if audit.release is None else _signed(report, found, member)


@dataclass(frozen=True)
class _Work:
    """What is tested. start: version 0's bytes; None if there is no later version, or it is not served any more."""

    found: Fetched
    member: Member
    planted: Planted | None
    held_out: list[Example]
    start: bytes | None

    def outcomes(
        self, seconds: float, claim: float | None, watch: Watch
    ) -> "tuple[list[Outcome], dict[str, str], Mapping[str, Any]]":
        """Returns the tests, the attacks that do not apply, and the reconstruction. claim: of the version."""
        import torch

        from learning.auditing.audit import audit_update
        from learning.auditing.planted import EACH
        from learning.auditing.published import by_canaries, by_pairs
        from learning.auditing.subject import Subject

        torch.set_num_threads(1)
        found, planted, held_out, start = self.found, self.planted, self.held_out, self.start
        delta, on, random = self.member.policy.delta, f"version-{found.number}", secure_agg.SystemRandom()
        subject = Subject(
            found.job,
            found.manifest,
            found.version,
            found.tokenizer,
            private=found.kept,
            frozen=found.frozen,
            backbone=found.backbone,
            own=self.member.policy.own(),
            device=self.member.device,
        )
        outcomes, missing, rebuilt = audit_update(
            subject,
            self.member.examples,
            random,
            seconds=seconds,
            delta=delta,
            confidence=EACH,
            tell=lambda done, of: watch.step(done, of, 0.0),
        )
        if start is not None and planted is not None:
            rows, present = planted.examples, planted.present
            outcomes.append(by_canaries(subject, start, on, rows, present, claim, delta=delta, confidence=EACH))
        if start is not None and held_out:
            own = self.member.examples
            outcomes += by_pairs(subject, start, on, own, held_out, claim, random, delta=delta, confidence=EACH)
        return outcomes, missing | self._missing(on.replace("-", " ")), rebuilt

    def _missing(self, on: str) -> dict[str, str]:
        missing = {}
        if keeps_anything(self.found.job.method):
            missing[f"canaries, {on}"] = f"must not read what this machine keeps: {_KEPT}"
        elif self.planted is None:
            missing[f"canaries, {on}"] = (
                "needs canaries in this member's data: a job asks for them with [audit], and a policy agrees with "
                "max_canaries"
            )
        if not self.held_out:
            missing[f"membership, {on}"] = "needs rows that were not trained on; name a file of them with --held-out"
        if self.start is None and (self.planted is not None or self.held_out):
            missing[on] = "needs a version after version 0, and version 0 beside it"
        return missing


def _planted(found: Fetched, member: Member) -> Planted | None:
    """The canaries that this member planted for the job; None if there are none that can test a version."""
    if keeps_anything(found.job.method):
        return None
    try:
        return member.canaries.load(found.job)
    except (DocumentInvalid, OSError) as error:
        fail(f"the record of this member's canaries cannot be used: {error}", ExitCode.FAILED)


def _check_place(path: Path) -> None:
    """Refuses a path that cannot be written, or that is there already: it may be the member's data."""
    if path.exists() or path.is_symlink():
        fail(f"{path} exists already; name another file with --release", ExitCode.USAGE)
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)):
        fail(f"{path.parent} is no folder that can be written; name another file with --release", ExitCode.USAGE)


def _check_releasable(found: Fetched, planted: Planted | None, start: bytes | None, claim: float | None) -> None:
    """Refuses an audit of which nothing may leave."""
    why = None
    if keeps_anything(found.job.method):
        why = _KEPT
    elif planted is None:
        why = (
            "this member planted no canaries for the job, which needs [audit] in the job and max_canaries in the policy"
        )
    elif start is None:
        why = "canaries test a version after version 0, and version 0 beside it"
    elif not claim:
        why = "the ledger of this data was charged nothing for the job; give the data that you take part with"
    if why is not None:
        fail(f"nothing of this audit may leave: {why}", ExitCode.REFUSED)


def release(path: Path, signed: "SignedAudit") -> None:
    """Writes what may leave.

    Raises:
        CommandFailed: The file is there already, or cannot be written.
    """
    from toolkit.durable import durable_file

    _check_place(path)
    try:
        durable_file(path, signed.canonical())
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}; name another file with --release", ExitCode.USAGE)


def _signed(report: "Report", found: Fetched, member: Member) -> "SignedAudit":
    """What may leave of an audit: the verdict, and the result of the planted canaries, signed."""
    from learning.auditing.planted import TESTS
    from tacit.audit import AuditStatement, sign_audit
    from tacit.rounding import rounded_up

    on = f"version-{found.number}"
    planted = next(each for each in report.outcomes if (each.attack, each.on) == ("canaries", on))
    if planted.claim is None:
        raise TypeError("a version that was charged has a claim")
    identity = member.identity
    # The exact one, with a known rate, would reveal how many examples this member has.
    claim = rounded_up(planted.claim, 1)
    statement = AuditStatement(
        federation=identity.federation,
        member=identity.member,
        job=report.job,
        document=report.document,
        number=found.number,
        version=found.digest,
        verdict=(
            "above-claim" if report.verdict == "above-claim" else "sound" if planted.possible > claim else "cannot-tell"
        ),
        claim=claim,
        lower_bound=planted.lower_bound,
        possible=planted.possible,
        delta=report.delta,
        confidence=report.confidence,
        tests=TESTS,
        canaries=planted.guesses.rows,
        guesses=planted.guesses.made,
        correct=planted.guesses.correct,
        made_ms=time.time_ns() // 1_000_000,
    )
    return sign_audit(statement, identity.key, identity.certificate)


def _held_out(path: Path, options: RunOptions) -> list[Example]:
    if not path.exists():
        fail(f"{path} does not exist; check the path", ExitCode.NOT_FOUND)
    try:
        found = read_data(
            path, text=options.text, label=options.label, text_b=options.text_b, skip_invalid=options.skip_invalid
        )
    except DataInvalid as error:
        fail(str(error), ExitCode.USAGE)
    return found.examples


def _claimed(found: Fetched, member: Member, options: RunOptions) -> float | None:
    """The epsilon of everything that this data set's ledger was charged for the job; None without a mechanism."""
    from edge_client.ledger.history import current
    from edge_client.ledger.ledger import ledger_path
    from edge_client.ledger.store import LedgerError, reading
    from learning.auditing.subject import claim_of

    ours = (member.identity.federation, found.job.name)
    events: list[PrivacyEvent] = []
    try:
        path = ledger_path(member.home, options.data_name)
        if path.exists():
            with reading(path) as store:
                events = [
                    each.as_reserved
                    for each in current(store).reservations.values()
                    if each.released is None and (each.purpose.federation, each.purpose.job) == ours
                ]
    except LedgerError as error:
        fail(f"{error}; `edge_client ledger verify` says more", ExitCode.FAILED)
    claim = claim_of(found.job, events, member.policy.delta)
    # A version of a job that promises privacy claims 0 of a member that it was not charged to.
    return 0.0 if claim is None and not isinstance(found.job.mechanism, NoMechanism) else claim
