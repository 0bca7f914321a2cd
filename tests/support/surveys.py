"""Questions, the jobs that ask them, and a fleet whose members answer."""

import hashlib
from typing import Any

import numpy as np

import secure_agg
from edge_client.policy.policy import Policy
from edge_client.session import states
from learning.survey.answer import Answering, event_of_answer, noised
from learning.survey.counts import counts_of
from learning.text.examples import Example
from tacit.job import Deadlines, JobDocument, Rounds
from tacit.mechanism import OwnDiscreteGaussian
from tacit.model import NoModel
from tacit.survey import LabelHistogram, RowHistogram, Survey
from tests.support.fleet import DELAY_MS, VALUES, Fleet, Member
from tests.support.random_sources import Seeded

# Six bins, as many as the fleet's vectors have values.
ASKED = Survey(histograms=(LabelHistogram(labels=("a", "b")), RowHistogram(at_most=(10, 100))))
NOISE = OwnDiscreteGaussian(std=5.0, bound=1000)


def survey_job(question: Survey = ASKED, noise: OwnDiscreteGaussian = NOISE, **changes: Any) -> JobDocument:
    """A job that asks, without files behind its digests unless `changes` name them."""
    numbers: dict[str, Any] = {
        "name": "asked",
        "question": question,
        "model": NoModel(),
        "mechanism": noise,
        "rounds": Rounds(count=1, deadlines=Deadlines(training=60, reconnect=2)),
        "manifest": bytes(32),
        "weights": hashlib.sha256(np.zeros(question.bins, "<f4").tobytes()).digest(),
        "tokenizer": bytes(32) if question.reads_tokens else None,
        "values": question.bins,
    }
    return JobDocument(**{**numbers, **changes})


def rows_of(member: int) -> list[Example]:
    """The rows of a member of the fleet: 20 + 10 member of them, in turn of label a, b and another."""
    return [Example(f"text {number}", "abc"[number % 3]) for number in range(20 + 10 * member)]


class SurveyFleet(Fleet):
    """A fleet that answers a question. `disks` outlives processes; `draws` counts how often a member drew noise."""

    def __init__(self, members: int, *, holds: bool = True, seed: int = 0, **more: Any) -> None:
        self.holds = holds
        self.disks: dict[str, Any] = {}
        self.draws: dict[str, int] = {}
        super().__init__(members, job=survey_job(), policy=Policy(surveys_epsilon=1.0), seed=seed, **more)

    def _trained(self, member: Member, assignment: Any) -> None:
        answer = self.disks.get(member.name) if self.holds else None
        if answer is None:
            drawn = self.draws[member.name] = self.draws.get(member.name, 0) + 1
            counts = counts_of(ASKED, rows_of(int(member.name[1:])), None, "example")
            answer = noised(counts, NOISE, Seeded(f"{self.seed}/{member.name}/{drawn}"))
            self.disks[member.name] = answer
        self.hand_over(member, assignment, answer)

    def _mask(self, member: Member, effect: states.MaskAndUpload) -> None:
        assert member.update is not None
        assert effect.attempt in member.opened
        answering = Answering(event_of_answer(ASKED, NOISE, "add-remove"))
        vector = answering.encode(effect.job, member.update, effect.cohort, member.environment.random)
        self.inputs[effect.attempt, member.name] = vector.copy()
        stage, message = effect.stage.mask(vector)
        packed = bytes(secure_agg.pack_in_place(vector, effect.stage.seat.context.bits))
        self._later(member, DELAY_MS, lambda: self.tell(member.name, states.Masked(effect.attempt, stage)))
        self._later(member, 2 * DELAY_MS, lambda: self._upload(member, effect.attempt, packed, message))


assert ASKED.bins == VALUES
