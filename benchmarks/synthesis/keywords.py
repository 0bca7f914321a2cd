"""Keyword inference: is this word in the text, said from the text's embedding in a released model alone.

**Who attacks.** Somebody who sees what a released classifier makes of texts that are not its own (the features under
its head, one vector for each text), such as whoever runs the model for others, and who knows which words it looks for
(Pan et al. 2020, "Privacy risks of general-purpose language models"; DP-RVAE, section 5.3). It has texts of its own of
the same kind, embeds them with the same model, and learns for each word to tell embeddings of texts with it from those
without. It is then asked about texts that neither it nor the model has met.

**What is measured.** Half of a word's texts hold it and half do not, matched by length, so that 0.5 is chance and
length tells nothing. An attacker need not find the word itself: whatever goes with it, such as the label, counts too.
The word is left in the text, since it is there that the attacker would find it; `hidden_words` takes it out of the same
texts, and another word out of those that lack it: what is right then comes from the company that the word keeps.

**What differential privacy says of it: nothing.** DP-SGD and synthetic text protect the texts that a model was trained
on. The text that the attack asks about is an input, and a perfectly private encoder may still hold its every word:
random weights do, and so does any good pretrained encoder. A lower figure beside DP says that this model's features are
poorer, be it by noise or by little training. Whoever must hide inputs keeps embeddings where the texts are.

Leaves to others: which models there are, and their training.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from learning.models import TextClassifier
from learning.text.encoder import TextEncoder

__all__ = [
    "CHANCE",
    "KEYWORDS",
    "Attacker",
    "Embed",
    "Inference",
    "KeywordScore",
    "balanced",
    "choose_keywords",
    "embedder",
    "infer_keywords",
    "without",
    "words_of",
]

# Texts to one vector each, (N, D).
Embed = Callable[[Sequence[str]], NDArray[np.float32]]
# linear: logistic regression. deep: two hidden layers.
Attacker = Literal["linear", "deep"]

KEYWORDS = 10
CHANCE = 0.5
# Under so many texts of each kind a score says nothing, and an attacker learns nothing.
MIN_TEXTS = 5
_HIDDEN = 64
_STEPS = 300
_RATE = 0.01
# Of the squared weights: there are more features than texts, mostly.
_DECAY = 0.01

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
# English words of four letters and more that no text is about.
_FUNCTION = frozenset(
    " ".join(
        (
            "about above after again against almost also although always among another because been before being",
            "below between both cannot could does doing done down during each either else even ever every from",
            "further have having here hers herself himself however into itself just like made make makes many",
            "might more most much must myself neither never none only other others ours ourselves over perhaps",
            "quite rather really same shall should since some such than that their theirs them themselves then",
            "there these they thing things this those though through thus together under until upon very want",
            "were what whatever when where whether which while whom whose will with within without would your",
            "yours yourself",
        )
    ).split()
)


@dataclass(frozen=True, slots=True)
class KeywordScore:
    """Share of held-back texts, half of them with the keyword, of which the attacker says rightly whether they have it.

    tests: how many texts. trained: texts that the attacker learnt from.
    """

    keyword: str
    attacker: Attacker
    accuracy: float
    tests: int
    trained: int

    @property
    def standard_error(self) -> float:
        """Binomial, of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.tests)


@dataclass(frozen=True, slots=True)
class Inference:
    """All keywords' scores under one attacker."""

    scores: tuple[KeywordScore, ...]

    @property
    def accuracy(self) -> float:
        """The mean over the keywords; `CHANCE` for an attacker that sees nothing."""
        return float(np.mean([score.accuracy for score in self.scores]))

    @property
    def standard_error(self) -> float:
        """Of the mean, were all its texts different ones; some stand in several keywords' sets."""
        return math.sqrt(sum(score.standard_error**2 for score in self.scores)) / len(self.scores)

    @property
    def chance_error(self) -> float:
        """Standard deviation of the mean for an attacker that guesses: what `CHANCE` is to be read with."""
        return math.sqrt(sum(0.25 / score.tests for score in self.scores)) / len(self.scores)


