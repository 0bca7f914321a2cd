"""Made-up text that members give away: what a job orders, and what a member says of the file that it sends.

The order stands in the job's document, so that a member's policy can judge it before any data is read. The statement
goes with the file; the coordinator keeps it, signed, as where each row of a training corpus comes from.
"""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from tacit.documents import AtMost, Digest, Document, Label, Part, Short
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

# Of one member's file: what the coordinator's disk and a member's reading can bear.
MAX_CORPUS_BYTES: Final = 64 * 1024 * 1024

# Guided texts need a decoder for each label, each with scores of every word: what memory and patience can bear.
MAX_GUIDED_LABELS: Final = 256

# No receipt, no statement of the aggregation, no TLS handshake that a member's key signs begins like this.
_DOMAIN: Final = b"tacit/corpus/v1\n"

# What stands behind the texts: (epsilon, delta) as the member's ledger has it, or nothing at all.
Promise = Literal["differentially-private", "none"]


class CorpusOrder(Part):
    """What a job that trains an `rvae` makes of it once its last round is done."""

    # members: each makes texts up from the last model that it trained itself, reads them, and may keep them;
    # operator: the operator makes them up from the published model, and no member gives anything away.
    source: Literal["members", "operator"] = "members"
    # Of each member, or of the operator.
    texts: int = Field(default=1000, ge=1, le=100_000)
    # Scores are divided by it, after guidance.
    temperature: float = Field(default=1.0, ge=0.05, le=20)
    # Only so many of the best words are drawn from; None: all.
    top_k: int | None = Field(default=None, ge=1, le=4000)
    # How much more a text is to be of its label: each word's likelihood is multiplied by this power of how much better
    # the label likes it than labels do on average. 0: as the model has them.
    guidance: float = Field(default=1.0, ge=0, le=20)
    # Of a member's file: what is beyond is left out.
    max_bytes: int = Field(default=4 * 1024 * 1024, ge=1, le=MAX_CORPUS_BYTES)
    # Deviation of the discrete Gaussian on each label's count, one charge of its own; None: labels in equal parts.
    histogram_std: float | None = Field(default=None, ge=1 / 16, le=65_536)


class LabelCount(Part):
    """Rows of one label in the file itself, which is there for everybody to count."""

    label: Label
    rows: int = Field(ge=0)


class CorpusStatement(Document):
    """What a member says of its file: canonical JSON, signed with the key of its certificate (`signed_bytes`)."""

    max_bytes: ClassVar[int] = 256 * 1024

    federation: Digest
    job: Short
    # Digest of the job's document.
    job_document: Digest
    member: Short
    # SHA-256 of the file, its bytes and its rows.
    corpus: Digest
    bytes: int = Field(ge=1, le=MAX_CORPUS_BYTES)
    rows: int = Field(ge=1)
    labels: Annotated[tuple[LabelCount, ...], AtMost(MAX_LABELS)]
    # The round in which the model that made it was trained, and the version that this training began from.
    round: int = Field(ge=1)
    version: Digest
    mechanism: Short
    variant: Literal["sound", "published"]
    promise: Promise
    # Whether the labels follow a histogram of the member's data, noised and charged, or stand there equally often.
    histogram: Literal["noised", "even"]
    made_ms: int = Field(ge=0, le=2**63 - 1)


def signed_bytes(statement: CorpusStatement) -> bytes:
    """What the member's signature is over."""
    return _DOMAIN + statement.canonical()
