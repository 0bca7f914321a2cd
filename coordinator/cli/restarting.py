"""A job that starts anew from the last version before a withdrawn member's first: what it would be, and what it costs.

Pure: callers fetch what is known of a job and carry the plan out. The coordinator leaves the member out by itself,
because the new job starts from a version of a job that the member withdrew from.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tacit.job import EarlierVersion, JobDocument
from tacit.limits import MAX_NAME
from tacit.mechanism import NoMechanism
from tacit.v1 import federation_pb2, operator_pb2

__all__ = ["CannotRestart", "Reported", "Restart", "plan", "reported_of", "restart_json", "restart_lines"]


class CannotRestart(Exception):
    """A job cannot start anew by itself. The sentence says why and what to do."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What members of the newest sum with a report say that the job has cost them: the largest epsilon, its delta, and
    how many reported.
    """

    epsilon: float
    delta: float
    members: int


@dataclass(frozen=True, slots=True)
class Restart:
    """The new job.

    Args:
        job: the job that it takes the place of.
        start: the version of that job from which it starts.
        document: its document; its name, its rounds and its start differ from the other one's, and nothing else.
        sums: in how many sums of the other job each of the other members was.
        reported: what these sums cost, by their reports. None: nobody reported.
        there: whether such a job is there already.
    """

    job: str
    start: int
    document: JobDocument
    sums: Mapping[str, int]
    reported: Reported | None
    there: bool

    @property
    def rounds(self) -> int:
        """The rounds that the members pay for again, at most."""
        return self.document.rounds.count

    @property
    def at_most(self) -> tuple[float, float] | None:
        """What the new job's rounds cost a member at most, as (epsilon, delta), if reports are true.

        Each member's sums cost it at most what the largest report says. So as many rounds of the new job cost at most
        that again, and basic composition (Dwork and Roth 2014, theorem 3.16) adds up the rest.
        """
        if self.reported is None or not self.sums:
            return None
        times = math.ceil(self.rounds / min(self.sums.values()))
        return times * self.reported.epsilon, min(1.0, times * self.reported.delta)


def plan(
    held: federation_pb2.HeldContributions,
    member: str,
    detail: operator_pb2.JobDetail,
    document: JobDocument,
    taken: Collection[str],
    reported: Reported | None,
) -> Restart:
    """Plans a job that starts anew.

    Args:
        held: what the job holds of the member.
        member: the member.
        detail: the job.
        document: the job's document.
        taken: the names of all jobs.
        reported: what members report to have spent.

    Raises:
        CannotRestart: the job adds no noise, the version was pruned, or the job started from a version that holds the
            member's updates.
    """
    name = held.job
    if isinstance(document.mechanism, NoMechanism):
        raise CannotRestart(
            f"{name} has mechanism none, and its first sum minus that of a job from the same version and the same "
            f"members without {member} is {member}'s update; write a job with a mechanism, or one from other weights "
            "(`coordinator job bundle` with another seed), not from a version of this one"
        )
    if held.first == 0:
        raise CannotRestart(
            f"{name} started from a version that holds updates of {member}, so no version of it is without them; make "
            "a new job from a version of the job that takes the other one's place, once there is one"
        )
    start = held.first - 1
    if held.start_pruned:
        left = max(each.number for each in detail.versions if each.number < start and not each.pruned)
        raise CannotRestart(
            f"version {start} of {name} was pruned, and the job cannot start anew from it; put it back from a backup, "
            f'or write a job with start = "{name}:{left}", the newest version before it that is there'
        )
    (version,) = (each for each in detail.versions if each.number == start)
    earlier = EarlierVersion(job=name, number=start, document=document.digest())
    rounds = document.rounds.model_copy(update={"count": document.rounds.count - start})
    values = {"name": _free(name, taken), "earlier": earlier, "weights": version.digest, "rounds": rounds}
    successors = [each for each in detail.successors if each.version_number == start]
    there = any(each.status != operator_pb2.JOB_STATUS_ABORTED for each in successors)
    return Restart(name, start, document.model_copy(update=values), _sums(detail, member), reported, there)


def reported_of(entries: Collection[Mapping[str, Any]]) -> Reported | None:
    """What members report, by the fields of the journal's entries `attempt_ended` of one job, in order."""
    found = [each for each in entries if each.get("reported")]
    if not found:
        return None
    return Reported(max(each["epsilon"] for each in found), max(each["delta"] for each in found), found[-1]["reported"])


def restart_json(restart: Restart) -> dict[str, Any]:
    """A plan as JSON."""
    bound, reported = restart.at_most, restart.reported
    return {
        "job": restart.job,
        "start": restart.start,
        "new_job": None if restart.there else restart.document.name,
        "rounds": restart.rounds,
        "members": dict(sorted(restart.sums.items())),
        "reported_epsilon": None if reported is None else reported.epsilon,
        "reported_delta": None if reported is None else reported.delta,
        "reports": 0 if reported is None else reported.members,
        "epsilon_again": None if bound is None else bound[0],
        "delta_again": None if bound is None else bound[1],
    }


def restart_lines(restart: Restart, member: str) -> Iterator[str]:
    """A plan for people."""
    if restart.there:
        yield f"{restart.job}: a job started anew from version {restart.start} before; it is not made twice."
        return
    yield (
        f"{restart.job} starts anew as {restart.document.name}, from version {restart.start}, for {restart.rounds} "
        f"rounds, without {member}; {restart.job} is aborted."
    )
    others = ", ".join(f"{name} ({count} sums so far)" for name, count in sorted(restart.sums.items()))
    yield f"  The others' ledgers pay again, for up to {restart.rounds} rounds: {others or 'nobody was in a sum'}."
    bound = restart.at_most
    if bound is None or restart.reported is None:
        yield "  Nobody reported what the sums so far cost, so only their own ledgers know what that is."
        return
    yield (
        f"  By {restart.reported.members} reports, the sums so far cost no member more than epsilon "
        f"{restart.reported.epsilon:.3g} at delta {restart.reported.delta:g}. So the new rounds cost each of them at "
        f"most epsilon {bound[0]:.3g} at delta {bound[1]:g} more. A member whose limit that passes declines."
    )


def _free(name: str, taken: Collection[str]) -> str:
    """A name for the new job: the other's with -r1, or the next number that is free."""
    base = re.sub(r"-r[0-9]+$", "", name)
    number = 1
    while (found := f"{base[: MAX_NAME - len(f'-r{number}')]}-r{number}") in taken:
        number += 1
    return found


def _sums(detail: operator_pb2.JobDetail, member: str) -> dict[str, int]:
    attempts = [attempt for each in detail.rounds for attempt in each.attempts if attempt.outcome == "published"]
    counts = Counter(name for attempt in attempts for name in attempt.survivors if name != member)
    return dict(counts)
