"""A party reads its own private key: quickly, and never a damaged one."""

import base64

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tacit.identity import key_pem, own_key
from tests.support import party


def numbers_of(key):
    """The key's numbers by name."""
    private = key.private_numbers()
    parts = {name: getattr(private, name) for name in ("p", "q", "d", "dmp1", "dmq1", "iqmp")}
    return parts | {"n": private.public_numbers.n, "e": private.public_numbers.e}


def der(tag, content):
    """An element of DER, as ITU-T X.690 encodes it."""
    size = len(content)
    octets = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, *([size] if size < 128 else [128 + len(octets), *octets])]) + content


def pem_of(parts):
    """PEM of an RSA key with these numbers, written by hand because libraries refuse some."""
    order = [0, *(parts[name] for name in ("n", "e", "d", "p", "q", "dmp1", "dmq1", "iqmp"))]
    numbers = [number.to_bytes(number.bit_length() // 8 + 1, "big") for number in order]
    whole = der(0x30, b"".join(der(0x02, each) for each in numbers))
    return b"-----BEGIN RSA PRIVATE KEY-----\n" + base64.encodebytes(whole) + b"-----END RSA PRIVATE KEY-----\n"


@pytest.mark.parametrize("passphrase", [None, b"a secret"])
def test_what_was_written_is_read(passphrase):
    key = party.key(2)
    read = own_key(key_pem(key, passphrase), passphrase)
    assert read.private_numbers() == key.private_numbers()
    with pytest.raises((ValueError, TypeError)):
        own_key(key_pem(key, b"a secret"), b"another" if passphrase else None)


def test_other_kinds_of_keys_are_read_for_the_caller_to_judge():
    made = Ed25519PrivateKey.generate()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    assert own_key(made.private_bytes(*form)).public_key() == made.public_key()


@pytest.mark.parametrize("name", ["n", "p", "q", "d", "dmp1", "dmq1", "iqmp", "e"])
def test_a_changed_number_is_found(name):
    parts = numbers_of(party.key(2))
    assert own_key(pem_of(parts)).public_key() == party.key(2).public_key()
    with pytest.raises(ValueError, match="damaged"):
        own_key(pem_of(parts | {name: parts[name] + 2}))


def test_a_factor_of_one_is_refused():
    parts = numbers_of(party.key(2))
    with pytest.raises(ValueError, match=r"damaged|nvalid"):
        own_key(pem_of(parts | {"p": 1, "q": parts["n"]}))


def test_numbers_of_two_keys_do_not_belong_together():
    one, other = numbers_of(party.key(2)), numbers_of(party.key(3))
    with pytest.raises(ValueError, match="damaged"):
        own_key(pem_of(one | {name: other[name] for name in ("d", "dmp1", "dmq1", "iqmp")}))


def test_primality_is_not_tested_again(monkeypatch):
    asked = []
    read = serialization.load_pem_private_key

    def reading(data, password, **how):
        asked.append(how)
        return read(data, password, **how)

    monkeypatch.setattr(serialization, "load_pem_private_key", reading)
    own_key(key_pem(party.key(2)))
    assert asked == [{"unsafe_skip_rsa_key_validation": True}]
