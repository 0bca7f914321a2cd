"""Notices a version that explodes, from the versions' own norms. Pure.

The coordinator has nothing else to judge training by if a mechanism adds noise: no loss, no accuracy. Versions are
public to the federation and to the operator, so their norms tell nobody anything new about the data.

A version has exploded in one of these cases:

- *Norm.* It is more than `MAX_GROWTH` times the smallest norm of the `WINDOW` versions before it. A smaller norm than
  `ORDINARY` a coordinate counts as that much: parameters that start at or near zero (LoRA, a new head) must grow.
- *Change.* It is more than `MAX_JUMP` times the median of up to `WINDOW` earlier changes, and more than
  `MIN_SHARE` of the norm that it started from. So a job near its end, whose changes are tiny, does not count.
- *Length.* A head over features of length 1 grows because it learns, from nearly nothing to many times its start, so
  its growth says nothing. But its weights have a unit: a text's score is at most as long as its label's weights, and
  weights that are noise move a score by a standard deviation of their root mean square. So if nothing but a head is
  trained, the norm rule does not hold, and the version has exploded in which that root mean square passes `MAX_SCORE`.
  Features narrower than `NARROW` count as that wide, since their weights must be larger to tell labels apart. If more
  than the head is trained, the norm rule holds, and a smaller norm than the head may have counts as that much.

The numbers are measured (`tests/unit/coordinator/test_explosion.py`). TextCNN under DP-SGD at most doubles its norm in
five rounds at a rate that trains, and multiplies it by 7 at a rate that raises the loss tenfold. A head on MiniLM (the
messages of examples/desk, TREC's questions; three members, 8 rounds) ended at a root mean square of 0.6 to 2.8: at one
to three times the rate that `job try --suggest` names, and by Adam without noise. At ten times that rate it was 8 to 9
and the loss three to five times as large; at thirty times it was 13 to 25 and the loss no better than that of guessing.
The rule is for a warning: it finds neither every divergence (few parameters can spoil a large model) nor only
divergence.
"""

import math
from dataclasses import dataclass
from statistics import median
from typing import Self

from coordinator.domain.jobs import Exploded, Norms
from tacit.job import JobDocument
from tacit.model import PromptedModel
from tacit.prompt import Head

__all__ = ["MAX_GROWTH", "MAX_JUMP", "MAX_SCORE", "MIN_SHARE", "NARROW", "ORDINARY", "WINDOW", "Size", "explosion"]

WINDOW = 5
MAX_GROWTH = 5.0
MAX_JUMP = 10.0
MIN_SHARE = 0.1
# Root mean square of a coordinate.
ORDINARY = 0.1
# Standard deviation, in nats, by which a head of noise moves a text's score.
MAX_SCORE = 5.0
NARROW = 128


@dataclass(frozen=True, slots=True)
class Size:
    """How large a version is, as far as its norm depends on it.

    Attributes:
        values: its number of values.
        labels, width: of a head over features of length 1; 0 if it has none.
    """

    values: int
    labels: int = 0
    width: int = 0

    @classmethod
    def of(cls, job: JobDocument) -> Self:
        """Reads it from a job."""
        model = job.model
        if not isinstance(model, PromptedModel) or not isinstance(model.task, Head) or model.task.layers is None:
            return cls(job.values)
        if model.caches_features:
            # The head alone is shared, without its bias.
            return cls(job.values, len(job.labels), job.values // len(job.labels))
        config = model.config or {}
        hidden = next((value for key in _HIDDEN if isinstance(value := config.get(key), int)), 0)
        return cls(job.values, len(job.labels), hidden * len(model.task.layers))

    @property
    def head_alone(self) -> bool:
        """Whether all values are the head's."""
        return self.labels * self.width == self.values > 0

    @property
    def longest_head(self) -> float:
        """The norm that a head may have; 0 without one."""
        return MAX_SCORE * math.sqrt(self.labels * max(self.width, NARROW)) if self.width else 0.0


# How families of backbones call their width.
_HIDDEN = ("hidden_size", "dim", "d_model")


def explosion(number: int, size: Size, earlier: tuple[Norms, ...], norms: Norms) -> Exploded | None:
    """Returns how a version has exploded; None if it has not.

    Args:
        number: the version's number.
        size: of every version of the job.
        earlier: the norms of the steps before it, oldest first; the last `WINDOW` count.
        norms: those of the step that made it.
    """
    window = earlier[-WINDOW:]
    bases = [each.base for each in (*earlier, norms)][-WINDOW:]
    least = min(bases)
    smallest = number - len(bases) + bases.index(least)
    if size.head_alone:
        if norms.base <= size.longest_head < norms.version:
            return Exploded(number, "length", norms.version / size.longest_head, smallest)
    else:
        ordinary = max(ORDINARY * math.sqrt(size.values), size.longest_head / MAX_GROWTH)
        growth = norms.version / max(least, ordinary)
        if growth > MAX_GROWTH:
            return Exploded(number, "norm", growth, smallest)
    usual = median(each.change for each in window) if len(window) > 1 else 0.0
    if usual > 0 and norms.change > MAX_JUMP * usual and norms.change > MIN_SHARE * norms.base:
        return Exploded(number, "change", norms.change / usual, number - 1)
    return None
