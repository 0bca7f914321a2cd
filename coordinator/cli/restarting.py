"""A job that starts anew from the last version before a withdrawn member's first: what it would be, and what it costs.

Pure: callers fetch what is known of a job and carry the plan out. The coordinator leaves the member out by itself,
because the new job starts from a version of a job that the member withdrew from.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tacit.documents import DocumentInvalid
from tacit.job import EarlierVersion, JobDocument
from tacit.limits import MAX_NAME
from tacit.mechanism import NoMechanism
from tacit.question import kind_of
from tacit.rounding import rounded_up
from tacit.v1 import federation_pb2, operator_pb2

__all__ = [
    "CannotRestart",
    "Reported",
    "Restart",
    "plan",
    "reported_of",
    "restart_json",
    "restart_lines",
    "takes_place",
]


class CannotRestart(Exception):
    """A job cannot start anew by itself. The sentence says why and what to do.

    Args:
        sentence: why, and what to do.
        blocks: whether nothing is done until somebody decides. Otherwise the other jobs go on.
    """

    def __init__(self, sentence: str, *, blocks: bool = True) -> None:
        super().__init__(sentence)
        self.blocks = blocks


@dataclass(frozen=True, slots=True)
class Reported:
    """What members of the newest sum with a report say that the job had cost them by then.

    Args:
        epsilon: the largest epsilon that one of them reported.
        delta: the largest delta.
        members: how many reported. Which ones is not known.
        sums: the fewest sums, up to and with this one, that a member of it was in. The leaver does not count.
    """

    epsilon: float
    delta: float
    members: int
    sums: int


@dataclass(frozen=True, slots=True)
class Restart:
    """The new job.

    Args:
        job: the job that it takes the place of.
        start: the version of that job from which it starts.
        document: its document; its name, its rounds and its start differ from the other one's, and nothing else.
        sums: in how many sums of the other job each of the other members was.
        reported: what these sums cost, by their reports. None: nobody reported.
        follower: the job that has taken its place already; None: none has.
        follower_aborted: whether that job was aborted.
    """

    job: str
    start: int
    document: JobDocument
    sums: Mapping[str, int]
    reported: Reported | None
    follower: str | None = None
    follower_aborted: bool = False

    @property
    def rounds(self) -> int:
        """The rounds that the members pay for again, at most."""
        return self.document.rounds.count

    @property
    def at_most(self) -> tuple[float, float] | None:
        """What the new job's rounds cost a member that reported at most, as (epsilon, delta), if reports are true.

        Its sums up to its report cost it at most what the largest report says. So as many rounds of the new job cost at
        most that again, and basic composition (Dwork and Roth 2014, theorem 3.16) adds up the rest.
        """
        if self.reported is None:
            return None
        times = math.ceil(self.rounds / self.reported.sums)
        return times * self.reported.epsilon, min(1.0, times * self.reported.delta)


def plan(
    held: federation_pb2.HeldContributions,
    member: str,
    detail: operator_pb2.JobDetail,
    document: JobDocument,
    taken: Collection[str],
    reported: Reported | None,
    followers: Sequence[operator_pb2.Job] = (),
    *,
    named: bool = True,
    others: int,
) -> Restart:
    """Plans a job that starts anew.

    Args:
        held: what the job holds of the member.
        member: the member.
        detail: the job.
        document: the job's document.
        taken: the names of all jobs.
        reported: what members report to have spent.
        followers: the jobs that took this one's place without the member, and those that took theirs, in that order.
        named: whether the command names this job.
        others: how many other members are enrolled.

    Raises:
        CannotRestart: the job asks a question, adds no noise, needs more members than are left, or was aborted and the
            command does not name it; the version was pruned, or holds another member that withdrew; or the job started
            from a version that holds the member's updates.
    """
    name = held.job
    if document.question is not None:
        kind, command = kind_of(document.question)
        raise CannotRestart(
            f"{name} is a {kind}, and no job starts from an answer; ask again under another name with "
            f"`coordinator {command} run`",
            blocks=False,
        )
    aborted = detail.job.status == operator_pb2.JOB_STATUS_ABORTED
    if held.first == 0:
        raise CannotRestart(
            f"{name} started from a version that holds updates of {member}, so no version of it is without them; "
            + ("" if aborted else f"end it with `coordinator job abort {name}` if it runs, and ")
            + "make a new job from the one that takes the other one's place",
            blocks=False,
        )
    start = held.first - 1
    if followers:
        last = next((each for each in reversed(followers) if not _aborted(each)), followers[-1])
        return Restart(name, start, document, {}, None, follower=last.name, follower_aborted=_aborted(last))
    if aborted and not named:
        raise CannotRestart(
            f"{name} was aborted; `coordinator member withdraw {member} --job {name} --restart` starts it anew all the "
            "same",
            blocks=False,
        )
    if isinstance(document.mechanism, NoMechanism):
        raise CannotRestart(
            f"{name} has mechanism none, and its first sum minus that of a job from the same version and the same "
            f"members without {member} is {member}'s update; write a job with a mechanism, or one from other weights "
            "(`coordinator job bundle` with another seed), not from a version of this one"
        )
    if others < document.rounds.min_members:
        raise CannotRestart(
            f"{name} needs {document.rounds.min_members} members, and without {member} {others} are enrolled; invite "
            f'more first, or write a job with a lower rounds.min_members and start = "{name}:{start}"'
        )
    (version,) = (each for each in detail.versions if each.number == start)
    clean = [each.number for each in detail.versions if each.number < start and not each.pruned and not each.withdrawn]
    if version.withdrawn:
        raise CannotRestart(
            f"version {start} of {name} holds updates of another member that withdrew; "
            + (
                f'write a job with start = "{name}:{clean[-1]}", the newest version without any'
                if clean
                else "no version before it is without any, so write a job with a start of its own"
            )
        )
    if held.start_pruned:
        left = max(each.number for each in detail.versions if each.number < start and not each.pruned)
        raise CannotRestart(
            f"version {start} of {name} was pruned, and the job cannot start anew from it; put it back from a backup, "
            f'or write a job with start = "{name}:{left}", the newest version before it that is there'
        )
    earlier = EarlierVersion(job=name, number=start, document=document.digest())
    rounds = document.rounds.model_copy(update={"count": document.rounds.count - start})
    values = {"name": _free(name, taken), "earlier": earlier, "weights": version.digest, "rounds": rounds}
    return Restart(name, start, _checked(document, start, values), _sums(detail, member), reported)


def _checked(document: JobDocument, start: int, values: Mapping[str, Any]) -> JobDocument:
    """The document with these values, as members will read it.

    Raises:
        CannotRestart: They would refuse it. Fewer rounds may not fit what counts the steps of the whole job.
    """
    try:
        return JobDocument.from_json(document.model_copy(update=values).canonical(), what="the new document")
    except DocumentInvalid as error:
        raise CannotRestart(
            f"{document.name} cannot start anew for the {document.rounds.count - start} rounds after version {start}: "
            f"{error}; "
            f'write a job that differs in this, with start = "{document.name}:{start}"'
        ) from None


def takes_place(document: JobDocument, other: JobDocument) -> bool:
    """Whether a job that started from a version of another one is that job again: all but name, start and number of
    rounds are the same.
    """

    def same(each: JobDocument) -> JobDocument:
        rounds = each.rounds.model_copy(update={"count": 1})
        return each.model_copy(update={"name": "", "rounds": rounds, "weights": bytes(32), "earlier": None})

    return same(document) == same(other)


def reported_of(entries: Collection[Mapping[str, Any]], member: str) -> Reported | None:
    """What members of the newest sum with a report say.

    Args:
        entries: the fields of the journal's entries `attempt_ended` of one job, in order.
        member: the member that leaves.
    """
    sums: Counter[str] = Counter()
    newest = None
    for each in entries:
        if each["outcome"] != "published":
            continue
        sums.update(each["survivors"])
        others = [sums[name] for name in each["survivors"] if name != member]
        if each.get("reported") and others:
            newest = Reported(each["epsilon"], each["delta"], each["reported"], min(others))
    return newest


def restart_json(restart: Restart) -> dict[str, Any]:
    """A plan as JSON."""
    bound, reported = restart.at_most, restart.reported
    return {
        "job": restart.job,
        "start": restart.start,
        "new_job": None if restart.follower else restart.document.name,
        "follower": restart.follower,
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
    if restart.follower is not None:
        yield f"{restart.job}: {restart.follower} took its place before, without {member}; none is made."
        if restart.follower_aborted:
            yield (
                f"  {restart.follower} was aborted. To start anew all the same, write a job with "
                f'start = "{restart.job}:{restart.start}".'
            )
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
        f"  {restart.reported.members} members of the newest sum with reports said what their sums had cost them, "
        f"{restart.reported.sums} or more each: no more than epsilon {rounded_up(restart.reported.epsilon):g} at delta "
        f"{restart.reported.delta:g}. So the new rounds cost a member that reported at most epsilon "
        f"{rounded_up(bound[0]):g} at delta {bound[1]:g} more. A member whose limit that passes declines."
    )


def _free(name: str, taken: Collection[str]) -> str:
    """A name for the new job: the other's with -r1, or the next number that is free."""
    base = re.sub(r"-r[0-9]+$", "", name)
    number = 1
    while (found := f"{base[: MAX_NAME - len(f'-r{number}')]}-r{number}") in taken:
        number += 1
    return found


def _aborted(job: operator_pb2.Job) -> bool:
    return job.status == operator_pb2.JOB_STATUS_ABORTED


def _sums(detail: operator_pb2.JobDetail, member: str) -> dict[str, int]:
    attempts = [attempt for each in detail.rounds for attempt in each.attempts if attempt.outcome == "published"]
    counts = Counter(name for attempt in attempts for name in attempt.survivors if name != member)
    return dict(counts)
