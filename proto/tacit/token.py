"""Join tokens: what an operator hands to a new member, on paper, in a chat, over the telephone's text
messages.

`tacit1.BODY.CHECK`: BODY is the token's canonical JSON in base64url without padding, CHECK eight hexadecimal
digits of its SHA-256. CHECK is no protection against forgery, the secret is; it tells a token that was cut
off or altered when it was pasted from one that is whole and wrong, so that a person is told the right thing
to do.

The token names the federation by the fingerprint of its root certificate. Whoever holds the token can
therefore recognise the coordinator before a byte of the secret has left the machine. A coordinator keeps
`secret_hash` only.

A token that was made after the federation's authority was replaced holds also the newest authority's fingerprint
and the number of the list of authorities at that time (`tacit.authorities`). Fingerprint and number are needed
both: without the one a retired authority's key could make a list of its own, without the other its holder could
show the true list from before it was retired. Other tokens leave both out, since people copy them.
"""

import base64
import binascii
import hashlib
import re
import secrets
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import (
    AwareDatetime,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from tacit.authorities import Authorities
from tacit.documents import Digest, Document, DocumentInvalid, Short
from tacit.identity import name_is_valid

__all__ = ["JoinToken", "TokenCutOff", "TokenInvalid", "join_address", "secret_hash", "split_address"]

SECRET_BYTES = 32
_PREFIX = "tacit1."
_CHECK_DIGITS = 8
# Characters of what is pasted. A token has about 500.
_MAX_TOKEN = 8192
_HASH_PURPOSE = b"tacit/join-token/secret/1\x00"
_CHECK_PURPOSE = b"tacit/join-token/check/1\x00"


class TokenInvalid(ValueError):
    """A text that is no usable join token; the sentence says what is wrong and what to do."""


class TokenCutOff(TokenInvalid):
    """A join token of which a part is missing or altered: copied badly rather than forged."""


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
    """32 bytes, in a document as base64url: a third shorter than digits, and people copy it."""
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
    """`host:port` or `[v6]:port` as (host, port). Raises: ValueError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(f"{address!r} is not host:port")
    if re.search(r"[/@?#\[\]]|[^!-~]", host) or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class JoinToken(Document):
    """One invitation. Its `repr` does not show the secret."""

    # Of the enrolment port, host:port.
    address: str = Field(max_length=300)
    federation: Digest
    id: str = Field(pattern=r"^[0-9a-f]{24}$")
    secret: Secret
    member: Short
    expires: AwareDatetime
    # SHA-256 of the root that issued when the token was made, and the number of the list that says so: both, or neither
    # where there had been one authority only. What is not there is not written, and never null.
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
            raise ValueError("a member's name is 1 to 63 of a-z, 0-9, dot, dash and underscore")
        return value

    @field_validator("expires")
    @classmethod
    def _expires(cls, value: datetime) -> datetime:
        # Whole seconds of UTC: one instant has one canonical form.
        try:
            return value.astimezone(UTC).replace(microsecond=0)
        except OverflowError as error:
            raise ValueError("outside of the calendar") from error

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.newest is None) != (self.number == 0):
            raise ValueError("the newest authority's fingerprint and the list's number belong together; one is missing")
        if self.newest == self.federation:
            raise ValueError("the newest authority is the first one; such a token does not name it twice")
        return self

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = handler(self)
        return content if self.number else {key: content[key] for key in content if key not in ("newest", "number")}

    @classmethod
    def create(
        cls, *, address: str, federation: bytes, member: str, expires: datetime, authorities: Authorities | None = None
    ) -> Self:
        """A new token with a fresh id and secret from the operating system's random source.

        authorities: the federation's at this moment; None stands for the first one alone.

        Raises:
            pydantic.ValidationError (a ValueError): an address, name or fingerprint that cannot be right.
        """
        later: dict[str, Any] = {}
        if authorities is not None and authorities.newest != federation:
            later = {"newest": authorities.newest, "number": authorities.number}
        return cls(
            address=address,
            federation=federation,
            id=secrets.token_hex(12),
            secret=secrets.token_bytes(SECRET_BYTES),
            member=member,
            expires=expires,
            **later,
        )

    def format(self) -> str:
        """The text to hand out. It holds the secret."""
        body = _encode(self.canonical())
        return f"{_PREFIX}{body}.{_check(body)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what a person pasted; white space and line breaks inside, and quotes around it, do not
        matter.

        Raises:
            TokenCutOff: a part is missing or was altered on the way.
            TokenInvalid: no join token at all, or one of a version that this software does not know.
        """
        if len(text) > _MAX_TOKEN:
            raise TokenInvalid(
                f"this is not a join token: it has {len(text)} characters; "
                "copy the one line that `coordinator member invite` printed"
            )
        text = "".join(text.split()).strip("'\"`")
        if not text.isascii():
            raise TokenInvalid("this is not a join token: those are plain ASCII; copy it again")
        if not text.startswith(_PREFIX):
            if text and _PREFIX.startswith(text):
                raise TokenCutOff(_CUT_OFF)
            if re.match(r"tacit[0-9]+\.", text):
                raise TokenInvalid("the join token is of a newer kind than this software reads; upgrade it")
            raise TokenInvalid(
                f"this is not a join token: those start with `{_PREFIX}`; "
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
    """What a coordinator keeps of a secret: SHA-256, domain-separated, 32 bytes.

    No salt and no slow hash: the secret is 256 random bits, which cannot be guessed from any hash of it.
    """
    return hashlib.sha256(_HASH_PURPOSE + secret).digest()
