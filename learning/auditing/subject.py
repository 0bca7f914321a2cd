"""What is attacked: a job, a version of it, and this machine's own software that trains for it.

A subject has everything that a member needs to train a round, and everything that an attacker is granted: the job, the
version, the tokenizer and, where the member keeps parameters, those too. Nothing of it is random.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from learning.accounting.costs import adjacency_of
from learning.accounting.events import PrivacyEvent
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import OwnNumbers, Protection, protection_of
from learning.models.assembly import NOTHING, assembled
from learning.prompts.features import FeatureStore, features_of, kind_of
from learning.prompts.model import PromptedModel as PromptedModule
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.text.persons import population_of, unit_of_job
from learning.training.local import logits_of
from learning.training.update import train_update
from secure_agg import RandomSource
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.mechanism import DistributedGaussian, DpSgd, NoMechanism, OwnDiscreteGaussian
from tacit.model import PromptedModel
from tacit.vector import grid_of, layout_of

if TYPE_CHECKING:
    from learning.backbones.stored import StoredBackbone
    from learning.models import Division, TextClassifier

__all__ = ["Subject", "claim_of"]

Vector = NDArray[np.float32]
Losses = NDArray[np.float64]


def claim_of(job: JobDocument, events: Sequence[PrivacyEvent], delta: float) -> float | None:
    """The epsilon that these events claim at delta, for one row more or less; None without a mechanism.

    If a member's whole data is the unit, a coin replaces its vector by another one, so replace-one counts.
    """
    from learning.accounting.spend import Limit, spend

    if isinstance(job.mechanism, NoMechanism | OwnDiscreteGaussian) or not events:
        return None
    adjacency = "replace-one" if job.mechanism.unit == "member" else adjacency_of(job.mechanism)
    return spend(events, Limit(1.0, delta, adjacency, job.mechanism.unit)).epsilon


@dataclass(frozen=True)
class Subject:
    """One version of a job on one machine.

    Attributes:
        version: The shared parameters, encoded by the manifest.
        private: The member's private parameters; empty if it keeps none.
        frozen: What the job freezes; empty if nothing.
        own: The member's own numbers.
        features: Keeps what a frozen backbone computes of the rows.
    """

    job: JobDocument
    manifest: Manifest
    version: bytes = field(repr=False)
    tokenizer: bytes = field(repr=False)
    private: Mapping[str, Vector] = field(default_factory=lambda: NOTHING, repr=False)
    frozen: Mapping[str, Vector] = field(default_factory=lambda: NOTHING, repr=False)
    backbone: "StoredBackbone | None" = field(default=None, repr=False)
    own: OwnNumbers = field(default_factory=OwnNumbers)
    device: str = "cpu"
    features: FeatureStore = field(default_factory=FeatureStore, repr=False)

    def __post_init__(self) -> None:
        """Refuses a job of which one round is no release by itself.

        Raises:
            ValueError: The job's noise is correlated across rounds.
        """
        if isinstance(self.job.mechanism, DpSgd) and self.job.mechanism.band > 1:
            raise ValueError("its noise is correlated across rounds, and a rehearsal takes one round alone")

    @property
    def values(self) -> Vector:
        """The version's shared values, (d,)."""
        return self.manifest.decode(self.version)

    def at(self, version: bytes) -> "Subject":
        """The same at another version."""
        return replace(self, version=version)

    def corpus(self, examples: Sequence[Example]) -> EncodedExamples:
        """These rows as the job reads them."""
        return EncodedExamples(examples, self.job, self.tokenizer, self.features)

    def protection(self, examples: int) -> Protection:
        """The job's mechanism for a member with this many examples, or persons if these are its unit.

        Only this member's own noise counts.
        """
        return protection_of(self.job, examples, own=self.own)

    def release(self, examples: Sequence[Example], random: RandomSource, seed: int) -> Vector:
        """Train a round and return what would leave for the sum, without its mask, (d,).

        Raises:
            As `train_update`.
        """
        protection = self.protection(population_of(examples, unit_of_job(self.job)))
        update = train_update(
            job=self.job,
            manifest=self.manifest,
            corpus=self.corpus(examples),
            base=self.version,
            protection=protection,
            private=self.private,
            frozen=self.frozen,
            backbone=self.backbone,
            random=random,
            seed=seed,
            device=self.device,
            progress=lambda _step, _steps, _loss: None,
            cancelled=lambda: False,
        )
        return self._in_the_clear(protection, update, random)

    def _in_the_clear(self, protection: Protection, update: Update, random: RandomSource) -> Vector:
        if not isinstance(self.job.mechanism, DistributedGaussian):
            # Encoding is post-processing: it adds no noise that anybody counts on.
            return update.change
        import secure_agg

        cohort = self.job.rounds.min_members
        encoded = protection.encode(self.job, update, cohort, random)
        decoded = secure_agg.decode_distributed(encoded, grid_of(self.job), layout_of(self.job, cohort).bits)
        return decoded.astype(np.float32)

    def losses(self, values: Vector, corpus: EncodedExamples) -> Losses:
        """The loss of each usable row under these shared values, (U,), in nats, without dropout."""
        module, _ = self._module(values, corpus)
        read = corpus.read()
        if not len(read.ids):
            return np.empty(0)
        if (features := self._features(module, corpus)) is not None:
            with torch.no_grad():
                logits = module.get_submodule("output")(torch.from_numpy(features))
        else:
            with torch.no_grad():
                logits = torch.from_numpy(logits_of(module, read.ids, batch=64, device=self.device))
        target = torch.from_numpy(read.labels.copy())
        found: Losses = functional.cross_entropy(logits.double(), target, reduction="none").numpy()
        return found

    def gradients(self, corpus: EncodedExamples) -> "Gradients":
        """The gradients of the usable rows' losses at the version."""
        module, division = self._module(self.values, corpus)
        return Gradients(self.manifest, module, division, corpus, self._features(module, corpus))

    def _module(self, values: Vector, corpus: EncodedExamples) -> "tuple[TextClassifier, Division]":
        return assembled(self.job, corpus, self.manifest, values, self.private, self.backbone, self.frozen)

    def _features(self, module: "TextClassifier", corpus: EncodedExamples) -> Vector | None:
        """What the head reads of each row, if only a head is trained."""
        model = self.job.model
        if not (isinstance(module, PromptedModule) and isinstance(model, PromptedModel) and model.caches_features):
            return None
        with module.computing_in(self.job.training.precision):
            kind = kind_of(self.job, precision=self.job.training.precision)
            return features_of(module, corpus.read().ids, kind, self.features, self.device)


