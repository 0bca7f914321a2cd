"""Settings of what is trained before or inside a frozen backbone, and of its task; sizes are checked here once.

Injections (`tokens` is the number of the prompt's positions):

    PromptTuning    vectors before the text (Lester et al. 2021)
    PTuning         such vectors, made by an encoder (an MLP or a bidirectional LSTM) that is trained with them (Liu et
                    al. 2021, "GPT understands, too")
    PrefixTuning    keys and values before those of every layer (Li and Liang 2021), trained directly or made by an MLP
                    with a hidden layer
    LoRA            a product of two thin matrices added to chosen matrices, by default query and value (Hu et al. 2022)
    BitFit          the layers' own biases (Ben Zaken et al. 2022)
    NoInjection     nothing: the head alone is trained

Tasks: `Cloze` asks the language model for the word at the mask. `Head` puts a linear layer on the mean of the text.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "MATRICES",
    "BitFit",
    "Cloze",
    "Head",
    "Injection",
    "LoRA",
    "NoInjection",
    "PTuning",
    "PrefixTuning",
    "PromptTuning",
    "Task",
    "prompt_positions",
]

# A layer's matrices: four of its attention, and those of its feed-forward network, of which few families have a gate.
MATRICES = ("query", "key", "value", "output", "up", "down", "gate")
# Limits on a job's numbers, which bound the model that a member builds.
_MAX_TOKENS, _MAX_HIDDEN, _MAX_RANK, _MAX_WORDS = 512, 8192, 1024, 4096


@dataclass(frozen=True, slots=True)
class PromptTuning:
    """`tokens` trained vectors before the text."""

    tokens: int = 20

    def __post_init__(self) -> None:
        _between("tokens", self.tokens, 1, _MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class PTuning:
    """`tokens` vectors before the text, made by an encoder with layers of `hidden` values."""

    tokens: int
    encoder: Literal["mlp", "lstm"]
    hidden: int

    def __post_init__(self) -> None:
        _between("tokens", self.tokens, 1, _MAX_TOKENS)
        _between("hidden", self.hidden, 1, _MAX_HIDDEN)
        if self.encoder not in ("mlp", "lstm"):
            raise ValueError(f"the encoder of p-tuning must be mlp or lstm, got {self.encoder!r}")


@dataclass(frozen=True, slots=True)
class PrefixTuning:
    """`tokens` keys and values for each layer, made by an MLP with `hidden` values, or with None trained directly."""

    tokens: int
    hidden: int | None = None

    def __post_init__(self) -> None:
        _between("tokens", self.tokens, 1, _MAX_TOKENS)
        if self.hidden is not None:
            _between("hidden", self.hidden, 1, _MAX_HIDDEN)


@dataclass(frozen=True, slots=True)
class LoRA:
    """alpha / rank * up(down(x)), added to the output of chosen matrices for x.

    Attributes:
        rank, alpha: As above.
        matrices: Of `MATRICES`.
        last_layers: Only in this many of the last layers that read the text; None means in all.
        train: Which of the two matrices are trained. With "up", `down` keeps its public random values, so the mean of
            members' products is the product of the means (FFA-LoRA, Sun et al. 2024).
    """

    rank: int
    alpha: float
    matrices: tuple[str, ...] = ("query", "value")
    last_layers: int | None = None
    train: Literal["both", "up"] = "both"

    def __post_init__(self) -> None:
        _between("rank", self.rank, 1, _MAX_RANK)
        if not 0 < self.alpha <= 1e6:
            raise ValueError(f"alpha of LoRA must be above 0 and at most 1e6, got {self.alpha}; 2 * rank is usual")
        if not self.matrices or not set(self.matrices) <= set(MATRICES):
            raise ValueError(f"the matrices of LoRA must be some of {', '.join(MATRICES)}, got {self.matrices}")
        if self.train not in ("both", "up"):
            raise ValueError(f"LoRA trains both matrices or up, got {self.train!r}")
        _check_last(self.last_layers)


@dataclass(frozen=True, slots=True)
class BitFit:
    """The biases of the layers that read the text; with `last_layers`, of that many of the last ones."""

    last_layers: int | None = None

    def __post_init__(self) -> None:
        _check_last(self.last_layers)


@dataclass(frozen=True, slots=True)
class NoInjection:
    """Nothing: only the head is trained."""


Injection = PromptTuning | PTuning | PrefixTuning | LoRA | BitFit | NoInjection


@dataclass(frozen=True, slots=True)
class Cloze:
    """Asks for the word at the mask.

    A label's score is log(mean over its words of exp(score of the word)). So its probability is the mean of its words'
    probabilities, and a label gains nothing by having more words.

    Attributes:
        label_words: For each label, in the job's order, the ids of one or more words, each a single token.
    """

    label_words: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        words = [word for each in self.label_words for word in each]
        if len(self.label_words) < 2 or not all(self.label_words):
            raise ValueError("a cloze needs at least two labels, each with at least one word")
        if len(words) > _MAX_WORDS:
            raise ValueError(f"a cloze has at most {_MAX_WORDS} label words, got {len(words)}")
        if len(set(words)) != len(words):
            raise ValueError("a label word occurs twice; give it to one label, once")
        if min(words) < 0:
            raise ValueError("the id of a label word must be a row of the vocabulary, never below 0")


@dataclass(frozen=True, slots=True)
class Head:
    """A trained linear layer on the mean of the text's states. For encoders.

    Attributes:
        layers: Layers whose means, side by side, centred and of unit length, are the features: 0 is the token vectors
            as the first layer reads them. Empty: the last layer's mean as it is.
    """

    layers: tuple[int, ...] = ()


Task = Cloze | Head


def prompt_positions(injection: Injection) -> int:
    """The number of the backbone's positions that the injection takes from the text."""
    return injection.tokens if isinstance(injection, PromptTuning | PTuning) else 0


def _check_last(layers: int | None) -> None:
    if layers is not None:
        _between("last_layers", layers, 1, 128)


def _between(what: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{what} must be a whole number from {least} to {most}, got {value!r}")
