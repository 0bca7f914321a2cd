"""The interfaces of an architecture for training, evaluation and export.

Guarantees: dropout draws from the module's own source, so trainings in two threads do not disturb each other and a seed
determines the draws. `narrowed` gives exactly the training that the whole embedding would give, with an optimiser that
leaves a row without a gradient as it is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from learning.models.draws import Draws, SecretDraws, TorchDraws
from secure_agg import RandomSource
from tacit.job import Precision
from tacit.method import ModelPart

__all__ = ["Dropout", "TextClassifier", "TextModel"]


# Logits to logits.
Adjusted = Callable[[Tensor], Tensor]


class Dropout(nn.Module):
    """Inverted dropout (Srivastava et al. 2014) with its own source of randomness."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.draws: Draws = TorchDraws()

    def forward(self, x: Tensor) -> Tensor:
        """x itself; in training mode, each value becomes zero or is divided by the probability that it stays."""
        if not self.training or self.probability == 0:
            return x
        kept = 1 - self.probability
        return x * self.draws.kept(x, kept).div_(kept)


class TextModel(nn.Module):
    """Learns from ids (B, S), with S at least `min_tokens`, and a target for each example.

    An example's loss does not depend on how far its batch is padded with `pad_id`, nor on the batch's other examples.
    """

    # The part of the model that a parameter belongs to, by the first component of its name.
    parts: ClassVar[Mapping[str, ModelPart]]

    embedding: nn.Embedding
    dropout: Dropout
    pad_id: int
    min_tokens: int
    # The most positions of a text, its padding included.
    room: int = 1 << 30
    # Whether activations are computed again for the backward pass, which needs less memory and more time. Only models
    # that write can.
    checkpointing: bool = False
    # The fewest positions that are worth a pass of their own to save padding: about twice what a pass costs by itself
    # on a CPU, which is as much as 25 to 37 positions for MiniLM and SmolLM2.
    piece_positions: int = 64

    def judged(self, ids: Tensor, targets: Tensor, adjusted: Adjusted | None = None) -> tuple[Tensor, Tensor]:
        """The loss (B,) of each example, in nats, and whether it is right (B,) bool.

        Args:
            ids: (B, S).
            targets: (B,) indices of labels, or (B, S) of a model that writes.
            adjusted: What becomes of the logits (B, L) of labels first; None: nothing.
        """
        raise NotImplementedError

    def lengths(self, ids: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) How many positions of each row count; what follows is padding. Shapes as for `judged`."""
        lengths: NDArray[np.int64] = (ids != self.pad_id).sum(axis=1)
        return lengths

    def probed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, ..., choices) without a graph, and losses (B,) for the least likely choice of each.

        If softmax is saturated, the likely choices have no gradient.
        """
        raise NotImplementedError

    @classmethod
    def part_of(cls, name: str) -> ModelPart:
        """The part of the model that a parameter belongs to."""
        return cls.parts[name.split(".", 1)[0]]

    @contextmanager
    def training_only(self, names: Collection[str]) -> Iterator[None]:
        """Inside the context, only these parameters have gradients, among those that had them.

        It leaves no gradient, neither an earlier one nor a new one.
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
        """Restarts dropout's randomness from a seed, on the module's device.

        Anyone who knows the seed knows the draws, and only 32 bits of it count, so it is not for draws that must stay
        secret.
        """
        self.dropout.draws = TorchDraws.seeded(seed, self.embedding.weight.device)

    def draw_from(self, random: RandomSource) -> None:
        """Restarts it from a source whose draws nobody can know."""
        self.dropout.draws = SecretDraws(random)

    def unseed(self) -> None:
        """Returns to torch's own randomness (a generator cannot be copied or pickled with the module)."""
        self.dropout.draws = TorchDraws()

    @contextmanager
    def computing_in(self, precision: Precision) -> Iterator[None]:
        """Inside the context, what is frozen computes in this precision.

        Raises:
            ValueError: The precision is below float32, and this model has no frozen network.
        """
        if precision != "float32":
            raise ValueError(f"{precision} is for the frozen network of a prompted model; use float32")
        yield

    @contextmanager
    def keeping_in(self, precision: Precision) -> Iterator[None]:
        """Inside the context, the matrices of what is frozen are kept in this precision. All is computed in float32.

        Raises:
            ValueError: The precision is below float32, and this model does not write.
        """
        if precision != "float32":
            raise ValueError(f"dp-sgd computes in float32, and only a model that writes keeps matrices in {precision}")
        yield

    @contextmanager
    def narrowed(self, ids: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Inside the context, keeps only the embedding rows that `ids` use; yields ids for the smaller embedding.

        A row that no text uses has no gradient. Plain SGD, and Adam with zero moments, leave it unchanged to the bit,
        but still spend time on it: with BERT's 30,522 pieces and a member's few thousand, most of an optimiser step. On
        exit the rows are written back. Weight decay moves every row, so it needs the whole embedding.

        Raises:
            ValueError: An id is outside the embedding.
        """
        whole, pad_id = self.embedding, self.pad_id
        if ids.size and not 0 <= ids.min() <= ids.max() < whole.num_embeddings:
            raise ValueError(f"ids are outside the embedding of {whole.num_embeddings} rows; use the job's tokenizer")
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
        # A new embedding is trainable by default, whatever the whole one is.
        small.weight.requires_grad_(whole.weight.requires_grad)
        self.embedding, self.pad_id = small, int(place[pad_id])
        try:
            yield place[ids]
        finally:
            with torch.no_grad():
                whole.weight[rows] = small.weight.detach().to(whole.weight.device)
            self.embedding, self.pad_id = whole, pad_id


class TextClassifier(TextModel):
    """Maps ids (B, S) to logits (B, labels), with S at least `min_tokens`.

    A text's logits do not depend on how far its batch is padded with `pad_id`. The embedding is used only to look up
    ids. Everything above it, `classify`, is left to the architecture.
    """

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        """Logits (B, labels) for token vectors (B, S, width).

        `seen` (B, S) is False at padding, which is only after a text. Vectors there have no influence.
        """
        raise NotImplementedError

    def exportable(self) -> nn.Module:
        """What is converted to ONNX: ids (B, S) to logits (B, labels).

        This module itself, unless an architecture trains with layers that ONNX lacks and returns a module with the same
        values in others. Every export is compared with this module.
        """
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, labels) for ids (B, S), with S at least `min_tokens`."""
        return self.classify(self.embedding(ids), ids != self.pad_id)

    def judged(self, ids: Tensor, targets: Tensor, adjusted: Adjusted | None = None) -> tuple[Tensor, Tensor]:
        """As in `TextModel`: cross entropy, and whether the target is the most likely label."""
        logits: Tensor = self(ids)
        if adjusted is not None:
            logits = adjusted(logits)
        return functional.cross_entropy(logits, targets, reduction="none"), logits.detach().argmax(dim=1) == targets

    def probed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As in `TextModel`."""
        logits: Tensor = self(ids)
        found = logits.detach()
        return found, functional.cross_entropy(logits, found.argmin(dim=1), reduction="none")
