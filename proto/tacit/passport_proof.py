"""Makes a passport, and verifies one against the federation that the verifier names (`tacit.passport`).

`verify_passport` returns everything that does not hold, each with the name of its part, and stops only where nothing
more can be read. Every byte of the file is covered: a section by its SHA-256 in the seal, the seal by the signature,
the certificate by its SHA-256 in the seal, and the rest by comparing the file with its canonical form.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.certificates import certificate_from_pem
from tacit.documents import DocumentInvalid
from tacit.identity import SEALING_ROLES, Certificate, CertificateInvalid, sign, verify_signature
from tacit.passport import (
    ALWAYS,
    SIGNED_PREFIX,
    AuditFacts,
    ExportFacts,
    JobFacts,
    MeasurementFacts,
    Passport,
    RecordFacts,
    Seal,
    SuccessorFacts,
    VersionFacts,
    WithdrawalFacts,
)

__all__ = ["Finding", "Verified", "make_passport", "verify_passport"]


def make_passport(
    *,
    key: rsa.RSAPrivateKey,
    certificate: x509.Certificate,
    operator: str,
    authorities: Authorities,
    document: bytes,
    job: JobFacts,
    versions: Sequence[VersionFacts],
    exports: Sequence[ExportFacts],
    record: RecordFacts,
    withdrawals: Sequence[WithdrawalFacts] = (),
    audits: Sequence[AuditFacts] = (),
    measurements: Sequence[MeasurementFacts] = (),
    successors: Sequence[SuccessorFacts] = (),
) -> Passport:
    """Signs a passport.

    Args:
        key: the operator's key.
        certificate: its certificate.
        operator: the name in the certificate.
        authorities: the federation's authorities.
        document: the job document, as the coordinator stores it.
        job: the job.
        versions: the versions that it names.
        exports: the exported folders that it names.
        record: the heads of journal and roster log.
        withdrawals: the withdrawals that concern the job.
        audits: members' audits of its versions.
        measurements: what members measured of its versions under noise.
        successors: the jobs that started from one of its versions.
    """
    sections = {
        "authorities": authorities.canonical(),
        "document": document,
        "job": job.canonical(),
        "record": record.canonical(),
        **{f"version-{each.number}": each.canonical() for each in versions},
        **{f"export-{number}": each.canonical() for number, each in enumerate(exports, start=1)},
        **{f"withdrawal-{number}": each.canonical() for number, each in enumerate(withdrawals, start=1)},
        **{f"audit-{number}": each.canonical() for number, each in enumerate(audits, start=1)},
        **{f"measurement-{number}": each.canonical() for number, each in enumerate(measurements, start=1)},
        **{f"successor-{number}": each.canonical() for number, each in enumerate(successors, start=1)},
    }
    der = certificate.public_bytes(serialization.Encoding.DER)
    seal = Seal(
        federation=authorities.federation,
        job=job.name,
        operator=operator,
        certificate=hashlib.sha256(der).digest(),
        made_ms=record.made_ms,
        sections={name: hashlib.sha256(data).digest() for name, data in sections.items()},
    ).canonical()
    return Passport(
        seal=seal.decode(),
        signature=sign(key, SIGNED_PREFIX + seal),
        certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        sections={name: data.decode() for name, data in sections.items()},
    )


# ---- whether it holds --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not hold: which part of the file, and a sentence."""

    part: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The verdict on a passport: who signed it, and what does not hold. It holds if there are no findings."""

    passport: Passport | None
    seal: Seal | None
    signer: Certificate | None
    findings: tuple[Finding, ...]


def verify_passport(data: bytes, federation: bytes) -> Verified:
    """Verifies a passport against the federation that the verifier names.

    Args:
        data: the file.
        federation: SHA-256 of the federation's first authority, 32 bytes, from a source that the verifier trusts.

    Raises:
        NotAPassport: it is another file.
    """
    try:
        passport = Passport.read(data)
    except DocumentInvalid as error:
        return Verified(None, None, None, (Finding("file", f"it cannot be read: {error}"),))
    findings: list[Finding] = []
    if (at := _differs(data, passport.to_bytes())) is not None:
        findings.append(Finding("file", f"it is not in canonical form, from byte {at} on: it was edited"))
    try:
        seal = Seal.from_json(passport.seal.encode(), what="the seal")
    except DocumentInvalid as error:
        return Verified(passport, None, None, (*findings, Finding("seal", str(error))))
    findings += _sections_differ(passport, seal)
    authorities, found = _authorities(passport, federation)
    findings += found
    signer, found = _signer(passport, seal, authorities)
    findings += found
    if not findings:
        findings += _contradictions(passport, seal)
    return Verified(passport, seal, signer, tuple(findings))


def _differs(given: bytes, expected: bytes) -> int | None:
    """The index of the first byte that differs; None if the two are equal."""
    if given == expected:
        return None
    shorter = min(len(given), len(expected))
    return next((at for at in range(shorter) if given[at] != expected[at]), shorter)


def _sections_differ(passport: Passport, seal: Seal) -> Iterator[Finding]:
    for name in sorted(passport.sections.keys() | seal.sections.keys()):
        if name not in passport.sections:
            yield Finding(name, "the section is missing, and the seal names it")
        elif name not in seal.sections:
            yield Finding(name, "the section was added: the seal does not name it")
        elif hashlib.sha256(passport.section(name)).digest() != seal.sections[name]:
            yield Finding(name, "the section is not what was sealed: its SHA-256 is another one")
    for name in ALWAYS:
        if name not in seal.sections:
            yield Finding("seal", f"it names no section {name}, which every passport has")


def _authorities(passport: Passport, federation: bytes) -> tuple[Authorities | None, list[Finding]]:
    if "authorities" not in passport.sections:
        return None, []
    try:
        return Authorities.read(passport.section("authorities"), federation=federation, what="the list"), []
    except AuthoritiesInvalid as error:
        sentence = f"it does not prove the federation that you named ({federation.hex()}): {error}"
        return None, [Finding("authorities", sentence)]


def _signer(
    passport: Passport, seal: Seal, authorities: Authorities | None
) -> tuple[Certificate | None, list[Finding]]:
    try:
        certificate = certificate_from_pem(passport.certificate.encode())
    except ValueError:
        return None, [Finding("certificate", "it is not a certificate in PEM")]
    der = certificate.public_bytes(serialization.Encoding.DER)
    findings = []
    if certificate.public_bytes(serialization.Encoding.PEM).decode() != passport.certificate:
        findings.append(Finding("certificate", "its PEM was edited"))
    if hashlib.sha256(der).digest() != seal.certificate:
        findings.append(Finding("certificate", "it is not the certificate that the seal names"))
    if authorities is None:
        return None, findings
    try:
        signer = authorities.history.issued(der, SEALING_ROLES)
    except CertificateInvalid as error:
        return None, [*findings, Finding("certificate", str(error))]
    if seal.federation != authorities.federation:
        findings.append(Finding("seal", "it names another federation than its authorities"))
    if signer.identity.name != seal.operator:
        findings.append(Finding("seal", f"it names the operator {seal.operator}, the certificate names another"))
    if not signer.begins.timestamp() <= seal.made_ms / 1000 <= signer.expires.timestamp():
        findings.append(Finding("seal", "it was made while the operator's certificate was not valid"))
    try:
        verify_signature(signer.key, SIGNED_PREFIX + passport.seal.encode(), passport.signature)
    except CertificateInvalid:
        findings.append(Finding("signature", "it does not match the seal: one of the two was changed"))
    return signer, findings


def _contradictions(passport: Passport, seal: Seal) -> Iterator[Finding]:
    """What a signer's mistake would leave: sections that contradict each other."""
    try:
        job = JobFacts.from_json(passport.section("job"), what="the section job")
        record = RecordFacts.from_json(passport.section("record"), what="the section record")
        versions, exports, withdrawals = passport.versions, passport.exports, passport.withdrawals
        audits, measurements, successors = passport.audits, passport.measurements, passport.successors
    except DocumentInvalid as error:
        yield Finding("sections", str(error))
        return
    if job.name != seal.job:
        yield Finding("job", f"it is {job.name}, and the seal names {seal.job}")
    if job.document != hashlib.sha256(passport.section("document")).digest():
        yield Finding("document", "its SHA-256 is not the one that the section job names")
    if record.made_ms != seal.made_ms:
        yield Finding("record", "it was made at another time than the seal")
    if [each.number for each in versions] != list(range(job.versions_left_out, job.versions_left_out + len(versions))):
        yield Finding("versions", "a version is missing from the sequence")
    by_number: Mapping[int, VersionFacts] = {each.number: each for each in versions}
    for each in versions:
        name = f"version-{each.number}"
        if name not in passport.sections or (each.summed or 0) > (each.cohort or 0):
            yield Finding(name, "it is another version than its name says, or its sum has more members than its cohort")
        if each.entry > record.journal_entry:
            yield Finding(name, "its entry comes after the journal's head")
    for number, withdrawal in enumerate(withdrawals, start=1):
        if withdrawal.entry > record.journal_entry:
            yield Finding(f"withdrawal-{number}", "its entry comes after the journal's head")
    for number, audit in enumerate(audits, start=1):
        if audit.number not in by_number or by_number[audit.number].version != audit.version:
            yield Finding(f"audit-{number}", f"no version {audit.number} has the digest that was audited")
    for number, measured in enumerate(measurements, start=1):
        if measured.number not in by_number or by_number[measured.number].version != measured.version:
            yield Finding(f"measurement-{number}", f"no version {measured.number} has the digest that was measured")
    for number, successor in enumerate(successors, start=1):
        if successor.entry > record.journal_entry:
            yield Finding(f"successor-{number}", "its entry comes after the journal's head")
    for number, export in enumerate(exports, start=1):
        if export.averaged:
            if export.averaged[-1] != export.number or not by_number.keys() >= set(export.averaged):
                yield Finding(f"export-{number}", "a version of the average that it was made from is missing")
            continue
        if export.number not in by_number or by_number[export.number].version != export.version:
            yield Finding(f"export-{number}", f"no version {export.number} has the digest that it was made from")
