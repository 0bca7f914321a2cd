"""The pure state machine of one member: `transition(environment, state, event) -> (state, effects)`.

Guarantees:

- A member joins an attempt only with an update trained under exactly the job document and version that the attempt's
  context names, only if every number of the context passes its own policy, and only once.
- If the policy asks stewards, nothing is trained before they approve, and no attempt is joined and no vector leaves
  once they no longer do. The member then waits, and goes on by itself.
- Once this member withdrew from a job, it trains nothing, joins no attempt, and leaves the one that it is in.
- That it joined, that a masked vector is about to leave, and what that costs, is on the disk before it happens.
- A repeated message gets the same bytes as the first time. A different message in its place is refused.
- Without noise, a member sends one update for one version, and confirms one sum of it. It refuses before it shows a key
  or deals to a roster, so that nothing is lost that others have masked.
- A refusal tells the coordinator its reason, and names the member at fault if there is one. The member then sits out
  the rest of the round.
- Whenever the member leaves an attempt, it overwrites the attempt's secrets.

Secrets (the protocol's states) live inside this state, in memory, for one attempt.
"""

import hashlib
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import secure_agg
from edge_client.policy.policy import PolicyRefusal
from edge_client.session.journal import Memory, Sent
from edge_client.session.states import (
    ApprovalAwaited,
    Approved,
    Awaiting,
    CertificatesFetched,
    Discard,
    Effect,
    EndedAttempt,
    Environment,
    Event,
    FetchCertificates,
    Holding,
    InAttempt,
    JobOver,
    Joined,
    KeepCertificates,
    MaskAndUpload,
    Masked,
    MaskingFailed,
    MemberState,
    Note,
    Phase,
    PreparationFailed,
    Prepare,
    Prepared,
    Preparing,
    Received,
    Say,
    Signed,
    Stage,
    StopPreparing,
    StopUpload,
    VectorLeaving,
    Waiting,
    Withdrew,
)
from tacit.attempt import AttemptId
from tacit.context import context_of
from tacit.job import JobDocument
from tacit.mechanism import DistributedGaussian, NoMechanism
from tacit.messages import (
    Assignment,
    AttemptEnded,
    AttemptMessage,
    AttemptOpened,
    AttemptRefusal,
    CoordinatorPayload,
    Decline,
    JobEnded,
    MemberPayload,
    Ready,
)
from tacit.reason import Reason, of_protocol, word
from tacit.roster import SignedHead

__all__ = ["transition"]

# ---- the transition -----------------------------------------------------------------------------------------------


@dataclass
class _Step:
    """A transition that is being computed."""

    environment: Environment
    state: MemberState
    effects: list[Effect] = field(default_factory=list)

    def do(self, *effects: Effect) -> None:
        self.effects.extend(effects)

    def enter(self, job: str, phase: Phase) -> None:
        self.state = replace(self.state, jobs={**self.state.jobs, job: phase})


def transition(environment: Environment, state: MemberState, event: Event) -> tuple[MemberState, tuple[Effect, ...]]:
    """Returns the next state, and the effects to carry out in order."""
    step = _Step(environment, state)
    match event:
        case Received(message=Assignment() as assignment):
            _assigned(step, assignment)
        case Received(message=JobEnded() as ended):
            _job_ended(step, ended)
        case Received(message=AttemptMessage() as message):
            _attempt_message(step, message.attempt, message.payload)
        case Prepared():
            _prepared(step, event)
        case ApprovalAwaited():
            _approval_awaited(step, event)
        case Approved():
            _approved(step, event)
        case Withdrew():
            _withdrew(step, event)
        case PreparationFailed():
            _preparation_failed(step, event)
        case Masked():
            _masked(step, event)
        case MaskingFailed():
            _masking_failed(step, event)
        case CertificatesFetched():
            _certificates_fetched(step, event)
    return step.state, tuple(step.effects)


# ---- assignments --------------------------------------------------------------------------------------------------


def _same(one: Assignment, other: Assignment) -> bool:
    return (one.round, one.version, one.job_document) == (other.round, other.version, other.job_document)


def _assigned(step: _Step, assignment: Assignment) -> None:
    job = assignment.job
    match step.state.phase(job):
        case Waiting(refused=Decline(round=refused) as decline) if refused == assignment.round:
            step.do(Say(decline))
        case Waiting():
            _prepare(step, assignment)
        case Preparing(assignment=present):
            if not _same(present, assignment):
                step.do(StopPreparing(job))
                _prepare(step, assignment)
        case Awaiting(assignment=present, decline=decline):
            if _same(present, assignment):
                step.do(Say(decline))
            else:
                _prepare(step, assignment)
        case Holding(assignment=present) as holding:
            _hold_or_prepare(step, holding, present, assignment)
        case InAttempt() as phase:
            # The coordinator is back in training, so that attempt is over, however it ended.
            _leave_attempt(step, phase, AttemptEnded(False, Reason.REASON_ATTEMPT_STALE))
            _hold_or_prepare(step, phase.holding, phase.holding.assignment, assignment)