class Gradients:
    """Gradients of rows, one at a time, as vectors in the manifest's order."""

    def __init__(
        self,
        manifest: Manifest,
        module: "TextClassifier",
        division: "Division",
        corpus: EncodedExamples,
        features: Vector | None,
    ) -> None:
        self._manifest, self._module, self._division, self._features = manifest, module, division, features
        self._read = corpus.read()

    def __len__(self) -> int:
        return len(self._read.ids)

    @property
    def labels(self) -> NDArray[np.int64]:
        """(U,) The rows' labels, as indices."""
        return self._read.labels

    def of(self, rows: Sequence[int]) -> Vector:
        """The gradient of the rows' mean loss over the shared parameters, (d,)."""
        self._module.zero_grad(set_to_none=True)
        at = np.array(rows, dtype=np.int64)
        if self._features is not None:
            logits = self._module.get_submodule("output")(torch.from_numpy(self._features[at]))
        else:
            ids = self._read.ids[at]
            width = max(int((ids != self._module.pad_id).sum(axis=1).max()), self._module.min_tokens)
            logits = self._module(torch.from_numpy(np.ascontiguousarray(ids[:, :width])))
        loss = functional.cross_entropy(logits, torch.from_numpy(self._read.labels[at]))
        torch.autograd.backward(loss)
        found = {
            name: torch.zeros_like(each) if each.grad is None else each.grad
            for name, each in self._module.named_parameters()
        }
        vector = self._manifest.flatten(self._division.shared_of(found.items()))
        self._module.zero_grad(set_to_none=True)
        return vector
