"""Features of a member's rows under a frozen backbone: computed once, and read again in every round.

Guarantees:

- A row's features are a function of the row's tokens and of public files. They depend on no other row: rows are
  computed in batches of one size, padded to a length that follows from the row's own.
- The key of a row's features covers everything that they depend on: the backbone, the precision in which it computes,
  the tokenizer, the layers, what centres them, and the row's tokens. So an edited row is computed again, and it alone.
- A store holds at most `max_bytes`. Rows beyond that are computed in every round, and so are rows whose features are no
  finite numbers: a row that once failed, for want of memory say, is tried again.
- Rows are computed in parts, and a part that was computed stays in the store, whatever ends the rest. What is left is
  computed in the batches in which it would have been computed, so an interruption changes no bit.

A store is in memory and ends with its process, unless a member keeps it on its disk
(`edge_client.private_store.features`). Then a process that is killed loses `PIECE_SECONDS` of work at most. It never
leaves the member: features tell about as much as the text.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from learning.training.outcome import TrainingCancelled
from tacit.job import JobDocument, Precision
from tacit.prompt import Head, PromptedModel

if TYPE_CHECKING:
    from learning.prompts.model import PromptedModel as PromptedModule

__all__ = ["Compute", "FeatureStore", "Features", "Reading", "features_of", "kind_of", "stored_features", "unheard"]

Features = NDArray[np.float32]
# Maps places of rows to parts: some of the places, and their rows' features.
Compute = Callable[[list[int]], Generator[tuple[list[int], Features], None, None]]
# Called with how many rows are computed, of how many that were missing.
Reading = Callable[[int, int], None]

# Rows of one forward pass, and the steps of its length in tokens: one shape for each step, whatever the rows are.
_ROWS, _STEP = 32, 8
# A gibibyte: 230,000 rows of three layers of MiniLM.
MAX_BYTES = 1 << 30
# Seconds of computing after which a member that keeps features writes what is new.
PIECE_SECONDS = 30.0


def unheard(_done: int, _rows: int) -> None:
    """A `Reading` that nobody hears."""


class Keeper(Protocol):
    """Where a member keeps features between processes."""

    def load(self, kind: bytes) -> dict[bytes, Features]:
        """The rows kept under this kind, by key; empty if there are none that can be used."""

    def add(self, kind: bytes, rows: dict[bytes, Features]) -> None:
        """Keeps these rows beside those of the same kind."""

    def save(self, kind: bytes, rows: dict[bytes, Features]) -> None:
        """Keeps these rows in place of those before."""


class FeatureStore:
    """Features by the key of their row.

    Args:
        max_bytes: what it holds at most.
        keeper: where rows are kept between processes; None keeps them in memory alone.
        piece_seconds: of computing, after which the keeper gets what is new.
    """

    def __init__(
        self, max_bytes: int = MAX_BYTES, keeper: Keeper | None = None, piece_seconds: float = PIECE_SECONDS
    ) -> None:
        self._max_bytes, self._keeper, self._piece_seconds = max_bytes, keeper, piece_seconds
        # The rows of the kind used last. Jobs on one backbone with the same head share them.
        self._kind: bytes | None = None
        self._rows: dict[bytes, Features] = {}

    def read(self, kind: bytes, keys: Sequence[bytes], compute: Compute) -> Features:
        """Returns the features (N, width) of the rows with these keys.

        Args:
            kind: the key of what computes them.
            keys: each row's own key.
            compute: maps places among `keys` to their rows' features, part by part. Parts that came before it fails are
                kept.
        """
        if kind != self._kind:
            self._kind, self._rows = kind, {} if self._keeper is None else self._keeper.load(kind)
        first: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            if key not in self._rows:
                first.setdefault(key, place)
        made: dict[bytes, Features] = {}
        if first:
            # Rows that are no longer in the data go first.
            before = len(self._rows)
            self._rows = {key: self._rows[key] for key in keys if key in self._rows}
            if len(self._rows) < before and self._keeper is not None:
                self._keeper.save(kind, self._rows)
            added = self._computed(kind, keys, list(first.values()), compute, made)
            if added and self._keeper is not None:
                self._keeper.save(kind, self._rows)
        return np.stack([made[key] if key in made else self._rows[key] for key in keys])

    def _computed(
        self, kind: bytes, keys: Sequence[bytes], places: list[int], compute: Compute, made: dict[bytes, Features]
    ) -> bool:
        """Computes the rows at these places into `made`, and keeps them. Returns whether the store has new ones."""
        before, pending = len(self._rows), dict[bytes, Features]()
        written = time.monotonic()

        def write() -> None:
            if pending and self._keeper is not None:
                self._keeper.add(kind, pending)
            pending.clear()

        try:
            for at, found in compute(places):
                rows = {keys[place]: row for place, row in zip(at, found, strict=True)}
                made |= rows
                room = self._max_bytes // max(1, found.shape[1] * found.itemsize) - len(self._rows)
                lasting = ((key, row) for key, row in rows.items() if np.isfinite(row).all())
                # A copy of each row, since a view would hold its whole part.
                new = {key: row.copy() for key, row in islice(lasting, max(0, room))}
                self._rows |= new
                pending |= new
                if time.monotonic() - written >= self._piece_seconds:
                    write()
                    written = time.monotonic()
        except BaseException:
            write()
            raise
        return len(self._rows) > before


def kind_of(job: JobDocument, *, precision: Precision = "float32", onnx: bytes | None = None) -> bytes:
    """The key of what computes a job's features, 32 bytes.

    Args:
        job: The job.
        precision: What the backbone computes in. A training does in the job's precision, everything else in float32.
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
        "precision": precision,
        "tokenizer": None if job.tokenizer is None else job.tokenizer.hex(),
        "layers": model.task.layers,
        "pairs": model.task.pairs,
        "centre": frozen,
    }
    if onnx is not None:
        facts["onnx"] = onnx.hex()
    return hashlib.sha256(b"tacit/features/v1/" + json.dumps(facts, sort_keys=True).encode()).digest()


