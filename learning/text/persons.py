"""Whose rows belong together: persons of a data set, and how many rows each has. No torch.

A person is a value of the column that the member names: the same characters (NFC), the same person. A row without one
(a planted canary) is a person of its own, so it moves no other person's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from learning.text.examples import Example
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import NoMechanism, Unit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["RowsPerPerson", "persons_of", "population_of", "unit_of_job", "units_of"]


def persons_of(examples: Sequence[Example]) -> "NDArray[np.int64]":
    """(N,) The number of each row's person: 0, 1, 2, ... by the person's first row."""
    import numpy as np

    known: dict[object, int] = {}
    keys = ((at,) if each.person is None else each.person for at, each in enumerate(examples))
    return np.fromiter((known.setdefault(key, len(known)) for key in keys), dtype=np.int64, count=len(examples))


def unit_of_job(job: JobDocument | JobSpec) -> Unit:
    """What a job's mechanism protects; an example if it adds no noise."""
    return "example" if isinstance(job.mechanism, NoMechanism) else job.mechanism.unit


def population_of(examples: Sequence[Example], unit: Unit) -> int:
    """N of a plan or charge: the persons among the rows if the unit is a person, and else the rows."""
    if unit != "person":
        return len(examples)
    named = {each.person for each in examples if each.person is not None}
    return len(named) + sum(each.person is None for each in examples)


def units_of(examples: Sequence[Example]) -> list[bytes] | None:
    """The bytes that name each row's person; None if the rows were read without persons."""
    if any(each.person is None for each in examples):
        return None
    return [str(each.person).encode("utf-8", "surrogatepass") for each in examples]


@dataclass(frozen=True)
class RowsPerPerson:
    """How many rows the persons of a data set have. It stays on this machine.

    Attributes:
        column: The column that names them.
        persons: How many there are.
        median: Rows of the middle one.
        most: Rows of the one with the most.
        above: How many have more rows than a draw uses.
        used: The rows of a person that a draw uses at most; None if no job says so.
    """

    column: str
    persons: int
    median: int
    most: int
    above: int = 0
    used: int | None = None

    @classmethod
    def of(cls, examples: Sequence[Example], column: str, used: int | None = None) -> "RowsPerPerson":
        """Counts the rows of each person."""
        counts = sorted(Counter(each.person for each in examples).values())
        above = 0 if used is None else sum(count > used for count in counts)
        return cls(column, len(counts), counts[len(counts) // 2], counts[-1], above, used)

    @property
    def sentence(self) -> str:
        """The counts in words."""
        rows = f"{self.median} row{'' if self.median == 1 else 's'}"
        said = (
            f"{self.persons:,} persons by column {self.column!r}: the middle one has {rows}, the largest {self.most:,}"
        )
        if self.used is None:
            return said
        return f"{said}; a draw uses at most {self.used} rows of a person, and {self.above:,} have more"

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self)
