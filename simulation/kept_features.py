"""Keeps the features of all rows of a trial's data, so that trials of heads on one frozen encoder compute them once.

A member's own store has its rows alone. Trials deal the same rows to members again and again, and measure on others.
"""

from collections.abc import Callable, Sequence

import numpy as np

from learning.prompts.features import Features, FeatureStore

__all__ = ["SharedFeatures"]


class SharedFeatures(FeatureStore):
    """Features in memory, by the key of what computed them and the key of their row. Nothing is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[bytes, dict[bytes, Features]] = {}

    def read(self, kind: bytes, keys: Sequence[bytes], compute: Callable[[list[int]], Features]) -> Features:
        """Return the features of the rows with these keys, as `FeatureStore.read`."""
        rows = self._kinds.setdefault(kind, {})
        missing = {key: place for place, key in enumerate(keys) if key not in rows}
        if missing:
            made = compute(list(missing.values()))
            # A copy of each row, since a view would hold its whole batch.
            rows.update((key, row.copy()) for key, row in zip(missing, made, strict=True))
        return np.stack([rows[key] for key in keys])
