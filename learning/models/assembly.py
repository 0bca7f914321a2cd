"""Assembles a job's model from its parts: shared parameters, those that the member keeps, and frozen ones."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from learning.causal.assembly import build_writer, writer_values
from learning.models import TextClassifier, build_blank, values_of
from learning.models.classifier import TextModel
from learning.models.division import Division, division_of
from learning.prompts.assembly import build_prompted, prompted_values
from learning.text.cloze import ClozeEncoder
from learning.text.corpus import EncodedExamples, dialogue_encoder_of, encoder_of
from learning.text.dialogue import DialogueEncoder
from learning.text.encoder import TextEncoder
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.method import FedRecon
from tacit.model import PromptedModel, TransformerModel
from tacit.prompt import writes

if TYPE_CHECKING:
    from learning.backbones.stored import StoredBackbone
    from learning.causal.model import CausalModel

__all__ = [
    "NOTHING",
    "Entries",
    "KeptModule",
    "assembled",
    "assembled_module",
    "assembled_writer",
    "check_size",
    "whole_model",
    "whole_writer",
]

# The parameters of a part that a job's model does not have.
NOTHING: Mapping[str, NDArray[np.float32]] = MappingProxyType({})


class Entries(Protocol):
    """What a model needs of a tokenizer: the rows of the embedding, the padding's id, and the entries by id."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    def words(self) -> list[str | None]: ...


def check_size(job: JobDocument, vocabulary_size: int, values: int) -> None:
    """Checks that the job's model has this many values before it is built.

    Otherwise a document of a kilobyte could ask for more memory than there is.

    Raises:
        DocumentInvalid: The model has another number of values.
    """
    found = values_of(job.model, vocabulary_size, len(job.labels))
    if found != values:
        raise DocumentInvalid(
            f"the model of job {job.name} has {found} values with {vocabulary_size} entries, and its weights have "
            f"{values}"
        )


class KeptModule:
    """Keeps one job's module from one member's training to the next in a process that trains many members.

    Building a module takes longer than a local step. Training leaves nothing in a module but values, all of which are
    loaded again: a value is shared, private or frozen (`learning.models.division`). Modes, gradients, hooks and
    dropout's randomness are undone by what set them.
    """

    def __init__(self) -> None:
        self._shape: tuple[int, int, int] | None = None
        self._module: TextClassifier | None = None
        self._sound: bytes | None = None

    def module(self, entries: Entries, values: int, build: Callable[[], TextClassifier]) -> TextClassifier:
        """The module for a tokenizer of this size, as it was left, or a new one. `values`: how many it must have."""
        shape = entries.vocabulary_size, entries.pad_id, values
        if self._module is None or self._shape != shape:
            self._module, self._shape = build(), shape
        # A walk through a deep module, only if the last training was cut off.
        return self._module.eval() if self._module.training else self._module

    def is_sound(self, version: bytes) -> bool:
        """Whether this version was found not to have diverged."""
        return self._sound == version

    def found_sound(self, version: bytes) -> None:
        """Notes that this version has not diverged, so that the next members need not look again."""
        self._sound = version


def assembled(
    job: JobDocument,
    entries: Entries,
    manifest: Manifest,
    shared: NDArray[np.float32],
    private: Mapping[str, NDArray[np.float32]],
    backbone: "StoredBackbone | None" = None,
    frozen: Mapping[str, NDArray[np.float32]] = NOTHING,
    kept: KeptModule | None = None,
) -> tuple[TextClassifier, Division]:
    """Builds the module on the CPU, in evaluation mode, with its division.

    Args:
        job: The job.
        entries: The entries of the job's tokenizer, or of the member's own. A prompted job needs a `ClozeEncoder`, or
            `EncodedExamples` that read with one.
        manifest: The names and shapes of the shared parameters.
        shared: (d,) The shared values in the manifest's order.
        private: All parameters that the job's method keeps with the member, by name; empty if it keeps none.
        backbone: The backbone of a prompted job.
        frozen: All parameters that the job freezes, by name; empty if it freezes none.
        kept: Has the job's module from the last time, which is used again.

    Raises:
        ParametersDiffer: A part does not fit this model, such as a manifest that lists a private or frozen parameter.
        DocumentInvalid: `shared` is not a vector of this manifest, or the model has another size.
        ValueError: The method finds nothing to keep.
    """
    if writes(job.model):
        raise TypeError("a model that writes is no classifier; use assembled_writer")
    values = _counted(manifest, private, frozen)

    def build() -> TextClassifier:
        if isinstance(job.model, PromptedModel):
            return _prompted(job, job.model, entries, values, backbone)
        check_size(job, entries.vocabulary_size, values)
        return build_blank(job.model, entries.vocabulary_size, len(job.labels), entries.pad_id)

    module = build() if kept is None else kept.module(entries, values, build)
    return module, _loaded(job, module, entries, manifest, shared, private, frozen)


