"""Proposes a job's numbers from written rules, without data and without torch. Pure.

The rules, and where each was measured (benchmarks/results; `tests/unit/simulation/test_suggestion.py` reads the rows
and checks that each suggestion is within two points of the best row of its cell):

With noise (institutional_dp_search: TREC, 3 members with 1,650 questions, epsilon 1, 2, 4 and 8):

1. DP-SGD by plain SGD. Its noise grows with the trained values, and not with the square of the whole update.
2. 10 rounds of 10 steps. 50 x 2 and 5 x 20 steps were no better; 30 x 10 lost 8 points, since each step is charged.
3. A lot of a third of the smallest member's rows, from 64 up to all of them. A twelfth or two thirds lost 3 points, all
   rows 5 points, at 5 times the time.
4. Clip 0.5. Gradients are mostly clipped, so only clip times rate moves the model; 0.5 was best of 0.1, 0.5 and 2.
5. A rate at which the noise of all rounds moves each value of the mean by a standard deviation of 0.2, at most 10 with
   a trained embedding and 8 with a frozen one. At epsilon 1, rate 2 gained 5 points on 8; with 218 rows of the service
   desk (examples/desk) at epsilon 8, 1 gained 16 points on 3 and on 8. Adam was 5 points behind.
6. The embedding is frozen, and TextCNN takes widths 1 and 2, if the noise would otherwise be more than 3 times as long
   as a round's longest update. At epsilon 1 that ratio was 3.9, and freezing gained 2 points; at epsilon 2 it was 2.1,
   and freezing lost 2.
7. The noise is the smallest with which the smallest member's empty ledger admits all rounds.
8. A head alone on a frozen encoder: 10 rounds on all rows, clip 0.3. Its way is rate * clip * steps, over all rounds. A
   way costs the same noise in any number of steps: features have length 1, so the noise of a logit is way * u, where
   u = multiplier / (sqrt(all steps) * rows * sqrt(members)) follows from the budget alone.
   - The way is as long as makes the noise of a logit 1, times 1 / (1 + (7 * labels * u)^2). Each of K labels is pulled
     along by its own K-th of the rows, so a way teaches a logit in proportion to way / K, and 1 / (K u) is the ratio of
     what is learnt to noise. The factor is that of a Wiener filter: where noise is the larger part, the start at the
     labels is worth more than the way. It matters with many labels and few rows. The way is at most 9,000.
   - A step's rate is at most 12 for each label, and a round has 3 steps or more. Where labels overlap, gradients do not
     vanish near the optimum, and a longer step over all rows swings around it. A label's gradient is a mean over all
     rows, of which a K-th are its own, so more labels bear longer steps.
   The constants are from trials on four data sets: 1 and 7 from TREC and banking77 (0.8 and 8, the first choice, lost
   up to 3 points on banking77), 12 from SST-2 and CSAbstruct (rate 60 for 5 labels held, and 120 did not), 3 steps from
   banking77, and 9,000 is the longest way that was searched. frontier_suggested measures the rule on the cells of the
   search, and on 20 Newsgroups, which had no part in the constants: within two points in five of six cells there.
9. Any other prompted model has no table of words to move: rate 1. This follows from the length of a prompt's vectors
   and was not measured under noise.

Without noise (fedprompt_search: SST-2, 10 members, MiniLM; institutional: TREC):

10. Adam, 15 rounds. Rate 0.01 for a prompt, a prefix or P-tuning under a head, 0.1 for a prompt as a cloze, 0.001 for
   LoRA and biases (these not measured), 0.0001 for a fine-tuned encoder, 0.001 for word vectors trained from the start.
11. About 40 steps a round: as many epochs as that takes in the smallest member's rows, at most 5.
12. A head alone: Adam at 0.03, 10 rounds of 8 epochs. On TREC's validation questions, with equal members, that was as
   good as the 2 rounds of 40 of frontier_search. In 40 epochs members with unlike labels drift apart: on MedQuAD by
   source, a head had 84 % without noise and 94 % with the few steps of rule 8.

A model that writes (generation, generation_search: SmolLM2 on E2E NLG, 10 members, alpha 16; LoRA on queries and
values, rank 8, but rank 1 with both sides under noise):

13. With noise: DP-SGD by plain SGD, 4 rounds of 3 steps, clip 1, rates that fall like a cosine, lots by rule 3. The
   rate is 6 for LoRA with one side frozen and 0.4 with both, the best that were tried, and 1 for a prefix, from the
   gradients at its start. All that holds for the noise of 10 members with 4,200 rows at epsilon 8, which moves a value
   by 0.0073 at rate 1. With more noise the rate falls so that it moves a value by no more. Prompts, other numbers of
   steps and other data were not measured.
14. Without: AdamW, 5 rounds of an epoch in steps of 8 rows, or of about 24 steps where an epoch has fewer, rates that
   fall like a cosine. The rate is 0.005 for LoRA with one side frozen, 0.002 with both, measured with 24 steps a round.
   For a prefix or a prompt 0.005 was not measured.

Guarantee: a proposal protects no less than the job does. It keeps epsilon and delta for single examples, added or
removed, and a job that protects more by the same number gets no proposal (`why_weaker`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pydantic import ValidationError

from learning.accounting.calibration import calibrate
from learning.accounting.costs import Noised, adjacency_of, event_of_job, measured_round, releases_of
from learning.accounting.events import PrivacyEvent
from learning.accounting.expected_noise import Values
from learning.accounting.planning import Setting, cost_of_job, noise_to_signal, with_multiplier
from learning.accounting.spend import Limit
from tacit.documents import DocumentInvalid, sentence_of
from tacit.job import JobSpec
from tacit.job_body import JobBody
from tacit.job_parts import Schedule, Training
from tacit.mechanism import DistributedGaussian, DpSgd, LaplaceUpdate, Mechanism, NoMechanism
from tacit.method import FedAvg, FedProx
from tacit.model import PromptedModel, RvaeModel, TextCNNModel, TransformerModel
from tacit.prompt import Injection, LoRA, writes

__all__ = [
    "DELTA",
    "HEAD_BOUND",
    "HEAD_CLIP",
    "HEAD_ROUNDS",
    "MAX_RATE",
    "Situation",
    "Suggestion",
    "budget_of",
    "changed",
    "head_alone",
    "head_steps",
    "plain_recipe",
    "suggest",
    "why_a_head_stays",
    "why_weaker",
    "with_noise_for",
]

# Delta of a member's policy unless it says otherwise (docs/policy.md).
DELTA = 1e-6

# Rules 2 to 6.
_ROUNDS, _STEPS = 10, 10
_MIN_LOT, _LOT_PART = 64, 3
_CLIP = 0.5
_RATE, _RATE_FROZEN, _RATE_PROMPTED = 10.0, 8.0, 1.0
_MAX_RATIO, _MAX_DRIFT = 2.0, 0.2
# Rule 8. Features have length 1, so the noise of a logit is the noise of one weight.
HEAD_ROUNDS, HEAD_CLIP, HEAD_BOUND = 10, 0.3, 64.0
_HEAD_DRIFT, _HEAD_LEARNT, _HEAD_RATE_A_LABEL, _HEAD_MIN_STEPS, _HEAD_LONGEST = 1.0, 7.0, 12.0, 3, 9_000.0
# Below this share of the way, or of a writer's measured rate, a sentence says that the model hardly moves.
_STAYS = 0.1
# What a job document allows (tacit.job_parts.Training).
MAX_RATE = 1000.0
# Rules 10 to 12.
_PLAIN_ROUNDS, _PLAIN_STEPS, _MAX_EPOCHS = 15, 40, 5
_PROMPTED_RATES: Mapping[str, float] = MappingProxyType(
    {"prompt-tuning": 0.01, "prefix-tuning": 0.01, "p-tuning": 0.01, "lora": 0.001, "bitfit": 0.001}
)
_HEAD_RATE, _HEAD_PLAIN_ROUNDS, _HEAD_EPOCHS = 0.03, 10, 8
# Rules 13 and 14: rates by what is trained, where "up" and "both" are LoRA's. Noise counts at rate 1.
_WRITER_ROUNDS, _WRITER_STEPS, _WRITER_CLIP, _WRITER_NOISE = 4, 3, 1.0, 0.0073
_WRITER_RATES: Mapping[str, float] = MappingProxyType(
    {"up": 6.0, "both": 0.4, "prefix-tuning": 1.0, "prompt-tuning": 1.0}
)
_WRITER_WHY: Mapping[str, str] = MappingProxyType(
    {
        "up": "the best that was tried there",
        "both": "the best that was tried there",
        "prefix-tuning": "from the gradients at the start, there",
        "prompt-tuning": "that of a prefix; a prompt was not measured",
    }
)
_WRITER_PLAIN_ROUNDS, _WRITER_PLAIN_STEPS, _WRITER_BATCH = 5, 24, 8
_WRITER_PLAIN_RATES: Mapping[str, float] = MappingProxyType(
    {"up": 0.005, "both": 0.002, "prefix-tuning": 0.005, "prompt-tuning": 0.005}
)


@dataclass(frozen=True)
class Situation:
    """What a suggestion depends on besides the job's model.

    Attributes:
        examples: rows of the smallest member.
        members: members of a round.
        epsilon: each member's budget for the whole job; None: no noise.
        values: what the job shares as it is; None: unknown, and then nothing is said about noise and signal.
        delta: of the budget.
    """

    examples: int
    members: int
    epsilon: float | None
    values: Values | None = None
    delta: float = DELTA

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"examples must be at least 1, got {self.examples}")
        if self.members < 2:
            raise ValueError(f"members must be at least 2, got {self.members}; a sum of one member hides nothing")
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, got {self.epsilon:g}")


@dataclass(frozen=True)
class Suggestion:
    """A job with proposed numbers.

    Attributes:
        job: the job.
        noise_to_signal: expected in a round; None without noise, or if the number of values is unknown.
        reasons: a sentence for each choice.
    """

    job: JobSpec
    noise_to_signal: float | None
    reasons: tuple[str, ...]


def head_alone(job: JobBody) -> bool:
    """Tell whether a job trains a head on a frozen encoder and nothing else."""
    return isinstance(job.model, PromptedModel) and job.model.caches_features


def suggest(job: JobSpec, situation: Situation) -> Suggestion:
    """Return the job with numbers by the rules of this module. Labels, vocabulary, server and name stay as they are.

    Args:
        job: the operator's job; its mechanism, training and number of rounds are replaced, and rule 6 may freeze its
            embedding.
        situation: what the numbers depend on.

    Raises:
        NotAffordable: no noise is enough for the epsilon.
        ValueError: the job does not allow the numbers, or they would protect less than it does.
    """
    if isinstance(job.model, RvaeModel):
        raise ValueError(
            "model: no written rule proposes numbers for an rvae; choose its noise with `edge_client privacy plan`"
        )
    if situation.epsilon is None:
        if isinstance(job.mechanism, Noised):
            raise ValueError(f"job {job.name} adds noise, and numbers without an epsilon would have none; give one")
        return _plain(job, situation)
    if weaker := why_weaker(job):
        raise ValueError(weaker)
    return _noised(job, situation, situation.epsilon)


def why_weaker(job: JobSpec) -> str:
    """Return why a proposal within the same epsilon would protect less than a job does. Empty if it would not."""
    mechanism = job.mechanism
    if not isinstance(mechanism, Noised):
        return ""
    plan = "choose this mechanism's noise with `edge_client privacy plan`"
    if mechanism.unit != "example":
        return (
            f'unit = "{mechanism.unit}": the written rules propose dp-sgd by example, which at the same epsilon '
            f'protects single rows of a {mechanism.unit} only; {plan}, or set unit = "example" if that is what the job '
            "is to protect"
        )
    if isinstance(mechanism, LaplaceUpdate):
        return (
            "laplace-update: its epsilon holds without a delta, and the written rules propose dp-sgd, which needs one; "
            f'{plan}, or set name = "dp-sgd" if a delta is acceptable'
        )
    if adjacency_of(mechanism) == "replace-one":
        return (
            'sampling = "fixed": this mechanism hides which of two rows a member has, and the written rules propose '
            f"dp-sgd, which at the same epsilon hides only whether it has a row; {plan}, or set sampling = "
            '"poisson" if that is enough'
        )
    return ""


def budget_of(
    job: JobSpec, examples: int, members: int, *, delta: float = DELTA, values: Values | None = None
) -> float | None:
    """Return what a job as written costs its smallest member, which is the budget where nobody names one.

    Args:
        job: the operator's job.
        examples: rows of the smallest member.
        members: of a round.
        delta: of the budget.
        values: what the job shares, for distributed-gaussian alone.

    Returns:
        The epsilon; None without a mechanism.

    Raises:
        ValueError: the job has no formula here, or its formula needs `values`.
    """
    if isinstance(job.mechanism, NoMechanism):
        return None
    if isinstance(job.mechanism, DistributedGaussian) and values is None:
        raise ValueError(
            "what distributed-gaussian costs depends on how many values the job shares, which is known once its bundle "
            "is made; give --epsilon"
        )
    shared = None if values is None else values.shared
    setting = Setting(examples, job.rounds.count, delta, shared, members, max(members, job.rounds.target_members))
    # A trace more, so that the job's own noise still passes.
    return float(cost_of_job(job, setting, []).gate * (1 + 1e-6))


def with_noise_for(job: JobSpec, situation: Situation) -> JobSpec:
    """Return the job with the smallest noise at which the smallest member's empty ledger admits all of its rounds.

    In a job with metrics, that is a member that measures in every round that may be measured.
    A job without a mechanism, or a situation without an epsilon, is returned unchanged.

    Raises:
        NotAffordable: no noise is enough.
        ValueError: the event has no formula here.
    """
    mechanism, epsilon = job.mechanism, situation.epsilon
    if epsilon is None or not isinstance(mechanism, Noised):
        return job
    shared = None if situation.values is None else situation.values.shared
    limit = Limit(epsilon, situation.delta, adjacency_of(mechanism), mechanism.unit)
    most = max(situation.members, job.rounds.target_members)

    def event_at(multiplier: float) -> PrivacyEvent:
        noised = with_multiplier(mechanism, multiplier)
        event = event_of_job(job, noised, situation.examples, values=shared, members=most)
        return event if job.metrics is None else measured_round(event, job.metrics, limit.adjacency)

    multiplier = calibrate(event_at, releases_of(mechanism, job.rounds.count), limit)
    return changed(job, mechanism=with_multiplier(mechanism, multiplier))


def changed(job: JobSpec, **tables: object) -> JobSpec:
    """Return the job with other tables, checked as a whole. Raises DocumentInvalid if they do not fit together."""
    try:
        return JobSpec.model_validate({**{name: getattr(job, name) for name in job.model_fields_set}, **tables})
    except ValidationError as error:
        raise DocumentInvalid(sentence_of(error)) from error


def _noised(job: JobSpec, situation: Situation, epsilon: float) -> Suggestion:
    examples = situation.examples
    if head_alone(job):
        return _noised_head(job, situation, epsilon)
    if writes(job.model):
        return _noised_writer(job, job.model.injection, situation, epsilon)
    lot, why_lot = _lot(examples)
    first = _dp_sgd(job, lot, _rate(job), situation)
    reasons = [
        f"dp-sgd with plain SGD, {_ROUNDS} rounds of {_STEPS} steps, clip {_CLIP:g}: best or within two points of it "
        "wherever it was measured",
        why_lot,
    ]
    values = situation.values
    ratio = _ratio(first, values.shared, situation) if values else None
    if values and ratio is not None and ratio > _MAX_RATIO and values.embedding:
        left = values.shared - values.embedding
        table: dict[str, object] = {"freeze_embedding": True}
        if isinstance(job.model, TextCNNModel):
            table["widths"] = (1, 2)
        frozen = changed(job, model=job.model.model_copy(update=table))
        first = _dp_sgd(frozen, lot, _rate(frozen), situation)
        reasons.append(
            f"the embedding is frozen: with its {values.embedding:,} values the noise would be {ratio:.2g} times as "
            "long as the update"
        )
        ratio = _ratio(first, left, situation)
    reasons.append(_why_noise(first, situation, epsilon))
    return Suggestion(first, ratio, tuple(reasons))


def _lot(examples: int) -> tuple[int, str]:
    """Rule 3."""
    lot = min(examples, max(_MIN_LOT, -(-examples // _LOT_PART)))
    if lot * _LOT_PART >= examples > _MIN_LOT * _LOT_PART:
        return lot, f"lots of {lot}: a third of {examples} rows"
    return lot, f"lots of {lot}, because members have only {examples} rows"


def _why_noise(job: JobSpec, situation: Situation, epsilon: float) -> str:
    return (
        f"noise {_dp(job).noise_multiplier:g}: the smallest with which {situation.examples} rows pass epsilon "
        f"{epsilon:g} at delta {situation.delta:g}"
    )


def _noised_writer(job: JobSpec, injection: Injection, situation: Situation, epsilon: float) -> Suggestion:
    """Rule 13."""
    job = _averaged(job)
    lot, why_lot = _lot(situation.examples)
    mechanism = DpSgd(noise_multiplier=1.0, clip=_WRITER_CLIP, lot=lot, steps=_WRITER_STEPS)
    trained = _trained_by(injection, noised=True)
    highest = _WRITER_RATES[trained]
    training = _writers_training(job, "sgd", highest)
    noised = with_noise_for(_with(job, mechanism, training, _WRITER_ROUNDS), situation)
    rate = _calmed(noised, highest, situation, _WRITER_NOISE * highest)
    found = changed(noised, training=training.model_copy(update={"learning_rate": rate}))
    reasons: tuple[str, ...] = (
        f"dp-sgd with plain SGD, {_WRITER_ROUNDS} rounds of {_WRITER_STEPS} steps, clip {_WRITER_CLIP:g}: measured "
        "with ten members of 4,200 rows at epsilon 8, and nowhere else",
        why_lot,
        f"rate {rate:g}: {_WRITER_WHY[trained]}"
        if rate == highest
        else f"rate {rate:g}: with the noise there it would be {highest:g} ({_WRITER_WHY[trained]}), and this noise is "
        "larger",
        _why_noise(found, situation, epsilon),
    )
    if rate < _STAYS * highest:
        reasons += (
            f"with {situation.examples} examples and {situation.members} members, noise leaves so small a rate that "
            "the model hardly moves and the members' budget buys little: more examples, more members or a larger "
            "epsilon would move it",
        )
    shared = None if situation.values is None else situation.values.shared
    return Suggestion(found, None if shared is None else _ratio(found, shared, situation), reasons)


def _trained_by(injection: Injection, *, noised: bool) -> str:
    """Return what a model that writes trains: a key of its rates."""
    if isinstance(injection, LoRA):
        # What a bundle chooses if the job does not say.
        return injection.train or ("up" if noised else "both")
    return injection.name


def _writers_training(job: JobBody, optimiser: Literal["adamw", "sgd"], rate: float) -> Training:
    """Return numbers by rules 13 and 14, and what of the job's own decides memory and not the result."""
    own = job.training
    return Training(
        optimiser=optimiser,
        learning_rate=rate,
        schedule=Schedule(decay="cosine"),
        precision=own.precision,
        microbatch=own.microbatch,
        checkpointing=own.checkpointing,
    )


