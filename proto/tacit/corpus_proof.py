"""What proves whose a file of made-up text is: its statement's signature, and the signer's certificate up to an
authority of the federation.

Who signed counts at the time when the file came, so nothing here looks at a clock: a certificate that is over by now,
and one of an authority that was retired or has ended since, prove what they proved then. So whoever has the key of any
authority that the federation ever had can make a member's statement, and nobody else can but the member.
"""

from tacit.authorities import Authorities
from tacit.identity import Certificate, CertificateInvalid, Role

__all__ = ["verify_member"]


def verify_member(certificate: bytes, authorities: Authorities, member: str) -> Certificate:
    """That an authority of the federation issued this certificate (DER) to this member.

    Raises:
        CertificateInvalid: no such certificate.
    """
    found = authorities.history.issued(certificate, (Role.MEMBER,))
    if found.identity.name != member:
        raise CertificateInvalid(f"the certificate is another one's, {found.identity.name}'s")
    return found
