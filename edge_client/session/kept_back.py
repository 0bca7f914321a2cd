"""The rows that a member keeps back from every training, to measure versions on. None are, unless its policy says so.

The rows are the same in all jobs and for good, by a key of this home (HOME/ledgers/validation.key): what one job was
trained on is never what another is measured on. Guarantees and limits are those of `learning.validation.split`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.ledger.home_key import home_key
from edge_client.policy.document import PolicyDocument
from learning.text.examples import Example
from learning.text.persons import population_of, units_of
from tacit.mechanism import Unit
from tacit.validation import MetricNoise

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from learning.validation.measuring import ValidationData
    from learning.validation.split import Split

__all__ = ["KeptBack"]


@dataclass(frozen=True)
class KeptBack:
    """A member's division of its rows, the unit of each, and N, the rows or the persons."""

    split: "Split"
    units: Sequence[bytes]
    population: int

    @classmethod
    def of(cls, home: Path, policy: PolicyDocument, examples: Sequence[Example]) -> "KeptBack | None":
        """Divides the rows as the policy says; None if it keeps none back.

        Raises:
            LedgerError: The key cannot be read or made.
        """
        if not policy.measures:
            return None
        from learning.validation.split import Split, unit_of

        lost = "rows then change sides, and estimates may be too good until the models have forgotten"
        key = home_key(home / "ledgers" / "validation.key", lost)
        persons = units_of(examples) if policy.unit == "person" else None
        units = [unit_of(each) for each in examples] if persons is None else persons
        return cls(Split(key, policy.validation_share), units, population_of(examples, policy.unit))

    def rows(self, planted: int = 0) -> "NDArray[np.bool_]":
        """(N + planted,) The rows that no training uses. Planted canaries stand behind the rows, and are trained on."""
        return _with_planted(self.split.kept_back(self.units), planted)

    def to_measure(
        self, noise: MetricNoise, unit: Unit, *, everything: bool = False, planted: int = 0
    ) -> "ValidationData":
        """The rows that this member measures: of those that it keeps back, or of all; never a planted canary.

        Args:
            noise: Says for how many units the vector has room.
            unit: What the mechanism protects. If it is the member, all rows are one unit, for which there is room.
            everything: Whether rows that are trained on are measured too.
            planted: Canaries behind the rows.
        """
        from learning.validation.measuring import ValidationData

        most = None if unit == "member" else noise.max_units
        measured = self.split.measured(self.units, most, self.population, everything=everything)
        return ValidationData(_with_planted(measured, planted), self.units)


def _with_planted(rows: "NDArray[np.bool_]", planted: int) -> "NDArray[np.bool_]":
    import numpy as np

    return np.concatenate([rows, np.zeros(planted, dtype=np.bool_)])
