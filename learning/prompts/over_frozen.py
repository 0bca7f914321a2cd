"""What all models over a frozen network share: where its values are bound, and the precision in which it computes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learning.models.classifier import TextModel
from learning.models.widened import let_go
from learning.prompts.backbone import Frozen, FrozenValues
from tacit.job import Precision

__all__ = ["KINDS", "OverFrozen"]

KINDS: Mapping[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class OverFrozen(TextModel):
    """A model whose network and word tables are a backbone's values."""

    def _refer_to(self, backbone: FrozenValues) -> None:
        """Sets where the backbone's values will be bound."""
        self._device, self._kind = torch.device("cpu"), torch.float32
        # The network may compute in less than float32. The word tables outside it do not.
        self._network, self._tables = Frozen(backbone), Frozen(backbone)

    @contextmanager
    def narrowed(self, ids: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Changes nothing: the word embedding is frozen, and other models use the same memory.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        if ids.size and not 0 <= ids.min() <= ids.max() < self.embedding.num_embeddings:
            raise ValueError(
                f"ids are outside the backbone's {self.embedding.num_embeddings} words; use the job's tokenizer"
            )
        yield ids

    @contextmanager
    def computing_in(self, precision: Precision) -> Iterator[None]:
        """Inside the context, the frozen network computes in this precision.

        Trained values, the last layer's rows and all gradients of trained values stay float32.
        """
        if KINDS[precision] == self._kind:
            # Binding walks through all layers, and would bind what is bound.
            yield
            return
        self._kind = KINDS[precision]
        try:
            self._network.bind(self._device, self._kind)
            yield
        finally:
            self._kind = torch.float32
            self._network.bind(self._device)
            let_go()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves parameters, as for `to`, and binds the backbone's values on the new device."""
        super()._apply(fn, recurse)
        device = next(self.parameters()).device
        if device != self._device:
            self._device = device
            self._bind()
        return self

    def _bind(self) -> None:
        self._network.bind(self._device, self._kind)
        self._tables.bind(self._device)
