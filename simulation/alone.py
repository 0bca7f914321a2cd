"""Says what a member trains by if it shares nothing, as a baseline of a job. Pure.

Without dp-sgd it is the job's own recipe, for as many epochs as the member trains in the job's rounds. The rates of a
schedule fall as in the rounds.

Under dp-sgd the job's rate suits clipped steps, and unclipped ones may diverge at it. So the member trains by the
recipe that the written rules propose without noise (`simulation.suggestion`, rules 10 to 12). It does so for as many
epochs as the job's draws would go over its rows, and for 600 steps or more, which is 15 rounds of 40: a member alone
has no budget that ends its training, and few rows alone would be few steps.
"""

import math

from learning.accounting.costs import rate_of
from simulation.suggestion import plain_recipe
from tacit.job import JobDocument
from tacit.job_parts import Training
from tacit.mechanism import DpSgd, GaussianUpdate

__all__ = ["alone_recipes"]

_LEAST_STEPS = 600


def alone_recipes(job: JobDocument, examples: int, share: float) -> tuple[Training, ...]:
    """Return what a member trains by alone, one recipe after the other.

    Args:
        job: what it is a baseline of.
        examples: the member's rows.
        share: of the rounds that the member takes part in, in (0, 1].
    """
    training, mechanism, rounds = job.training, job.mechanism, job.rounds.count
    if isinstance(mechanism, DpSgd):
        drawn = mechanism.steps * rate_of(mechanism, examples) / mechanism.band
        plain, _ = plain_recipe(job, examples)
        least = math.ceil(_LEAST_STEPS / math.ceil(examples / plain.batch))
        return (plain.model_copy(update={"epochs": max(least, round(rounds * share * drawn))}),)
    # Under gaussian-update a round's epochs are over a lot.
    taken = rounds * share * (rate_of(mechanism, examples) if isinstance(mechanism, GaussianUpdate) else 1.0)
    if training.schedule is None:
        return (training.model_copy(update={"epochs": max(1, round(taken * training.epochs))}),)
    turns = max(1, round(taken))
    # As many rounds, evenly from the first to the last.
    return tuple(training.in_round(int((turn + 0.5) * rounds / turns) + 1, rounds) for turn in range(turns))
