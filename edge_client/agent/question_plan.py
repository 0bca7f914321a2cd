"""What a dry run says of a job that asks a question: the exact question, its noise, and what an answer would cost.

Nothing is counted and nothing is charged. Stewards read the same lines (`edge_client job show`).
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import secure_agg
from edge_client.ledger import questions
from edge_client.ledger.outlook import Outlook, check_unit, outlook, stored_state
from edge_client.ledger.store import LedgerError
from edge_client.policy.policy import PolicyRefusal
from edge_client.runtime import cannot_train
from learning.survey.answer import event_of_answer
from learning.text.encoder import PAD, UNKNOWN, TextEncoder
from tacit.context import context_of
from tacit.job import JobDocument
from tacit.measurement import Measurement, metric_noise
from tacit.mechanism import OwnDiscreteGaussian
from tacit.model import described
from tacit.question import Question
from tacit.rounding import rounded_up
from tacit.survey import LabelHistogram, Survey
from tacit.vector import layout_of

if TYPE_CHECKING:
    from edge_client.agent.runner import Member

__all__ = ["QuestionPlan", "Words", "question_plan"]

# What each kind of histogram counts, by unit.
_COUNTS = {
    "example": {
        "labels": "rows by label",
        "lengths": "rows by length in tokens",
        "unknown": "rows by their share of unknown words",
        "rows": "this member, by its number of rows",
    },
    "person": {
        "labels": "persons by the label of most of their rows",
        "lengths": "persons by the length of most of their rows in tokens",
        "unknown": "persons by the share of unknown words in most of their rows",
        "rows": "this member, by its number of rows",
    },
    "member": {
        "labels": "this member, by the label of most of its rows",
        "lengths": "this member, by the length of most of its rows in tokens",
        "unknown": "this member, by the share of unknown words in most of its rows",
        "rows": "this member, by its number of rows",
    },
}
# A vocabulary of so many words is shown whole: a short one can be a search for its words.
_MAX_WHOLE = 50
_FIRST_WORDS = 20


@dataclass(frozen=True)
class Words:
    """The vocabulary that a question counts tokens with: SHA-256 of its tokenizer, its size, and its first words."""

    digest: bytes
    size: int
    shown: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: bytes) -> "Words":
        """Reads a tokenizer.json. Raises TokenizerInvalid."""
        found = [word for word in TextEncoder(tokenizer, 1, 1).words() if word not in (None, PAD, UNKNOWN)]
        words = [str(word) for word in found]
        shown = words if len(words) <= _MAX_WHOLE else words[:_FIRST_WORDS]
        return cls(hashlib.sha256(tokenizer).digest(), len(words), tuple(shown))


@dataclass(frozen=True)
class QuestionPlan:
    """What this member would send in answer to one question.

    Attributes:
        job: The job.
        question: What it asks.
        refusals: Why the member would refuse to answer. Without any, it answers.
        epsilon: What the answer costs, at the policy's delta; None if there is no formula.
        spent: What was spent so far under the same limit, by the same count.
        outlook: How far the budget of the data reaches; None if nobody knows.
        words: The vocabulary; None if the question reads no tokens.
    """

    job: JobDocument
    question: Question
    refusals: tuple[str, ...]
    epsilon: float | None = None
    spent: float | None = None
    outlook: Outlook | None = None
    words: Words | None = None

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
            "vocabulary": None
            if self.words is None
            else {"digest": self.words.digest.hex(), "size": self.words.size, "words": list(self.words.shown)},
            "epsilon": self.epsilon,
            "spent": self.spent,
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
        if isinstance(self.question, Measurement):
            self._show_measurement(self.question, member, say)
        else:
            self._show_survey(self.question, unit, member, say)
        if self.words is not None:
            more = "" if len(self.words.shown) == self.words.size else ", ..."
            listed = ", ".join(json.dumps(word, ensure_ascii=False) for word in self.words.shown)
            say(f"  by a vocabulary of {self.words.size:,} entries, {self.words.digest.hex()[:16]}: {listed}{more}")
        if isinstance(mechanism, OwnDiscreteGaussian):
            say(
                f"  adds noise of standard deviation {mechanism.std:g} to each number, drawn once; each attempt sends "
                f"the same numbers; those well above {mechanism.bound:,} are cut"
            )
        sizes = sorted({self.job.rounds.min_members, self.job.rounds.target_members})
        say("  bytes: " + ", ".join(f"{self.bytes_of_answer(size):,} in a cohort of {size}" for size in sizes))
        if self.epsilon is not None:
            most = questions.allowance_for(policy, self.question)
            say(
                f"  epsilon {rounded_up(self.epsilon):g} for the whole answer; the policy lets all {most.spenders} "
                f"spend {most.epsilon:g}, of which {rounded_up(self.spent or 0):g} is spent, and all jobs "
                f"{policy.epsilon:g}, at delta {policy.delta:g}"
            )
        for refusal in self.refusals:
            say(f"  refused: {refusal}")
        if not self.refusals:
            approved = " once the stewards have approved it" if policy.asks else ""
            say(f"  the policy allows it: `edge_client run` would answer{approved}")

    def _show_survey(self, question: Survey, unit: str, member: "Member", say: Callable[[str], None]) -> None:
        once = {"example": "each row", "person": "each person", "member": "this member"}[unit] + " counts once in each"
        say(f"{self.job.name}: a question about {len(member.examples)} examples here; {once} histogram")
        say("  would send these counts with noise, masked, so that only the sum over the cohort can be read:")
        for histogram in question.histograms:
            say(f"    {_COUNTS[unit][histogram.kind]}:")
            # A label may read like a bin of ours, such as "other".
            quoted = isinstance(histogram, LabelHistogram)
            for name in histogram.names[:-1]:
                say(f"      {json.dumps(name, ensure_ascii=False) if quoted else name}")
            say(f"      {histogram.names[-1]}")

    def _show_measurement(self, question: Measurement, member: "Member", say: Callable[[str], None]) -> None:
        policy, job = member.policy, self.job
        version = "a version from a bundle" if question.number is None else f"version {question.number}"
        say(f"{job.name}: how well {version} of {question.job} does on rows here; nothing is trained")
        say(f"  version: {question.weights.hex()[:16]}, a {described(job.model)} of {question.values:,} values")
        which = f"those that it keeps back from every training (validation_share {policy.validation_share:g})"
        if question.rows == "all":
            which = "all of them, also those that models were trained on"
        say(f"  reads of {len(member.examples)} examples here: {which}")
        say("  would send with noise, masked, so that only the sum over the cohort can be read:")
        for label in question.breakdown or (None,):
            whose = "" if label is None else f" of the rows of {json.dumps(label, ensure_ascii=False)}"
            say(f"    loss (cut to {question.loss_bound:g}), right answers and number{whose}")
        # A member that is one unit measures all its rows.
        counted = {"example": "rows", "person": "persons"}
        mechanism = job.mechanism
        if isinstance(mechanism, OwnDiscreteGaussian) and question.rows == "all" and mechanism.unit in counted:
            most = metric_noise(mechanism).max_units
            say(f"  has room for {most:,} {counted[mechanism.unit]} of a member; of more, a part is measured")


def question_plan(
    job: JobDocument, question: Question, member: "Member", tokenizer: bytes | None = None
) -> QuestionPlan:
    """Returns the member's own verdict on a question, for the smallest cohort that the job allows."""
    from learning.accounting.gate import epsilon_counted

    policy, members = member.policy, job.rounds.min_members
    refusals = []
    try:
        member.withdrawals.check(job.name, job)
        policy.check_job(job, federation=member.identity.federation)
    except PolicyRefusal as refusal:
        refusals.append(refusal.detail)
    if (why := cannot_train(job, member.runtime)) is not None:
        refusals.append(why)
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
            check_unit(policy, state)
            before = questions.spent(question, () if state is None else state.reservations.values())
            epsilon = epsilon_counted([event], limit)
            spent = epsilon_counted(before, limit) if before else 0.0
            reach = outlook(policy, job, event, state, federation=member.identity.federation)
        except (ValueError, LedgerError) as error:
            refusals.append(str(error))
    if reach is not None and reach.refused_by is not None and questions.allowance_for(policy, question).epsilon:
        refusals.append(f"{reach.refused_by} does not allow the answer now")
    # A measured version's vocabulary is a part of its model, and counts nothing by itself.
    words = None if tokenizer is None or isinstance(question, Measurement) else Words.of(tokenizer)
    return QuestionPlan(job, question, tuple(refusals), epsilon, spent, reach, words)
