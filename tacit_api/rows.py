"""Reads rows from what a notebook has: a file, a data frame, a data set, or a list."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from learning.text.data import DataInvalid, Example
from simulation.trial import Rows

__all__ = ["Data", "rows_of"]

# A path, a pandas DataFrame, a `datasets` Dataset, or rows as mappings or pairs (text, label).
Data = Any


def rows_of(data: Data, *, text: str, label: str, text_b: str | None = None, column: str | None = None) -> Rows:
    """Return labelled rows, and a column that members are made of.

    Args:
        data: rows.
        text, label, text_b, column: names of columns.

    Raises:
        DataInvalid: a column is missing, or a row has no text.
    """
    if isinstance(data, str | Path):
        raise TypeError("paths are read by `simulation.trying.read_rows`")
    found: list[Example] = []
    values: list[str] = []
    for number, row in enumerate(_mappings(data, text, label), 1):
        for name in filter(None, (text, label, text_b, column)):
            if name not in row:
                raise DataInvalid(f"row {number} has no {name!r}; it has {', '.join(map(str, row))[:200]}")
        said = row[text]
        if not isinstance(said, str) or not said.strip():
            raise DataInvalid(f"row {number} has no text in {text!r}; remove it, or fill it")
        second = None if text_b is None else row[text_b]
        if second is not None and not isinstance(second, str):
            raise DataInvalid(f"row {number} has no text in {text_b!r}; remove it, or fill it")
        found.append(Example(said, str(row[label]), second))
        if column is not None:
            values.append(str(row[column]))
    if not found:
        raise DataInvalid("there are no rows; give at least some of each label")
    return Rows(tuple(found), tuple(values))


def _mappings(data: Data, text: str, label: str) -> Iterable[Mapping[Any, Any]]:
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        # A pandas DataFrame.
        return cast(Iterable[Mapping[Any, Any]], data.to_dict("records"))
    if not isinstance(data, Iterable):
        raise DataInvalid(
            f"{type(data).__name__} is no data; give a path, a DataFrame, a datasets.Dataset, or a list of rows"
        )
    return (each if isinstance(each, Mapping) else _pair(each, text, label) for each in data)


def _pair(row: object, text: str, label: str) -> Mapping[Any, Any]:
    if isinstance(row, tuple | list) and len(row) == 2:
        return {text: row[0], label: row[1]}
    raise DataInvalid(f"{type(row).__name__} is no row; give mappings of columns, or pairs (text, label)")
