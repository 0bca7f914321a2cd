"""Receipts: signed records of what left this machine.

A `Receipt` covers one attempt: what left, under which noise, with whom, and what came back. A `CorpusReceipt` covers
one file of synthetic text. It belongs to no attempt, and is stored as attempt 0 of its model's round.

A receipt is a file of canonical JSON with a signature beside it: RSA-PSS, SHA-256, MGF1 with SHA-256, a salt of 32
bytes, over the file's bytes, by the key of the member's certificate. So `openssl dgst -verify` checks it. HOME/receipts
holds

    JOB/ROUND.ATTEMPT.sent.json        the receipt from before the first byte left (outcome `sending`)
    JOB/ROUND.ATTEMPT.json             the receipt of how the attempt ended
    JOB/ROUND.ATTEMPT[.sent].sig       its signature, raw
    certificates/FINGERPRINT.pem       certificates that signed receipts, and their authorities, by SHA-256
    certificates/FEDERATION.authorities    how the authorities of a federation that has had several follow one another
                                       (`tacit.authorities`, JSON): it makes a later one's certificates valid

A receipt names the one before it in its ledger, and the ledger's chain holds the digest of each. The file is written
first, the ledger's record second. After a crash between the two, `ReceiptBook.recover` adds the receipt to the chain.

Nothing else that this key signs begins with the first byte of a receipt, `{`: statements of the aggregation begin with
`S` (secure_agg.transcript), those of synthetic text with `t` (tacit.corpus), TLS 1.3 with a space (RFC 8446, section
4.4.3), a certificate request with 0x30.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Final, Literal, Protocol

from cryptography.hazmat.primitives import hashes, serialization
from pydantic import Field, StringConstraints

from edge_client.ledger.store import LedgerError
from learning.accounting.events import PrivacyEvent
from tacit.authorities import Authorities
from tacit.certificates import certificate_from_der, certificate_from_pem
from tacit.documents import AtMost, Digest, Document, Moment, Part, Short
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

# Outcome of the receipt from before the first byte left. The attempt's other receipt says how it ended.
SENDING = "sending"
# Attempt number of a charge or release outside every attempt; attempts begin with 1.
NO_ATTEMPT: Final = 0
# Stands for the mechanism in the ledger's record of a charge for a noised histogram of labels.
HISTOGRAM: Final = "label-histogram"

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
_Number = Annotated[int, Field(ge=0, le=2**63 - 1)]


class ReceiptInvalid(LedgerError):
    """A receipt does not prove what it says. The text says why."""


class CertificateMissing(ReceiptInvalid):
    """The certificate of a receipt's signer, or of its authority, is not there."""


class Segment(Part):
    """A named range of the masked vector."""

    name: Short
    # Its length, in values of the ring.
    values: Annotated[int, Field(ge=0)]


class Party(Part):
    """A member of the cohort, and the SHA-256 fingerprint of its certificate."""

    member: Short
    certificate: Digest


class SparseNumbers(Part):
    """The sparse graph of an attempt above 200 members. `honest` follows from it and the cohort's size
    (`secure_agg.SparseGraph`).
    """

    degree: _Number
    corrupt_millionths: _Number
    lost_millionths: _Number
    sigma: _Number
    absent: _Number


class GroupNumbers(Part):
    """The split of an attempt's cohort into groups. `threshold` and `honest` are then those of each group; `honest`
    follows from the split and the cohort's size (`secure_agg.GroupedGraph`).
    """

    groups: _Number
    least: _Number
    sigma: _Number
    absent: _Number


class Receipt(Document):
    """One attempt, as this member saw it. Digests are SHA-256."""

    # Enough for a cohort of `MAX_MEMBERS` with the longest names.
    max_bytes: ClassVar[int] = 4 * 1024 * 1024

    kind: Literal["tacit-receipt"] = "tacit-receipt"
    at_ms: Moment
    # Fingerprint of the first authority's certificate, which names the federation.
    federation: Digest
    member: Short
    job: _Name
    round: _Number
    attempt: _Number
    # Digest of the job document, and of the version that the update started from.
    job_document: Digest
    version: Digest
    mechanism: Mechanism
    # What the ledger was charged, and the reservation's number. None: the mechanism promises nothing.
    event: PrivacyEvent | None
    reservation: Annotated[int, Field(ge=1)] | None
    # What left: digest and length of the masked vector, packed as it was sent, and its segments in order.
    vector: Digest
    vector_bytes: _Number
    # b, the ring's width: bits per value of the vector.
    bits: Annotated[int, Field(ge=2, le=32)]
    segments: Annotated[tuple[Segment, ...], AtMost(64)]
    # The roster U1, which may be smaller than the n members that the attempt was opened for.
    cohort: Annotated[tuple[Party, ...], AtMost(MAX_MEMBERS)]
    cohort_size: _Number
    # n_C, t and h of the attempt: members assumed corrupt, threshold, honest inputs in every sum.
    assumed_corrupt: _Number
    threshold: _Number
    honest: _Number
    # None: the complete graph.
    sparse_graph: SparseNumbers | None
    # None: one sum.
    groups: GroupNumbers | None = None
    # U3, whose inputs are in the sum. None: this member never learned it.
    survivors: Annotated[tuple[Short, ...], AtMost(MAX_MEMBERS)] | None
    outcome: Short
    # Digest of the sum that came back; with groups, of the digests of all their sums.
    result: Digest | None
    # The ledger's id (32 hexadecimal digits), and the digest of its receipt before this one (zeros in the first).
    ledger: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    previous: Digest

    @property
    def certificate(self) -> bytes | None:
        """Fingerprint of the certificate that this member took part with. None: it is not in the cohort."""
        return next((party.certificate for party in self.cohort if party.member == self.member), None)


