"""Writes a job file from a recipe: what `coordinator job new` does with its answers.

The recipes are text with slots, in `job_recipes`. This module chooses the recipe and the numbers, and fills the slots.

Guarantees: it is pure, except that it reads the recipes. What it returns has passed the parser of job files. With
noise, a member with the given number of examples can take part in all rounds within the given epsilon, as its ledger
counts.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template
from textwrap import wrap
from typing import Literal, get_args

__all__ = ["DELTA", "MODELS", "TEXTS", "Answers", "JobNotMade", "check_answers", "job_file"]

Texts = Literal["short", "long", "pairs"]
TEXTS: tuple[Texts, ...] = get_args(Texts)
# Beside the name of a backbone.
MODELS = ("words", "own")
# The delta of a policy that says nothing.
DELTA = 1e-6

# The backbone of a known name that writes.
_WRITER = "smollm2"
_RECIPES = Path(__file__).parent / "job_recipes"
# A head over pairs has no such start: a label is one text.
_LABELS_START = '# The layer starts at what the labels\' names mean to the encoder.\nstart = "labels"'
_NOISY_ROUNDS = 10
# Correlated noise has members keep rows of it, and charges a job as a whole. Less than a twentieth is not worth that.
_WORTH_CORRELATING = 0.95
_MANY_LABELS = 20
_FEW_EXAMPLES = 500


class JobNotMade(ValueError):
    """No job file follows from the answers; the text says which to change."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a job is about.

    Attributes:
        name: The job's name.
        labels: The labels.
        members: Members that take part.
        examples: Examples of the member that has the fewest.
        epsilon: What all rounds together may cost that member; None: no noise.
        texts: "short" (a message or a sentence), "long" (a letter or a report), or "pairs" of short texts.
        model: The name of a backbone; "words" for a small model over a public list; "own" for members' own
            vocabularies.
        vocabulary: With "words", the list as the job file names it.
        word_pieces: Whether that list is a checkpoint's vocab.txt.
    """

    name: str
    labels: tuple[str, ...]
    members: int
    examples: int
    epsilon: float | None
    texts: Texts
    model: str
    vocabulary: str | None = None
    word_pieces: bool = False

    @property
    def recipe(self) -> str:
        """The recipe's name, that of its file."""
        return self.model if self.model in MODELS else "frozen"


@dataclass(frozen=True, slots=True)
class _Noise:
    multiplier: float
    lot: int
    steps: int
    rate: float
    # Why such a job teaches little. Empty if it teaches.
    stays: str = ""
    coefficients: tuple[float, ...] = (1.0,)
    spare_rounds: int = 0


def check_answers(answers: Answers) -> None:
    """Checks what can be seen of the answers without computing any noise.

    Raises:
        JobNotMade: The answers contradict each other.
    """
    recipe = answers.recipe
    if answers.model == _WRITER:
        raise JobNotMade(
            f"{_WRITER}: it writes text, and this command makes jobs that label texts; copy examples/assistant.toml, "
            "which docs/generation.md explains"
        )
    if recipe != "frozen" and answers.texts == "pairs":
        raise JobNotMade("pairs: only a job on a backbone reads two texts; answer with a backbone, such as minilm")
    if recipe == "words" and answers.vocabulary is None:
        raise JobNotMade(
            "words: a public word list is missing; name one with --words, or type `coordinator backbone add minilm`, "
            "whose vocab.txt is one"
        )
    if recipe == "own" and answers.epsilon is not None:
        raise JobNotMade(
            "own: a member's vocabulary depends on all its texts, which the noise of dp-sgd does not hide; answer with "
            "a backbone or words, or with epsilon none"
        )
    if answers.members < 3:
        raise JobNotMade(f"members: secure aggregation needs three members or more, got {answers.members}")
    if answers.epsilon is not None and not answers.epsilon > 0:
        raise JobNotMade(f"epsilon: must be above 0, or none for a job without noise, got {answers.epsilon:g}")