def _noised_head(job: JobSpec, situation: Situation, epsilon: float) -> Suggestion:
    """Rule 8."""
    job = _roomy(_averaged(job))

    def noised(steps: int, rate: float) -> JobSpec:
        mechanism = DpSgd(noise_multiplier=1.0, clip=HEAD_CLIP, lot=situation.examples, steps=steps)
        training = Training(optimiser="sgd", learning_rate=rate)
        return with_noise_for(_with(job, mechanism, training, HEAD_ROUNDS), situation)

    short = _dp(noised(1, 1.0))
    sizes = (short.noise_multiplier, situation.examples, situation.members, len(job.labels))
    steps, rate = head_steps(*sizes)
    found = noised(steps, rate)
    drift = rate * _drift(_dp(found), HEAD_ROUNDS, situation.members)
    reasons: tuple[str, ...] = (
        f"a head alone: {HEAD_ROUNDS} rounds of {steps} steps on all rows, clip {HEAD_CLIP:g}",
        f"rate {rate:g}: the noise of all rounds moves a logit by a standard deviation of {drift:.2g}",
        _why_noise(found, situation, epsilon),
    )
    if stays := why_a_head_stays(*sizes):
        reasons += (stays,)
    shared = None if situation.values is None else situation.values.shared
    return Suggestion(found, None if shared is None else _ratio(found, shared, situation), reasons)