def words_of(text: str) -> list[str]:
    """A text's words in lower case, in their order: letters, with an apostrophe inside."""
    return _WORD.findall(text.lower())


def choose_keywords(
    texts: Sequence[str], count: int = KEYWORDS, *, min_share: float = 0.005, max_share: float = 0.05
) -> tuple[str, ...]:
    """Ten words to look for, by a fixed rule over the attacker's own texts: of the words with four letters or more that
    are no function words and stand in between `min_share` and `max_share` of the texts, those in most texts, ties in
    order of spelling.

    Raises:
        ValueError: fewer such words.
    """
    counts = Counter(word for text in texts for word in set(words_of(text)))
    found = sorted(
        (-met, word)
        for word, met in counts.items()
        if _could_be_one(word) and min_share * len(texts) <= met <= max_share * len(texts)
    )
    if len(found) < count:
        raise ValueError(
            f"{len(found)} words stand in {min_share:.1%} to {max_share:.1%} of {len(texts):,} texts, and {count} "
            "are wanted; give more texts, or wider bounds"
        )
    return tuple(word for _, word in found[:count])


def balanced(texts: Sequence[str], keyword: str, seed: int) -> tuple[list[str], NDArray[np.int64]]:
    """Texts and whether they hold the keyword, (N,): all that do, and for each one that does not and is nearest to it
    in length, no text twice. Which of equally long ones is drawn from the seed.

    Raises:
        ValueError: fewer than `MIN_TEXTS` texts with the keyword, or without it.
    """
    words = [words_of(text) for text in texts]
    held = [at for at, each in enumerate(words) if keyword in each]
    others = [at for at, each in enumerate(words) if keyword not in each]
    if min(len(held), len(others)) < MIN_TEXTS:
        raise ValueError(
            f"{len(held)} of {len(texts):,} texts hold {keyword!r}, and {MIN_TEXTS} of each kind are needed; choose "
            "keywords that more texts hold"
        )
    random = np.random.Generator(np.random.Philox(seed))
    random.shuffle(others)
    random.shuffle(held)
    lengths = np.array([len(words[at]) for at in others], dtype=np.float64)
    pairs: list[int] = []
    for at in held[: len(others)]:
        nearest = int(np.abs(lengths - len(words[at])).argmin())
        lengths[nearest] = np.inf
        pairs += [at, others[nearest]]
    return [texts[at] for at in pairs], np.array([1, 0] * (len(pairs) // 2), dtype=np.int64)


def without(text: str, word: str) -> str:
    """The text without this word, wherever it stands."""
    return re.sub(rf"(?<![\w']){re.escape(word)}(?![\w']|'\w)", "", text, flags=re.IGNORECASE)


def embedder(module: TextClassifier, encoder: TextEncoder, batch: int = 128) -> Embed:
    """What stands under a classifier's head for each text: a BiLSTM's pooled states, a transformer's mean over the
    tokens. Without dropout.
    """
    head = module.output
    if not isinstance(head, nn.Module):
        raise TypeError(f"{type(module).__name__} has no head of its own")

    @torch.no_grad()
    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        rows: list[Tensor] = []
        hook = head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].detach().cpu()))
        was = module.training
        module.eval()
        try:
            for first in range(0, len(texts), batch):
                module(torch.from_numpy(encoder.encode(texts[first : first + batch])))
        finally:
            hook.remove()
            module.train(was)
        found: NDArray[np.float32] = torch.cat(rows).numpy()
        return found

    return embed


