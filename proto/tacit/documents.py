"""Documents: the base of everything stored or exchanged as text. Each has `schema = 1`; unknown keys are errors.

A document is a frozen pydantic model. Its canonical form is JSON with sorted keys and no white space. Its digest is the
SHA-256 of that, so both sides name the same thing by the same 32 bytes.

Every document is bounded: its bytes (`Document.max_bytes`, checked before parsing), every text (`max_length`, or a
pattern of bounded length), every list and table (`AtMost`). Validation stops at a list's first mistake, and an error
names at most `MAX_MISTAKES`. So `max_bytes` bounds the cost of reading any document, valid or not.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)

from tacit.limits import LAST_MS
from tacit.reading import DocumentInvalid, json_values, read_bytes, shortened, shown, toml_values
from toolkit.text import is_clean

__all__ = [
    "MAX_MISTAKES",
    "AtMost",
    "Digest",
    "Document",
    "DocumentInvalid",
    "Label",
    "Location",
    "Moment",
    "Part",
    "Short",
    "read_table",
    "sentence_of",
    "table_of",
]

# Mistakes that one error names.
MAX_MISTAKES = 8
# Up to this many unknown keys in a table are each reported; with more, only their number is.
_SPARE_KEYS = 8
# Characters of one mistake.
_MAX_MISTAKE = 500

# Matches the words in pydantic's list of what a field accepts: 'one', 'other' or 'third'.
_WORD = re.compile(r"'([^']+)'")
# What a text must be, by the pattern of its field.
_PATTERNS = {
    r"^[a-z0-9][a-z0-9._-]{0,62}$": (
        "must be 1 to 63 of a-z, 0-9, dot, dash and underscore, with a letter or digit first"
    ),
}
# Where pydantic would read true as 1.
_NUMBERS = (int, float, int | None, float | None)

# A name or a word.
Short = Annotated[str, StringConstraints(max_length=200)]
# Milliseconds since 1970.
Moment = Annotated[int, Field(ge=0, le=LAST_MS)]
# A path or a URL.
Location = Annotated[str, StringConstraints(max_length=4096)]


@dataclass(frozen=True, slots=True)
class AtMost:
    """Bounds a list or table: `Annotated[tuple[X, ...], AtMost(n)]`, or a dict. Entries are counted before any is read.

    Validation of a tuple stops at its first mistake.
    """

    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """For pydantic."""
        schema: Any = handler(source)
        if schema["type"] == "tuple":
            schema = {**schema, "fail_fast": True}
        return {"type": "function-before", "function": {"type": "no-info", "function": self._check}, "schema": schema}

    def _check(self, value: object) -> object:
        if isinstance(value, Sized) and not isinstance(value, str | bytes) and len(value) > self.most:
            raise ValueError(f"must have at most {self.most} entries, has {len(value)}")
        return value


def _digest(value: object) -> bytes:
    if isinstance(value, str):
        try:
            value = bytes.fromhex(value)
        except ValueError as error:
            raise ValueError("a digest is 64 hexadecimal digits") from error
    if not isinstance(value, bytes) or len(value) != 32:
        raise ValueError("a digest is 64 hexadecimal digits")
    return value


def _label(value: str) -> str:
    if not is_clean(value):
        raise ValueError(
            "a label holds a control or formatting character, which is unsafe in logs and terminals; remove it"
        )
    return value


# A name that people choose freely and read in lists: any script, but no character that a terminal acts on.
Label = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_label)]

# 32 bytes in memory, 64 hexadecimal digits in a document.
Digest = Annotated[
    bytes, PlainValidator(_digest), Field(max_length=32), PlainSerializer(lambda value: value.hex(), return_type=str)
]


def sentence_of(error: ValidationError) -> str:
    """Describes a failed validation for people: the first `MAX_MISTAKES` mistakes, each with its key.

    A mistake in a document as a whole has no key here; its own text begins with the keys that it is about.
    """
    mistakes, lines = _mistakes(error), []
    for item in mistakes[:MAX_MISTAKES]:
        where = ".".join(shortened(str(part)) for part in item["loc"])
        said = shortened(_said(item), _MAX_MISTAKE)
        lines.append(f"{where}: {said}" if where else said)
    if (more := len(mistakes) - MAX_MISTAKES) > 0:
        lines.append(f"and {more} more")
    return "; ".join(lines)


def _mistakes(error: ValidationError) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = [{**item} for item in error.errors(include_url=False)]
    holding = {item["loc"][:end] for item in items for end in range(len(item["loc"]))}
    # pydantic counts only valid entries of a list, so an invalid one also makes it too short. Report only the former.
    return [item for item in items if item["type"] != "too_short" or item["loc"] not in holding]


def _said(item: Mapping[str, Any]) -> str:
    """Describes one mistake, without its key. It shows the type of a wrong value and not the value, which may be
    confidential. Where one of a few words is expected, it shows the beginning of the wrong one.
    """
    match item["type"]:
        case "extra_forbidden":
            return "unknown key; check its spelling"
        case "missing":
            return "missing; it has no default"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a table of keys, not {_type_of(item['input'])}"
        case "tuple_type" | "list_type":
            return f"must be a list, not {_type_of(item['input'])}"
        case "string_too_long":
            return f"must have at most {item['ctx']['max_length']} characters, has {len(item['input'])}"
        case "string_too_short":
            least = item["ctx"]["min_length"]
            return "must not be empty" if least == 1 else f"must have at least {least} characters"
        case "string_pattern_mismatch":
            pattern = item["ctx"]["pattern"]
            return _PATTERNS.get(pattern, f"must match {pattern}")
        case "greater_than_equal":
            return f"must be {_number(item['ctx']['ge'])} or more"
        case "greater_than":
            return f"must be above {_number(item['ctx']['gt'])}"
        case "less_than_equal":
            return f"must be at most {_number(item['ctx']['le'])}"
        case "less_than":
            return f"must be below {_number(item['ctx']['lt'])}"
        case "int_from_float":
            return "must be a whole number, not a fraction"
        case "int_type" | "int_parsing" | "int_parsing_size":
            return f"must be a whole number, not {_type_of(item['input'])}"
        case "float_type" | "float_parsing":
            return f"must be a number, not {_type_of(item['input'])}"
        case "finite_number":
            return "must be a finite number"
        case "bool_type" | "bool_parsing":
            return f"must be true or false, not {_type_of(item['input'])}"
        case "string_type":
            return f"must be text, not {_type_of(item['input'])}"
        case "too_short" if "ctx" in item and "min_length" in item["ctx"]:
            return f"must have {item['ctx']['min_length']} entries or more, has {item['ctx']['actual_length']}"
        case "literal_error" if words := _WORD.findall(item["ctx"]["expected"]):
            value = item["input"]
            if not isinstance(value, str):
                return f"must be {'' if len(words) == 1 else 'one of '}{', '.join(words)}, not {_type_of(value)}"
            if len(words) == 1:
                return f"must be {words[0]}, is {shown(value)}"
            return f"{shown(value)} is not one of {', '.join(words)}"
        case _:
            sentence: str = item["msg"]
            return sentence.removeprefix("Value error, ")


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:,.10g}"


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case str():
            return "text"
        case int() | float():
            return "a number"
        case list() | tuple():
            return "a list"
        case _:
            return "a table" if isinstance(value, dict) else type(value).__name__


class Part(BaseModel):
    """A table inside a document."""

    # JSON has no infinity and no NaN.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, table: Any) -> Any:
        if isinstance(table, dict) and len(table) > len(cls.model_fields) + _SPARE_KEYS:
            raise ValueError(f"has {len(table)} keys, but only {len(cls.model_fields)} are known; check their spelling")
        return table

    @model_validator(mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, table: Any) -> Any:
        """`surveys_epsilon = true` must not mean 1."""
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, bool) and key in cls.model_fields and cls.model_fields[key].annotation in _NUMBERS:
                raise _mistake(key, "must be a number, not true or false", value)
        return table


def read_table(kind: type[Part], value: dict[str, Any], unknown: Callable[[str], str]) -> Part:
    """Reads a table for a validator that chooses its kind itself. Errors name keys as in the file, without the kind.

    Args:
        kind: what the table must be.
        value: the table.
        unknown: returns the error for a key that this kind does not have.

    Raises:
        ValidationError: its locations are relative to the table.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        lines = []
        for item in _mistakes(error):
            surplus = item["type"] == "extra_forbidden"
            lines.append(_line(item["loc"], unknown(item["loc"][-1]) if surplus else _said(item), item["input"]))
        raise ValidationError.from_exception_data(kind.__name__, lines) from None


