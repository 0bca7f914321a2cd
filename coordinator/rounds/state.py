"""A job's state between two events. All of it is immutable.

`transitions` has the table of the states.

A round is open from its first training window until it is published or its attempts are used up. A pause keeps it open.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import secure_agg
from coordinator.domain.jobs import Dropout, Exploded, JobStatus, Norms
from coordinator.domain.validation import Measured
from coordinator.domain.witnessed import Witnessed
from secure_agg import server as protocol
from tacit.attempt import AttemptId
from tacit.job import JobDocument
from tacit.mechanism import NoMechanism
from tacit.messages import CoordinatorPayload
from tacit.reason import Reason
from tacit.roster import SignedHead

__all__ = [
    "Aggregating",
    "Collecting",
    "Halted",
    "JobState",
    "MemberView",
    "Parameters",
    "Publishing",
    "TrainingWindow",
]

Collecting = (
    protocol.CollectingAdvertisements
    | protocol.CollectingDealings
    | protocol.CollectingMasked
    | protocol.CollectingConfirmations
    | protocol.CollectingUnmaskings
)


@dataclass(frozen=True)
class Parameters:
    """What never changes about a job."""

    job: JobDocument
    document: bytes
    federation: bytes
    # Passed to the protocol: certificates are the driver's business.
    verify: secure_agg.VerifyIdentity = field(repr=False)
    key_of: secure_agg.KeyOf = field(repr=False)
    # The newest head of the roster log; None where there is no log.
    log_head: Callable[[], SignedHead | None] = field(default=lambda: None, repr=False)
    # How much of that log its witnesses have signed.
    witnessed: Callable[[], Witnessed] = field(default=Witnessed, repr=False)


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member, as this job sees it."""

    connected: bool
    process: bytes
    # Counts sessions, so that a timer set for one absence does not end a later one.
    session: int = 1
    ready: bool = False
    declined: tuple[Reason, str] | None = None
    # How many of its stewards approved the job, by its last READY; 0: its policy does not ask them.
    approvals: int = 0
    # How often this member was dropped for what it sent, and the round from which it is asked again.
    faults: int = 0
    barred_until: int = 0
    # Deadlines missed in a row, and the round from which it is asked again even if the others are enough.
    missed_deadlines: int = 0
    away_until: int = 0

    @property
    def withdrew(self) -> bool:
        """Whether it withdrew, or said so. The job asks it for nothing more."""
        return self.declined is not None and self.declined[0] == Reason.REASON_MEMBER_WITHDREW

    @property
    def awaits_approval(self) -> bool:
        """Whether it waits for its stewards. It goes on by itself once they have approved the job."""
        return self.declined is not None and self.declined[0] == Reason.REASON_APPROVAL_AWAITED


@dataclass(frozen=True, slots=True)
class Halted:
    """Paused, finished, aborted, or not started yet."""


@dataclass(frozen=True, slots=True)
class TrainingWindow:
    """The round's training window is open. `ready_order` lists who said READY, first come first."""

    opened_ms: int
    ready_order: tuple[str, ...] = ()
    # Members that have had the whole window so far, and whether it was extended because too few were ready.
    asked: frozenset[str] = frozenset()
    extended: bool = False


@dataclass(frozen=True)
class Aggregating:
    """An attempt is under way."""

    attempt: AttemptId
    cohort: tuple[str, ...]
    protocol: Collecting
    phase_ms: int
    # The present phase's message for each member, sent again if the member reconnects.
    outbox: Mapping[str, CoordinatorPayload]
    dropouts: tuple[Dropout, ...] = ()
    survivors: tuple[str, ...] = ()
    # Dealers that did not answer a complaint in time.
    silent: frozenset[str] = frozenset()
    # Once the mask phase is past its deadline: its seconds so far, and what had arrived of each member's vector then.
    awaited_seconds: float = 0.0
    arrived: Mapping[str, int] = field(default_factory=dict)
    # Number of entries in the roster log of this attempt, and how many of them the witnesses have signed.
    logged: int | None = None
    witnessed: int | None = None


@dataclass(frozen=True)
class Publishing:
    """The sum is being opened and the next version written."""

    attempt: AttemptId
    cohort: tuple[str, ...]
    survivors: tuple[str, ...]
    dropouts: tuple[Dropout, ...]
    phase_ms: int
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class JobState:
    """One job."""

    parameters: Parameters
    status: JobStatus
    reason: Reason
    round: int
    round_open: bool
    attempt: int
    attempts_in_round: int
    failed_rounds: int
    version_number: int
    version: bytes
    members: Mapping[str, MemberView] = field(default_factory=dict)
    phase: Halted | TrainingWindow | Aggregating | Publishing = Halted()
    # Digests of the server optimiser's state with the present version, by name.
    server_state: Mapping[str, bytes] = field(default_factory=dict)
    # Norms of the newest steps, oldest first, and the first version that exploded.
    norms: tuple[Norms, ...] = ()
    exploded: Exploded | None = None
    # The estimated accuracy of each measured version by its number, in order; None where nothing is shown.
    accuracies: Mapping[int, Measured | None] = field(default_factory=dict)
    # Without noise: each U3 given to members for the present version. A member that confirmed one confirms no other.
    confirmed_sums: tuple[frozenset[str], ...] = ()
    # For a while after a restart of the coordinator: members of the last cohort that are not back yet.
    awaited: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The job's name."""
        return self.parameters.job.name

    def with_member(self, member: str, view: MemberView) -> "JobState":
        """Returns the same job with a new view of one member."""
        return replace(self, members={**self.members, member: view})

    def attempt_id(self) -> AttemptId:
        """The newest attempt's id."""
        return AttemptId(self.name, self.round, self.attempt)

    @property
    def one_sum_a_version(self) -> bool:
        """Whether members confirm at most one sum of a version: without noise, and not in groups."""
        job = self.parameters.job
        return isinstance(job.mechanism, NoMechanism) and job.aggregation.groups is None

    @property
    def available(self) -> tuple[str, ...]:
        """Connected members that have not declined this job and are not left out of this round.

        Members left out for missed deadlines count if the others are fewer than a cohort needs, or if they are in a
        confirmed sum, which cannot be retried without them.
        """
        here = {name: view for name, view in self.members.items() if view.connected and self.counts(view)}
        bound = frozenset[str]().union(*self.confirmed_sums)
        steady = [name for name, view in here.items() if view.away_until <= self.round or name in bound]
        return tuple(sorted(steady if len(steady) >= self.parameters.job.rounds.min_members else here))

    @property
    def awaiting_approval(self) -> tuple[str, ...]:
        """Connected members that wait for their stewards to approve the job."""
        return tuple(sorted(name for name, view in self.members.items() if view.connected and view.awaits_approval))

    def counts(self, view: MemberView) -> bool:
        """Whether a member has not declined this job and is not left out of this round for what it sent."""
        return view.declined is None and view.barred_until <= self.round
