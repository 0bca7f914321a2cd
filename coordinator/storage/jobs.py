"""Jobs, rounds, attempts, versions and evaluations: written by the driver of the rounds, read by the operator.

Every function works inside the caller's transaction and returns frozen dataclasses. Numbers of rounds, attempts and
versions only grow. What does not follow the stored state raises `OutOfOrder`, before the schema would refuse it. A name
is used once: a finished job keeps its name, so a digest in a receipt always finds its job.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.domain.explosion import WINDOW
from coordinator.domain.jobs import Dropout, EndAttempt, Exploded, JobStatus, Measure, Norms, Spend, TrainingMetrics
from coordinator.domain.validation import Validation
from coordinator.storage.errors import JobExists, NotFound, OutOfOrder
from coordinator.storage.estimates import StoredEstimate, best_estimate, estimates, record_estimate
from coordinator.storage.journal import note, note_seldom
from coordinator.storage.models import (
    AttemptRow,
    DropoutRow,
    EvaluationRow,
    JobRow,
    RoundRow,
    ServerStateRow,
    VersionRow,
)
from coordinator.storage.withdrawal import carry_marks, left_out, mark_published
from tacit.attempt import AttemptId
from tacit.reason import Reason, from_word, word

__all__ = [
    "Outcome",
    "StoredAttempt",
    "StoredEvaluation",
    "StoredJob",
    "StoredRound",
    "StoredVersion",
    "abandon_open_attempts",
    "check_new_job",
    "create_job",
    "end_attempt",
    "end_round",
    "fix_survivors",
    "forgive",
    "is_document",
    "jobs_over",
    "load_job",
    "load_jobs",
    "note_fetched",
    "open_attempt",
    "open_round",
    "publish_version",
    "record_evaluation",
    "rounds",
    "set_job_status",
    "versions",
]

Outcome = Literal["published", "abandoned"]
_OVER = [status.value for status in JobStatus if status.is_final]


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """A measurement of a version from outside."""

    version_number: int
    version: bytes
    accuracy: float
    loss: float  # nan if the model no longer gives a number.
    examples: int
    data: bytes | None  # SHA-256 of the file of examples.
    at_ms: int


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version of a job's model, and its evaluations."""

    number: int
    digest: bytes
    round: int  # 0 for version 0.
    created_ms: int
    evaluations: tuple[StoredEvaluation, ...]
    # Euclidean norms of the version and of its change; None if unknown (the start has no change).
    norm: float | None = None
    change: float | None = None
    # Digests of the server optimiser's state with this version, by name.
    server_state: Mapping[str, bytes] = field(default_factory=dict)
    # Members that withdrew and whose updates it holds (`coordinator.storage.withdrawal`).
    withdrawn: int = 0
    # What the members of the next round measured; None if nobody measured it.
    estimate: StoredEstimate | None = None
    # Whether the retention policy let it go (`coordinator.storage.prune`).
    pruned: bool = False


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """One attempt; its outcome is open, published or abandoned."""

    number: int
    outcome: str
    reason: str | None
    detail: str
    cohort: tuple[str, ...]
    survivors: tuple[str, ...]
    dropouts: tuple[Dropout, ...]
    result: bytes | None
    new_version: bytes | None
    training: TrainingMetrics | None
    opened_ms: int
    ended_ms: int | None


@dataclass(frozen=True, slots=True)
class StoredRound:
    """One round with its attempts; its outcome is open, published or abandoned."""

    number: int
    outcome: str
    reason: str | None
    attempts: tuple[StoredAttempt, ...]
    opened_ms: int
    ended_ms: int | None


