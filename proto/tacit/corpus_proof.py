"""What proves whose a file of made-up text is: its statement's signature, and the signer's certificate up to an
authority of the federation. In a folder of such files, what of that lies beside them.

Who signed counts at the time when the file came, so nothing here looks at a clock: a certificate that is over by now,
and one of an authority that was retired or has ended since, prove what they proved then. So whoever has the key of any
authority that the federation ever had can make a member's statement, and nobody else can but the member.
"""

from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from tacit.authorities import Authorities
from tacit.corpus import CorpusStatement, signed_bytes
from tacit.identity import Certificate, CertificateInvalid, Role, verify_signature

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

# Once in a folder: `Authorities`, canonical.
AUTHORITIES: Final = "authorities.json"
# Behind the name of each member that gave a file.
STATEMENT: Final = ".statement.json"
SIGNATURE: Final = ".statement.sig"
# PEM.
CERTIFICATE: Final = ".certificate.pem"

# Under which the operator's own file, made from a published version, lies beside members' files. An operator signs for
# this name and for no other, whatever its certificate calls it.
OPERATOR: Final = "operator"


def files_beside(statement: CorpusStatement, signature: bytes, certificate: bytes) -> dict[str, bytes]:
    """What lies beside a file to prove whose it is, by name. certificate: DER."""
    pem = x509.load_der_x509_certificate(certificate).public_bytes(serialization.Encoding.PEM)
    return {
        statement.member + STATEMENT: statement.canonical(),
        statement.member + SIGNATURE: signature,
        statement.member + CERTIFICATE: pem,
    }


def verify_member(certificate: bytes, authorities: Authorities, member: str) -> Certificate:
    """That an authority of the federation issued this certificate (DER) to this member.

    Raises:
        CertificateInvalid: no such certificate.
    """
    return _of_member(authorities.history.issued(certificate, (Role.MEMBER,)), member)


def verify_statement(
    statement: CorpusStatement, signature: bytes, certificate: bytes, authorities: Authorities
) -> None:
    """That who the statement names signed it: its member, or an operator of the federation for its own file. What the
    statement says is the caller's to compare with the file. certificate: DER.

    Raises:
        CertificateInvalid: it is of another federation, another one's certificate, or not signed with its key.
    """
    if statement.federation != authorities.federation:
        raise CertificateInvalid("the statement is of another federation than the list of authorities")
    roles = (Role.MEMBER, Role.OPERATOR) if statement.member == OPERATOR else (Role.MEMBER,)
    signer = authorities.history.issued(certificate, roles)
    if signer.identity.role is Role.MEMBER:
        _of_member(signer, statement.member)
    verify_signature(signer.key, signed_bytes(statement), signature)


def _of_member(certificate: Certificate, member: str) -> Certificate:
    if certificate.identity.name != member:
        raise CertificateInvalid(f"the certificate is another one's, {certificate.identity.name}'s")
    return certificate
