"""The prompts and responses of a cell: who holds which rows, what decides between recipes, and what is tested.

Guarantees: rows of the test file are read by chosen recipes alone, and validation rows decide between them. All draws
are fixed by seeds, so every cell of a data set is tested on the same rows. No prompt of the validation rows is among
the members' rows.

E2E NLG is dealt to ten equal members. MedQuAD is divided by its source, into nine unlike ones. Each of the first
`CANARIES` members also holds a canary (`learning.auditing.exposure`), in `COPIES` equal rows.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np

from benchmarks.library.record import SHARED, NoData
from learning.auditing.exposure import Canary, make_canaries
from simulation.virtual_members import SeededRandom

__all__ = ["CANARIES", "COPIES", "DATASETS", "Data", "Dataset", "Pair", "Tested", "read_pairs", "shuffled"]

CANARIES = 5
# As many as rows of one text that many people copy. By epsilon's promise for a row, so many copies are protected less.
COPIES = 20
_SEED = 20280

T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """A prompt and its response."""

    prompt: str
    response: str


@dataclass(frozen=True)
class Tested:
    """A prompt with all its references."""

    prompt: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """A public data set.

    Args:
        members: equal parts; 0 divides by source.
        validation: name of its validation file; None holds training prompts back.
        max_tokens: of a row, prompt and response together.
        max_new_tokens: of a generated answer.
        scored: test rows whose loss is measured, one reference for each prompt.
        answered: test prompts that are answered.
    """

    members: int
    validation: str | None
    max_tokens: int
    max_new_tokens: int
    scored: int
    answered: int


DATASETS: dict[str, Dataset] = {
    "e2e_nlg": Dataset(10, "dev", max_tokens=160, max_new_tokens=64, scored=300, answered=100),
    "medquad": Dataset(0, None, max_tokens=256, max_new_tokens=128, scored=150, answered=50),
}


@dataclass(frozen=True)
class Data:
    """A data set's rows, each member's by its name.

    Attributes:
        members: Training rows by member, without canaries, in a fixed random order.
        canaries: What is planted, by the member that holds it.
        validation: Rows that decide between recipes.
        test: Rows whose loss is measured.
        answered: Prompts that are answered.
    """

    members: Mapping[str, Sequence[Pair]]
    canaries: Mapping[str, Canary]
    validation: Sequence[Pair]
    test: Sequence[Pair]
    answered: Sequence[Tested]

    def planted(self, member: str, copies: int = COPIES) -> list[Pair]:
        """The rows of a member's canary; none if it holds none."""
        canary = self.canaries.get(member)
        return [] if canary is None else [Pair(canary.prompt, canary.response)] * copies


@cache
def read_pairs(name: str, *, validation: int = 150) -> Data:
    """Read a data set of DATASETS.

    Args:
        validation: rows that decide between recipes.

    Raises:
        NoData: a file is missing.
    """
    known, train = DATASETS[name], _rows(name, "train")
    if known.validation is None:
        # Whole prompts, so that no prompt is on both sides.
        prompts = shuffled(sorted({row["prompt"] for row in train}), "validation")
        back = set(prompts[:validation])
        judged = [Tested(row["prompt"], (row["response"],)) for row in train if row["prompt"] in back]
        train = [row for row in train if row["prompt"] not in back]
    else:
        judged = [_tested(row) for row in _rows(name, known.validation)]
    tested = [_tested(row) for row in _rows(name, "test")]
    canaries = make_canaries(CANARIES, SeededRandom(f"{_SEED}/canaries"))
    members = {member: shuffled(rows, member) for member, rows in _parts(known, train).items()}
    order = shuffled(tested, "test")
    return Data(
        members=members,
        canaries=dict(zip(members, canaries, strict=False)),
        validation=[_one(each) for each in shuffled(judged, "judged")[:validation]],
        test=[_one(each) for each in order[: known.scored]],
        answered=order[: known.answered],
    )


def shuffled(rows: Sequence[T], what: str) -> list[T]:
    """Return the rows in a random order that the name of the draw fixes."""
    seed = int.from_bytes(SeededRandom(f"{_SEED}/{what}").bytes(8))
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(rows))
    return [rows[at] for at in order]


def _parts(known: Dataset, train: Sequence[Mapping[str, Any]]) -> dict[str, list[Pair]]:
    if not known.members:
        found: dict[str, list[Pair]] = {}
        for row in train:
            found.setdefault(row["source"], []).append(Pair(row["prompt"], row["response"]))
        return dict(sorted(found.items()))
    rows = shuffled([Pair(row["prompt"], row["response"]) for row in train], "members")
    return {f"member-{number:02d}": rows[number :: known.members] for number in range(known.members)}


def _tested(row: Mapping[str, Any]) -> Tested:
    return Tested(row["prompt"], tuple(row["references"] if "references" in row else [row["response"]]))


def _one(tested: Tested) -> Pair:
    """One of a prompt's references, by a draw of its own."""
    return Pair(tested.prompt, shuffled(tested.references, tested.prompt)[0])


def _rows(name: str, part: str) -> list[dict[str, Any]]:
    path = SHARED / name / f"{part}.jsonl.gz"
    if not path.exists():
        raise NoData(f"{path} is missing: this benchmark reads {name}; put it there")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
