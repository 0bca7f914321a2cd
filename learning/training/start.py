"""What a member begins with: a vocabulary of its own, where the job wants one, and private parameters."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from learning.models import build, build_blank, division_of, values_of
from learning.models.assembly import check_size
from learning.models.division import EMBEDDING
from learning.text.corpus import encoder_of
from learning.text.encoder import UNKNOWN
from learning.text.tables import NothingFound, entries_of, fill_from_table, words_of
from learning.text.vocabulary import own_tokenizer
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.method import OwnVocabulary

__all__ = ["first_private", "own_vocabulary"]

# Of a model that a member begins by itself, with a vocabulary of its own: 4 GiB.
_MAX_VALUES = 2**30

log = structlog.get_logger("edge_client")


def own_vocabulary(wanted: OwnVocabulary, texts: Iterable[str], table: Path | None) -> bytes:
    """The member's own tokenizer.json, of its texts and of the words that its table of vectors has beside them.

    Raises:
        VocabularyInvalid: the texts hold nothing to build it of. TableInvalid: there is no such table.
    """
    known = words_of(table, named="--embedding") if table is not None and wanted.table_words else ()
    return own_tokenizer(texts, wanted.kind, wanted.size, wanted.min_count, known)


def first_private(
    job: JobDocument,
    tokenizer: bytes,
    start: tuple[Manifest, bytes] | None,
    table: Path | None,
    *,
    seed: int | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Private parameters by name: the job's own start, if it has one, else random weights; then, where the member chose
    a table of vectors and keeps a whole embedding, the table's rows for the entries of the vocabulary that it holds.
    With a vocabulary of its own the row of unknown words is zero unless the table has an entry [UNK]: a list of all
    its words leaves none to train that row by, and random numbers in it would be noise in every text to come.

    tokenizer: the job's, or the member's own. seed: of random weights, the job's if None. Whoever knows it knows the
    vectors that the member started from, by their places in its vocabulary.

    Raises:
        TableInvalid: a table that cannot be used, or of another width than the model's.
        DocumentInvalid: a start that is not this model's, or a method that finds nothing to keep.
    """
    encoder = encoder_of(job, tokenizer)
    sizes = encoder.vocabulary_size, len(job.labels), encoder.pad_id
    try:
        if start is not None:
            check_size(job, encoder.vocabulary_size, job.values + start[0].values)
            module = build_blank(job.model, *sizes)
        else:
            # By the size that the job asks for where members build their vocabularies: how many entries this one has is
            # nobody else's to hear of, not even by a refusal.
            most = sizes[0] if job.vocabulary is None else job.vocabulary.size
            if values_of(job.model, most, sizes[1]) > _MAX_VALUES:
                raise DocumentInvalid(f"the model of job {job.name} has more than {_MAX_VALUES} values")
            module = build(job.model, *sizes, seed=job.seed if seed is None else seed)
        division = division_of(job.method, module, encoder.words())
        if start is not None:
            manifest, data = start
            division.load_private(module, manifest.unflatten(manifest.decode(data)))
    except ValueError as error:
        raise DocumentInvalid(f"job {job.name} does not fit its private parameters: {error}") from error
    kept = division.private(module)
    if job.own_vocabulary and EMBEDDING in kept:
        kept[EMBEDDING][entries_of(tokenizer)[UNKNOWN]] = 0
    if table is not None and EMBEDDING in kept and division.rows is None:
        try:
            fill_from_table(kept[EMBEDDING], table, entries_of(tokenizer), named="--embedding")
        except NothingFound as error:
            if job.tokenizer is not None:
                raise
            # Whether a word of the member's own is in it is nobody else's to hear of, not even by a refusal.
            log.warning("embedding_table_unused", job=job.name, reason="no_word_known", why=str(error))
    return kept
