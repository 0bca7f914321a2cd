"""Tries a job offline: prepares rows, members and recipes, runs the sweep, and reports it beside the baselines.

`coordinator job try` is this with options and a table. Everything works on this machine and asks nobody.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from learning.accounting.calibration import NotAffordable
from learning.accounting.expected_noise import Values, expected_noise
from learning.backbones.collection import Collection
from learning.text.data import read_data
from learning.text.examples import DataInvalid, Example, check_dialogues, check_labels, check_pairs
from learning.training.outcome import TrainingCancelled, TrainingDiverged, TrainingLost
from simulation.kept_features import SharedFeatures
from simulation.own_trial import OwnReport, try_own
from simulation.server import Server
from simulation.suggestion import (
    DELTA,
    Situation,
    budget_of,
    changed,
    head_alone,
    suggest,
    why_weaker,
    with_noise_for,
)
from simulation.sweep import Candidate, Plan, Progress, Scored, Sweep, best_of, described, sweep
from simulation.trial import Divided, PartitionKind, Rows, RowsUnfit, column_of, deal, divide, majority, run_trial
from simulation.verdict import Verdict, verdict
from simulation.word_counts import predicted
from tacit.job import JobSpec
from tacit.job_parts import Training
from tacit.mechanism import DpSgd, NoMechanism
from tacit.method import FedAvg, keeps_anything, keeps_state
from tacit.model import RvaeModel
from tacit.prompt import Cloze, Generate, Head, NoInjection, PromptedModel, reads_pairs, writes
from tacit.rounding import rounded_up

__all__ = ["Asked", "Baseline", "Report", "Tried", "check_job", "check_rows", "read_rows", "try_job", "try_kept"]


@dataclass(frozen=True)
class Asked:
    """What a person asked for.

    Attributes:
        members: number of members; None with partition `column`, whose values make them.
        epsilon: each member's budget for the whole job; None: what the job as written costs, or no noise.
        delta: of the budget.
        partition, alpha: as in `deal`.
        minutes: limit of the sweep.
        cores: processes that train.
        seeds: of partition, training and noise.
        validation, test: shares of the rows that no member gets.
        search: whether to search around the job as written and the suggestion.
    """

    members: int | None
    epsilon: float | None
    delta: float = DELTA
    partition: PartitionKind = "even"
    alpha: float = 1.0
    minutes: float = 10.0
    cores: int = 1
    seeds: tuple[int, ...] = (0, 1)
    validation: float = 0.2
    test: float = 0.2
    search: bool = True


@dataclass(frozen=True)
class Tried:
    """One recipe of the report: accuracies are means over its seeds."""

    recipe: str
    origin: str
    validation: float | None
    seeds: int
    noise_to_signal: float | None
    seconds: float | None
    problem: str | None


@dataclass(frozen=True)
class Baseline:
    """Accuracy of something that is not a job."""

    name: str
    validation: float
    test: float


@dataclass(frozen=True)
class Report:
    """What a trial found.

    Attributes:
        best: the tuned job.
        tried: all recipes, best first.
        baselines: majority class, word counts, and for a job on a frozen encoder a head alone, without and with noise.
        verdicts: about the job as written, if it could run within the epsilon, and about the tuned job.
        members: rows of each member on the first seed.
        rows: rows for training, validation and test.
        epsilon: the budget that the noise keeps; None without noise.
        trials, planned: how many trials ended, and how many there were to be.
    """

    best: JobSpec
    tried: tuple[Tried, ...]
    baselines: tuple[Baseline, ...]
    verdicts: tuple[Verdict, ...]
    members: tuple[int, ...]
    rows: tuple[int, int, int]
    epsilon: float | None
    delta: float
    trials: int
    planned: int

    @property
    def cut(self) -> bool:
        """Whether the time limit cut the search short."""
        return self.trials < self.planned

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "best": described(self.best),
            "tried": [vars(each) for each in self.tried],
            "baselines": [vars(each) for each in self.baselines],
            "verdicts": [{**vars(each), "sentence": each.sentence} for each in self.verdicts],
            "members": list(self.members),
            "rows": dict(zip(("training", "validation", "test"), self.rows, strict=True)),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "cut_by_time": self.cut,
            "trials": self.trials,
            "trials_planned": self.planned,
        }


def check_job(job: JobSpec) -> None:
    """Refuse a job that cannot be tried. Raises ValueError with a sentence."""
    if isinstance(job.model, RvaeModel):
        raise ValueError(
            "an rvae has no accuracy to try it by; measure a classifier on its texts (coordinator finetune)"
        )
    if writes(job.model):
        raise ValueError(
            "model.task: a model that writes has no accuracy to compare, which a trial reports; bundle the job, and "
            "measure its versions with `coordinator evaluate`"
        )
    if isinstance(job.mechanism, DpSgd) and job.mechanism.unit == "person":
        raise ValueError(
            'unit = "person": the rows are read without persons, so this would play another mechanism; try the job '
            'with unit = "example"'
        )
    if keeps_anything(job.method) and not keeps_state(job.method):
        raise ValueError(
            f"method {job.method.name} makes private rows anew in each round, and a trial measures what members keep; "
            "try the job with fedvocab, lg-fedavg, fedavg or fedprox"
        )
    if keeps_anything(job.method) and job.aggregation.groups is not None:
        raise ValueError("aggregation.groups: a trial of a job whose members keep a part makes one sum; leave it out")


def check_rows(examples: Sequence[Example], job: JobSpec, *, dialogue_columns: bool = True) -> None:
    """Check that rows have what the job learns from: its labels and both texts of a pair, or a response.

    Raises:
        DataInvalid: some have not.
    """
    if isinstance(job.model, PromptedModel) and isinstance(job.model.task, Generate):
        check_dialogues(examples, job.model.task.template.roles, dialogue_columns=dialogue_columns)
    else:
        check_labels(examples, job.labels)
        if reads_pairs(job.model):
            check_pairs(examples)


def read_rows(
    path: Path,
    job: JobSpec,
    *,
    text: str,
    label: str,
    text_b: str | None = None,
    person: str | None = None,
    prompt: str | None = None,
    response: str | None = None,
    messages: str | None = None,
    column: str | None = None,
) -> Rows:
    """Read rows with the person of each, if a column names it, and a column that members are made of.

    Rows have a label of the job, or if its model writes a dialogue.

    Raises:
        DataInvalid: the file cannot be read, a column is missing, or a label is not the job's.
    """
    if writes(job.model):
        turns: dict[str, Any] = {"prompt": prompt, "response": response, "messages": messages}
        read = read_data(path, text=text, label=None, person=person, **turns, rows_for="dialogues")
        check_rows(read.examples, job, dialogue_columns=read.dialogue_columns)
        sites = [] if column is None else _sites(path, column, text, turns)
        return Rows(tuple(read.examples), () if column is None else column_of(sites, column))
    examples = read_data(path, text=text, label=label, text_b=text_b, person=person).examples
    check_rows(examples, job)
    values: tuple[str, ...] = ()
    if column is not None:
        values = tuple(str(each.label) for each in _sites(path, column, text, {}))
        if len(values) != len(examples):
            raise DataInvalid(f"{path.name}: {len(values)} of {len(examples)} rows have a {column}; fill the column")
    return Rows(tuple(examples), values)


def _sites(path: Path, column: str, text: str, turns: Mapping[str, Any]) -> list[Example]:
    """Read the rows with the value of the column in place of the label. Raises DataInvalid."""
    try:
        return read_data(path, text=text, label=column, **turns).examples
    except DataInvalid as error:
        # The label's option does not name this column.
        raise DataInvalid(str(error).replace("with --label", "with --column")) from None


def try_kept(
    job: JobSpec,
    folder: Path,
    rows: Rows,
    asked: Asked,
    server: Server,
    *,
    report: Callable[[str], None] = lambda _: None,
    collection: Collection | None = None,
) -> OwnReport:
    """Try a job whose members keep a part of the model. Nothing is tuned. Arguments as for `try_job`.

    Raises:
        RowsUnfit: the rows do not suffice.
        ValueError: the job cannot be tried, or its bundle cannot be made.
    """
    from export.bundle import JobBundle, make_job_bundle, read_job_bundle

    until = time.time() + 60 * asked.minutes
    torch.set_num_threads(1)
    check_job(job)
    # Nothing is chosen, so no rows are kept to choose by.
    divided = divide(rows, validation=0.0, test=asked.test, seed=asked.seeds[0])
    dealt = deal(divided.train, asked.partition, asked.members or 0, asked.alpha, asked.seeds[0])
    if len(dealt) < job.rounds.min_members:
        raise RowsUnfit(_too_few(job, len(dealt)))

    def late() -> bool:
        return time.time() > until

    def made(spec: JobSpec, out: Path) -> JobBundle:
        make_job_bundle(spec, folder, out, report=report, collection=collection)
        return read_job_bundle(out)

    return try_own(job, divided, dealt, asked.seeds, made, server, late=late, cores=asked.cores, report=report)


def _too_few(job: JobSpec, members: int) -> str:
    return (
        f"job {job.name} needs {job.rounds.min_members} members (rounds.min_members) and there are {members}; give "
        "more --members, or lower it in the job"
    )


def try_job(
    job: JobSpec,
    folder: Path,
    rows: Rows,
    asked: Asked,
    server: Server,
    *,
    progress: Progress = lambda done, planned, best: None,
    report: Callable[[str], None] = lambda _: None,
    collection: Collection | None = None,
) -> Report:
    """Try a job, and tune it.

    Args:
        job: the operator's job.
        folder: base of its relative paths.
        rows: labelled rows.
        asked: what to try.
        server: the coordinator's arithmetic.
        progress: told after each trial.
        report: called with sentences about what was found on the way.
        collection: the operator's backbones, which `model.base` may name.

    Raises:
        RowsUnfit: the rows do not suffice.
        NotAffordable: no noise keeps the epsilon.
        NothingTried: nothing could be measured within the time.
        ValueError: the job cannot be tried, or its bundle cannot be made.
    """
    until = time.time() + 60 * asked.minutes
    # Trials share the machine, one thread each.
    torch.set_num_threads(1)
    check_job(job)
    divided = divide(rows, validation=asked.validation, test=asked.test, seed=asked.seeds[0])
    dealt = tuple(deal(divided.train, asked.partition, asked.members or 0, asked.alpha, seed) for seed in asked.seeds)
    members, smallest = len(dealt[0]), min(len(part) for crew in dealt for part in crew)
    if members < job.rounds.min_members:
        raise RowsUnfit(_too_few(job, members))
    with tempfile.TemporaryDirectory(prefix="tacit-try-") as scratch:
        made = partial(_bundle, folder=folder, collection=collection)
        start, values = made(job, out=Path(scratch) / "job", report=report)
        epsilon = asked.epsilon or budget_of(job, smallest, members, delta=asked.delta, values=values)
        situation = Situation(smallest, members, epsilon, values, asked.delta)
        counted = {start: values}
        baselines = _baselines(divided)
        features = SharedFeatures()
        heads = _Heads(
            job, made, Path(scratch) / "head", situation, divided, dealt[0], asked, server, until, report, features
        )
        baselines += tuple(heads.measured())
        first = list(_first(job, made, start, situation, Path(scratch), counted, report))
        plan = Plan(divided, dealt, asked.seeds, situation, server, until, asked.cores, features)
        found = sweep(plan, first, progress, search=asked.search)
    best = best_of(found.tried, len(divided.validation))
    return Report(
        best=best.candidate.spec,
        tried=tuple(_shown(each, len(divided.validation), counted, situation) for each in _ordered(found, divided)),
        baselines=baselines,
        verdicts=tuple(_verdicts(found, best, divided)),
        members=tuple(len(part) for part in dealt[0]),
        rows=(len(divided.train.examples), len(divided.validation), len(divided.test)),
        epsilon=epsilon,
        delta=asked.delta,
        trials=found.trials,
        planned=found.planned,
    )


_WRITTEN, _SUGGESTED = "as written", "suggested"


class _MakesBundle(Protocol):
    def __call__(self, job: JobSpec, *, out: Path, report: Callable[[str], None] = ...) -> tuple[Path, Values]: ...


def _bundle(
    job: JobSpec,
    *,
    folder: Path,
    collection: Collection | None,
    out: Path,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[Path, Values]:
    from export.bundle import make_job_bundle, read_job_bundle

    document = make_job_bundle(job, folder, out, report=report, collection=collection)
    return out, Values.of(document, read_job_bundle(out).manifest)


def _first(
    job: JobSpec,
    made: _MakesBundle,
    start: Path,
    situation: Situation,
    scratch: Path,
    counted: dict[Path, Values],
    report: Callable[[str], None],
) -> Iterator[Candidate]:
    """Yield the job as written, with the noise that the budget needs, and the suggestion if it protects no less."""
    noised, weaker = not isinstance(job.mechanism, NoMechanism), why_weaker(job)
    if noised or situation.epsilon is None:
        try:
            yield Candidate(with_noise_for(job, situation), start, _WRITTEN)
        except NotAffordable as error:
            if weaker:
                raise
            report(f"the job as written cannot keep epsilon {situation.epsilon:g}: {error}")
    else:
        report(f"the job as written adds no noise, so only jobs within epsilon {situation.epsilon:g} are tried")
    if weaker:
        report(f"no suggestion beside the job as written: {weaker}")
        return
    proposed = suggest(job, situation).job
    bundle = start
    if proposed.model != job.model:
        bundle, counted[scratch / "suggested"] = made(proposed, out=scratch / "suggested")
    yield Candidate(proposed, bundle, _SUGGESTED)


def _ordered(found: Sweep, divided: Divided) -> list[Scored]:
    rows = len(divided.validation)
    return sorted(
        found.tried,
        key=lambda each: (-len(each.outcomes), -each.validation(rows) if each.outcomes else 0.0),
    )


def _shown(each: Scored, rows: int, counted: dict[Path, Values], situation: Situation) -> Tried:
    spec, outcomes = each.candidate.spec, each.outcomes
    expected = expected_noise(
        spec, counted[each.candidate.bundle], examples=situation.examples, members=situation.members
    )
    return Tried(
        recipe=described(spec),
        origin=each.candidate.origin,
        validation=each.validation(rows) if outcomes else None,
        seeds=len(outcomes),
        noise_to_signal=None if expected is None else expected.ratio,
        seconds=sum(one.seconds for one in outcomes.values()) / len(outcomes) if outcomes else None,
        problem=each.problem or (None if outcomes else "not finished within the time limit"),
    )


def _baselines(divided: Divided) -> tuple[Baseline, ...]:
    train, by, test = divided.train.examples, divided.validation, divided.test

    def counts(part: Sequence[Example]) -> float:
        answers = predicted(train, part)
        return sum(answer == row.label for answer, row in zip(answers, part, strict=True)) / len(part)

    return (
        Baseline("majority class", majority(train, by) / len(by), majority(train, test) / len(test)),
        Baseline("word counts, no noise", counts(by), counts(test)),
    )


@dataclass(frozen=True)
class _Heads:
    """Measures a head alone on the job's frozen encoder, with the suggested numbers, on the first seed.

    It is the first thing to try (docs/recipes.md), and the private one shows what the noise of the budget leaves.
    """

    job: JobSpec
    made: _MakesBundle
    out: Path
    situation: Situation
    divided: Divided
    members: Sequence[Sequence[Example]]
    asked: Asked
    server: Server
    until: float
    report: Callable[[str], None]
    features: SharedFeatures

    def measured(self) -> Iterator[Baseline]:
        """Yield a row without noise and, if there is a budget, one within it; nothing for a job without an encoder."""
        model = self.job.model
        if not isinstance(model, PromptedModel) or (isinstance(model.task, Cloze) and model.template.pairs):
            return
        try:
            head = self._head(model)
            self.made(head, out=self.out)
            if weaker := why_weaker(self.job):
                self.report(f"no head with noise beside the job: {weaker}")
            for epsilon in dict.fromkeys((None, None if weaker else self.situation.epsilon)):
                spec = suggest(head, replace(self.situation, epsilon=epsilon, values=None)).job
                named = "no noise" if epsilon is None else f"epsilon {rounded_up(epsilon):g}"
                yield Baseline(f"head on the frozen encoder, {named}", *self._accuracies(spec))
        except TrainingCancelled:
            self.report("the time did not suffice for a head on the frozen encoder beside the job; give more --minutes")
        except (TrainingDiverged, TrainingLost, ValueError) as error:
            self.report(f"no head on the frozen encoder beside the job: {error}")

    def _head(self, model: PromptedModel) -> JobSpec:
        """Return the job with a head alone, its own if it has one, without noise and so without metrics."""
        if head_alone(self.job):
            return changed(self.job, mechanism=NoMechanism(), metrics=None)
        task = Head() if model.template.pairs else Head(start="labels")
        if isinstance(model.task, Head):
            task = task.model_copy(
                update={"pairs": model.task.pairs, "start": "random" if model.task.pairs else "labels"}
            )
        plain = model.model_copy(update={"injection": NoInjection(), "task": task, "dropout": 0.0})
        return changed(
            self.job, model=plain, mechanism=NoMechanism(), metrics=None, training=Training(), method=FedAvg()
        )

    def _accuracies(self, spec: JobSpec) -> tuple[float, float]:
        # Half of the time is left for what was asked for.
        end = time.time() + (self.until - time.time()) / 2
        found = run_trial(
            self.out,
            spec,
            self.members,
            self.divided,
            self.asked.seeds[0],
            self.server,
            cancelled=lambda: time.time() >= end,
            features=self.features,
        )
        return found.validation / len(self.divided.validation), found.test / len(self.divided.test)


def _verdicts(found: Sweep, best: Scored, divided: Divided) -> Iterator[Verdict]:
    rows = len(divided.test)
    floor = majority(divided.train.examples, divided.test) / rows
    for each in found.tried:
        if each.candidate.origin == _WRITTEN and each.outcomes and each is not best:
            yield verdict(each.test(rows), floor, rows, "this job")
    written = best.candidate.origin == _WRITTEN
    yield verdict(best.test(rows), floor, rows, "this job" if written else "the tuned job")
