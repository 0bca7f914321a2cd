"""Fills rows of an embedding from a pretrained table: GloVe's text form, or another model's embedding.

Guarantees: only rows of entries that the table has are written, and never the padding's row. Tables of gigabytes are
read row by row, never whole. Errors name lines and shapes, and no word of the member's vocabulary.

Leaves to others: how the other rows start.
"""

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from learning.backbones.checkpoint import CheckpointInvalid, read_entries, read_shapes, read_tensors
from learning.text.encoder import PAD

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["NothingFound", "TableInvalid", "entries_of", "fill_from_table", "width_of", "words_of"]

_Each = TypeVar("_Each")

# The names of the token embedding in encoders of the transformers library.
_EMBEDDINGS = ("word_embeddings.weight", "embed_tokens.weight", "shared.weight")


class TableInvalid(ValueError):
    """The table of word vectors cannot be used; the text says where and what to do."""


class NothingFound(TableInvalid):
    """The table is sound, but has none of the requested entries."""


def fill_from_table(
    embedding: "NDArray[np.float32]", source: Path, ids: Mapping[str, int], *, named: str = "the table's path"
) -> int:
    """Writes the table's rows into an embedding.

    Args:
        embedding: (V, width), changed in place.
        source: A file in GloVe's text form, plain or .gz, or the folder of a checkpoint with word pieces
            (model.safetensors with vocab.txt or tokenizer.json).
        ids: `entries_of` the tokenizer.
        named: The option that an error tells its reader to change, such as "--embedding".

    Returns:
        How many entries the table has.

    Raises:
        TableInvalid: The table does not exist, has another width, or has invalid numbers. Rows before the fault are
            already written.
        NothingFound: The table has none of the entries.
    """
    rows = _checkpoint_rows if source.is_dir() else _text_rows
    found: set[str] = set()
    for entry, row in rows(source, embedding.shape[1], ids, named):
        # If a word occurs twice, its first row counts: tables start with the most frequent words.
        if entry not in found:
            embedding[ids[entry]] = row
            found.add(entry)
    if not found:
        raise NothingFound(
            f"{source}: none of its words is in the vocabulary; use a table of whole, lower-case words "
            "in the same language"
        )
    return len(found)


def entries_of(tokenizer_json: bytes) -> dict[str, int]:
    """A tokenizer's entries with their ids, in order of id, without the padding, whose row stays zero."""
    from tokenizers import Tokenizer

    ids: dict[str, int] = Tokenizer.from_str(tokenizer_json.decode()).get_vocab(with_added_tokens=True)
    return {entry: number for entry, number in sorted(ids.items(), key=lambda item: item[1]) if entry != PAD}


def words_of(source: Path, *, named: str = "the table's path") -> Iterator[str]:
    """Yields the words of a table in its order; published tables start with the most frequent.

    The table is read only as far as the caller iterates, and its numbers are not parsed. `source` and `named` are as in
    `fill_from_table`.

    Raises:
        TableInvalid: The table does not exist, or its first line is not a word with its vector.
    """
    if source.is_dir():
        with _as_table(named):
            pieces = _pieces_of(source, named)
        yield from sorted(pieces, key=pieces.__getitem__)
        return
    with _open_table(source, named) as lines:
        width = 0
        for each in lines:
            line = each.rstrip("\r\n ")
            # As many numbers as in the first line, from the right: some tables have words with a space.
            width = width or _width_of_first(line, source)
            yield line.rsplit(" ", width)[0]


def width_of(source: Path, *, named: str = "the table's path") -> int:
    """The numbers that a table has for each word, by its first line or by the shape of a checkpoint's embedding.

    A checkpoint's numbers are not read. `source` and `named` are as in `fill_from_table`.

    Raises:
        TableInvalid: The table does not exist or is empty, its first line is not a word with its vector, or a
            checkpoint's embedding does not fit its word pieces.
    """
    if source.is_dir():
        with _as_table(named):
            pieces = _pieces_of(source, named)
            shape = _only([shape for _, shape in read_shapes(source, _embedding_name)], source)
        if len(shape) != 2:
            raise TableInvalid(
                f"{source}: its embedding has shape {' by '.join(map(str, shape))} and is not a matrix; use a "
                "checkpoint of one encoder, such as BERT's"
            )
        _check_pieces(source, pieces, shape[0])
        return shape[1]
    with _open_table(source, named) as lines:
        first = next(lines, None)
    if first is None:
        raise TableInvalid(f"{source} is empty; check {named}")
    return _width_of_first(first.rstrip("\r\n "), source)


