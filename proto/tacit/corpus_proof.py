"""Proof of whose a file of synthetic text is: the signature on its statement, and the signer's certificate under an
authority of the federation. Also the names of the proof's files in a folder of such texts.

The signer's status at the time of the upload counts, so nothing here looks at a clock: certificates that have expired
since, and those of authorities that were retired or have expired since, still prove what they proved then. So anyone
with the key of any authority that the federation ever had can forge a member's statement; apart from the member, nobody
else can make one.
"""

from typing import Final

from cryptography.hazmat.primitives import serialization

from tacit.authorities import Authorities
from tacit.certificates import certificate_from_der
from tacit.corpus import CorpusStatement, signed_bytes
from tacit.identity import SEALING_ROLES, Certificate, CertificateInvalid, Role, verify_signature

__all__ = [
    "AUTHORITIES",
    "CERTIFICATE",
    "OPERATOR",
    "SIGNATURE",
    "STATEMENT",
    "files_beside",
    "verify_member",
    "verify_statement",
]

# One file per folder: `Authorities` in canonical form.
AUTHORITIES: Final = "authorities.json"
# Appended to the name of each member that released a file.
STATEMENT: Final = ".statement.json"
SIGNATURE: Final = ".statement.sig"
# PEM.
CERTIFICATE: Final = ".certificate.pem"

# The name of the operator's own file, generated from a published version, beside members' files. An operator signs only
# for this name, whatever name its certificate holds.
OPERATOR: Final = "operator"


def files_beside(statement: CorpusStatement, signature: bytes, certificate: bytes) -> dict[str, bytes]:
    """The files that prove whose a corpus is, by name. `certificate` is DER."""
    pem = certificate_from_der(certificate).public_bytes(serialization.Encoding.PEM)
    return {
        statement.member + STATEMENT: statement.canonical(),
        statement.member + SIGNATURE: signature,
        statement.member + CERTIFICATE: pem,
    }


def verify_member(certificate: bytes, authorities: Authorities, member: str) -> Certificate:
    """Verifies that an authority of the federation issued this certificate (DER) to this member.

    Raises:
        CertificateInvalid: it did not.
    """
    return _of_member(authorities.history.issued(certificate, (Role.MEMBER,)), member)


def verify_statement(
    statement: CorpusStatement, signature: bytes, certificate: bytes, authorities: Authorities
) -> None:
    """Verifies that a statement's signer is whom it names: the member or, for the operator's own file, an operator.

    The caller compares the statement with the file.

    Args:
        statement: the statement.
        signature: the signature on it.
        certificate: the signer's certificate, DER.
        authorities: all authorities that the federation has had.

    Raises:
        CertificateInvalid: the statement is of another federation, the certificate belongs to somebody else, or the
            signature was not made with its key.
    """
    if statement.federation != authorities.federation:
        raise CertificateInvalid("the statement and the list of authorities belong to different federations")
    roles = (Role.MEMBER, *SEALING_ROLES) if statement.member == OPERATOR else (Role.MEMBER,)
    signer = authorities.history.issued(certificate, roles)
    if signer.identity.role is Role.MEMBER:
        _of_member(signer, statement.member)
    verify_signature(signer.key, signed_bytes(statement), signature)


def _of_member(certificate: Certificate, member: str) -> Certificate:
    if certificate.identity.name != member:
        raise CertificateInvalid(f"the certificate belongs to somebody else: {certificate.identity.name}")
    return certificate
