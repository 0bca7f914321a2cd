"""Writes, signs and finds receipts in HOME/receipts, and adds them to the ledger's chain."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from edge_client.ledger.history import LOST, LedgerRolledBack
from edge_client.ledger.ledger import Ledger
from edge_client.ledger.receipts import (
    SENDING,
    AnyReceipt,
    CertificateMissing,
    CorpusReceipt,
    ReceiptInvalid,
    certificate_from,
    check_receipt,
    receipt_from,
)
from edge_client.ledger.store import LedgerUnwritable
from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.certificates import certificate_from_der, certificates_from_pem
from tacit.documents import DocumentInvalid
from toolkit.durable import Faults, durable_file, durable_files, make_folder, no_faults

__all__ = ["ReceiptBook", "Signer"]


class Signer(Protocol):
    """Signs receipts; `edge_client.identity.home.MemberIdentity` is one."""

    @property
    def certificate(self) -> bytes:
        """The signer's certificate, DER."""

    @property
    def root_pem(self) -> bytes:
        """The authorities' certificates, PEM."""

    def sign(self, message: bytes) -> bytes:
        """Signs a message with RSA-PSS, SHA-256, a salt of 32 bytes."""


class ReceiptBook:
    """The folder HOME/receipts. Files are added, never changed."""

    def __init__(self, folder: Path, faults: Faults = no_faults) -> None:
        self._folder = folder
        self._faults = faults

    def write(
        self, receipt: AnyReceipt, signer: Signer, ledger: Ledger, authorities: Authorities | None = None
    ) -> Path:
        """Signs a receipt, stores it, and adds it to the ledger's chain.

        Args:
            receipt: what to sign.
            signer: this member.
            ledger: the ledger that the receipt names.
            authorities: the list of a federation that has had several authorities.

        Returns:
            The receipt's file.

        Raises:
            ReceiptInvalid: the receipt names another certificate than the signer's.
            LedgerMisused: the receipt does not follow the newest one of the ledger.
            LedgerUnwritable: the call may be repeated. If the files are there, the next start completes the receipt.
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
                f"({error.strerror}); check free space and the permissions of {self._folder}"
            ) from error
        ledger.receipt(receipt, signature)
        return path

    def _stored(self, receipt: AnyReceipt, signature: bytes, signer: Signer, authorities: Authorities | None) -> Path:
        for folder in ("certificates", receipt.job):
            make_folder(self._folder / folder)
        listed = [] if authorities is None else list(authorities.roots)
        roots = (_encoded(root) for root in certificates_from_pem(signer.root_pem))
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
        # The signature comes first, so that every receipt on the disk can be checked.
        signed = (path.with_suffix(".sig"), signature, "signature")
        durable_files((signed, (path, receipt.canonical(), "receipt")), self._faults)
        return path

    def path(self, receipt: AnyReceipt) -> Path:
        """The path of a receipt's file. A receipt with the same numbers, from an earlier federation, keeps its file."""
        name = f"{receipt.round}.{receipt.attempt}{'.sent' if receipt.outcome == SENDING else ''}"
        plain = self._folder / receipt.job / f"{name}.json"
        if not plain.exists() or plain.read_bytes() == receipt.canonical():
            return plain
        return plain.with_name(f"{name}.{receipt.digest().hex()[:8]}.json")

    def candidates(self, job: str, round: int, attempt: int) -> Iterator[Path]:
        """Yields files that may hold a receipt of an attempt."""
        folder = self._folder / job
        yield folder / f"{round}.{attempt}.json"
        yield from sorted(folder.glob(f"{round}.{attempt}.*.json"))

    def files(self) -> Iterator[Path]:
        """Yields the files of all receipts."""
        if self._folder.exists():
            for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
                yield from sorted(folder.glob("*.json"))

    def certificate(self, fingerprint: bytes) -> bytes:
        """The stored certificate with a fingerprint, DER.

        Raises:
            CertificateMissing: it is not there, or the file holds another one.
        """
        path = self._certificate(fingerprint)
        try:
            return certificate_from(fingerprint.hex(), path.read_bytes())
        except (OSError, CertificateMissing) as error:
            raise CertificateMissing(f"{path} is missing or damaged; put it back from a copy") from error

    def authorities(self, federation: bytes) -> Authorities | None:
        """The stored list of a federation that has had several authorities. None: it is missing or not valid."""
        try:
            return Authorities.read(self._authorities(federation).read_bytes(), federation=federation)
        except (OSError, AuthoritiesInvalid):
            return None

    def certificates(self) -> Iterator[tuple[str, str]]:
        """Yields fingerprint (hexadecimal) and PEM of each stored certificate."""
        for path in sorted((self._folder / "certificates").glob("*.pem")):
            yield path.stem, path.read_text()

    def recover(self, ledger: Ledger) -> tuple[Path, ...]:
        """Adds receipts to the chain, at the start, that a crash left out of it.

        Returns:
            Their files.

        Raises:
            LedgerRolledBack: a receipt names a reservation that this ledger does not have: the ledger is an older copy.
            LedgerUnwritable: a receipt could not be added.
        """
        waiting: dict[bytes, tuple[Path, AnyReceipt, bytes]] = {}
        for path in self.files():
            try:
                data = path.read_bytes()
                if ledger.holds(hashlib.sha256(data).digest()):
                    continue
                receipt = receipt_from(data, what=str(path))
                # Checked first, because checking the signature takes several times as long as everything else.
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
                    f"{ledger.path} ends at record {ledger.sequence}: an older copy replaced it. Put the newer one "
                    f"back. {LOST}"
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


def _encoded(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def _pem(der: bytes) -> bytes:
    return certificate_from_der(der).public_bytes(serialization.Encoding.PEM)


def _fingerprint(der: bytes) -> bytes:
    return certificate_from_der(der).fingerprint(hashes.SHA256())
