"""What a process keeps that trains many members of one job, such as a simulation's worker.

Guarantees: a member's update is the same to the bit as that of `train_update` in a process of its own. What is kept
depends on no member: a module whose values are all loaded again, the features of probe texts, and which version was
found not to have diverged.
"""

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from learning.models.assembly import KeptModule
from learning.prompts.features import Features, Reading, features_of, kind_of, stored_features
from learning.training.head import LinearHead
from learning.training.outcome import check_spread
from learning.training.probes import probe_rows
from tacit.job import JobDocument, Training
from tacit.manifest import Manifest
from tacit.method import keeps_anything
from tacit.model import PromptedModel
from tacit.prompt import Head

if TYPE_CHECKING:
    from learning.prompts.model import PromptedModel as PromptedModule
    from learning.text.corpus import EncodedExamples

__all__ = ["Kept", "head_alone"]

_WEIGHT, _BIAS = "output.weight", "output.bias"


class _Absent(Exception):
    """A row's features were not computed yet."""


class Kept(KeptModule):
    """See the module's text. `head` and `features` serve jobs that train a head alone (`head_alone`)."""

    def __init__(self) -> None:
        super().__init__()
        self._probe: Features | None = None
        self._kind: bytes | None = None

    @staticmethod
    def head(manifest: Manifest, start: NDArray[np.float32], frozen: Mapping[str, NDArray[np.float32]]) -> LinearHead:
        """A version's head, in memory of its own. start: (d,)."""
        shared = manifest.unflatten(start)
        bias = shared.get(_BIAS)
        return LinearHead(
            shared[_WEIGHT].astype(np.float32),
            (frozen[_BIAS] if bias is None else bias).astype(np.float32),
            trains_bias=bias is not None,
        )

    def check_not_diverged(
        self, head: LinearHead, version: bytes, recipe: Training, network: "Callable[[], PromptedModule]"
    ) -> None:
        """As `learning.training.divergence`, once for each version. The network reads the probe texts only once.

        Raises:
            VersionDiverged: The version has diverged.
        """
        if self.is_sound(version):
            return
        if self._probe is None:
            import torch

            module = network()
            words, random = module.embedding.num_embeddings, np.random.Generator(np.random.Philox(0))
            ids = torch.from_numpy(probe_rows(words, module.pad_id, module.min_tokens, random))
            with torch.no_grad():
                self._probe = module.features(ids, None).numpy()
        logits = head.logits(self._probe)
        check_spread(float((logits.max(axis=1) - logits.min(axis=1)).min()), recipe)
        self.found_sound(version)

    def features(
        self,
        job: JobDocument,
        corpus: "EncodedExamples",
        width: int,
        network: "Callable[[], PromptedModule]",
        cancelled: Callable[[], bool],
        reading: Reading,
    ) -> Features:
        """The features (U, width) of a member's usable rows. The network is asked for only if a row is new.

        Raises:
            TrainingCancelled: `cancelled` returned True.
        """
        if self._kind is None:
            self._kind = kind_of(job, precision=job.training.precision)
        ids = corpus.read().ids
        try:
            return stored_features(ids, corpus.pad_id, width, self._kind, corpus.features, _absent)
        except _Absent:
            module = network()
            with module.computing_in(job.training.precision):
                return features_of(module, ids, self._kind, corpus.features, cancelled=cancelled, reading=reading)


def head_alone(job: JobDocument) -> bool:
    """Whether a round trains a head on features that stay the same, shares it as a whole, and does nothing else."""
    model = job.model
    return (
        isinstance(model, PromptedModel)
        and isinstance(model.task, Head)
        and model.caches_features
        and not keeps_anything(job.method)
        and job.metrics is None
    )


def _absent(_: list[int]) -> Generator[tuple[list[int], Features], None, None]:
    raise _Absent
    yield
