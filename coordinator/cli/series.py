"""A job's history as points: what its plots draw and what trackers keep.

Everything comes from the operator's calls: rounds, versions and their estimates from `GetJob`, and what members
reported of their privacy from the audit journal. The step of a point is a round. What is measured of a version counts
for the round that made it; the starting version has step 0.

A point is named by its key, step and time. The same history gives the same points, so a reader that was interrupted
leaves out those that it has.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coordinator.cli.common import CALL_SECONDS
from tacit.v1 import operator_pb2

if TYPE_CHECKING:
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["History", "Point", "fetch_history", "points", "with_errors"]

# The phases of an attempt in which a member can drop out, in order.
_PHASES = ("advertise", "share", "mask", "confirm", "unmask")


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a series.

    Args:
        key: The series.
        step: The round.
        value: Finite.
        at_ms: When it was known, in milliseconds since the epoch.
        error: Its standard error; None if it is exact, or the error is unknown.
    """

    key: str
    step: int
    value: float
    at_ms: int
    error: float | None = None

    @property
    def name(self) -> tuple[str, int, int]:
        """What names the point."""
        return self.key, self.step, self.at_ms

    def as_json(self) -> dict[str, Any]:
        """The point without its key."""
        return {"round": self.step, "value": self.value, "error": self.error, "at_ms": self.at_ms}


@dataclass(frozen=True)
class History:
    """What the coordinator holds about a job.

    Args:
        detail: Its rounds and versions.
        spent: What members reported when each sum was published: round to (largest epsilon, members, time).
    """

    detail: operator_pb2.JobDetail
    spent: Mapping[int, tuple[float, int, int]]


async def fetch_history(stub: "OperatorServiceStub", job: str) -> History:
    """Asks the coordinator.

    Raises:
        CommandFailed: No such job, or the coordinator does not answer.
    """
    from coordinator.cli.audit import read_entries
    from coordinator.storage.chain import JournalEntry

    spent: dict[int, tuple[float, int, int]] = {}

    def take(entry: JournalEntry) -> None:
        fields: Any = entry.fields
        if entry.kind == "attempt_ended" and fields.get("outcome") == "published" and fields.get("reported"):
            spent[int(fields["round"])] = (float(fields["epsilon"]), int(fields["reported"]), entry.at_ms)

    detail: operator_pb2.JobDetail = await stub.GetJob(operator_pb2.GetJobRequest(name=job), timeout=CALL_SECONDS)
    await read_entries(stub, take, subject=job)
    # A round that ended between the two calls is only in the second answer. The next call brings the rest of it.
    return History(detail, spent)


def with_errors(found: Iterable[Point]) -> list[Point]:
    """The points with each standard error as a point of its own, under the key and `_error`."""
    return [
        each
        for point in found
        for each in (
            (point,) if point.error is None else (point, replace(point, key=f"{point.key}_error", value=point.error))
        )
    ]


def points(history: History) -> list[Point]:
    """The points of all rounds that have ended and of all that was measured, in order of rounds."""
    found = [*_rounds(history.detail.rounds), *_versions(history.detail.versions), *_spent(history.spent)]
    return sorted((each for each in found if math.isfinite(each.value)), key=lambda each: (each.step, each.key))


def _rounds(rounds: Iterable[operator_pb2.Round]) -> Iterator[Point]:
    for each in rounds:
        if not each.ended_ms:
            continue
        lost = Counter(dropout.phase for attempt in each.attempts for dropout in attempt.dropouts)
        published = [attempt for attempt in each.attempts if attempt.outcome == "published"]
        values: dict[str, float] = {
            "cohort": max((len(attempt.cohort) for attempt in each.attempts), default=0),
            "summed": sum(len(attempt.survivors) for attempt in published),
            "dropouts": lost.total(),
            "attempts": len(each.attempts),
            "seconds": (each.ended_ms - each.opened_ms) / 1000,
        }
        # A phase in which nobody was lost is a zero, so that every round has every point.
        values |= {f"dropouts_{phase}": lost[phase] for phase in dict.fromkeys((*_PHASES, *sorted(lost)))}
        for attempt in published:
            if attempt.HasField("training"):
                values |= {"training_accuracy": attempt.training.accuracy, "training_loss": attempt.training.loss}
        for key, value in values.items():
            yield Point(key, each.number, value, each.ended_ms)


def _versions(versions: Iterable[operator_pb2.Version]) -> Iterator[Point]:
    for each in versions:
        for measured in each.evaluations:
            share = measured.accuracy
            # Of an accuracy over independent rows: that of a binomial share. Of a loss, the coordinator holds none.
            error = math.sqrt(max(0.0, share * (1 - share)) / measured.examples) if measured.examples else None
            yield Point("evaluation_accuracy", each.round, share, measured.at_ms, error)
            yield Point("evaluation_loss", each.round, measured.loss, measured.at_ms)
        shown = each.estimate.shown
        if each.HasField("estimate") and each.estimate.HasField("shown"):
            at = each.estimate.at_ms
            yield Point("estimate_accuracy", each.round, shown.accuracy, at, shown.accuracy_error)
            yield Point("estimate_loss", each.round, shown.loss, at, shown.loss_error)
            yield Point("estimate_units", each.round, shown.units, at, shown.units_error)
        if each.norm:
            yield Point("version_norm", each.round, each.norm, each.created_ms)


def _spent(spent: Mapping[int, tuple[float, int, int]]) -> Iterator[Point]:
    for number, (epsilon, reported, at_ms) in spent.items():
        yield Point("reported_epsilon", number, epsilon, at_ms)
        yield Point("members_reporting", number, reported, at_ms)
