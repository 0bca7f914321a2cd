"""Divides a member's rows into training and validation data, for good, by a keyed digest of the unit.

Guarantees:

- A row's side depends on the key, the share and its own unit, and on nothing else: no row, file or job moves it.
- All rows of a unit are on one side. A person is a unit if the ledger protects persons. Otherwise rows with the same
  text, or pair of texts, are one unit. So no text that is validation data is ever trained on under another label.
- A larger share keeps back all that a smaller one does, and more.

An edited text is another unit, and may be on the other side. Then a row that was trained on is measured from now on, or
the reverse. The accounting covers that: each event is charged for every row, on whichever side it is. A row's
influence on all releases is bounded by all events of the ledger, whenever it was on which side. But an estimate after
an edit may be a little too good, because an earlier version has seen the old text.

Assumption: the key is secret. Whoever knows it can write texts that land on a chosen side.
"""

import hmac
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from learning.text.examples import Example

__all__ = ["Split", "unit_of"]

_PURPOSE = b"tacit/validation/v1\0"
_RANGE = 2**64


def unit_of(example: Example) -> bytes:
    """The bytes that identify a row's unit if the data names no other: its text, or its pair of texts.

    The label is no part, so a corrected label leaves a row on its side. The byte 0xff, which UTF-8 does not have, tells
    a pair from a text.
    """
    first = example.text.encode("utf-8", "surrogatepass")
    if example.text_b is None:
        return first
    second = example.text_b.encode("utf-8", "surrogatepass")
    return b"\xff" + len(first).to_bytes(8, "big") + first + second


class Split:
    """One member's division of its rows."""

    def __init__(self, key: bytes, share: float) -> None:
        """Fixes the division.

        Args:
            key: Secret of this member, 32 bytes.
            share: Share of the units that is kept back, between 0 and 1/2.

        Raises:
            ValueError: The key has another length, or the share is out of range.
        """
        if len(key) != 32:
            raise ValueError(f"the key of a split has 32 bytes, got {len(key)}")
        if not 0 < share <= 0.5:
            raise ValueError(f"the share of validation data must be above 0 and at most 0.5, got {share!r}")
        self._key = key
        self._share = share

    def kept_back(self, units: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which rows are validation data, shape (N,). Never train on these.

        Args:
            units: The unit of each row.
        """
        return self._below(units, self._share)

    def measured(
        self, units: Sequence[bytes], max_units: int | None, population: int | None = None, *, everything: bool = False
    ) -> NDArray[np.bool_]:
        """Which rows a member measures, shape (N,): a part of `kept_back`, or of all rows.

        All of them, unless N is above `max_units`. Then those below a threshold, which of N different units leaves
        `_mean_number` on average.

        Privacy: the threshold is a function of N, which is public, of `max_units` and of the division's share, and of
        no row. So whether a unit is measured depends on that unit and the key alone, as in `kept_back`. A threshold
        that looked at the units would let one row push another out, which doubles the sensitivity.

        Args:
            units: The unit of each row.
            max_units: Units that the vector has room for; None: the rows are one unit, however many they are.
            population: N, which is public; None: the rows. If persons are the units, it must be their number, because a
                person moves that of the rows by more than one.
            everything: Whether rows that are trained on are measured too.
        """
        population = len(units) if population is None else population
        share = 1.0 if everything else self._share
        if max_units is not None and population > max_units:
            share = min(share, _mean_number(max_units) / population)
        return self._below(units, share)

    def _below(self, units: Sequence[bytes], share: float) -> NDArray[np.bool_]:
        below = int(share * _RANGE)
        found = {unit: self._number(unit) < below for unit in set(units)}
        return np.fromiter((found[unit] for unit in units), dtype=np.bool_, count=len(units))

    def _number(self, unit: bytes) -> int:
        return int.from_bytes(hmac.digest(self._key, _PURPOSE + unit, "sha256")[:8], "big")


def _mean_number(max_units: int) -> float:
    """The mean number m of units to measure, of which a vector has room for `max_units`: at least half of these.

    A binomial number of mean m has a standard deviation below sqrt(m), and m + 6 sqrt(m) is `max_units`. Below 72 units
    that m would be less than half of them, down to none. Half is measured all the same: the vector also has room for
    noise of twelve standard deviations, and noise that is smaller leaves that to the units above `max_units`. What
    exceeds both is cut after the noise was added, which costs no privacy.
    """
    return max(max_units / 2, (math.sqrt(9 + max_units) - 3) ** 2)