def table_of(
    union: Any, key: str, *, default: str | None = None, in_a_word: bool = False, unsaid: Collection[str] = ()
) -> BeforeValidator:
    """Makes a validator for a table that is one of several kinds, distinguished by the text under `key`.

    Args:
        union: a union of `Part`s, each with a default for `key` that names its kind.
        key: the key that names the kind.
        default: the kind of a table without `key`.
        in_a_word: whether a text stands for a table that has only `key`.
        unsaid: kinds that errors do not offer.
    """
    kinds: dict[str, type[Part]] = {kind.model_fields[key].default: kind for kind in get_args(get_args(union)[0])}
    offered = ", ".join(name for name in kinds if name not in unsaid)

    def choose(value: object) -> object:
        if isinstance(value, Part):
            return value
        if in_a_word and isinstance(value, str):
            if value not in kinds:
                raise ValueError(f"{shown(value)} is not one of {offered}")
            value = {key: value}
        if not isinstance(value, dict):
            hint = f'"{value}"' if isinstance(value, str) and value in kinds else f"one of {offered}"
            raise ValueError(f"must be a table of keys, not {_type_of(value)}; write a table with {key} = {hint}")
        table = value if default is None else {key: default, **value}
        if key not in table:
            raise _mistake(key, f"missing; write one of {offered}", None)
        name = table[key]
        kind = kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise _mistake(key, f"{shown(name)} is not one of {offered}", name)

        def unknown(surplus: str) -> str:
            others = [other for other, has in kinds.items() if surplus in has.model_fields]
            has = "has" if len(others) == 1 else "have"
            hint = f" ({', '.join(others)} {has})" if others else ""
            return f'{name} has no such key{hint}; check its spelling, or {key} = "{name}"'

        return read_table(kind, table, unknown)

    return BeforeValidator(choose)


