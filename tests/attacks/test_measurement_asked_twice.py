"""A coordinator measures a version made to single out one row, again and again, and subtracts sums.

It chooses any version, so it can make one that answers all texts right but one. It may open two attempts, the second
without one member, and subtract them: what is left is that member's answer with its own noise.

- Without noise, as with figures of plain evaluation, the difference tells whether the row is there.
- If members drew new noise for each attempt and charged it once, an average over attempts would tell it too.
- Tacit holds one answer for each question and charges by the member's own noise. Asking anew is charged anew.
"""

import functools
import math

import numpy as np
import pytest

from learning.accounting.filter import Limit
from learning.accounting.gate import PrivacyFilter, epsilon_counted
from learning.survey.answer import event_of_answer, noised
from learning.validation.contribution import by_label
from tacit.measurement import Measurement
from tacit.mechanism import OwnDiscreteGaussian
from tacit.validation import HALF
from tests.support import party
from tests.support.random_sources import Seeded
from tests.unit.edge_client.session.test_measuring_answers import Measuring

QUESTION = Measurement(
    job="desk", document=bytes(32), weights=bytes(32), manifest=bytes(32), values=1, breakdown=("ill", "well")
)
NOISE = OwnDiscreteGaussian(std=HALF * math.sqrt(3) * 2, bound=32_000)
MEMBERS, RUNS, ATTEMPTS = 5, 600, 50
LIMIT = Limit(8.0, 1e-6)


def sums(there):
    """Twenty healthy rows that the version answers right; and one of label `ill` that it was made to get wrong."""
    losses = np.array([0.0] * 20 + ([5.0] if there else []))
    labels = np.array([1] * 20 + ([0] if there else []))
    return by_label(losses, losses == 0, labels, 2, range(len(losses)), 5.0, Seeded("coins"))


# A member computes its sums once for a question. Noise is what it could draw anew.
SUMS = {there: sums(there) for there in (False, True)}
MOVED = SUMS[True] - SUMS[False]
# How the row moves an answer, as a direction of length one: the adversary's best test between there and not.
DIRECTION = MOVED / np.linalg.norm(MOVED)


@functools.cache
def differences(there, attempts=1, *, anew=False):
    """Member 0's answer as the sums of two attempts show it, in each run; with new noise, the mean over attempts."""
    found = []
    # Fifty draws a run show what they show in fewer runs.
    for run in range(RUNS // 2 if anew else RUNS):
        drawn = attempts if anew else 1
        answers = [noised(SUMS[there], NOISE, Seeded(f"{run}/{at}/{there}")).change for at in range(drawn)]
        others = sum(noised(SUMS[False], NOISE, Seeded(f"{run}/other/{member}")).change for member in range(1, MEMBERS))
        seen = [(each + others) - others for each in answers]
        found.append(np.mean(seen, axis=0) @ DIRECTION)
    return np.array(found)


def advantage(without, there):
    """How much better than guessing the best threshold on these numbers is."""
    cut = (without.mean() + there.mean()) / 2
    return abs(float((there > cut).mean() - (without > cut).mean()))


def test_without_noise_one_version_tells_whether_the_row_is_there():
    assert np.abs(MOVED).tolist() == [HALF, HALF, HALF, 0, 0, 0]


def test_new_noise_for_each_attempt_and_one_charge_would_tell_it_too():
    found = advantage(differences(False, ATTEMPTS, anew=True), differences(True, ATTEMPTS, anew=True))
    # Fifty draws leave a seventh of the noise: half a multiplier of 2 / 7 apart, a Gaussian test is right by 0.92.
    assert found > 0.85


def test_one_draw_tells_what_was_charged():
    one = advantage(differences(False), differences(True))
    event = event_of_answer(QUESTION, NOISE, "add-remove")
    assert event.multiplier == pytest.approx(2.0)
    # The best test between two Gaussians at distance 1 / multiplier, and room for chance.
    assert one < math.erf(1 / (2 * event.multiplier * math.sqrt(2))) + 0.12
    shown = (differences(True).mean() - differences(False).mean()) / differences(False).std()
    assert shown == pytest.approx(1 / event.multiplier, abs=5 * math.sqrt(2 / RUNS))


def test_a_member_sends_the_same_answer_in_every_attempt_and_process(tmp_path):
    """The member's own code: two attempts, a later round, and a restart in between show one draw."""
    identity = party.member(tmp_path / "north", "localhost:7441")
    here = Measuring(tmp_path, identity)
    try:
        sent = []
        for attempt in range(1, 5):
            prepared = here.prepare(round_=attempt)
            here.charge(prepared, attempt=1, round_=attempt)
            sent.append(prepared.update.change)
            here.restart()
        assert all(np.array_equal(each, sent[0]) for each in sent)
        assert here.events() == 1
    finally:
        here.close()


def test_asking_the_same_in_another_job_is_paid_each_time_until_the_limit_ends_it():
    event = event_of_answer(QUESTION, NOISE, "add-remove")
    counted = [epsilon_counted([event.model_copy(update={"steps": times})], LIMIT) for times in (1, 2, 4)]
    assert counted == sorted(counted)
    assert counted[1] > 1.3 * counted[0]
    gate, paid = PrivacyFilter(LIMIT), []
    while gate.admits([*paid, event]):
        paid.append(event)
    assert 1 < len(paid) < ATTEMPTS
