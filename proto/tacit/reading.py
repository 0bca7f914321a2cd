"""From the bytes of a document to plain values, within bounds: JSON, and the TOML that people write.

Guarantees: a document that is too long is not parsed; one that nests too deeply, or that no parser can read, is a
`DocumentInvalid` with a short sentence. The cost is linear in the document's length, times `MAX_DEPTH` at most, so
that the limit on bytes bounds time and memory (docs/jobs.md has the measurements). What the values mean is
`tacit.documents`'s.
"""

import json
import re
import reprlib
import tomllib
from pathlib import Path
from typing import Any

__all__ = ["MAX_DEPTH", "DocumentInvalid", "json_values", "read_bytes", "shortened", "shown", "toml_values"]

# Tables and lists inside each other. The deepest document (a job with a verbaliser) has six.
MAX_DEPTH = 16
# Characters of a value, a key, or a mistake that a sentence repeats.
_MAX_SHOWN = 80

# A string or a comment of TOML: everything in which a bracket or a dot means nothing. One that never closes runs to its
# end. The quantifiers are possessive and every branch matches once begun, so that nothing is scanned twice.
_TOML_TEXT = re.compile(
    r'"""(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5}+|\\?\Z)'
    r"|'''(?:[^']++|'(?!''))*+(?:'{3,5}+|\Z)"
    r'|"(?:[^"\\\n]++|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
# A key of more parts than a document nests. tomllib's cost grows with the square of their number.
_TOML_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}", re.ASCII)
_BRACKETS = re.compile(r"[\[\]{}]")


class DocumentInvalid(ValueError):
    """A document that cannot be used; the text says where and what to do."""


def read_bytes(path: Path, most: int, what: str) -> bytes:
    """A file's content. No more than `most` bytes and one are ever in memory.

    Raises:
        DocumentInvalid: it is longer. OSError.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    _check_length(data, most, what)
    return data


def json_values(data: bytes, most: int, what: str) -> Any:
    """What the JSON holds. most: bytes.

    Raises:
        DocumentInvalid: too long, too deep, or not JSON.
    """
    _check_length(data, most, what)
    try:
        values = json.loads(data)
        # Half of a surrogate pair is no text: what holds one has no canonical form.
        json.dumps(values, ensure_ascii=False).encode()
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:
        raise DocumentInvalid(f"{what} is not JSON: {shortened(str(error), 200)}") from error
    _check_depth(values, what)
    return values


def toml_values(data: bytes, most: int, what: str) -> dict[str, Any]:
    """What the TOML holds. most: bytes.

    Raises:
        DocumentInvalid: too long, too deep, or not TOML in UTF-8.
    """
    _check_length(data, most, what)
    try:
        text = data.decode("utf-8")
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
    """The text, or its beginning where it is longer than `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def shown(value: object) -> str:
    """How a sentence repeats a value: short, whatever it is."""
    try:
        return shortened(reprlib.repr(value))
    except ValueError:  # Python writes out no number of more than 4300 digits.
        return "a very large number"


def _check_length(data: bytes, most: int, what: str) -> None:
    if len(data) > most:
        raise DocumentInvalid(f"{what} has more than {most} bytes, which is the limit; this may be some other file")


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
    """Before tomllib sees it: it recurses into brackets, and takes the square of a dotted key's parts."""
    bare = _TOML_TEXT.sub("s", text)
    if _TOML_LONG_KEY.search(bare):
        raise _too_deep(what)
    depth = 0
    for bracket in _BRACKETS.finditer(bare):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise _too_deep(what)


def _too_deep(what: str) -> DocumentInvalid:
    return DocumentInvalid(
        f"{what} has more than {MAX_DEPTH} tables or lists inside each other; this may be some other file"
    )
