"""What a member starts with: its own vocabulary, if the job wants one, and its private parameters."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from learning.models import build, build_blank, division_of, values_of
from learning.models.assembly import check_size
from learning.models.division import EMBEDDING
from learning.text.composed import composed_rows
from learning.text.corpus import encoder_of
from learning.text.encoder import UNKNOWN
from learning.text.tables import NothingFound, entries_of, fill_from_table, words_of
from learning.text.vocabulary import own_tokenizer
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.method import OwnVocabulary

__all__ = ["first_private", "own_vocabulary"]

# Values of a model that a member starts by itself, with its own vocabulary: 4 GiB.
_MAX_VALUES = 2**30

log = structlog.get_logger("edge_client")


def own_vocabulary(wanted: OwnVocabulary, texts: Iterable[str], table: Path | None) -> bytes:
    """Builds the member's own tokenizer.json from its texts and, if wanted, from the words of its table of vectors.

    Raises:
        VocabularyInvalid: The texts have nothing to build a vocabulary from.
        TableInvalid: The table does not exist or cannot be read.
    """
    known = words_of(table, named="--embedding") if table is not None and wanted.table_words else ()
    return own_tokenizer(texts, wanted.kind, wanted.size, wanted.min_count, known)


def first_private(
    job: JobDocument,
    tokenizer: bytes,
    start: tuple[Manifest, bytes] | None,
    table: Path | None,
    *,
    base_tokenizer: bytes | None = None,
    seed: int | None = None,
) -> dict[str, NDArray[np.float32]]:
    """The member's first private parameters, by name.

    They are the job's start if it has one, else random weights. If the job's start is of a base model's word pieces and
    the member has a vocabulary of its own, each of its rows is the mean of the base's (`composed_rows`). If the member
    chose a table of vectors and keeps a whole embedding, the table's rows then replace those of the vocabulary entries
    that it has. With the member's own vocabulary and random weights, the row for unknown words is zero unless the table
    has an entry [UNK]: a vocabulary of all of the member's words leaves none to train that row, and random numbers in
    it would be noise in every later text.

    Args:
        job: The job.
        tokenizer: The tokenizer.json, the job's or the member's own.
        start: The job's start of private parameters, if it has one.
        table: The member's table of vectors, if it chose one.
        base_tokenizer: The base model's word pieces, if the job has them.
        seed: Seeds the random weights; the job's seed if None. Anyone who knows it knows the vectors that the member
            started from, by their places in its vocabulary.

    Raises:
        TableInvalid: The table cannot be used, or its width is not the model's.
        DocumentInvalid: The start does not fit the model, or the method finds nothing to keep.
    """
    encoder = encoder_of(job, tokenizer)
    sizes = encoder.vocabulary_size, len(job.labels), encoder.pad_id
    try:
        frozen = 0 if job.frozen is None else job.frozen.values
        begun = None if start is None else start[0].unflatten(start[0].decode(start[1]))
        if start is not None and job.vocabulary is None:
            check_size(job, encoder.vocabulary_size, job.values + start[0].values + frozen)
        else:
            # Judges by the size that the job asks for if members build their vocabularies. The number of entries is
            # this member's secret, and a refusal must not reveal it.
            most = sizes[0] if job.vocabulary is None else job.vocabulary.size
            if values_of(job.model, most, sizes[1]) > _MAX_VALUES:
                raise DocumentInvalid(f"the model of job {job.name} has more than {_MAX_VALUES} values")
        if begun is None:
            module = build(job.model, *sizes, seed=job.seed if seed is None else seed)
        else:
            module = build_blank(job.model, *sizes)
            if job.vocabulary is not None:
                width = module.embedding.embedding_dim
                begun = {**begun, **_own_rows(tokenizer, base_tokenizer, begun, width)}
        division = division_of(job.method, module, encoder.words())
        if begun is not None:
            division.load_private(module, begun)
    except ValueError as error:
        raise DocumentInvalid(f"job {job.name} does not fit its private parameters: {error}") from error
    kept = division.private(module)
    if job.own_vocabulary and start is None and EMBEDDING in kept:
        kept[EMBEDDING][entries_of(tokenizer)[UNKNOWN]] = 0
    if table is not None and EMBEDDING in kept and division.rows is None:
        try:
            fill_from_table(kept[EMBEDDING], table, entries_of(tokenizer), named="--embedding")
        except NothingFound as error:
            if job.tokenizer is not None:
                raise
            # Whether the table has any of the member's words is its secret, and a refusal must not reveal it.
            log.warning("embedding_table_unused", job=job.name, reason="no_word_known", why=str(error))
    return kept


def _own_rows(
    tokenizer: bytes, base_tokenizer: bytes | None, begun: Mapping[str, NDArray[np.float32]], width: int
) -> dict[str, NDArray[np.float32]]:
    """The embedding of a member's own vocabulary, from the base's rows in the job's start. `width`: of the model's.

    Raises:
        ValueError: The start has no such rows, whatever the member's vocabulary is. The text says nothing about it.
    """
    if base_tokenizer is None or EMBEDDING not in begun:
        raise ValueError("it has no rows of a base model's word pieces for members' own vocabularies")
    base, table = entries_of(base_tokenizer), begun[EMBEDDING]
    # Rows of another width would be refused later with the number of the member's own, in what the coordinator hears.
    if table.ndim == 2 and table.shape[1] != width:
        raise ValueError(f"the base model's rows are {table.shape[1]} wide, and the job's embedding {width}")
    if UNKNOWN not in base or table.ndim != 2 or len(table) <= max(base.values()):
        raise ValueError("the base model's word pieces and their rows do not belong together")
    return {EMBEDDING: composed_rows(entries_of(tokenizer), base, table)}
