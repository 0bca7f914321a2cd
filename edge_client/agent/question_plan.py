"""What a dry run says of a job that asks a question: the exact question, its noise, and what an answer would cost.

Nothing is counted and nothing is charged. Stewards read the same lines (`edge_client job show`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import secure_agg
from edge_client.ledger import surveys
from edge_client.ledger.outlook import Outlook, outlook, stored_state
from edge_client.ledger.store import LedgerError
from edge_client.policy.policy import PolicyRefusal
from learning.survey.answer import event_of_answer
from tacit.context import context_of
from tacit.job import JobDocument
from tacit.mechanism import OwnDiscreteGaussian
from tacit.survey import Survey
from tacit.vector import layout_of

if TYPE_CHECKING:
    from edge_client.agent.runner import Member

__all__ = ["QuestionPlan", "question_plan"]

# What each kind of histogram counts.
_COUNTS = {
    "labels": "rows by label",
    "lengths": "rows by length in tokens",
    "unknown": "rows by their share of unknown words",
    "rows": "members by their number of rows",
}
# Bins that one line names.
_MAX_NAMED = 20


@dataclass(frozen=True)
class QuestionPlan:
    """What this member would send in answer to one question.

    Attributes:
        job: The job.
        question: What it asks.
        refusals: Why the member would refuse to answer. Without any, it answers.
        epsilon: What the answer costs, at the policy's delta; None if there is no formula.
        spent: What surveys have cost so far, by the same count.
        outlook: How far the budget of the data reaches; None if nobody knows.
    """

    job: JobDocument
    question: Survey
    refusals: tuple[str, ...]
    epsilon: float | None = None
    spent: float | None = None
    outlook: Outlook | None = None

    def bytes_of_answer(self, members: int) -> int:
        """Returns the bytes of the packed masked vector in a cohort of `members`."""
        layout = layout_of(self.job, members)
        return secure_agg.packed_size(layout.values, layout.bits)

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "job": self.job.name,
            "status": "running",
            "mechanism": self.job.mechanism.model_dump(mode="json"),
            "question": self.question.model_dump(mode="json"),
            "epsilon": self.epsilon,
            "surveys_spent": self.spent,
            "outlook": None if self.outlook is None else self.outlook.as_json(),
            "bytes_a_round": self.bytes_of_answer(self.job.rounds.min_members),
            "max_bytes_a_round": self.bytes_of_answer(self.job.rounds.target_members),
            "takes_part": not self.refusals,
            "refusals": list(self.refusals),
        }

    def show(self, member: "Member", say: Callable[[str], None]) -> None:
        """Says the plan, line by line."""
        mechanism, policy = self.job.mechanism, member.policy
        unit = mechanism.unit if isinstance(mechanism, OwnDiscreteGaussian) else "example"
        once = "each row counts once in each" if unit == "example" else "this member counts once in each"
        say(f"{self.job.name}: a question about {len(member.examples)} examples here; {once} histogram")
        say("  would send these counts with noise, masked, so that only the sum over the cohort can be read:")
        for histogram in self.question.histograms:
            names = histogram.names
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            say(f"    {_COUNTS[histogram.kind]}: {', '.join(names[:_MAX_NAMED])}{more}")
        if isinstance(mechanism, OwnDiscreteGaussian):
            say(
                f"  adds noise of standard deviation {mechanism.std:g} to each count, drawn once; each attempt sends "
                "the same numbers"
            )
        sizes = sorted({self.job.rounds.min_members, self.job.rounds.target_members})
        say("  bytes: " + ", ".join(f"{self.bytes_of_answer(size):,} in a cohort of {size}" for size in sizes))
        if self.epsilon is not None:
            say(
                f"  epsilon {self.epsilon:.3g} for the whole answer; the policy lets all surveys spend "
                f"{policy.surveys_epsilon:g}, of which {self.spent or 0:.3g} is spent, and all jobs "
                f"{policy.epsilon:g}, at delta {policy.delta:g}"
            )
        for refusal in self.refusals:
            say(f"  refused: {refusal}")
        if not self.refusals:
            approved = " once the stewards have approved it" if policy.asks else ""
            say(f"  the policy allows it: `edge_client run` would answer{approved}")


def question_plan(job: JobDocument, question: Survey, member: "Member") -> QuestionPlan:
    """Returns the member's own verdict on a question, for the smallest cohort that the job allows."""
    from learning.accounting.gate import epsilon_counted

    policy, members = member.policy, job.rounds.min_members
    refusals = []
    try:
        policy.check_job(job, federation=member.identity.federation)
    except PolicyRefusal as refusal:
        refusals.append(refusal.detail)
    try:
        federation = member.identity.federation
        policy.check_attempt(
            context_of(job, federation=federation, round=1, attempt=1, model=job.weights, members=members)
        )
    except PolicyRefusal as refusal:
        refusals.append(f"{refusal.detail} (in the smallest cohort that the job allows)")
    epsilon = spent = reach = None
    if isinstance(job.mechanism, OwnDiscreteGaussian):
        limit = policy.limit()
        try:
            event = event_of_answer(question, job.mechanism, limit.adjacency)
            state = stored_state(member.home, member.data_name)
            before = surveys.spent(() if state is None else state.reservations.values())
            epsilon = epsilon_counted([event], limit)
            spent = epsilon_counted(before, limit) if before else 0.0
            reach = outlook(policy, job, event, state, federation=member.identity.federation)
        except (ValueError, LedgerError) as error:
            refusals.append(str(error))
    if reach is not None and reach.refused_by is not None and policy.surveys_epsilon:
        refusals.append(f"{reach.refused_by} does not allow the answer now")
    return QuestionPlan(job, question, tuple(refusals), epsilon, spent, reach)
