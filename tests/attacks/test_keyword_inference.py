"""Keyword inference from embeddings: it finds words where they are, and nothing where there is nothing.

Both directions: the attack reads a word from a bag of words, and from a classifier whose label depends on it. So chance
level on labels, on constants, on embeddings of other texts and on texts without the word means something. It also reads
words from an untrained encoder: no training, however private, hides what is in the input.
"""

import numpy as np
import pytest
import torch

from benchmarks.library.record import SHARED
from benchmarks.synthesis.keywords import (
    CHANCE,
    Embed,
    balanced,
    choose_keywords,
    embedder,
    infer_keywords,
    without,
    words_of,
)
from export.finetune.training import fit
from learning.models import build
from learning.text.data import read_examples
from learning.text.encoder import TextEncoder, word_tokenizer
from tacit.job import Training
from tacit.model import BiLSTMModel

torch.set_num_threads(1)

PLANTED = ("lantern", "violin")
COMMON = ("the", "a", "of", "and", "to")
FILLING = tuple(f"{one}{other}ing" for one in "bdfgklmnprst" for other in ("al", "en", "ir"))
VOCABULARY = (*PLANTED, *COMMON, *FILLING)


def synthetic(count: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Texts of about ten words. The first planted word is in most texts of label 1, the second in half of either."""
    random = np.random.default_rng(seed)
    texts, labels = [], random.integers(2, size=count)
    for label in labels:
        words = [str(word) for word in random.choice((*COMMON, *FILLING), size=random.integers(8, 13))]
        if random.random() < (0.8 if label else 0.1):
            words[random.integers(len(words))] = PLANTED[0]
        if random.random() < 0.5:
            words.append(PLANTED[1])
        texts.append(" ".join(map(str, words)))
    return texts, labels


AUXILIARY, HELD_BACK = synthetic(500, 1), synthetic(400, 2)
LABEL = dict(zip(AUXILIARY[0] + HELD_BACK[0], [*AUXILIARY[1], *HELD_BACK[1]], strict=True))


def bag_of_words(texts: list[str]) -> np.ndarray:
    return np.array([[words_of(text).count(word) for word in VOCABULARY] for text in texts], dtype=np.float32)


def accuracies(embed: Embed, attacker: str, **more) -> dict[str, float]:
    found = infer_keywords(embed, AUXILIARY[0], HELD_BACK[0], PLANTED, attacker, **more)
    assert found.accuracy == pytest.approx(np.mean([score.accuracy for score in found.scores]))
    return {score.keyword: score.accuracy for score in found.scores}


def near_chance(embed: Embed, attacker: str, **more) -> bool:
    found = infer_keywords(embed, AUXILIARY[0], HELD_BACK[0], PLANTED, attacker, **more)
    return abs(found.accuracy - CHANCE) < 4 * found.chance_error


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return TextEncoder(word_tokenizer(VOCABULARY), 16, 1)


@pytest.fixture(scope="module")
def trained(encoder: TextEncoder) -> Embed:
    """A classifier of raw texts, none of them the attacker's, whose label depends on the first planted word."""
    texts, labels = synthetic(500, 3)
    module = build(
        BiLSTMModel(embedding=12, hidden=12, dropout=0.2), encoder.vocabulary_size, 2, encoder.pad_id, seed=5
    )
    nothing = np.zeros(len(texts), dtype=np.bool_)
    recipe = Training(epochs=8, batch=32, learning_rate=0.01)
    fit(module, encoder.encode(texts), labels, nothing, recipe, patience=8, seed=0)
    return embedder(module, encoder)


# Both attackers tell words in a bag of words, and nothing from constants and other texts, in every run.
ATTACKERS = ["linear", pytest.param("deep", marks=pytest.mark.long)]

# ---- it finds words where they are -------------------------------------------------------------------------------


@pytest.mark.parametrize("attacker", ["linear", "deep"])
def test_a_bag_of_words_reveals_every_word(attacker):
    assert min(accuracies(bag_of_words, attacker).values()) > 0.98


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_a_classifier_reveals_the_word_that_its_label_depends_on(trained, attacker):
    assert accuracies(trained, attacker)[PLANTED[0]] > 0.9


def test_an_untrained_encoder_reveals_words_too(encoder):
    module = build(BiLSTMModel(embedding=32, hidden=32), encoder.vocabulary_size, 2, encoder.pad_id, seed=1)
    assert min(accuracies(embedder(module, encoder), "linear").values()) > 0.7


# ---- and nothing where there is nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("attacker", ["linear", "deep"])
def test_constants_and_other_texts_embeddings_reveal_nothing(attacker):
    def others(texts):
        return bag_of_words(list(np.random.default_rng(len(texts)).permutation(np.array(texts, dtype=object))))

    assert near_chance(lambda texts: np.full((len(texts), 3), 0.1, dtype=np.float32), attacker)
    assert near_chance(others, attacker)


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_a_label_reveals_the_word_that_goes_with_it_and_no_other(attacker):
    found = accuracies(lambda texts: np.array([[LABEL[text]] for text in texts], dtype=np.float32), attacker)
    assert found[PLANTED[0]] > 0.75
    assert abs(found[PLANTED[1]] - CHANCE) < 0.1


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_without_the_word_only_its_neighbours_are_left(attacker):
    # Neither word has neighbours of its own, so nothing of it is left in a bag of words, not even a gap.
    assert near_chance(bag_of_words, attacker, hidden_words=True)


def test_a_removed_word_leaves_no_gap():
    def equally_long(seed):
        random = np.random.default_rng(seed)
        texts = [" ".join(map(str, random.choice(FILLING, size=9))) for _ in range(120)]
        return [f"{text} {PLANTED[0] if at % 2 else FILLING[at % 7]}" for at, text in enumerate(texts)]

    def lengths(texts):
        return np.array([[len(text.split())] for text in texts], dtype=np.float32)

    found = infer_keywords(lengths, equally_long(1), equally_long(2), PLANTED[:1], "linear", hidden_words=True)
    assert abs(found.accuracy - CHANCE) < 4 * found.chance_error


# ---- parts of the attack -------------------------------------------------------------------------------------------


def test_sets_are_balanced_matched_in_length_and_free_of_duplicates():
    texts = [*HELD_BACK[0], *(f"lantern {' '.join(FILLING[: 10 + more])}" for more in range(6))]
    rows, present = balanced(texts, "lantern", 4)
    assert present.sum() * 2 == len(present) == len(set(rows))
    assert [("lantern" in words_of(text)) == bool(mark) for text, mark in zip(rows, present, strict=True)] == [
        True
    ] * len(rows)
    assert balanced(texts, "lantern", 4)[0] == rows != balanced(texts, "lantern", 5)[0]


def test_a_text_is_matched_with_one_of_the_nearest_length():
    held = [f"lantern {' '.join(FILLING[at : at + 14])}" for at in range(10)]
    others = [" ".join(FILLING[at % 5 : at % 5 + size]) for at, size in enumerate([*range(1, 12)] * 5 + [15] * 10)]
    others = [f"{FILLING[at % 36]} {text}" for at, text in enumerate(others)]
    rows, present = balanced([*held, *others], "lantern", 0)
    lengths = np.array([len(words_of(text)) for text in rows])
    assert set(lengths[present == 1]) == {15}
    assert set(lengths[present == 0]) == {16}


def test_keywords_follow_from_the_attackers_texts_by_the_rule():
    texts = [
        "some cats sleep",
        "cats sleep",
        "dogs sleep",
        "dogs run far",
        "birds sing",
        "cats and the dogs",
        "moles dig",
    ]
    # "some", "and", "the" are nobody's subject, "run" and "dig" are short. Spelling breaks the tie of three in three.
    assert choose_keywords(texts, 2, min_share=0.2, max_share=0.5) == ("cats", "dogs")
    assert choose_keywords(texts, 3, min_share=0.2, max_share=0.5) == ("cats", "dogs", "sleep")
    with pytest.raises(ValueError, match="3 words occur in"):
        choose_keywords(texts, 4, min_share=0.2, max_share=0.5)


def test_a_word_is_only_removed_as_a_whole():
    assert without("Cats sleep; cat's cats-eye catsup cats", "cats").split() == ["sleep;", "cat's", "-eye", "catsup"]


def test_too_few_texts_and_texts_on_both_sides_are_refused():
    with pytest.raises(ValueError, match="0 of 400 texts have 'absent'"):
        balanced(HELD_BACK[0], "absent", 0)
    with pytest.raises(ValueError, match="are also the attacker's"):
        infer_keywords(bag_of_words, AUXILIARY[0], [*HELD_BACK[0], AUXILIARY[0][7]], PLANTED, "linear")
    with pytest.raises(ValueError, match="not finite"):
        infer_keywords(
            lambda texts: np.full((len(texts), 2), np.nan, dtype=np.float32),
            AUXILIARY[0],
            HELD_BACK[0],
            PLANTED,
            "linear",
        )


def test_an_embedding_is_what_the_head_sees_without_dropout(encoder):
    module = build(BiLSTMModel(embedding=6, hidden=4, dropout=0.5), encoder.vocabulary_size, 2, encoder.pad_id, seed=1)
    module.train()
    rows = embedder(module, encoder, batch=3)(HELD_BACK[0][:7])
    assert rows.shape == (7, 8)
    assert module.training
    assert not module.output._forward_pre_hooks
    with torch.no_grad():
        logits = module.eval()(torch.from_numpy(encoder.encode(HELD_BACK[0][:7])))
        assert torch.allclose(module.output(torch.from_numpy(rows)), logits, atol=1e-6)


def test_real_sentences_reveal_their_words_to_counting():
    paths = [SHARED / "sst2" / name for name in ("train_sentences.jsonl.gz", "test.jsonl.gz")]
    if missing := [str(path) for path in paths if not path.exists()]:
        pytest.skip(f"{missing[0]} is not here; docs/benchmarks.md says where public data sets belong")
    known, asked = ([example.text for example in read_examples(path)] for path in paths)
    known = known[:1200]
    own = set(known)
    asked = [text for text in asked if text not in own]
    keywords = choose_keywords(known)
    assert not {"this", "with", "that"} & set(keywords)
    words = sorted({word for text in known for word in words_of(text)} - {"film", "movie"})
    place = {word: at for at, word in enumerate(words)}

    def count(texts):
        rows = np.zeros((len(texts), len(words)), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            row[[place[word] for word in words_of(text) if word in place]] = 1
        return rows

    found = infer_keywords(count, known, asked, keywords[:3], "linear")
    hidden = infer_keywords(count, known, asked, keywords[:3], "linear", hidden_words=True)
    assert found.accuracy > 0.85
    assert hidden.accuracy < 0.75
