"""Partitions a public data set among the members of a simulation.

Guarantees: the same rows, members and seed give the same partition on every machine. Every row is dealt exactly once.
Every member gets at least `least` rows, or an error says why that is impossible.

The partitions keep the last guarantee in different ways. `by_label`: all members get equally many rows (the
configuration of FedNLP, Lin et al. 2021, which the FedVocab paper follows). `by_quantity`: each member gets `least`
rows first, and only the rest is drawn. `by_ratios`: ratios that leave a member too few rows are refused. `by_column`:
values with too few rows are joined.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

__all__ = ["Partition", "Split", "by_column", "by_label", "by_quantity", "by_ratios", "split"]

Rows = NDArray[np.int64]
# Ratios that a sentence names.
_MAX_RATIOS = 8


@dataclass(frozen=True)
class Partition:
    """The rows of each member, ascending. names: of the members, if the data has any; otherwise empty."""

    members: tuple[Rows, ...]
    names: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows dealt."""
        return sum(map(len, self.members))

    def counts(self, labels: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Count each member's rows by label.

        Args:
            labels: of all rows.

        Returns:
            The distinct labels, sorted, and the counts, (members, labels).
        """
        names, places = _places(labels)
        table = [np.bincount(places[rows], minlength=len(names)) for rows in self.members]
        return names, np.array(table, dtype=np.int64).reshape(len(self.members), len(names))


@dataclass(frozen=True)
class Split:
    """One member's rows, for training, validation and test."""

    train: Rows
    validation: Rows
    test: Rows


def by_label(labels: Sequence[str], members: int, alpha: float, seed: int, *, least: int = 1) -> Partition:
    """Deal equally many rows to each (to within one), in label proportions that each member draws from Dir(alpha).

    Members take their rows one after another. When a label runs out, later members' proportions lose it, so the last
    members take what is left, whatever they drew. A smaller alpha makes members less alike; 0.1 gives most of them one
    or two labels.

    Raises:
        ValueError: alpha not above 0, no members, or fewer than `least` rows for each.
    """
    _check(len(labels), members, least)
    _check_alpha(alpha)
    random = _random("label", seed)
    names, places = _places(labels)
    shelves = [random.permutation(np.flatnonzero(places == label)) for label in range(len(names))]
    left = np.array([len(shelf) for shelf in shelves])
    dealt: list[Rows] = []
    for size in _even(len(labels), members):
        wanted = random.dirichlet(np.full(len(names), alpha))
        taken = _drawn(wanted, left, size, random)
        rows = [shelf[have - take : have] for shelf, have, take in zip(shelves, left, taken, strict=True)]
        left = left - taken
        dealt.append(np.sort(np.concatenate(rows)))
    return Partition(tuple(dealt))


def by_quantity(rows: int, members: int, alpha: float, seed: int, *, least: int = 1) -> Partition:
    """Deal random rows: `least` to each member, and the rest in proportions drawn from Dir(alpha) over the members.

    Raises:
        ValueError: alpha not above 0, no members, or fewer than `least` rows for each.
    """
    _check(rows, members, least)
    _check_alpha(alpha)
    random = _random("quantity", seed)
    shares = random.dirichlet(np.full(members, alpha))
    return _dealt(least + _apportioned(shares, rows - least * members), random)


def by_ratios(rows: int, ratios: Sequence[float], seed: int, *, least: int = 1) -> Partition:
    """Deal random rows in these ratios: (1, 1, 3) gives the third member three fifths.

    Raises:
        ValueError: no ratios, one that is not above 0, or one that leaves its member fewer than `least` rows.
    """
    shares = np.array(ratios, dtype=np.float64)
    if not len(shares) or not np.isfinite(shares).all() or (shares <= 0).any():
        raise ValueError(f"{_said(ratios)}: give one for each member, each above 0")
    sizes = _apportioned(shares / shares.sum(), rows)
    if sizes.min() < least:
        raise ValueError(
            f"{_said(ratios)} leave a member {sizes.min()} of {rows} rows, and each needs {least}; "
            "take ratios that differ less, or more rows"
        )
    return _dealt(sizes, _random("ratios", seed))


def by_column(values: Sequence[str], *, least: int = 1) -> Partition:
    """Make a member for each value of a column (an author, a hospital), sorted by value.

    Values with fewer than `least` rows are joined, the rarest first, into members with at least `least` rows. Their
    names are joined by "+".

    Raises:
        ValueError: fewer than `least` rows in all.
    """
    _check(len(values), 1, least)
    names, places = _places(values)
    counts = np.bincount(places, minlength=len(names))
    groups: list[list[int]] = []
    for value in sorted(range(len(names)), key=lambda value: (counts[value], value)):
        # A group that is too small takes the next value, however many rows the value has.
        if groups and counts[groups[-1]].sum() < least:
            groups[-1].append(value)
        else:
            groups.append([value])
    if counts[groups[-1]].sum() < least:
        # No value is left for the last group.
        groups[-2:] = [groups[-2] + groups[-1]]
    found = {"+".join(names[value] for value in sorted(group)): group for group in groups}
    return Partition(
        tuple(np.flatnonzero(np.isin(places, found[name])) for name in sorted(found)), tuple(sorted(found))
    )


def split(rows: Rows, seed: int, *, validation: float = 0.1, test: float = 0.2) -> Split:
    """Split a member's rows at random into training, validation and test, each with at least one row, ascending.

    Raises:
        ValueError: fewer than three rows, or shares that leave nothing to train on.
    """
    if len(rows) < 3:
        raise ValueError(f"{len(rows)} rows cannot be split in three; deal each member at least three")
    if min(validation, test) <= 0 or validation + test >= 1:
        raise ValueError(
            f"shares of {validation:g} and {test:g} leave a part empty; both must be above 0, with a sum below 1"
        )
    order = _random("split", seed).permutation(rows)
    tested = max(1, round(test * len(rows)))
    chosen_by = max(1, round(validation * len(rows)))
    parts = np.split(order, [tested, tested + chosen_by])
    if not len(parts[2]):
        raise ValueError(f"{len(rows)} rows leave none to train on; deal each member more, or test less")
    return Split(train=np.sort(parts[2]), validation=np.sort(parts[1]), test=np.sort(parts[0]))


def _check(rows: int, members: int, least: int) -> None:
    if members < 1 or least < 1:
        raise ValueError(f"{members} members with at least {least} rows each: both numbers must be 1 or more")
    if rows < members * least:
        raise ValueError(f"{rows} rows are too few for {members} members with {least} each; take fewer members")


def _said(ratios: Sequence[float]) -> str:
    if len(ratios) > 1 and len(set(ratios)) == 1:
        return f"{len(ratios)} equal shares"
    listed = ", ".join(f"{each:g}" for each in ratios[:_MAX_RATIOS])
    return f"ratios {listed or '(none)'}{f' ... ({len(ratios)} in all)' if len(ratios) > _MAX_RATIOS else ''}"


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < inf:
        raise ValueError(f"alpha = {alpha:g} must be a number above 0; a large one makes members alike")


def _random(what: str, seed: int) -> np.random.Generator:
    """Return an independent stream for each kind of draw from one seed."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *what.encode()])))


def _places(labels: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    names = tuple(sorted(Counter(labels)))
    place = {name: at for at, name in enumerate(names)}
    return names, np.array([place[label] for label in labels], dtype=np.int64)


def _even(rows: int, members: int) -> list[int]:
    return [rows // members + (member < rows % members) for member in range(members)]


def _drawn(
    wanted: NDArray[np.float64], left: NDArray[np.int64], size: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Return how many rows of each label a member takes: multinomial draws, repeated without labels that ran out."""
    taken = np.zeros(len(left), dtype=np.int64)
    while (short := size - int(taken.sum())) > 0:
        open_labels = left > taken
        chances = np.where(open_labels, wanted, 0.0)
        if chances.sum() <= 0:
            # All labels that it drew have run out.
            chances = np.where(open_labels, left - taken, 0.0)
        taken = np.minimum(left, taken + random.multinomial(short, chances / chances.sum()))
    return taken


def _apportioned(shares: NDArray[np.float64], rows: int) -> NDArray[np.int64]:
    """Return whole numbers in these shares that sum to `rows`: by largest remainders, the first of equal ones."""
    exact = shares * rows
    sizes = np.floor(exact).astype(np.int64)
    order = np.argsort(sizes - exact, kind="stable")
    sizes[order[: rows - int(sizes.sum())]] += 1
    return sizes


def _dealt(sizes: NDArray[np.int64], random: np.random.Generator) -> Partition:
    order = random.permutation(int(sizes.sum()))
    return Partition(tuple(np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])))
