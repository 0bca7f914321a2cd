"""Averages the newest versions of a job (`[average]` in its file).

Post-processing: an average is a function of published versions, so it costs no member any privacy. It gains where the
step is too large for the last versions to settle, and nothing elsewhere (docs/decisions/0060-averages.md).
"""

import numpy as np

from tacit.manifest import Manifest

__all__ = ["RunningAverage"]


class RunningAverage:
    """A weighted sum of versions, in float64, of which it holds one at a time."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._sum = np.zeros(manifest.values, dtype=np.float64)

    def add(self, version: bytes, weight: float) -> None:
        """Adds a version's bytes, times its weight.

        Raises:
            DocumentInvalid: they do not fit the manifest, or a value is not finite.
        """
        self._sum += weight * self._manifest.decode(version).astype(np.float64)

    def encoded(self) -> bytes:
        """The average as a version's bytes: float32, the same on every machine for the same versions and order."""
        return bytes(self._manifest.encode(self._sum.astype(np.float32)))