def _mistake(key: str, sentence: str, value: object) -> ValidationError:
    return ValidationError.from_exception_data("table", [_line((key,), sentence, value)])


def _line(loc: tuple[int | str, ...], sentence: str, value: object) -> Any:
    return {"type": "value_error", "ctx": {"error": ValueError(sentence)}, "loc": loc, "input": value}


class Document(Part):
    """A whole document."""

    # Maximum length in bytes.
    max_bytes: ClassVar[int] = 64 * 1024

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
        """Encodes the document as it is stored, sent and hashed."""
        content = self.model_dump(mode="json", by_alias=True)
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    def digest(self) -> bytes:
        """SHA-256 of the canonical form, 32 bytes."""
        return hashlib.sha256(self.canonical()).digest()

    @classmethod
    def from_json(cls, data: bytes, *, what: str = "document") -> Self:
        """Reads the canonical form, or any JSON with the same content.

        Args:
            data: the JSON.
            what: how an error names the document.

        Raises:
            DocumentInvalid: too long, nested too deeply, not JSON, a key unknown or missing, or a value out of range.
        """
        return cls._from_content(json_values(data, cls.max_bytes, what), what)

    @classmethod
    def from_file(cls, path: Path, *, what: str | None = None) -> Self:
        """Reads a file like `from_json`. A file longer than `max_bytes` is never held in memory.

        Raises:
            DocumentInvalid: see `from_json`.
            OSError: the file cannot be read.
        """
        what = what or str(path)
        return cls.from_json(read_bytes(path, cls.max_bytes, what), what=what)

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Reads a TOML file that a person wrote.

        Raises:
            DocumentInvalid: no such file, too long, nested too deeply, not TOML, no `schema = 1`, a key unknown or
                missing, or a value out of range.
        """
        try:
            data = read_bytes(path, cls.max_bytes, str(path))
        except FileNotFoundError as error:
            raise DocumentInvalid(f"{path} does not exist; check the path") from error
        except OSError as error:
            raise DocumentInvalid(f"{path} cannot be read: {error.strerror}; check permissions") from error
        return cls._from_content(toml_values(data, cls.max_bytes, str(path)), str(path))

    @classmethod
    def _from_content(cls, content: object, what: str) -> Self:
        if not isinstance(content, dict):
            raise DocumentInvalid(f"{what} is not a table of keys")
        if content.get("schema") != 1:
            found = f"has schema = {shown(content['schema'])}" if "schema" in content else "has no schema"
            raise DocumentInvalid(f"{what} {found}; this software reads `schema = 1`")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise DocumentInvalid(f"{what}: {sentence_of(error)}") from error
