"""What answers to questions may spend of a ledger: `surveys_epsilon` for surveys, `metrics_epsilon` for measurements.

Each limit counts as the gate does, over everything that was charged or reserved under it. A measurement shares its
limit with the metrics of jobs: both tell how well versions do on this member's rows. The limits come beside those of
the data, the month and the job, which every answer must pass too. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_client.ledger.replay import Reservation
from edge_client.policy.document import PolicyDocument
from learning.accounting.events import DiscreteGaussian, PrivacyEvent, metrics_alone
from tacit.measurement import Measurement
from tacit.question import Question

__all__ = ["Allowance", "allowance_for", "refusal", "spent"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limit that a question falls under.

    Attributes:
        key: The policy's key.
        epsilon: The most that may be spent under it; 0: nothing.
        spenders: What spends it, as a sentence names them.
    """

    key: str
    epsilon: float
    spenders: str


def allowance_for(policy: PolicyDocument, question: Question) -> Allowance:
    """The limit of the policy that an answer to this question must keep."""
    if isinstance(question, Measurement):
        return Allowance("metrics_epsilon", policy.metrics_epsilon, "metrics and measurements")
    return Allowance("surveys_epsilon", policy.surveys_epsilon, "surveys")


def spent(question: Question, reservations: Iterable[Reservation]) -> tuple[PrivacyEvent, ...]:
    """The events that count under the same limit as an answer to this question."""
    events = [each.event for each in reservations if each.released is None]
    if isinstance(question, Measurement):
        return tuple(found for each in events if (found := metrics_alone(each)) is not None)
    return tuple(each for each in events if isinstance(each, DiscreteGaussian) and each.vector == "histograms")


def refusal(
    policy: PolicyDocument, question: Question, spent: Sequence[PrivacyEvent], event: PrivacyEvent
) -> str | None:
    """Why one more event may not be spent under the question's limit. None: it may.

    Raises:
        EventUnaccountable: the event has no formula under the policy's adjacency and unit.
    """
    from dataclasses import replace

    from learning.accounting.gate import PrivacyFilter

    most = allowance_for(policy, question)
    limit = policy.limit()
    if most.epsilon > 0 and PrivacyFilter(replace(limit, epsilon=most.epsilon)).admits([*spent, event]):
        return None
    return f"{most.key}: {most.spenders} would pass epsilon {most.epsilon:g} at delta {limit.delta:g}"
