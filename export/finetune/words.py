"""The words of a classifier that is trained on made-up texts: theirs, and a public list's beside pretrained vectors."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from learning.backbones.checkpoint import read_entries
from learning.backbones.hub import checkpoint_folder
from learning.text.encoder import PAD, UNKNOWN, VocabularyInvalid, read_vocabulary
from learning.text.tables import entries_of
from learning.text.vocabulary import own_tokenizer

__all__ = ["MAX_WORDS", "base_pieces", "read_words", "words_of_corpora", "words_of_tokenizer"]

MAX_WORDS = 50_000
# What stands once is unknown, so that the unknown word's vector is trained as well.
_MIN_COUNT = 2


def words_of_corpora(texts: Iterable[str], public: Sequence[str] = (), most: int = MAX_WORDS) -> list[str]:
    """Words that occur twice in the texts, the most frequent first, then those of the public list that do not; `most`
    in all.

    public: words that no made-up text may hold. They are of use only where their vectors come from a table: training
    leaves them as they start.

    Raises:
        VocabularyInvalid: no word occurs twice.
    """
    try:
        tokenizer = own_tokenizer(texts, "words", most + 2, _MIN_COUNT)
    except VocabularyInvalid:
        raise VocabularyInvalid(
            "no word occurs twice in the corpora, so that there is nothing to learn; wait for other members' corpora, "
            "or let the job order more texts"
        ) from None
    found = [word for word in entries_of(tokenizer) if word != UNKNOWN]
    return list(dict.fromkeys((*found, *(word.lower() for word in public))))[:most]


def base_pieces(base: str) -> list[str]:
    """A pretrained encoder's word pieces, in the order of its embedding's rows.

    Raises:
        CheckpointInvalid: no such folder or name, or a file that is something else. VocabularyInvalid: no word pieces.
    """
    entries = read_entries(checkpoint_folder(base))
    if entries.kind != "WordPiece":
        raise VocabularyInvalid(
            f"--base: {base} has no word pieces (no vocab.txt, and no tokenizer.json with some); take an uncased BERT, "
            "DistilBERT or MiniLM"
        )
    return [piece for piece, _ in entries.rows]


def read_words(path: Path) -> list[str]:
    """A public list of words, one a line; of a table of vectors, what stands before the first space.

    Raises:
        VocabularyInvalid: no such file, not UTF-8, or empty.
    """
    return [word for line in read_vocabulary(path) if (word := line.split(" ", 1)[0].strip())]


def words_of_tokenizer(tokenizer: bytes) -> list[str]:
    """The words of a job's list, by id."""
    return [word for word in entries_of(tokenizer) if word not in (PAD, UNKNOWN)]
