"""BiLSTM: one LSTM layer in both directions over word vectors, pooled, under one linear layer.

Graves and Schmidhuber 2005, with the sizes and pooling of FedVocab, appendix A.1. Guarantees that padding has no
influence: the backward direction starts at a text's own last token, since every text is reversed within its length, and
pooling uses only a text's own tokens. Nothing is packed, so training and ONNX, which has no packing, share one graph.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, assert_never

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.models.classifier import Dropout, TextClassifier
from learning.models.lstm import LSTM
from tacit.method import ModelPart
from tacit.model import BiLSTMModel

__all__ = ["BiLSTM"]


class BiLSTM(TextClassifier):
    """Maps ids (B, S) to logits (B, labels), by `2 * hidden` features of each text.

    The embedding starts as N(0, embedding_std) with a padding row of zeros. The LSTMs' tensors are uniform within 1 /
    sqrt(hidden) and the head's within 1 / sqrt(fan in), as by default in torch. Without a seed all of them are zero. A
    frozen embedding has no gradient, and so gets neither steps nor noise. Dropout is before the head. An empty text's
    features are zero.
    """

    parts: ClassVar[Mapping[str, ModelPart]] = {"embedding": "embedding", "encoder": "encoder", "output": "head"}
    # A pass costs as much as 55 to 90 positions.
    piece_positions = 128

    def __init__(self, model: BiLSTMModel, vocabulary_size: int, labels: int, pad_id: int, seed: int | None) -> None:
        super().__init__()
        self.pad_id, self.min_tokens = pad_id, model.min_tokens
        self.pooling: Literal["max", "mean", "last"] = model.pooling
        table = np.zeros((vocabulary_size, model.embedding), dtype=np.float32)
        # The embedding shares the table's memory.
        self.embedding = nn.Embedding(
            vocabulary_size, model.embedding, padding_idx=pad_id, _weight=torch.from_numpy(table)
        )
        self.embedding.weight.requires_grad_(not model.freeze_embedding)
        self.encoder = nn.ModuleDict(
            {"onward": LSTM(model.embedding, model.hidden), "backward": LSTM(model.embedding, model.hidden)}
        )
        self.dropout = Dropout(model.dropout)
        # Torch fills a linear layer from its global generator, which is restored afterwards.
        with torch.random.fork_rng(devices=[]):
            self.output = nn.Linear(2 * model.hidden, labels)
        if seed is None:
            for parameter in self.output.parameters():
                parameter.data.zero_()
            return
        random = np.random.Generator(np.random.Philox(seed))
        random.standard_normal(dtype=np.float32, out=table)
        table *= np.float32(model.embedding_std)
        table[pad_id] = 0
        for layer, size in ((self.encoder, model.hidden), (self.output, 2 * model.hidden)):
            for parameter in layer.parameters():
                uniform = random.random(tuple(parameter.shape), dtype=np.float32)
                with torch.no_grad():
                    parameter.copy_(torch.from_numpy((2 * uniform - 1) * np.float32(1 / math.sqrt(size))))

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        """As in `TextClassifier`."""
        lengths = seen.sum(dim=1, keepdim=True)
        at = torch.arange(vectors.shape[1], device=vectors.device)
        turned = torch.where(seen, lengths - 1 - at, at)
        # A look-up in rows of all positions, since the gradient of gather() takes several times as long. (Sizes come
        # from `shape`: len() would be a constant in an exported graph.)
        first = torch.arange(vectors.shape[0], device=vectors.device)[:, None] * vectors.shape[1]
        behind = functional.embedding(first + turned, vectors.flatten(0, 1))
        # The second's states stay in reversed order: pooling does not mind, and a text's last state is still its last.
        states = (self.encoder["onward"](vectors), self.encoder["backward"](behind))
        features = torch.cat([self._pool(each, seen, lengths) for each in states], dim=1)
        logits: Tensor = self.output(self.dropout(features))
        return logits

    def _pool(self, states: Tensor, seen: Tensor, lengths: Tensor) -> Tensor:
        """(B, hidden) from states (B, S, hidden) and lengths (B, 1); zero for an empty text."""
        match self.pooling:
            case "max":
                # max(), not amax(): its gradient goes to one position.
                largest = states.masked_fill(~seen[:, :, None], -torch.inf).max(dim=1).values
                return largest.masked_fill(lengths == 0, 0)
            case "mean":
                return states.masked_fill(~seen[:, :, None], 0).sum(dim=1) / lengths.clamp(min=1)
            case "last":
                last = (lengths - 1).clamp(min=0)[:, :, None].expand(-1, 1, states.shape[2])
                return states.gather(1, last).squeeze(1).masked_fill(lengths == 0, 0)
            case _:
                assert_never(self.pooling)
