"""From a job as the operator wrote it to the bundle that a job starts from.

Guarantees: the same specification and files give the same bytes, weights included, on the same versions of
the libraries; every digest in job.json is that of the file beside it; nothing is written unless all of it can
be.

Order: tokenizer from the vocabulary, seeded weights (the embedding from a table, where one is named),
manifest, document, files.
"""

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from edge_client.text import TextEncoder, read_vocabulary, word_tokenizer, wordpiece_tokenizer
from tacit.bundle import Bundle, BundleInvalid, read_bundle, write_bundle
from tacit.documents import DocumentInvalid, sentence_of
from tacit.job import JobDocument, JobSpec, VocabularyFile
from tacit.manifest import Manifest

__all__ = ["JobBundle", "TableInvalid", "make_job_bundle", "read_job_bundle"]


class TableInvalid(ValueError):
    """A table of word vectors that cannot be used; the text says where and what to do."""


@dataclass(frozen=True, slots=True)
class JobBundle:
    """A job bundle as read: its document, and the three files the document names by digest."""

    document: JobDocument
    manifest: Manifest
    weights: bytes
    tokenizer: bytes


def make_job_bundle(
    spec: JobSpec, folder: Path, out: Path, *, report: Callable[[str], None] = lambda _: None
) -> JobDocument:
    """Makes the bundle `out` and returns its job document.

    folder: what relative paths in the specification start from (where job.toml lies). report: is told in
    sentences what was found on the way.

    Raises:
        VocabularyInvalid, TableInvalid: a file that cannot be used.
        DocumentInvalid: a sum of so many values has no room in the ring.
        BundleInvalid: a folder in the way.
    """
    tokenizer = _tokenizer(spec.vocabulary, folder)
    from edge_client.models import build, min_tokens, shared_parameters

    encoder = TextEncoder(tokenizer, spec.model.max_tokens, min_tokens(spec.model))
    module = build(spec.model, encoder.vocabulary_size, len(spec.labels), encoder.pad_id, seed=spec.seed)
    tensors = shared_parameters(module)
    report(f"vocabulary: {encoder.vocabulary_size:,} entries from {spec.vocabulary.file}")
    if spec.vocabulary.pretrained is not None:
        found = _start_from_table(
            tensors["embedding.weight"], folder / spec.vocabulary.pretrained, _ids(tokenizer, encoder.pad_id)
        )
        report(
            f"pretrained: {found:,} of {encoder.vocabulary_size:,} entries found in "
            f"{spec.vocabulary.pretrained}; the others start at random"
        )
    manifest = Manifest.of(tensors)
    weights = manifest.encode(manifest.flatten(tensors))
    try:
        document = JobDocument(
            **{name: getattr(spec, name) for name in type(spec).model_fields if name != "vocabulary"},
            manifest=manifest.digest(),
            tokenizer=hashlib.sha256(tokenizer).digest(),
            weights=hashlib.sha256(weights).digest(),
            values=manifest.values,
        )
    except ValidationError as error:
        # The grid of noise in the ring depends on the number of values, which the specification did not know.
        raise DocumentInvalid(f"job {spec.name}: {sentence_of(error)}") from error
    files = {
        "job.json": document.canonical(),
        "manifest.json": manifest.canonical(),
        "weights.bin": weights,
        "tokenizer.json": tokenizer,
    }
    write_bundle(out, "job", files)
    report(f"model: {manifest.values:,} values in {len(tensors)} tensors, {manifest.bytes / 1e6:.1f} MB")
    return document


def read_job_bundle(folder: Path) -> JobBundle:
    """A job bundle whose document was checked against the files beside it.

    Raises:
        BundleInvalid: damaged, of another kind, or a document that names other files.
    """
    bundle = read_bundle(folder, "job")
    try:
        document = JobDocument.from_json(bundle.files["job.json"], what=str(folder / "job.json"))
        manifest = Manifest.from_json(bundle.files["manifest.json"], what=str(folder / "manifest.json"))
        manifest.decode(bundle.files["weights.bin"])
    except DocumentInvalid as error:
        raise BundleInvalid(f"{error}; make the bundle again") from error
    _check_names(bundle, document, manifest)
    return JobBundle(document, manifest, bundle.files["weights.bin"], bundle.files["tokenizer.json"])


def _check_names(bundle: Bundle, document: JobDocument, manifest: Manifest) -> None:
    named = {
        "manifest.json": document.manifest,
        "tokenizer.json": document.tokenizer,
        "weights.bin": document.weights,
    }
    for name, digest in named.items():
        if hashlib.sha256(bundle.files[name]).digest() != digest:
            raise BundleInvalid(f"{bundle.folder / 'job.json'} names another {name}; make the bundle again")
    if document.values != manifest.values:
        raise BundleInvalid(f"{bundle.folder / 'job.json'} counts other values than its manifest; make it again")


def _tokenizer(vocabulary: VocabularyFile, folder: Path) -> bytes:
    lines = read_vocabulary(folder / vocabulary.file)
    return wordpiece_tokenizer(lines) if vocabulary.kind == "wordpiece" else word_tokenizer(lines)


def _ids(tokenizer: bytes, pad_id: int) -> dict[str, int]:
    from tokenizers import Tokenizer

    ids: dict[str, int] = Tokenizer.from_str(tokenizer.decode()).get_vocab(with_added_tokens=True)
    return {word: number for word, number in ids.items() if number != pad_id}


def _start_from_table(embedding: NDArray[np.float32], path: Path, ids: Mapping[str, int]) -> int:
    """Writes the table's rows over the embedding's (V, width) and returns how many it found.

    GloVe's text form (Pennington et al. 2014): a word, then its numbers, separated by single spaces. Of a
    word that stands twice the first row counts, as where a table is read from the most frequent word down.
    """
    width = embedding.shape[1]
    found: set[str] = set()
    with _open_table(path) as lines:
        for number, line in enumerate(lines, start=1):
            # From the right, since some tables hold words with a space.
            word, *numbers = line.rstrip("\r\n ").rsplit(" ", width)
            if len(numbers) != width or (number == 1 and " " in word):
                raise TableInvalid(
                    f"{path}, line {number}: {len(line.split()) - 1} numbers where model.embedding is "
                    f"{width}; set model.embedding to the table's width (and leave out a header line)"
                )
            if word not in ids or word in found:
                continue
            try:
                row = np.array(numbers, dtype=np.float32)
            except ValueError:
                raise TableInvalid(f"{path}, line {number}: not a word and {width} numbers") from None
            if not np.isfinite(row).all():
                raise TableInvalid(f"{path}, line {number}: a number is not finite; leave the row out")
            embedding[ids[word]] = row
            found.add(word)
    if not found:
        raise TableInvalid(
            f"{path}: none of its words is in the vocabulary; is it a table of whole, lower-case words "
            "in the same language?"
        )
    return len(found)


@contextmanager
def _open_table(path: Path) -> Iterator[IO[str]]:
    """A table is read line by line: the published ones are gigabytes."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        # newline="\n": words may hold characters that universal newlines or splitlines() would cut at.
        with opener(path, "rt", encoding="utf-8", newline="\n") as lines:
            yield lines
    except FileNotFoundError:
        raise TableInvalid(f"{path} does not exist; check vocabulary.pretrained in the job") from None
    except UnicodeDecodeError:
        raise TableInvalid(f"{path} is not UTF-8 text; vocabulary.pretrained is a table in GloVe's text form") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TableInvalid(f"{path} cannot be read: {error}") from error
