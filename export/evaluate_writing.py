"""Measures an exported model that writes, on prompts and responses, with nothing but the exported model.

Rows are cut as in training, so the loss is that of a job's own rule. A row is a dialogue that ends with a response.
Rows with the same prompt are references of one answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.answer_figures import AnswerFigures, TokenFigures, answer_figures, token_figures
from export.figures import log_softmax
from export.generating import Generator, PromptTooLong, Sampling
from learning.text.data import DataInvalid
from learning.text.dialogue import IGNORED, DialogueEncoder
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
    """

    tokens: TokenFigures
    unusable: int = 0
    greedy: AnswerFigures | None = None
    sampled: AnswerFigures | None = None
    temperature: float = 1.0


def evaluate_generator(
    folder: Path, dialogues: Sequence[Dialogue], answering: Answering | None = None, *, threads: int = 0
) -> WritingFigures:
    """The figures of an exported model that writes.

    Args:
        folder: A bundle of kind `generator`.
        dialogues: Rows that end with a response.
        answering: How answers are generated; None generates none.
        threads: Of one step; 0: one for each core.

    Raises:
        BundleInvalid: The folder is no such bundle, or is damaged.
        DataInvalid: No row has a response that can be read, or a prompt is too long to answer.
    """
    generator = Generator.load(folder, threads=threads)
    tokenizer = read_bundle(folder, "generator", unread=(WEIGHTS_FILE,)).files["tokenizer.json"]
    encoder = DialogueEncoder(tokenizer, generator.facts.template, generator.facts.max_tokens)
    ending = [each for each in dialogues if each.turns and each.turns[-1].role == "assistant"]
    ids, targets, usable = encoder.encode_usable(ending)
    if not len(usable):
        raise DataInvalid("no row has a prompt and a response that the model can read; give at least one")
    rows = [ending[at] for at in usable]
    tokens = token_figures(*_scores(generator, ids, targets), prompts=[each.turns[:-1] for each in rows])
    unusable = len(dialogues) - len(rows)
    if answering is None:
        return WritingFigures(tokens, unusable)
    asked = references_of(rows)
    prompts = list(asked)[: answering.prompts]
    references = [asked[each] for each in prompts]

    def answers(sampling: Sampling) -> AnswerFigures:
        try:
            written = list(generator.write_all(prompts, sampling, batch=answering.batch))
        except PromptTooLong as error:
            raise DataInvalid(f"a prompt cannot be answered: {error}") from error
        return answer_figures([each.text.strip() for each in written], references)

    return WritingFigures(
        tokens,
        unusable,
        greedy=answers(Sampling()),
        sampled=answers(Sampling(temperature=answering.temperature, seed=answering.seed)),
        temperature=answering.temperature,
    )


def references_of(rows: Sequence[Dialogue]) -> dict[Dialogue, list[str]]:
    """The prompts of rows in their order, each once, with the responses that the rows give to it."""
    found: dict[Dialogue, list[str]] = {}
    for row in rows:
        found.setdefault(Dialogue(row.turns[:-1]), []).append(row.turns[-1].text.strip())
    return found


def _scores(
    generator: Generator, ids: NDArray[np.int64], targets: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Of each row, (N,): the sum of its targets' losses in nats, how many are the most likely, and their number."""
    losses, correct = np.zeros(len(ids)), np.zeros(len(ids), np.int64)
    chosen = targets != IGNORED
    for row, (these, wanted, where) in enumerate(zip(ids, targets, chosen, strict=True)):
        # What follows the last target is padding.
        length = int(np.flatnonzero(where)[-1]) + 1
        logits = generator.logits(these[:length].tolist())[where[:length]]
        right = wanted[where]
        losses[row] = -log_softmax(logits)[np.arange(len(right)), right].sum()
        correct[row] = int((logits.argmax(axis=1) == right).sum())
    return losses, correct, chosen.sum(axis=1)
