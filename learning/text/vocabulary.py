"""Builds a member's own vocabulary from its texts: a tokenizer.json in the forms of a job's (`learning.text.encoder`).

Guarantees: the entries come from the given texts and words and from nothing else. The result passes
`encoder.check_own_form`. Words are the same for the same texts in any order, on every machine. Word pieces are not: the
library breaks ties by the state of its hash tables, so pieces are built once and kept with the private state.

Leaves to others: where the result is kept. It reveals words of the texts, so it never leaves the machine, and no error
has such a word.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from learning.text.encoder import (
    FIRST,
    LAST,
    LONGEST_WORD,
    PAD,
    UNKNOWN,
    VocabularyInvalid,
    word_tokenizer,
    wordpiece_tokenizer,
)
from toolkit.several import check_several

__all__ = ["own_tokenizer"]

# The most entries of a list that is filled up with known words. The texts bound their own words, but a published table
# would fill whatever a job allows, on the member's disk.
_MAX_KNOWN = 30_000

_SPECIAL = [PAD, UNKNOWN, FIRST, LAST]


def own_tokenizer(
    texts: Iterable[str],
    kind: Literal["words", "wordpiece"],
    size: int,
    min_count: int = 1,
    known: Iterable[str] = (),
) -> bytes:
    """Builds the bytes of a tokenizer.json for these texts.

    Args:
        texts: The member's texts.
        kind: "words" takes the most frequent words, with ties in order of spelling. "wordpiece" trains pieces on the
            texts, after [PAD], [UNK], [CLS] and [SEP].
        size: The most entries, including those in brackets.
        min_count: Words that occur less often, or pairs of pieces that occur together less often, get no entry from
            the texts.
        known: Words that a vector is known for, the most useful first, since a later text may have them. They get
            entries after those of the texts, up to `size` and 30,000 entries in total. A word that no text could be
            split into, or that is too long, is skipped. Word pieces ignore them: they compose new words from pieces.

    Raises:
        VocabularyInvalid: There is nothing to build it from, or no room in `size`.
        ValueError: One string is given for texts or words.
    """
    check_several(texts, "texts")
    check_several(known, "known")
    special = 2 if kind == "words" else len(_SPECIAL)
    if size <= special:
        raise VocabularyInvalid(
            f"own vocabulary: {size} entries (vocabulary.size) leave no room after the {special} special entries of "
            f"every vocabulary of {kind}; ask for a job that allows more"
        )
    if kind == "words":
        return _words(texts, size - special, min_count, known)
    return _pieces(texts, size - special, min_count)


def _words(texts: Iterable[str], most: int, min_count: int, known: Iterable[str]) -> bytes:
    from tokenizers import normalizers, pre_tokenizers

    rules = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    counts = Counter(_split(texts, *rules))
    entries = [(-count, word) for word, count in counts.items() if _is_entry(word)]
    if not entries:
        raise VocabularyInvalid(_NOTHING)
    chosen = [word for count, word in sorted(entries)[:most] if -count >= min_count]
    have = set(chosen)
    more = (
        word
        for word in known
        if word not in have and len(word) <= LONGEST_WORD and _is_entry(word) and list(_split([word], *rules)) == [word]
    )
    # Reads no more words than there is room for: a published table is long.
    for _ in range(min(most, _MAX_KNOWN - 2) - len(chosen)):
        word = next(more, None)
        if word is None:
            break
        have.add(word)
        chosen.append(word)
    if not chosen:
        raise VocabularyInvalid(
            f"own vocabulary: no word occurs {min_count} times in the texts (the most frequent occurs "
            f"{-min(entries)[0]} times); add data, or take part in a job with a lower vocabulary.min_count"
        )
    return word_tokenizer(chosen)


def _is_entry(word: str) -> bool:
    """Whether a word list can have this word: Python and the library disagree about a few white space characters."""
    return word == word.strip().lower() and " " not in word


def _pieces(texts: Iterable[str], most: int, min_count: int) -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    # The texts are already split as the tokenizer will split them, so training splits only at spaces.
    trained = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=most + len(_SPECIAL),
        min_frequency=min_count,
        special_tokens=_SPECIAL,
        # Each character takes up to two entries: one inside a word and one at its start.
        limit_alphabet=max(1, most // 2),
        show_progress=False,
    )
    trained.train_from_iterator(_joined(texts), trainer)
    ids: dict[str, int] = trained.get_vocab()
    pieces = sorted(ids, key=ids.__getitem__)[: most + len(_SPECIAL)]
    if len(pieces) == len(_SPECIAL):
        raise VocabularyInvalid(_NOTHING)
    return wordpiece_tokenizer(pieces)


def _joined(texts: Iterable[str]) -> Iterator[str]:
    from tokenizers import normalizers, pre_tokenizers

    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    for text in texts:
        # A longer word is unknown as a whole, so it teaches nothing.
        yield " ".join(word for word in _split([text], normalizer, pre_tokenizer) if len(word) <= LONGEST_WORD)


def _split(texts: Iterable[str], normalizer: Any, pre_tokenizer: Any) -> Iterator[str]:
    for text in texts:
        # Half of a surrogate pair reads as a question mark, as where texts are encoded.
        whole = text if text.isascii() else text.encode(errors="replace").decode()
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(whole)):
            yield word


_NOTHING = "own vocabulary: the texts have no words; look at the data with `edge_client run --dry-run`"
