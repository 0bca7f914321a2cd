"""Scores a version on rows that no member has: what `coordinator evaluate` would say, without a coordinator."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from learning.text.data import Example

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from export.figures import Figures
    from learning.prompts.features import FeatureStore

__all__ = ["answers_of", "figures_of_version"]


def answers_of(
    bundle: "JobBundle", values: NDArray[np.float32], examples: Sequence[Example], store: "FeatureStore"
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a version's logits (N, labels) and the labels (N,) of the examples that the job can read.

    Args:
        bundle: the job's.
        values: of the version, (d,).
        examples: the rows.
        store: keeps what a frozen backbone computes of them.
    """
    import torch

    from learning.models.assembly import assembled
    from learning.prompts.features import features_of, kind_of
    from learning.prompts.model import PromptedModel as PromptedModule
    from learning.text.corpus import EncodedExamples
    from learning.training.local import logits_of
    from simulation.rounds import backbone_of
    from tacit.prompt import PromptedModel

    job = bundle.document
    corpus = EncodedExamples(examples, job, bundle.public_tokenizer)
    module, _ = assembled(job, corpus, bundle.manifest, values, {}, backbone_of(bundle), bundle.frozen)
    read = corpus.read()
    if isinstance(module, PromptedModule) and isinstance(job.model, PromptedModel) and job.model.caches_features:
        features = torch.from_numpy(features_of(module, read.ids, kind_of(job), store))
        with torch.no_grad():
            logits: NDArray[np.float32] = module.output(features).numpy()
    else:
        logits = logits_of(module, read.ids)
    return logits, read.labels


def figures_of_version(
    bundle: "JobBundle", values: NDArray[np.float32], examples: Sequence[Example], store: "FeatureStore"
) -> "Figures":
    """Return the figures of a version on labelled rows; arguments as in `answers_of`.

    Raises:
        ValueError: no row has a label of the job.
    """
    from export.figures import figures_of

    logits, labels = answers_of(bundle, values, examples, store)
    return figures_of(logits, labels, bundle.document.labels)
