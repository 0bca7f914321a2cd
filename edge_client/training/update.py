"""From a version and a member's examples to its update: build, load, train, subtract.

Guarantees: the update is new minus base over exactly the manifest's parameters, from a module that starts as the
version says, whatever was trained before.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from edge_client.contribution import Update
from edge_client.data import Example, label_ids
from edge_client.models import build, load_shared, shared_parameters
from edge_client.text import TextEncoder
from edge_client.training.local import Progress, train
from tacit.job import JobDocument
from tacit.manifest import Manifest

__all__ = ["train_update"]


def train_update(
    *,
    job: JobDocument,
    manifest: Manifest,
    tokenizer: bytes,
    base: bytes,
    examples: Sequence[Example],
    seed: int,
    device: str,
    progress: Callable[[int, int, float], None],
    cancelled: Callable[[], bool],
) -> Update:
    """Trains from `base` on `examples` and returns the change, float32 (d,), with the training metrics.

    `progress` is told (step, steps, loss); `cancelled` is asked before every step.
    """
    if device == "cpu":
        # Several members may share a machine; one thread each is several times faster than all on all cores.
        torch.set_num_threads(1)
    encoder = TextEncoder(tokenizer, job.model.max_tokens, max(job.model.widths))
    module = build(job.model, encoder.vocabulary_size, len(job.labels), encoder.pad_id)
    start = manifest.decode(base)
    load_shared(module, manifest.unflatten(start))

    def watch(at: Progress) -> None:
        progress(at.step, at.steps, at.loss)

    result = train(
        module,
        encoder.encode([example.text for example in examples]),
        label_ids(examples, job.labels),
        job.training,
        seed=seed,
        device=device,
        progress=watch,
        cancelled=cancelled,
    )
    change = np.subtract(manifest.flatten(shared_parameters(module)), start, dtype=np.float32)
    return Update(change, len(examples), result.loss_sum, result.correct, result.count)
