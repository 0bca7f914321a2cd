"""A job's whole model out of its two halves: what is shared, and what the member keeps."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from learning.models import TextClassifier, build_blank, values_of
from learning.models.division import Division, division_of
from learning.prompts.assembly import build_prompted, prompted_values
from learning.text.cloze import ClozeEncoder
from learning.text.corpus import EncodedExamples
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.model import PromptedModel

if TYPE_CHECKING:
    from learning.backbones.stored import StoredBackbone

__all__ = ["Entries", "assembled", "check_size"]


class Entries(Protocol):
    """What a model must know of a tokenizer: rows of the embedding, the padding's, and the entries by id."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    def words(self) -> list[str | None]: ...


def check_size(job: JobDocument, vocabulary_size: int, values: int) -> None:
    """That the job's model has so many values, before it is built: a document of a kilobyte could else ask for more
    memory than there is.

    Raises:
        DocumentInvalid: it has another number of them.
    """
    found = values_of(job.model, vocabulary_size, len(job.labels))
    if found != values:
        raise DocumentInvalid(
            f"the model of job {job.name} has {found} values with {vocabulary_size} entries, and what is there for it "
            f"has {values}"
        )


def assembled(
    job: JobDocument,
    entries: Entries,
    manifest: Manifest,
    shared: NDArray[np.float32],
    private: Mapping[str, NDArray[np.float32]],
    backbone: "StoredBackbone | None" = None,
) -> tuple[TextClassifier, Division]:
    """The module, on the CPU, in evaluation mode, and the line through it.

    entries: of the job's tokenizer, or of the member's own. shared: (d,), as the manifest lists it. private: by name,
    all that the job's method keeps with the member; empty where it keeps nothing. backbone: of a prompted job, whose
    `entries` are a `ClozeEncoder`, or a `EncodedExamples` that reads with one.

    Raises:
        ParametersDiffer: halves that are not this model's, such as a manifest that lists a private parameter.
        DocumentInvalid: not a vector of this manifest, or a model of another size.
        ValueError: a method that finds nothing to keep.
    """
    values = manifest.values + sum(each.size for each in private.values())
    if isinstance(job.model, PromptedModel):
        module = _prompted(job, job.model, entries, values, backbone)
    else:
        check_size(job, entries.vocabulary_size, values)
        module = build_blank(job.model, entries.vocabulary_size, len(job.labels), entries.pad_id)
    division = division_of(job.method, module, entries.words())
    division.load_shared(module, manifest.unflatten(shared))
    division.load_private(module, private)
    return module, division


def _prompted(
    job: JobDocument, model: PromptedModel, entries: Entries, values: int, backbone: "StoredBackbone | None"
) -> TextClassifier:
    """Zeros, on the backbone. Raises: DocumentInvalid: another number of values, or no backbone."""
    encoder = entries.encoder if isinstance(entries, EncodedExamples) else entries
    if not isinstance(encoder, ClozeEncoder) or backbone is None:
        raise DocumentInvalid(f"job {job.name} has a prompted model, and its backbone is not at hand")
    if (found := prompted_values(model, len(job.labels))) != values:
        raise DocumentInvalid(f"the model of job {job.name} has {found} values, and what is there for it has {values}")
    return build_prompted(model, job.labels, encoder, backbone, seed=None)
