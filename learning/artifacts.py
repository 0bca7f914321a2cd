"""What a coordinator serves of a job, from bytes to what can be relied on. One place for all who fetch: a round's
preparation, `edge_client export` and `edge_client run --dry-run`.

Guarantees: a job document is the one that was asked for, in its canonical form; a manifest has as many values as the
document says, and what is flattened by it has exactly these, finite and no larger than training leaves them; version 0
is the weights that the document names; a tokenizer is one that `coordinator job bundle` makes of a vocabulary, or of a
backbone's. Nothing is asked for without a limit on its size.

Leaves to others: that bytes have the digest that was asked for (`tacit.blobs`), a prompted job's backbone, which is too
large for memory, whether the member's policy takes the job, and whether the parts fit the job's model, which shows when
the model is put together.
"""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from learning.text.cloze_tokenizer import check_cloze_form
from learning.text.encoder import check_own_form
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.model import PromptedModel

__all__ = [
    "LARGEST_WEIGHT",
    "Blob",
    "checked_job",
    "checked_manifest",
    "checked_values",
    "fetch_job",
    "fetch_manifest",
    "fetch_private_start",
    "fetch_tokenizer",
    "fetch_version",
]

# blob(digest, limit): the bytes of that digest, verified, at most `limit` of them.
Blob = Callable[[bytes, int], Awaitable[bytes]]

_MAX_TOKENIZER = 256 * 1024 * 1024
# Of a version, and of what a member keeps.
LARGEST_WEIGHT = 1e4


def checked_job(data: bytes, name: str, digest: bytes) -> JobDocument:
    """The document of the job of this name. digest: 32 bytes, what its canonical form must have.

    Raises:
        DocumentInvalid: no job document, another job's, or not in its canonical form.
    """
    job = JobDocument.from_json(data, what="the job document")
    if job.digest() != digest or job.name != name:
        raise DocumentInvalid(f"the job document is not that of {name} in its canonical form")
    return job


def checked_manifest(data: bytes, values: int, what: str = "the manifest") -> Manifest:
    """A manifest of so many values, as the job document has it.

    Raises:
        DocumentInvalid: no manifest, or one of another size.
    """
    manifest = Manifest.from_json(data, what=what)
    if manifest.values != values:
        raise DocumentInvalid(f"{what} has {manifest.values} values, the job document {values}")
    return manifest


def checked_values(data: bytes, manifest: Manifest, what: str = "the version") -> bytes:
    """The same bytes, if they are float32 values of this manifest as a trained model has them: far larger ones are made
    to take arithmetic, and privacy with it, apart.

    Raises:
        DocumentInvalid: another length, a value that is not finite, or one beyond the bound.
    """
    values = manifest.decode(data)
    if values.size and float(np.abs(values).max()) > LARGEST_WEIGHT:
        raise DocumentInvalid(f"{what} holds a weight beyond {LARGEST_WEIGHT:g}")
    return data


async def fetch_job(blob: Blob, name: str, digest: bytes) -> JobDocument:
    """Raises: DocumentInvalid: `checked_job`."""
    data = await blob(digest, JobDocument.max_bytes)
    # In a thread: what the coordinator serves must not hold up the session.
    return await asyncio.to_thread(checked_job, data, name, digest)


async def fetch_manifest(blob: Blob, job: JobDocument) -> Manifest:
    """Of the shared parameters. Raises: DocumentInvalid: `checked_manifest`."""
    data = await blob(job.manifest, Manifest.max_bytes)
    return await asyncio.to_thread(checked_manifest, data, job.values)


async def fetch_version(blob: Blob, job: JobDocument, manifest: Manifest, number: int, digest: bytes) -> bytes:
    """A version of the shared parameters, 4 * job.values bytes.

    Raises:
        DocumentInvalid: `checked_values`, or a version 0 that is not the weights that the document names.
    """
    if number == 0 and digest != job.weights:
        raise DocumentInvalid("version 0 is not the weights that the job document names")
    data = await blob(digest, 4 * job.values)
    return await asyncio.to_thread(checked_values, data, manifest)


async def fetch_tokenizer(blob: Blob, job: JobDocument) -> bytes | None:
    """The job's tokenizer.json, checked before it is used for anything; None where members build their own.

    Raises:
        TokenizerInvalid: `check_own_form`, of a prompted job `check_cloze_form`.
    """
    if job.tokenizer is None:
        return None
    data = await blob(job.tokenizer, _MAX_TOKENIZER)
    check = check_cloze_form if isinstance(job.model, PromptedModel) else check_own_form
    await asyncio.to_thread(check, data)
    return data


async def fetch_private_start(blob: Blob, job: JobDocument) -> tuple[Manifest, bytes] | None:
    """Manifest and values that members' private parameters start from; None where the job has none.

    Raises:
        DocumentInvalid: `checked_manifest`, `checked_values`.
    """
    if job.private is None:
        return None
    what = "the private parameters' manifest"
    data = await blob(job.private.manifest, Manifest.max_bytes)
    manifest = await asyncio.to_thread(checked_manifest, data, job.private.values, what)
    values = await blob(job.private.weights, 4 * job.private.values)
    return manifest, await asyncio.to_thread(checked_values, values, manifest, "what private parameters start from")
