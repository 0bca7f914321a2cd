"""Scores that say how likely a row is in the data, from losses. Higher means "in". Nothing here knows a coin.

- `threshold_scores` (Yeom et al. 2018, "Privacy risk in machine learning"): a row that was trained on has a lower loss.
  The loss before training is subtracted, so that easy rows do not count as trained on (Watson et al. 2022).
- `rmia_scores` (Zarifzadeh, Liu, Shokri 2024, "Low-cost high-power membership inference attacks", equations 2 and 4):
  the share of population rows z that row x dominates, where the likelihood ratio of x and z is at least gamma:

      LR(x, z) = (p(x | model) / p(x)) / (p(z | model) / p(z)),    p = e^-loss

  p(x) is the mean over reference models that were not trained on x. Ratios are compared with gamma = 1. At most one
  population row in many is equal to x, so ties do not matter; what remains of them is broken by the ratio itself.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["rmia_scores", "threshold_scores"]

Losses = NDArray[np.float64]


def threshold_scores(losses: Losses, before: Losses) -> Losses:
    """Scores (m,) from the losses (m,) under the attacked model and before training."""
    return before - losses


def rmia_scores(losses: Losses, population: Losses, before: Losses, population_before: Losses) -> Losses:
    """Scores (m,).

    Args:
        losses: (m,) Of the rows, under the attacked model.
        population: (z,) Of rows that it was not trained on.
        before: (references, m) Of the rows, under each reference model.
        population_before: (references, z)

    Raises:
        ValueError: There is no population row or no reference.
    """
    if not population.size or not len(before):
        raise ValueError("RMIA needs population rows and a reference model")
    ratio = -losses - _log_mean(-before)
    others = np.sort(-population - _log_mean(-population_before))
    dominated = np.searchsorted(others, ratio, side="right") / len(others)
    # Below one step of the share, in the order of the ratio: rows that dominate the same population rows.
    spread = np.argsort(np.argsort(ratio, kind="stable"), kind="stable") / max(1, len(ratio))
    scores: Losses = dominated + spread / (2 * len(others))
    return scores


def _log_mean(logs: Losses) -> Losses:
    """The logarithm of the mean of e^logs over the first axis."""
    found: Losses = np.logaddexp.reduce(logs, axis=0) - np.log(len(logs))
    return found
