"""Shows what members measured of versions under noise, and chooses the version that `best` names.

A number is shown with its standard error or not at all. The best version's estimate is marked as selected: it is the
largest of several noisy ones, so it is too high on average.
"""

import re
from collections.abc import Sequence
from typing import Any

from coordinator.domain.validation import Measured, StoppingRule, judge
from tacit.job import JobDocument
from tacit.v1 import operator_pb2
from toolkit.console import ExitCode, fail

__all__ = [
    "AVERAGE",
    "BEST",
    "NOT_MEASURED",
    "SELECTED",
    "chosen_version",
    "estimate_json",
    "estimate_words",
    "estimates_lines",
    "loss_words",
    "members_of",
    "with_error",
]

# The name of the best measured version wherever a command takes a version's number.
BEST = "best"
# The name of the average of the newest versions, where a command takes one: `export`, `evaluate`, `sample`, `redteam`.
AVERAGE = "average"
NOT_MEASURED = "not measured"
SELECTED = "selected as the highest of several noisy estimates, so it is too high on average"
_TOO_FEW = "too few units"


def chosen_version(detail: operator_pb2.JobDetail, wanted: str | None) -> operator_pb2.Version:
    """Finds the version that an option names.

    Args:
        detail: The job.
        wanted: A number, `best`, or None for the newest.

    Raises:
        CommandFailed: It is neither, the job has no such version, or no measured one to choose the best from.
    """
    job = detail.job
    if wanted == BEST:
        if not job.HasField("best"):
            fail(
                f"job {job.name} has no best version: no version of it has an estimate to choose by; give a number, or "
                f"compare versions with `coordinator evaluate {job.name} --versions all`",
                ExitCode.NOT_FOUND,
            )
        number = job.best.version_number
    elif wanted is None:
        number = job.version_number
    elif re.fullmatch(r"[0-9]{1,18}", wanted):
        number = int(wanted)
    elif wanted == AVERAGE:
        fail(f"--version {AVERAGE} has no round of its own; name a version by its number, or {BEST}", ExitCode.USAGE)
    else:
        fail(f"--version {wanted[:40]} is not a version's number, {BEST} or {AVERAGE}", ExitCode.USAGE)
    found = next((each for each in detail.versions if each.number == number), None)
    if found is None:
        fail(f"job {job.name} has no version {number}; the newest is {job.version_number}", ExitCode.NOT_FOUND)
    return found


def members_of(detail: operator_pb2.JobDetail, number: int) -> int:
    """How many members' updates are in a round's sum; 0 if no sum was published, or the answer has no such round."""
    attempts = [attempt for each in detail.rounds if each.number == number for attempt in each.attempts]
    return sum(len(attempt.survivors) for attempt in attempts if attempt.outcome == "published")


def with_error(value: float, error: float) -> str:
    """Formats a share between 0 and 1 and its standard error, both as percentages."""
    return f"{100 * value:.1f} % ± {100 * error:.2g}"


def estimate_words(estimate: operator_pb2.Estimate) -> str:
    """Formats the accuracy of a measured version, or says that nothing is shown."""
    if not estimate.HasField("shown"):
        return _TOO_FEW
    return with_error(estimate.shown.accuracy, estimate.shown.accuracy_error)


def loss_words(estimate: operator_pb2.Estimate) -> str:
    """Formats the mean loss of a measured version; a dash if nothing is shown."""
    shown = estimate.shown
    return f"{shown.loss:.3f} ± {shown.loss_error:.2g}" if estimate.HasField("shown") else "-"


def estimate_json(estimate: operator_pb2.Estimate) -> dict[str, Any]:
    """Returns a measured version's estimate as JSON; `shown` is null where nothing is shown."""
    shown = estimate.shown
    numbers = {
        "accuracy": shown.accuracy,
        "accuracy_error": shown.accuracy_error,
        "loss": shown.loss,
        "loss_error": shown.loss_error,
        "units": shown.units,
        "units_error": shown.units_error,
    }
    return {
        "version_number": estimate.version_number,
        "members": estimate.members,
        "at_ms": estimate.at_ms,
        "shown": numbers if estimate.HasField("shown") else None,
    }


def estimates_lines(detail: operator_pb2.JobDetail, document: JobDocument | None) -> list[str]:
    """Says which measured version is best, and why the job stopped or what it would stop by."""
    job = detail.job
    measured = [each for each in detail.versions if each.HasField("estimate")]
    lines = []
    if job.HasField("best"):
        lines.append(
            f"Best of {len(measured)} measured versions: version {job.best.version_number}, accuracy "
            f"{estimate_words(job.best)}, {SELECTED}."
        )
    metrics = None if document is None else document.metrics
    if metrics is None or not measured:
        return lines
    if not job.HasField("best"):
        lines.append("Members measured too few units to show an estimate.")
    if metrics.patience:
        lines.append(_stopping(measured, StoppingRule(metrics.patience, metrics.min_improvement)))
    return lines


def _stopping(measured: Sequence[operator_pb2.Version], rule: StoppingRule) -> str:
    verdict = judge([_accuracy(each.estimate) for each in measured], rule)
    least = f"{100 * rule.min_improvement:g} points of accuracy"
    if verdict.reference is None:
        return f"Nothing to stop by yet; the job stops after {rule.patience} measured versions without {least} more."
    against = f"version {measured[verdict.reference].number}"
    if verdict.stop:
        return f"Stopped early: {verdict.stale} measured versions were not {least} better than {against}."
    return (
        f"Measured versions that were not {least} better than {against}: {verdict.stale}; {rule.patience} stop the job."
    )


def _accuracy(estimate: operator_pb2.Estimate) -> Measured | None:
    shown = estimate.shown
    return Measured(shown.accuracy, shown.accuracy_error) if estimate.HasField("shown") else None
