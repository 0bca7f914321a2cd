"""The figures of a model that writes: of the tokens that it predicts, and of the answers that it generates.

Definitions:

- Loss is the mean cross entropy over all response tokens of the file, in nats, the token that ends a response included.
  A long response weighs more than a short one. Perplexity is e^loss. Token accuracy is the share of these tokens that
  the model holds most likely, given the true tokens before them.
- BLEU is that of the corpus (Papineni et al. 2002) with sacrebleu's own settings: tokens of mteval-v13a, no lower case,
  no smoothing but for an order without any match, and the reference length nearest to the answer's. It is in [0, 100].
- ROUGE-L is the F measure of the longest common subsequence of words (Lin 2004), at best over a prompt's references,
  and its mean over the prompts, in [0, 1]. Words are runs of letters and digits in lower case, with their marks (the
  vowel signs of Hindi are some), and with joiners between them. A script without spaces makes one word of all letters
  between two signs. The rouge-score package gives the same for a to z; it drops all other letters, which we keep.
- Exact match is the share of answers that equal a reference, but for runs of white space and Unicode's composed form.

The interval of exact match is that of Wilson 1927 at 95 %. The others are percentile bootstraps at 95 % (Efron 1979)
over prompts: all rows of one prompt are drawn together, since they are alike. Draws of one prompt are all the same, and
a figure that is no finite number has no ends, so neither has an interval. If all prompts have one figure, a bootstrap
is a point, and says nothing of prompts that the file does not hold. Intervals hold for prompts drawn independently, and
for a version that was not chosen on the same file. They say nothing of another training with other seeds.
"""

import math
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from export.figures import wilson

__all__ = [
    "RESAMPLES",
    "AnswerFigures",
    "Estimate",
    "TokenFigures",
    "answer_figures",
    "rouge_l",
    "same_text",
    "token_figures",
]

# Draws of a bootstrap. The ends of an interval then rest on 25 draws each.
RESAMPLES = 1000
# Numbers of draws' counts that are in memory at once, twice.
_COUNTS = 2**20
_TAIL = 2.5
_ORDER = 4
# Zero width: they choose the form of the letters beside them.
_JOINERS = "\u200c\u200d"

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and the ends of its 95 % interval, which are NaN if it has none."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TokenFigures:
    """How a model predicts the responses of a file.

    Attributes:
        loss: Nats a token.
        perplexity: e^loss.
        accuracy: In [0, 1].
        rows: The number of responses.
        tokens: The number of their tokens.
    """

    loss: Estimate
    perplexity: Estimate
    accuracy: Estimate
    rows: int
    tokens: int


@dataclass(frozen=True)
class AnswerFigures:
    """How generated answers compare with references.

    Attributes:
        bleu: In [0, 100].
        rouge_l: In [0, 1].
        exact_match: In [0, 1].
        answers: The number of answers, one a prompt.
        references: The number of references, of all prompts together.
    """

    bleu: Estimate
    rouge_l: Estimate
    exact_match: Estimate
    answers: int
    references: int


def token_figures(
    losses: NDArray[np.floating],
    correct: NDArray[np.integer],
    counts: NDArray[np.integer],
    *,
    prompts: Sequence[object] | None = None,
    seed: int = 0,
) -> TokenFigures:
    """Computes the figures of predicted tokens.

    Args:
        losses: (N,) The sum of the losses over each response's tokens, in nats.
        correct: (N,) How many of them are the most likely ones.
        counts: (N,) How many there are; a response without one counts nowhere.
        prompts: (N,) What is equal for rows of one prompt; None makes each row its own prompt.
        seed: Of the bootstrap.

    Raises:
        ValueError: There is no token, or the shapes do not fit each other.
    """
    if not losses.shape == correct.shape == counts.shape == (len(losses),) or (
        prompts is not None and len(prompts) != len(losses)
    ):
        raise ValueError(f"losses {losses.shape}, correct {correct.shape} and counts {counts.shape} differ in shape")
    if not counts.sum():
        raise ValueError("no response has a token to predict; give rows with responses")
    columns = np.stack([losses, correct, counts], axis=1).astype(np.float64)
    sums = columns if prompts is None else _by_prompt(columns, prompts)
    sums = sums[sums[:, 2] > 0]
    loss, accuracy = _bootstrap(
        sums, [lambda total: float(total[0] / total[2]), lambda total: float(total[1] / total[2])], seed
    )
    return TokenFigures(
        loss=loss,
        # The exponential is monotone, so it maps the ends of the interval.
        perplexity=Estimate(_exp(loss.value), _exp(loss.low), _exp(loss.high)),
        accuracy=accuracy,
        rows=int((counts > 0).sum()),
        tokens=int(counts.sum()),
    )


