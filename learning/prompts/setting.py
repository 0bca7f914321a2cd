"""What is trained in front of, or inside, a frozen backbone, and what it answers: sizes, checked once, here.

Injections (tokens: how many positions the prompt has):

    PromptTuning    rows of vectors in front of the text (Lester et al. 2021)
    PTuning         such rows made by an encoder, an MLP or a bidirectional LSTM, that is trained with them (Liu et al.
                    2021, "GPT understands, too")
    PrefixTuning    keys and values in front of those of every layer (Li and Liang 2021), themselves trained, or made by
                    an MLP with a hidden layer
    LoRA            a product of two thin matrices beside every query and value matrix (Hu et al. 2022)

Tasks: `Cloze` asks the language model for the word at the mask, `Head` puts a linear layer over the mean of the text.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Cloze", "Head", "Injection", "LoRA", "PTuning", "PrefixTuning", "PromptTuning", "Task", "prompt_positions"]

# Whoever writes a job chooses these numbers: they bound what a member builds of it.
_MAX_TOKENS, _MAX_HIDDEN, _MAX_RANK, _MAX_WORDS = 512, 8192, 1024, 4096


@dataclass(frozen=True, slots=True)
class PromptTuning:
    """`tokens` trained vectors in front of the text."""

    tokens: int = 20

    def __post_init__(self) -> None:
        _between("tokens", self.tokens, 1, _MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class PTuning:
    """`tokens` vectors in front of the text, made by an encoder with layers of `hidden` values."""

    tokens: int
    encoder: Literal["mlp", "lstm"]
    hidden: int

    def __post_init__(self) -> None:
        _between("tokens", self.tokens, 1, _MAX_TOKENS)
        _between("hidden", self.hidden, 1, _MAX_HIDDEN)
        if self.encoder not in ("mlp", "lstm"):
            raise ValueError(f"the encoder of p-tuning is mlp or lstm, not {self.encoder!r}")


@dataclass(frozen=True, slots=True)
class PrefixTuning:
    """`tokens` keys and values for each layer; made by an MLP with `hidden` values, or trained as they are (None)."""

    tokens: int
    hidden: int | None = None

    def __post_init__(self) -> None:
        _between("tokens", self.tokens, 1, _MAX_TOKENS)
        if self.hidden is not None:
            _between("hidden", self.hidden, 1, _MAX_HIDDEN)


@dataclass(frozen=True, slots=True)
class LoRA:
    """alpha / rank * up(down(x)) added to what each query and value matrix makes of x."""

    rank: int
    alpha: float

    def __post_init__(self) -> None:
        _between("rank", self.rank, 1, _MAX_RANK)
        if not 0 < self.alpha <= 1e6:
            raise ValueError(f"alpha of LoRA must be above 0 and at most 1e6, is {self.alpha}; 2 * rank is usual")


Injection = PromptTuning | PTuning | PrefixTuning | LoRA


@dataclass(frozen=True, slots=True)
class Cloze:
    """label_words: for each label, in the job's order, the ids of one or several words, each a single token.

    A label's score is log(mean over its words of exp(score of the word)): its probability is the mean of its words',
    so that a label gains nothing by having more of them.
    """

    label_words: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        words = [word for each in self.label_words for word in each]
        if len(self.label_words) < 2 or not all(self.label_words):
            raise ValueError("a cloze needs two labels or more, each with one word or more")
        if len(words) > _MAX_WORDS:
            raise ValueError(f"a cloze has at most {_MAX_WORDS} label words, not {len(words)}")
        if len(set(words)) != len(words):
            raise ValueError("a label word stands twice; give it to one label, once")
        if min(words) < 0:
            raise ValueError("a label word's id is a row of the vocabulary, never below 0")


@dataclass(frozen=True, slots=True)
class Head:
    """A trained linear layer over the mean of the text's states. For encoders."""


Task = Cloze | Head


def prompt_positions(injection: Injection) -> int:
    """How many positions of the backbone the injection takes from the text."""
    return injection.tokens if isinstance(injection, PromptTuning | PTuning) else 0


def _between(what: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{what} must be a whole number from {least} to {most}, is {value!r}")
