"""Documents: everything kept or exchanged as text carries `schema = 1`, and unknown keys are errors.

A document is a frozen pydantic model. Its canonical form is JSON with sorted keys and no white space; its digest
is SHA-256 of that, so that both sides name the same thing by the same 32 bytes.
"""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, ValidationError

__all__ = ["Digest", "Document", "DocumentInvalid", "Part", "sentence_of"]


class DocumentInvalid(ValueError):
    """A document that cannot be used; the text says where and what to do."""


def _digest(value: object) -> bytes:
    if isinstance(value, str):
        try:
            value = bytes.fromhex(value)
        except ValueError as error:
            raise ValueError("a digest is 64 hexadecimal digits") from error
    if not isinstance(value, bytes) or len(value) != 32:
        raise ValueError("a digest is 64 hexadecimal digits")
    return value


# 32 bytes in memory, 64 hexadecimal digits in a document.
Digest = Annotated[bytes, PlainValidator(_digest), PlainSerializer(lambda value: value.hex(), return_type=str)]


def sentence_of(error: ValidationError) -> str:
    """What a person should read of a failed validation: one line a mistake, named by its key."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"]) or "document"
        unknown = item["type"] == "extra_forbidden"
        what = "unknown key; check its spelling" if unknown else item["msg"].removeprefix("Value error, ")
        lines.append(f"{where}: {what}")
    return "; ".join(lines)


class Part(BaseModel):
    """A table inside a document."""

    # Infinity and NaN are no JSON.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Document(Part):
    """A whole document."""

    schema_version: Literal[1] = 1

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
        alias_generator=lambda name: "schema" if name == "schema_version" else name,
    )

    def canonical(self) -> bytes:
        """The bytes that are stored, sent and hashed."""
        content = self.model_dump(mode="json", by_alias=True)
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    def digest(self) -> bytes:
        """SHA-256 of the canonical form, 32 bytes."""
        return hashlib.sha256(self.canonical()).digest()

    @classmethod
    def from_json(cls, data: bytes, *, what: str = "document") -> Self:
        """Reads the canonical form (or any JSON of the same content).

        Raises:
            DocumentInvalid: not JSON, a key unknown or missing, a value out of range.
        """
        try:
            content = json.loads(data)
            # Half of a surrogate pair is no text: what holds one has no canonical form.
            json.dumps(content, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise DocumentInvalid(f"{what} is not JSON: {error}") from error
        return cls._from_content(content, what)

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Reads a file that a person wrote.

        Raises:
            DocumentInvalid: no such file, not TOML, no `schema = 1`, a key unknown or missing, a value out of range.
        """
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DocumentInvalid(f"{path} does not exist") from error
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentInvalid(f"{path} cannot be read: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise DocumentInvalid(f"{path} is not TOML: {error}") from error
        return cls._from_content(content, str(path))

    @classmethod
    def _from_content(cls, content: object, what: str) -> Self:
        if not isinstance(content, dict):
            raise DocumentInvalid(f"{what} is not a table of keys")
        if content.get("schema") != 1:
            found = f"has schema = {content['schema']!r}" if "schema" in content else "has no schema"
            raise DocumentInvalid(f"{what} {found}; this software reads `schema = 1`")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise DocumentInvalid(f"{what}: {sentence_of(error)}") from error
