"""Sizes of the autoencoder and numbers of the published variant, checked here once; and what each variant promises.

The two variants of DP-RVAE ("Differentially private recurrent variational autoencoder", with its federated learning)
differ in what they protect:

    sound       every trained parameter by per-example DP-SGD, words from a public list, a noised label histogram, texts
                from the prior. (epsilon, delta) as in the ledger.
    published   noise on the encoder's averaged gradient and on the decoder's input alone. No guarantee at all.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["NO_GUARANTEE", "PublishedSetting", "RvaeSetting", "Variant", "promise_of"]

Variant = Literal["sound", "published"]

# Must appear wherever the published variant, its epsilon or its texts are shown.
NO_GUARANTEE: Final = "no differential privacy guarantee"

# Limits on a job's numbers, which bound the model that a member builds.
_MAX_WORDS, _MAX_WIDTH, _MAX_TOKENS = 4000, 1024, 512


@dataclass(frozen=True, slots=True)
class RvaeSetting:
    """An autoencoder's sizes, and what its loss asks of the latent variable.

    Attributes:
        embedding, hidden, latent: Widths.
        words: Entries of the public list that are kept, including [PAD] and [UNK]; all other words are unknown.
        max_tokens: Words of a text; longer texts are cut.
        word_dropout: Share of the decoder's input words that training replaces by [UNK].
        free_bits: Nats of a text's KL divergence that cost nothing, an equal part in each dimension (Kingma et al.
            2016). The loss pulls z no nearer to the prior than that; whether words make use of z is up to the
            training. They are counted for each text, since a mean over the batch would make a text's loss depend on
            others.
        kl_weight: Multiplies the divergence.
        label_weight: Multiplies each label's vector where words are scored. A larger one teaches a label faster, and
            takes more of what DP-SGD lets one text contribute.
        embedding_std: Standard deviation of the embedding's initial values.
        freeze_embedding: Whether the embedding is not trained.
        tied: Whether words are scored by their embedding instead of a separate matrix.
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
                raise ValueError(f"{name} must lie between 1 and {most}, got {value}")
        if not 3 <= self.words <= _MAX_WORDS:
            raise ValueError(f"words must lie between 3 ([PAD], [UNK] and one more) and {_MAX_WORDS}, got {self.words}")
        if not 0 <= self.word_dropout <= 1:
            raise ValueError(f"word_dropout must lie between 0 and 1, got {self.word_dropout}")
        for name, most in (
            ("free_bits", 1000),
            ("kl_weight", 1000),
            ("label_weight", 100),
            ("embedding_std", 1000),
        ):
            if not 0 <= (number := getattr(self, name)) <= most:
                raise ValueError(f"{name} must lie between 0 and {most}, got {number}")
        if self.tied and not self.freeze_embedding:
            raise ValueError(
                "tied needs freeze_embedding, since the gradient of a table used twice cannot be told apart by "
                "example; freeze it (and train it on public text before), or untie it"
            )


@dataclass(frozen=True, slots=True)
class PublishedSetting:
    """The numbers of variant `published`, by default the paper's (section 5.1).

    Attributes:
        input_scale: gamma, the scale of the Laplace noise on each coordinate of the decoder's input.
        word_dropout: rho.
        clip: C, the L2 bound of the encoder's averaged gradient.
        gradient_scale: sigma_s^2 of equation 11. The noise there has scale gradient_scale * clip^2. The paper does not
            state it; the default is the one noise scale that the paper does state.
        learning_rate, batch, epochs: Of plain SGD.
        delta: The delta of the paper's epsilons; no step here uses it.
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
                raise ValueError(f"{name} must be a positive number, got {value}")
        if not 0 <= self.word_dropout <= 1:
            raise ValueError(f"word_dropout must lie between 0 and 1, got {self.word_dropout}")
        if self.batch < 1 or self.epochs < 1:
            raise ValueError(f"batch and epochs must be at least 1, got {self.batch} and {self.epochs}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, got {self.delta}")

    @property
    def formula_epsilon(self) -> float:
        """ln[(1 - rho) e^(1/gamma) + rho], equation 14: about 999 by default. A number to quote, not a privacy loss."""
        if self.word_dropout == 1:
            return 0.0
        # The larger of the two terms is factored out, since e^1000 overflows a float.
        kept = math.log1p(-self.word_dropout) + 1 / self.input_scale
        if self.word_dropout == 0:
            return kept
        dropped = math.log(self.word_dropout)
        most = max(kept, dropped)
        return most + math.log(math.exp(kept - most) + math.exp(dropped - most))


def promise_of(variant: Variant, published: PublishedSetting | None = None) -> str:
    """One sentence, for screens, logs and reports, on what a variant promises for its weights and texts."""
    if variant == "sound":
        return "differentially private in each text: the (epsilon, delta) of the events in the member's ledger"
    epsilon = (published or PublishedSetting()).formula_epsilon
    return f"{NO_GUARANTEE} (the published formula gives {epsilon:.2f}, and bounds nothing)"
