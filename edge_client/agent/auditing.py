"""`edge_client audit`: what an attacker would learn from this member's updates and from the published version.

Nothing is sent, and no ledger is charged: rehearsals train in memory, and their updates are dropped. Private parameters
are read and not changed. The ledger is only read, for what the job has claimed so far.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import secure_agg
from edge_client.agent.own_model import UNWATCHED, Fetched, Watch, fetch_own, fetch_start
from edge_client.agent.runner import Member, RunOptions, load_member
from edge_client.canaries import CanaryBook
from learning.text.data import DataInvalid, Example, read_data
from tacit.documents import DocumentInvalid
from toolkit.console import ExitCode, fail

if TYPE_CHECKING:
    from learning.accounting.events import PrivacyEvent
    from learning.auditing.report import Report

__all__ = ["AuditOptions", "audit_own"]


@dataclass(frozen=True)
class AuditOptions:
    """How to audit.

    Attributes:
        minutes: Roughly how long rehearsals may take.
        held_out: A file of rows that the member did not train on.
    """

    minutes: float = 5.0
    held_out: Path | None = None


def audit_own(name: str, options: RunOptions, audit: AuditOptions, *, watch: Watch = UNWATCHED) -> "Report":
    """Audits a job on this machine.

    Args:
        name: The job's name.
        options: Whose data and machine it is, as for `edge_client run`.
        audit: How to audit.
        watch: Callbacks for progress.

    Raises:
        CommandFailed: The input cannot be used, the coordinator cannot be reached, or the training fails.
        StoreError: The member's private state cannot be opened.
    """
    began = time.monotonic()
    member = load_member(options)
    if member.skipped:
        watch.say(f"{options.data}: {member.skipped.sentence(len(member.examples))}")
    held_out = [] if audit.held_out is None else _held_out(audit.held_out, options)
    found = fetch_own(name, member, options, generators=True)

    import torch

    from learning.auditing.audit import CONFIDENCE, UPDATE_TESTS, audit_update, memory_mib
    from learning.auditing.published import by_canaries, by_pairs
    from learning.auditing.report import Report
    from learning.auditing.statistics import each_confidence
    from learning.auditing.subject import Subject
    from learning.training.update import TrainingLost

    torch.set_num_threads(1)
    subject = Subject(
        found.job,
        found.manifest,
        found.version,
        found.tokenizer,
        private=found.kept,
        frozen=found.frozen,
        backbone=found.backbone,
        own=member.policy.own(),
        device=member.device,
    )
    delta, on, random = member.policy.delta, f"version-{found.number}", secure_agg.SystemRandom()
    try:
        planted = CanaryBook(member.home, member.data_name, member.policy.max_canaries).load(found.job)
    except (DocumentInvalid, OSError) as error:
        fail(f"the record of this member's canaries cannot be used: {error}", ExitCode.FAILED)
    missing: dict[str, str] = {}
    start = fetch_start(found, member) if planted is not None or held_out else None
    tested = start is not None and found.number > 0
    # How many tests there are is fixed before any is made.
    tests = UPDATE_TESTS + (tested and planted is not None) + 2 * (tested and bool(held_out))
    each = each_confidence(CONFIDENCE, tests)
    watch.say(f"rehearsing a round of {name} from version {found.number}, about {audit.minutes:g} minutes")
    try:
        outcomes, absent, rebuilt = audit_update(
            subject,
            member.examples,
            random,
            seconds=60 * audit.minutes,
            delta=delta,
            confidence=each,
            tell=lambda done, of: watch.step(done, of, 0.0),
        )
        missing |= absent
        if tested and start is not None:
            claim = _claimed(found, member, options, delta)
            if planted is not None:
                canaries, present = planted.examples, planted.present
                outcomes.append(by_canaries(subject, start, on, canaries, present, claim, delta=delta, confidence=each))
            if held_out:
                outcomes += by_pairs(
                    subject, start, on, member.examples, held_out, claim, random, delta=delta, confidence=each
                )
    except TrainingLost as error:
        fail(f"a rehearsal of {name} failed: {error}", ExitCode.FAILED)
    except (ValueError, RuntimeError) as error:
        fail(f"version {found.number} of {name} cannot be audited: {error}", ExitCode.FAILED)
    if planted is None:
        missing[f"canaries, {on}"] = (
            "needs canaries in this member's data: the job asks for them with [audit], and the policy agrees with "
            "max_canaries"
        )
    if not held_out:
        missing[f"membership, {on}"] = "needs rows that were not trained on; name a file of them with --held-out"
    if not tested and (planted is not None or held_out):
        missing[on] = "needs a version after version 0, and version 0 beside it"
    return Report(
        job=name,
        document=found.job.digest(),
        versions={found.number: found.digest},
        delta=delta,
        confidence=CONFIDENCE,
        outcomes=outcomes,
        missing=missing,
        reconstruction=rebuilt,
        seconds=time.monotonic() - began,
        memory_mib=memory_mib(),
    )


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


def _claimed(found: Fetched, member: Member, options: RunOptions, delta: float) -> float | None:
    """The epsilon of everything that this data set's ledger was charged for the job; None: nothing was, or can be."""
    from edge_client.ledger.history import replayed
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
                    each.event
                    for each in replayed(store).reservations.values()
                    if each.released is None and (each.purpose.federation, each.purpose.job) == ours
                ]
    except LedgerError as error:
        fail(f"{error}; `edge_client ledger verify` says more", ExitCode.FAILED)
    return claim_of(found.job, events, delta)