def _hold_or_prepare(step: _Step, holding: Holding, present: Assignment, assignment: Assignment) -> None:
    if _same(present, assignment):
        _hold(step, holding)
    else:
        step.do(Discard(assignment.job))
        _prepare(step, assignment)


def _prepare(step: _Step, assignment: Assignment) -> None:
    step.enter(assignment.job, Preparing(assignment))
    step.do(
        Note(
            "assigned",
            {"job": assignment.job, "round": assignment.round, "version": assignment.version_number},
        ),
        Prepare(assignment),
    )


def _check_vector(step: _Step, holding: Holding) -> None:
    """Raises PolicyRefusal if, without noise, the member sent another update for this version or round."""
    if not isinstance(holding.job.mechanism, NoMechanism):
        # With noise, the same noised vector is charged once, and newly drawn shares are charged again.
        return
    assignment = holding.assignment
    earlier = step.state.memory.sent_for(assignment.job, assignment.round, assignment.version)
    grouped = holding.job.aggregation.groups is not None
    step.environment.policy.check_vector(holding.update or b"", (sent.update for sent in earlier), grouped=grouped)


def _check_members(step: _Step, phase: InAttempt, members: Iterable[str]) -> None:
    """Raises PolicyRefusal if, without noise, they are not the members of the sum that this member confirmed before."""
    holding, attempt = phase.holding, phase.attempt
    if not isinstance(holding.job.mechanism, NoMechanism) or holding.job.aggregation.groups is not None:
        return
    assignment = holding.assignment
    for sent in step.state.memory.sent_for(assignment.job, assignment.round, assignment.version):
        if sent.survivors is not None and sent.attempt != attempt:
            step.environment.policy.check_sum(frozenset(members), sent.survivors)


def _prepared(step: _Step, event: Prepared) -> None:
    assignment = event.assignment
    phase = step.state.phase(assignment.job)
    if not isinstance(phase, Preparing) or not _same(phase.assignment, assignment):
        if not isinstance(phase, Holding | InAttempt):
            # Nobody waits for it any more, so what is held and reserved for it is released.
            step.do(Discard(assignment.job))
        return
    ready = Ready(assignment.job, assignment.round, assignment.version, event.privacy, event.ledger, event.approvals)
    _hold(step, Holding(assignment, event.job, ready, event.update))


def _hold(step: _Step, holding: Holding) -> None:
    """Sends READY, or declines if this update may not be sent."""
    assignment = holding.assignment
    try:
        _check_vector(step, holding)
    except PolicyRefusal as refusal:
        step.do(Discard(assignment.job))
        _decline(step, assignment, refusal.reason, refusal.detail)
        return
    step.enter(assignment.job, holding)
    step.do(Say(holding.ready))


def _preparation_failed(step: _Step, event: PreparationFailed) -> None:
    assignment = event.assignment
    phase = step.state.phase(assignment.job)
    if not isinstance(phase, Preparing) or not _same(phase.assignment, assignment):
        return
    _decline(step, assignment, event.reason, event.detail)


# What a member says whose stewards do not approve of a job now. It waits for them rather than sit out the round.
_OF_STEWARDS = frozenset({Reason.REASON_APPROVAL_AWAITED, Reason.REASON_APPROVAL_DECLINED})


def _approval_awaited(step: _Step, event: ApprovalAwaited) -> None:
    assignment = event.assignment
    match step.state.phase(assignment.job):
        case Preparing(assignment=present) if _same(present, assignment):
            _await_approval(step, assignment, event.job, event.reason, event.detail)
        case Awaiting(assignment=present) if _same(present, assignment):
            _await_approval(step, assignment, event.job, event.reason, event.detail)
        case Holding(assignment=present) if _same(present, assignment):
            step.do(Discard(assignment.job))
            _await_approval(step, assignment, event.job, event.reason, event.detail)
        case _:
            pass  # An attempt asks by itself before a vector leaves.


