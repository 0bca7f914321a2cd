"""Token buckets, one for each key, in bounded memory. Pure; the clock is handed in, in monotonic seconds.

A bucket holds at most `burst` tokens and gains `rate` a second. Guarantee, while a key is remembered: in any t seconds
it takes no more than burst + rate * t. `Buckets` remembers the `keys` that took last; a key that it forgets starts with
a full bucket again, so that bound needs at most `keys` keys to be active at once.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

__all__ = ["Allowance", "Bucket", "Buckets"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a bucket holds at most, in tokens, and what it gains, in tokens a second."""

    burst: float
    rate: float


@dataclass(slots=True)
class Bucket:
    """One bucket."""

    left: float
    # When it was last looked at, in seconds of the clock.
    at: float

    def seconds_short(self, allowance: Allowance, now: float, tokens: float = 1.0) -> float:
        """Brings the bucket up to `now`.

        Returns:
            Seconds until it holds that many tokens; 0 if it does.
        """
        # A clock that goes backwards adds nothing and takes nothing.
        self.left = min(allowance.burst, self.left + max(0.0, now - self.at) * allowance.rate)
        self.at = max(self.at, now)
        # The sum of many small additions may miss a whole token by a rounding error.
        return 0.0 if self.left >= tokens - 1e-9 else (tokens - self.left) / allowance.rate


class Buckets:
    """A bucket for each key. Used from one event loop."""

    def __init__(self, clock: Callable[[], float], allowance: Allowance, keys: int) -> None:
        """
        Args:
            clock: monotonic seconds.
            allowance: of every key.
            keys: how many keys are remembered at most.
        """
        self._clock = clock
        self._allowance = allowance
        self._keys = keys
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def seconds_short(self, key: Hashable, tokens: float = 1.0) -> float:
        """Seconds until the key can take that many tokens, 0 if it can now. Takes nothing."""
        bucket = self._buckets.get(key)
        return 0.0 if bucket is None else bucket.seconds_short(self._allowance, self._clock(), self._most(tokens))

    def take(self, key: Hashable, tokens: float = 1.0) -> float:
        """Takes tokens if the key has them. More tokens than a full bucket holds cost a full bucket.

        Returns:
            0 where they were taken; else nothing was taken, and the seconds to wait.
        """
        now, tokens = self._clock(), self._most(tokens)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = Bucket(self._allowance.burst, now)
        short = bucket.seconds_short(self._allowance, now, tokens)
        if short:
            return short
        bucket.left -= tokens
        self._buckets[key] = bucket
        self._buckets.move_to_end(key)
        while len(self._buckets) > self._keys:
            # The key that took nothing for longest.
            self._buckets.popitem(last=False)
        return 0.0

    def give_back(self, key: Hashable, tokens: float = 1.0) -> None:
        """Tokens that were taken for nothing. A bucket never holds more than `burst`."""
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket.left = min(self._allowance.burst, bucket.left + tokens)

    def _most(self, tokens: float) -> float:
        return min(tokens, self._allowance.burst)

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._buckets)
