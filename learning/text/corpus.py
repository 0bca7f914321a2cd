"""A member's examples as one job reads them: token ids and label indices, computed once for all its rounds.

Guarantees: the data is not looked at before it is read, so a caller that must not fail on the data decides when
that is. A second call returns the same read-only arrays. Memory: eight bytes for each token of the padded matrix, as
long as the corpus is kept.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learning.prompts.features import FeatureStore
from learning.text.cloze import ClozeEncoder
from learning.text.coverage import Coverage
from learning.text.dialogue import Dialogue, DialogueEncoder
from learning.text.encoder import TextEncoder
from learning.text.examples import DataInvalid, Example, dialogue_of, label_places, text_rows
from learning.text.persons import persons_of
from tacit.generation import Generate
from tacit.job import JobDocument, JobSpec
from tacit.model import PromptedModel, RvaeModel
from tacit.prompt import writes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from learning.synthesis.words import PublicWords

__all__ = [
    "EncodedArrays",
    "EncodedExamples",
    "coverage_of",
    "dialogue_encoder_of",
    "encoder_of",
    "usable_dialogues",
    "words_of",
]

# Texts that are tokenised at once, to bound memory.
_BATCH = 1024


@dataclass(frozen=True)
class EncodedArrays:
    """The usable examples as arrays: those with a label of the job and, if the job reads pairs, a second text.

    If the job's model writes, they are the dialogues with a response.

    Attributes:
        ids: (U, S), padded.
        labels: (U,) indices into the job's labels. If the model writes, (U, S): the id that each position must predict,
            or -100 where there is no loss.
        usable: (U,) indices of these examples among all.

    For a training, examples that are kept back are not usable.
    """

    ids: "NDArray[np.int64]"
    labels: "NDArray[np.int64]"
    usable: "NDArray[np.int64]"


class EncodedExamples:
    """The examples under one job's tokenizer, labels and lengths.

    Args:
        examples: The member's.
        job: Reads them, with `tokenizer`.
        features: What a frozen backbone computed of them.
        kept_back: (N,) The examples that no training uses; None: it uses all.
        like: Other examples of the same job and tokenizer, whose encoder these use too. Making one takes longer than
            a local step, and some megabytes.

    Raises:
        TokenizerInvalid: The bytes are no tokenizer, or it lacks the padding token or the frame that the model needs.
        TemplateInvalid: A prompted job's template leaves no room for text.
        ValueError: `like` is read in another way.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        job: JobDocument,
        tokenizer: bytes,
        features: FeatureStore | None = None,
        kept_back: "NDArray[np.bool_] | None" = None,
        *,
        like: "EncodedExamples | None" = None,
    ) -> None:
        self._examples = examples
        self._kept_back = kept_back
        self.features = FeatureStore() if features is None else features
        self._labels = job.labels
        self._key = _key(job, tokenizer)
        if like is not None and like._key != self._key:
            raise ValueError("the other examples are read in another way, so they have another encoder")
        self._encoder: TextEncoder | ClozeEncoder | DialogueEncoder
        self._words: PublicWords | None
        if like is not None:
            self._encoder, self._words = like._encoder, like._words
        else:
            self._encoder = dialogue_encoder_of(job, tokenizer) if writes(job.model) else encoder_of(job, tokenizer)
            self._words = words_of(job, tokenizer) if isinstance(job.model, RvaeModel) else None
        self._read: EncodedArrays | None = None
        self._people: tuple[NDArray[np.int64], int] | None = None
        self._validation: tuple[bytes, EncodedArrays] | None = None

    def serves(self, job: JobDocument, tokenizer: bytes) -> bool:
        """Whether this job reads the same examples in the same way with this tokenizer."""
        return self._key == _key(job, tokenizer)

    @property
    def population(self) -> int:
        """N, the number of all examples, whatever their labels are."""
        return len(self._examples)

    def people(self) -> "tuple[NDArray[np.int64], int]":
        """The person of each example (N,), whatever their labels are, and how many persons there are."""
        if self._people is None:
            found = persons_of(self._examples)
            found.flags.writeable = False
            self._people = found, int(found.max(initial=-1)) + 1
        return self._people

    @property
    def encoder(self) -> TextEncoder | ClozeEncoder:
        """The encoder of the texts. Only of a job with labels: a job whose model writes reads dialogues."""
        if isinstance(self._encoder, DialogueEncoder):
            raise TypeError("a job whose model writes has no encoder of texts")
        return self._encoder

    @property
    def dialogue_encoder(self) -> DialogueEncoder:
        """The encoder of the dialogues. Only of a job whose model writes."""
        if not isinstance(self._encoder, DialogueEncoder):
            raise TypeError("only a job whose model writes reads dialogues")
        return self._encoder

    @property
    def vocabulary_size(self) -> int:
        """The rows that an embedding needs."""
        return self._encoder.vocabulary_size

    @property
    def pad_id(self) -> int:
        """The id of padding."""
        return self._encoder.pad_id

    def words(self) -> list[str | None]:
        """The vocabulary by id."""
        return self._encoder.words()

    def read(self) -> EncodedArrays:
        """Encodes the examples on the first call, and returns the same arrays on every later one."""
        if self._read is None:
            self._read = self._encoded(None if self._kept_back is None else ~self._kept_back)
        return self._read

    def read_validation(self, measured: "NDArray[np.bool_]") -> EncodedArrays:
        """The same for examples that are kept back.

        Args:
            measured: (N,) Which of them. Those of the last call are kept.
        """
        key = measured.tobytes()
        if self._validation is None or self._validation[0] != key:
            self._validation = (key, self._encoded(measured))
        return self._validation[1]

    def _encoded(self, wanted: "NDArray[np.bool_] | None") -> EncodedArrays:
        import numpy as np

        if isinstance(self._encoder, DialogueEncoder):
            read = self._dialogues(self._encoder, wanted)
            for array in (read.ids, read.labels, read.usable):
                array.flags.writeable = False
            return read
        places = label_places(self._examples, self._labels)
        usable, pairs = np.flatnonzero(places >= 0 if wanted is None else (places >= 0) & wanted), self._encoder.pairs
        if pairs:
            usable = usable[[self._examples[at].text_b is not None for at in usable.tolist()]]
        labels = places[usable]
        if self._words is None:
            ids = self._encoder.encode(text_rows([self._examples[at] for at in usable.tolist()], pairs=pairs))
        else:
            # A text's first id is its label, and the loss is at index 0 (`learning.synthesis`).
            ids = self._words.encode([self._examples[at].text for at in usable.tolist()], labels)
            labels = np.zeros_like(labels)
        read = EncodedArrays(ids, labels, usable)
        for array in (read.ids, read.labels, read.usable):
            array.flags.writeable = False
        return read

    def _dialogues(self, encoder: DialogueEncoder, wanted: "NDArray[np.bool_] | None") -> EncodedArrays:
        import numpy as np

        places = [
            at
            for at, each in enumerate(self._examples)
            if each.dialogue is not None and (wanted is None or bool(wanted[at]))
        ]
        rows = [dialogue for at in places if (dialogue := self._examples[at].dialogue) is not None]
        ids, targets, usable = encoder.encode_usable(rows)
        return EncodedArrays(ids, targets, np.array(places, dtype=np.int64)[usable])


