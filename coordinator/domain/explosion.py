"""Notices a version that explodes, from the versions' own norms. Pure.

The coordinator has nothing else to judge training by if a mechanism adds noise: no loss, no accuracy. Versions are
public to the federation and to the operator, so their norms tell nobody anything new about the data.

A version has exploded in one of two cases:

- *Norm.* It is more than `MAX_GROWTH` times the smallest norm of the `WINDOW` versions before it. A smaller norm than
  `ORDINARY` a coordinate counts as that much: parameters that start at or near zero (LoRA, a new head) must grow.
- *Change.* It is more than `MAX_JUMP` times the median of up to `WINDOW` earlier changes, and more than
  `MIN_SHARE` of the norm that it started from. So a job near its end, whose changes are tiny, does not count.

The numbers are measured on TextCNN (`tests/unit/coordinator/test_explosion.py`). Under DP-SGD at a rate that
trains, five rounds at most double the norm. At a rate that raises the loss tenfold, they multiply it by 7. The rule is
for a warning: it finds neither every divergence (few parameters can spoil a large model) nor only divergence.
"""

import math
from statistics import median

from coordinator.domain.jobs import Exploded, Norms

__all__ = ["MAX_GROWTH", "MAX_JUMP", "MIN_SHARE", "ORDINARY", "WINDOW", "explosion"]

WINDOW = 5
MAX_GROWTH = 5.0
MAX_JUMP = 10.0
MIN_SHARE = 0.1
# Root mean square of a coordinate.
ORDINARY = 0.1


def explosion(number: int, values: int, earlier: tuple[Norms, ...], norms: Norms) -> Exploded | None:
    """Returns how a version has exploded; None if it has not.

    Args:
        number: the version's number.
        values: its number of values.
        earlier: the norms of the steps before it, oldest first; the last `WINDOW` count.
        norms: those of the step that made it.
    """
    window = earlier[-WINDOW:]
    bases = [each.base for each in (*earlier, norms)][-WINDOW:]
    least = min(bases)
    growth = norms.version / max(least, ORDINARY * math.sqrt(values))
    if growth > MAX_GROWTH:
        return Exploded(number, "norm", growth, number - len(bases) + bases.index(least))
    usual = median(each.change for each in window) if len(window) > 1 else 0.0
    if usual > 0 and norms.change > MAX_JUMP * usual and norms.change > MIN_SHARE * norms.base:
        return Exploded(number, "change", norms.change / usual, number - 1)
    return None