def _roomy(job: JobSpec) -> JobSpec:
    """Return the job with a coordinate bound that leaves room for a round of a head over features of length 1."""
    bound = max(job.aggregation.coordinate_bound, HEAD_BOUND)
    return changed(job, aggregation=job.aggregation.model_copy(update={"coordinate_bound": bound}))


def head_steps(multiplier: float, examples: int, members: int, labels: int) -> tuple[int, float]:
    """Return the steps of a round and the rate by rule 8.

    Args:
        multiplier: noise with which HEAD_ROUNDS rounds of one step on all rows keep the budget. Noise grows with the
            square root of the steps, so that a way costs the same noise in any number of them.
        examples: rows of the smallest member.
        members: of a round.
        labels: of the job.
    """
    unit = _unit(multiplier, examples, members)
    way = min(_HEAD_LONGEST, _HEAD_DRIFT / unit * _share_of_way(unit, labels))
    far = way / (HEAD_CLIP * HEAD_ROUNDS)
    steps = max(_HEAD_MIN_STEPS, math.ceil(far / min(MAX_RATE, _HEAD_RATE_A_LABEL * labels)))
    return steps, float(f"{far / steps:.2g}")


def why_a_head_stays(multiplier: float, examples: int, members: int, labels: int) -> str:
    """Return a reason if rule 8 leaves so little of the way that training hardly moves a head. Empty otherwise.

    Args:
        multiplier, examples, members, labels: as for `head_steps`.
    """
    if _share_of_way(_unit(multiplier, examples, members), labels) >= _STAYS:
        return ""
    return (
        f"with {labels} labels, {examples} examples and {members} members, noise outweighs what can be learnt, so the "
        "head stays near its start and the members' budget buys little: more examples, more members, a larger epsilon "
        "or fewer labels would move it"
    )


