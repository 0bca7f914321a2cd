"""Examples: what is read of a member's rows, and whether they fit a job.

Guarantees: no error has anything of a text, and no example prints one.

Leaves to others: how rows are read (`learning.text.data`), what a label means (`label_ids` only looks it up), and how
text becomes numbers (`learning.text.encoder`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learning.text.turns import Dialogue
from tacit.generation import ROLES, Role

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "MESSAGES",
    "PROMPT",
    "RESPONSE",
    "TEXT",
    "TEXT_B",
    "ColumnMissing",
    "DataInvalid",
    "Example",
    "RowInvalid",
    "TextRow",
    "check_dialogues",
    "check_labels",
    "check_pairs",
    "dialogue_of",
    "label_ids",
    "label_places",
    "text_rows",
]

# What a job's encoder reads of an example: its text, or a pair of texts.
TextRow = str | tuple[str, str]
# The default columns of the text, of a pair's second text, and of a dialogue.
TEXT, TEXT_B = "text", "text_b"
PROMPT, RESPONSE, MESSAGES = "prompt", "response", "messages"


class DataInvalid(ValueError):
    """The data cannot be used; the text says where and what to do."""


class RowInvalid(DataInvalid):
    """One row cannot be read, while others can. `where` is like `line 3`; `what` is the fault and what to do."""

    def __init__(self, name: str, line: int, what: str, unit: str = "line") -> None:
        super().__init__(f"{name}, {unit} {line}: {what}")
        self.where, self.what = f"{unit} {line}", what


class ColumnMissing(DataInvalid):
    """A table's header lacks a column. This follows from its form alone, whatever its rows have."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row. `text_b` is the second text of a pair, or None. It prints neither its texts nor its person.

    `dialogue` is what a model that writes reads of it, or None. If the row has no text beside it, `text` is what the
    dialogue's prompts say, and `text_b` what its responses say, or None if it has none.

    `person` names whose row it is, if the data was read with its column; a row without one is a person of its own.
    """

    text: str
    label: str | None
    text_b: str | None = None
    person: str | None = None
    dialogue: Dialogue | None = None

    @property
    def texts(self) -> TextRow:
        """All its text, whatever a job reads of it: a pair if there is a second text."""
        return self.text if self.text_b is None else (self.text, self.text_b)

    def __repr__(self) -> str:
        second = "" if self.text_b is None else f", text_b=<{len(self.text_b)} characters>"
        return f"Example(text=<{len(self.text)} characters>, label={self.label!r}{second})"


def _shown(label: str) -> str:
    # If the column is wrong, labels are whole texts.
    return repr(label) if len(label) <= 40 else f"(one of {len(label)} characters)"


def check_labels(examples: Sequence[Example], labels: Sequence[str]) -> None:
    """Checks that every example has one of these labels.

    Raises:
        DataInvalid: An example has no label, or labels are unknown; the text names them and says what to do.
    """
    known = set(labels)
    counts: dict[str, int] = {}
    for example in examples:
        if example.label is None:
            raise DataInvalid("an example has no label; read the data with its label column")
        if example.label not in known:
            counts[example.label] = counts.get(example.label, 0) + 1
    if not counts:
        return
    unknown = sorted(counts, key=lambda label: (-counts[label], label))
    listed = ", ".join(f"{_shown(label)} ({counts[label]} rows)" for label in unknown[:5])
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    raise DataInvalid(
        f"the job does not know these labels: {listed}{more}. It knows {', '.join(map(repr, labels))}; "
        "rename or remove the others, or name the right column with --label"
    )


def check_pairs(examples: Sequence[Example], *, second_column: bool = True) -> None:
    """Checks that every example has a second text. `second_column` is as `read_data` found it.

    Raises:
        ColumnMissing: There is no second column; this does not depend on any row.
        DataInvalid: Some rows have no second text; the text says how many, and how to name the column.
    """
    if not second_column:
        raise ColumnMissing(
            f"the job reads pairs of texts, and the table has no column {TEXT_B!r}; name the column of the second "
            "text with --text-b"
        )
    lacking = sum(example.text_b is None for example in examples)
    if not lacking:
        return
    if lacking == len(examples):
        raise DataInvalid(
            f"the job reads pairs of texts, and no row has a second text in a column {TEXT_B!r}; name the column of "
            "the second text with --text-b"
        )
    raise DataInvalid(
        f"the job reads pairs of texts, and {lacking} of {len(examples)} rows have no second text in column "
        f"{TEXT_B!r}; fill or remove them, or name the right column with --text-b"
    )


def check_dialogues(
    examples: Sequence[Example], roles: Collection[Role] = ROLES, *, dialogue_columns: bool = True
) -> None:
    """Checks that every example is a dialogue that a model can learn to answer.

    Args:
        examples: The examples.
        roles: The roles that the job's template has.
        dialogue_columns: As `read_data` found it.

    Raises:
        ColumnMissing: There are no columns of dialogues; this does not depend on any row.
        DataInvalid: Some rows have no dialogue, no response, or a turn of another role; the text says how many.
    """
    wanted = f"a {PROMPT!r} and a {RESPONSE!r}, or {MESSAGES!r}"
    if not dialogue_columns:
        raise ColumnMissing(
            f"the job's model writes, and the table has neither the columns {PROMPT!r} and {RESPONSE!r} nor a column "
            f"{MESSAGES!r}; name yours with --prompt and --response, or with --messages"
        )
    if lacking := sum(dialogue_of(example, roles) is None for example in examples):
        raise DataInvalid(
            f"the job's model writes, and {lacking} of {len(examples)} rows have no response to learn from ({wanted}, "
            f"with turns of {', '.join(roles)} only); fill or remove them, or name the right columns with --prompt and "
            "--response, or with --messages"
        )


def dialogue_of(example: Example, roles: Collection[Role] = ROLES) -> Dialogue | None:
    """The example's dialogue up to its last response, if that has a text and all roles are among these; else None."""
    found = None if example.dialogue is None else example.dialogue.answered
    if found is None or not found.turns or not found.turns[-1].text.strip():
        return None
    return found if all(turn.role in roles for turn in found.turns) else None


def text_rows(examples: Sequence[Example], *, pairs: bool) -> list[TextRow]:
    """What an encoder reads of each example: one text, or with `pairs` two.

    Raises:
        DataInvalid: As in `check_pairs`.
    """
    if not pairs:
        return [example.text for example in examples]
    check_pairs(examples)
    return [(example.text, example.text_b or "") for example in examples]


def label_ids(examples: Sequence[Example], labels: Sequence[str]) -> "NDArray[np.int64]":
    """The index of each example's label in `labels`, shape (N,). Raises like `check_labels`."""
    import numpy as np

    check_labels(examples, labels)
    index = {label: at for at, label in enumerate(labels)}
    return np.array([index[example.label or ""] for example in examples], dtype=np.int64)


def label_places(examples: Sequence[Example], labels: Sequence[str]) -> "NDArray[np.int64]":
    """The index of each example's label in `labels`, or -1 if it is unknown, shape (N,). Never fails."""
    import numpy as np

    index = {label: at for at, label in enumerate(labels)}
    return np.array([index.get(example.label or "", -1) for example in examples], dtype=np.int64)
