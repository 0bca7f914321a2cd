"""A clock that stands still until a test moves it."""


class Clock:
    """Called as `time.monotonic` is; `now` is in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