def _unit(multiplier: float, examples: int, members: int) -> float:
    """Return the noise of a logit for each unit of the way."""
    return multiplier / (examples * math.sqrt(members * HEAD_ROUNDS))


def _share_of_way(unit: float, labels: int) -> float:
    return 1 / (1 + (_HEAD_LEARNT * labels * unit) ** 2)


def _drift(mechanism: DpSgd, rounds: int, members: int) -> float:
    """Return the standard deviation by which the noise of all steps moves a value of the mean at rate 1."""
    each = mechanism.noise_multiplier * mechanism.clip / (mechanism.lot * math.sqrt(members))
    return each * math.sqrt(mechanism.steps * rounds)


def _dp_sgd(job: JobSpec, lot: int, rate: float, situation: Situation) -> JobSpec:
    job = _averaged(job)
    mechanism = DpSgd(noise_multiplier=1.0, clip=_CLIP, lot=lot, steps=_STEPS)
    # float32, because dp-sgd bounds a gradient in it, and no adjusted logits, which dp-sgd does not allow.
    training = Training(batch=min(256, max(lot, 1)), optimiser="sgd", learning_rate=rate)
    noised = with_noise_for(_with(job, mechanism, training, _ROUNDS), situation)
    calmed = _calmed(noised, rate, situation, _MAX_DRIFT)
    return changed(noised, training=training.model_copy(update={"learning_rate": calmed}))


