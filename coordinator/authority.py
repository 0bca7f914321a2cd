"""Manages the authorities in the coordinator's folder: which one issues, which are trusted, and how one follows
another.

    rotate    creates the next authority, signed by the current one; it issues from then on, and both are trusted
    retire    ends the trust in the earlier ones, and removes their keys from this machine

The earliest trusted authority issues the server's own certificate, so that members that were away know the issuer as
long as possible. After `retire` they follow the signatures (`tacit.authorities`). An earlier authority that has ended,
or ends within the hour, counts as retired; only the newest must be valid.

`authorities.json` is always written last. A crash before it leaves files that the next try overwrites. A crash after it
leaves keys that nobody trusts and that the next `retire` removes.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509

from coordinator.config import CoordinatorFolder
from coordinator.pki import Authority, AuthorityUnusable, ends_too_soon
from tacit.authorities import MAX_ROOTS, Authorities, AuthoritiesInvalid
from tacit.certificates import certificate_from_der, certificate_from_pem
from tacit.identity import Trust, federation_of
from toolkit.durable import durable_file

__all__ = [
    "Anchors",
    "AuthorityBook",
    "check_not_behind",
    "load_authorities",
    "read_authorities",
    "retire",
    "rotate",
    "written",
]


@dataclass(frozen=True, slots=True, repr=False)
class AuthorityBook:
    """The authorities that a coordinator issues with, and those that it trusts."""

    authorities: Authorities
    # The newest one, which certifies members and operators.
    issuing: Authority
    # The earliest one that is trusted and has not ended, which certifies the server.
    serving: Authority

    @classmethod
    def of(cls, authority: Authority) -> "AuthorityBook":
        """Returns the book of a federation that has had only this authority."""
        return cls(Authorities.first(authority.certificate), authority, authority)

    @property
    def trust(self) -> Trust:
        """The authorities whose certificates count, from the newest one to the one that certifies the server."""
        known = self.authorities.trust
        return Trust(known.federation, known.roots[: known.roots.index(self.serving.certificate) + 1])

    def is_outlived(self, now: datetime) -> bool:
        """Returns whether to read the book again, as the authority that certifies the server has ended."""
        return self.serving != self.issuing and ends_too_soon(self.serving.certificate, now)

    @property
    def document(self) -> bytes:
        """The list for members; empty if there has been only one authority."""
        return self.authorities.canonical() if self.authorities.number else b""


class Anchors:
    """Holds the current book for all services of a coordinator. The book is replaced as a whole."""

    def __init__(self, book: AuthorityBook) -> None:
        self.book = book

    @property
    def trust(self) -> Trust:
        """The authorities whose certificates count now."""
        return self.book.trust

    @property
    def history(self) -> Trust:
        """The authorities whose certificates ever counted. Certificates on record from them can be renewed."""
        return self.book.authorities.history


def load_authorities(
    folder: CoordinatorFolder, *, now: datetime, passphrase: bytes | None = None, elsewhere: bool = False
) -> AuthorityBook:
    """Reads and checks the files that `coordinator init` and `coordinator authority` wrote.

    Args:
        folder: The coordinator's folder.
        now: The current time.
        passphrase: The passphrase of the keys, if they are encrypted.
        elsewhere: Whether the keys are on another machine (`authority_elsewhere`).

    Raises:
        AuthorityUnusable: a file is missing or does not match, the newest authority has expired, or the passphrase is
            wrong.
    """
    authorities = read_authorities(folder)
    last = len(authorities.roots)
    # An earlier authority that has ended does not even need its key.
    first = next(
        (n for n in range(authorities.oldest + 1, last) if not ends_too_soon(_root(authorities, n), now)), last
    )
    loaded = {
        number: Authority.load(
            *folder.authority_of(number),
            now=now,
            passphrase=passphrase,
            of=authorities.federation,
            elsewhere=elsewhere,
        )
        for number in {first, last}
    }
    for number, authority in loaded.items():
        if authority.fingerprint != _fingerprint(authorities, number):
            raise AuthorityUnusable(
                f"{folder.authority_of(number)[0]} is not the authority that {folder.authorities} names; restore both "
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
    """Creates the next authority, or adopts an institution's own. It issues from then on.

    Args:
        folder: The coordinator's folder.
        now: The current time.
        passphrase: The passphrase of the keys, if they are encrypted.
        own: The institution's authority; None creates one.
        tell: Called with the fingerprints of the next and the current authority right before the change takes effect.
            If it raises, nothing has changed.

    Raises:
        AuthorityUnusable: the files cannot be read, an earlier change is not finished, or there are too many
            authorities.
    """
    book = load_authorities(folder, now=now, passphrase=passphrase)
    known = book.authorities
    if book.serving != book.issuing:
        raise AuthorityUnusable(
            "an earlier authority is still trusted; finish that change first with `coordinator authority retire`"
        )
    number = len(known.roots) + 1
    if number > MAX_ROOTS:
        raise AuthorityUnusable(f"a federation has at most {MAX_ROOTS} authorities; make a new federation")
    made = Authority(own.certificate, own.key, known.federation) if own is not None else None
    made = made or Authority.create(now=now, of=known.federation, number=number)
    if known.oldest + 1 < len(known.roots):
        # Those authorities have ended. The same document tells members that they are retired.
        known = known.without(len(known.roots) - 1, key=book.issuing.key)
    try:
        following = known.succeeded_by(made.certificate, old=book.issuing.key, new=made.key)
    except ValueError as error:
        raise AuthorityUnusable(f"this authority cannot follow the current one: {error}") from error
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
    """Ends the trust in every authority except the newest, and removes their keys. Repeating it changes nothing.

    Args:
        folder: The coordinator's folder.
        now: The current time.
        passphrase: The passphrase of the keys, if they are encrypted.
        tell: As in `rotate`, but called with the fingerprints of the newest authority and the previous one, and not if
            they are already retired.

    Raises:
        AuthorityUnusable: the files cannot be read, or there is only one authority.
    """
    book = load_authorities(folder, now=now, passphrase=passphrase)
    known = book.authorities
    newest = len(known.roots)
    if newest == 1:
        raise AuthorityUnusable("there is only one authority; create the next one with `coordinator authority rotate`")
    if known.oldest < newest - 1:
        known = known.without(newest - 1, key=book.issuing.key)
        tell(book.issuing.fingerprint, _fingerprint(known, newest - 1))
        durable_file(folder.authorities, known.canonical())
    _remove_keys(folder, newest)
    return AuthorityBook(known, book.issuing, book.issuing)


def check_not_behind(authorities: Authorities, rotated: bytes | None, retired: bytes | None) -> None:
    """Refuses a folder that lacks the newest change of authorities, as a copy on another machine may.

    Args:
        authorities: The folder's.
        rotated: By the journal, the fingerprint of the newest authority; None if there was only one.
        retired: By the journal, the fingerprint of the authority that was retired last; None if none was.

    Raises:
        AuthorityUnusable: it would certify with an authority that was replaced, or trust one that was retired.
    """
    known = [_fingerprint(authorities, number) for number in range(1, len(authorities.roots) + 1)]
    if (rotated is None or rotated in known) and retired not in known[authorities.oldest :]:
        return
    raise AuthorityUnusable(
        "the authorities in this folder are older than the journal says: the federation has replaced or retired one. "
        "Copy DIR/authority from the machine where `coordinator authority rotate` or `retire` ran; if that command was "
        "interrupted there, repeat it first"
    )


def read_authorities(folder: CoordinatorFolder) -> Authorities:
    """Reads which authorities the federation has had, without reading a key.

    Raises:
        AuthorityUnusable: a file cannot be read.
    """
    path = folder.authority_certificate
    try:
        first = certificate_from_pem(path.read_bytes())
    except OSError as error:
        raise AuthorityUnusable(f"{path} cannot be read: {error.strerror}; check path and permissions") from error
    except ValueError as error:
        raise AuthorityUnusable(f"{path} holds no PEM certificate; restore it from a copy") from error
    if not folder.authorities.exists():
        return Authorities.first(first)
    try:
        data = folder.authorities.read_bytes()
        return Authorities.read(data, federation=federation_of(first), what=str(folder.authorities))
    except OSError as error:
        raise AuthorityUnusable(f"{folder.authorities} cannot be read: {error.strerror}; check permissions") from error
    except AuthoritiesInvalid as error:
        raise AuthorityUnusable(f"{error}; restore the authority's folder from a copy") from error


def _root(authorities: Authorities, number: int) -> x509.Certificate:
    return certificate_from_der(authorities.roots[number - 1])


def _fingerprint(authorities: Authorities, number: int) -> bytes:
    return federation_of(_root(authorities, number))


def _remove_keys(folder: CoordinatorFolder, before: int) -> None:
    for number in range(1, before):
        with contextlib.suppress(FileNotFoundError):
            folder.authority_of(number)[1].unlink()


def written(folder: CoordinatorFolder) -> tuple[int, int]:
    """Returns a stamp that changes whenever the authorities do: the document's modification time and inode."""
    try:
        status = folder.authorities.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
