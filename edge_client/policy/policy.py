"""The member's own policy: floors and ceilings that no job can pass. HOME/policy.toml, or `--policy FILE`.

What each key asks stands once, in the tables of `rules` and `model_rules`: `check_*` raise at the first rule that does
not hold, and what cannot be told there does not hold; `explain` goes through the same tables to their end. A refusal
names the rule, the job's value and the policy's. Without a file the defaults hold, and they are strict: a job without
noise takes part only where the member has written so, one with it only within the budget.

Nothing here reads a file, a clock or the data, but for `load`. Left to others: what was spent (the ledger keeps
`epsilon`, its months and jobs), and to ask before acting.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from edge_client.policy import rules
from edge_client.policy.conditions import Conditions
from edge_client.policy.document import PolicyDocument
from edge_client.policy.model_rules import MANIFEST
from edge_client.policy.verdicts import Outcome, Verdict, When, judge
from secure_agg import RoundContext
from tacit.job import JobDocument, JobSpec
from tacit.manifest import Manifest
from tacit.reason import Reason

__all__ = ["Policy", "PolicyRefusal"]


class PolicyRefusal(Exception):
    """The policy says no: `reason` for the machine, the text for people."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Policy(PolicyDocument):
    """The policy, and the questions that a session asks it."""

    @classmethod
    def load(cls, home: Path, option: Path | None = None) -> "tuple[Policy, Path | None]":
        """The policy in force, and the file it was read from: `option`, else HOME/policy.toml, else the defaults.

        Raises:
            DocumentInvalid: the file cannot be right, or `option` does not exist.
        """
        path = option or home / "policy.toml"
        if option is None and not path.exists():
            return cls(), None
        return cls.from_toml(path), path

    # ---- the questions, in the order in which they are asked ----

    def check_job(self, job: JobDocument, *, federation: bytes | None = None) -> None:
        """Before anything of a job but its document is fetched.

        federation: SHA-256 of the root certificate that this member enrolled under; not given, it is none of
        `authorities`. What attempts of the job can offer is looked at as well: a job of which no attempt would be
        joined is not worth a training.

        Raises:
            PolicyRefusal: the first rule that the job does not keep.
        """
        verdicts = rules.on_job(self, job, federation)
        # Where a job does not tell what its attempts will be, each attempt is asked.
        _enforce(each for each in verdicts if each.when is When.JOB or each.outcome is not Outcome.OPEN)

    def check_manifest(self, manifest: Manifest) -> None:
        """Before the data is read. Raises: PolicyRefusal: a parameter would be shared that is kept back."""
        _enforce(judge(self, MANIFEST, manifest))

    def check_conditions(self, conditions: Conditions) -> None:
        """Before each training. Raises: PolicyRefusal: this is not the moment, or that cannot be told here."""
        _enforce(judge(self, rules.CONDITIONS, conditions))

    def check_attempt(self, context: RoundContext) -> None:
        """Before a member advertises its keys for an attempt.

        Raises:
            PolicyRefusal: a number of the context is weaker than the policy's.
        """
        _enforce(judge(self, rules.ATTEMPT, rules.Numbers.of(context)))

    def check_roster(self, keys: Mapping[str, bytes], context: RoundContext, *, own: str) -> None:
        """Before anything is dealt to a roster, once every signature and certificate of it is verified.

        keys: each member's public key, SubjectPublicKeyInfo in DER, as `key_of` gives it. own: this member's name.

        With pins, n_C need not be believed of the authority: all that the coordinator may have enrolled itself are
        among the unpinned, and there are no more of them than the attempt withstands. Assumes that those pinned do not
        work with it.

        Raises:
            PolicyRefusal: more unpinned members than the attempt assumes corrupt.
        """
        _enforce(judge(self, rules.ROSTER, rules.Keys(keys, context.assumed_corrupt, own)))

    def check_vector(self, update: bytes, earlier: Iterable[bytes | None], *, grouped: bool) -> None:
        """Without noise, before the first byte of a masked vector leaves.

        update: SHA-256 of the update that it carries.
        earlier: the same of each vector sent before for this version or round.
        grouped: whether it goes into the sum of a group.

        Raises:
            PolicyRefusal: it is another update than one sent before, or a second vector in groups.
        """
        _enforce(judge(self, rules.VECTOR, rules.VectorInQuestion(update, tuple(earlier), grouped)))

    def check_sum(self, members: Collection[str], confirmed: Collection[str]) -> None:
        """Without noise, before a member deals to a roster and before it confirms U3.

        members: those of the roster, or of U3.
        confirmed: the U3 that it confirmed before for this version or round.

        Raises:
            PolicyRefusal: they differ.
        """
        _enforce(judge(self, rules.SUM, rules.SumInQuestion(frozenset(members), frozenset(confirmed))))

    def explain(
        self,
        job: JobDocument | JobSpec,
        *,
        federation: bytes | None = None,
        manifest: Manifest | None = None,
        conditions: Conditions | None = None,
    ) -> list[Verdict]:
        """Every rule on a job, in the order in which they are asked; what is not given leaves its rules open.

        With the same facts, the first refusal here is what `check_job`, `check_manifest` and `check_conditions`, one
        after the other, would raise.
        """
        return [
            *rules.on_job(self, job, federation),
            *judge(self, MANIFEST, manifest),
            *judge(self, rules.CONDITIONS, conditions),
            *rules.on_budget(self),
            *judge(self, rules.ROSTER, None),
            # `rules.VECTOR` asks by the same key.
            *judge(self, rules.SUM, None),
        ]


def _enforce(verdicts: Iterable[Verdict]) -> None:
    for verdict in verdicts:
        # What cannot be told is no permission.
        if verdict.outcome is not Outcome.OK:
            raise PolicyRefusal(verdict.reason, verdict.sentence)