def features_of(
    module: "PromptedModule",
    ids: NDArray[np.int64],
    kind: bytes,
    store: FeatureStore,
    device: str = "cpu",
    *,
    cancelled: Callable[[], bool] = lambda: False,
    reading: Reading = unheard,
) -> Features:
    """Returns the features (N, width) of rows of ids (N, S), padded with the module's pad_id.

    Args:
        module: a module whose features nothing changes.
        ids: the rows.
        kind: as from `kind_of`.
        store: what was computed before, and gets the rest.
        device: where to compute. The module is left on the CPU in evaluation mode.
        cancelled, reading: as for `stored_features`. A pass through a large backbone takes minutes, so `cancelled` is
            also asked inside it.

    Raises:
        TrainingCancelled: `cancelled` returned True.
    """
    lengths = (ids != module.pad_id).sum(axis=1)

    def ask(*_: object) -> None:
        if cancelled():
            raise TrainingCancelled

    def compute(places: list[int]) -> Generator[tuple[list[int], Features], None, None]:
        import torch

        at = np.array(places, dtype=np.int64)
        # The length that a row is padded to follows from its own length alone.
        padded = np.minimum(-(-np.maximum(lengths[at], module.min_tokens) // _STEP) * _STEP, module.room)
        module.to(device).eval()
        hooks = [part.register_forward_pre_hook(ask) for part in module.modules()]
        try:
            for length in np.unique(padded):
                (group,) = np.nonzero(padded == length)
                for first in range(0, len(group), _ROWS):
                    rows = group[first : first + _ROWS]
                    batch = np.full((_ROWS, length), module.pad_id, dtype=np.int64)
                    width = min(int(length), ids.shape[1])
                    batch[: len(rows), :width] = ids[at[rows], :width]
                    # Not around the yield: the caller would compute without gradients, too.
                    with torch.no_grad():
                        found = module.features(torch.from_numpy(batch).to(device), None)
                    yield at[rows].tolist(), found[: len(rows)].float().cpu().numpy()
        finally:
            for hook in hooks:
                hook.remove()
            module.to("cpu")

    return stored_features(
        ids, module.pad_id, module.output.in_features, kind, store, compute, cancelled=cancelled, reading=reading
    )


def stored_features(
    ids: NDArray[np.int64],
    pad_id: int,
    width: int,
    kind: bytes,
    store: FeatureStore,
    compute: Compute,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    reading: Reading = unheard,
) -> Features:
    """Returns the features (N, width) of rows of ids (N, S), from the store where they were computed before.

    Args:
        ids: the rows.
        pad_id: the id of padding.
        width: the features' width.
        kind: as from `kind_of`.
        store: what was computed before, and gets the rest.
        compute: maps places among `ids` to their rows' features, part by part.
        cancelled: asked before each part.
        reading: called after each part.

    Raises:
        TrainingCancelled: `cancelled` returned True. The store has the parts before.
    """

    def watched(places: list[int]) -> Generator[tuple[list[int], Features], None, None]:
        done = 0
        with contextlib.closing(compute(places)) as parts:
            while not cancelled():
                if (part := next(parts, None)) is None:
                    return
                yield part
                done += len(part[0])
                reading(done, len(places))
        raise TrainingCancelled

    if not len(ids):
        return np.empty((0, width), dtype=np.float32)
    lengths = (ids != pad_id).sum(axis=1)
    keys = [hashlib.sha256(row[:length].tobytes()).digest() for row, length in zip(ids, lengths, strict=True)]
    return store.read(kind, keys, watched)
