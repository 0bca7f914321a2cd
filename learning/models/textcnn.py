"""TextCNN: parallel convolutions over word vectors, max pooling, one linear layer.

Kim 2014, with the filter widths and maps of Zhang and Wallace 2015 that Zhu et al. 2020 federate. Guarantees that
padding never wins: a filter sees only windows inside a text or, if the text is shorter than the filter, the one window
that starts with it. So logits do not depend on the rest of the batch.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from learning.models.classifier import Dropout, TextClassifier
from tacit.method import ModelPart
from tacit.model import TextCNNModel

__all__ = ["TextCNN"]


class TextCNN(TextClassifier):
    """Maps ids (B, S) to logits (B, labels), by `len(widths) * maps` features of each text.

    The embedding starts as N(0, embedding_std) with a padding row of zeros, and every other tensor uniform within 1 /
    sqrt(fan in), as by default in torch. Without a seed all of them are zero. A frozen embedding has no gradient, and
    so gets neither steps nor noise.
    """

    parts: ClassVar[Mapping[str, ModelPart]] = {"embedding": "embedding", "filters": "encoder", "output": "head"}
    # A pass costs as much as 45 to 80 positions.
    piece_positions = 128

    def __init__(self, model: TextCNNModel, vocabulary_size: int, labels: int, pad_id: int, seed: int | None) -> None:
        super().__init__()
        self.pad_id, self.min_tokens = pad_id, max(model.widths)
        table = np.zeros((vocabulary_size, model.embedding), dtype=np.float32)
        # The embedding shares the table's memory. Torch first fills the layers from its global generator, which is
        # restored afterwards. (The meta device would avoid this, but costs a second of imports.)
        with torch.random.fork_rng(devices=[]):
            self.embedding = nn.Embedding(
                vocabulary_size, model.embedding, padding_idx=pad_id, _weight=torch.from_numpy(table)
            )
            self.embedding.weight.requires_grad_(not model.freeze_embedding)
            self.filters = nn.ModuleDict(
                {str(width): nn.Conv1d(model.embedding, model.maps, width) for width in model.widths}
            )
            self.dropout = Dropout(model.dropout)
            self.output = nn.Linear(len(model.widths) * model.maps, labels)
        if seed is None:
            for layer in self._layers():
                for parameter in layer.parameters():
                    parameter.data.zero_()
            return
        random = np.random.Generator(np.random.Philox(seed))
        random.standard_normal(dtype=np.float32, out=table)
        table *= np.float32(model.embedding_std)
        table[pad_id] = 0
        for layer in self._layers():
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters():
                uniform = random.random(tuple(parameter.shape), dtype=np.float32)
                with torch.no_grad():
                    parameter.copy_(torch.from_numpy((2 * uniform - 1) * np.float32(bound)))

    def _layers(self) -> list[nn.Conv1d | nn.Linear]:
        return [*self._filters(), self.output]

    def _filters(self) -> list[nn.Conv1d]:
        return [layer for layer in self.filters.values() if isinstance(layer, nn.Conv1d)]

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        """As in `TextClassifier`; S is at least the widest filter."""
        lengths = seen.sum(dim=1, keepdim=True)
        x = vectors.transpose(1, 2)
        features = []
        for convolution in self._filters():
            (width,) = convolution.kernel_size
            answers = convolution(x)  # (B, maps, S - width + 1)
            start = torch.arange(answers.shape[2], device=vectors.device)
            # Windows that end inside the text; the first window of a shorter text; none of an empty text.
            whole = (start <= (lengths - width).clamp(min=0)) & (start < lengths)
            # max(), not amax(): its gradient goes to one position, and it is faster. ReLU keeps order, so it can come
            # after the maximum, where there is less to compute. It turns an empty text's -inf into zero.
            features.append(answers.masked_fill(~whole[:, None, :], -torch.inf).max(dim=2).values.relu())
        logits: Tensor = self.output(self.dropout(torch.cat(features, dim=1)))
        return logits
