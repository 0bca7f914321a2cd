"""Checks once, when a job is created, that it can run from the stored blobs.

A job that passes has a document that this software understands, a manifest with exactly the announced number of values,
finite starting weights that fit it, a tokenizer, a prompted model's backbone of a size that members accept, and an
encoding whose sums cannot wrap for the largest cohort. The coordinator never looks into a backbone: members and
`coordinator job bundle` check its content.
"""

import contextlib
from typing import TypeVar

from coordinator.services.live import OperatorRefused
from coordinator.storage.blobs import BlobStore
from coordinator.storage.errors import BlobMissing, StorageError
from tacit.documents import DocumentInvalid
from tacit.job import BundledWeights, JobDocument
from tacit.manifest import Manifest
from tacit.measurement import Measurement
from tacit.model import PromptedModel, RvaeModel
from tacit.pieces import PIECE, list_bytes
from tacit.prompt import MAX_BACKBONE_BYTES
from tacit.reason import Reason
from tacit.vector import layout_of

__all__ = ["check_job"]

_Kind = TypeVar("_Kind", JobDocument, Manifest)


def check_job(store: BlobStore, digest: bytes) -> JobDocument:
    """Returns the job document with this digest, after checking that everything it names is stored and fits.

    It reads all blobs except a backbone, including the weights, so run it in a thread and not in the event loop.

    Raises:
        OperatorRefused: the job cannot run; the sentence says why.
    """
    try:
        document = _read(JobDocument, store, digest, "the job document")
        # They may have been uploaded long ago, and no row names them before the job is created.
        for named in (digest, *document.blobs):
            with contextlib.suppress(BlobMissing):  # Each check below says what is missing.
                store.hold(named)
        manifest = _read(Manifest, store, document.manifest, "the manifest")
        if document.digest() != digest:
            raise DocumentInvalid(
                "the job document is not in its canonical form; create it with `coordinator job bundle`"
            )
        if manifest.values != document.values:
            raise DocumentInvalid(
                f"the job document announces {document.values} values, but its manifest has {manifest.values}"
                "; create the bundle again"
            )
        frozen = _check_bundled(store, document.frozen, "frozen")
        if frozen is not None:
            manifest.check_apart(frozen)
        _check_rvae(document, manifest, *(() if frozen is None else (frozen,)))
        _check_weights(store, manifest, document.weights, "the starting weights")
        _check_bundled(store, document.private, "private")
        if isinstance(document.question, Measurement):
            measured = _read(Manifest, store, document.question.manifest, "the version's manifest")
            if measured.values != document.question.values:
                raise DocumentInvalid(
                    f"the version's manifest has {measured.values} values, not {document.question.values}; make the "
                    "measurement again with `coordinator measure`"
                )
            if frozen is not None:
                measured.check_apart(frozen)
            _check_weights(store, measured, document.question.weights, "the version")
        if document.tokenizer is not None and not _size(store, document.tokenizer, "the tokenizer"):
            raise DocumentInvalid("the tokenizer is empty; create the bundle again")
        if document.base_tokenizer is not None and not _size(store, document.base_tokenizer, "the base's tokenizer"):
            raise DocumentInvalid("the base's tokenizer is empty; create the bundle again")
        if isinstance(document.model, PromptedModel) and document.model.backbone is not None:
            size = _size(store, document.model.backbone, "the backbone")
            if not 0 < size <= MAX_BACKBONE_BYTES:
                raise DocumentInvalid(
                    f"the backbone has {size} bytes, but members accept 1 to {MAX_BACKBONE_BYTES}; use a smaller base"
                )
            if document.model.pieces is None and size > PIECE:
                raise DocumentInvalid(
                    f"the backbone has {size} bytes and no list of its pieces, so members refuse it; create "
                    "the bundle again"
                )
            if document.model.pieces is not None:
                listed = _size(store, document.model.pieces, "the list of the backbone's pieces")
                if listed != list_bytes(size):
                    raise DocumentInvalid(
                        f"the list of the backbone's pieces has {listed} bytes, and a backbone of {size} bytes needs "
                        f"{list_bytes(size)}; create the bundle again"
                    )
            onnx = document.model.onnx
            if onnx is not None and onnx.digest is not None:
                found = _size(store, onnx.digest, "the ONNX backbone")
                if found != onnx.size:
                    raise DocumentInvalid(
                        f"the ONNX backbone has {found} bytes, and the job document says {onnx.size}; create the "
                        "bundle again"
                    )
        layout_of(document, document.rounds.target_members)
    except StorageError as error:
        raise OperatorRefused(Reason.REASON_BUNDLE_UNSUITABLE, error.sentence) from error
    except ValueError as error:  # DocumentInvalid, and a layout that would wrap.
        raise OperatorRefused(Reason.REASON_BUNDLE_UNSUITABLE, str(error)) from error
    return document


def _check_bundled(store: BlobStore, part: BundledWeights | None, kind: str) -> Manifest | None:
    """Checks parameters of the bundle that are not shared, and returns their manifest; None if the job has none."""
    if part is None:
        return None
    what = f"the {kind} parameters' manifest"
    manifest = _read(Manifest, store, part.manifest, what)
    if manifest.values != part.values:
        raise DocumentInvalid(f"{what} has {manifest.values} values, not {part.values}; create the bundle again")
    _check_weights(store, manifest, part.weights, f"the {kind} parameters' start")
    return manifest


def _check_rvae(job: JobDocument, *manifests: Manifest) -> None:
    """Checks that an rvae bundle has the parameters that this release trains; every member would refuse others."""
    if not isinstance(job.model, RvaeModel):
        return
    tensors = [each for manifest in manifests for each in manifest.tensors]
    rows = next((each.shape[0] for each in tensors if each.name == "embedding.weight"), 0)
    wanted, values = job.model.values(rows - 1 - len(job.labels), len(job.labels)), sum(each.size for each in tensors)
    if rows and wanted != values:
        raise DocumentInvalid(
            f"the bundle has {values} values, but an rvae of these sizes has {wanted}: another release made "
            "it; create the bundle again"
        )


def _check_weights(store: BlobStore, manifest: Manifest, digest: bytes, what: str) -> None:
    if (size := _size(store, digest, what)) != manifest.bytes:
        raise DocumentInvalid(
            f"{what} have {size} bytes, but the manifest needs {manifest.bytes}; create the bundle again"
        )
    manifest.decode(store.get(digest))


def _size(store: BlobStore, digest: bytes, what: str) -> int:
    try:
        return store.size(digest)
    except BlobMissing as error:
        raise DocumentInvalid(
            f"{what} ({digest.hex()}) was not uploaded; upload the whole bundle with `coordinator job create --bundle`"
        ) from error


def _read(kind: type[_Kind], store: BlobStore, digest: bytes, what: str) -> _Kind:
    """Reads a document, unless it is too long."""
    if (size := _size(store, digest, what)) > kind.max_bytes:
        raise DocumentInvalid(f"{what} has {size} bytes, more than {kind.max_bytes}; this is a different file")
    return kind.from_json(store.get(digest), what=what)