def _await_approval(step: _Step, assignment: Assignment, job: JobDocument, reason: Reason, detail: str) -> None:
    detail = detail[:_LONGEST_DETAIL]
    decline = Decline(assignment.job, assignment.round, reason, detail)
    step.enter(assignment.job, Awaiting(assignment, job, decline))
    step.do(
        Note(
            "approval_awaited",
            {"job": assignment.job, "round": assignment.round, "reason": word(reason), "detail": detail},
            warning=True,
        ),
        Say(decline),
    )


def _approved(step: _Step, event: Approved) -> None:
    phase = step.state.phase(event.assignment.job)
    if isinstance(phase, Awaiting) and _same(phase.assignment, event.assignment):
        _prepare(step, phase.assignment)


def _withdrew(step: _Step, event: Withdrew) -> None:
    """Leaves whatever is under way for the job. A vector that the coordinator has stays in its sum."""
    match step.state.phase(event.job):
        case Preparing(assignment=assignment):
            step.do(StopPreparing(event.job))
            _decline(step, assignment, event.reason, event.detail)
        case Awaiting(assignment=assignment) | Holding(assignment=assignment):
            step.do(Discard(event.job))
            _decline(step, assignment, event.reason, event.detail)
        case InAttempt() as phase:
            _refuse(step, phase, event.reason, event.detail)
        case Waiting():
            return
    if event.reason == Reason.REASON_MEMBER_WITHDREW:
        step.do(JobOver(JobEnded(event.job, event.reason)))


def _decline(step: _Step, assignment: Assignment, reason: Reason, detail: str) -> None:
    detail = detail[:_LONGEST_DETAIL]
    decline = Decline(assignment.job, assignment.round, reason, detail)
    step.enter(assignment.job, Waiting(decline))
    step.do(
        Note("declined", {"job": assignment.job, "round": assignment.round, "detail": detail}, warning=True),
        Say(decline),
    )


def _job_ended(step: _Step, ended: JobEnded) -> None:
    match step.state.phase(ended.job):
        case Preparing():
            step.do(StopPreparing(ended.job))
        case Holding():
            pass  # It is kept, because a paused job may continue with the same round.
        case InAttempt() as phase:
            _leave_attempt(step, phase, AttemptEnded(False, ended.reason))
            step.enter(ended.job, phase.holding)
        case Waiting() | Awaiting():
            pass
    if not isinstance(step.state.phase(ended.job), Holding):
        step.enter(ended.job, Waiting())
    if ended.reason != Reason.REASON_JOB_PAUSED:
        step.do(Discard(ended.job))
        step.enter(ended.job, Waiting())
    step.do(JobOver(ended))


# ---- an attempt ---------------------------------------------------------------------------------------------------

# By kind of message: the reason for refusing a second, different one, and the name that people use for the message.
_SECOND: dict[type, tuple[Reason, str]] = {
    AttemptOpened: (Reason.REASON_ATTEMPT_REPLAYED, "set of numbers"),
    secure_agg.Roster: (Reason.REASON_SECOND_ROSTER, "roster"),
    secure_agg.ReceivedDealings: (Reason.REASON_SECOND_DEALINGS, "set of dealt shares"),
    secure_agg.Openings: (Reason.REASON_OPENING_INVALID, "set of openings"),
    secure_agg.Survivors: (Reason.REASON_SECOND_SURVIVORS, "list of survivors"),
    secure_agg.Confirmations: (Reason.REASON_SECOND_UNMASK_REQUEST, "request to unmask"),
}


def _kind(payload: CoordinatorPayload) -> type:
    """Returns the kind of a message, of which an attempt has one. All forms of a roster are the same kind."""
    by_digest = secure_agg.DigestRoster | secure_agg.GroupRoster
    return secure_agg.Roster if isinstance(payload, by_digest) else type(payload)


# After these refusals the update stays good for the next attempt of the round. That attempt may have other messages or,
# if a sum was confirmed before, exactly its members.
_MAY_GO_ON = frozenset(
    {
        Reason.REASON_POLICY_SECOND_SUM,
        Reason.REASON_DEALINGS_MALFORMED,
        Reason.REASON_DEALINGS_SIGNATURE_INVALID,
        Reason.REASON_DEALINGS_TOO_FEW,
    }
)


def _attempt_message(step: _Step, attempt: AttemptId, payload: CoordinatorPayload) -> None:
    phase = step.state.phase(attempt.job)
    if isinstance(payload, AttemptEnded):
        if isinstance(phase, InAttempt) and phase.attempt == attempt:
            _attempt_ended(step, phase, payload)
        return
    if isinstance(phase, InAttempt) and phase.attempt == attempt:
        _in_attempt(step, phase, payload)
    elif isinstance(payload, AttemptOpened):
        _join(step, phase, attempt, payload)
    elif (refused := _refused(phase)) is not None and refused.round == attempt.round:
        _say_refusal(step, attempt, refused.reason, refused.detail)
    else:
        detail = (
            f"this process is not in attempt {attempt.round}.{attempt.attempt}: it started after the attempt began, or "
            "has left it; it sent no answer, and takes part again with its next update"
        )
        _say_refusal(step, attempt, Reason.REASON_MEMBER_RESTARTED, detail)