@dataclass(frozen=True, slots=True)
class StoredJob:
    """Everything that a restart needs of a job."""

    name: str
    status: JobStatus
    reason: str | None
    document: bytes
    rounds_total: int
    round: int  # The highest round opened, 0 for none.
    round_open: bool
    attempt: int  # The highest number in this job, 0 for none.
    attempts_in_round: int  # In the highest round.
    failed_rounds: int  # Abandoned in a row since the last published round, or since the job was last resumed.
    cohort: tuple[str, ...]  # Of the newest attempt.
    # U3 of each attempt since the newest version, if the attempt came that far.
    confirmed_sums: tuple[tuple[str, ...], ...]
    version_number: int
    version: bytes
    created_ms: int
    evaluation: StoredEvaluation | None  # The newest one, of the newest version that has any.
    training: TrainingMetrics | None  # Of the newest published attempt.
    # Of the newest version; see `StoredVersion`.
    server_state: Mapping[str, bytes]
    # Of the newest steps, oldest first, and the first version that exploded.
    norms: tuple[Norms, ...] = ()
    exploded: Exploded | None = None
    # Every measured version, in order.
    estimates: tuple[StoredEstimate, ...] = ()

    @property
    def newest_shown(self) -> StoredEstimate | None:
        """The newest version of which an estimate is shown."""
        return next((each for each in reversed(self.estimates) if each.estimate is not None), None)

    @property
    def best(self) -> StoredEstimate | None:
        """The best measured version. Its estimate was selected, so it is too high on average."""
        return best_estimate(self.estimates)

    # Members that withdrew, which the job asks for nothing.
    left_out: frozenset[str] = frozenset()


# ---- jobs --------------------------------------------------------------------------------------------------


def check_new_job(s: Session, name: str) -> None:
    """Raises JobExists if a job has, or had, this name."""
    if s.get(JobRow, name) is not None:
        raise JobExists(f"a job named {name} exists; names are never used twice, so choose another in the job file")


def create_job(
    s: Session,
    *,
    name: str,
    document: bytes,
    rounds_total: int,
    version: bytes,
    now_ms: int,
    earlier: tuple[str, int] | None = None,
    measured: str | None = None,
) -> StoredJob:
    """Creates a running job, with version number 0.

    The blobs of `document` and `version`, which are digests, are stored already. `earlier` is the version that the job
    starts from, as (job, number), if it is another job's. `measured` is the job that a measurement asks about.

    Raises:
        JobExists: the name was used before.
    """
    check_new_job(s, name)
    s.add(
        JobRow(
            name=name,
            document=document,
            rounds_total=rounds_total,
            status=JobStatus.RUNNING.value,
            created_ms=now_ms,
            changed_ms=now_ms,
            forgiven_round=0,
            earlier_job=None if earlier is None else earlier[0],
            earlier_version=None if earlier is None else earlier[1],
            measured_job=measured,
        )
    )
    s.flush()
    withdrawn = 0 if earlier is None else carry_marks(s, name, earlier)
    s.add(VersionRow(job=name, number=0, digest=version, round=0, created_ms=now_ms, withdrawn=withdrawn))
    from_version: dict[str, str | int] = (
        {} if earlier is None else {"earlier_job": earlier[0], "earlier_version": earlier[1]}
    )
    note(
        s,
        "job_created",
        name,
        now_ms,
        document=document.hex(),
        version=version.hex(),
        rounds=rounds_total,
        withdrawn=withdrawn,
        **from_version,
    )
    if withdrawn:
        note(s, "version_withdrawn", name, now_ms, first=0, newest=0, sums=0, members=withdrawn, by="")
    s.flush()
    return load_job(s, name)


def set_job_status(s: Session, name: str, status: JobStatus, reason: str | None, now_ms: int) -> None:
    """Changes a job's status. Going back to running also forgives the failed rounds so far.

    Raises:
        NotFound: no such job.
        OutOfOrder: the job is finished or aborted.
    """
    row = _job(s, name)
    before = JobStatus(row.status)
    if before.is_final and status is not before:
        raise OutOfOrder(f"job {name} is {before} and stays so; create a new job to continue training")
    if status is JobStatus.RUNNING and before is not JobStatus.RUNNING:
        row.forgiven_round = _highest_round(s, name)
    row.status, row.reason, row.changed_ms = status.value, reason, now_ms
    note(s, "job_status", name, now_ms, status=status.value, before=before.value, reason=reason)


def forgive(s: Session, name: str) -> None:
    """Stops counting earlier abandoned rounds as failures in a row. Raises: NotFound: no such job."""
    _job(s, name).forgiven_round = _highest_round(s, name)
    s.flush()


