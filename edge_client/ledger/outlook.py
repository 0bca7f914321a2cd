"""Says how far a data set's budget lets a member take part in a job, before or while it runs. Changes nothing.

It counts as the gate does: rounds one after another, on top of what the ledger has charged and reserved. Two things are
not foreseen: charges of other jobs meanwhile, and rounds or attempts that the coordinator repeats, which may be charged
again. Both leave fewer rounds.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edge_client.ledger import questions
from edge_client.ledger.history import current
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.replay import UNKNOWN, LedgerState, Reservation, as_events, month_of
from edge_client.ledger.store import reading
from edge_client.policy.document import PolicyDocument
from learning.accounting.calibration import rounds_affordable
from learning.accounting.costs import event_of_metrics
from learning.accounting.events import PrivacyEvent, metrics_alone, metrics_beside
from learning.accounting.gate import PrivacyFilter, beside_what_is_spent
from learning.accounting.renyi import EventUnaccountable
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import DpSgd, NoMechanism

__all__ = ["Outlook", "check_unit", "may_measure", "outlook", "room_for_metrics", "stored_state"]


def may_measure(
    policy: PolicyDocument,
    job: JobDocument | JobSpec,
    reservations: Collection[Reservation],
    federation: bytes | None = None,
) -> bool:
    """Whether a job's events have metrics beside them: like its first event in the ledger, or else as the policy says.

    Events with and without metrics are two kinds, which cost more together. So if the policy changes during a job, its
    events stay of the kind that they are. A job's measurements stop all the same once `metrics_epsilon` is 0.

    Args:
        policy: the policy.
        job: the job.
        reservations: those of the data set's ledger.
        federation: the job's federation; None takes jobs of this document in all federations.
    """
    if job.metrics is None:
        return False
    document, mechanism = job.digest(), job.mechanism.name
    for each in reservations:
        purpose = each.purpose
        ours = (purpose.document, purpose.job, purpose.mechanism) == (document, job.name, mechanism)
        if ours and each.released is None and federation in (None, purpose.federation):
            return metrics_beside(each.event) is not None
    spent = [each.event for each in reservations if each.released is None]
    return policy.measures and room_for_metrics(policy, job, spent)


def room_for_metrics(policy: PolicyDocument, job: JobDocument | JobSpec, spent: Iterable[PrivacyEvent]) -> bool:
    """Whether one more measurement of a job fits into `metrics_epsilon`, counted as if metrics were alone.

    None does whose noise is below the policy's minimum. A member that can never measure a job pays for none of its
    metrics, so its events must not have any.
    """
    if job.metrics is None or isinstance(job.mechanism, NoMechanism) or not policy.measures:
        return False
    # The ledger refuses such a job, and says why.
    if job.mechanism.unit != policy.unit:
        return False
    one = event_of_metrics(job.metrics.noise, policy.adjacency, job.mechanism.unit)
    if policy.min_noise_multiplier is not None and one.multiplier < policy.min_noise_multiplier:
        return False
    limit = replace(policy.limit(), epsilon=policy.metrics_epsilon)
    alone = [found for each in spent if (found := metrics_alone(each)) is not None]
    return PrivacyFilter(limit).admits([*alone, one])


@dataclass(frozen=True)
class Outlook:
    """The rounds of a job that a budget allows.

    Attributes:
        rounds: the job's rounds.
        paid: rounds of this job that the ledger has charged or reserved; under correlated noise without those that
            failed.
        further: how many more of the job's rounds `epsilon`, `epsilon_a_job`, a question's own limit and the steps of a
            job with correlated noise allow.
        spent_by: the key of the policy that allows no more, or of the job (`mechanism.spare_rounds`); None if all
            rounds are allowed.
        month: the present month, YYYY-MM in UTC.
        this_month: how many of `further` the month allows; None without `epsilon_a_month`.
        min_members: members without which the job makes no round.
    """

    rounds: int
    paid: int
    further: int
    spent_by: str | None
    month: str
    this_month: int | None
    min_members: int

    @property
    def possible(self) -> int:
        """In how many of the job's rounds this member can take part in all."""
        return self.paid + self.further

    @property
    def refused_by(self) -> str | None:
        """The key with which the next round would be declined; None if the budget allows it."""
        if self.paid < self.rounds and not self.further:
            return self.spent_by
        return "epsilon_a_month" if self.further and self.this_month == 0 else None

    @property
    def sentence(self) -> str:
        """How far the budget reaches, and what happens then."""
        whole = self.possible >= self.rounds
        said = "the budget lets this member take part in "
        said += f"all {self.rounds} rounds" if whole else f"{self.possible} of {self.rounds} rounds"
        if self.paid:
            said += f", of which its ledger has {self.paid}"
        if self.this_month is not None and self.this_month < self.further:
            said += f"; epsilon_a_month allows {self.this_month} of the other {self.further} in {self.month}"
        if not whole:
            said += (
                f"; then {self.spent_by} is spent, and the job pauses if fewer than {self.min_members} members are left"
            )
        return said

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**asdict(self), "possible": self.possible, "sentence": self.sentence}


