"""The member's own policy: floors and ceilings that no job can pass. HOME/policy.toml, or `--policy FILE`.

A refusal names the rule, the job's value and the policy's. Without a file the defaults below hold, and they are strict:
a job without differential privacy (`mechanism = "none"`) takes part only where the member has written so.
"""

import fnmatch
from collections.abc import Collection, Iterable
from typing import Literal

from pydantic import Field

from secure_agg import ContextInvalid, RoundContext, default_thresholds
from tacit.documents import Document
from tacit.job import JobDocument
from tacit.reason import Reason

__all__ = ["Policy", "PolicyRefusal"]


class PolicyRefusal(Exception):
    """The policy says no: `reason` for the machine, the text for people."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Policy(Document):
    """policy.toml. Every key has a default; unknown keys are errors."""

    # Names of jobs to take part in, with * and ?.
    jobs: tuple[str, ...] = ("*",)
    # Privacy mechanisms that may be used. "none" adds no noise: secure aggregation alone hides the update.
    mechanisms: tuple[Literal["none"], ...] = ()
    # Members that an attempt must be drawn from at least.
    least_cohort: int = Field(default=3, ge=2)
    # Honest members' inputs that every opened sum must hold at least (h).
    least_honest: int = Field(default=2, ge=2)
    # Members that an attempt must assume the coordinator to run itself (n_C), at least; not given: the protocol's
    # default for the cohort's size. 0 trusts that it runs none.
    assumed_corrupt: int | None = Field(default=None, ge=0)
    # A sum of two shows each of the two the other's input.
    allow_two_party_sums: bool = False
    # Masked vectors sent for one version or round: without noise, nothing hides the difference between two sums.
    attempts_a_version: int = Field(default=3, ge=1)
    # Whether this member confirms a second sum for one version or round that differs from an earlier one in fewer than
    # n_C + 2 members, and more than none: the coordinator could subtract the two and read what those few sent.
    allow_close_sums: bool = False

    def check_job(self, job: JobDocument) -> None:
        """Before anything is fetched, read or trained for a job.

        Raises:
            PolicyRefusal: the job is not admitted, or its mechanism is not.
        """
        if not any(fnmatch.fnmatchcase(job.name, pattern) for pattern in self.jobs):
            raise PolicyRefusal(
                Reason.REASON_JOB_NOT_ADMITTED,
                f"jobs: the policy admits {', '.join(self.jobs)}; the job is {job.name}",
            )
        if job.mechanism not in self.mechanisms:
            allowed = ", ".join(self.mechanisms) or "no mechanism"
            raise PolicyRefusal(
                Reason.REASON_POLICY_MECHANISM,
                f'mechanisms: job {job.name} uses "{job.mechanism}", the policy allows {allowed}; '
                f'to allow it, write mechanisms = ["{job.mechanism}"] into policy.toml',
            )

    def check_attempt(self, context: RoundContext) -> None:
        """Before a member advertises its keys for an attempt.

        Raises:
            PolicyRefusal: a number of the context is weaker than the policy's.
        """
        if context.cohort < self.least_cohort:
            raise PolicyRefusal(
                Reason.REASON_POLICY_COHORT,
                f"least_cohort: the attempt has {context.cohort} members, the policy wants {self.least_cohort}",
            )
        if context.honest < self.least_honest:
            raise PolicyRefusal(
                Reason.REASON_POLICY_COHORT,
                f"least_honest: the attempt guarantees {context.honest} honest inputs, "
                f"the policy wants {self.least_honest}",
            )
        wanted = self._assumed_corrupt(context.cohort)
        if context.assumed_corrupt < wanted:
            raise PolicyRefusal(
                Reason.REASON_POLICY_CORRUPTION,
                f"assumed_corrupt: the attempt assumes {context.assumed_corrupt} corrupt members, "
                f"the policy {wanted}; a member that trusts the coordinator's enrolment writes assumed_corrupt = 0",
            )
        # The threshold is the smallest number of inputs that a sum of this attempt can hold.
        if context.threshold < 3 and not self.allow_two_party_sums:
            raise PolicyRefusal(
                Reason.REASON_POLICY_TWO_PARTY_SUM,
                f"allow_two_party_sums: a sum of {context.threshold} members can be opened in this attempt, "
                "and shows each of two the other's input; the policy does not allow it",
            )

    def check_opened(self, opened: int) -> None:
        """Before the first byte of a masked vector leaves; `opened` vectors were sent for this version so far.

        Raises:
            PolicyRefusal: that is as many as the policy allows.
        """
        if opened >= self.attempts_a_version:
            raise PolicyRefusal(
                Reason.REASON_POLICY_ATTEMPTS,
                f"attempts_a_version: {opened} masked vectors were sent for this version or round, "
                f"the policy allows {self.attempts_a_version}",
            )

    def check_sum(self, survivors: Collection[str], earlier: Iterable[Collection[str]], assumed_corrupt: int) -> None:
        """Before a member confirms U3; `earlier` are those it confirmed for the same version or round.

        Two sums of (nearly) the same updates differ by the inputs of the members in one U3 and not in the other. Of
        n_C + 2 of them two at least are honest, so that neither can be read alone. Assumes that members who confirmed
        an earlier sum apply this rule too, which this software does, and says nothing of three sums together: that is
        what attempts_a_version bounds.

        Raises:
            PolicyRefusal: it differs from an earlier one in too few members.
        """
        if self.allow_close_sums:
            return
        for other in earlier:
            difference = len(set(survivors) ^ set(other))
            if 0 < difference < assumed_corrupt + 2:
                raise PolicyRefusal(
                    Reason.REASON_POLICY_CLOSE_SUMS,
                    f"allow_close_sums: this sum and an earlier one differ in {difference} members, fewer than "
                    f"{assumed_corrupt + 2}; their difference would show what those sent. It goes on when the same "
                    "members take part again",
                )

    def _assumed_corrupt(self, cohort: int) -> int:
        if self.assumed_corrupt is not None:
            return self.assumed_corrupt
        try:
            return default_thresholds(cohort)[1]
        except ContextInvalid:
            return 1
