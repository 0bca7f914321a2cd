"""Receipts: what left this machine in one attempt, under which noise, with whom, and what came back; and which file of
made-up text left it (`CorpusReceipt`), which belongs to no attempt and is kept as attempt 0 of its model's round.

A receipt is a file of canonical JSON (`Receipt`, `CorpusReceipt`) with a signature beside it: RSA-PSS, SHA-256, MGF1
with SHA-256, salt of 32 bytes, over the file as it is, by the key of the member's certificate; so `openssl dgst
-verify` checks it. HOME/receipts holds

    JOB/ROUND.ATTEMPT.sent.json        the receipt from before the first byte left (outcome `sending`)
    JOB/ROUND.ATTEMPT.json             the receipt of how the attempt ended
    JOB/ROUND.ATTEMPT[.sent].sig       its signature, raw
    certificates/FINGERPRINT.pem       certificates that signed receipts, and their authorities, by SHA-256
    certificates/FEDERATION.authorities    how the authorities of a federation that has had several follow on one
                                       another (`tacit.authorities`, JSON): a later one's certificates count by it

A receipt names the one before it in its ledger, and the ledger's chain holds the digest of each. Its file comes first
and the ledger's record second. After a crash between the two, `ReceiptBook.recover` takes the receipt into the chain.

Nothing else that this key signs begins with the first byte of a receipt, `{`: statements of the aggregation begin with
`S` (secure_agg.transcript), those of made-up text with `t` (tacit.corpus), TLS 1.3 with a space (RFC 8446, section
4.4.3), a certificate request with 0x30.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Final, Literal, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from pydantic import Field, StringConstraints

from edge_client.ledger.store import LedgerError
from learning.accounting.events import PrivacyEvent
from tacit.authorities import Authorities
from tacit.documents import AtMost, Digest, Document, Part, Short
from tacit.identity import CertificateInvalid, Role, Trust, federation_of, verify_signature
from tacit.limits import MAX_MEMBERS
from tacit.mechanism import Mechanism
from tacit.reading import json_values

__all__ = [
    "HISTOGRAM",
    "NO_ATTEMPT",
    "SENDING",
    "AnyReceipt",
    "CertificateMissing",
    "CorpusReceipt",
    "GroupNumbers",
    "Party",
    "Receipt",
    "ReceiptInvalid",
    "Segment",
    "SparseNumbers",
    "certificate_from",
    "check_receipt",
    "receipt_from",
]

# Outcome of the receipt from before the first byte left; the other one of its attempt says how that ended.
SENDING = "sending"
# What is charged, or given away, outside every attempt; attempts begin with 1.
NO_ATTEMPT: Final = 0
# What the ledger calls the charge of a noised histogram of labels, in the place of a mechanism.
HISTOGRAM: Final = "label-histogram"

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
_Number = Annotated[int, Field(ge=0, le=2**63 - 1)]


class ReceiptInvalid(LedgerError):
    """A receipt that proves nothing. The text says why."""


class CertificateMissing(ReceiptInvalid):
    """The certificate that a receipt was signed under is not there."""


class Segment(Part):
    """A named stretch of the masked vector."""

    name: Short
    # Its length, in values of the ring.
    values: Annotated[int, Field(ge=0)]


class Party(Part):
    """A member of the cohort, and the SHA-256 fingerprint of its certificate."""

    member: Short
    certificate: Digest


class SparseNumbers(Part):
    """The sparse graph of an attempt above 200 members: with the cohort's size they give `honest` again
    (`secure_agg.SparseGraph`).
    """

    degree: _Number
    corrupt_millionths: _Number
    lost_millionths: _Number
    sigma: _Number
    absent: _Number


class GroupNumbers(Part):
    """The split of an attempt's cohort into groups, `threshold` and `honest` being of each; with the cohort's size they
    give `honest` again (`secure_agg.GroupedGraph`).
    """

    groups: _Number
    least: _Number
    sigma: _Number
    absent: _Number


class Receipt(Document):
    """One attempt, as this member saw it. Digests are SHA-256."""

    # With a cohort of `MAX_MEMBERS`, whose names are the longest.
    max_bytes: ClassVar[int] = 4 * 1024 * 1024

    kind: Literal["tacit-receipt"] = "tacit-receipt"
    at_ms: _Number
    # Fingerprint of the authority's certificate, by which the cohort's certificates were checked.
    federation: Digest
    member: Short
    job: _Name
    round: _Number
    attempt: _Number
    # Digest of the job document, and of the version that the update started from.
    job_document: Digest
    version: Digest
    mechanism: Mechanism
    # What the ledger was charged, and its reservation there; None under a mechanism that promises nothing.
    event: PrivacyEvent | None
    reservation: Annotated[int, Field(ge=1)] | None
    # What left: digest and length of the masked vector, packed as it was sent, and its segments in order.
    vector: Digest
    vector_bytes: _Number
    # b, the ring's width: bits a value of the vector.
    bits: Annotated[int, Field(ge=2, le=32)]
    segments: Annotated[tuple[Segment, ...], AtMost(64)]
    # The roster U1, which may be smaller than the n members that the attempt was opened for.
    cohort: Annotated[tuple[Party, ...], AtMost(MAX_MEMBERS)]
    cohort_size: _Number
    # n_C, t and h of the attempt: members assumed to be the coordinator's, threshold, honest inputs in every sum.
    assumed_corrupt: _Number
    threshold: _Number
    honest: _Number
    # None: the complete graph.
    sparse_graph: SparseNumbers | None
    # None: one sum.
    groups: GroupNumbers | None = None
    # U3, whose inputs the sum holds; None where this member never learned it.
    survivors: Annotated[tuple[Short, ...], AtMost(MAX_MEMBERS)] | None
    outcome: Short
    # Digest of the sum that came back; of groups, of the digests of all of theirs.
    result: Digest | None
    # 32 hexadecimal digits, and the digest of the receipt before this one there (zeros in the first).
    ledger: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    previous: Digest

    @property
    def certificate(self) -> bytes | None:
        """Fingerprint of the certificate that this member took part with; None where the cohort does not hold it."""
        return next((party.certificate for party in self.cohort if party.member == self.member), None)


class CorpusReceipt(Document):
    """One file of made-up text that this member gives away. Digests are SHA-256."""

    kind: Literal["tacit-corpus-receipt"] = "tacit-corpus-receipt"
    at_ms: _Number
    federation: Digest
    member: Short
    # Fingerprint of the certificate that this receipt is signed under.
    certificate: Digest
    job: _Name
    # The round in which the model that made the file was trained, and the version that this training began from.
    round: _Number
    attempt: Literal[0] = 0
    job_document: Digest
    version: Digest
    mechanism: Short
    # The reservation that this training was charged to; None under a mechanism that promises nothing.
    trained: Annotated[int, Field(ge=1)] | None
    # What the histogram of its labels was charged, and its reservation; None: labels stand there equally often.
    event: PrivacyEvent | None
    reservation: Annotated[int, Field(ge=1)] | None
    # What left: the file, and what the member says of it (`tacit.corpus.CorpusStatement`).
    corpus: Digest
    bytes: _Number
    rows: _Number
    statement: Digest
    outcome: Short
    ledger: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    previous: Digest


AnyReceipt = Receipt | CorpusReceipt


def receipt_from(data: bytes, *, what: str = "the receipt") -> AnyReceipt:
    """A receipt of either kind. Raises: DocumentInvalid: it is none."""
    values = json_values(data, Receipt.max_bytes, what)
    if isinstance(values, dict) and values.get("kind") == "tacit-corpus-receipt":
        return CorpusReceipt.from_json(data, what=what)
    return Receipt.from_json(data, what=what)


class _Certificates(Protocol):
    def __call__(self, fingerprint: bytes, /) -> bytes: ...


def _one_authority(_federation: bytes) -> Authorities | None:
    return None


def check_receipt(
    receipt: AnyReceipt,
    data: bytes,
    signature: bytes,
    certificates: _Certificates,
    authorities: Callable[[bytes], Authorities | None] = _one_authority,
) -> None:
    """That the member named in a receipt signed it. data: the file's bytes. certificates: DER by fingerprint.
    authorities: of a federation, by its name, where it has had several.

    The certificate is the one the cohort holds for the member, issued by an authority of the federation and valid when
    the receipt was made; everything is checked offline.

    Raises:
        ReceiptInvalid: not canonical, a certificate is missing or does not belong, or the signature is of other bytes.
    """
    if receipt.canonical() != data:
        raise ReceiptInvalid("it is not in canonical form")
    fingerprint = receipt.certificate
    if fingerprint is None:
        raise ReceiptInvalid(f"its cohort does not hold {receipt.member}")
    der, root = certificates(fingerprint), x509.load_der_x509_certificate(certificates(receipt.federation))
    if federation_of(root) != receipt.federation:
        raise ReceiptInvalid("the authority's certificate is another federation's")
    when = datetime.fromtimestamp(receipt.at_ms / 1000, UTC)
    listed = authorities(receipt.federation)
    # A retired authority, too: it counted then.
    history = Trust.in_root(root) if listed is None else listed.history
    try:
        verified = history.verify(der, role=Role.MEMBER, now=when)
        if verified.identity.name != receipt.member:
            raise ReceiptInvalid(f"its certificate belongs to {verified.identity.name}, not to {receipt.member}")
        verify_signature(verified.key, data, signature)
    except CertificateInvalid as error:
        raise ReceiptInvalid(str(error)) from error


def certificate_from(fingerprint: str, pem: bytes) -> bytes:
    """DER of a stored certificate. fingerprint: hexadecimal. Raises: CertificateMissing: it is none, or another one."""
    try:
        found = _der(pem)
    except ValueError as error:
        raise CertificateMissing(f"what is stored as {fingerprint} is no certificate") from error
    if _fingerprint(found).hex() != fingerprint:
        raise CertificateMissing(f"what is stored as {fingerprint} is another certificate")
    return found


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def _fingerprint(der: bytes) -> bytes:
    return x509.load_der_x509_certificate(der).fingerprint(hashes.SHA256())