def _refused(phase: Phase) -> Decline | None:
    match phase:
        case Waiting(refused=refused):
            return refused
        case Awaiting(decline=decline):
            return decline
        case _:
            return None


def _join(step: _Step, phase: Phase, attempt: AttemptId, opened: AttemptOpened) -> None:
    """Makes every check before the member shows a key: the attempt is new, matches the update, and is allowed."""
    highest = step.state.memory.highest.get(attempt.job, (0, 0))
    if attempt.round < highest[0] or attempt.attempt <= highest[1]:
        detail = (
            f"attempt {attempt.round}.{attempt.attempt} is not above {highest[0]}.{highest[1]}, the highest in this "
            "member's journal, and a member joins none twice; if the coordinator's database was restored from an older "
            "copy, the operator must create the job again under another name"
        )
        _say_refusal(step, attempt, Reason.REASON_ATTEMPT_REPLAYED, detail)
        return
    if isinstance(phase, InAttempt):
        _leave_attempt(step, phase, AttemptEnded(False, Reason.REASON_ATTEMPT_STALE))
        phase = phase.holding
        step.enter(attempt.job, phase)
    if isinstance(phase, Awaiting):
        _say_refusal(step, attempt, phase.decline.reason, phase.decline.detail)
        return
    if not isinstance(phase, Holding):
        detail = (
            f"this process holds no update for attempt {attempt.round}.{attempt.attempt}: it was restarted, or the "
            "update was published or dropped; it trains again when it is assigned a round"
        )
        _say_refusal(step, attempt, Reason.REASON_MEMBER_RESTARTED, detail)
        return
    try:
        context = _context(opened)
        _check_context(step.environment, phase, context, _log_head(step.environment, opened))
        _check_same_round(step.state.memory, phase.assignment)
        _check_vector(step, phase)
        step.environment.policy.check_attempt(context)
        if step.environment.withdrawn is not None:
            step.environment.withdrawn(attempt.job, phase.job)
        if step.environment.approved is not None:
            step.environment.approved(phase.job)
    except PolicyRefusal as refusal:
        _say_refusal(step, attempt, refusal.reason, refusal.detail)
        step.do(Discard(attempt.job))
        if refusal.reason in _OF_STEWARDS:
            _await_approval(step, phase.assignment, phase.job, refusal.reason, refusal.detail)
        else:
            _decline(step, phase.assignment, refusal.reason, refusal.detail)
        return
    environment = step.environment
    stage, advertisement = secure_agg.advertise(
        context,
        environment.identity,
        environment.verify,
        environment.random,
        key_of=environment.key_of,
        certificate_of=environment.certificate_of,
    )
    memory = step.state.memory
    raised = {**memory.highest, attempt.job: (attempt.round, attempt.attempt)}
    step.state = replace(step.state, memory=replace(memory, highest=raised))
    kind = type(opened)
    step.enter(attempt.job, InAttempt(phase, attempt, stage, {kind: opened}, {kind: advertisement}))
    step.do(
        Joined(attempt, phase.assignment.version, phase.assignment.job_document),
        Note("attempt_joined", {"attempt": str(attempt), "cohort": context.cohort}),
        Say(AttemptMessage(attempt, advertisement)),
    )


def _context(opened: AttemptOpened) -> secure_agg.RoundContext:
    """Returns the attempt's context. Raises PolicyRefusal if its numbers are impossible."""
    try:
        return opened.context
    except secure_agg.ContextInvalid as error:
        raise PolicyRefusal(
            Reason.REASON_CONTEXT_INVALID,
            f"the attempt's numbers are missing or contradict each other: {error}. This member showed no key and sits "
            "out the round; the coordinator runs different software, or lies",
        ) from error


def _log_head(environment: Environment, opened: AttemptOpened) -> SignedHead | None:
    """Returns the head of the roster log that the attempt names. Raises PolicyRefusal if it is not accepted.

    The agent has followed the log to this head before the message arrived here.
    """
    signed = opened.log_head
    if environment.roster is None:
        return signed if isinstance(signed, SignedHead) else None
    if not isinstance(signed, SignedHead):
        raise PolicyRefusal(
            Reason.REASON_LOG_HEAD_INVALID,
            f"the attempt names no head of the roster log{'' if signed is None else ': ' + signed}. This member showed "
            "no key and sits out the round; the coordinator runs different software, or hides who its members are",
        )
    try:
        environment.roster.check_head(signed, environment.now())
    except sqlite3.Error as error:
        raise PolicyRefusal(Reason.REASON_LOG_FAILING, f"this member cannot use its roster log: {error}") from error
    return signed