def _averaged(job: JobSpec) -> JobSpec:
    """Return the job without fedprox, whose steps have no accounting under dp-sgd."""
    return changed(job, method=FedAvg()) if isinstance(job.method, FedProx) else job


def _dp(job: JobSpec) -> DpSgd:
    assert isinstance(job.mechanism, DpSgd)  # noqa: S101  made by this module
    return job.mechanism


def _calmed(job: JobSpec, rate: float, situation: Situation, most: float) -> float:
    """Return a rate at which the noise of all steps moves a value of the mean by `most`; at most `rate`."""
    drift = _drift(_dp(job), job.rounds.count, situation.members)
    return min(rate, float(f"{most / drift:.2g}"))


def plain_recipe(job: JobBody, examples: int) -> tuple[Training, int]:
    """Return what a member trains by in a round without noise, and the number of rounds, by rules 10 to 12 and 14.

    Args:
        job: has the model.
        examples: rows of the smallest member.
    """
    if head_alone(job):
        return Training(epochs=_HEAD_EPOCHS, batch=256, learning_rate=_HEAD_RATE), _HEAD_PLAIN_ROUNDS
    if writes(job.model):
        batch = min(_WRITER_BATCH, examples)
        epochs = min(_MAX_EPOCHS, max(1, round(_WRITER_PLAIN_STEPS * batch / examples)))
        rate = _WRITER_PLAIN_RATES[_trained_by(job.model.injection, noised=False)]
        training = _writers_training(job, "adamw", rate)
        return training.model_copy(update={"batch": batch, "epochs": epochs}), _WRITER_PLAIN_ROUNDS
    batch = min(32, examples)
    epochs = min(_MAX_EPOCHS, max(1, round(_PLAIN_STEPS * batch / examples)))
    return Training(epochs=epochs, batch=batch, learning_rate=_plain_rate(job)), _PLAIN_ROUNDS