def _width_of_first(line: str, source: Path) -> int:
    """The width of a table by its first line. Raises TableInvalid if that is not a word with its vector."""
    width = line.count(" ")
    if width < 2:
        raise TableInvalid(
            f"{source}, line 1: {width} numbers, and not a word and its vector with single spaces; remove the header "
            "line if there is one"
        )
    return width


_Rows = Iterator[tuple[str, "NDArray[np.float32]"]]


def _text_rows(path: Path, width: int, ids: Mapping[str, int], named: str) -> _Rows:
    """Yields the rows of entries in `ids` from GloVe's text form: a word and its numbers, with single spaces
    (Pennington et al. 2014).
    """
    import numpy as np

    with _open_table(path, named) as lines:
        for number, line in enumerate(lines, start=1):
            # From the right, since some tables have words with a space.
            word, *numbers = line.rstrip("\r\n ").rsplit(" ", width)
            if len(numbers) != width or (number == 1 and " " in word):
                raise TableInvalid(
                    f"{path}, line {number}: {len(line.split()) - 1} numbers, and model.embedding is {width}; use a "
                    "table of that width, or set model.embedding to the table's (and remove a header line)"
                )
            if word not in ids:
                continue
            try:
                row = np.array(numbers, dtype=np.float32)
            except ValueError:
                raise TableInvalid(f"{path}, line {number}: not a word and {width} numbers; correct the line") from None
            if not np.isfinite(row).all():
                raise TableInvalid(f"{path}, line {number}: a number is not finite; remove the row")
            yield word, row


@contextmanager
def _open_table(path: Path, named: str) -> Iterator[IO[str]]:
    """Opens a table to read line by line, as published tables have gigabytes."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        # newline="\n": words may have characters at which universal newlines or splitlines() would cut.
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as lines:
            yield lines
    except FileNotFoundError:
        raise TableInvalid(f"{path} does not exist; check {named}") from None
    except UnicodeDecodeError:
        raise TableInvalid(
            f"{path} is not UTF-8 text; {named} must be a table in GloVe's text form, or a checkpoint's folder"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise TableInvalid(f"{path} cannot be read: {error}") from error


def _checkpoint_rows(folder: Path, width: int, ids: Mapping[str, int], named: str) -> _Rows:
    """Yields the rows of entries in `ids` that are also in a checkpoint's vocabulary."""
    import numpy as np

    with _as_table(named):
        pieces = _pieces_of(folder, named)
        rows = _embedding_of(folder)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise TableInvalid(
            f"{folder}: its embedding is {' by '.join(map(str, rows.shape))}, and model.embedding is {width}; use a "
            "checkpoint of that width"
        )
    _check_pieces(folder, pieces, len(rows))
    for entry in ids:
        if entry in pieces:
            row = rows[pieces[entry]]
            if not np.isfinite(row).all():
                raise TableInvalid(f"{folder}: row {pieces[entry]} of its embedding is not finite; use another table")
            yield entry, row


@contextmanager
def _as_table(named: str) -> Iterator[None]:
    """Turns an error about a checkpoint into one about the table."""
    try:
        yield
    except CheckpointInvalid as error:
        raise TableInvalid(f"{error}; check {named}") from None


def _pieces_of(folder: Path, named: str) -> dict[str, int]:
    """A checkpoint's word pieces with their rows."""
    entries = read_entries(folder)
    if entries.kind is None:
        raise TableInvalid(f"{folder} has neither vocab.txt nor tokenizer.json; check {named}")
    if entries.kind not in ("WordPiece", "WordLevel"):
        raise TableInvalid(
            f"{folder}: its tokenizer is {entries.kind}, whose entries are neither words nor word pieces like ours; "
            "use a checkpoint with BERT's pieces"
        )
    return dict(entries.rows)


def _check_pieces(folder: Path, pieces: Mapping[str, int], rows: int) -> None:
    """Raises TableInvalid if a piece has no row."""
    if pieces and max(pieces.values()) >= rows:
        raise TableInvalid(
            f"{folder}: its vocabulary has more entries than its embedding has rows; use the checkpoint's own "
            "vocabulary"
        )


def _embedding_of(folder: Path) -> "NDArray[np.float32]":
    """The embedding of a checkpoint's tokens, (V, width)."""
    return _only([rows for _, rows in read_tensors(folder, _embedding_name)], folder)


def _embedding_name(stored: str) -> str | None:
    return stored if stored.endswith(_EMBEDDINGS) else None


def _only(found: Sequence[_Each], folder: Path) -> _Each:
    """The single embedding of a checkpoint."""
    if len(found) != 1:
        what = "no embedding of tokens" if not found else f"{len(found)} embeddings of tokens"
        raise TableInvalid(f"{folder}: {what} among its weights; use a checkpoint of one encoder, such as BERT's")
    return found[0]