def load_jobs(s: Session, *, over: bool = True) -> list[StoredJob]:
    """Returns every job, or without `over` those that are not over, in the order of creation."""
    asked = select(JobRow).order_by(JobRow.created_ms, JobRow.name)
    return [_stored_job(s, row) for row in s.scalars(asked if over else asked.where(JobRow.status.not_in(_OVER)))]


def jobs_over(s: Session) -> list[str]:
    """Returns the names of jobs that are over, the newest first."""
    asked = select(JobRow.name).where(JobRow.status.in_(_OVER))
    return list(s.scalars(asked.order_by(JobRow.created_ms.desc(), JobRow.name)))


def load_job(s: Session, name: str) -> StoredJob:
    """Returns one job.

    Raises:
        NotFound: no such job.
    """
    return _stored_job(s, _job(s, name))


def _job(s: Session, name: str) -> JobRow:
    row = s.get(JobRow, name)
    if row is None:
        raise NotFound(f"there is no job named {name}; `coordinator job list` shows all jobs")
    return row


def _highest_round(s: Session, job: str) -> int:
    return s.scalar(select(func.max(RoundRow.number)).where(RoundRow.job == job)) or 0


def _stored_job(s: Session, row: JobRow) -> StoredJob:
    number = _highest_round(s, row.name)
    newest = s.get(RoundRow, (row.name, number)) if number else None
    in_round = select(func.count()).where(AttemptRow.job == row.name, AttemptRow.round == number)
    published = (
        s.scalar(select(func.max(RoundRow.number)).where(RoundRow.job == row.name, RoundRow.outcome == "published"))
        or 0
    )
    failed = select(func.count()).where(
        RoundRow.job == row.name,
        RoundRow.outcome == "abandoned",
        RoundRow.number > max(published, row.forgiven_round),
    )
    cohort = select(AttemptRow.cohort).where(AttemptRow.job == row.name).order_by(AttemptRow.number.desc())
    version = s.scalars(
        select(VersionRow).where(VersionRow.job == row.name).order_by(VersionRow.number.desc()).limit(1)
    ).one()
    sums = select(AttemptRow.survivors).where(AttemptRow.job == row.name, AttemptRow.round > published)
    return StoredJob(
        name=row.name,
        status=JobStatus(row.status),
        reason=row.reason,
        document=row.document,
        rounds_total=row.rounds_total,
        round=number,
        round_open=newest is not None and newest.outcome == "open",
        attempt=_highest_attempt(s, row.name),
        attempts_in_round=s.scalar(in_round) or 0,
        failed_rounds=s.scalar(failed) or 0,
        cohort=tuple(s.scalars(cohort.limit(1)).first() or ()),
        confirmed_sums=tuple(tuple(members) for members in s.scalars(sums.order_by(AttemptRow.number)) if members),
        version_number=version.number,
        version=version.digest,
        created_ms=row.created_ms,
        evaluation=_newest_evaluation(s, row.name),
        training=_newest_training(s, row.name),
        server_state=_server_state(s, row.name, version.number),
        norms=_newest_norms(s, row.name),
        exploded=_exploded(row),
        estimates=estimates(s, row.name),
        left_out=left_out(s, row.name),
    )


# ---- rounds and attempts -----------------------------------------------------------------------------------


def open_round(s: Session, job: str, number: int, now_ms: int) -> None:
    """Opens a round.

    Raises:
        NotFound: no such job.
        OutOfOrder: the number is not above every earlier one, or a round is open.
    """
    _job(s, job)
    highest = _highest_round(s, job)
    if number <= highest:
        raise OutOfOrder(f"round {number} of {job} cannot be opened: round {highest} was opened before")
    if highest and _round(s, job, highest).outcome == "open":
        raise OutOfOrder(f"round {number} of {job} cannot be opened: round {highest} is open")
    s.add(RoundRow(job=job, number=number, outcome="open", opened_ms=now_ms))
    note(s, "round_opened", job, now_ms, round=number)
    s.flush()


