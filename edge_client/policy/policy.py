"""The member's own policy: floors and ceilings that no job can pass. HOME/policy.toml, or `--policy FILE`.

The tables of `rules` and `model_rules` hold each rule once. `check_*` raise at the first rule that does not hold; a
rule that cannot be decided there does not hold. `explain` goes through the same tables to the end. A refusal names the
rule, the job's value and the policy's value.

Without a file the strict defaults apply: the member takes a job with noise only within the budget, and a job without
noise only if its policy says so.

Only `load` reads a file; nothing reads a clock or the data. Left to others: the budget spent (the ledger enforces
`epsilon` and its monthly and per-job limits), and calling the checks before acting.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from edge_client.policy import rules
from edge_client.policy.conditions import Conditions
from edge_client.policy.document import PolicyDocument
from edge_client.policy.model_rules import MANIFEST
from edge_client.policy.verdicts import Outcome, Verdict, When, judge
from secure_agg import RoundContext
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument, JobSpec
from tacit.manifest import Manifest
from tacit.reason import Reason

__all__ = ["Policy", "PolicyRefusal"]


class PolicyRefusal(Exception):
    """The policy refuses: `reason` is for the machine, the text for people."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Policy(PolicyDocument):
    """The policy, and the checks that a session asks of it."""

    @classmethod
    def load(cls, home: Path, option: Path | None = None) -> "tuple[Policy, Path | None]":
        """Reads the policy in force: `option`, else HOME/policy.toml, else the defaults.

        Returns:
            The policy, and the file it was read from (None: the defaults).

        Raises:
            DocumentInvalid: the file is not a valid policy, `option` does not exist, or HOME/policy.toml is a link to
                a file that does not.
        """
        path = option or home / "policy.toml"
        if option is None and not path.exists():
            if path.is_symlink():
                raise DocumentInvalid(
                    f"{path} points to a file that is not there; put it back, or remove the link if the defaults are "
                    "to apply"
                )
            return cls(), None
        return cls.from_toml(path), path

    # ---- the checks, in the order in which a session makes them ----

    def check_job(self, job: JobDocument, *, federation: bytes | None = None) -> None:
        """Checks a job document, before anything else of the job is fetched.

        Also checks the attempts that the job allows: a job whose every attempt would be refused is not worth training
        for.

        Args:
            job: the document.
            federation: SHA-256 of the root certificate that this member enrolled under. None: no entry of
                `authorities` matches.

        Raises:
            PolicyRefusal: the first rule that the job breaks.
        """
        verdicts = rules.on_job(self, job, federation)
        # If a job does not tell what its attempts will be, each attempt is checked when it comes.
        _enforce(each for each in verdicts if each.when is When.JOB or each.outcome is not Outcome.OPEN)

    def check_manifest(self, manifest: Manifest) -> None:
        """Checks the manifest, before the data is read.

        Raises:
            PolicyRefusal: the job would share a parameter that the policy keeps private.
        """
        _enforce(judge(self, MANIFEST, manifest))

    def check_conditions(self, conditions: Conditions) -> None:
        """Checks the machine, before each training.

        Raises:
            PolicyRefusal: a condition is not met, or cannot be read here.
        """
        _enforce(judge(self, rules.CONDITIONS, conditions))

    def check_attempt(self, context: RoundContext) -> None:
        """Checks an attempt, before the member advertises its keys for it.

        Raises:
            PolicyRefusal: a number of the context is weaker than the policy's.
        """
        _enforce(judge(self, rules.ATTEMPT, rules.Numbers.of(context)))

    def check_roster(self, keys: Mapping[str, bytes], max_doubtful: int, *, own: str) -> None:
        """Checks a roster whose signatures and certificates are verified, before the member deals shares to it.

        With pins, n_C does not rest on trust in the authority: all members that the coordinator may have enrolled
        itself are among the unpinned, and there are at most as many of those as the attempt withstands. In groups that
        holds for the member's own group, the only one that it sees. Assumes that the pinned members do not work with
        the coordinator.

        Args:
            keys: each member's public key, SubjectPublicKeyInfo in DER, as `key_of` returns it.
            max_doubtful: how many of them may be unpinned: n_C or, of one group, what n_C of all make likely there.
            own: this member's name.

        Raises:
            PolicyRefusal: the roster has more unpinned members than that.
        """
        _enforce(judge(self, rules.ROSTER, rules.Keys(keys, max_doubtful, own)))

    def check_log(self, roster: rules.Watched) -> None:
        """Checks what the roster log says about a roster, before the member deals shares to it.

        Raises:
            PolicyRefusal: more members than the attempt assumes corrupt are too young, or too few witnesses signed.
        """
        _enforce(judge(self, rules.LOG, roster))

    def check_vector(self, update: bytes, earlier: Iterable[bytes | None], *, grouped: bool) -> None:
        """Checks a masked vector of a job without noise, before its first byte leaves.

        Args:
            update: SHA-256 of the update in the vector.
            earlier: the same for each vector sent before for this version or round.
            grouped: whether the vector goes into the sum of a group.

        Raises:
            PolicyRefusal: the update differs from one sent before, or this is a second vector in groups.
        """
        _enforce(judge(self, rules.VECTOR, rules.VectorInQuestion(update, tuple(earlier), grouped)))

    def check_sum(self, members: Collection[str], confirmed: Collection[str]) -> None:
        """Checks the members of a sum without noise, before this member deals to a roster and before it confirms U3.

        Args:
            members: the members of the roster, or of U3.
            confirmed: the U3 that this member confirmed before for this version or round.

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
        """Compares every rule with a job, in the order of the checks. A rule whose subject is not given stays open.

        With the same facts, the first refusal here is the one that `check_job`, `check_manifest` and
        `check_conditions`, one after the other, would raise.
        """
        return [
            *rules.on_job(self, job, federation),
            # A question shares no parameter.
            *(judge(self, MANIFEST, manifest) if job.question is None else ()),
            *judge(self, rules.CONDITIONS, conditions),
            *rules.on_budget(self),
            *judge(self, rules.ROSTER, None),
            # Not given means all of them.
            *judge(self.model_copy(update={"min_witnesses": rules.witnesses_needed(self)}), rules.LOG, None),
            # `rules.VECTOR` has the same key.
            *judge(self, rules.SUM, None),
        ]


def _enforce(verdicts: Iterable[Verdict]) -> None:
    for verdict in verdicts:
        # An open rule is no permission.
        if verdict.outcome is not Outcome.OK:
            raise PolicyRefusal(verdict.reason, verdict.sentence)
