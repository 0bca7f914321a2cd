"""Sizes of the autoencoder and numbers of the published variant, checked once, here; and what a variant promises.

Two variants of DP-RVAE ("Differentially private recurrent variational autoencoder", with its federated learning), which
differ in what is protected:

    sound       every trained parameter by per-example DP-SGD, words from a public list, a noised label histogram, texts
                from the prior. (epsilon, delta) as the ledger has it.
    published   noise on the encoder's averaged gradient and on the decoder's input alone. No guarantee at all.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["NO_GUARANTEE", "PublishedSetting", "RvaeSetting", "Variant", "promise_of"]

Variant = Literal["sound", "published"]

# Stands wherever the published variant, its epsilon or its texts are shown.
NO_GUARANTEE: Final = "no differential privacy guarantee"

# Whoever writes a job chooses these numbers: they bound what a member builds of it.
_MAX_WORDS, _MAX_WIDTH, _MAX_TOKENS = 4000, 1024, 512


@dataclass(frozen=True, slots=True)
class RvaeSetting:
    """An autoencoder's sizes, and how its loss keeps the latent variable in use.

    words: entries of the public list that are kept, [PAD] and [UNK] among them; all others are unknown. max_tokens:
    words of a text; longer ones are cut. word_dropout: share of the decoder's input words that are replaced by [UNK]
    in training. free_bits: nats of a text's KL divergence that cost nothing, each dimension its part (Kingma et al.
    2016; of each text here, since their mean over the batch would make a text's loss depend on others). kl_weight: what
    the divergence is multiplied by. label_weight: what each label's own vector is multiplied by where words are scored;
    with more of it a label is learnt faster, and takes more of what DP-SGD lets one text say. tied: words are scored by
    their own embedding instead of a matrix of their own.
    """

    embedding: int = 64
    hidden: int = 128
    latent: int = 32
    words: int = 4000
    max_tokens: int = 32
    word_dropout: float = 0.3
    free_bits: float = 4.0
    kl_weight: float = 1.0
    label_weight: float = 4.0
    embedding_std: float = 0.15
    freeze_embedding: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        for name, most in (
            ("embedding", _MAX_WIDTH),
            ("hidden", _MAX_WIDTH),
            ("latent", _MAX_WIDTH),
            ("max_tokens", _MAX_TOKENS),
        ):
            if not 1 <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name} must lie between 1 and {most}, is {value}")
        if not 3 <= self.words <= _MAX_WORDS:
            raise ValueError(f"words must lie between 3 ([PAD], [UNK] and one more) and {_MAX_WORDS}, is {self.words}")
        if not 0 <= self.word_dropout <= 1:
            raise ValueError(f"word_dropout is a share from 0 to 1, is {self.word_dropout}")
        for name, most in (
            ("free_bits", 1000),
            ("kl_weight", 1000),
            ("label_weight", 100),
            ("embedding_std", 1000),
        ):
            if not 0 <= (number := getattr(self, name)) <= most:
                raise ValueError(f"{name} must lie between 0 and {most}, is {number}")
        if self.tied and not self.freeze_embedding:
            raise ValueError(
                "tied needs freeze_embedding: the gradient of a table that is looked up and projected with cannot be "
                "told apart by example; freeze it (train it on public text beforehand), or untie it"
            )


@dataclass(frozen=True, slots=True)
class PublishedSetting:
    """Numbers of variant `published`, by default the paper's (section 5.1).

    input_scale: gamma, scale of the Laplace noise on each coordinate of the decoder's input. word_dropout: rho. clip:
    C, bound in L2 of the encoder's averaged gradient. gradient_scale: sigma_s^2 of equation 11, which the paper does
    not state; the noise there has the scale gradient_scale * clip^2, and by default the one noise scale that it does
    state. delta: what the paper states its epsilons at; no step here makes use of it.
    """

    input_scale: float = 0.001
    word_dropout: float = 0.6
    clip: float = 1.0
    gradient_scale: float = 0.001
    learning_rate: float = 0.05
    batch: int = 32
    epochs: int = 2
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("input_scale", "clip", "gradient_scale", "learning_rate"):
            if not (0 < (value := getattr(self, name)) < math.inf):
                raise ValueError(f"{name} is a positive number, is {value}")
        if not 0 <= self.word_dropout <= 1:
            raise ValueError(f"word_dropout is a share from 0 to 1, is {self.word_dropout}")
        if self.batch < 1 or self.epochs < 1:
            raise ValueError(f"batch and epochs are 1 at least, are {self.batch} and {self.epochs}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, is {self.delta}")

    @property
    def formula_epsilon(self) -> float:
        """ln[(1 - rho) e^(1/gamma) + rho], equation 14: some 999 by default. A number to quote, not a privacy loss."""
        if self.word_dropout == 1:
            return 0.0
        # Of two terms, the larger taken out: e^1000 is no float.
        kept = math.log1p(-self.word_dropout) + 1 / self.input_scale
        if self.word_dropout == 0:
            return kept
        dropped = math.log(self.word_dropout)
        most = max(kept, dropped)
        return most + math.log(math.exp(kept - most) + math.exp(dropped - most))


def promise_of(variant: Variant, published: PublishedSetting | None = None) -> str:
    """What may be said of a variant's weights and texts, in one sentence, for screens, logs and reports."""
    if variant == "sound":
        return "differentially private in each text: the (epsilon, delta) of the events in the member's ledger"
    epsilon = (published or PublishedSetting()).formula_epsilon
    return f"{NO_GUARANTEE} (the published formula gives {epsilon:.2f}, and bounds nothing)"
