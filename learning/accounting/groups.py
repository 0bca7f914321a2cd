"""What events that were charged for single rows are to a person with several of them: group privacy. Pure.

Claim. Let an event be about one example, and let a person have at most k rows at that time. Then `of_person(event, k)`
bounds what the event reveals about all of the person's rows together, under add-remove.

    sampled-gaussian    multiplier / k, rate 1 - (1 - rate)^k: some of the rows are drawn with this probability, and
                        together move the sum by at most k times as much as one
    laplace             the same: its noise is scaled to the distance between any two outputs
    discrete-gaussian-sum   distance * k: one row after another. (For an update that is clipped as a whole the distance
                        covers any change already; for a histogram of labels it is that of one row.)
    discrete-gaussian   multiplier / k: one row after another
    fixed-lot-gaussian  none; the ledger of a person is add-remove

Proof of the first line. Fix the other rows. Let X be their part of the sum, and S the person's rows that are drawn: it
is empty with probability (1 - q)^k, and otherwise moves the sum by a vector v_S, at most |S| <= k clips long. A channel
that is given a draw y of one coordinate, from N(0, z^2) or from N(k, z^2), draws S among the sets that are not empty,
shrinks y by |v_S| / k, tops its variance up to z^2, lays it along v_S, adds independent noise of the same variance in
all other directions, and adds X. It turns N(0, z^2) into X plus noise and N(k, z^2) into X plus v_S plus noise. So it
turns the pair ((1 - q') N(0, z^2) + q' N(k, z^2), N(0, z^2)), q' = 1 - (1 - q)^k, into the step with the person and the
step without, in both orders, and post-processing increases no divergence. Steps compose, since the pair is the same
whatever was released before. docs/persons.md says what it assumes of k. (Ganesh 2024, "Tight group-level DP guarantees
for DP-SGD with sampling via mixture of Gaussians mechanisms", has the mixture itself; the events of a ledger have no
such kind, and this pair dominates it.)
"""

import math

from learning.accounting.events import (
    DiscreteGaussian,
    DiscreteGaussianSum,
    FixedLotGaussian,
    Laplace,
    PrivacyEvent,
    SampledGaussian,
)
from learning.accounting.renyi import EventUnaccountable

__all__ = ["of_person"]


def of_person(event: PrivacyEvent, rows: int) -> PrivacyEvent:
    """The event of a person that bounds an event of one example.

    Args:
        event: An event whose unit is an example.
        rows: k, the most rows that a person had when the event was charged.

    Raises:
        EventUnaccountable: There is no such event.
        ValueError: The event is about another unit, or `rows` is not positive.
    """
    if event.unit != "example" or rows < 1:
        raise ValueError(f"{rows} rows of a person and an event of one {event.unit} have no bound by group privacy")
    changes: dict[str, object] = {"unit": "person"}
    match event:
        case FixedLotGaussian():
            raise EventUnaccountable(
                "a lot of a fixed size is accounted for under replace-one, and a ledger of persons is add-remove; keep "
                'unit = "example" for this data'
            )
        case SampledGaussian():
            # In float64, 1 - (1 - q)^k would lose a small rate; rounded up, and never above 1.
            rate = 1.0 if event.rate == 1 else -math.expm1(rows * math.log1p(-event.rate))
            changes |= {
                "multiplier": event.multiplier / rows,
                "rate": min(1.0, math.nextafter(rate * (1 + 1e-15), 1.0)),
            }
        case DiscreteGaussian():
            changes["multiplier"] = event.multiplier / rows
        case DiscreteGaussianSum():
            changes["distance"] = event.distance * rows
        case Laplace():
            pass
    if not isinstance(event, DiscreteGaussian) and event.metrics is not None:
        beside = event.metrics
        changes["metrics"] = beside.model_copy(update={"multiplier": beside.multiplier / rows})
    return event.model_copy(update=changes)
