"""Reads rows from what a notebook has: a file, a data frame, a data set, or a list."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from learning.text.data import examples_of
from learning.text.examples import DataInvalid, Example
from learning.text.row import RowsFor
from simulation.trial import Rows, column_of

__all__ = ["Data", "rows_of"]

# A path, a pandas DataFrame, a `datasets` Dataset, or rows as mappings or pairs (text, label).
Data = Any


def rows_of(
    data: Data,
    *,
    text: str,
    label: str | None,
    text_b: str | None = None,
    person: str | None = None,
    prompt: str | None = None,
    response: str | None = None,
    messages: str | None = None,
    column: str | None = None,
    rows_for: RowsFor | None = None,
) -> Rows:
    """Return labelled rows, and a column that members are made of.

    The rules are those of files (`learning.text.data`), so the same rows in a file have the same marks in a ledger.

    Args:
        data: rows.
        text, label, text_b, person, prompt, response, messages, column: names of columns. label: None reads dialogues.
        rows_for: which columns a sentence asks for if there is no text and no dialogue; None: by the label.

    Raises:
        DataInvalid: a column is missing, or a cell cannot be read.
    """
    if isinstance(data, str | Path):
        raise TypeError("paths are read by `simulation.trying.read_rows`")
    rows = list(_mappings(data, text, label or "label"))
    if not rows:
        raise DataInvalid("there are no rows; give at least some of each label")
    try:
        turns: dict[str, Any] = {"prompt": prompt, "response": response, "messages": messages}
        turns["rows_for"] = rows_for or ("texts" if label is not None else "texts or dialogues")
        found = tuple(examples_of(rows, text=text, label=label, text_b=text_b, person=person, **turns))
        values = () if column is None else column_of(_sites(rows, column, text, turns), column)
    except DataInvalid as error:
        # The same sentences as of a command, with a function's arguments.
        said = re.sub(r"--([a-z]+)(-b)?", lambda option: f"{option[1]}{'_b' if option[2] else ''}=", str(error))
        raise DataInvalid(said) from None
    return Rows(found, values)


def _sites(rows: list[dict[str, object]], column: str, text: str, turns: Mapping[str, Any]) -> list[Example]:
    """Read the rows with the value of the column in place of the label. Raises DataInvalid."""
    try:
        return list(examples_of(rows, text=text, label=column, **turns))
    except DataInvalid as error:
        # The label's option does not name this column.
        raise DataInvalid(str(error).replace("with --label", "with --column")) from None


def _mappings(data: Data, text: str, label: str) -> Iterator[dict[str, object]]:
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        if not hasattr(data.columns, "is_unique"):
            library = type(data).__module__.partition(".")[0]
            raise DataInvalid(
                f"a {type(data).__name__} of {library} is not read; give its rows (in polars: frame.to_dicts()), or a "
                "pandas DataFrame"
            )
        # A pandas DataFrame.
        if not data.columns.is_unique:
            raise DataInvalid("two columns of the data frame have the same name; give every column its own")
        data = data.to_dict("records")
    if not isinstance(data, Iterable):
        raise DataInvalid(
            f"{type(data).__name__} is no data; give a path, a DataFrame, a datasets.Dataset, or a list of rows"
        )
    for each in data:
        row = each if isinstance(each, Mapping) else _pair(each, text, label)
        yield {str(name): _plain(value) for name, value in row.items()}


def _plain(value: object) -> object:
    """A cell as JSON has it: numpy's numbers are numbers, and its arrays lists."""
    return cast(object, value.tolist()) if isinstance(value, np.generic | np.ndarray) else value


def _pair(row: object, text: str, label: str) -> Mapping[Any, Any]:
    if isinstance(row, tuple | list) and len(row) == 2:
        return {text: row[0], label: row[1]}
    raise DataInvalid(f"{type(row).__name__} is no row; give mappings of columns, or pairs (text, label)")
