"""Rows of an embedding from a table that somebody trained before: GloVe's text form, or another model's embedding.

Guarantees: only rows of entries that the table knows are written; the row of the padding is never one of them; tables
of gigabytes are read row by row, never whole. Errors name lines and shapes, and no word of the member's vocabulary.

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

# The names under which encoders of the transformers library keep the embedding of their tokens.
_EMBEDDINGS = ("word_embeddings.weight", "embed_tokens.weight", "shared.weight")


class TableInvalid(ValueError):
    """A table of word vectors that cannot be used; the text says where and what to do."""


class NothingFound(TableInvalid):
    """A sound table that has not one of the entries asked for."""


def fill_from_table(
    embedding: "NDArray[np.float32]", source: Path, ids: Mapping[str, int], *, named: str = "the table's path"
) -> int:
    """Writes the table's rows over the embedding's (V, width) and returns how many entries it found.

    source: a file in GloVe's text form, plain or .gz; or the folder of a checkpoint with word pieces (model.safetensors
    with vocab.txt or tokenizer.json). ids: `entries_of` the tokenizer. named: what the reader of an error would change,
    such as "--embedding".

    Raises:
        TableInvalid: no such table, another width, or numbers that are none. Rows that came before the fault are
            written. NothingFound: not one entry found.
    """
    rows = _checkpoint_rows if source.is_dir() else _text_rows
    found: set[str] = set()
    for entry, row in rows(source, embedding.shape[1], ids, named):
        # Of a word that stands twice the first row counts: tables go from the most frequent word down.
        if entry not in found:
            embedding[ids[entry]] = row
            found.add(entry)
    if not found:
        raise NothingFound(
            f"{source}: none of its words is in the vocabulary; is it a table of whole, lower-case words "
            "in the same language?"
        )
    return len(found)


def entries_of(tokenizer_json: bytes) -> dict[str, int]:
    """A tokenizer's entries with their ids, in the order of these, but for the padding, whose row stays zero."""
    from tokenizers import Tokenizer

    ids: dict[str, int] = Tokenizer.from_str(tokenizer_json.decode()).get_vocab(with_added_tokens=True)
    return {entry: number for entry, number in sorted(ids.items(), key=lambda item: item[1]) if entry != PAD}


