"""The authorities in the coordinator's folder: which one issues, which ones are trusted, and how one takes over from
the other.

    rotate    the next authority is made, signed by the present one, and from then on issues; both are trusted
    retire    the earlier ones are trusted no more, and their keys are removed from this machine

The server's own certificate is issued by the earliest authority that is trusted, so that members that were asleep know
it as long as that is possible; after `retire` they follow the signatures (`tacit.authorities`). An earlier authority
that has ended, or ends within the hour, counts as retired from then on: only the newest has to be valid. What is
written last is always `authorities.json`: a crash before it leaves files that the next try writes over, one after it
keys that nobody trusts and that the next `retire` removes.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509

from coordinator.config import CoordinatorFolder
from coordinator.pki import Authority, AuthorityUnusable, ends_too_soon
from tacit.authorities import MAX_ROOTS, Authorities, AuthoritiesInvalid
from tacit.identity import Trust, federation_of
from toolkit.durable import durable_file

__all__ = ["Anchors", "AuthorityBook", "load_authorities", "read_authorities", "retire", "rotate", "written"]


@dataclass(frozen=True, slots=True, repr=False)
class AuthorityBook:
    """What a coordinator certifies with, and what it believes."""

    authorities: Authorities
    # The newest: certifies members and operators.
    issuing: Authority
    # The earliest that is trusted and has not ended: certifies the server.
    serving: Authority

    @classmethod
    def of(cls, authority: Authority) -> "AuthorityBook":
        """Of a federation that has had this authority only."""
        return cls(Authorities.first(authority.certificate), authority, authority)

    @property
    def trust(self) -> Trust:
        """Whose certificates the coordinator takes: from the newest authority to the one that certifies the server."""
        known = self.authorities.trust
        return Trust(known.federation, known.roots[: known.roots.index(self.serving.certificate) + 1])

    def is_outlived(self, now: datetime) -> bool:
        """Whether the authority that certifies the server has ended while a later one goes on: read the book anew."""
        return self.serving != self.issuing and ends_too_soon(self.serving.certificate, now)

    @property
    def document(self) -> bytes:
        """What members are told: empty where there has been one authority only."""
        return self.authorities.canonical() if self.authorities.number else b""


class Anchors:
    """The book that holds at this moment. One object for all services of a coordinator; replaced as a whole."""

    def __init__(self, book: AuthorityBook) -> None:
        self.book = book

    @property
    def trust(self) -> Trust:
        """Whose certificates count now."""
        return self.book.trust

    @property
    def history(self) -> Trust:
        """Whose certificates ever counted: what the database still names of them may be exchanged for new ones."""
        return self.book.authorities.history


def load_authorities(folder: CoordinatorFolder, *, now: datetime, passphrase: bytes | None = None) -> AuthorityBook:
    """Reads and checks what `coordinator init` and `coordinator authority` have written.

    Raises:
        AuthorityUnusable: a file is missing or does not belong, the newest has expired, or the passphrase is not right.
    """
    authorities = read_authorities(folder)
    last = len(authorities.roots)
    # Of an earlier one that has ended not even the key has to be there.
    first = next(
        (n for n in range(authorities.oldest + 1, last) if not ends_too_soon(_root(authorities, n), now)), last
    )
    loaded = {
        number: Authority.load(*folder.authority_of(number), now=now, passphrase=passphrase, of=authorities.federation)
        for number in {first, last}
    }
    for number, authority in loaded.items():
        if authority.fingerprint != _fingerprint(authorities, number):
            raise AuthorityUnusable(
                f"{folder.authority_of(number)[0]} is not the authority that {folder.authorities} names; put both back "
                "from the same copy of the authority's folder"
            )
    return AuthorityBook(authorities, loaded[last], loaded[first])


def rotate(
    folder: CoordinatorFolder,
    *,
    now: datetime,
    passphrase: bytes | None = None,
    own: Authority | None = None,
    tell: Callable[[bytes, bytes], None] = lambda following, before: None,
) -> AuthorityBook:
    """Makes the next authority, or takes an institution's own; from the return on it issues.

    tell: told the fingerprints of the next one and of the present one right before the change holds; where it raises,
    nothing has changed.

    Raises:
        AuthorityUnusable: what is there cannot be read, another change is not finished, or there are too many.
    """
    book = load_authorities(folder, now=now, passphrase=passphrase)
    known = book.authorities
    if book.serving != book.issuing:
        raise AuthorityUnusable(
            "an earlier authority is trusted still: end that change first with `coordinator authority retire`"
        )
    number = len(known.roots) + 1
    if number > MAX_ROOTS:
        raise AuthorityUnusable(f"a federation has at most {MAX_ROOTS} authorities; make a new federation")
    made = Authority(own.certificate, own.key, known.federation) if own is not None else None
    made = made or Authority.create(now=now, of=known.federation, number=number)
    if known.oldest + 1 < len(known.roots):
        # They have ended: members hear with the same document that they are retired.
        known = known.without(len(known.roots) - 1, key=book.issuing.key)
    try:
        following = known.succeeded_by(made.certificate, old=book.issuing.key, new=made.key)
    except ValueError as error:
        raise AuthorityUnusable(f"this authority cannot follow the present one: {error}") from error
    made.store(*folder.authority_of(number), passphrase=passphrase)
    tell(made.fingerprint, book.issuing.fingerprint)
    durable_file(folder.authorities, following.canonical())
    _remove_keys(folder, number - 1)
    return AuthorityBook(following, made, book.issuing)


def retire(
    folder: CoordinatorFolder,
    *,
    now: datetime,
    passphrase: bytes | None = None,
    tell: Callable[[bytes, bytes], None] = lambda following, before: None,
) -> AuthorityBook:
    """Ends the trust in every authority but the newest, and removes their keys. Doing it twice changes nothing.

    tell: as of `rotate`, with the fingerprints of the newest and of the one before it; not called where they are
    retired already.

    Raises:
        AuthorityUnusable: what is there cannot be read, or there is only one.
    """
    book = load_authorities(folder, now=now, passphrase=passphrase)
    known = book.authorities
    newest = len(known.roots)
    if newest == 1:
        raise AuthorityUnusable("there is one authority only; make the next one with `coordinator authority rotate`")
    if known.oldest < newest - 1:
        known = known.without(newest - 1, key=book.issuing.key)
        tell(book.issuing.fingerprint, _fingerprint(known, newest - 1))
        durable_file(folder.authorities, known.canonical())
    _remove_keys(folder, newest)
    return AuthorityBook(known, book.issuing, book.issuing)


def read_authorities(folder: CoordinatorFolder) -> Authorities:
    """Which authorities there have been; no key is read. Raises: AuthorityUnusable."""
    path = folder.authority_certificate
    try:
        first = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise AuthorityUnusable(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AuthorityUnusable(f"{path} holds no PEM certificate; put it back from a copy") from error
    if not folder.authorities.exists():
        return Authorities.first(first)
    try:
        data = folder.authorities.read_bytes()
        return Authorities.read(data, federation=federation_of(first), what=str(folder.authorities))
    except OSError as error:
        raise AuthorityUnusable(f"{folder.authorities} cannot be read: {error.strerror}") from error
    except AuthoritiesInvalid as error:
        raise AuthorityUnusable(f"{error}; put the authority's folder back from a copy") from error


def _root(authorities: Authorities, number: int) -> x509.Certificate:
    return x509.load_der_x509_certificate(authorities.roots[number - 1])


def _fingerprint(authorities: Authorities, number: int) -> bytes:
    return federation_of(_root(authorities, number))


def _remove_keys(folder: CoordinatorFolder, before: int) -> None:
    for number in range(1, before):
        with contextlib.suppress(FileNotFoundError):
            folder.authority_of(number)[1].unlink()


def written(folder: CoordinatorFolder) -> tuple[int, int]:
    """Changes whenever the authorities do: when the document was written, and which file that is."""
    try:
        status = folder.authorities.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