def _check_context(
    environment: Environment, holding: Holding, context: secure_agg.RoundContext, head: SignedHead | None
) -> None:
    """Checks that the context matches what this update was trained under. It derives every number again."""
    assignment, job = holding.assignment, holding.job
    least, most = job.rounds.min_members, job.rounds.target_members
    if not least <= context.cohort <= most:
        _unexpected([f"cohort ({context.cohort}, not {least} to {most})"])
    try:
        expected = context_of(
            job,
            federation=environment.federation,
            round=assignment.round,
            attempt=context.attempt,
            model=assignment.version,
            members=context.cohort,
            head=b"" if head is None else head.head.digest,
        )
    except (secure_agg.ContextInvalid, secure_agg.LayoutInvalid) as error:
        raise PolicyRefusal(
            Reason.REASON_CONTEXT_UNEXPECTED, f"this job cannot have such an attempt: {error}"
        ) from error
    wrong = [
        name
        for name in ("federation", "job", "model", "application")
        if getattr(context, name) != getattr(expected, name)
    ]
    wrong += _other_numbers(context, expected, ("round", "values", "bits"))
    wrong += _weaker(context, expected)
    if isinstance(job.mechanism, DistributedGaussian) and context.honest < job.mechanism.honest:
        # The privacy cost counts on the noise of that many honest shares.
        wrong.append(f"honest ({context.honest}, not {job.mechanism.honest})")
    _unexpected(wrong)


def _unexpected(wrong: list[str]) -> None:
    """Raises PolicyRefusal if the list is not empty."""
    if wrong:
        raise PolicyRefusal(
            Reason.REASON_CONTEXT_UNEXPECTED,
            f"the attempt's {', '.join(wrong)} is not what this member trained under; it showed no key and sits out "
            "the round. The coordinator uses another job document than it announced, or lies",
        )


def _other_numbers(has: object, wanted: object, names: Iterable[str]) -> list[str]:
    pairs = [(name, getattr(has, name), getattr(wanted, name)) for name in names]
    return [f"{name} ({found}, not {expected})" for name, found, expected in pairs if found != expected]


def _weaker(context: secure_agg.RoundContext, expected: secure_agg.RoundContext) -> list[str]:
    """Lists the numbers that protect one input from the coordinator and that differ from the job's.

    On the complete graph n_C may be larger than the job's: t and h follow from it, and the policy checks them. The
    numbers of a sparse graph depend on one another, and single numbers do not show which set of them is weaker. So all
    of them must be the job's, and so must those of groups.
    """
    split, wanted_split = context.grouped, expected.grouped
    if split is not None or wanted_split is not None:
        if split is None or wanted_split is None:
            return [
                "graph ({}, not {})".format(
                    *("whole" if each is None else "in groups" for each in (split, wanted_split))
                )
            ]
        return [
            *_other_numbers(context, expected, ("threshold", "assumed_corrupt")),
            *_other_numbers(split, wanted_split, ("groups", "least", "sigma", "absent")),
        ]
    graph, wanted = context.sparse, expected.sparse
    if graph is None and wanted is None:
        if context.assumed_corrupt >= expected.assumed_corrupt:
            return []
        return _other_numbers(context, expected, ("assumed_corrupt",))
    if graph is None or wanted is None:
        kinds = ("complete" if each is None else "sparse" for each in (graph, wanted))
        return ["graph ({}, not {})".format(*kinds)]
    names = ("degree", "corrupt_millionths", "lost_millionths", "sigma", "absent")
    return [
        *_other_numbers(context, expected, ("threshold", "assumed_corrupt")),
        *_other_numbers(graph, wanted, names),
    ]


def _check_peers(environment: Environment, session: secure_agg.Session) -> None:
    """Checks the peers that the policy pins, once every certificate of the roster is verified. Raises PolicyRefusal."""
    keys = {member: environment.key_of(certificate) for member, certificate in session.certificates.items()}
    environment.policy.check_roster(keys, session.max_doubtful, own=environment.identity.member)


