"""Measures what a member spends on synthetic text: processor seconds and bytes.

Seconds are processor time of one thread: of DP-SGD steps on one member's part of SST-2, and of generating a corpus. A
few steps are timed without the first, and the total is computed from their median (`measured_steps`). For the encoder,
two lots smaller than the job's are timed, and a step at the job's lot is extrapolated on the line through them, because
noise and optimiser do not grow with the lot (`measured_lots`). Bytes are the packed masked vector, the version received
(float32), and the corpus file, without TLS and messages.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.library.minilm import minilm
from benchmarks.library.record import Figure, Results, open_results, parser
from benchmarks.synthesis.cells import Plan, quick_plan
from benchmarks.synthesis.judge import classifier_bundle
from benchmarks.synthesis.setup import (
    Task,
    Trained,
    corpora_of_members,
    dealt,
    multiplier_for,
    read_task,
    rvae_bundle,
)
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from secure_agg import SystemRandom, packed_size
from tacit.job import Aggregation, JobSpec, Rounds, Training, VocabularyFile
from tacit.mechanism import DpSgd
from tacit.model import TransformerModel
from tacit.vector import layout_of

if TYPE_CHECKING:
    from export.bundle import JobBundle

__all__ = ["Timed", "cost_figures", "main", "measure_all", "step_seconds", "timed_at"]

BENCH = "synthesis"
EPSILON = 5.0
# Number of timed steps. The first does not count, because it includes one-time work.
STEPS = 4
ENCODER_LOTS = (8, 24)
ENCODER_STEPS = 3


@dataclass(frozen=True)
class Timed:
    """Processor seconds of one DP-SGD step at the job's lot. steps, lots: those that were timed."""

    seconds: float
    steps: int
    lots: tuple[int, ...]


def timed_at(bundle: "JobBundle", examples: Sequence[Example], steps: int, lots: Sequence[int]) -> Timed:
    """Time a step at one lot, the job's, or extrapolate it from two lots.

    Raises:
        TypeError: the job has no DP-SGD.
    """
    seconds = [step_seconds(bundle, examples, steps, lot) for lot in lots]
    if len(lots) == 1:
        return Timed(seconds[0], steps, tuple(lots))
    slope = (seconds[1] - seconds[0]) / (lots[1] - lots[0])
    return Timed(seconds[0] + slope * (_mechanism_of(bundle).lot - lots[0]), steps, tuple(lots))


def step_seconds(bundle: "JobBundle", examples: Sequence[Example], steps: int, lot: int) -> float:
    """Return the median seconds of a member's steps in the bundle's job on these rows, at another lot.

    Raises:
        TypeError: the job has no DP-SGD.
    """
    from learning.models.assembly import assembled
    from learning.training.local import Progress
    from learning.training.private import train_private

    job = bundle.document
    corpus = EncodedExamples(examples, job, bundle.public_tokenizer)
    module, _ = assembled(job, corpus, bundle.manifest, bundle.manifest.decode(bundle.weights), {}, None, bundle.frozen)
    read = corpus.read()
    at = [time.process_time()]

    def tick(_: Progress) -> None:
        at.append(time.process_time())

    mechanism = _mechanism_of(bundle).model_copy(update={"lot": lot, "steps": steps})
    train_private(module, read.ids, read.labels, job.training, mechanism, random=SystemRandom(), seed=0, progress=tick)
    # The first step does not count, unless it is the only one.
    return statistics.median(after - before for before, after in pairwise(at[1:] if steps > 1 else at))


def _mechanism_of(bundle: "JobBundle") -> DpSgd:
    if not isinstance(bundle.document.mechanism, DpSgd):
        raise TypeError("only a job with DP-SGD can be timed here")
    return bundle.document.mechanism