def words_of(source: Path, *, named: str = "the table's path") -> Iterator[str]:
    """What the table has vectors for, in its order: published ones go from the most frequent word down. It is read no
    further than the caller goes, and its numbers are not looked at.

    source, named: as in `fill_from_table`.

    Raises:
        TableInvalid: no such table, or a first line that is no word with its vector.
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
            # As many numbers as in the first line, from the right: some tables hold words with a space.
            width = width or _width_of_first(line, source)
            yield line.rsplit(" ", width)[0]


def width_of(source: Path, *, named: str = "the table's path") -> int:
    """How many numbers the table has for a word: by its first line, or by what a checkpoint says of its embedding,
    whose numbers are not read.

    source, named: as in `fill_from_table`.

    Raises:
        TableInvalid: no such table, an empty one, a first line that is no word with its vector, or a checkpoint whose
            embedding is not that of its pieces.
    """
    if source.is_dir():
        with _as_table(named):
            pieces = _pieces_of(source, named)
            shape = _only([shape for _, shape in read_shapes(source, _embedding_name)], source)
        if len(shape) != 2:
            raise TableInvalid(
                f"{source}: its embedding is {' by '.join(map(str, shape))} where rows of numbers belong; take a "
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
    """Raises: TableInvalid: no word with its vector."""
    width = line.count(" ")
    if width < 2:
        raise TableInvalid(
            f"{source}, line 1: {width} numbers where a word and its vector belong, with single spaces; leave out a "
            "header line"
        )
    return width


_Rows = Iterator[tuple[str, "NDArray[np.float32]"]]


def _text_rows(path: Path, width: int, ids: Mapping[str, int], named: str) -> _Rows:
    """Rows of entries in `ids`. GloVe's text form (Pennington et al. 2014): a word, then its numbers, separated by
    single spaces.
    """
    import numpy as np

    with _open_table(path, named) as lines:
        for number, line in enumerate(lines, start=1):
            # From the right, since some tables hold words with a space.
            word, *numbers = line.rstrip("\r\n ").rsplit(" ", width)
            if len(numbers) != width or (number == 1 and " " in word):
                raise TableInvalid(
                    f"{path}, line {number}: {len(line.split()) - 1} numbers where model.embedding is "
                    f"{width}; take a table of that width, or set model.embedding to the table's (and leave out a "
                    "header line)"
                )
            if word not in ids:
                continue
            try:
                row = np.array(numbers, dtype=np.float32)
            except ValueError:
                raise TableInvalid(f"{path}, line {number}: not a word and {width} numbers") from None
            if not np.isfinite(row).all():
                raise TableInvalid(f"{path}, line {number}: a number is not finite; leave the row out")
            yield word, row


@contextmanager
def _open_table(path: Path, named: str) -> Iterator[IO[str]]:
    """A table is read line by line: the published ones are gigabytes."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        # newline="\n": words may hold characters that universal newlines or splitlines() would cut at.
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as lines:
            yield lines
    except FileNotFoundError:
        raise TableInvalid(f"{path} does not exist; check {named}") from None
    except UnicodeDecodeError:
        raise TableInvalid(
            f"{path} is not UTF-8 text; {named} is a table in GloVe's text form, or a checkpoint's folder"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise TableInvalid(f"{path} cannot be read: {error}") from error


def _checkpoint_rows(folder: Path, width: int, ids: Mapping[str, int], named: str) -> _Rows:
    """Rows of the entries in `ids` that are pieces of a checkpoint's vocabulary as well."""
    import numpy as np

    with _as_table(named):
        pieces = _pieces_of(folder, named)
        rows = _embedding_of(folder)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise TableInvalid(
            f"{folder}: its embedding is {' by '.join(map(str, rows.shape))} where model.embedding is {width}; take a "
            "checkpoint of that width"
        )
    _check_pieces(folder, pieces, len(rows))
    for entry in ids:
        if entry in pieces:
            row = rows[pieces[entry]]
            if not np.isfinite(row).all():
                raise TableInvalid(f"{folder}: row {pieces[entry]} of its embedding is not finite; take another one")
            yield entry, row


@contextmanager
def _as_table(named: str) -> Iterator[None]:
    """What is wrong with a checkpoint is wrong with the table."""
    try:
        yield
    except CheckpointInvalid as error:
        raise TableInvalid(f"{error}; check {named}") from None


def _pieces_of(folder: Path, named: str) -> dict[str, int]:
    """A checkpoint's word pieces with their rows."""
    entries = read_entries(folder)
    if entries.kind is None:
        raise TableInvalid(f"{folder} holds neither vocab.txt nor tokenizer.json; check {named}")
    if entries.kind not in ("WordPiece", "WordLevel"):
        raise TableInvalid(
            f"{folder}: its tokenizer is {entries.kind}, whose entries are no words or word pieces as ours are; "
            "take a checkpoint with BERT's pieces"
        )
    return dict(entries.rows)


def _check_pieces(folder: Path, pieces: Mapping[str, int], rows: int) -> None:
    """Raises: TableInvalid: a piece whose row there is not."""
    if pieces and max(pieces.values()) >= rows:
        raise TableInvalid(f"{folder}: its vocabulary has more entries than its embedding has rows; it is another's")


def _embedding_of(folder: Path) -> "NDArray[np.float32]":
    """The embedding of a checkpoint's tokens, (V, width)."""
    return _only([rows for _, rows in read_tensors(folder, _embedding_name)], folder)


def _embedding_name(stored: str) -> str | None:
    return stored if stored.endswith(_EMBEDDINGS) else None


def _only(found: Sequence[_Each], folder: Path) -> _Each:
    """The one embedding that a checkpoint has."""
    if len(found) != 1:
        what = "no embedding of tokens" if not found else f"{len(found)} embeddings of tokens"
        raise TableInvalid(f"{folder}: {what} among its weights; take a checkpoint of one encoder, such as BERT's")
    return found[0]
