"""Tries recipes of a job, axis by axis around the best so far, on all cores and within a time limit.

Order: the job as written and the suggestion; then the axes (rate, clip or epochs, lot, steps, method), each around the
best so far, on the first seed; then the best few on the other seeds. The winner is chosen among the recipes with the
most seeds, by mean accuracy on validation rows. The test rows are reported for the winner and the job as written.

The search itself is not accounted for. So it wants public rows: on private rows the tuned numbers depend on them.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Final, Protocol

from learning.accounting.calibration import NotAffordable
from learning.text.examples import Example
from simulation.engines import WorkersDied
from simulation.kept_features import SharedFeatures
from simulation.server import Server
from simulation.suggestion import MAX_RATE, Situation, changed, head_alone, with_noise_for
from simulation.trial import Divided, Outcome, run_trial
from tacit.job import JobSpec
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, NoMechanism
from tacit.method import FedAvg, FedProx

__all__ = ["Candidate", "NothingTried", "Plan", "Scored", "Sweep", "axes_of", "best_of", "described", "sweep"]

# Recipes that are repeated on the other seeds, and the share of the time that the axes may take.
FEW: Final = 3
_AXES_SHARE: Final = 0.65


class NothingTried(RuntimeError):
    """No recipe was measured within the time, or none works; the text says what to do."""


@dataclass(frozen=True)
class Candidate:
    """A recipe to try: the job with its numbers, the bundle that it starts from, and where the recipe comes from."""

    spec: JobSpec
    bundle: Path
    origin: str

    @property
    def key(self) -> str:
        """The job as text: a job with a table of descriptions has no hash."""
        return self.spec.model_dump_json()


@dataclass(frozen=True)
class Plan:
    """What a sweep needs.

    Attributes:
        divided: the rows.
        members: each member's rows, for each seed.
        seeds: of the trials; the first one decides the axes.
        situation: gives the noise of each recipe.
        server: the coordinator's arithmetic.
        until: latest time, by time.time(), which all processes share.
        cores: processes that train; 1 is this process.
        features: what a frozen encoder computed of the rows before the sweep. Each process begins with a copy.
    """

    divided: Divided
    members: tuple[tuple[tuple[Example, ...], ...], ...]
    seeds: tuple[int, ...]
    situation: Situation
    server: Server
    until: float
    cores: int = 1
    features: SharedFeatures = field(default_factory=SharedFeatures)


@dataclass
class Scored:
    """A candidate with its outcomes by seed, or why it does not work."""

    candidate: Candidate
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    problem: str | None = None

    def validation(self, rows: int) -> float:
        """Mean accuracy over the seeds on the validation part of `rows` rows."""
        return sum(each.validation for each in self.outcomes.values()) / (rows * len(self.outcomes))

    def test(self, rows: int) -> float:
        """Mean accuracy over the seeds on the test part of `rows` rows."""
        return sum(each.test for each in self.outcomes.values()) / (rows * len(self.outcomes))


@dataclass(frozen=True)
class Sweep:
    """All tried recipes, in the order of trying.

    Attributes:
        tried: the recipes.
        trials: how many trials ended, each of a recipe on a seed.
        planned: how many there were to be. Of axes that nobody came to: their recipes around the best one then.
    """

    tried: tuple[Scored, ...]
    trials: int
    planned: int

    @property
    def cut(self) -> bool:
        """Whether the time limit cut the sweep short."""
        return self.trials < self.planned


class Progress(Protocol):
    """Told about trials as they end."""

    def __call__(self, done: int, planned: int, best: float | None) -> None: ...


def described(spec: JobSpec) -> str:
    """Return a recipe in a line: `dp-sgd noise 5.46, clip 0.5, lot 120, 10 x 10 steps, sgd 8`."""
    training, mechanism, rounds = spec.training, spec.mechanism, spec.rounds.count
    match mechanism:
        case DpSgd():
            said = (
                f"dp-sgd noise {mechanism.noise_multiplier:g}, clip {mechanism.clip:g}, lot {mechanism.lot}, "
                f"{rounds} x {mechanism.steps} steps"
            )
        case GaussianUpdate() | DistributedGaussian():
            said = f"{mechanism.name} noise {mechanism.noise_multiplier:g}, clip {mechanism.clip:g}, {rounds} rounds"
        case LaplaceUpdate():
            said = f"laplace-update epsilon {mechanism.epsilon:g}, bound {mechanism.bound:g}, {rounds} rounds"
        case _:
            said = f"no noise, {rounds} x {training.epochs} epochs"
    said += f", {training.optimiser} {training.learning_rate:g}"
    if not isinstance(spec.method, FedAvg):
        said += f", {spec.method.name}"
    return said + (", frozen embedding" if spec.model.freeze_embedding else "")


def axes_of() -> tuple[Callable[[JobSpec, int], list[JobSpec]], ...]:
    """Return the axes: functions from a job and the smallest member's rows to the job's neighbours."""
    return _rates, _clips, _lots, _steps, _methods


def best_of(tried: Sequence[Scored], rows: int) -> Scored:
    """Return the winner: most seeds first, then validation accuracy, then the order of trying.

    Raises:
        NothingTried: there is no outcome.
    """
    measured = [each for each in tried if each.outcomes]
    if not measured:
        problems = [each.problem for each in tried if each.problem]
        why = f": {problems[0]}" if problems else " within the time limit; give more --minutes, or a smaller job"
        raise NothingTried(f"no recipe could be measured{why}")
    most = max(len(each.outcomes) for each in measured)
    return max((each for each in measured if len(each.outcomes) == most), key=lambda each: each.validation(rows))


def sweep(plan: Plan, first: Sequence[Candidate], progress: Progress, *, search: bool = True) -> Sweep:
    """Try recipes until the axes are searched or the time is over.

    Args:
        plan: rows, seeds and limits.
        first: recipes to begin with, each once; with none of them measured there is nothing to search around.
        progress: told after each trial.
        search: whether to try the axes; without, only `first` is tried on all seeds.

    Raises:
        WorkersDied: a process died.
    """
    began, rows = time.time(), len(plan.divided.validation)
    axes_end = began + _AXES_SHARE * (plan.until - began)
    # Of equal recipes the earlier one counts: the suggestion may be the job as written.
    earliest = {each.key: each for each in reversed(first)}
    first = [each for each in first if earliest[each.key] is each]
    scored = {each.key: Scored(each) for each in first}
    done, ended = itertools.count(1), 0
    planned = len(first) * len(plan.seeds)

    def best() -> Scored | None:
        measured = [each for each in scored.values() if plan.seeds[0] in each.outcomes]
        return max(measured, key=lambda each: each.outcomes[plan.seeds[0]].validation, default=None)

    with _pool(plan) as run:

        def measure(calls: Sequence[tuple[Scored, int]], end: float) -> None:
            nonlocal ended
            for (each, seed), answer in run([(each.candidate, seed, end) for each, seed in calls], calls):
                if isinstance(answer, Outcome):
                    each.outcomes[plan.seeds[seed]] = answer
                elif answer is not None:
                    each.problem = answer
                ended += answer is not None
                now = best()
                accuracy = None if now is None else now.outcomes[plan.seeds[0]].validation / rows
                progress(next(done), max(planned, 1), accuracy)

        measure([(each, 0) for each in scored.values()], plan.until)
        for axis in axes_of() if search else ():
            around = best()
            if around is None:
                break
            fresh = [each for each in _neighbours(axis, around.candidate, plan.situation) if each.key not in scored]
            planned += len(fresh)
            if time.time() > axes_end:
                continue
            scored |= {each.key: Scored(each) for each in fresh}
            measure([(scored[each.key], 0) for each in fresh], axes_end)
        few = sorted(
            (each for each in scored.values() if each.outcomes),
            key=lambda each: -each.outcomes[plan.seeds[0]].validation,
        )[:FEW]
        few += [scored[each.key] for each in first if scored[each.key].outcomes and scored[each.key] not in few]
        # Of the first ones, those that gave nothing on the first seed are not tried on others.
        planned += (len(few) - len(first)) * (len(plan.seeds) - 1)
        # Seed by seed, so that an early end leaves recipes that were tried on equally many.
        for seed in range(1, len(plan.seeds)):
            measure([(each, seed) for each in few], plan.until)
    return Sweep(tuple(scored.values()), ended, planned)


# ---- axes -----------------------------------------------------------------------------------------------------------


def _neighbours(
    axis: Callable[[JobSpec, int], list[JobSpec]], around: Candidate, situation: Situation
) -> Iterator[Candidate]:
    for spec in axis(around.spec, situation.examples):
        try:
            yield Candidate(with_noise_for(spec, situation), around.bundle, axis.__name__.strip("_"))
        except (NotAffordable, ValueError):
            continue


def _rates(job: JobSpec, _rows: int) -> list[JobSpec]:
    # What a head may go is known well (`simulation.suggestion`, rule 8), so its rates lie closer.
    steps = (0.5, 2.0, 4.0) if head_alone(job) else (0.1, 0.3, 3.0)
    rates = sorted({min(_max_rate(job), float(f"{job.training.learning_rate * by:.3g}")) for by in steps})
    return _valid(job, [{"training": job.training.model_copy(update={"learning_rate": rate})} for rate in rates])


def _max_rate(job: JobSpec) -> float:
    """Return the largest rate that is tried. A head over features of length 1 takes rates in the hundreds."""
    return MAX_RATE if head_alone(job) and job.training.optimiser == "sgd" else 10.0


def _clips(job: JobSpec, _rows: int) -> list[JobSpec]:
    """Vary the clip with clip times rate held; without a mechanism that clips, the epochs."""
    mechanism, training = job.mechanism, job.training
    if isinstance(mechanism, NoMechanism):
        return _valid(job, [{"training": training.model_copy(update={"epochs": n})} for n in {1, 2 * training.epochs}])
    key = "bound" if isinstance(mechanism, LaplaceUpdate) else "clip"
    found = []
    for by in (0.3, 3.0):
        clip = float(f"{getattr(mechanism, key) * by:.3g}")
        tables: dict[str, object] = {"mechanism": mechanism.model_copy(update={key: clip})}
        if isinstance(mechanism, DpSgd) and training.optimiser == "sgd":
            rate = min(_max_rate(job), float(f"{training.learning_rate / by:.3g}"))
            tables["training"] = training.model_copy(update={"learning_rate": rate})
        found.append(tables)
    return _valid(job, found)


def _lots(job: JobSpec, rows: int) -> list[JobSpec]:
    if not isinstance(job.mechanism, DpSgd | GaussianUpdate):
        return []
    lots = {max(1, min(rows, lot)) for lot in (job.mechanism.lot // 2, 2 * job.mechanism.lot, rows)}
    return _valid(job, [{"mechanism": job.mechanism.model_copy(update={"lot": lot})} for lot in sorted(lots)])


def _steps(job: JobSpec, _rows: int) -> list[JobSpec]:
    rounds = job.rounds
    found: list[dict[str, object]] = [
        {"rounds": rounds.model_copy(update={"count": count})}
        for count in (max(1, rounds.count // 2), 2 * rounds.count)
    ]
    if isinstance(job.mechanism, DpSgd):
        steps = job.mechanism.steps
        found += [
            {"mechanism": job.mechanism.model_copy(update={"steps": many})} for many in {max(1, steps // 2), 2 * steps}
        ]
    return _valid(job, found)


def _methods(job: JobSpec, _rows: int) -> list[JobSpec]:
    # Under dp-sgd no other method has an accounting, and the job's own check says so.
    other = FedProx() if isinstance(job.method, FedAvg) else FedAvg()
    return _valid(job, [{"method": other}])


def _valid(job: JobSpec, changes: Sequence[dict[str, object]]) -> list[JobSpec]:
    found = []
    for tables in changes:
        try:
            found.append(changed(job, **tables))
        except ValueError:
            continue
    return found


# ---- processes ------------------------------------------------------------------------------------------------------

_Call = tuple[Candidate, int, float]
_Answer = Outcome | str | None


class _Run(Protocol):
    def __call__(
        self, calls: Sequence[_Call], named: Sequence[tuple[Scored, int]]
    ) -> Iterator[tuple[tuple[Scored, int], _Answer]]: ...


@contextmanager
def _pool(plan: Plan) -> Iterator[_Run]:
    """Yield a function that runs calls and yields their answers as they come."""
    if plan.cores == 1:

        def here(
            calls: Sequence[_Call], named: Sequence[tuple[Scored, int]]
        ) -> Iterator[tuple[tuple[Scored, int], _Answer]]:
            for call, name in zip(calls, named, strict=True):
                yield name, _tried(plan, *call)

        yield here
        return
    # Spawned, because a forked copy of torch's threads hangs.
    with ProcessPoolExecutor(plan.cores, get_context("spawn"), initializer=_begin, initargs=(plan,)) as pool:

        def apart(
            calls: Sequence[_Call], named: Sequence[tuple[Scored, int]]
        ) -> Iterator[tuple[tuple[Scored, int], _Answer]]:
            try:
                waiting: dict[Future[_Answer], tuple[Scored, int]] = {
                    pool.submit(_work, call): name for call, name in zip(calls, named, strict=True)
                }
                while waiting:
                    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                    for each in done:
                        yield waiting.pop(each), each.result()
            except BrokenProcessPool:
                raise WorkersDied(
                    "a process died while it tried a recipe; look for memory that ran out, and use fewer cores"
                ) from None

        try:
            yield apart
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_plan: Plan | None = None


def _begin(plan: Plan) -> None:
    global _plan  # noqa: PLW0603  one for each process
    _plan = plan


def _work(call: _Call) -> _Answer:
    if _plan is None:
        raise RuntimeError("a worker has no plan")
    return _tried(_plan, *call)


def _tried(plan: Plan, candidate: Candidate, seed: int, until: float) -> _Answer:
    """Run a trial. Returns None if the time is over, and a sentence if the recipe does not work."""
    from learning.training.local import TrainingCancelled, TrainingDiverged
    from learning.training.update import TrainingLost

    if time.time() >= until:
        return None
    try:
        return run_trial(
            candidate.bundle,
            candidate.spec,
            plan.members[seed],
            plan.divided,
            plan.seeds[seed],
            plan.server,
            cancelled=lambda: time.time() >= until,
            features=plan.features,
        )
    except TrainingCancelled:
        return None
    except (TrainingLost, TrainingDiverged, ValueError) as error:
        return str(error)
