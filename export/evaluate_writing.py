"""Measures an exported model that writes, on prompts and responses, with nothing but the exported model.

Rows are cut as in training, so the loss is that of a job's own rule. A row is a dialogue with a response, and its turns
after the last one are left out, as in training. Rows with the same prompt are references of one answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.answer_figures import AnswerFigures, TokenFigures, answer_figures, token_figures
from export.figures import EvaluationCut, log_softmax
from export.generating import Generator, PromptTooLong, Sampling
from learning.text.dialogue import IGNORED, DialogueEncoder
from learning.text.examples import DataInvalid
from learning.text.turns import Dialogue
from tacit.bundle import WEIGHTS_FILE, read_bundle

__all__ = ["Answering", "WritingFigures", "evaluate_generator", "references_of"]


@dataclass(frozen=True)
class Answering:
    """How answers are generated.

    Attributes:
        prompts: The most prompts that are answered, the first of the file; None answers all.
        temperature: Of the sampled answers, above 0.
        seed: Of the sampled answers.
        batch: Answers that are written at once.
    """

    prompts: int | None = None
    temperature: float = 1.0
    seed: int = 0
    batch: int = 8


@dataclass(frozen=True)
class WritingFigures:
    """How a model that writes does on a file of prompts and responses.

    Attributes:
        tokens: How it predicts the responses.
        unusable: Rows without a response that can be read, which count nowhere.
        greedy: Answers of the most likely tokens; None: nothing was generated.
        sampled: Answers drawn at `temperature`.
        temperature: Of the sampled answers.
        rows_left: Usable rows that were not reached before the evaluation was cut off; the figures are those of the
            first rows of the file.
        answers_left: Answers, greedy and sampled, that were not written before it was cut off.
    """

    tokens: TokenFigures
    unusable: int = 0
    greedy: AnswerFigures | None = None
    sampled: AnswerFigures | None = None
    temperature: float = 1.0
    rows_left: int = 0
    answers_left: int = 0

    @property
    def cut(self) -> bool:
        """Whether the evaluation was cut off, so that something is missing."""
        return bool(self.rows_left or self.answers_left)


def evaluate_generator(
    folder: Path,
    dialogues: Sequence[Dialogue],
    answering: Answering | None = None,
    *,
    threads: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
) -> WritingFigures:
    """The figures of an exported model that writes.

    Args:
        folder: A bundle of kind `generator`.
        dialogues: Rows with a response.
        answering: How answers are generated; None generates none.
        threads: Of one step; 0: one for each core.
        cancelled: Asked before every row and every token of an answer. True cuts the evaluation off, and the figures
            are those of what was measured.

    Raises:
        EvaluationCut: It was cut off before it had measured anything.
        BundleInvalid: The folder is no such bundle, or is damaged.
        DataInvalid: No row has a response that can be read, or a prompt is too long to answer.
    """
    generator = Generator.load(folder, threads=threads)
    tokenizer = read_bundle(folder, "generator", unread=(WEIGHTS_FILE,)).files["tokenizer.json"]
    encoder = DialogueEncoder(tokenizer, generator.facts.template, generator.facts.max_tokens)
    answered = [each.answered for each in dialogues]
    ids, targets, usable = encoder.encode_usable(answered)
    if not len(usable):
        raise DataInvalid("no row has a prompt and a response that the model can read; give at least one")
    rows = [answered[at] for at in usable]
    unusable = len(dialogues) - len(rows)
    losses, correct, counts = _scores(generator, ids, targets, cancelled)
    if not len(losses):
        raise EvaluationCut("the evaluation was cut off before it had measured a row")
    prompts_of = [each.turns[:-1] for each in rows[: len(losses)]]
    tokens = token_figures(losses, correct, counts, prompts=prompts_of)
    rows_left = len(rows) - len(losses)
    if answering is None:
        return WritingFigures(tokens, unusable, rows_left=rows_left)
    asked = references_of(rows)
    prompts = list(asked)[: answering.prompts]
    references = [asked[each] for each in prompts]

    def answers(sampling: Sampling) -> AnswerFigures | None:
        try:
            written = list(generator.write_all(prompts, sampling, batch=answering.batch, cancelled=cancelled))
        except PromptTooLong as error:
            raise DataInvalid(f"a prompt cannot be answered: {error}") from error
        if not written:
            return None
        return answer_figures([each.text.strip() for each in written], references[: len(written)])

    greedy = answers(Sampling())
    sampled = answers(Sampling(temperature=answering.temperature, seed=answering.seed))
    return WritingFigures(
        tokens,
        unusable,
        greedy=greedy,
        sampled=sampled,
        temperature=answering.temperature,
        rows_left=rows_left,
        answers_left=2 * len(prompts) - sum(0 if each is None else each.answers for each in (greedy, sampled)),
    )


def references_of(rows: Sequence[Dialogue]) -> dict[Dialogue, list[str]]:
    """The prompts of rows in their order, each once, with the responses that the rows give to it."""
    found: dict[Dialogue, list[str]] = {}
    for row in rows:
        found.setdefault(Dialogue(row.turns[:-1]), []).append(row.turns[-1].text.strip())
    return found


def _scores(
    generator: Generator, ids: NDArray[np.int64], targets: NDArray[np.int64], cancelled: Callable[[], bool]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Of each row, (N,): the sum of its targets' losses in nats, how many are the most likely, and their number.

    If it is cancelled, of the first rows only.
    """
    losses, correct = np.zeros(len(ids)), np.zeros(len(ids), np.int64)
    chosen = targets != IGNORED
    for row, (these, wanted, where) in enumerate(zip(ids, targets, chosen, strict=True)):
        if cancelled():
            return losses[:row], correct[:row], chosen[:row].sum(axis=1)
        # What follows the last target is padding.
        length = int(np.flatnonzero(where)[-1]) + 1
        logits = generator.logits(these[:length].tolist())[where[:length]]
        right = wanted[where]
        losses[row] = -log_softmax(logits)[np.arange(len(right)), right].sum()
        correct[row] = int((logits.argmax(axis=1) == right).sum())
    return losses, correct, chosen.sum(axis=1)