def assembled_writer(
    job: JobDocument,
    encoder: DialogueEncoder,
    manifest: Manifest,
    shared: NDArray[np.float32],
    backbone: "StoredBackbone | None",
    frozen: Mapping[str, NDArray[np.float32]] = NOTHING,
) -> "tuple[CausalModel, Division]":
    """As `assembled`, for a job whose model writes."""
    model, values = job.model, _counted(manifest, NOTHING, frozen)
    if not isinstance(model, PromptedModel) or backbone is None:
        raise DocumentInvalid(f"job {job.name} has a prompted model, and its backbone is missing")
    if (found := writer_values(model)) != values:
        raise DocumentInvalid(f"the model of job {job.name} has {found} values, and its weights have {values}")
    module = build_writer(model, encoder, backbone, seed=None)
    return module, _loaded(job, module, None, manifest, shared, NOTHING, frozen)


def assembled_module(
    job: JobDocument,
    corpus: EncodedExamples,
    manifest: Manifest,
    shared: NDArray[np.float32],
    private: Mapping[str, NDArray[np.float32]],
    backbone: "StoredBackbone | None" = None,
    frozen: Mapping[str, NDArray[np.float32]] = NOTHING,
    kept: KeptModule | None = None,
) -> tuple[TextModel, Division]:
    """As `assembled` or, if the job's model writes, `assembled_writer`, which keeps nothing."""
    if writes(job.model):
        return assembled_writer(job, corpus.dialogue_encoder, manifest, shared, backbone, frozen)
    return assembled(job, corpus, manifest, shared, private, backbone, frozen, kept)


def _counted(
    manifest: Manifest, private: Mapping[str, NDArray[np.float32]], frozen: Mapping[str, NDArray[np.float32]]
) -> int:
    return manifest.values + sum(each.size for part in (private, frozen) for each in part.values())


def _loaded(
    job: JobDocument,
    module: TextModel,
    entries: Entries | None,
    manifest: Manifest,
    shared: NDArray[np.float32],
    private: Mapping[str, NDArray[np.float32]],
    frozen: Mapping[str, NDArray[np.float32]],
) -> Division:
    """Loads all values into the module."""
    # A list of all words takes longer than a local step, and only this method asks for it.
    words = entries.words() if entries is not None and isinstance(job.method, FedRecon) else ()
    division = division_of(job.method, module, words)
    division.load_shared(module, manifest.unflatten(shared))
    division.load_private(module, private)
    division.load_frozen(module, frozen)
    return division


def whole_model(
    job: JobDocument,
    manifest: Manifest,
    weights: bytes,
    tokenizer: bytes,
    private: Mapping[str, NDArray[np.float32]] | None = None,
    *,
    mixture: NDArray[np.float32] | None = None,
    backbone: "StoredBackbone | None" = None,
    frozen: Mapping[str, NDArray[np.float32]] | None = None,
) -> tuple[TextClassifier, TextEncoder | ClozeEncoder]:
    """Builds the module that answers, on the CPU and in evaluation mode, and its encoder.

    Low-rank changes of a transformer are in its matrices.

    Args:
        job: The job.
        manifest: The names and shapes of the shared parameters.
        weights: The version's bytes.
        tokenizer: The job's tokenizer.json, or the member's own.
        private: All parameters that the member keeps, if the job's method keeps any.
        mixture: (L,) Logarithms of the shares of the member's labels, if the job's training left them out of the
            logits. They are added to the head.
        backbone: The backbone of a prompted job.
        frozen: All parameters that the job freezes, by name.

    Raises:
        ParametersDiffer, DocumentInvalid, ValueError: As in `assembled`.
        TokenizerInvalid, TemplateInvalid: As in `encoder_of`.
    """
    encoder = encoder_of(job, tokenizer)
    module, _ = assembled(job, encoder, manifest, manifest.decode(weights), private or {}, backbone, frozen or {})
    if mixture is not None:
        with torch.no_grad():
            module.get_parameter("output.bias").add_(torch.from_numpy(mixture))
    if isinstance(job.model, TransformerModel):
        from learning.models.transformer import TransformerClassifier

        if isinstance(module, TransformerClassifier):
            module.merge()
    return module, encoder


def whole_writer(
    job: JobDocument,
    manifest: Manifest,
    weights: bytes,
    tokenizer: bytes,
    *,
    backbone: "StoredBackbone | None",
    frozen: Mapping[str, NDArray[np.float32]] = NOTHING,
) -> "tuple[CausalModel, DialogueEncoder]":
    """As `whole_model`, for a job whose model writes."""
    encoder = dialogue_encoder_of(job, tokenizer)
    module, _ = assembled_writer(job, encoder, manifest, manifest.decode(weights), backbone, frozen)
    return module, encoder


def _prompted(
    job: JobDocument, model: PromptedModel, entries: Entries, values: int, backbone: "StoredBackbone | None"
) -> TextClassifier:
    """A prompted module of zeros. Raises DocumentInvalid for another number of values, or without a backbone."""
    encoder = entries.encoder if isinstance(entries, EncodedExamples) else entries
    if not isinstance(encoder, ClozeEncoder) or backbone is None:
        raise DocumentInvalid(f"job {job.name} has a prompted model, and its backbone is missing")
    if (found := prompted_values(model, len(job.labels))) != values:
        raise DocumentInvalid(f"the model of job {job.name} has {found} values, and its weights have {values}")
    return build_prompted(model, job.labels, encoder, backbone, seed=None)
