"""Parses the bytes of a document into plain values, within bounds: JSON, and the TOML that people write.

Guarantees: a document that is too long is not parsed. One that nests too deeply, or that the parser cannot read, raises
`DocumentInvalid` with a short sentence. The cost is at most linear in the document's length times `MAX_DEPTH`, so the
limit on bytes bounds time and memory (docs/jobs.md has the measurements). `tacit.documents` interprets the values.
"""

import json
import re
import reprlib
import tomllib
from pathlib import Path
from typing import Any

__all__ = ["MAX_DEPTH", "DocumentInvalid", "json_values", "read_bytes", "shortened", "shown", "toml_values"]

# Nesting depth of tables and lists. The deepest document (a job with a verbaliser) has six levels.
MAX_DEPTH = 16
# Characters of a value or key that an error message repeats.
_MAX_SHOWN = 80

# A TOML string or comment: everything in which brackets and dots mean nothing. An unclosed string runs to the end of
# the line or the document. The quantifiers are possessive and a branch that has begun always matches, so no character
# is scanned twice.
_TOML_TEXT = re.compile(
    r'"""(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5}+|\\?\Z)'
    r"|'''(?:[^']++|'(?!''))*+(?:'{3,5}+|\Z)"
    r'|"(?:[^"\\\n]++|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
# A dotted key with more parts than a document may nest. tomllib's cost grows with the square of their number.
_TOML_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}", re.ASCII)
_BRACKETS = re.compile(r"[\[\]{}]")


class DocumentInvalid(ValueError):
    """A document cannot be used; the text says where it is wrong and what to do."""


def read_bytes(path: Path, most: int, what: str) -> bytes:
    """Reads a file. It never holds more than `most` + 1 bytes in memory.

    Args:
        path: the file.
        most: maximum length in bytes.
        what: how an error names the document.

    Raises:
        DocumentInvalid: the file is longer.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    _check_length(data, most, what)
    return data


def json_values(data: bytes, most: int, what: str) -> Any:
    """Parses JSON.

    Args:
        data: the document.
        most: maximum length in bytes.
        what: how an error names the document.

    Raises:
        DocumentInvalid: too long, nested too deeply, or not JSON.
    """
    _check_length(data, most, what)
    try:
        values = json.loads(data)
        # Half of a surrogate pair cannot be encoded, so a document that holds one has no canonical form.
        json.dumps(values, ensure_ascii=False).encode()
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:
        raise DocumentInvalid(f"{what} is not JSON: {shortened(str(error), 200)}") from error
    _check_depth(values, what)
    return values


def toml_values(data: bytes, most: int, what: str) -> dict[str, Any]:
    """Parses TOML.

    Args:
        data: the document.
        most: maximum length in bytes.
        what: how an error names the document.

    Raises:
        DocumentInvalid: too long, nested too deeply, or not TOML in UTF-8.
    """
    _check_length(data, most, what)
    try:
        # Some editors write a byte order mark. (`utf-8-sig` would count an error's place without it.)
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DocumentInvalid(
            f"{what} cannot be read: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from None
    _check_toml_shape(text, what)
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:  # TOMLDecodeError, and a number of too many digits.
        raise DocumentInvalid(f"{what} is not TOML: {shortened(str(error), 200)}") from error
    _check_depth(values, what)
    return values


def shortened(text: str, most: int = _MAX_SHOWN) -> str:
    """Returns the text, cut to `most` characters with an ellipsis if it is longer."""
    return text if len(text) <= most else text[: most - 1] + "…"


def shown(value: object) -> str:
    """Formats a value for an error message, always briefly."""
    try:
        return shortened(reprlib.repr(value))
    except ValueError:  # Python does not write out numbers of more than 4300 digits.
        return "a very large number"


def _check_length(data: bytes, most: int, what: str) -> None:
    if len(data) > most:
        raise DocumentInvalid(f"{what} has more than {most} bytes, the limit; check that it is the right file")


def _check_depth(values: Any, what: str) -> None:
    level = [values]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep(what)


def _check_toml_shape(text: str, what: str) -> None:
    """Bounds nesting before parsing: tomllib recurses into brackets, and is quadratic in the parts of a dotted key."""
    bare = _TOML_TEXT.sub("s", text)
    if _TOML_LONG_KEY.search(bare):
        raise _too_deep(what)
    depth = 0
    for bracket in _BRACKETS.finditer(bare):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise _too_deep(what)


def _too_deep(what: str) -> DocumentInvalid:
    return DocumentInvalid(f"{what} nests tables or lists more than {MAX_DEPTH} deep; check that it is the right file")