def job_file(answers: Answers) -> str:
    """The text of a job file.

    Raises:
        JobNotMade: The answers contradict each other, or no noise is enough for the epsilon.
    """
    check_answers(answers)
    recipe = answers.recipe
    rounds = _NOISY_ROUNDS if answers.epsilon is not None else 20
    noise = None if answers.epsilon is None else _noise(answers, answers.epsilon, rounds)
    counted = f"{len(answers.labels)} labels, {answers.members} members"
    slots = {
        "title": f"{answers.name}: {counted}, made by `coordinator job new`.",
        "situation": _situation(answers),
        "name": answers.name,
        "labels": json.dumps(list(answers.labels), ensure_ascii=False),
        "base": answers.model,
        "task": "pairs = true" if answers.texts == "pairs" else _LABELS_START,
        "vocabulary": answers.vocabulary or "",
        "vocabulary_kind": "wordpiece" if answers.word_pieces else "words",
        "dropout": "0.3" if noise is None else "0.0",
        "rounds": str(rounds),
        "min_members": str(answers.members),
        **_lengths(answers.texts),
        "model": _word_model(noise),
        "training": _training(answers, noise),
        "mechanism": "" if noise is None else _mechanism(answers, noise, rounds),
        "without_noise": _read("no_noise") if noise is None else "",
    }
    text = Template(_read(recipe)).substitute(slots)
    return _checked(text)


def _read(recipe: str) -> str:
    return (_RECIPES / f"{recipe}.toml").read_text(encoding="utf-8")


def _situation(answers: Answers) -> str:
    said = []
    if answers.examples < _FEW_EXAMPLES:
        said.append("little data")
    if len(answers.labels) >= _MANY_LABELS:
        said.append("many labels")
    said.append({"short": "short texts", "long": "long texts", "pairs": "pairs of texts"}[answers.texts])
    said.append("private vocabularies" if answers.model == "own" else "one vocabulary for all")
    said.append("no noise" if answers.epsilon is None else f"epsilon {answers.epsilon:g}")
    return f"For {', '.join(said)}."


def _lengths(texts: Texts) -> dict[str, str]:
    tokens = {"short": 64, "long": 256, "pairs": 128}[texts]
    why = {
        "short": "A message has rarely more. `edge_client run --dry-run` says how many texts are cut.",
        "long": "Longer texts are cut, and time grows with the length. The dry run says how many texts are cut.",
        "pairs": "Both texts together. `edge_client run --dry-run` says how many are cut.",
    }[texts]
    return {"max_tokens": str(tokens), "max_tokens_why": why}


def _word_model(noise: _Noise | None) -> str:
    if noise is None:
        return "dropout = 0.3"
    # The first hour's model: noise grows with the number of values, so the table stays as it is drawn.
    return (
        "# The table of word vectors is random and frozen: only the few thousand values above it are noised and sent.\n"
        "embedding = 256\nembedding_std = 0.5\nfreeze_embedding = true\nwidths = [1]\nmaps = 32\ndropout = 0.0"
    )


def _training(answers: Answers, noise: _Noise | None) -> str:
    if noise is not None:
        lines = [f'optimiser = "sgd"\nlearning_rate = {noise.rate:g}']
        if noise.stays:
            sentence = f"{noise.stays[0].upper()}{noise.stays[1:]}."
            lines = [*wrap(sentence, 110, initial_indent="# ", subsequent_indent="# "), *lines]
        return "\n".join(lines)
    epochs = 3 if answers.examples < _FEW_EXAMPLES else 1
    if answers.recipe == "frozen":
        return f'epochs = {epochs}\nbatch = 16\noptimiser = "sgd"\nlearning_rate = 3.0'
    rate = {"words": "0.001", "own": "0.005"}[answers.recipe]
    lines = [f"epochs = {epochs}", "batch = 16", f"learning_rate = {rate}"]
    if len(answers.labels) >= _MANY_LABELS:
        lines += [
            "# A member has few of many labels; this keeps its own shares out of the model.",
            "logit_adjustment = true",
        ]
    return "\n".join(lines)


