"""Token buckets, one for each key, in bounded memory. Pure; takes a clock in monotonic seconds.

A bucket holds at most `burst` tokens and gains `rate` tokens a second. Guarantee, while a key is remembered: it takes
at most burst + rate * t tokens in any t seconds. `Buckets` remembers the `keys` keys that took tokens most recently. A
forgotten key starts again with a full bucket, so the guarantee assumes that at most `keys` keys are active at once.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

__all__ = ["Allowance", "Bucket", "Buckets"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """The most tokens that a bucket holds, and the tokens that it gains a second."""

    burst: float
    rate: float


@dataclass(slots=True)
class Bucket:
    """One bucket."""

    left: float
    # When it was last updated, in seconds of the clock.
    at: float

    def seconds_short(self, allowance: Allowance, now: float, tokens: float = 1.0) -> float:
        """Updates the bucket to `now`.

        Args:
            allowance: The bucket's size and rate.
            now: Monotonic seconds.
            tokens: How many tokens are wanted.

        Returns:
            Seconds until the bucket holds that many tokens; 0 if it does.
        """
        # A clock that goes backwards neither adds nor takes tokens.
        self.left = min(allowance.burst, self.left + max(0.0, now - self.at) * allowance.rate)
        self.at = max(self.at, now)
        # The sum of many small additions may miss a whole token by a rounding error.
        return 0.0 if self.left >= tokens - 1e-9 else (tokens - self.left) / allowance.rate


class Buckets:
    """Keeps one bucket for each key. Used from one event loop."""

    def __init__(self, clock: Callable[[], float], allowance: Allowance, keys: int) -> None:
        """Creates the buckets.

        Args:
            clock: Returns monotonic seconds.
            allowance: The allowance of each key.
            keys: Maximum number of keys to remember.
        """
        self._clock = clock
        self._allowance = allowance
        self._keys = keys
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def seconds_short(self, key: Hashable, tokens: float = 1.0) -> float:
        """Returns the seconds until the key can take that many tokens, 0 if it can now. It takes nothing."""
        bucket = self._buckets.get(key)
        return 0.0 if bucket is None else bucket.seconds_short(self._allowance, self._clock(), self._most(tokens))

    def take(self, key: Hashable, tokens: float = 1.0) -> float:
        """Takes tokens if the key has them. More tokens than a full bucket holds cost a full bucket.

        Returns:
            0 if it took the tokens. Otherwise it took nothing, and returns the seconds to wait.
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
            # Forget the key that took tokens least recently.
            self._buckets.popitem(last=False)
        return 0.0

    def give_back(self, key: Hashable, tokens: float = 1.0) -> None:
        """Returns tokens that were not needed. A bucket never holds more than `burst`."""
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket.left = min(self._allowance.burst, bucket.left + tokens)

    def _most(self, tokens: float) -> float:
        return min(tokens, self._allowance.burst)

    def __len__(self) -> int:
        """Returns the number of remembered keys."""
        return len(self._buckets)
