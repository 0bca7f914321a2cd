"""A member's own vocabulary, from its own texts: a tokenizer.json in the forms of a job's (`learning.text.encoder`).

Guarantees: the entries come from the texts and the words handed in and from nothing else; what comes out passes
`text.check_own_form`; words are the same for the same texts in any order, on every machine. Word pieces are not: the
library's training takes ties as its hash tables happen to lie, so they are built once and kept with the private state.

Leaves to others: where the result is kept. It tells words of the texts, so it never leaves the machine, and no sentence
of an error holds one.
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

__all__ = ["own_tokenizer"]

# A list goes on with known words to so many entries at most. The texts bound what they bring; a published table would
# fill whatever a job allows, on the member's disk.
_MAX_KNOWN = 30_000

_SPECIAL = [PAD, UNKNOWN, FIRST, LAST]


def own_tokenizer(
    texts: Iterable[str],
    kind: Literal["words", "wordpiece"],
    size: int,
    min_count: int = 1,
    known: Iterable[str] = (),
) -> bytes:
    """The bytes of a tokenizer.json for these texts.

    kind: "words", the most frequent ones, ties in order of spelling; "wordpiece", pieces trained on the texts, behind
    [PAD], [UNK], [CLS] and [SEP]. size: entries at most, those in brackets among them. min_count: words that occur
    less often, or pairs of pieces that stand together less often, get no entry by the texts. known: words, the most
    useful first, that get entries behind those of the texts while there are fewer than `size` and than 30,000: those
    that a vector is known for, so that a text to come may hold one. What no text is split into, and what is longer than
    a word, is passed over. Pieces need none: what they have not met they put together.

    Raises:
        VocabularyInvalid: nothing to build it from, or no room in `size`.
    """
    special = 2 if kind == "words" else len(_SPECIAL)
    if size <= special:
        raise VocabularyInvalid(
            f"own vocabulary: {size} entries (vocabulary.size) leave no room beside the {special} that every "
            f"vocabulary of {kind} has; the job must allow more"
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
    # No word more is asked for than there is room: a published table is long.
    for _ in range(min(most, _MAX_KNOWN - 2) - len(chosen)):
        word = next(more, None)
        if word is None:
            break
        have.add(word)
        chosen.append(word)
    if not chosen:
        raise VocabularyInvalid(
            f"own vocabulary: no word occurs {min_count} times in the texts (the most frequent one occurs "
            f"{-min(entries)[0]} times); take part with more data, or in a job with a lower vocabulary.min_count"
        )
    return word_tokenizer(chosen)


def _is_entry(word: str) -> bool:
    """Whether a word list can hold it: Python and the library differ over a few separators that are no white space to
    one of them.
    """
    return word == word.strip().lower() and " " not in word


def _pieces(texts: Iterable[str], most: int, min_count: int) -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    # The texts come split as the tokenizer will split them; so training splits at nothing but the spaces between.
    trained = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=most + len(_SPECIAL),
        min_frequency=min_count,
        special_tokens=_SPECIAL,
        # Each character takes up to two entries, inside a word and in front of one.
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
        # A longer word is unknown as a whole, so nothing is learned from it.
        yield " ".join(word for word in _split([text], normalizer, pre_tokenizer) if len(word) <= LONGEST_WORD)


def _split(texts: Iterable[str], normalizer: Any, pre_tokenizer: Any) -> Iterator[str]:
    for text in texts:
        # Half of a surrogate pair reads as a question mark, as where texts are encoded.
        whole = text if text.isascii() else text.encode(errors="replace").decode()
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(whole)):
            yield word


_NOTHING = "own vocabulary: there is not one word in the texts; look at the data with `edge_client run --dry-run`"
