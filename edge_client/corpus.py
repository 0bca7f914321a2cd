"""A member's examples as one job reads them: token ids and places of labels, worked out once for all its rounds.

Guarantees: nothing of the data is looked at before `read` is called, so that whoever must not fail on the data decides
when that is; a second call gives the same arrays, read-only. Memory: eight bytes for each token of the padded matrix,
for as long as the corpus is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_client.data import Example, label_places
from edge_client.text import TextEncoder
from tacit.job import JobDocument

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Corpus", "CorpusRead"]


@dataclass(frozen=True)
class CorpusRead:
    """ids: (U, S), padded. labels: (U,), places in the job's labels. usable: (U,), which of the examples these are:
    those whose label is one of the job's.
    """

    ids: "NDArray[np.int64]"
    labels: "NDArray[np.int64]"
    usable: "NDArray[np.int64]"


class Corpus:
    """The examples under one job's tokenizer, labels and lengths.

    Raises:
        TokenizerInvalid: not a tokenizer, or one without a padding token.
    """

    def __init__(self, examples: Sequence[Example], job: JobDocument, tokenizer: bytes) -> None:
        self._examples = examples
        self._labels = job.labels
        self._encoder = TextEncoder(tokenizer, job.model.max_tokens, max(job.model.widths))
        self._read: CorpusRead | None = None
        self._key = _key(job)

    def serves(self, job: JobDocument) -> bool:
        """Whether this job reads the same examples in the same way."""
        return self._key == _key(job)

    @property
    def population(self) -> int:
        """N, all examples, whatever their labels are."""
        return len(self._examples)

    @property
    def vocabulary_size(self) -> int:
        """Rows that an embedding needs."""
        return self._encoder.vocabulary_size

    @property
    def pad_id(self) -> int:
        """The id of padding."""
        return self._encoder.pad_id

    def read(self) -> CorpusRead:
        """Looks at the data, the first time it is called."""
        import numpy as np

        if self._read is None:
            places = label_places(self._examples, self._labels)
            usable = np.flatnonzero(places >= 0)
            ids = self._encoder.encode([self._examples[at].text for at in usable.tolist()])
            read = CorpusRead(ids, places[usable], usable)
            for array in (read.ids, read.labels, read.usable):
                array.flags.writeable = False
            self._read = read
        return self._read


def _key(job: JobDocument) -> tuple[object, ...]:
    return job.tokenizer, job.labels, job.model.max_tokens, max(job.model.widths)