def stored_state(home: Path, name: str) -> LedgerState | None:
    """Reads a data set's ledger, beside a running client too. None: there is none yet.

    Raises:
        LedgerError: it cannot be read; the sentence says why.
    """
    path = ledger_path(home, name)
    if not path.exists():
        return None
    with reading(path) as store:
        return current(store)


def check_unit(policy: PolicyDocument, state: LedgerState | None) -> None:
    """Checks that the data's ledger counts what the policy protects, as `edge_client run` does when it opens it.

    Raises:
        EventUnaccountable: it counts another unit; the sentence says what to do.
    """
    if state is None or state.limit is None or state.limit.unit == policy.unit:
        return
    held = state.limit.unit
    persons = (held, policy.unit) == ("example", "person")
    more = "; `edge_client ledger persons` can make it count persons" if persons else ""
    raise EventUnaccountable(
        f"the ledger of this data counts by {held}, and the policy protects by {policy.unit}; write unit = "
        f'"{held}" in the policy{more}'
    )


def outlook(
    policy: PolicyDocument,
    job: JobDocument | JobSpec,
    event: PrivacyEvent,
    state: LedgerState | None,
    *,
    federation: bytes | None = None,
    now: float | None = None,
) -> Outlook:
    """Computes how many of a job's rounds the policy's limits allow, after what the ledger holds.

    Args:
        policy: the limits.
        job: the job.
        event: what one round costs.
        state: the data set's ledger; None if it has none.
        federation: the job's federation; None counts the jobs of this name in all federations.
        now: seconds since 1970; the present time by default.

    Raises:
        EventUnaccountable: an event has no formula under the policy's adjacency and unit.
    """
    state = state or LedgerState()
    event = beside_what_is_spent(event, as_events(state.spent().items()))
    # Like the ledger, which never goes back in time.
    month = month_of(max(state.at_ms, int(1000 * (time.time() if now is None else now))))
    limit = policy.limit()
    ours = [
        each
        for each in state.reservations.values()
        if each.released is None and each.purpose.job == job.name and federation in (None, each.purpose.federation)
    ]
    mechanism = job.mechanism
    trained = [each for each in ours if each.purpose.mechanism == mechanism.name]
    paid = min(len({each.purpose.round for each in trained}), job.rounds.count)
    whole = isinstance(mechanism, DpSgd) and mechanism.band > 1
    if isinstance(mechanism, DpSgd) and whole and paid:
        paid, further = _rounds_of_steps(max(trained, key=lambda each: each.steps), mechanism, job.rounds.count)
        spent_by = None if paid + further == job.rounds.count else "mechanism.spare_rounds"
        return Outlook(job.rounds.count, paid, further, spent_by, month, None, job.rounds.min_members)
    left = job.rounds.count - paid

    def affordable(epsilon: float, spent: Counter[PrivacyEvent]) -> int:
        most = 1 if whole else left
        allowed = rounds_affordable(event, replace(limit, epsilon=epsilon), as_events(spent.items()), most=most)
        return left * allowed if whole else allowed

    further, spent_by = affordable(limit.epsilon, state.spent()), "epsilon"
    if policy.epsilon_a_job is not None:
        alone = affordable(policy.epsilon_a_job, Counter(each.event for each in ours))
        if alone < further:
            further, spent_by = alone, "epsilon_a_job"
    if job.question is not None:
        most = questions.allowance_for(policy, job.question)
        alike = Counter(questions.spent(job.question, state.reservations.values()))
        alone = affordable(most.epsilon, alike) if most.epsilon else 0
        if alone < further:
            further, spent_by = alone, most.key
    this_month = None
    if policy.epsilon_a_month is not None:
        this_month = min(further, affordable(policy.epsilon_a_month, state.spent_in(month)))
    return Outlook(
        rounds=job.rounds.count,
        paid=paid,
        further=further,
        spent_by=None if further == left else spent_by,
        month=month,
        this_month=this_month,
        min_members=job.rounds.min_members,
    )


def _rounds_of_steps(held: Reservation, mechanism: DpSgd, rounds: int) -> tuple[int, int]:
    """The rounds that a job with correlated noise has had of this member, and how many more it can have.

    The job is paid for, and what counts is how many of its K b steps are over. A round that failed after its vector
    left took steps, and the job needs another one for it. An attempt whose end is not known may have been published.
    """
    kept = sum(each.outcome in ("published", UNKNOWN, None) for each in held.attempts)
    paid = min(held.steps // mechanism.steps, kept, rounds)
    left = held.event.steps * mechanism.band - held.steps
    return paid, min(rounds - paid, left // mechanism.steps)