class CorpusReceipt(Document):
    """One file of synthetic text that this member releases. Digests are SHA-256."""

    kind: Literal["tacit-corpus-receipt"] = "tacit-corpus-receipt"
    at_ms: Moment
    federation: Digest
    member: Short
    # Fingerprint of the certificate whose key signs this receipt.
    certificate: Digest
    job: _Name
    # The round in which the model behind the file was trained, and the version that this training started from.
    round: _Number
    attempt: Literal[0] = 0
    job_document: Digest
    version: Digest
    mechanism: Short
    # The reservation that this training was charged to. None: the mechanism promises nothing.
    trained: Annotated[int, Field(ge=1)] | None
    # What the histogram of its labels was charged, and the reservation. None: the file has each label equally often.
    event: PrivacyEvent | None
    reservation: Annotated[int, Field(ge=1)] | None
    # What left: the file, and the member's statement about it (`tacit.corpus.CorpusStatement`).
    corpus: Digest
    bytes: _Number
    rows: _Number
    statement: Digest
    outcome: Short
    ledger: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    previous: Digest


AnyReceipt = Receipt | CorpusReceipt


def receipt_from(data: bytes, *, what: str = "the receipt") -> AnyReceipt:
    """Reads a receipt of either kind.

    Raises:
        DocumentInvalid: the bytes are not a receipt.
    """
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
    """Checks offline that the member named in a receipt signed it.

    The certificate must be the one in the cohort for the member, issued by an authority of the federation, and valid
    when the receipt was made.

    Args:
        receipt: the receipt.
        data: the bytes of its file.
        signature: the signature beside it.
        certificates: returns the certificate (DER) with a fingerprint.
        authorities: returns the list of a federation that has had several authorities, by the federation's name.

    Raises:
        ReceiptInvalid: the file is not canonical, a certificate is missing or does not belong, or the signature is over
            other bytes.
    """
    if receipt.canonical() != data:
        raise ReceiptInvalid("it is not in canonical form")
    fingerprint = receipt.certificate
    if fingerprint is None:
        raise ReceiptInvalid(f"its cohort does not hold {receipt.member}")
    der, root = certificates(fingerprint), certificate_from_der(certificates(receipt.federation))
    if federation_of(root) != receipt.federation:
        raise ReceiptInvalid("the authority's certificate belongs to another federation")
    when = datetime.fromtimestamp(receipt.at_ms / 1000, UTC)
    listed = authorities(receipt.federation)
    # The history includes retired authorities, which were valid when the receipt was made.
    history = Trust.in_root(root) if listed is None else listed.history
    try:
        verified = history.verify(der, role=Role.MEMBER, now=when)
        if verified.identity.name != receipt.member:
            raise ReceiptInvalid(f"its certificate belongs to {verified.identity.name}, not to {receipt.member}")
        verify_signature(verified.key, data, signature)
    except CertificateInvalid as error:
        raise ReceiptInvalid(str(error)) from error


def certificate_from(fingerprint: str, pem: bytes) -> bytes:
    """Converts a stored certificate to DER. fingerprint: hexadecimal.

    Raises:
        CertificateMissing: the file is not a certificate, or holds another one.
    """
    try:
        found = _der(pem)
    except ValueError as error:
        raise CertificateMissing(f"the file stored as {fingerprint} is not a certificate") from error
    if _fingerprint(found).hex() != fingerprint:
        raise CertificateMissing(f"the file stored as {fingerprint} is another certificate")
    return found


def _der(pem: bytes) -> bytes:
    return certificate_from_pem(pem).public_bytes(serialization.Encoding.DER)


def _fingerprint(der: bytes) -> bytes:
    return certificate_from_der(der).fingerprint(hashes.SHA256())
