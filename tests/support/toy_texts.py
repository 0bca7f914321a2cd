"""A toy language with two labels and four topics, its public word list, and a model of it."""

import hashlib

import numpy as np

from learning.synthesis.model import Rvae
from learning.synthesis.setting import RvaeSetting
from learning.synthesis.words import PublicWords, public_words
from learning.text.encoder import word_tokenizer
from tests.support.random_sources import Seeded

__all__ = ["DIGITS", "FEELINGS", "LABELS", "LIST", "SMALL", "Seeded", "toy_model", "toy_texts", "toy_words"]

LABELS = ("bad", "good")
FEELINGS = (("poor", "dull", "weak"), ("fine", "great", "warm"))
TOPICS = (
    ("actor", "stage", "play", "drama"),
    ("ship", "sea", "storm", "sail"),
    ("dog", "park", "ball", "run"),
    ("cake", "cream", "sugar", "bake"),
)
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
LIST = [
    *("the", "a", "is", "and", "it", "code", ".", ",", "'", "t", "don"),
    *(word for words in (*FEELINGS, *TOPICS) for word in words),
    *DIGITS,
]
SMALL = RvaeSetting(embedding=12, hidden=20, latent=4, max_tokens=10, word_dropout=0.6)


def toy_words(max_tokens: int = SMALL.max_tokens) -> PublicWords:
    """The word list as a job's public words."""
    tokenizer = word_tokenizer(LIST)
    return public_words(tokenizer, hashlib.sha256(tokenizer).digest(), labels=len(LABELS), max_tokens=max_tokens)


def toy_texts(count: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Texts such as "the sea is great and sail ." and their label ids. Label and topic are drawn independently."""
    random = np.random.default_rng(seed)
    labels, texts = random.integers(2, size=count), []
    for label in labels:
        topic, feeling = TOPICS[random.integers(len(TOPICS))], FEELINGS[label]
        first, last = random.choice(len(topic), size=2, replace=False)
        texts.append(f"the {topic[first]} is {feeling[random.integers(3)]} and {topic[last]} .")
    return texts, labels


def toy_model(setting: RvaeSetting = SMALL, seed: int = 3) -> Rvae:
    """A model with random weights from this seed."""
    return Rvae(setting, len(toy_words().entries), len(LABELS), seed)