def infer_keywords(
    embed: Embed,
    auxiliary: Sequence[str],
    held_back: Sequence[str],
    keywords: Sequence[str],
    attacker: Attacker,
    *,
    seed: int = 0,
    hidden_words: bool = False,
) -> Inference:
    """Learns from the auxiliary texts' embeddings and is asked about the held-back ones', each keyword by itself.

    auxiliary: the attacker's texts. held_back: texts that neither the attacker nor the model was trained on.
    hidden_words: whether the keyword is taken out of the texts, so that its company alone can tell.

    Raises:
        ValueError: too few texts for a keyword (`balanced`), a text that stands on both sides, or embeddings that are
            not finite.
    """
    if common := len(set(auxiliary) & set(held_back)):
        raise ValueError(f"{common} held-back texts are the attacker's own; take them out of one of the two")
    scores = []
    for place, keyword in enumerate(keywords):
        sides = []
        for texts, offset in ((auxiliary, 0), (held_back, 1)):
            rows, held = balanced(texts, keyword, 1000 * seed + 2 * place + offset)
            if hidden_words:
                rows = _without_one(rows, keyword, 1000 * seed + 2 * place + offset)
            sides.append((_finite(embed(rows)), torch.from_numpy(held)))
        (known, present), (asked, answers) = sides
        said = _attack(known, present, asked, attacker, 1000 * seed + place)
        accuracy = float((said == answers).double().mean())
        scores.append(KeywordScore(keyword, attacker, accuracy, len(answers), len(present)))
    return Inference(tuple(scores))


def _without_one(texts: Sequence[str], keyword: str, seed: int) -> list[str]:
    """Each text without the keyword, or else without a word that could have been one, drawn from the seed: a gap by
    itself tells nothing.
    """
    random = np.random.Generator(np.random.Philox(seed))
    found = []
    for text in texts:
        words = words_of(text)
        likely = sorted({each for each in words if _could_be_one(each)}) or sorted(set(words))
        if keyword in words:
            likely = [keyword]
        found.append(without(text, likely[int(random.integers(len(likely)))]) if likely else text)
    return found


def _could_be_one(word: str) -> bool:
    return len(word) >= 4 and word not in _FUNCTION


def _finite(rows: NDArray[np.float32]) -> Tensor:
    if not np.isfinite(rows).all():
        raise ValueError("an embedding holds values that are not finite numbers")
    return torch.from_numpy(rows).float()


def _attack(known: Tensor, present: Tensor, asked: Tensor, attacker: Attacker, seed: int) -> Tensor:
    """(N,): 1 where an attacker that was trained on (known, present) says that the keyword is there."""
    mean = known.mean(dim=0)
    # One scale for all features: those that hardly move, such as rare words, are not blown up.
    std = float((known - mean).square().mean().sqrt())
    scale = 1 / std if std > 1e-6 * (1 + float(mean.abs().max())) else 0.0
    known, asked = (known - mean) * scale, (asked - mean) * scale
    random = np.random.Generator(np.random.Philox(seed))
    layers = [_linear(known.shape[1], 1, random)]
    if attacker == "deep":
        sizes = (known.shape[1], _HIDDEN, _HIDDEN, 1)
        layers = [_linear(*pair, random) for pair in pairwise(sizes)]
    parameters = [each for layer in layers for each in layer]
    optimiser = torch.optim.Adam(parameters, lr=_RATE)
    for _ in range(_STEPS):
        optimiser.zero_grad()
        penalty = torch.stack([weight.square().sum() for weight, _ in layers]).sum()
        loss = functional.binary_cross_entropy_with_logits(_scores(known, layers), present.float())
        torch.autograd.backward(loss + _DECAY * penalty)
        optimiser.step()
    with torch.no_grad():
        return (_scores(asked, layers) > 0).long()


def _linear(inputs: int, outputs: int, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    drawn = random.standard_normal((inputs, outputs), dtype=np.float32) / np.float32(math.sqrt(inputs))
    return torch.from_numpy(drawn).requires_grad_(), torch.zeros(outputs, requires_grad=True)


def _scores(rows: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    for weight, bias in layers[:-1]:
        rows = torch.relu(rows @ weight + bias)
    weight, bias = layers[-1]
    return (rows @ weight + bias).squeeze(1)
