"""Draws persons instead of rows: who is in a step, which of their rows, and how these count.

A person is drawn with the rate, and of its rows at most `max_examples`, every set of that size equally likely. Both
come from the member's cryptographic source, anew for each step. So the choice is a part of the mechanism's own coins:
a person's contribution is a function of its own rows, the weights so far and these coins, whatever others have.
docs/persons.md has the theorem.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learning.mechanisms.noise import draw_fixed, draw_poisson
from learning.text.corpus import EncodedExamples
from secure_agg import RandomSource
from tacit.job import JobDocument
from tacit.mechanism import DpSgd, PersonRows

__all__ = ["DrawnPersons", "Persons", "persons_in"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DrawnPersons:
    """The rows of a draw.

    Attributes:
        rows: (R,) Places of the rows.
        person: (R,) Whose each is, ascending: 0 to P - 1, numbered within this draw.
        weights: (R,) How much each row's gradient counts in its person's.
    """

    rows: Ints
    person: Ints
    weights: NDArray[np.float64]

    @property
    def persons(self) -> int:
        """P, the drawn persons that have a row."""
        return int(self.person[-1]) + 1 if len(self.person) else 0

    def only(self, which: NDArray[np.bool_]) -> "DrawnPersons":
        """The draw with some persons, by a mask (R,) that is equal for all rows of a person."""
        person = np.unique(self.person[which], return_inverse=True)[1].astype(np.int64)
        return DrawnPersons(self.rows[which], person, self.weights[which])

    def pieces(self, most: int, lengths: Ints | None = None) -> Iterator["DrawnPersons"]:
        """The draw in pieces of whole persons that have equally many rows.

        A piece's rows are laid side by side, each person as wide as the others. So no person is laid out or added up in
        another way because of what others have.

        Args:
            most: The most rows of a piece, unless it is one person.
            lengths: (R,) The padded length of each row. All persons of a piece have the same longest row, so nobody's
                padding depends on another person. None: rows have no padding.
        """
        counts = np.bincount(self.person, minlength=self.persons)
        first = np.cumsum(counts) - counts
        longest = np.zeros_like(counts)
        if lengths is not None:
            np.maximum.at(longest, self.person, lengths)
        order = np.lexsort((counts, longest))
        start = 0
        for end in range(1, len(order) + 1):
            if (
                end == len(order)
                or longest[order[end]] != longest[order[start]]
                or counts[order[end]] != counts[order[start]]
                or (end + 1 - start) * counts[order[end]] > most
            ):
                chosen = order[start:end]
                at = np.concatenate([np.arange(first[each], first[each] + counts[each]) for each in chosen])
                person = np.repeat(np.arange(len(chosen), dtype=np.int64), counts[chosen])
                yield DrawnPersons(self.rows[at], person, self.weights[at])
                start = end


class Persons:
    """Whose each row of a training is.

    Args:
        of_rows: (U,) The person of each row that is trained on, 0 to count - 1.
        count: P, all the member's persons, with those of whom no row is trained on.
        use: What a draw uses of a person.
    """

    def __init__(self, of_rows: Ints, count: int, use: PersonRows) -> None:
        if len(of_rows) and not 0 <= int(of_rows.min()) <= int(of_rows.max()) < count:
            raise ValueError(f"persons of rows must be 0 to {count - 1}")
        self.count = count
        self._use = use
        self._rows = np.argsort(of_rows, kind="stable")
        self._first = np.searchsorted(of_rows[self._rows], np.arange(count + 1))

    def all_rows(self, most: int) -> list[Ints]:
        """The rows of each person of whom every row is drawn; nobody's if `most` pairs of rows might not hold them all.

        Whether a person is here follows from its own rows and from public numbers, never from what others have.
        """
        limit = self._use.max_examples
        if self.count * (limit * (limit + 1) // 2) > most:
            return []
        counts = np.diff(self._first)
        return [
            self._rows[self._first[at] : self._first[at + 1]]
            for at in np.flatnonzero((counts > 0) & (counts <= limit)).tolist()
        ]

    def draw(self, rate: float, random: RandomSource) -> DrawnPersons:
        """Draws each person with probability `rate`, and of each at most `max_examples` rows."""
        rows: list[Ints] = []
        for person in draw_poisson(self.count, rate, random).tolist():
            own = self._rows[self._first[person] : self._first[person + 1]]
            if len(own) > self._use.max_examples:
                own = own[draw_fixed(len(own), self._use.max_examples, random)]
            if len(own):
                rows.append(own)
        counts = np.array([len(each) for each in rows], dtype=np.int64)
        each = 1.0 / counts if self._use.combine == "mean" else np.ones(len(counts))
        return DrawnPersons(
            np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64),
            np.repeat(np.arange(len(rows), dtype=np.int64), counts),
            np.repeat(each, counts),
        )


def persons_in(job: JobDocument, corpus: EncodedExamples, usable: Ints) -> tuple[int, Ints | None]:
    """N of the job on this corpus, and the person of each usable example if the mechanism draws persons.

    Args:
        job: The job.
        corpus: The member's examples.
        usable: (U,) places of the usable examples among all.
    """
    if not isinstance(job.mechanism, DpSgd) or job.mechanism.unit != "person":
        return corpus.population, None
    people, population = corpus.people()
    return population, people[usable]
