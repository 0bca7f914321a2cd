"""Synthetic text that members release: what a job orders, and what a member states about the file that it sends.

The order is part of the job's document, so a member's policy can judge it before any data is read. The statement goes
with the file. The coordinator keeps it, signed, as the provenance of each row of a training corpus.
"""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from tacit.documents import AtMost, Digest, Document, Label, Moment, Part, Short
from tacit.limits import MAX_LABELS

__all__ = [
    "MAX_CORPUS_BYTES",
    "MAX_GUIDED_LABELS",
    "CorpusOrder",
    "CorpusStatement",
    "LabelCount",
    "Promise",
    "signed_bytes",
]

# Size of one member's file: what the coordinator can store and a member can read.
MAX_CORPUS_BYTES: Final = 64 * 1024 * 1024

# Guidance needs a decoder for each label, each scoring every word; this bounds memory and time.
MAX_GUIDED_LABELS: Final = 256

# Nothing else that a member's key signs begins like this: no receipt, aggregation message or TLS handshake.
_DOMAIN: Final = b"tacit/corpus/v1\n"

# What protects the texts: the (epsilon, delta) in the member's ledger, or nothing.
Promise = Literal["differentially-private", "none"]


class CorpusOrder(Part):
    """The synthetic text that a job orders from its `rvae` after the last round."""

    # members: each generates texts from the last model that it trained itself; its owner reads them and may keep them.
    # operator: the operator generates them from the published model, and no member releases anything.
    source: Literal["members", "operator"] = "members"
    # Number of texts from each member, or from the operator.
    texts: int = Field(default=1000, ge=1, le=100_000)
    # Divides the scores, after guidance.
    temperature: float = Field(default=1.0, ge=0.05, le=20)
    # Number of best words from which each word is drawn. None: all.
    top_k: int | None = Field(default=None, ge=1, le=4000)
    # How strongly texts favour their label: each word's likelihood is multiplied by this power of the ratio between its
    # likelihood under the label and the labels' average (the mean of their scores). 0: the model's own likelihoods.
    guidance: float = Field(default=1.0, ge=0, le=20)
    # Maximum size of a member's file; further rows are left out.
    max_bytes: int = Field(default=4 * 1024 * 1024, ge=1, le=MAX_CORPUS_BYTES)
    # Standard deviation of the discrete Gaussian on each label's count, charged separately. None: equal counts.
    histogram_std: float | None = Field(default=None, ge=1 / 16, le=65_536)


class LabelCount(Part):
    """The number of rows with one label. It repeats what anybody can count in the file."""

    label: Label
    rows: int = Field(ge=0)


class CorpusStatement(Document):
    """What a member states about its file: canonical JSON, signed with its certificate's key (`signed_bytes`)."""

    max_bytes: ClassVar[int] = 256 * 1024

    federation: Digest
    job: Short
    # Digest of the job's document.
    job_document: Digest
    member: Short
    # The file's SHA-256, size in bytes and number of rows.
    corpus: Digest
    bytes: int = Field(ge=1, le=MAX_CORPUS_BYTES)
    rows: int = Field(ge=1)
    labels: Annotated[tuple[LabelCount, ...], AtMost(MAX_LABELS)]
    # The round in which the generating model was trained, and the version from which that training started.
    round: int = Field(ge=1)
    version: Digest
    mechanism: Short
    variant: Literal["sound", "published"]
    promise: Promise
    # Whether labels follow a noised and charged histogram of the member's data, or occur equally often.
    histogram: Literal["noised", "even"]
    made_ms: Moment


def signed_bytes(statement: CorpusStatement) -> bytes:
    """The bytes that the member signs."""
    return _DOMAIN + statement.canonical()
