"""Models as a job states them: an architecture and its sizes.

The job's method (`tacit.method`) says which parts of a model are shared and which are private.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tacit.documents import AtMost, Part, table_of
from tacit.plugin import PluginModel
from tacit.prompt import EncoderConfig, LoRA, NoInjection, PromptedModel

__all__ = [
    "BiLSTMModel",
    "Model",
    "NoModel",
    "PluginModel",
    "PromptedModel",
    "RvaeModel",
    "TextCNNModel",
    "TransformerModel",
    "described",
]


class TextCNNModel(Part):
    """TextCNN with parallel filters (Zhang and Wallace 2015), sized after Zhu et al. 2020, section 4.1."""

    architecture: Literal["textcnn"] = "textcnn"
    embedding: int = Field(default=128, ge=1, le=4096)
    widths: Annotated[tuple[int, ...], AtMost(16)] = Field(default=(2, 3, 4, 5), min_length=1)
    maps: int = Field(default=400, ge=1, le=8192)
    dropout: float = Field(default=0.5, ge=0, lt=1)
    # Standard deviation of the embedding's random start, if no table is given.
    embedding_std: float = Field(default=0.15, gt=0, le=100)
    # The embedding stays as in version 0: training skips it, and its update is exactly zero.
    freeze_embedding: bool = False
    # Longer texts are cut. Texts shorter than the widest filter are padded to its width.
    max_tokens: int = Field(default=64, ge=1, le=4096)

    @model_validator(mode="after")
    def _widths(self) -> Self:
        if any(not 1 <= width <= self.max_tokens for width in self.widths):
            raise ValueError("every width must lie between 1 and max_tokens")
        if len(set(self.widths)) != len(self.widths):
            raise ValueError("a width is listed twice")
        return self

    def values(self, vocabulary: int, labels: int) -> int:
        """Number of values of a model with `vocabulary` entries and `labels` labels."""
        filters = sum(self.embedding * width * self.maps + self.maps for width in self.widths)
        return vocabulary * self.embedding + filters + (len(self.widths) * self.maps + 1) * labels

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest sequence that the model accepts: the width of its widest filter."""
        return max(self.widths)

    @property
    def frame(self) -> bool:
        """Whether texts are put between [CLS] and [SEP]."""
        return False


class BiLSTMModel(Part):
    """One LSTM layer in both directions over word vectors (Graves et al. 2005), sized after FedVocab, appendix A.1."""

    architecture: Literal["bilstm"] = "bilstm"
    embedding: int = Field(default=300, ge=1, le=4096)
    # Width of the state in each direction.
    hidden: int = Field(default=300, ge=1, le=4096)
    # What the head sees of a text: each feature's maximum or mean over its tokens, or both directions' last states.
    pooling: Literal["max", "mean", "last"] = "max"
    dropout: float = Field(default=0.5, ge=0, lt=1)
    embedding_std: float = Field(default=0.15, gt=0, le=100)
    freeze_embedding: bool = False
    max_tokens: int = Field(default=128, ge=1, le=4096)

    def values(self, vocabulary: int, labels: int) -> int:
        """Number of values of a model with `vocabulary` entries and `labels` labels."""
        direction = 4 * self.hidden * (self.embedding + self.hidden + 1)
        return vocabulary * self.embedding + 2 * direction + (2 * self.hidden + 1) * labels

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest sequence that the model accepts."""
        return 1

    @property
    def frame(self) -> bool:
        """Whether texts are put between [CLS] and [SEP]."""
        return False


EncoderInjection = Annotated[LoRA | NoInjection, Field(discriminator="name")]


class TransformerModel(Part):
    """An encoder of the transformers library (BERT, DistilBERT, RoBERTa) under one linear layer.

    The operator names a `base`, a folder or a name on the hub (owner/name). In the bundle, the encoder's `config`
    replaces it, and its weights are version 0.
    """

    architecture: Literal["transformer"] = "transformer"
    base: str | None = Field(default=None, min_length=1, max_length=500)
    # The encoder's sizes, under the names that its family uses.
    config: EncoderConfig | None = None
    # What is trained of the encoder: changes of its matrices, or nothing. It is then frozen, and travels once. None:
    # the whole encoder is trained.
    injection: Annotated[EncoderInjection, table_of(EncoderInjection, "name", in_a_word=True)] | None = None
    dropout: float = Field(default=0.1, ge=0, lt=1)
    freeze_embedding: bool = False
    max_tokens: int = Field(default=128, ge=3, le=4096)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.base is None) == (self.config is None):
            raise ValueError(
                "a transformer needs a base, a folder or a name on the hub (owner/name); do not write config by hand: "
                "`coordinator job bundle` does"
            )
        return self

    @property
    def freezes_encoder(self) -> bool:
        """Whether the encoder itself stays as it is, and its values have files of their own."""
        return self.injection is not None

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest sequence that the model accepts: [CLS], a token, [SEP]."""
        return 3

    @property
    def frame(self) -> bool:
        """Whether texts are put between [CLS] and [SEP]."""
        return True


