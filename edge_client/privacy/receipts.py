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
and the ledger's record second: a crash between leaves a receipt that `recover` takes into the chain at the next start.

Nothing else that this key signs begins with the first byte of a receipt, `{`: statements of the aggregation begin with
`S` (secure_agg.transcript), those of made-up text with `t` (tacit.corpus), TLS 1.3 with a space (RFC 8446, section
4.4.3), a certificate request with 0x30.
"""

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from pydantic import Field, StringConstraints

from edge_client.privacy.events import PrivacyEvent
from edge_client.privacy.faults import Faults, durable_file, no_faults, sync_folder
from edge_client.privacy.history import LOST, LedgerRolledBack
from edge_client.privacy.store import LedgerError, LedgerUnwritable
from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Part, Short
from tacit.identity import CertificateInvalid, Role, Trust, federation_of, verify_signature
from tacit.limits import MOST_MEMBERS
from tacit.mechanism import Mechanism
from tacit.reading import json_values

if TYPE_CHECKING:
    from edge_client.privacy.ledger import Ledger

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
    "ReceiptBook",
    "ReceiptInvalid",
    "Segment",
    "Signer",
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

    # With a cohort of `MOST_MEMBERS`, whose names are the longest.
    most_bytes: ClassVar[int] = 4 * 1024 * 1024

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
    cohort: Annotated[tuple[Party, ...], AtMost(MOST_MEMBERS)]
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
    survivors: Annotated[tuple[Short, ...], AtMost(MOST_MEMBERS)] | None
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
    values = json_values(data, Receipt.most_bytes, what)
    if isinstance(values, dict) and values.get("kind") == "tacit-corpus-receipt":
        return CorpusReceipt.from_json(data, what=what)
    return Receipt.from_json(data, what=what)


class Signer(Protocol):
    """What signs: `edge_client.home.MemberIdentity`."""

    @property
    def certificate(self) -> bytes:
        """DER."""

    @property
    def root_pem(self) -> bytes:
        """The authorities' certificates, PEM."""

    def sign(self, message: bytes) -> bytes:
        """RSA-PSS, SHA-256, salt of 32 bytes."""