def encoder_of(job: JobDocument | JobSpec, tokenizer: bytes) -> TextEncoder | ClozeEncoder:
    """The encoder that cuts, pads and frames texts, or puts them into a template, as the job's model needs.

    A job whose model writes has `dialogue_encoder_of` instead.

    Raises:
        TokenizerInvalid, TemplateInvalid: As in `EncodedExamples`.
    """
    if writes(job.model):
        raise TypeError("a job whose model writes reads dialogues; use dialogue_encoder_of")
    if isinstance(job.model, PromptedModel):
        return ClozeEncoder.of(job.model, tokenizer)
    return TextEncoder(tokenizer, job.model.max_tokens, job.model.min_tokens, frame=job.model.frame)


def coverage_of(job: JobDocument, tokenizer: bytes, examples: Sequence[Example]) -> Coverage:
    """How much of the examples' texts the job's model reads, whatever their labels are.

    If the job reads pairs, rows without a second text do not count.

    Raises:
        TokenizerInvalid, TemplateInvalid: As in `EncodedExamples`.
        VocabularyNotPublic: As in `words_of`.
    """
    encoder = encoder_of(job, tokenizer)
    reader = words_of(job, tokenizer) if isinstance(job.model, RvaeModel) else encoder
    rows = [each for each in examples if each.text_b is not None or not encoder.pairs]
    found = Coverage()
    for first in range(0, len(rows), _BATCH):
        part = reader.coverage(text_rows(rows[first : first + _BATCH], pairs=encoder.pairs))
        found = Coverage(
            found.texts + part.texts, found.cut + part.cut, found.tokens + part.tokens, found.unknown + part.unknown
        )
    return found


def dialogue_encoder_of(job: JobDocument | JobSpec, tokenizer: bytes) -> DialogueEncoder:
    """The encoder that puts dialogues into the template of a job whose model writes.

    Raises:
        TokenizerInvalid, TemplateInvalid: As in `EncodedExamples`.
    """
    model = job.model
    if not isinstance(model, PromptedModel) or not isinstance(model.task, Generate):
        raise TypeError("only a job whose model writes reads dialogues")
    return DialogueEncoder(tokenizer, model.task.template, model.max_tokens)


def usable_dialogues(job: JobDocument, examples: Sequence[Example]) -> list[Dialogue]:
    """The dialogues of the rows that a job whose model writes can use, each as `dialogue_of` returns it.

    Raises:
        DataInvalid: There is none.
    """
    model = job.model
    if not isinstance(model, PromptedModel) or not isinstance(model.task, Generate):
        raise TypeError("only a job whose model writes reads dialogues")
    roles = model.task.template.roles
    found = [each for example in examples if (each := dialogue_of(example, roles)) is not None]
    if not found:
        raise DataInvalid(
            f"no row is a dialogue with a response, and with turns of {', '.join(roles)} only; give rows with a prompt "
            "and a response, or messages"
        )
    return found


def words_of(job: JobDocument, tokenizer: bytes) -> "PublicWords":
    """The public words of a job for synthetic text.

    Raises:
        VocabularyNotPublic, TokenizerInvalid: As in `public_words`.
    """
    from learning.synthesis.words import public_words

    model = job.model
    if not isinstance(model, RvaeModel):
        raise TypeError("only a job whose model is an rvae generates synthetic text")
    digest = None if job.tokenizer is None else bytes(job.tokenizer)
    return public_words(tokenizer, digest, labels=len(job.labels), max_tokens=model.max_tokens, most=model.words)


def _key(job: JobDocument, tokenizer: bytes) -> tuple[object, ...]:
    model = job.model
    template: object = model.template if isinstance(model, PromptedModel) else None
    if isinstance(model, PromptedModel) and isinstance(model.task, Generate):
        template = model.task.template
    # Only an rvae's ids start with a label and use its words.
    words = model.words if isinstance(model, RvaeModel) else None
    reading = template, words, job.labels, model.max_tokens, model.min_tokens, model.frame
    return hashlib.sha256(tokenizer).digest(), *reading
