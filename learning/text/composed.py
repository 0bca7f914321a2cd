"""Rows for the entries of a member's own vocabulary, made from those of a base model's word pieces."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from learning.text.encoder import PAD, UNKNOWN

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["composed_rows", "pieces_of"]

_INSIDE = "##"


def pieces_of(entry: str, base: Mapping[str, int]) -> list[int]:
    """The rows of the base's pieces that an entry consists of, longest piece first, as WordPiece splits a word.

    An entry that begins with ## continues a word, and so do its pieces.

    Returns:
        The rows in the order of the entry; empty if the base cannot spell it.
    """
    if entry in base:
        return [base[entry]]
    inside = entry.startswith(_INSIDE)
    rest, found = entry.removeprefix(_INSIDE), []
    while rest:
        start = _INSIDE if inside else ""
        length = next((size for size in range(len(rest), 0, -1) if start + rest[:size] in base), 0)
        if not length:
            return []
        found.append(base[start + rest[:length]])
        rest, inside = rest[length:], True
    return found


def composed_rows(
    own: Mapping[str, int], base: Mapping[str, int], table: "NDArray[np.float32]"
) -> "NDArray[np.float32]":
    """Makes the rows of an own vocabulary: each is the mean of the rows of the base's pieces that it consists of.

    An entry that the base has gets the base's row. One that the base cannot spell gets its row for unknown words.

    Args:
        own: `entries_of` the member's tokenizer. The padding's row, which it leaves out, is zero.
        base: `entries_of` the base's tokenizer.
        table: (V, width), the base's rows.

    Returns:
        (1 + the largest id of `own`, width). Ids without an entry have zeros.
    """
    rows = np.zeros((1 + max(own.values(), default=0), table.shape[1]), np.float32)
    known = {entry: row for entry, row in base.items() if entry != PAD}
    for entry, at in own.items():
        found = pieces_of(entry, known) or [known[UNKNOWN]]
        rows[at] = table[found].mean(axis=0)
    return rows
