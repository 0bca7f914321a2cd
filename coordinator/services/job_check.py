"""Whether a job can be run from what is stored: looked at once, when it is created.

A job that passes has a document this software understands, a manifest of exactly the announced number of
values, starting weights that fit it and are finite, a tokenizer, a prompted model's backbone of a size that members
take, and an encoding whose sums cannot wrap for the largest cohort. What is in a backbone no coordinator looks at: that
is members' to check, and `coordinator job bundle`'s.
"""

from typing import TypeVar

from coordinator.services.live import OperatorRefused
from coordinator.storage.blobs import BlobStore
from coordinator.storage.errors import BlobMissing, StorageError
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.model import PromptedModel, RvaeModel
from tacit.prompt import MAX_BACKBONE_BYTES
from tacit.reason import Reason
from tacit.vector import layout_of

__all__ = ["check_job"]

_Kind = TypeVar("_Kind", JobDocument, Manifest)


def check_job(store: BlobStore, digest: bytes) -> JobDocument:
    """The job document of this digest, once everything it names was found to be there and to fit.

    Reads all the blobs but a backbone, weights included: for a thread, not for the event loop.

    Raises:
        OperatorRefused: with the sentence that says what is wrong.
    """
    try:
        document = _read(JobDocument, store, digest, "the job document")
        manifest = _read(Manifest, store, document.manifest, "the manifest")
        if document.digest() != digest:
            raise DocumentInvalid(
                "the job document is not in its canonical form; make it with `coordinator job bundle`"
            )
        if manifest.values != document.values:
            raise DocumentInvalid(
                f"the job document announces {document.values} values and its manifest holds {manifest.values}"
                "; make the bundle again"
            )
        _check_rvae(document, manifest)
        _check_weights(store, manifest, document.weights, "the starting weights")
        if document.tokenizer is not None and not _size(store, document.tokenizer, "the tokenizer"):
            raise DocumentInvalid("the tokenizer is empty; make the bundle again")
        if isinstance(document.model, PromptedModel) and document.model.backbone is not None:
            size = _size(store, document.model.backbone, "the backbone")
            if not 0 < size <= MAX_BACKBONE_BYTES:
                raise DocumentInvalid(
                    f"the backbone has {size} bytes where members take 1 to {MAX_BACKBONE_BYTES}; take a smaller base"
                )
        if (private := document.private) is not None:
            what = "the private parameters' manifest"
            kept = _read(Manifest, store, private.manifest, what)
            if kept.values != private.values:
                raise DocumentInvalid(f"{what} holds {kept.values} values, not {private.values}; make the bundle again")
            _check_weights(store, kept, private.weights, "the private parameters' start")
        layout_of(document, document.rounds.target_members)
    except StorageError as error:
        raise OperatorRefused(Reason.REASON_BUNDLE_UNSUITABLE, error.sentence) from error
    except ValueError as error:  # DocumentInvalid, and a layout that would wrap.
        raise OperatorRefused(Reason.REASON_BUNDLE_UNSUITABLE, str(error)) from error
    return document


def _check_rvae(job: JobDocument, manifest: Manifest) -> None:
    """That an autoencoder's bundle has the parameters that this release trains: members would all refuse another."""
    if not isinstance(job.model, RvaeModel):
        return
    rows = next((each.shape[0] for each in manifest.tensors if each.name == "embedding.weight"), 0)
    wanted = job.model.values(rows - 1 - len(job.labels), len(job.labels))
    if rows and wanted != manifest.values:
        raise DocumentInvalid(
            f"the bundle has {manifest.values} values where an rvae of these sizes has {wanted}: another release made "
            "it; make the bundle again"
        )


def _check_weights(store: BlobStore, manifest: Manifest, digest: bytes, what: str) -> None:
    if (size := _size(store, digest, what)) != manifest.bytes:
        raise DocumentInvalid(
            f"{what} have {size} bytes where the manifest needs {manifest.bytes}; make the bundle again"
        )
    manifest.decode(store.get(digest))


def _size(store: BlobStore, digest: bytes, what: str) -> int:
    try:
        return store.size(digest)
    except BlobMissing as error:
        raise DocumentInvalid(
            f"{what} ({digest.hex()}) was not uploaded; `coordinator job create --bundle` uploads a whole bundle"
        ) from error


def _read(kind: type[_Kind], store: BlobStore, digest: bytes, what: str) -> _Kind:
    """A document, of which nothing is read if it is too long."""
    if (size := _size(store, digest, what)) > kind.max_bytes:
        raise DocumentInvalid(f"{what} has {size} bytes, more than {kind.max_bytes}; this is some other file")
    return kind.from_json(store.get(digest), what=what)
