"""RSA keys that the tests of a run share: each takes a quarter of a second to make.

The test processes of one pytest share them through `KEPT`, a folder that pytest removes after a few more runs. Without
one, each process makes its own.
"""

import contextlib
import functools
import os
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tacit.identity import key_pem, new_key

__all__ = ["key"]

KEPT: Path | None = None


@functools.cache
def key(number: int) -> rsa.RSAPrivateKey:
    """The key with this number, the same throughout a test run."""
    if KEPT is None:
        return new_key()
    path = KEPT / f"{number}.pem"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=KEPT) as made:
            made.write(key_pem(new_key()))
            made.flush()
            # Another process may have been faster.
            with contextlib.suppress(FileExistsError):
                os.link(made.name, path)
    found = serialization.load_pem_private_key(path.read_bytes(), None, unsafe_skip_rsa_key_validation=True)
    assert isinstance(found, rsa.RSAPrivateKey)
    return found
