"""How much of a member's text a job's model reads: unknown tokens, and texts that are cut."""

from dataclasses import dataclass

__all__ = ["Coverage"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How a model reads texts.

    Attributes:
        texts: Their number.
        cut: How many of them are longer than the model reads.
        tokens: The tokens of the texts that the model reads, without those of a template or frame.
        unknown: How many of these have no entry in the vocabulary.
    """

    texts: int = 0
    cut: int = 0
    tokens: int = 0
    unknown: int = 0

    @property
    def cut_share(self) -> float:
        """The share of texts that are cut, in [0, 1]; 0 without texts."""
        return self.cut / self.texts if self.texts else 0.0

    @property
    def unknown_share(self) -> float:
        """The share of tokens that are unknown, in [0, 1]; 0 without tokens."""
        return self.unknown / self.tokens if self.tokens else 0.0

    def as_json(self, max_tokens: int) -> dict[str, int | float]:
        """Returns both shares and what they are shares of. `max_tokens` is as for `sentence`."""
        return {
            "texts": self.texts,
            "cut_texts": self.cut,
            "cut_share": self.cut_share,
            "tokens": self.tokens,
            "unknown_tokens": self.unknown,
            "unknown_share": self.unknown_share,
            "max_tokens": max_tokens,
        }

    def sentence(self, max_tokens: int) -> str:
        """Says both shares. `max_tokens` is the most tokens of a row that the model reads."""
        return (
            f"{100 * self.unknown_share:.1f} % of the tokens are unknown words, and {100 * self.cut_share:.1f} % of "
            f"the texts are cut, because the model reads at most {max_tokens} tokens"
        )
