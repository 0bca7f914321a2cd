"""Keyword inference: tells whether a word is in a text, only from the text's embedding in a released model.

**The attacker.** It sees a released classifier's features (one vector for each text, under the head) for texts of
others, for example because it runs the model for them, and knows which words to look for (Pan et al. 2020, "Privacy
risks of general-purpose language models"; DP-RVAE, section 5.3). It embeds its own texts of the same kind with the same
model, and learns for each word to distinguish embeddings of texts with it from those without. Then it is asked about
texts that neither it nor the model has seen.

**The measure.** Half of a word's texts contain it and half do not, matched by length, so chance is 0.5 and length
reveals nothing. The attacker need not find the word itself: anything that goes with it, such as the label, counts too.
The word stays in the text, where the attacker would find it. `hidden_words` removes it from the same texts, and another
word from the texts that lack it. Correct answers then come from the context of the word.

**Differential privacy says nothing about it.** DP-SGD and synthetic text protect the texts that a model was trained on.
The attacked text is an input, and a perfectly private encoder may still keep its every word: random weights do, and so
does any good pretrained encoder. A lower figure with DP means that this model's features are poorer, by noise or by
little training. To hide inputs, keep embeddings where the texts are.

`attack` has the models and their training.
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

# Maps texts to one vector each, (N, D).
Embed = Callable[[Sequence[str]], NDArray[np.float32]]
# linear: logistic regression. deep: two hidden layers.
Attacker = Literal["linear", "deep"]

KEYWORDS = 10
CHANCE = 0.5
# With fewer texts of each kind a score says nothing, and an attacker learns nothing.
MIN_TEXTS = 5
_HIDDEN = 64
_STEPS = 300
_RATE = 0.01
# Weight of the penalty on squared weights, because there are mostly more features than texts.
_DECAY = 0.01

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
# English function words of four letters and more.
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
    """An attacker's score for one keyword.

    Args:
        accuracy: share of correct answers on held-back texts, half of which have the keyword.
        tests: number of held-back texts.
        trained: number of texts that the attacker learnt from.
    """

    keyword: str
    attacker: Attacker
    accuracy: float
    tests: int
    trained: int

    @property
    def standard_error(self) -> float:
        """Binomial standard error of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.tests)


@dataclass(frozen=True, slots=True)
class Inference:
    """All keywords' scores under one attacker."""

    scores: tuple[KeywordScore, ...]

    @property
    def accuracy(self) -> float:
        """Mean over the keywords; `CHANCE` for an attacker that sees nothing."""
        return float(np.mean([score.accuracy for score in self.scores]))

    @property
    def standard_error(self) -> float:
        """Standard error of the mean if all its texts differed; some are in several keywords' sets."""
        return math.sqrt(sum(score.standard_error**2 for score in self.scores)) / len(self.scores)

    @property
    def chance_error(self) -> float:
        """Standard deviation of the mean for an attacker that guesses, and so of `CHANCE`."""
        return math.sqrt(sum(0.25 / score.tests for score in self.scores)) / len(self.scores)


def words_of(text: str) -> list[str]:
    """Return a text's words in order, in lower case: letters, with an apostrophe inside."""
    return _WORD.findall(text.lower())


def choose_keywords(
    texts: Sequence[str], count: int = KEYWORDS, *, min_share: float = 0.005, max_share: float = 0.05
) -> tuple[str, ...]:
    """Choose `count` keywords by a fixed rule over the attacker's own texts.

    Candidates have four letters or more, are not function words, and occur in a share of the texts between `min_share`
    and `max_share`. Those in most texts are chosen, ties in alphabetical order.

    Raises:
        ValueError: there are fewer candidates.
    """
    counts = Counter(word for text in texts for word in set(words_of(text)))
    found = sorted(
        (-met, word)
        for word, met in counts.items()
        if _could_be_one(word) and min_share * len(texts) <= met <= max_share * len(texts)
    )
    if len(found) < count:
        raise ValueError(
            f"{len(found)} words occur in {min_share:.1%} to {max_share:.1%} of {len(texts):,} texts, but {count} "
            "are needed; give more texts, or wider bounds"
        )
    return tuple(word for _, word in found[:count])


def balanced(texts: Sequence[str], keyword: str, seed: int) -> tuple[list[str], NDArray[np.int64]]:
    """Return texts and whether they have the keyword, (N,).

    Each text with the keyword is paired with one without it that is nearest in length. No text comes twice. The seed
    draws among equally long ones.

    Raises:
        ValueError: fewer than `MIN_TEXTS` texts with the keyword, or without it.
    """
    words = [words_of(text) for text in texts]
    held = [at for at, each in enumerate(words) if keyword in each]
    others = [at for at, each in enumerate(words) if keyword not in each]
    if min(len(held), len(others)) < MIN_TEXTS:
        raise ValueError(
            f"{len(held)} of {len(texts):,} texts have {keyword!r}, but {MIN_TEXTS} of each kind are needed; choose "
            "more frequent keywords"
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
    """Return the text with all occurrences of a word removed."""
    return re.sub(rf"(?<![\w']){re.escape(word)}(?![\w']|'\w)", "", text, flags=re.IGNORECASE)


def embedder(module: TextClassifier, encoder: TextEncoder, batch: int = 128) -> Embed:
    """Return a function that embeds texts as the features under the classifier's head, without dropout.

    These are a BiLSTM's pooled states, or a transformer's mean over the tokens.
    """
    head = module.output
    if not isinstance(head, nn.Module):
        raise TypeError(f"{type(module).__name__} has no head")

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
    """Train an attacker for each keyword on the auxiliary texts' embeddings, and test it on the held-back ones'.

    Args:
        auxiliary: the attacker's texts.
        held_back: texts on which neither the attacker nor the model was trained.
        hidden_words: remove the keyword from the texts, so that only its context can reveal it.

    Raises:
        ValueError: a keyword has too few texts (`balanced`), a text is on both sides, or embeddings are not finite.
    """
    if common := len(set(auxiliary) & set(held_back)):
        raise ValueError(f"{common} held-back texts are also the attacker's; remove them from one of the two")
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
    """Remove the keyword from each text, or else another possible keyword, drawn from the seed.

    So a gap by itself reveals nothing.
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
        raise ValueError("an embedding has values that are not finite")
    return torch.from_numpy(rows).float()


def _attack(known: Tensor, present: Tensor, asked: Tensor, attacker: Attacker, seed: int) -> Tensor:
    """Train an attacker on (known, present), and return 1 where it answers that the keyword is there, (N,)."""
    mean = known.mean(dim=0)
    # One scale for all features, so that almost constant ones, such as those of rare words, are not amplified.
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
