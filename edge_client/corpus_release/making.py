"""A corpus out of a kept model: labels, texts, file, statement. What reads the member's data stands in one function.

`drawn_histogram` alone looks at the data, at its labels, and its caller has charged for that. `made_corpus` reads the
model, the noised histogram, the job's public words and fresh coins, and nothing else: that is what makes any amount of
text cost nothing more (`learning.synthesis.training`).
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
    from learning.text.data import Example
    from secure_agg import RandomSource

__all__ = ["MakingStopped", "NothingMade", "drawn_histogram", "made_corpus", "order_of"]


class MakingStopped(Exception):
    """The client ends; what was sampled so far is thrown away."""


class NothingMade(Exception):
    """Every text that came was empty."""


def order_of(job: JobDocument | JobSpec) -> CorpusOrder | None:
    """What the job orders of its members; None where it orders nothing, or of its operator."""
    return job.corpus if job.corpus is not None and job.corpus.source == "members" else None


def drawn_histogram(
    examples: "Sequence[Example]", job: JobDocument, std: float, random: "RandomSource"
) -> tuple[int, ...]:
    """How many examples have each of the job's labels, with noise. Charge `histogram_event` beforehand."""
    import numpy as np

    from learning.synthesis.labels import noised_histogram
    from learning.text.data import label_places

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
    """Writes the file and its statement. In a thread; minutes for many texts, more of them the more labels guide.
    `progress` is told (texts made, of so many), and ends it by raising `MakingStopped`.

    Raises:
        NothingMade: no row was left to write. ValueError: a model that cannot be sampled from. OSError.
    """
    import numpy as np
    import torch

    from learning.synthesis.ordered import ordered_texts, statement_about
    from learning.synthesis.writing import write_corpus

    model, job = kept.model, kept.model.job
    order = order_of(job)
    if order is None or not isinstance(job.model, RvaeModel):
        raise ValueError(f"job {job.name} orders no text of its members")
    torch.set_num_threads(1)
    counts = np.array(histogram.counts if histogram else (0,) * len(job.labels), dtype=np.int64)
    texts = ordered_texts(job, order, model.arrays, model.tokenizer, counts, random, progress)
    folder.prepare()
    written = write_corpus(folder.file, texts, job.labels, max_bytes=order.max_bytes, faults=faults)
    if not written.rows:
        folder.forget()
        raise NothingMade(f"none of {order.texts} texts had a word that fits into {order.max_bytes} bytes")
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