def cost_figures(
    bundle: "JobBundle", timed: Timed, *, corpus_seconds: float = 0.0, corpus_bytes: int = 0
) -> list[Figure]:
    """Return a member's total cost in the job: all rounds, and a corpus if it generates one."""
    job, mechanism = bundle.document, _mechanism_of(bundle)
    layout = layout_of(job, job.rounds.target_members)
    sent = packed_size(layout.values, layout.bits)
    rounds, steps = job.rounds.count, job.rounds.count * mechanism.steps
    more: dict[str, Any] = {
        "rounds": rounds,
        "steps": steps,
        "lot": mechanism.lot,
        "step_seconds": round(timed.seconds, 3),
        "corpus_seconds": round(corpus_seconds, 1),
        "measured_steps": timed.steps,
        "measured_lots": list(timed.lots),
    }
    return [
        Figure("cpu_seconds", round(timed.seconds * steps + corpus_seconds, 1), "s", more=more),
        Figure("values", job.values),
        Figure("bytes_sent", sent * rounds + corpus_bytes, "B", more={"a_round": sent, "corpus": corpus_bytes}),
        Figure("bytes_received", 4 * job.values * rounds, "B"),
    ]


def measure_all(results: Results, plan: Plan, *, quick: bool) -> None:
    """Time the three trainings on SST-2 that are not timed yet."""
    task = read_task("sst2")
    ways = {"rvae": _rvae, "bilstm": _bilstm} if quick else {"rvae": _rvae, "bilstm": _bilstm, "minilm": _minilm}
    for name, way in ways.items():
        case = {"part": "cost", "dataset": "sst2", "trained": name, "epsilon": EPSILON}
        if not results.done(case, 0):
            results.open([0])
            with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
                results.add(case, way(task, plan, Path(scratch)), seed=0)


def _rvae(task: Task, plan: Plan, folder: Path) -> list[Figure]:
    part = dealt(task, plan.rvae.members, 0)[0]
    bundle = rvae_bundle(task, plan.rvae, EPSILON, len(part), 0, folder, plan.cache)
    timed = timed_at(bundle, part, STEPS, [min(plan.rvae.lot, len(part))])
    # The texts come from the starting weights. Worse texts take the same time.
    start = bundle.manifest.decode(bundle.weights)
    began = time.process_time()
    (path,) = corpora_of_members(Trained(bundle, (), (start,), (), (part,)), folder / "made")
    seconds = time.process_time() - began
    return cost_figures(bundle, timed, corpus_seconds=seconds, corpus_bytes=path.stat().st_size)


def _bilstm(task: Task, plan: Plan, folder: Path) -> list[Figure]:
    part = dealt(task, plan.rvae.members, 0)[0]
    mechanism = _mechanism(plan, len(part))
    bundle = classifier_bundle(task, plan.classifier, 0, folder, members=plan.rvae.members, mechanism=mechanism)
    return cost_figures(bundle, timed_at(bundle, part, STEPS, [mechanism.lot]))


def _minilm(task: Task, plan: Plan, folder: Path) -> list[Figure]:
    """Time the pretrained encoder of six layers, fully trained, in as many rounds and steps as the BiLSTM."""
    from export.bundle import make_job_bundle, read_job_bundle

    part, base = dealt(task, plan.rvae.members, 0)[0], minilm()
    mechanism = _mechanism(plan, len(part))
    members = plan.rvae.members
    spec = JobSpec(
        name="sst2-minilm",
        labels=task.labels,
        model=TransformerModel(base=str(base), max_tokens=64),
        training=Training(batch=16, learning_rate=0.0001),
        mechanism=mechanism,
        rounds=Rounds(count=plan.classifier.rounds, min_members=members, target_members=members),
        aggregation=Aggregation(max_weight=1000),
        vocabulary=VocabularyFile(kind="wordpiece", file=str(base / "vocab.txt")),
    )
    make_job_bundle(spec, folder, folder / "bundle")
    bundle = read_job_bundle(folder / "bundle")
    return cost_figures(bundle, timed_at(bundle, part, ENCODER_STEPS, ENCODER_LOTS))


def _mechanism(plan: Plan, examples: int) -> DpSgd:
    recipe = plan.classifier
    lot = min(recipe.lot, examples)
    multiplier = multiplier_for(EPSILON, lot, recipe.rounds * recipe.steps, examples)
    return DpSgd(noise_multiplier=multiplier, clip=recipe.clip, lot=lot, steps=recipe.steps)


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    chosen = parser("synthesis.cost").parse_args(words)
    import torch

    # Seconds are those of one core.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        plan = quick_plan(Path(scratch)) if chosen.quick else Plan()
        measure_all(open_results(BENCH, quick=chosen.quick), plan, quick=chosen.quick)


if __name__ == "__main__":
    main()
