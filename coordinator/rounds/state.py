"""What a job knows of itself between two events. All of it is immutable.

`transitions` has the table of what leads from state to state.

A round is open from its first Training until it is published or its attempts are used up; Pause keeps it open.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import secure_agg
from coordinator.domain.jobs import Dropout, JobStatus
from secure_agg import server as protocol
from tacit.attempt import AttemptId
from tacit.job import JobDocument
from tacit.mechanism import NoMechanism
from tacit.messages import CoordinatorPayload
from tacit.reason import Reason

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
    # Given to the protocol: certificates are the driver's business.
    verify: secure_agg.VerifyIdentity = field(repr=False)
    key_of: secure_agg.KeyOf = field(repr=False)


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member, as this job sees it."""

    connected: bool
    process: bytes
    # Counts sessions, so that a timer set for one absence does not end another.
    session: int = 1
    ready: bool = False
    declined: tuple[Reason, str] | None = None
    # Times that this member was dropped for something it did, and the round from which on it is asked again.
    faults: int = 0
    barred_until: int = 0
    # Deadlines missed in a row, and the round from which on the member is asked again although others are enough.
    missed_deadlines: int = 0
    away_until: int = 0


@dataclass(frozen=True, slots=True)
class Halted:
    """Paused, finished or aborted; or not started yet."""


@dataclass(frozen=True, slots=True)
class TrainingWindow:
    """The round's training window is open. `ready_order` is who said READY, first come first."""

    opened_ms: int
    ready_order: tuple[str, ...] = ()
    # Members that have had the whole window so far, and whether it was extended for want of members.
    asked: frozenset[str] = frozenset()
    extended: bool = False


@dataclass(frozen=True)
class Aggregating:
    """An attempt is under way."""

    attempt: AttemptId
    cohort: tuple[str, ...]
    protocol: Collecting
    phase_ms: int
    # The present phase's message for each member: sent again to whoever reconnects.
    outbox: Mapping[str, CoordinatorPayload]
    dropouts: tuple[Dropout, ...] = ()
    survivors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Publishing:
    """The sum is being opened and the next version written."""

    attempt: AttemptId
    cohort: tuple[str, ...]
    survivors: tuple[str, ...]
    dropouts: tuple[Dropout, ...]
    phase_ms: int


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
    # Digests of what the server optimiser carries on from the version, by name.
    server_state: Mapping[str, bytes] = field(default_factory=dict)
    # By dealer: who, in this round, refused what it dealt.
    complaints: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # Without noise: each U3 that was given to members for the present version. Who confirmed one confirms no other.
    confirmed_sums: tuple[frozenset[str], ...] = ()
    # Behind a restart of the coordinator: the last cohort's members that are not back yet, for a while.
    awaited: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The job's name."""
        return self.parameters.job.name

    def with_member(self, member: str, view: MemberView) -> "JobState":
        """The same job with one member seen anew."""
        return replace(self, members={**self.members, member: view})

    def attempt_id(self) -> AttemptId:
        """The newest attempt's name."""
        return AttemptId(self.name, self.round, self.attempt)

    @property
    def one_sum_a_version(self) -> bool:
        """Whether members confirm one sum of a version at most: without noise, and not in groups."""
        job = self.parameters.job
        return isinstance(job.mechanism, NoMechanism) and job.aggregation.groups is None

    @property
    def available(self) -> tuple[str, ...]:
        """Connected members that have not declined this job and are not left out of this round.

        Members that are left out for missed deadlines count where the others are fewer than a cohort takes, and where
        they are in a confirmed sum: it cannot be tried again without them.
        """
        here = {name: view for name, view in self.members.items() if view.connected and self._counts(view)}
        bound = frozenset[str]().union(*self.confirmed_sums)
        steady = [name for name, view in here.items() if view.away_until <= self.round or name in bound]
        return tuple(sorted(steady if len(steady) >= self.parameters.job.rounds.min_members else here))

    def _counts(self, view: MemberView) -> bool:
        return view.declined is None and view.barred_until <= self.round