def _check_logged(step: _Step, phase: InAttempt, session: secure_agg.Session) -> None:
    """Checks that every certificate of the roster is in the roster log. Raises PolicyRefusal."""
    environment, opened = step.environment, phase.heard.get(AttemptOpened)
    if environment.roster is None or not isinstance(opened, AttemptOpened):
        return
    assert isinstance(opened.log_head, SignedHead)  # noqa: S101  for the type checker: `_join` refused any other
    roster = {
        member: (
            secure_agg.certificate_digest(certificate),
            hashlib.sha256(environment.key_of(certificate)).digest(),
        )
        for member, certificate in session.certificates.items()
    }
    try:
        environment.roster.check_roster(
            roster,
            opened.log_head,
            environment.policy,
            max_doubtful=session.max_doubtful,
            own=environment.identity.member,
            now=environment.now(),
        )
    except sqlite3.Error as error:
        raise PolicyRefusal(Reason.REASON_LOG_FAILING, f"this member cannot use its roster log: {error}") from error


def _check_same_round(memory: Memory, assignment: Assignment) -> None:
    """Checks that a round keeps one version and one job document after a vector has left.

    Another one would ask for a second, nearly equal update under a new name.
    """
    for sent in memory.sent:
        same_round = (sent.attempt.job, sent.attempt.round) == (assignment.job, assignment.round)
        if same_round and (sent.version, sent.document) != (assignment.version, assignment.job_document):
            raise PolicyRefusal(
                Reason.REASON_CONTEXT_UNEXPECTED,
                f"round {assignment.round} had another version or job document when this member first sent for it",
            )


def _in_attempt(step: _Step, phase: InAttempt, payload: CoordinatorPayload) -> None:
    if isinstance(payload, secure_agg.Complaint):
        _guarded(step, phase, lambda: _answer_complaint(step, phase, payload))
        return
    kind = _kind(payload)
    if kind in phase.heard:
        if phase.heard[kind] != payload:
            reason, what = _SECOND[kind]
            detail = (
                f"the coordinator sent a second, different {what} for attempt {phase.attempt.round}."
                f"{phase.attempt.attempt}; this member answered only the first one, left the attempt and sits out the "
                "round. No honest coordinator does that: compare its log of the attempt with this member's"
            )
            _refuse(step, phase, reason, detail)
        elif kind in phase.said:
            step.do(Say(AttemptMessage(phase.attempt, phase.said[kind])))
        return
    _guarded(step, phase, lambda: _advance(step, phase, payload))


def _guarded(step: _Step, phase: InAttempt, advance: Callable[[], None]) -> None:
    """Advances, or leaves the attempt with the reason."""
    try:
        advance()
    except secure_agg.Refusal as refusal:
        about = f"{refusal.member}: " if refusal.member else ""
        detail = about + (refusal.detail or refusal.reason.sentence)
        _refuse(step, phase, of_protocol(refusal.reason), detail, refusal.member or "")
    except PolicyRefusal as refusal:
        _refuse(step, phase, refusal.reason, refusal.detail)
    except secure_agg.IdentityInvalid as error:
        # A certificate was valid when the roster was checked, and expired before its key was read.
        _refuse(step, phase, Reason.REASON_ROSTER_SIGNATURE_INVALID, str(error))


# The name that people use for the message that each stage waits for.
_AWAITED: dict[type, str] = {
    secure_agg.AwaitingRoster: "the roster",
    secure_agg.AwaitingDealings: "the dealt shares",
    secure_agg.Complaining: "what the dealers open that it complained about",
    secure_agg.ReadyToMask: "nothing: it is masking its vector",
    secure_agg.AwaitingSurvivors: "the list of survivors",
    secure_agg.AwaitingConfirmations: "the request to unmask",
    secure_agg.Answered: "the end of the attempt",
}


def _advance(step: _Step, phase: InAttempt, payload: CoordinatorPayload) -> None:
    """Runs one phase of the protocol. Raises secure_agg.Refusal, PolicyRefusal."""
    match phase.stage, payload:
        case secure_agg.AwaitingRoster(), secure_agg.Roster():
            _on_roster(step, phase, payload, ())
        case secure_agg.AwaitingRoster() as stage, secure_agg.DigestRoster() | secure_agg.GroupRoster():
            missing = stage.missing(payload)
            if missing:
                step.enter(phase.attempt.job, replace(phase, heard={**phase.heard, _kind(payload): payload}))
                step.do(FetchCertificates(phase.attempt, missing))
            else:
                _on_roster(step, phase, payload, ())
        case secure_agg.AwaitingDealings() as stage, secure_agg.ReceivedDealings():
            following = stage.on_dealings(payload)
            if isinstance(following, secure_agg.Complaining):
                _complain(step, phase, payload, following)
            else:
                _open(step, phase, payload, following)
        case secure_agg.Complaining() as stage, secure_agg.Openings():
            _open(step, phase, payload, stage.on_openings(payload))
        case secure_agg.AwaitingSurvivors() as stage, secure_agg.Survivors():
            _check_members(step, phase, payload.members)
            awaiting_confirmations, confirmation = stage.on_survivors(payload)
            _sign(step, phase, payload.members)
            _answer(step, phase, payload, awaiting_confirmations, confirmation)
        case secure_agg.AwaitingConfirmations() as stage, secure_agg.Confirmations():
            answered, unmasking = stage.on_confirmations(payload)
            _answer(step, phase, payload, answered, unmasking)
        case _:
            _refuse_out_of_turn(step, phase, payload)