class ReceiptBook:
    """HOME/receipts. Files are added and never changed."""

    def __init__(self, folder: Path, faults: Faults = no_faults) -> None:
        self._folder = folder
        self._faults = faults

    def write(
        self, receipt: AnyReceipt, signer: Signer, ledger: "Ledger", authorities: Authorities | None = None
    ) -> Path:
        """Signs a receipt, stores it, and takes it into the ledger's chain. Returns its file. authorities: of a
        federation that has had several.

        Raises:
            ReceiptInvalid: the cohort does not hold the signer's certificate. LedgerMisused: it does not follow.
            LedgerUnwritable: it may be tried again; a receipt whose files are there is completed at the next start.
        """
        fingerprint = _fingerprint(signer.certificate)
        if receipt.certificate != fingerprint:
            raise ReceiptInvalid(
                f"{receipt.member} takes part in {receipt.job} with another certificate than the one that would sign"
            )
        ledger.check_follows(receipt)
        signature = signer.sign(receipt.canonical())
        try:
            path = self._stored(receipt, signature, signer, authorities)
        except OSError as error:
            raise LedgerUnwritable(
                f"the receipt of {receipt.job}/{receipt.round}.{receipt.attempt} cannot be written "
                f"({error.strerror}); look at free space and the rights of {self._folder}"
            ) from error
        ledger.receipt(receipt, signature)
        return path

    def _stored(self, receipt: AnyReceipt, signature: bytes, signer: Signer, authorities: Authorities | None) -> Path:
        folders = (self._folder, self._folder / "certificates", self._folder / receipt.job)
        for folder in folders:
            if not folder.exists():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(folder.parent)
        listed = [] if authorities is None else list(authorities.roots)
        roots = (_encoded(root) for root in x509.load_pem_x509_certificates(signer.root_pem))
        for der in dict.fromkeys((signer.certificate, *roots, *listed)):
            path = self._certificate(_fingerprint(der))
            if not path.exists():
                durable_file(path, _pem(der), "certificate", self._faults)
        if authorities is not None:
            stored = self.authorities(receipt.federation)
            if stored is None or stored.number < authorities.number:
                path = self._authorities(receipt.federation)
                durable_file(path, authorities.canonical(), "certificate", self._faults)
        path = self.path(receipt)
        # The signature first: a receipt that is there can be checked.
        durable_file(path.with_suffix(".sig"), signature, "signature", self._faults)
        durable_file(path, receipt.canonical(), "receipt", self._faults)
        return path

    def path(self, receipt: AnyReceipt) -> Path:
        """Where its file is, or belongs. Another one of the same numbers, from an earlier federation, stays there."""
        name = f"{receipt.round}.{receipt.attempt}{'.sent' if receipt.outcome == SENDING else ''}"
        plain = self._folder / receipt.job / f"{name}.json"
        if not plain.exists() or plain.read_bytes() == receipt.canonical():
            return plain
        return plain.with_name(f"{name}.{receipt.digest().hex()[:8]}.json")

    def candidates(self, job: str, round: int, attempt: int) -> Iterator[Path]:
        """Files that may hold a receipt of an attempt."""
        folder = self._folder / job
        yield folder / f"{round}.{attempt}.json"
        yield from sorted(folder.glob(f"{round}.{attempt}.*.json"))

    def files(self) -> Iterator[Path]:
        """All receipts' files."""
        if self._folder.exists():
            for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
                yield from sorted(folder.glob("*.json"))

    def certificate(self, fingerprint: bytes) -> bytes:
        """DER. Raises: CertificateMissing: it is not there, or it is another one."""
        path = self._certificate(fingerprint)
        try:
            return certificate_from(fingerprint.hex(), path.read_bytes())
        except (OSError, CertificateMissing) as error:
            raise CertificateMissing(f"{path} is missing or damaged; put it back from a copy") from error

    def authorities(self, federation: bytes) -> Authorities | None:
        """Of a federation that has had several; None where it is not there or proves nothing."""
        try:
            return Authorities.read(self._authorities(federation).read_bytes(), federation=federation)
        except (OSError, AuthoritiesInvalid):
            return None

    def certificates(self) -> Iterator[tuple[str, str]]:
        """Fingerprint in hexadecimal and PEM of each that is stored."""
        for path in sorted((self._folder / "certificates").glob("*.pem")):
            yield path.stem, path.read_text()

    def recover(self, ledger: "Ledger") -> tuple[Path, ...]:
        """At the start: takes receipts into the chain that a crash left outside. Returns their files.

        Raises:
            LedgerRolledBack: one of them is of a reservation that this ledger does not know: it is an older copy.
            LedgerUnwritable.
        """
        waiting: dict[bytes, tuple[Path, AnyReceipt, bytes]] = {}
        for path in self.files():
            try:
                data = path.read_bytes()
                if ledger.holds(hashlib.sha256(data).digest()):
                    continue
                receipt = receipt_from(data, what=str(path))
                # Before the signature is looked at, which takes several times as long as everything else.
                if receipt.ledger != ledger.id.hex():
                    continue
                signature = path.with_suffix(".sig").read_bytes()
                check_receipt(receipt, data, signature, self.certificate, self.authorities)
            except (DocumentInvalid, OSError, ReceiptInvalid):
                continue  # `ledger verify` names it.
            newest = max(receipt.reservation or 0, (isinstance(receipt, CorpusReceipt) and receipt.trained) or 0)
            if newest > ledger.sequence:
                raise LedgerRolledBack(
                    f"{path} is the receipt of record {newest} of ledger {receipt.ledger}, but "
                    f"{ledger.path} ends at record {ledger.sequence}: an older copy was put in its place. Put the "
                    f"newer one back. {LOST}"
                )
            waiting[receipt.previous] = (path, receipt, signature)
        adopted = []
        while (found := waiting.pop(ledger.last_receipt, None)) is not None:
            path, receipt, signature = found
            ledger.receipt(receipt, signature)
            adopted.append(path)
        return tuple(adopted)

    def _certificate(self, fingerprint: bytes) -> Path:
        return self._folder / "certificates" / f"{fingerprint.hex()}.pem"

    def _authorities(self, federation: bytes) -> Path:
        return self._folder / "certificates" / f"{federation.hex()}.authorities"


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


def _encoded(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def _pem(der: bytes) -> bytes:
    return x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)


def _fingerprint(der: bytes) -> bytes:
    return x509.load_der_x509_certificate(der).fingerprint(hashes.SHA256())