def _plain(job: JobSpec, situation: Situation) -> Suggestion:
    training, rounds = plain_recipe(job, situation.examples)
    unprotected = "no noise: the job has no differential privacy guarantee"
    if head_alone(job):
        reasons: tuple[str, ...] = (
            f"a head alone: Adam at {training.learning_rate:g}, {rounds} rounds of {training.epochs} epochs",
            unprotected,
        )
        return Suggestion(_with(_roomy(job), NoMechanism(), training, rounds), None, reasons)
    steps = round(training.epochs * situation.examples / training.batch)
    best = f"at {training.learning_rate:g}, the rate that was best for this kind of model"
    reasons = (
        f"AdamW {best}, in rounds of {_WRITER_PLAIN_STEPS} steps" if writes(job.model) else f"Adam {best}",
        f"{rounds} rounds of {training.epochs} epochs: about {steps} steps of {training.batch} rows",
        unprotected,
    )
    return Suggestion(_with(job, NoMechanism(), training, rounds), None, reasons)


def _with(job: JobSpec, mechanism: Mechanism, training: Training, rounds: int) -> JobSpec:
    return changed(
        job,
        mechanism=mechanism,
        training=training,
        rounds=job.rounds.model_copy(update={"count": rounds}),
    )


def _rate(job: JobSpec) -> float:
    if isinstance(job.model, PromptedModel):
        return _RATE_PROMPTED
    return _RATE_FROZEN if job.model.freeze_embedding else _RATE


def _plain_rate(job: JobBody) -> float:
    match job.model:
        case PromptedModel() as model:
            cloze = model.task.name == "cloze"
            return 0.1 if cloze and model.injection.name == "prompt-tuning" else _PROMPTED_RATES[model.injection.name]
        case TransformerModel(injection=None):
            return 0.0001
    return 0.001


def _ratio(job: JobSpec, shared: int, situation: Situation) -> float | None:
    mechanism = job.mechanism
    if not isinstance(mechanism, Noised):
        return None
    return noise_to_signal(mechanism, shared, situation.examples, situation.members)
