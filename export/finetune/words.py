"""Chooses the words of a classifier of synthetic texts: those in the texts, and a public list's if it has vectors."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from learning.backbones.checkpoint import read_entries
from learning.backbones.hub import checkpoint_folder
from learning.text.encoder import PAD, UNKNOWN, VocabularyInvalid, read_vocabulary
from learning.text.tables import entries_of
from learning.text.vocabulary import own_tokenizer

__all__ = ["MAX_WORDS", "base_pieces", "read_words", "words_of_corpora", "words_of_tokenizer"]

MAX_WORDS = 50_000
# A word that occurs once counts as unknown, so that the vector for unknown words is trained too.
_MIN_COUNT = 2


def words_of_corpora(texts: Iterable[str], public: Sequence[str] = (), most: int = MAX_WORDS) -> list[str]:
    """Lists the words that occur at least twice in the texts, most frequent first, then those of a public list.

    Args:
        texts: the synthetic texts.
        public: words that may be in no synthetic text. They are useful only if their vectors come from a table, since
            training does not change them.
        most: maximum number of words.

    Raises:
        VocabularyInvalid: no word occurs twice.
    """
    try:
        tokenizer = own_tokenizer(texts, "words", most + 2, _MIN_COUNT)
    except VocabularyInvalid:
        raise VocabularyInvalid(
            "no word occurs twice in the corpora, so there is nothing to learn; wait for other members' corpora, or "
            "let the job order more texts"
        ) from None
    found = [word for word in entries_of(tokenizer) if word != UNKNOWN]
    return list(dict.fromkeys((*found, *(word.lower() for word in public))))[:most]


def base_pieces(base: str) -> list[str]:
    """A pretrained encoder's word pieces, in the order of its embedding's rows.

    Raises:
        CheckpointInvalid: there is no such folder or name, or a file is something else.
        VocabularyInvalid: the encoder has no word pieces.
    """
    entries = read_entries(checkpoint_folder(base))
    if entries.kind != "WordPiece":
        raise VocabularyInvalid(
            f"--base: {base} has no word pieces (no vocab.txt, and no tokenizer.json with some); use an uncased BERT, "
            "DistilBERT or MiniLM"
        )
    return [piece for piece, _ in entries.rows]


def read_words(path: Path) -> list[str]:
    """Reads a public list of words, one on each line; from a table of vectors, the text before the first space.

    Raises:
        VocabularyInvalid: the file does not exist, is not UTF-8, or is empty.
    """
    return [word for line in read_vocabulary(path) if (word := line.split(" ", 1)[0].strip())]


def words_of_tokenizer(tokenizer: bytes) -> list[str]:
    """The words of a job's list, in order of id."""
    return [word for word in entries_of(tokenizer) if word not in (PAD, UNKNOWN)]
