"""Fetches and checks what a coordinator serves of a job, for a round's preparation, a member's own model and
`edge_client run --dry-run`.

Guarantees: a job document is the requested one, in its canonical form. A manifest has as many values as the document
says, and values decoded by it have exactly that length, are finite, and no larger than training leaves them. Version 0
is the weights that the document names. A tokenizer is one that `coordinator job bundle` makes. Every request has a size
limit.

Leaves to others: whether bytes have the requested digest (`tacit.blobs`); a prompted job's backbone, which is too large
for memory; whether the member's policy accepts the job; and whether the parts fit the job's model, which shows when the
model is assembled.
"""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
from numpy.typing import NDArray

from learning.text.cloze_tokenizer import check_cloze_form
from learning.text.dialogue_tokenizer import check_dialogue_form
from learning.text.encoder import check_own_form
from tacit.documents import DocumentInvalid
from tacit.job import BundledWeights, JobDocument
from tacit.manifest import Manifest
from tacit.model import PromptedModel
from tacit.prompt import writes

__all__ = [
    "LARGEST_WEIGHT",
    "Blob",
    "checked_job",
    "checked_manifest",
    "checked_values",
    "fetch_base_tokenizer",
    "fetch_frozen",
    "fetch_job",
    "fetch_manifest",
    "fetch_private_start",
    "fetch_tokenizer",
    "fetch_version",
]

# blob(digest, limit) returns the verified bytes of that digest, at most `limit` of them.
Blob = Callable[[bytes, int], Awaitable[bytes]]

_MAX_TOKENIZER = 256 * 1024 * 1024
# The largest weight of a version, and of what a member keeps.
LARGEST_WEIGHT = 1e4


def checked_job(data: bytes, name: str, digest: bytes) -> JobDocument:
    """Checks a job's document. `digest` is the SHA-256 (32 bytes) of its canonical form.

    Raises:
        DocumentInvalid: The bytes are no job document, another job's, or not in canonical form.
    """
    job = JobDocument.from_json(data, what="the job document")
    if job.digest() != digest or job.name != name:
        raise DocumentInvalid(f"the job document is not that of {name} in its canonical form")
    return job


def checked_manifest(data: bytes, values: int, what: str = "the manifest") -> Manifest:
    """Checks a manifest, which must have the job document's number of values.

    Raises:
        DocumentInvalid: The bytes are no manifest, or it has another number of values.
    """
    manifest = Manifest.from_json(data, what=what)
    if manifest.values != values:
        raise DocumentInvalid(f"{what} has {manifest.values} values, and the job document {values}")
    return manifest


def checked_values(data: bytes, manifest: Manifest, what: str = "the version") -> bytes:
    """Returns the same bytes if they are float32 values of this manifest within a trained model's bounds.

    Values far larger than weights are made to break arithmetic, and so privacy.

    Raises:
        DocumentInvalid: The length is wrong, or a value is not finite or beyond the bound.
    """
    values = manifest.decode(data)
    if values.size and float(np.abs(values).max()) > LARGEST_WEIGHT:
        raise DocumentInvalid(f"{what} has a weight beyond {LARGEST_WEIGHT:g}")
    return data


async def fetch_job(blob: Blob, name: str, digest: bytes) -> JobDocument:
    """Fetches a job's document. Raises DocumentInvalid like `checked_job`."""
    data = await blob(digest, JobDocument.max_bytes)
    # In a thread, since what the coordinator serves must not hold up the session.
    return await asyncio.to_thread(checked_job, data, name, digest)


async def fetch_manifest(blob: Blob, job: JobDocument) -> Manifest:
    """Fetches the manifest of the shared parameters. Raises DocumentInvalid like `checked_manifest`."""
    data = await blob(job.manifest, Manifest.max_bytes)
    return await asyncio.to_thread(checked_manifest, data, job.values)


async def fetch_version(blob: Blob, job: JobDocument, manifest: Manifest, number: int, digest: bytes) -> bytes:
    """Fetches a version of the shared parameters, 4 * job.values bytes.

    Raises:
        DocumentInvalid: As in `checked_values`, or version 0 is not the weights that the document names.
    """
    if number == 0 and digest != job.weights:
        raise DocumentInvalid("version 0 is not the weights that the job document names")
    data = await blob(digest, 4 * job.values)
    return await asyncio.to_thread(checked_values, data, manifest)


async def fetch_tokenizer(blob: Blob, job: JobDocument) -> bytes | None:
    """Fetches the job's tokenizer.json and checks it before any use; None if members build their own.

    Raises:
        TokenizerInvalid: As in `check_own_form`, for a prompted job in `check_cloze_form`, and for one whose model
            writes in `check_dialogue_form`.
    """
    if job.tokenizer is None:
        return None
    data = await blob(job.tokenizer, _MAX_TOKENIZER)
    if writes(job.model):
        check = check_dialogue_form
    else:
        check = check_cloze_form if isinstance(job.model, PromptedModel) else check_own_form
    await asyncio.to_thread(check, data)
    return data


async def fetch_base_tokenizer(blob: Blob, job: JobDocument) -> bytes | None:
    """Fetches the base model's word pieces, whose rows private parameters start from; None if the job has none.

    Raises:
        TokenizerInvalid: As in `check_own_form`.
    """
    if job.base_tokenizer is None:
        return None
    data = await blob(job.base_tokenizer, _MAX_TOKENIZER)
    await asyncio.to_thread(check_own_form, data)
    return data


async def fetch_private_start(blob: Blob, job: JobDocument) -> tuple[Manifest, bytes] | None:
    """Fetches the manifest and values that members' private parameters start from; None if the job has none.

    Raises:
        DocumentInvalid: As in `checked_manifest` and `checked_values`.
    """
    return None if job.private is None else await _fetch_weights(blob, job.private, "private")


async def fetch_frozen(blob: Blob, job: JobDocument, manifest: Manifest) -> dict[str, NDArray[np.float32]]:
    """Fetches the parameters that the job freezes, by name; empty if it freezes none.

    A member has them in its cache after the first round.

    Raises:
        DocumentInvalid: As in `checked_manifest` and `checked_values`, or `manifest`, of what is shared, lists one of
            them.
    """
    if job.frozen is None:
        return {}
    frozen, data = await _fetch_weights(blob, job.frozen, "frozen")
    manifest.check_apart(frozen)
    return frozen.unflatten(frozen.decode(data))


async def _fetch_weights(blob: Blob, weights: BundledWeights, kind: str) -> tuple[Manifest, bytes]:
    data = await blob(weights.manifest, Manifest.max_bytes)
    what = f"the {kind} parameters' manifest"
    manifest = await asyncio.to_thread(checked_manifest, data, weights.values, what)
    values = await blob(weights.weights, 4 * weights.values)
    return manifest, await asyncio.to_thread(checked_values, values, manifest, f"the start of {kind} parameters")
