"""Join tokens: what an operator gives to a new member, on paper, in a chat or in a text message.

The format is `tacit1.BODY.CHECK`. BODY is the token's canonical JSON in base64url without padding; CHECK is eight
hexadecimal digits of a SHA-256 over BODY. CHECK does not protect against forgery; the secret does. CHECK distinguishes
a token that was cut off or altered while pasting from one that is intact and wrong, so the error can say the right
thing to do.

The token names the federation by the fingerprint of its first root certificate. Its holder can therefore recognise the
coordinator before any byte of the secret leaves the machine. A coordinator stores only `secret_hash`.

A token made after the federation's authority was replaced also holds the newest authority's fingerprint and the number
of the list of authorities at that time (`tacit.authorities`). Both are needed: without the fingerprint, a retired
authority's key could sign a list of its own; without the number, the holder of that key could present the true list
from before it was retired. Other tokens leave both out and stay short, because people copy them.

A token of a federation with several coordinators also holds the others' enrolment addresses, of which one may serve
while the first stands by. What makes an address trustworthy is the same for all of them: the fingerprints above.
"""

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

from tacit.authorities import Authorities
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Short
from tacit.identity import name_is_valid

__all__ = [
    "MAX_OTHERS",
    "Address",
    "Addresses",
    "JoinToken",
    "TokenCutOff",
    "TokenInvalid",
    "join_address",
    "secret_hash",
    "split_address",
]

SECRET_BYTES = 32
# Addresses of other coordinators in a token. With 300 characters each, a token still has less than 4,096.
MAX_OTHERS = 7
_PREFIX = "tacit1."
_CHECK_DIGITS = 8
# Characters of a pasted text. A token has about 500.
_MAX_TOKEN = 8192
_HASH_PURPOSE = b"tacit/join-token/secret/1\x00"
_CHECK_PURPOSE = b"tacit/join-token/check/1\x00"


class TokenInvalid(ValueError):
    """A text is not a usable join token; the message says what is wrong and what to do."""


class TokenCutOff(TokenInvalid):
    """Part of a join token is missing or altered: a copying mistake rather than a forgery."""


def _secret(value: object) -> bytes:
    if isinstance(value, str):
        try:
            value = _decode(value)
        except ValueError as error:
            raise ValueError("the secret is not base64url") from error
    if not isinstance(value, bytes) or len(value) != SECRET_BYTES:
        raise ValueError(f"the secret is not {SECRET_BYTES} bytes")
    return value


def _fingerprint(value: object) -> bytes:
    """Reads 32 bytes, or their base64url, which is a third shorter than hexadecimal; people copy it."""
    if isinstance(value, str):
        text = value
        try:
            value = _decode(text)
        except ValueError as error:
            raise ValueError("the fingerprint is not base64url") from error
        if _encode(value) != text:
            raise ValueError("the fingerprint is not base64url without padding")
    if not isinstance(value, bytes) or len(value) != hashlib.sha256().digest_size:
        raise ValueError("the fingerprint is not 32 bytes")
    return value


def _fingerprint_text(value: bytes | None) -> str | None:
    return None if value is None else _encode(value)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


