"""Makes a corpus from a kept model: labels, texts, file, statement.

Only `drawn_histogram` reads the member's data, namely its labels, and its caller has charged for that. `made_corpus`
reads the model, the noised histogram, the job's public words and fresh random bits, and nothing else. That is why any
amount of text costs no further budget (`learning.synthesis.training`).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edge_client.corpus_release.folder import CorpusFile, CorpusFolder
from edge_client.corpus_release.models import KeptModel, NoisedHistogram
from tacit.corpus import CorpusOrder
from tacit.job import JobDocument, JobSpec
from tacit.model import RvaeModel
from toolkit.durable import Faults, no_faults

if TYPE_CHECKING:
    from learning.text.examples import Example
    from secure_agg import RandomSource

__all__ = ["MakingStopped", "NothingMade", "drawn_histogram", "made_corpus", "order_of"]


class MakingStopped(Exception):
    """The client is stopping, and discards what was sampled so far."""


class NothingMade(Exception):
    """No text could be written: all were empty, or none fits the order's size."""


def order_of(job: JobDocument | JobSpec) -> CorpusOrder | None:
    """The job's order of a corpus from its members. None: it orders none, or from its operator."""
    return job.corpus if job.corpus is not None and job.corpus.source == "members" else None


def drawn_histogram(
    examples: "Sequence[Example]", job: JobDocument, std: float, random: "RandomSource"
) -> tuple[int, ...]:
    """Counts the examples of each of the job's labels, and adds noise. The caller charges `histogram_event` first.

    Args:
        examples: the member's data.
        job: names the labels.
        std: standard deviation of the noise.
        random: source of the noise.

    Returns:
        One noised count for each label, in the job's order.
    """
    import numpy as np

    from learning.synthesis.labels import noised_histogram
    from learning.text.examples import label_places

    places = label_places(examples, job.labels)
    counts = np.bincount(places[places >= 0], minlength=len(job.labels)).astype(np.int64)
    return tuple(int(each) for each in noised_histogram(counts, std, random))


def made_corpus(
    kept: KeptModel,
    histogram: NoisedHistogram | None,
    folder: CorpusFolder,
    *,
    federation: bytes,
    member: str,
    random: "RandomSource",
    progress: Callable[[int, int], None] = lambda made, count: None,
    faults: Faults = no_faults,
) -> CorpusFile:
    """Writes the file and its statement. Run it in a thread: it takes minutes for many texts, more if labels guide.

    Args:
        kept: the model to sample from.
        histogram: noised counts of the labels. None: each label equally often.
        folder: where the files go.
        federation: SHA-256 that names the federation, 32 bytes.
        member: this member's name.
        random: source of all sampling.
        progress: called with (texts made, texts ordered); stops the work by raising `MakingStopped`.
        faults: the points at which tests kill the process.

    Returns:
        What was written, with digests and reservations.

    Raises:
        NothingMade: no row was left to write.
        ValueError: the model cannot be sampled from.
        OSError: the disk does not take the files.
    """
    import numpy as np
    import torch

    from learning.synthesis.ordered import ordered_texts, statement_about
    from learning.synthesis.writing import write_corpus

    model, job = kept.model, kept.model.job
    order = order_of(job)
    if order is None or not isinstance(job.model, RvaeModel):
        raise ValueError(f"job {job.name} orders no text from its members")
    torch.set_num_threads(1)
    counts = np.array(histogram.counts if histogram else (0,) * len(job.labels), dtype=np.int64)
    texts = ordered_texts(job, order, model.arrays, model.tokenizer, counts, random, progress)
    folder.prepare()
    written = write_corpus(folder.file, texts, job.labels, max_bytes=order.max_bytes, faults=faults)
    if not written.rows:
        folder.forget()
        raise NothingMade(f"none of {order.texts} texts has a word and fits into {order.max_bytes} bytes")
    sound = job.model.variant == "sound" and kept.trained is not None
    statement = statement_about(
        folder.file,
        job,
        federation=federation,
        member=member,
        round=model.round,
        version=model.version,
        promise="differentially-private" if sound else "none",
        histogram="noised" if histogram else "even",
    )
    folder.write_statement(statement)
    return CorpusFile(
        corpus=statement.corpus,
        bytes=statement.bytes,
        rows=statement.rows,
        statement=statement.digest(),
        trained=kept.trained,
        histogram=histogram.reservation if histogram else None,
    )
