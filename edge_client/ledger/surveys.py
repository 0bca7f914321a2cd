"""What surveys may spend of a ledger: `surveys_epsilon`, over all of them.

The limit counts as the gate does, over everything that surveys have charged or reserved. It comes beside the limits of
the data, the month and the job, which every answer must pass too. Pure.
"""

from collections.abc import Iterable, Sequence

from edge_client.ledger.replay import Reservation
from edge_client.policy.document import PolicyDocument
from learning.accounting.events import PrivacyEvent
from tacit.mechanism import OwnDiscreteGaussian

__all__ = ["refusal", "spent"]

_MECHANISM: str = OwnDiscreteGaussian.model_fields["name"].default


def spent(reservations: Iterable[Reservation]) -> tuple[PrivacyEvent, ...]:
    """The events that surveys have charged or reserved."""
    return tuple(each.event for each in reservations if each.released is None and each.purpose.mechanism == _MECHANISM)


def refusal(policy: PolicyDocument, spent: Sequence[PrivacyEvent], event: PrivacyEvent) -> str | None:
    """Why surveys may not spend one more event. None: they may.

    Raises:
        EventUnaccountable: the event has no formula under the policy's adjacency and unit.
    """
    from dataclasses import replace

    from learning.accounting.gate import PrivacyFilter

    most = policy.surveys_epsilon
    limit = policy.limit()
    if most > 0 and PrivacyFilter(replace(limit, epsilon=most)).admits([*spent, event]):
        return None
    return f"surveys_epsilon: surveys would pass epsilon {most:g} at delta {limit.delta:g}"
