"""The numbers and digests that an attempt is about, checked once.

Guarantees: a `RoundContext` that exists is consistent, its threshold leaves at least `honest` honest inputs
in every sum that can be opened, and its digest covers every field. Every key, mask, seal and signature of the
attempt is bound to that digest, so two members that hold different contexts never contribute to the same sum.

What it leaves to others: whether the numbers are good enough. `assumed_corrupt = 0` is representable, and it
is the member's own policy that allows it; so is a sum of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from secure_agg.transcript import Purpose, digest

__all__ = ["COMPLETE_GRAPH_LIMIT", "ContextInvalid", "Graph", "RoundContext", "default_thresholds"]

COMPLETE_GRAPH_LIMIT = 200
_LARGEST_COUNTER = 2**63 - 1
_LONGEST_NAME = 256


class ContextInvalid(ValueError):
    """The numbers of an attempt contradict each other. The text says which, and what would do."""


class Graph(StrEnum):
    """Who shares masks and secrets with whom."""

    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class RoundContext:
    """One attempt, as every participant must see it. Raises `ContextInvalid` when built from contradicting
    numbers.

    federation: 32 bytes, the fingerprint of the federation's root.
    job, round, attempt: what is being trained, which step, which try.
    application: 32 bytes, digest of everything else an update depends on (job document, recipe, layout,
    bundle, ...).
    model: 32 bytes, digest of the starting version.
    cohort: n, the size of U0. The roster U1 may be smaller, never below the threshold.
    threshold: t. assumed_corrupt: n_C. values: d, the length of the whole vector. bits: b, the ring is
    Z_{2^b}.
    """

    federation: bytes
    job: str
    round: int
    attempt: int
    application: bytes
    model: bytes
    cohort: int
    threshold: int
    assumed_corrupt: int
    values: int
    bits: int
    graph: Graph = Graph.COMPLETE

    def __post_init__(self) -> None:
        for name in ("federation", "application", "model"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != 32:
                raise ContextInvalid(f"{name} is a digest of 32 bytes; hash what it stands for with SHA-256")
        if not isinstance(self.job, str) or not 0 < len(self.job) <= _LONGEST_NAME:
            raise ContextInvalid(f"job is a name of 1 to {_LONGEST_NAME} characters")
        for name in ("round", "attempt", "cohort", "threshold", "assumed_corrupt", "values", "bits"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _LARGEST_COUNTER:
                raise ContextInvalid(f"{name} is a whole number from 0 to 2^63 - 1, got {number!r}")
        if not isinstance(self.graph, Graph):
            raise ContextInvalid(f"graph is one of {', '.join(Graph)}, got {self.graph!r}")
        if self.values < 1:
            raise ContextInvalid("values is the length of the vector: at least 1")
        if not 2 <= self.bits <= 32:
            raise ContextInvalid(f"bits is the width of the ring: 2 to 32, got {self.bits}")
        self._check_thresholds()

    def _check_thresholds(self) -> None:
        n, t, corrupt = self.cohort, self.threshold, self.assumed_corrupt
        if n < 2:
            raise ContextInvalid(f"a cohort of {n} would be shown its only member's input; form one of at least 2")
        if n > COMPLETE_GRAPH_LIMIT:
            raise ContextInvalid(
                f"a cohort of {n} is too large for the complete graph, which ends at {COMPLETE_GRAPH_LIMIT}"
            )
        if t > n:
            raise ContextInvalid(f"threshold {t} is above the cohort of {n}; no sum could ever be opened")
        # Two disjoint answers to different survivors would need t answers each, n_C of them counted in both.
        if 2 * t <= n + corrupt:
            raise ContextInvalid(
                f"threshold {t} is too low for a cohort of {n} with {corrupt} assumed corrupt: "
                f"2t > n + n_C needs at least {(n + corrupt) // 2 + 1}"
            )
        if corrupt and self.honest < 2:
            raise ContextInvalid(
                f"threshold {t} less {corrupt} assumed corrupt leaves {self.honest} honest input in a sum; "
                "at least 2 are needed, so that one cannot be told from the other"
            )

    @property
    def honest(self) -> int:
        """h = t - n_C: every sum that can be opened holds at least this many honest members' inputs."""
        return self.threshold - self.assumed_corrupt

    def digest(self) -> bytes:
        """32 bytes over every field, framed."""
        return digest(
            Purpose.CONTEXT,
            self.federation,
            self.job,
            self.round,
            self.attempt,
            self.application,
            self.model,
            self.cohort,
            self.threshold,
            self.assumed_corrupt,
            self.values,
            self.bits,
            self.graph.value,
        )


def default_thresholds(cohort: int, assumed_corrupt: int | None = None) -> tuple[int, int]:
    """(threshold, assumed_corrupt) for a cohort of this size on the complete graph.

    Without a second argument n_C is 1 for 3 to 5 members and floor(n/5) above; t is floor((n + n_C) / 2) + 1,
    the least that satisfies 2t > n + n_C. Raises ContextInvalid where no threshold would do.
    """
    if not 2 <= cohort <= COMPLETE_GRAPH_LIMIT:
        raise ContextInvalid(f"the complete graph serves cohorts of 2 to {COMPLETE_GRAPH_LIMIT}, got {cohort}")
    corrupt = max(1, cohort // 5) if assumed_corrupt is None else assumed_corrupt
    if corrupt < 0:
        raise ContextInvalid(f"assumed_corrupt counts members: 0 or more, got {corrupt}")
    threshold = (cohort + corrupt) // 2 + 1
    if corrupt:
        threshold = max(threshold, corrupt + 2)
    if threshold > cohort:
        raise ContextInvalid(
            f"a cohort of {cohort} with {corrupt} assumed corrupt would need {threshold} answers; "
            "form a larger cohort, or let every member's policy assume fewer corrupt ones"
        )
    return threshold, corrupt