def answer_figures(answers: Sequence[str], references: Sequence[Sequence[str]], *, seed: int = 0) -> AnswerFigures:
    """Computes the figures of generated answers.

    Args:
        answers: (N,) One a prompt; an empty one is an answer.
        references: (N,) At least one for each answer.
        seed: Of the bootstrap.

    Raises:
        ValueError: There is no answer, a prompt has no reference, or the lengths differ.
    """
    if not answers or len(answers) != len(references):
        raise ValueError(f"{len(answers)} answers and {len(references)} lists of references; give one list for each")
    if not all(references):
        raise ValueError("a prompt has no reference; give at least one for each prompt")
    best = np.array([rouge_l(each, right) for each, right in zip(answers, references, strict=True)])
    same = sum(any(same_text(each, one) for one in right) for each, right in zip(answers, references, strict=True))
    columns = np.column_stack([_bleu_counts(answers, references), best, np.ones_like(best)])
    bleu, rouge = _bootstrap(
        columns, [lambda total: _bleu(total[:-2]), lambda total: float(total[-2] / total[-1])], seed
    )
    return AnswerFigures(
        bleu=bleu,
        rouge_l=rouge,
        exact_match=Estimate(same / len(answers), *wilson(same, len(answers))),
        answers=len(answers),
        references=sum(map(len, references)),
    )


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """The best F measure of the longest common subsequence of words over the references, in [0, 1] (Lin 2004)."""
    from rapidfuzz.distance import LCSseq

    words = _words(answer)
    best = 0.0
    for reference in references:
        right = _words(reference)
        if words and right:
            # F1 of precision LCS / |answer| and recall LCS / |reference|.
            best = max(best, 2 * LCSseq.similarity(words, right) / (len(words) + len(right)))
    return best


def same_text(answer: str, reference: str) -> bool:
    """Whether two texts are equal but for runs of white space and Unicode's composed form (NFC)."""
    return _normal(answer) == _normal(reference)


def _words(text: str) -> list[str]:
    return _word().findall(unicodedata.normalize("NFC", text).lower())


@cache
def _word() -> re.Pattern[str]:
    # `\w` has no marks. One that stands alone, as behind an emoji, begins no word.
    marks = "".join(each for each in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(each)[0] == "M")
    return re.compile(rf"[^\W_](?:[{_JOINERS}]*(?:[^\W_]|[{marks}]))*")


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _bleu_counts(answers: Sequence[str], references: Sequence[Sequence[str]]) -> Vector:
    """What corpus BLEU sums up of each answer: (N, 10) matches and n-grams of orders 1 to 4, and the two lengths."""
    from sacrebleu.metrics.bleu import BLEU

    # Counts are those of the corpus score. `effective_order` only bends a sentence's own score, which nobody reads.
    metric = BLEU(max_ngram_order=_ORDER, effective_order=True)
    rows = []
    for answer, right in zip(answers, references, strict=True):
        found = metric.sentence_score(answer, list(right))
        rows.append([*found.counts, *found.totals, found.sys_len, found.ref_len])
    return np.array(rows, np.float64)


def _bleu(total: Vector) -> float:
    from sacrebleu.metrics.bleu import BLEU

    counts = [int(each) for each in total]
    return float(
        BLEU.compute_bleu(
            correct=counts[:_ORDER],
            total=counts[_ORDER : 2 * _ORDER],
            sys_len=counts[-2],
            ref_len=counts[-1],
            smooth_method="exp",
            max_ngram_order=_ORDER,
        ).score
    )


def _by_prompt(columns: Vector, prompts: Sequence[object]) -> Vector:
    """Adds up the rows of each prompt, in the order of the first of them."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    sums = np.zeros((len(places), columns.shape[1]))
    np.add.at(sums, [places[each] for each in prompts], columns)
    return sums


def _bootstrap(rows: Vector, figures: Sequence[Callable[[Vector], float]], seed: int) -> list[Estimate]:
    """Figures of the sum of all rows (N, k), and the percentiles of those of `RESAMPLES` draws of N rows."""
    whole = rows.sum(axis=0)
    values = [figure(whole) for figure in figures]
    drawn = _drawn_sums(rows, seed) if len(rows) > 1 else None
    return [
        Estimate(value, math.nan, math.nan)
        if drawn is None or not math.isfinite(value)
        else Estimate(value, *map(float, np.percentile([figure(total) for total in drawn], [_TAIL, 100 - _TAIL])))
        for figure, value in zip(figures, values, strict=True)
    ]


def _drawn_sums(rows: Vector, seed: int) -> Vector:
    """(RESAMPLES, k) The sums of N rows drawn with replacement from rows (N, k)."""
    draws = np.random.Generator(np.random.Philox(seed))
    even = np.full(len(rows), 1 / len(rows))
    sums = np.empty((RESAMPLES, rows.shape[1]))
    block = max(1, _COUNTS // len(rows))
    for first in range(0, RESAMPLES, block):
        part = sums[first : first + block]
        # How often each row is drawn.
        times = draws.multinomial(len(rows), even, size=len(part))
        with np.errstate(invalid="ignore"):
            # A column may hold numbers that are not finite; the others are no worse for it.
            part[:] = times @ rows
    return sums


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
