"""Applies rules of a policy to a subject and returns a verdict for each.

A rule is pure: from the policy and one subject (a job document, a manifest, a machine's conditions, the numbers of an
attempt, ...) it makes a finding with both values and a clause that names them.

Left to `rules` and `model_rules`: the rules.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from edge_client.policy.document import PolicyDocument
from tacit.job import JobDocument, JobSpec
from tacit.reason import Reason

__all__ = [
    "Finding",
    "Job",
    "Offer",
    "Outcome",
    "Rule",
    "Verdict",
    "When",
    "fits_any",
    "free_verdict",
    "in_words",
    "judge",
    "listed",
    "open_verdict",
]

Job = JobDocument | JobSpec

_S = TypeVar("_S")

_MAX_SHOWN = 5


class Outcome(StrEnum):
    """What a rule says about a job."""

    OK = "ok"
    REFUSED = "refused"
    OPEN = "open"  # Cannot be decided from the facts given.


class When(StrEnum):
    """When a rule is checked, and by whom."""

    JOB = "before anything but the job document is fetched"
    MANIFEST = "before the data is read, in the job's manifest"
    CONDITIONS = "before each training, on this machine"
    LEDGER = "before each training, by the ledger"
    ATTEMPT = "before the member shows a key for an attempt"
    ROSTER = "before shares are dealt to a roster"
    VECTOR = "before a masked vector leaves"
    SUM = "before the members of a sum are confirmed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one rule on one job, attempt or machine.

    Args:
        rule: the policy's key.
        job: the job's value; for a condition of the machine, the machine's.
        policy: the policy's value.
        reason: the name of a refusal on the wire.
        sentence: names both values and begins with the rule's name.
    """

    rule: str
    when: When
    job: str
    policy: str
    outcome: Outcome
    reason: Reason
    sentence: str


@dataclass(frozen=True, slots=True)
class Offer:
    """A job, and the fingerprint (32 bytes) of the authority that this member enrolled under. None: not enrolled."""

    job: Job
    federation: bytes | None


@dataclass(frozen=True, slots=True)
class Finding:
    """Both values, whether they agree (None: cannot be decided), and a clause that names them as {job} and {policy}."""

    job: str
    policy: str
    ok: bool | None
    says: str
    # What to do about a refusal.
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Rule(Generic[_S]):
    """A key of the policy and its check of a subject. free: whether the policy allows every subject."""

    key: str
    when: When
    reason: Reason
    judge: Callable[[PolicyDocument, _S], Finding]
    free: Callable[[PolicyDocument], bool] = lambda policy: False


def judge(policy: PolicyDocument, rules: Iterable[Rule[_S]], subject: _S | None) -> Iterator[Verdict]:
    """Yields a verdict for each rule, in order. Without a subject, every rule that is not free stays open."""
    for rule in rules:
        if rule.free(policy):
            yield free_verdict(rule.key, rule.when, rule.reason)
        elif subject is None:
            yield open_verdict(policy, rule.key, rule.when, rule.reason)
        else:
            yield _verdict(rule, rule.judge(policy, subject))


def free_verdict(key: str, when: When, reason: Reason) -> Verdict:
    """The verdict of a key with which the policy allows everything."""
    return Verdict(key, when, "", "any", Outcome.OK, reason, f"{key}: the policy sets no limit")


def open_verdict(policy: PolicyDocument, key: str, when: When, reason: Reason) -> Verdict:
    """The verdict of a key whose subject is not there yet."""
    wanted = in_words(getattr(policy, key))
    sentence = f"{key}: the policy has {wanted}; checked {when}"
    return Verdict(key, when, "", wanted, Outcome.OPEN, reason, sentence)


_OUTCOMES = {True: Outcome.OK, False: Outcome.REFUSED, None: Outcome.OPEN}


def _verdict(rule: Rule[_S], finding: Finding) -> Verdict:
    sentence = f"{rule.key}: {finding.says.format(job=finding.job, policy=finding.policy)}"
    outcome = _OUTCOMES[finding.ok]
    if outcome is Outcome.REFUSED and finding.advice:
        sentence += f"; {finding.advice}"
    return Verdict(rule.key, rule.when, finding.job, finding.policy, outcome, rule.reason, sentence)


# ---- words ------------------------------------------------------------------------------------------


def listed(items: Iterable[str], most: int = _MAX_SHOWN) -> str:
    """The first `most` items and how many more there are: a long refusal is cut on its way to the coordinator."""
    shown = list(items)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more if shown else "nothing"


def in_words(value: object) -> str:
    """A value of a policy or a job, as text in a sentence."""
    match value:
        case bool():
            return str(value).lower()
        case bytes():
            return value.hex()
        case float():
            return f"{value:.10g}"
        case dict():
            return f"{len(value)} pinned"
        case tuple():
            return listed(map(in_words, value))
        case None:
            return "no value"
        case _:
            return str(value)


def fits_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns, with * and ?, matches the whole name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