def end_round(s: Session, job: str, number: int, outcome: Outcome, reason: str | None, now_ms: int) -> None:
    """Ends a round.

    Raises:
        OutOfOrder: the round is not open, or one of its attempts still is.
    """
    row = _round(s, job, number)
    if row.outcome != "open":
        raise OutOfOrder(f"round {number} of {job} cannot end as {outcome}: it is {row.outcome}")
    if _open_attempt(s, job) is not None:
        raise OutOfOrder(f"round {number} of {job} cannot end: it has an open attempt")
    row.outcome, row.reason, row.ended_ms = outcome, reason, now_ms
    note(s, "round_ended", job, now_ms, round=number, outcome=outcome, reason=reason)
    s.flush()


def open_attempt(
    s: Session,
    job: str,
    round: int,
    attempt: int,
    cohort: Sequence[str],
    now_ms: int,
    *,
    approved: Sequence[str] = (),
) -> None:
    """Opens an attempt in the open round.

    Args:
        s: the transaction.
        job: the job's name.
        round: the round's number.
        attempt: the attempt's number.
        cohort: its members.
        now_ms: the time, in milliseconds since the epoch.
        approved: those of them that reported that their stewards approved the job. The journal names them.

    Raises:
        OutOfOrder: the round is not open, an attempt is open, or the number is not above every earlier one of the job.
    """
    if _round(s, job, round).outcome != "open":
        raise OutOfOrder(f"attempt {attempt} of {job} cannot be opened: round {round} is not open")
    highest = _highest_attempt(s, job)
    if attempt <= highest:
        raise OutOfOrder(f"attempt {attempt} of {job} cannot be opened: attempt {highest} was opened before")
    if (other := _open_attempt(s, job)) is not None:
        raise OutOfOrder(f"attempt {attempt} of {job} cannot be opened: attempt {other.number} is open")
    s.add(
        AttemptRow(
            job=job,
            number=attempt,
            round=round,
            outcome="open",
            detail="",
            cohort=list(cohort),
            survivors=[],
            opened_ms=now_ms,
        )
    )
    said = {"approved": list(approved)} if approved else {}
    note(s, "attempt_opened", job, now_ms, round=round, attempt=attempt, cohort=list(cohort), **said)
    s.flush()


def fix_survivors(s: Session, job: str, attempt: int, survivors: Sequence[str]) -> None:
    """Stores U3 of an open attempt, before its members hear of it.

    Raises:
        OutOfOrder: the attempt is not open.
    """
    row = s.get(AttemptRow, (job, attempt))
    if row is None or row.outcome != "open":
        raise OutOfOrder(f"attempt {attempt} of {job} has no survivors to fix: it is not open")
    row.survivors = list(survivors)
    s.flush()


def end_attempt(s: Session, ended: EndAttempt, now_ms: int, spend: Spend | None = None) -> None:
    """Ends an attempt.

    Args:
        s: the transaction.
        ended: how it ended.
        now_ms: the time.
        spend: what the members of a published sum report; only the journal keeps it.

    Raises:
        OutOfOrder: the attempt is not open, or belongs to another round.
    """
    job, round, attempt = ended.attempt.job, ended.attempt.round, ended.attempt.attempt
    outcome: Outcome = "published" if ended.published else "abandoned"
    row = s.get(AttemptRow, (job, attempt))
    if row is None or row.round != round or row.outcome != "open":
        found = "does not exist" if row is None else f"is {row.outcome}, in round {row.round}"
        raise OutOfOrder(f"attempt {attempt} of {job} in round {round} cannot end as {outcome}: it {found}")
    row.outcome, row.detail, row.ended_ms = outcome, ended.detail, now_ms
    row.reason = None if ended.published else word(ended.reason)
    row.survivors, row.result, row.new_version = list(ended.survivors), ended.result, ended.version
    if ended.training is not None:
        row.training_examples = ended.training.examples
        row.training_loss, row.training_accuracy = _not_nan(ended.training.loss), _not_nan(ended.training.accuracy)
    # A member leaves an attempt once. What it did afterwards is not another dropout.
    first = {dropout.member: dropout for dropout in reversed(ended.dropouts)}
    for dropout in first.values():
        s.add(
            DropoutRow(
                job=job,
                attempt=attempt,
                member=dropout.member,
                phase=dropout.phase,
                reason=word(dropout.reason),
                detail=dropout.detail,
                evidence=dropout.evidence,
            )
        )
    note(
        s,
        "attempt_ended",
        job,
        now_ms,
        round=round,
        attempt=attempt,
        outcome=outcome,
        reason=row.reason,
        survivors=row.survivors,
        dropouts=sorted(first),
        result=_hex(ended.result),
        new_version=_hex(ended.version),
        **({} if spend is None else {"reported": spend.reported, "epsilon": spend.epsilon, "delta": spend.delta}),
    )
    s.flush()


