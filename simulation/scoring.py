"""Scores a version on rows that no member has: what `coordinator evaluate` would say, without a coordinator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from learning.text.examples import Example

if TYPE_CHECKING:
    from export.answer_figures import TokenFigures
    from export.bundle import JobBundle
    from export.figures import Figures
    from learning.prompts.features import FeatureStore

__all__ = ["VersionFigures", "answers_of", "figures_of_version", "token_figures_of_version"]

# Rows of a model that writes which are scored at once.
_BATCH = 16


@dataclass(frozen=True)
class VersionFigures:
    """What a simulation says of a version: of texts and their labels, or of the tokens of responses.

    Attributes:
        accuracy: in [0, 1].
        loss: in nats.
        balanced_accuracy, macro_f1: in [0, 1]; None for tokens.
    """

    accuracy: float
    loss: float
    balanced_accuracy: float | None = None
    macro_f1: float | None = None


def answers_of(
    bundle: "JobBundle",
    values: NDArray[np.float32],
    examples: Sequence[Example],
    store: "FeatureStore",
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a version's logits (N, labels) and the labels (N,) of the examples that the job can read.

    Args:
        bundle: the job's.
        values: of the version, (d,).
        examples: the rows.
        store: keeps what a frozen backbone computes of them.
        cancelled: asked while it computes.

    Raises:
        TrainingCancelled: `cancelled` returned True.
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
        features = torch.from_numpy(features_of(module, read.ids, kind_of(job), store, cancelled=cancelled))
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


def token_figures_of_version(
    bundle: "JobBundle", values: NDArray[np.float32], examples: Sequence[Example]
) -> "TokenFigures":
    """Return how a version of a job that writes predicts the responses of rows, cut as in training.

    Args:
        bundle: the job's.
        values: of the version, (d,).
        examples: rows with dialogues.

    Raises:
        ValueError: no row has a response that the model can read.
    """
    import torch

    from export.answer_figures import token_figures
    from learning.models.assembly import whole_writer
    from learning.text.corpus import EncodedExamples
    from simulation.rounds import backbone_of

    job, version = bundle.document, bundle.manifest.encode(values)
    module, _ = whole_writer(
        job, bundle.manifest, version, bundle.public_tokenizer, backbone=backbone_of(bundle), frozen=bundle.frozen
    )
    read = EncodedExamples(examples, job, bundle.public_tokenizer).read()
    sums: list[list[NDArray[np.float64]]] = []
    with torch.no_grad():
        for first in range(0, len(read.ids), _BATCH):
            ids, targets = (torch.from_numpy(each[first : first + _BATCH]) for each in (read.ids, read.labels))
            sums.append([each.double().numpy() for each in module.token_scores(ids, targets)])
    if not sums:
        raise ValueError("no row has a prompt and a response that the model can read; give at least one")
    losses, correct, counts = (np.concatenate(each) for each in zip(*sums, strict=True))
    return token_figures(losses, correct.astype(np.int64), counts.astype(np.int64))
