"""What training, evaluation and export know of an architecture.

Guarantees: dropout draws from a source of the module's own, so that trainings in two threads do not
disturb each other and a seed means what it says; `narrowed` gives exactly the training that the whole
embedding would give.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learning.models.draws import Draws, SecretDraws, TorchDraws
from secure_agg import RandomSource
from tacit.job import Precision
from tacit.method import ModelPart

__all__ = ["Dropout", "TextClassifier"]


class Dropout(nn.Module):
    """Inverted dropout (Srivastava et al. 2014) with its own source of randomness."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.draws: Draws = TorchDraws()

    def forward(self, x: Tensor) -> Tensor:
        """As x; in training mode each value becomes zero, or is divided by the probability that it stays."""
        if not self.training or self.probability == 0:
            return x
        kept = 1 - self.probability
        return x * self.draws.kept(x, kept).div_(kept)


class TextClassifier(nn.Module):
    """Ids of shape (B, S) to logits of shape (B, labels).

    A text's logits do not depend on how far its batch is padded with `pad_id`; S is at least `min_tokens`.
    The embedding is used by looking up ids, and in no other way. What lies above it, `classify`, is an architecture's
    own.
    """

    # The part of the model that a parameter belongs to, by the first component of its name.
    parts: ClassVar[Mapping[str, ModelPart]]

    embedding: nn.Embedding
    dropout: Dropout
    pad_id: int
    min_tokens: int

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        """Logits (B, labels) for the vectors (B, S, width) of tokens; `seen` (B, S) is false where padding is, which is
        behind a text and nowhere else. What stands there has no influence.
        """
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of shape (B, labels) for ids of shape (B, S), S at least `min_tokens`."""
        return self.classify(self.embedding(ids), ids != self.pad_id)

    @classmethod
    def part_of(cls, name: str) -> ModelPart:
        """The part of the model that a parameter belongs to."""
        return cls.parts[name.split(".", 1)[0]]

    @contextmanager
    def training_only(self, names: Collection[str]) -> Iterator[None]:
        """Only these parameters have gradients meanwhile, of those that had them; no gradient is left behind, neither
        what was there before nor what comes.
        """
        before = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        self.zero_grad(set_to_none=True)
        try:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(before[name] and name in names)
            yield
        finally:
            self.zero_grad(set_to_none=True)
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(before[name])

    def seed(self, seed: int) -> None:
        """Starts dropout's randomness anew, on the device where the module lies. Who knows the seed knows the draws,
        and of a seed 32 bits count: not for what must stay secret.
        """
        self.dropout.draws = TorchDraws.seeded(seed, self.embedding.weight.device)

    def draw_from(self, random: RandomSource) -> None:
        """Starts it anew from a source whose draws nobody can know."""
        self.dropout.draws = SecretDraws(random)

    def unseed(self) -> None:
        """Back to torch's own randomness (a generator can be neither copied nor pickled with the module)."""
        self.dropout.draws = TorchDraws()

    @contextmanager
    def computing_in(self, precision: Precision) -> Iterator[None]:
        """What is frozen computes in this meanwhile.

        Raises:
            ValueError: less than float32, and nothing here is frozen for good.
        """
        if precision != "float32":
            raise ValueError(f"{precision} is for the frozen network of a prompted model")
        yield

    @contextmanager
    def narrowed(self, ids: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Leaves only those rows of the embedding that `ids` use, and gives the ids that name them there.

        A row that no text uses has no gradient. Plain SGD, and Adam from moments of zero, leave it where it
        is, to the bit; only they pay for stepping over it. For BERT's 30,522 pieces and a member's few
        thousand that is most of an optimiser step. On leaving, the rows go back to their places.

        Raises:
            ValueError: an id outside the embedding.
        """
        whole, pad_id = self.embedding, self.pad_id
        if ids.size and not 0 <= ids.min() <= ids.max() < whole.num_embeddings:
            raise ValueError(f"ids outside the embedding of {whole.num_embeddings} rows; is it the job's tokenizer?")
        used = np.unique(np.append(ids, pad_id))
        place = np.zeros(whole.num_embeddings, dtype=np.int64)
        place[used] = np.arange(len(used))
        rows = torch.from_numpy(used).to(whole.weight.device)
        small = nn.Embedding(
            len(used),
            whole.embedding_dim,
            padding_idx=int(place[pad_id]),
            _weight=whole.weight.detach()[rows].clone(),
        )
        # A new embedding would be trained, whatever the whole one is.
        small.weight.requires_grad_(whole.weight.requires_grad)
        self.embedding, self.pad_id = small, int(place[pad_id])
        try:
            yield place[ids]
        finally:
            with torch.no_grad():
                whole.weight[rows] = small.weight.detach().to(whole.weight.device)
            self.embedding, self.pad_id = whole, pad_id