def abandon_open_attempts(s: Session, now_ms: int, reason: Reason, *, job: str | None = None) -> list[AttemptId]:
    """Ends the open attempts of one job or of all as abandoned. Their rounds stay open.

    For the start after a crash, because an attempt's secrets were in memory only.
    """
    query = select(AttemptRow).where(AttemptRow.outcome == "open").order_by(AttemptRow.job)
    rows = list(s.scalars(query if job is None else query.where(AttemptRow.job == job)))
    attempts = [AttemptId(row.job, row.round, row.number) for row in rows]
    for row, attempt in zip(rows, attempts, strict=True):
        end_attempt(s, EndAttempt(attempt, False, reason, "", tuple(row.survivors), ()), now_ms)
    return attempts


def rounds(s: Session, job: str, *, last: int | None = None) -> list[StoredRound]:
    """Returns a job's rounds in order, with all their attempts; only the last `last` rounds if that is given.

    Raises:
        NotFound: no such job.
    """
    _job(s, job)
    query = select(RoundRow).where(RoundRow.job == job).order_by(RoundRow.number.desc())
    found = list(s.scalars(query if last is None else query.limit(last)))[::-1]
    if not found:
        return []
    attempts: dict[int, list[StoredAttempt]] = defaultdict(list)
    dropouts: dict[int, list[Dropout]] = defaultdict(list)
    mine = (AttemptRow.job == job, AttemptRow.round >= found[0].number)
    for dropped in s.scalars(
        select(DropoutRow)
        .join(AttemptRow, (DropoutRow.job == AttemptRow.job) & (DropoutRow.attempt == AttemptRow.number))
        .where(*mine)
        .order_by(DropoutRow.member)
    ):
        dropouts[dropped.attempt].append(
            Dropout(dropped.member, dropped.phase, from_word(dropped.reason), dropped.detail, dropped.evidence)
        )
    for row in s.scalars(select(AttemptRow).where(*mine).order_by(AttemptRow.number)):
        attempts[row.round].append(_stored_attempt(row, dropouts[row.number]))
    return [
        StoredRound(row.number, row.outcome, row.reason, tuple(attempts[row.number]), row.opened_ms, row.ended_ms)
        for row in found
    ]


def _round(s: Session, job: str, number: int) -> RoundRow:
    row = s.get(RoundRow, (job, number))
    if row is None:
        raise OutOfOrder(f"job {job} has no round {number}")
    return row


def _highest_attempt(s: Session, job: str) -> int:
    return s.scalar(select(func.max(AttemptRow.number)).where(AttemptRow.job == job)) or 0


def _open_attempt(s: Session, job: str) -> AttemptRow | None:
    return s.scalar(select(AttemptRow).where(AttemptRow.job == job, AttemptRow.outcome == "open"))


def _stored_attempt(row: AttemptRow, dropouts: Sequence[Dropout]) -> StoredAttempt:
    return StoredAttempt(
        number=row.number,
        outcome=row.outcome,
        reason=row.reason,
        detail=row.detail,
        cohort=tuple(row.cohort),
        survivors=tuple(row.survivors),
        dropouts=tuple(dropouts),
        result=row.result,
        new_version=row.new_version,
        training=_training(row),
        opened_ms=row.opened_ms,
        ended_ms=row.ended_ms,
    )


def _training(row: AttemptRow) -> TrainingMetrics | None:
    if row.training_examples is None:
        return None
    return TrainingMetrics(row.training_examples, _or_nan(row.training_loss), _or_nan(row.training_accuracy))