def _refuse_out_of_turn(step: _Step, phase: InAttempt, payload: CoordinatorPayload) -> None:
    detail = (
        f"{type(payload).__name__} came out of turn: this member waits for {_AWAITED[type(phase.stage)]}. It left the "
        "attempt and sits out the round; the coordinator's log says what was sent before"
    )
    _refuse(step, phase, Reason.REASON_MESSAGE_NOT_EXPECTED, detail)


def _complain(step: _Step, phase: InAttempt, heard: secure_agg.ReceivedDealings, stage: secure_agg.Complaining) -> None:
    """Complains about dealings that do not open, in place of sending a vector."""
    for complaint in stage.complaints.complaints:
        said = {"attempt": str(phase.attempt), "dealer": complaint.dealer, "part": complaint.part.value}
        step.do(Note("complained", said, warning=True))
    _answer(step, phase, heard, stage, stage.complaints)


def _answer_complaint(step: _Step, phase: InAttempt, complaint: secure_agg.Complaint) -> None:
    """Opens what this member dealt to one receiver. Raises secure_agg.Refusal.

    The state is not changed: a repeated complaint gets the same opening.
    """
    match phase.stage:
        case (
            secure_agg.AwaitingDealings()
            | secure_agg.Complaining()
            | secure_agg.ReadyToMask()
            | secure_agg.AwaitingSurvivors() as stage
        ):
            opening = stage.on_complaint(complaint)
        case _:
            _refuse_out_of_turn(step, phase, complaint)
            return
    answered = {"attempt": str(phase.attempt), "complainant": complaint.complainant, "part": complaint.part.value}
    step.do(Note("complaint_answered", answered, warning=True), Say(AttemptMessage(phase.attempt, opening)))


def _on_roster(
    step: _Step,
    phase: InAttempt,
    roster: secure_agg.Roster | secure_agg.DigestRoster | secure_agg.GroupRoster,
    fetched: tuple[bytes, ...],
) -> None:
    """Deals to the roster. Raises secure_agg.Refusal, PolicyRefusal."""
    assert isinstance(phase.stage, secure_agg.AwaitingRoster)  # noqa: S101  for the type checker: both callers looked
    awaiting_dealings, dealing = phase.stage.on_roster(roster, fetched)
    try:
        session = awaiting_dealings.seat.session
        _check_peers(step.environment, session)
        _check_logged(step, phase, session)
        _check_members(step, phase, session.members)
    except (PolicyRefusal, secure_agg.IdentityInvalid):
        awaiting_dealings.forget()
        raise
    _answer(step, phase, roster, awaiting_dealings, dealing)
    # Keys were fetched, too, but they are for this attempt alone.
    named = {entry.certificate_digest for entry in session.entries.values()}
    keep = tuple(item for item in fetched if secure_agg.certificate_digest(item) in named)
    if keep:
        step.do(KeepCertificates(keep))


def _certificates_fetched(step: _Step, event: CertificatesFetched) -> None:
    """Continues with the roster that something was fetched for. It refuses by name if something is still missing."""
    phase = step.state.phase(event.attempt.job)
    if (
        not isinstance(phase, InAttempt)
        or phase.attempt != event.attempt
        or not isinstance(phase.stage, secure_agg.AwaitingRoster)
    ):
        return
    roster = phase.heard.get(secure_agg.Roster)
    if isinstance(roster, secure_agg.DigestRoster | secure_agg.GroupRoster):
        _guarded(step, phase, lambda: _on_roster(step, phase, roster, event.found))


def _answer(step: _Step, phase: InAttempt, heard: CoordinatorPayload, stage: Stage, said: MemberPayload) -> None:
    kind = _kind(heard)
    following = replace(phase, stage=stage, heard={**phase.heard, kind: heard}, said={**phase.said, kind: said})
    step.enter(phase.attempt.job, following)
    step.do(Say(AttemptMessage(phase.attempt, said)))