def _noise(answers: Answers, epsilon: float, rounds: int) -> _Noise:
    """The least noise at which all rounds pass the ledger's gate; correlated, if that leaves less of it in the model.

    A head reads all examples in each step (`simulation.suggestion`, rule 8), another model a third of them in a draw.
    """
    from learning.accounting.banded_plan import bands_of, best_of
    from learning.accounting.calibration import NotAffordable, calibrate
    from learning.accounting.costs import adjacency_of, event_of_round
    from learning.accounting.spend import Limit
    from simulation.suggestion import head_steps, why_a_head_stays
    from tacit.mechanism import DpSgd

    lot, steps, rate, stays = max(1, min(256, answers.examples // 3)), 15, 0.5, ""

    def mechanism(multiplier: float) -> DpSgd:
        return DpSgd(noise_multiplier=multiplier, lot=lot, steps=steps)

    limit = Limit(epsilon, DELTA, adjacency_of(mechanism(1.0)), "example")

    def least() -> float:
        return calibrate(lambda each: event_of_round(mechanism(each), answers.examples), rounds, limit)

    try:
        if answers.recipe == "frozen":
            lot, steps = answers.examples, 1
            sizes = (least(), answers.examples, answers.members, len(answers.labels))
            (steps, rate), stays = head_steps(*sizes), why_a_head_stays(*sizes)
        found = least()
    except NotAffordable as error:
        raise JobNotMade(f"epsilon: {error}") from None
    rows = bands_of(mechanism(1.0), answers.examples, rounds, limit)
    best = best_of(rows)
    if best.error < _WORTH_CORRELATING * rows[0].error:
        return _Noise(best.multiplier, lot, steps, rate, stays, best.coefficients, best.spare_rounds)
    return _Noise(found, lot, steps, rate, stays)


def _mechanism(answers: Answers, noise: _Noise, rounds: int) -> str:
    from simulation.suggestion import HEAD_CLIP

    head = answers.recipe == "frozen"
    text = Template(_read("noise")).substitute(
        rows=f"{answers.examples:,}",
        rounds=rounds,
        epsilon=f"{answers.epsilon:g}",
        delta=f"{DELTA:g}",
        noise_multiplier=f"{noise.multiplier:g}",
        lot=noise.lot,
        clip=f"{HEAD_CLIP if head else 1.0:g}",
        steps=noise.steps,
        fewer=_fewer(noise, head),
        coefficients=_correlated(noise),
        draws=f"Each of {noise.steps} steps takes all examples of a member, if it has at most {noise.lot}."
        if head
        else f"A member with N examples draws each with probability {noise.lot} / N, {noise.steps} times a round.",
    )
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _fewer(noise: _Noise, head: bool) -> str:
    if head:
        return ""
    if len(noise.coefficients) > 1:
        return "The first round is charged for all of them, so a member with fewer examples may have no room for it."
    return "A member with fewer examples can take part in fewer rounds."


def _correlated(noise: _Noise) -> str:
    bands = len(noise.coefficients)
    if bands == 1:
        return ""
    return (
        "\n# Later steps take back a part of the noise of earlier ones (docs/correlated-noise.md). An example is then\n"
        f"# in one of {bands} classes, and is drawn {bands} times as often in the steps of its class.\n"
        f"coefficients = {list(noise.coefficients)}\n"
        "# Steps of a round that failed after vectors were sent are over. The job is charged for spare ones.\n"
        f"spare_rounds = {noise.spare_rounds}"
    )


def _checked(text: str) -> str:
    """Returns the text if it is a job file."""
    from tacit.documents import DocumentInvalid
    from tacit.job import JobSpec

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(text, encoding="utf-8")
        try:
            JobSpec.from_toml(file)
        except DocumentInvalid as error:
            raise JobNotMade(str(error).removeprefix(f"{file}: ")) from None
    return text