def _newest_training(s: Session, job: str) -> TrainingMetrics | None:
    row = s.scalars(
        select(AttemptRow)
        .where(AttemptRow.job == job, AttemptRow.training_examples.is_not(None))
        .order_by(AttemptRow.number.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else _training(row)


# ---- versions and evaluations ------------------------------------------------------------------------------


def publish_version(
    s: Session,
    job: str,
    number: int,
    digest: bytes,
    round: int,
    now_ms: int,
    *,
    norms: Norms,
    exploded: Exploded | None = None,
    optimiser: str = "fedavg",
    server_state: Mapping[str, bytes] | None = None,
    validation: Validation | None = None,
) -> None:
    """Records the next version, made by `round`, its norms, and the digests of its server optimiser state.

    The blobs are stored already. The attempt that made it has ended, so its survivors are known: the version is marked
    for those that withdrew. Of the versions that exploded, the job keeps the first; the journal has them all.
    `validation` is what the round measured of the version before, which it started from.

    Raises:
        OutOfOrder: the number is not the next one, the round is unknown or has a version, or an attempt is open.
    """
    _round(s, job, round)
    if (attempt := _open_attempt(s, job)) is not None:
        raise OutOfOrder(f"version {number} of {job} cannot be published: attempt {attempt.number} is open")
    newest = s.scalars(
        select(VersionRow).where(VersionRow.job == job).order_by(VersionRow.number.desc()).limit(1)
    ).one()
    if number != newest.number + 1 or round <= newest.round:
        raise OutOfOrder(
            f"version {number} of {job} from round {round} does not follow version {newest.number} "
            f"from round {newest.round}"
        )
    newest.norm = norms.base
    if validation is not None:
        record_estimate(s, newest, validation, round, now_ms)
    s.add(
        VersionRow(
            job=job,
            number=number,
            digest=digest,
            round=round,
            created_ms=now_ms,
            norm=norms.version,
            change=norms.change,
            withdrawn=newest.withdrawn,
        )
    )
    s.flush()
    carried = {} if server_state is None else server_state
    for name, vector in carried.items():
        s.add(ServerStateRow(job=job, version=number, name=name, digest=vector))
    note(
        s,
        "version_published",
        job,
        now_ms,
        version=digest.hex(),
        number=number,
        round=round,
        optimiser=optimiser,
        server_state=[f"{name} {vector.hex()}" for name, vector in sorted(carried.items())],
        norm=norms.version,
        change=norms.change,
    )
    made_by = select(AttemptRow.survivors).where(AttemptRow.job == job, AttemptRow.round == round)
    summed = s.scalars(made_by.order_by(AttemptRow.number.desc()).limit(1)).one_or_none()
    mark_published(s, job, number, summed or (), now_ms)
    if exploded is not None:
        row = _job(s, job)
        if row.exploded_version is None:
            row.exploded_version, row.exploded_measure = exploded.number, exploded.measure
            row.exploded_times, row.exploded_than = exploded.times, exploded.than
        note(
            s,
            "version_exploded",
            job,
            now_ms,
            version=digest.hex(),
            number=number,
            measure=exploded.measure,
            times=exploded.times,
            than=exploded.than,
        )
    s.flush()


def versions(s: Session, job: str) -> list[StoredVersion]:
    """Returns a job's versions in order, each with its estimate and its evaluations in the order of recording.

    Raises:
        NotFound: no such job.
    """
    _job(s, job)
    found = list(s.scalars(select(VersionRow).where(VersionRow.job == job).order_by(VersionRow.number)))
    measured: dict[int, list[StoredEvaluation]] = defaultdict(list)
    digests = {row.number: row.digest for row in found}
    for row in s.scalars(select(EvaluationRow).where(EvaluationRow.job == job).order_by(EvaluationRow.id)):
        measured[row.version].append(_evaluation(row, digests[row.version]))
    carried: dict[int, dict[str, bytes]] = defaultdict(dict)
    for state in s.scalars(select(ServerStateRow).where(ServerStateRow.job == job).order_by(ServerStateRow.name)):
        carried[state.version][state.name] = state.digest
    shown = {each.version_number: each for each in estimates(s, job)}
    return [
        StoredVersion(
            row.number,
            row.digest,
            row.round,
            row.created_ms,
            tuple(measured[row.number]),
            row.norm,
            row.change,
            carried[row.number],
            row.withdrawn,
            shown.get(row.number),
            row.pruned_ms is not None,
        )
        for row in found
    ]


def record_evaluation(
    s: Session,
    job: str,
    *,
    version_number: int,
    accuracy: float,
    loss: float,
    examples: int,
    data: bytes | None,
    now_ms: int,
    by: str = "",
) -> StoredEvaluation:
    """Stores an evaluation of a version, next to earlier ones.

    Args:
        by: the operator's name, for the journal.

    Raises:
        NotFound: no such job, or no such version of it.
    """
    _job(s, job)
    version = s.get(VersionRow, (job, version_number))
    if version is None:
        raise NotFound(f"job {job} has no version {version_number}; `coordinator job show {job}` lists them")
    row = EvaluationRow(
        job=job,
        version=version_number,
        accuracy=accuracy,
        loss=_not_nan(loss),
        examples=examples,
        data=data,
        at_ms=now_ms,
    )
    s.add(row)
    note(
        s,
        "evaluation_recorded",
        job,
        now_ms,
        version=version.digest.hex(),
        number=version_number,
        accuracy=accuracy,
        # JSON has no other number.
        loss=loss if math.isfinite(loss) else None,
        examples=examples,
        data=_hex(data),
        by=by,
    )
    s.flush()
    return _evaluation(row, version.digest)


def is_document(s: Session, digest: bytes) -> bool:
    """Returns whether a blob is the document of a job."""
    return s.scalars(select(JobRow.name).where(JobRow.document == digest).limit(1)).first() is not None


def note_fetched(s: Session, digest: bytes, now_ms: int, within_ms: int, *, by: str, exported: bool = False) -> None:
    """Notes that an operator downloads a version, for every job that has it. A model leaves this way, by `evaluate` and
    by `export` (`exported`). A repeat within `within_ms` is not noted again.
    """
    for row in s.scalars(select(VersionRow).where(VersionRow.digest == digest).order_by(VersionRow.job)):
        note_seldom(
            s,
            "version_fetched",
            row.job,
            now_ms,
            within_ms,
            same=("by", "version", "exported"),
            by=by,
            version=digest.hex(),
            exported=exported,
        )


def _server_state(s: Session, job: str, version: int) -> dict[str, bytes]:
    mine = (ServerStateRow.job == job, ServerStateRow.version == version)
    return {row.name: row.digest for row in s.scalars(select(ServerStateRow).where(*mine).order_by("name"))}


def _newest_norms(s: Session, job: str) -> tuple[Norms, ...]:
    query = select(VersionRow).where(VersionRow.job == job).order_by(VersionRow.number.desc()).limit(WINDOW + 1)
    rows = list(s.scalars(query))[::-1]
    return tuple(
        Norms(before.norm, row.norm, row.change)
        for before, row in pairwise(rows)
        if before.norm is not None and row.norm is not None and row.change is not None
    )


def _exploded(row: JobRow) -> Exploded | None:
    if row.exploded_version is None or row.exploded_times is None or row.exploded_than is None:
        return None
    measure = cast(Measure, row.exploded_measure)
    return Exploded(row.exploded_version, measure, row.exploded_times, row.exploded_than)


def _evaluation(row: EvaluationRow, digest: bytes) -> StoredEvaluation:
    return StoredEvaluation(row.version, digest, row.accuracy, _or_nan(row.loss), row.examples, row.data, row.at_ms)


def _newest_evaluation(s: Session, job: str) -> StoredEvaluation | None:
    row = s.scalars(
        select(EvaluationRow)
        .where(EvaluationRow.job == job)
        .order_by(EvaluationRow.version.desc(), EvaluationRow.id.desc())
        .limit(1)
    ).one_or_none()
    if row is None:
        return None
    version = s.get_one(VersionRow, (job, row.version))
    return _evaluation(row, version.digest)


# SQLite has no nan and would silently store NULL.
def _not_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()