Secret = Annotated[
    bytes,
    PlainValidator(_secret),
    PlainSerializer(_encode, return_type=str),
    Field(repr=False, max_length=SECRET_BYTES),
]
_Fingerprint = Annotated[bytes, Field(max_length=32)]


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[v6]:port` into (host, port).

    Raises:
        ValueError: the address has another form.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(f"{address!r} is not host:port")
    if re.search(r"[/@?#\[\]]|[^!-~]", host) or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)


def _is_address(value: str) -> str:
    split_address(value)
    return value


# host:port as a key of a document, and those of a federation's coordinators.
Address = Annotated[str, StringConstraints(max_length=300), AfterValidator(_is_address)]
Addresses = Annotated[tuple[Address, ...], AtMost(16)]


def join_address(host: str, port: int) -> str:
    """Joins host and port; the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class JoinToken(Document):
    """An invitation for one member. Its `repr` does not show the secret."""

    # host:port of the enrolment port, and those of the federation's other coordinators. Left out if there are none.
    address: str = Field(max_length=300)
    others: Annotated[tuple[Address, ...], AtMost(MAX_OTHERS)] = ()
    federation: Digest
    id: str = Field(pattern=r"^[0-9a-f]{24}$")
    secret: Secret
    member: Short
    expires: AwareDatetime
    # SHA-256 of the newest root when the token was made, and the number of the list of authorities that names it. Both
    # are present, or neither if there had been only one authority. Absent fields are left out, never written as null.
    newest: Annotated[_Fingerprint | None, PlainValidator(_fingerprint), PlainSerializer(_fingerprint_text)] = None
    number: int = Field(default=0, ge=1, le=1_000_000, strict=True)

    @field_validator("address")
    @classmethod
    def _address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("member")
    @classmethod
    def _member(cls, value: str) -> str:
        if not name_is_valid(value):
            raise ValueError("a member's name has 1 to 63 of a-z, 0-9, dot, dash and underscore")
        return value

    @field_validator("expires")
    @classmethod
    def _expires(cls, value: datetime) -> datetime:
        # Whole seconds in UTC, so that an instant has one canonical form.
        try:
            return value.astimezone(UTC).replace(microsecond=0)
        except OverflowError as error:
            raise ValueError("outside the calendar") from error

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.newest is None) != (self.number == 0):
            raise ValueError("the newest authority's fingerprint and the list's number go together; one is missing")
        if len(set(self.addresses)) != len(self.addresses):
            raise ValueError("an address occurs twice")
        if self.newest == self.federation:
            raise ValueError("the newest authority is the first one; such a token must leave it out")
        return self

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = handler(self)
        absent = (() if self.number else ("newest", "number")) + (() if self.others else ("others",))
        return {key: content[key] for key in content if key not in absent}

    @property
    def addresses(self) -> tuple[str, ...]:
        """All enrolment addresses, in the order in which to try them."""
        return (self.address, *self.others)

    @classmethod
    def create(
        cls,
        *,
        address: str,
        federation: bytes,
        member: str,
        expires: datetime,
        authorities: Authorities | None = None,
        others: Sequence[str] = (),
    ) -> Self:
        """Makes a token with a fresh id and secret from the operating system's random source.

        Args:
            address: host:port of the enrolment port.
            federation: SHA-256 of its first root, 32 bytes.
            member: the new member's name.
            expires: timezone-aware.
            authorities: the federation's current list; None means the first authority alone.
            others: enrolment addresses of the federation's other coordinators. The token names the first `MAX_OTHERS`.

        Raises:
            pydantic.ValidationError: a ValueError; an address, name or fingerprint is malformed.
        """
        later: dict[str, Any] = {}
        if authorities is not None and authorities.newest != federation:
            later = {"newest": authorities.newest, "number": authorities.number}
        return cls(
            address=address,
            others=tuple(others[:MAX_OTHERS]),
            federation=federation,
            id=secrets.token_hex(12),
            secret=secrets.token_bytes(SECRET_BYTES),
            member=member,
            expires=expires,
            **later,
        )

    def format(self) -> str:
        """The text to give to the member. It contains the secret."""
        body = _encode(self.canonical())
        return f"{_PREFIX}{body}.{_check(body)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what a person pasted. White space and line breaks inside it and quotes around it do not matter.

        Raises:
            TokenCutOff: part of the token is missing or altered.
            TokenInvalid: the text is not a join token, or is one of a version that this software does not know.
        """
        if len(text) > _MAX_TOKEN:
            raise TokenInvalid(
                f"this is not a join token: it has {len(text)} characters; "
                "copy the one line that `coordinator member invite` printed"
            )
        text = "".join(text.split()).strip("'\"`")
        if not text.isascii():
            raise TokenInvalid("this is not a join token: tokens are plain ASCII; copy it again")
        if not text.startswith(_PREFIX):
            if text and _PREFIX.startswith(text):
                raise TokenCutOff(_CUT_OFF)
            if re.match(r"tacit[0-9]+\.", text):
                raise TokenInvalid("the join token is newer than this software can read; upgrade the software")
            raise TokenInvalid(
                f"this is not a join token: tokens start with `{_PREFIX}`; "
                "copy the whole line that `coordinator member invite` printed"
            )
        body, dot, check = text[len(_PREFIX) :].partition(".")
        if not dot or len(check) < _CHECK_DIGITS:
            raise TokenCutOff(_CUT_OFF)
        if check != _check(body):
            raise TokenCutOff(
                "the join token was altered when it was copied (its check digits do not match); "
                "copy the whole line that `coordinator member invite` printed"
            )
        try:
            return cls.from_json(_decode(body), what="the join token")
        except DocumentInvalid as error:
            raise TokenInvalid(f"{error}; ask the operator for a new one") from error
        except (binascii.Error, ValueError) as error:
            raise TokenInvalid("the join token cannot be read; ask the operator for a new one") from error


_CUT_OFF = "the join token is cut off: its end is missing; copy the whole line that `coordinator member invite` printed"


def _check(body: str) -> str:
    return hashlib.sha256(_CHECK_PURPOSE + body.encode()).hexdigest()[:_CHECK_DIGITS]


def secret_hash(secret: bytes) -> bytes:
    """Hashes a secret for the coordinator to store: SHA-256, domain-separated, 32 bytes.

    It needs neither salt nor a slow hash: the secret is 256 random bits, which nobody can guess from a hash.
    """
    return hashlib.sha256(_HASH_PURPOSE + secret).digest()