class RvaeModel(Part):
    """A recurrent variational autoencoder that generates text (DP-RVAE); `learning.synthesis` explains the sizes."""

    architecture: Literal["rvae"] = "rvae"
    # sound: the job's mechanism protects it. published: the paper's noise, without any guarantee.
    variant: Literal["sound", "published"] = "sound"
    embedding: int = Field(default=64, ge=1, le=1024)
    hidden: int = Field(default=128, ge=1, le=1024)
    latent: int = Field(default=32, ge=1, le=1024)
    # Number of entries kept from the start of the word list; all other words are unknown.
    words: int = Field(default=4000, ge=3, le=4000)
    # Longer texts are cut, and no longer text is generated.
    max_tokens: int = Field(default=32, ge=1, le=512)
    word_dropout: float = Field(default=0.3, ge=0, le=1)
    free_bits: float = Field(default=4.0, ge=0, le=1000)
    kl_weight: float = Field(default=1.0, ge=0, le=1000)
    # Weight of each label's own vector in the words' scores (label bias). With 0, as always in `published`, a label
    # acts only through the decoder's input.
    label_weight: float = Field(default=4.0, ge=0, le=100)
    embedding_std: float = Field(default=0.15, ge=0, le=100)
    freeze_embedding: bool = False
    tied: bool = False

    @model_validator(mode="before")
    @classmethod
    def _as_the_paper_has_it(cls, table: Any) -> Any:
        if isinstance(table, dict) and table.get("variant") == "published":
            return {"label_weight": 0.0, **table}
        return table

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.variant == "published" and self.label_weight:
            raise ValueError("label_weight: the published variant has no vectors of labels; leave it out")
        if self.tied and not self.freeze_embedding:
            raise ValueError("tied needs freeze_embedding, because a table that also scores the words is not trained")
        return self

    def values(self, vocabulary: int, labels: int) -> int:
        """Number of values of a model with `vocabulary` entries and `labels` labels."""
        rows = min(vocabulary, self.words) + 1 + labels
        lstms = 4 * self.hidden * (3 * self.embedding + 2 * self.hidden + 2)
        latent = 2 * (self.hidden + 1) * self.latent + (self.latent + self.embedding + 1) * self.embedding
        scores = (self.hidden + 1) * (self.embedding if self.tied else rows)
        return rows * self.embedding + lstms + latent + scores + labels * self.hidden

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest text: only its end. Label and end are added when a text is read."""
        return 1

    @property
    def frame(self) -> bool:
        """Whether texts are put between [CLS] and [SEP]."""
        return False


class NoModel(Part):
    """No model: the job asks a question and trains nothing."""

    architecture: Literal["none"] = "none"

    @property
    def freeze_embedding(self) -> bool:
        """There is nothing to freeze."""
        return False

    @property
    def max_tokens(self) -> int:
        """No model reads a text."""
        return 0

    @property
    def min_tokens(self) -> int:
        """No model reads a text."""
        return 0

    @property
    def frame(self) -> bool:
        """No model reads a text."""
        return False


def described(model: "Model") -> str:
    """The model's architecture in a few words; of a plugin's, all that names its code."""
    if isinstance(model, PluginModel):
        return f"{model.name} of the plugin {model.distribution} {model.version} (files {model.files.hex()})"
    return model.architecture


Model = Annotated[
    TextCNNModel | BiLSTMModel | TransformerModel | PromptedModel | RvaeModel | PluginModel | NoModel,
    Field(discriminator="architecture"),
]
