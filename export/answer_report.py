"""Shows the figures of a model that writes: as JSON, as lines for a person, and as a table of versions.

Everything returns plain text and leaves the printing to its caller. The functions have the names of those in
`export.figures_report`, so a command shows either kind.
"""

import io
import math
from collections.abc import Sequence
from typing import Any

from export.answer_figures import AnswerFigures, Estimate, TokenFigures
from export.evaluate_writing import WritingFigures

__all__ = ["all_lines", "best_of", "figures_json", "headline", "stored", "versions_lines", "warning"]


def figures_json(found: WritingFigures) -> dict[str, Any]:
    """Returns the figures as JSON, each with the ends of its 95 % interval; null for a number that there is not."""
    tokens = found.tokens
    shown: dict[str, Any] = {
        "loss": _number(tokens.loss.value),
        "loss_interval": _ends(tokens.loss),
        "perplexity": _number(tokens.perplexity.value),
        "perplexity_interval": _ends(tokens.perplexity),
        "token_accuracy": tokens.accuracy.value,
        "token_accuracy_interval": _ends(tokens.accuracy),
        "examples": tokens.rows,
        "tokens": tokens.tokens,
        "unusable_rows": found.unusable,
    }
    if found.cut:
        shown |= {"rows_left": found.rows_left, "answers_left": found.answers_left}
    if found.greedy is not None:
        shown["greedy"] = _answers_json(found.greedy)
    if found.sampled is not None:
        shown["sampled"] = {"temperature": found.temperature, **_answers_json(found.sampled)}
    return shown


def headline(found: WritingFigures) -> str:
    """Returns loss, perplexity, token accuracy and the number of responses."""
    tokens = found.tokens
    return (
        f"loss {tokens.loss.value:.4f} a token, perplexity {tokens.perplexity.value:.2f}, "
        f"token accuracy {100 * tokens.accuracy.value:.1f} %, {tokens.rows} responses"
    )


def stored(found: WritingFigures) -> tuple[float, float, int]:
    """Returns what a coordinator stores of a version: token accuracy, loss a token and the number of responses."""
    return found.tokens.accuracy.value, found.tokens.loss.value, found.tokens.rows


def warning(found: WritingFigures) -> str:
    """Returns what must be said of a version at once; empty if there is nothing."""
    return "" if math.isfinite(found.tokens.loss.value) else "the loss is no number: this version's training diverged"


def all_lines(found: WritingFigures, _width: int) -> list[str]:
    """Returns the intervals and, if answers were generated, their figures, one a line."""
    tokens: TokenFigures = found.tokens
    rows = [
        ("95 % interval", f"loss {_between(tokens.loss, '.4f')}, token accuracy {_between(tokens.accuracy, '.1%')}"),
        ("tokens", f"{tokens.tokens:,} of responses, with the token that ends each"),
    ]
    if found.unusable:
        rows.append(("rows left out", f"{found.unusable}: no response that the model can read"))
    if found.rows_left:
        rows.append(("cut off", f"{found.rows_left:,} responses were not reached; the figures are of those before"))
    if found.answers_left:
        rows.append(("cut off", f"{found.answers_left:,} answers, greedy and sampled, were not written"))
    for name, answers in (("greedy", found.greedy), (f"temperature {found.temperature:g}", found.sampled)):
        if answers is None:
            continue
        rows += [
            (name, f"{answers.answers} answers, {answers.references} references"),
            ("  BLEU", f"{answers.bleu.value:.1f} ({_between(answers.bleu, '.1f')})"),
            ("  ROUGE-L", f"{answers.rouge_l.value:.3f} ({_between(answers.rouge_l, '.3f')})"),
            ("  exact match", f"{answers.exact_match.value:.1%} ({_between(answers.exact_match, '.1%')})"),
        ]
    return [f"  {name:<18} {value}" for name, value in rows]


def best_of(found: Sequence[WritingFigures]) -> int:
    """Returns the index of the lowest loss; of equals, the first. A loss that is no number is the highest."""
    losses = [each.tokens.loss.value for each in found]
    return min(range(len(found)), key=lambda at: math.inf if math.isnan(losses[at]) else losses[at])


def versions_lines(numbers: Sequence[int], found: Sequence[WritingFigures]) -> list[str]:
    """Returns versions, measured on one file, as a table with the best one marked, and what they say.

    Args:
        numbers: The versions' numbers, in order.
        found: The figures of each.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    best = best_of(found)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    generated = any(each.greedy is not None for each in found)
    names = ["version", "loss", "95 % interval", "perplexity", "token accuracy"]
    for name in [*names, *(["BLEU", "ROUGE-L", "exact match"] if generated else []), ""]:
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for at, (number, each) in enumerate(zip(numbers, found, strict=True)):
        tokens, answers = each.tokens, each.greedy
        shown = (
            []
            if answers is None
            else [
                f"{answers.bleu.value:.1f}",
                f"{answers.rouge_l.value:.3f}",
                f"{answers.exact_match.value:.1%}",
            ]
        )
        table.add_row(
            str(number),
            f"{tokens.loss.value:.4f}",
            _between(tokens.loss, ".4f"),
            f"{tokens.perplexity.value:.2f}",
            f"{tokens.accuracy.value:.1%}",
            *shown,
            "best" if at == best else "",
        )
    top = found[best]
    said = [f"best: version {numbers[best]}, {headline(top)}"]
    inside = sum(each.tokens.loss.value <= top.tokens.loss.high for each in found) - 1
    if math.isnan(top.tokens.loss.high):
        said.append("no version has an interval, so this file may not rank them")
    elif inside:
        others = f"{inside} other versions have losses" if inside > 1 else "1 other version has a loss"
        said.append(f"{others} in its 95 % interval, so this file may not rank them")
        said.append("measure the version that you choose on another file")
    text = io.StringIO()
    Console(file=text, width=1000, color_system=None, highlight=False, legacy_windows=False).print(table)
    return [*(line.rstrip() for line in text.getvalue().splitlines() if line.strip()), *said]


def _answers_json(found: AnswerFigures) -> dict[str, Any]:
    return {
        "bleu": found.bleu.value,
        "bleu_interval": _ends(found.bleu),
        "rouge_l": found.rouge_l.value,
        "rouge_l_interval": _ends(found.rouge_l),
        "exact_match": found.exact_match.value,
        "exact_match_interval": _ends(found.exact_match),
        "answers": found.answers,
        "references": found.references,
    }


def _between(found: Estimate, style: str) -> str:
    if math.isnan(found.low):
        return "no interval"
    return f"{found.low:{style}} to {found.high:{style}}"


def _ends(found: Estimate) -> list[float | None]:
    return [_number(found.low), _number(found.high)]


def _number(value: float) -> float | None:
    # JSON has no infinity.
    return value if math.isfinite(value) else None