def _open(
    step: _Step,
    phase: InAttempt,
    heard: secure_agg.ReceivedDealings | secure_agg.Openings,
    ready: secure_agg.ReadyToMask,
) -> None:
    """Records that the masked update is about to leave, and starts to send it.

    The member also checked the vector when it joined, but only this check counts.
    """
    memory, assignment = step.state.memory, phase.holding.assignment
    try:
        _check_vector(step, phase.holding)
    except PolicyRefusal:
        ready.forget()
        raise
    sent = Sent(phase.attempt, assignment.version, assignment.job_document, phase.holding.update)
    step.state = replace(step.state, memory=replace(memory, sent=(*memory.sent, sent)))
    following = replace(phase, stage=ready, heard={**phase.heard, type(heard): heard})
    step.enter(phase.attempt.job, following)
    cohort = ready.seat.context.cohort
    step.do(
        VectorLeaving(phase.attempt, phase.holding.update),
        MaskAndUpload(phase.attempt, phase.holding.job, assignment.version, cohort, ready, phase.holding.update),
    )


def _sign(step: _Step, phase: InAttempt, survivors: tuple[str, ...]) -> None:
    """Records which sum this member's update may be in, before the member confirms it."""
    memory = step.state.memory
    sent = tuple(
        replace(each, survivors=frozenset(survivors)) if each.attempt == phase.attempt else each for each in memory.sent
    )
    step.state = replace(step.state, memory=replace(memory, sent=sent))
    step.do(Signed(phase.attempt, survivors))


def _masked(step: _Step, event: Masked) -> None:
    phase = step.state.phase(event.attempt.job)
    if (
        isinstance(phase, InAttempt)
        and phase.attempt == event.attempt
        and isinstance(phase.stage, secure_agg.ReadyToMask)
    ):
        step.enter(event.attempt.job, replace(phase, stage=event.stage))
    else:
        # The member left this attempt while its vector was being masked.
        event.stage.forget()


def _masking_failed(step: _Step, event: MaskingFailed) -> None:
    phase = step.state.phase(event.attempt.job)
    if isinstance(phase, InAttempt) and phase.attempt == event.attempt:
        _refuse(step, phase, event.reason, event.detail)


# Maximum characters of a refusal, since some hold what the coordinator sent.
_LONGEST_DETAIL = 500


def _say_refusal(step: _Step, attempt: AttemptId, reason: Reason, detail: str, member: str = "") -> None:
    detail = detail[:_LONGEST_DETAIL]
    step.do(
        Note(
            "attempt_refused",
            {"attempt": str(attempt), "reason": word(reason), "detail": detail},
            True,
        ),
        Say(AttemptMessage(attempt, AttemptRefusal(reason, detail, member))),
    )


def _refuse(step: _Step, phase: InAttempt, reason: Reason, detail: str, member: str = "") -> None:
    """Leaves the attempt: says why, forgets the secrets, and sits out the round unless the next attempt may differ.

    `member` is the dealer at fault. Only the receiver of a sealed share sees that it is invalid.
    """
    _say_refusal(step, phase.attempt, reason, detail, member)
    _leave_attempt(step, phase, AttemptEnded(False, reason, detail))
    if reason in _MAY_GO_ON:
        step.enter(phase.attempt.job, phase.holding)
        return
    step.do(Discard(phase.attempt.job))
    assignment = phase.holding.assignment
    if reason in _OF_STEWARDS:
        _await_approval(step, assignment, phase.holding.job, reason, detail)
        return
    decline = Decline(assignment.job, assignment.round, reason, detail[:_LONGEST_DETAIL])
    step.enter(phase.attempt.job, Waiting(decline))


def _leave_attempt(step: _Step, phase: InAttempt, ended: AttemptEnded) -> None:
    signed = phase.heard.get(secure_agg.Survivors) if secure_agg.Survivors in phase.said else None
    survivors = signed.members if isinstance(signed, secure_agg.Survivors) else None
    phase.stage.forget()
    step.do(StopUpload(phase.attempt), EndedAttempt(phase.attempt, ended, survivors))


def _attempt_ended(step: _Step, phase: InAttempt, ended: AttemptEnded) -> None:
    _leave_attempt(step, phase, ended)
    if ended.published:
        step.do(Discard(phase.attempt.job))
        step.enter(phase.attempt.job, Waiting())
    else:
        # The update is still good for this round. The coordinator asks for it with the next assignment.
        step.enter(phase.attempt.job, phase.holding)
