"""Working RSA keys that no federation accepts, and certificates for them, signed as an authority would."""

import functools
from datetime import timedelta
from math import gcd

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa

from coordinator.pki import Authority
from tacit.identity import Identity, Role
from tests.support import party

__all__ = ["certificate", "giant", "odd_exponent"]


@functools.cache
def odd_exponent(bits: int = 3070) -> rsa.RSAPrivateKey:
    """A working key of 3072 bits whose public exponent has `bits` bits and is not 65537."""
    numbers = party.key(2).private_numbers()
    order = (numbers.p - 1) * (numbers.q - 1)
    exponent = (1 << (bits - 1)) + 1
    while gcd(exponent, order) != 1 or exponent == 65537:
        exponent += 2
    secret = pow(exponent, -1, order)
    public = rsa.RSAPublicNumbers(exponent, numbers.public_numbers.n)
    return rsa.RSAPrivateNumbers(
        numbers.p, numbers.q, secret, secret % (numbers.p - 1), secret % (numbers.q - 1), numbers.iqmp, public
    ).private_key()


def giant(bits: int = 16_384) -> rsa.RSAPublicKey:
    """A public key of this size, made without its factors: quick to make, and as slow to use as a real one."""
    return rsa.RSAPublicNumbers(65537, (1 << (bits - 1)) + 1).public_key()


def certificate(public: rsa.RSAPublicKey, *, of: Authority | None = None) -> x509.Certificate:
    """A member's certificate for any key, as a hostile authority or one without rules would sign it."""
    of = of or party.authority()
    uri = Identity(of.federation, Role.MEMBER, "north").uri
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tacit member north")]))
        .issuer_name(of.certificate.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(party.present() - timedelta(minutes=5))
        .not_valid_after(party.present() + timedelta(days=14))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .sign(of.key, hashes.SHA256())
    )
