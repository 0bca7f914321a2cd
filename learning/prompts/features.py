"""Features of a member's rows under a frozen backbone: computed once, and read again in every round.

Guarantees:

- A row's features are a function of the row's tokens and of public files. They depend on no other row: rows are
  computed in batches of one size, padded to a length that follows from the row's own.
- The key of a row's features covers everything that they depend on: the backbone, the tokenizer, the layers, what
  centres them, and the row's tokens. So an edited row is computed again, and it alone.
- A store holds at most `max_bytes`. Rows beyond that are computed in every round, and so are rows whose features are no
  finite numbers: a row that once failed, for want of memory say, is tried again.

A store is in memory and ends with its process, unless a member keeps it on its disk
(`edge_client.private_store.features`). It never leaves the member: features tell about as much as the text.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tacit.job import JobDocument
from tacit.prompt import Head, PromptedModel

if TYPE_CHECKING:
    from learning.prompts.model import PromptedModel as PromptedModule

__all__ = ["FeatureStore", "Features", "features_of", "kind_of", "stored_features"]

Features = NDArray[np.float32]

# Rows of one forward pass, and the steps of its length in tokens: one shape for each step, whatever the rows are.
_ROWS, _STEP = 32, 8
# A gibibyte: 230,000 rows of three layers of MiniLM.
MAX_BYTES = 1 << 30


class Keeper(Protocol):
    """Where a member keeps features between processes."""

    def load(self, kind: bytes) -> dict[bytes, Features]:
        """The rows kept under this kind, by key; empty if there are none that can be used."""

    def save(self, kind: bytes, rows: dict[bytes, Features]) -> None:
        """Keeps these rows in place of those before."""


class FeatureStore:
    """Features by the key of their row.

    Args:
        max_bytes: what it holds at most.
        keeper: where rows are kept between processes; None keeps them in memory alone.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, keeper: Keeper | None = None) -> None:
        self._max_bytes, self._keeper = max_bytes, keeper
        # The rows of the kind used last. Jobs on one backbone with the same head share them.
        self._kind: bytes | None = None
        self._rows: dict[bytes, Features] = {}

    def read(self, kind: bytes, keys: Sequence[bytes], compute: Callable[[list[int]], Features]) -> Features:
        """Returns the features (N, width) of the rows with these keys.

        Args:
            kind: the key of what computes them.
            keys: each row's own key.
            compute: maps places among `keys` to their rows' features.
        """
        if kind != self._kind:
            self._kind, self._rows = kind, {} if self._keeper is None else self._keeper.load(kind)
        first: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            if key not in self._rows:
                first.setdefault(key, place)
        made: dict[bytes, Features] = {}
        if first:
            made = dict(zip(first, compute(list(first.values())), strict=True))
        found = np.stack([made[key] if key in made else self._rows[key] for key in keys])
        # Rows that are no longer in the data go first.
        lasting = {key: row for key, row in made.items() if np.isfinite(row).all()}
        kept = {key: self._rows[key] for key in keys if key in self._rows} | lasting
        most = self._max_bytes // max(1, found.shape[1] * found.itemsize)
        # A copy of each row, since a view would hold its whole batch.
        self._rows = {key: kept[key].copy() for key in list(kept)[:most]}
        if lasting and self._keeper is not None:
            self._keeper.save(kind, self._rows)
        return found


def kind_of(job: JobDocument, *, onnx: bytes | None = None) -> bytes:
    """The key of what computes a job's features, 32 bytes.

    Args:
        job: The job.
        onnx: The digest of the ONNX file that computes them; None: torch computes them from the backbone.

    Raises:
        ValueError: The job's features change from round to round.
    """
    model = job.model
    if not isinstance(model, PromptedModel) or not isinstance(model.task, Head) or not model.caches_features:
        raise ValueError(f"the features of job {job.name} change while it trains")
    frozen = None if job.frozen is None else job.frozen.weights.hex()
    facts = {
        "backbone": None if model.backbone is None else model.backbone.hex(),
        "config": model.config,
        "tokenizer": None if job.tokenizer is None else job.tokenizer.hex(),
        "layers": model.task.layers,
        "pairs": model.task.pairs,
        "centre": frozen,
    }
    if onnx is not None:
        facts["onnx"] = onnx.hex()
    return hashlib.sha256(b"tacit/features/v1/" + json.dumps(facts, sort_keys=True).encode()).digest()


def features_of(
    module: "PromptedModule", ids: NDArray[np.int64], kind: bytes, store: FeatureStore, device: str = "cpu"
) -> Features:
    """Returns the features (N, width) of rows of ids (N, S), padded with the module's pad_id.

    Args:
        module: a module whose features nothing changes.
        ids: the rows.
        kind: as from `kind_of`.
        store: what was computed before, and gets the rest.
        device: where to compute. The module is left on the CPU in evaluation mode.
    """
    lengths = (ids != module.pad_id).sum(axis=1)

    def compute(places: list[int]) -> Features:
        import torch

        made = np.empty((len(places), module.output.in_features), dtype=np.float32)
        at = np.array(places, dtype=np.int64)
        # The length that a row is padded to follows from its own length alone.
        padded = np.minimum(-(-np.maximum(lengths[at], module.min_tokens) // _STEP) * _STEP, module.room)
        module.to(device).eval()
        try:
            with torch.no_grad():
                for length in np.unique(padded):
                    (group,) = np.nonzero(padded == length)
                    for first in range(0, len(group), _ROWS):
                        rows = group[first : first + _ROWS]
                        batch = np.full((_ROWS, length), module.pad_id, dtype=np.int64)
                        width = min(int(length), ids.shape[1])
                        batch[: len(rows), :width] = ids[at[rows], :width]
                        found = module.features(torch.from_numpy(batch).to(device), None)
                        made[rows] = found[: len(rows)].float().cpu().numpy()
        finally:
            module.to("cpu")
        return made

    return stored_features(ids, module.pad_id, module.output.in_features, kind, store, compute)


def stored_features(
    ids: NDArray[np.int64],
    pad_id: int,
    width: int,
    kind: bytes,
    store: FeatureStore,
    compute: Callable[[list[int]], Features],
) -> Features:
    """Returns the features (N, width) of rows of ids (N, S), from the store where they were computed before.

    Args:
        ids: the rows.
        pad_id: the id of padding.
        width: the features' width.
        kind: as from `kind_of`.
        store: what was computed before, and gets the rest.
        compute: maps places among `ids` to their rows' features.
    """
    if not len(ids):
        return np.empty((0, width), dtype=np.float32)
    lengths = (ids != pad_id).sum(axis=1)
    keys = [hashlib.sha256(row[:length].tobytes()).digest() for row, length in zip(ids, lengths, strict=True)]
    return store.read(kind, keys, compute)
