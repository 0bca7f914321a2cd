"""The questions of `coordinator job new`: what an answer must be, whether an option gives it or a person at a terminal.

Guarantee: a person who gives a wrong answer is told so at once, and asked again.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import typer

from coordinator.cli.asking import labels_of
from toolkit.console import ExitCode, fail

if TYPE_CHECKING:
    from coordinator.cli.new_job import Texts

__all__ = [
    "Questions",
    "read_epsilon",
    "read_examples",
    "read_labels",
    "read_members",
    "read_texts",
    "read_two_numbers",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Questions:
    """The questions to a person at a terminal. missing: the options that would answer them."""

    missing: list[str]

    def __post_init__(self) -> None:
        """Raises CommandFailed if there is something to ask, and no terminal."""
        if self.missing and not sys.stdin.isatty():
            *others, last = self.missing
            what = f"{', '.join(others)} and {last} are" if others else f"{last} is"
            fail(f"{what} missing, and there is no terminal to ask; add {'them' if others else 'it'}", ExitCode.USAGE)

    def answer(self, question: str, read: Callable[[str], T], default: str | None = None) -> T:
        """Asks until `read` raises no ValueError, and returns what it read."""

        def checked(told: str) -> T:
            try:
                return read(told)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None

        found: T = typer.prompt(question, default=default, err=True, value_proc=checked)
        return found

    def given(
        self, option: str, told: str | None, question: str, read: Callable[[str], T], default: str | None = None
    ) -> T:
        """What an option says, or the answer. Raises CommandFailed if the option cannot be used."""
        if not told:
            return self.answer(question, read, default)
        try:
            return read(told)
        except ValueError as error:
            fail(f"{option}: {error}", ExitCode.USAGE)


def read_two_numbers(told: str) -> tuple[int, int]:
    """The members, and the examples of the one with the fewest. Raises ValueError if the answer cannot be used."""
    numbers = told.split()
    if len(numbers) != 2 or not all(each.isdecimal() for each in numbers):
        raise ValueError(f"{told!r} is not two numbers; write them as 3 300")
    return read_members(numbers[0]), read_examples(numbers[1])


def read_members(told: str) -> int:
    """The number of members. Raises ValueError if the answer cannot be used."""
    if (number := _number(told)) < 3:
        raise ValueError(f"members: secure aggregation needs three members or more, got {number}")
    return number


def read_examples(told: str) -> int:
    """The examples of the member with the fewest. Raises ValueError if the answer cannot be used."""
    if (number := _number(told)) < 1:
        raise ValueError(f"examples: the member with the fewest needs one or more, got {number}")
    return number


def _number(told: str) -> int:
    if not told.strip().isdecimal():
        raise ValueError(f"{told!r} is not a number")
    return int(told)


def read_labels(told: str) -> tuple[str, ...]:
    """The labels. Raises ValueError if the answer cannot be used."""
    labels = labels_of(told)
    if "" in labels or len(set(labels)) != len(labels):
        raise ValueError(f"{told!r}: a label is {'empty' if '' in labels else 'named twice'}")
    if len(labels) < 2:
        raise ValueError(f"{told!r}: a job needs two labels or more")
    return labels


def read_epsilon(told: str) -> float | None:
    """The epsilon; None: no noise. Raises ValueError if the answer cannot be used."""
    if told == "none":
        return None
    try:
        epsilon = float(told)
    except ValueError:
        epsilon = math.nan
    if not math.isfinite(epsilon):
        raise ValueError(f"{told!r} is neither a number nor none")
    if epsilon <= 0:
        raise ValueError(f"must be above 0, or none for a job without noise, got {epsilon:g}")
    return epsilon


def read_texts(told: str) -> "Texts":
    """The kind of texts. Raises ValueError if the answer cannot be used."""
    from coordinator.cli.new_job import TEXTS

    for each in TEXTS:
        if each == told:
            return each
    raise ValueError(f"{told!r} is not one of {', '.join(TEXTS)}")
