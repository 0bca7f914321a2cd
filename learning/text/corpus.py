"""A member's examples as one job reads them: token ids and places of labels, worked out once for all its rounds.

Guarantees: nothing of the data is looked at before `read` is called, so that whoever must not fail on the data decides
when that is; a second call gives the same arrays, read-only. Memory: eight bytes for each token of the padded matrix,
for as long as the corpus is kept.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learning.text.cloze import ClozeEncoder
from learning.text.data import Example, label_places, text_rows
from learning.text.encoder import TextEncoder
from tacit.job import JobDocument, JobSpec
from tacit.model import PromptedModel, RvaeModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from learning.synthesis.words import PublicWords

__all__ = ["EncodedArrays", "EncodedExamples", "encoder_of", "words_of"]


@dataclass(frozen=True)
class EncodedArrays:
    """ids: (U, S), padded. labels: (U,), places in the job's labels. usable: (U,), which of the examples these are:
    those whose label is one of the job's, and that have a second text where the job reads pairs.
    """

    ids: "NDArray[np.int64]"
    labels: "NDArray[np.int64]"
    usable: "NDArray[np.int64]"


class EncodedExamples:
    """The examples under one job's tokenizer, labels and lengths.

    Raises:
        TokenizerInvalid: not a tokenizer, or one without the padding token, or the frame, that the job's model needs.
        TemplateInvalid: a prompted job's template leaves no room for text.
    """

    def __init__(self, examples: Sequence[Example], job: JobDocument, tokenizer: bytes) -> None:
        self._examples = examples
        self._labels = job.labels
        self._encoder = encoder_of(job, tokenizer)
        self._words = words_of(job, tokenizer) if isinstance(job.model, RvaeModel) else None
        self._read: EncodedArrays | None = None
        self._key = _key(job, tokenizer)

    def serves(self, job: JobDocument, tokenizer: bytes) -> bool:
        """Whether this job reads the same examples in the same way with this tokenizer."""
        return self._key == _key(job, tokenizer)

    @property
    def population(self) -> int:
        """N, all examples, whatever their labels are."""
        return len(self._examples)

    @property
    def encoder(self) -> TextEncoder | ClozeEncoder:
        """What its texts are read with."""
        return self._encoder

    @property
    def vocabulary_size(self) -> int:
        """Rows that an embedding needs."""
        return self._encoder.vocabulary_size

    @property
    def pad_id(self) -> int:
        """The id of padding."""
        return self._encoder.pad_id

    def words(self) -> list[str | None]:
        """The vocabulary by id."""
        return self._encoder.words()

    def read(self) -> EncodedArrays:
        """Looks at the data, the first time it is called."""
        import numpy as np

        if self._read is None:
            places = label_places(self._examples, self._labels)
            usable, pairs = np.flatnonzero(places >= 0), self._encoder.pairs
            if pairs:
                usable = usable[[self._examples[at].text_b is not None for at in usable.tolist()]]
            labels = places[usable]
            if self._words is None:
                ids = self._encoder.encode(text_rows([self._examples[at] for at in usable.tolist()], pairs=pairs))
            else:
                # The label is the first of a text's ids, and the loss stands at place 0 (`learning.synthesis`).
                ids = self._words.encode([self._examples[at].text for at in usable.tolist()], labels)
                labels = np.zeros_like(labels)
            read = EncodedArrays(ids, labels, usable)
            for array in (read.ids, read.labels, read.usable):
                array.flags.writeable = False
            self._read = read
        return self._read


def encoder_of(job: JobDocument | JobSpec, tokenizer: bytes) -> TextEncoder | ClozeEncoder:
    """A job's texts to ids: cut, padded and framed, or put into a template, as its model wants them.

    Raises:
        TokenizerInvalid, TemplateInvalid: as `EncodedExamples` says.
    """
    if isinstance(job.model, PromptedModel):
        return ClozeEncoder.of(job.model, tokenizer)
    return TextEncoder(tokenizer, job.model.max_tokens, job.model.min_tokens, frame=job.model.frame)


def words_of(job: JobDocument, tokenizer: bytes) -> "PublicWords":
    """The public words of a job that makes text up.

    Raises:
        VocabularyNotPublic, TokenizerInvalid: as `public_words` says.
    """
    from learning.synthesis.words import public_words

    model = job.model
    if not isinstance(model, RvaeModel):
        raise TypeError("only a job whose model is an rvae makes text up")
    digest = None if job.tokenizer is None else bytes(job.tokenizer)
    return public_words(tokenizer, digest, labels=len(job.labels), max_tokens=model.max_tokens, most=model.words)


def _key(job: JobDocument, tokenizer: bytes) -> tuple[object, ...]:
    model = job.model
    template = model.template if isinstance(model, PromptedModel) else None
    # Another model's ids have no label in front, and other words.
    words = model.words if isinstance(model, RvaeModel) else None
    reading = template, words, job.labels, model.max_tokens, model.min_tokens, model.frame
    return hashlib.sha256(tokenizer).digest(), *reading
