"""Writes a tuned job file: the operator's own text with other numbers, in the same order, with comments still true.

A comment is left out if it is directly above or beside a key that changed. Comments that state privacy are believed, so
if the mechanism or the rounds changed, all of [mechanism] are left out, and elsewhere those that name privacy.

Guarantee: the text that is returned reads as exactly the wanted job. Where the operator's text cannot be edited to that
(inline tables, dotted keys), the error says so. `check_editable` finds it out before a search for numbers.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from tacit.documents import DocumentInvalid
from tacit.job import JobSpec

__all__ = ["NotEditable", "check_editable", "tuned_text"]

_HEADER = re.compile(r"^\s*\[\s*([A-Za-z0-9_.\- ]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"^(\s*)([A-Za-z0-9_\-]+)(\s*=\s*)(.*?)(\s*#[^\"']*)?$")
# The tables that tuning replaces, and the keys of the model that it sets.
_TABLES = ("mechanism", "training", "method")
_MODEL_KEYS = ("freeze_embedding", "widths")
_PRIVACY = re.compile(r"epsilon|delta|privacy", re.IGNORECASE)


class NotEditable(ValueError):
    """The job file has a form that is not edited; the text says what to do."""


def tuned_text(text: str, before: JobSpec, wanted: JobSpec) -> str:
    """Return a job file's text with the numbers of another recipe.

    Args:
        text: the operator's file.
        before: what it says.
        wanted: the same job with other mechanism, training, method, number of rounds, coordinate bound, frozen
            embedding, TextCNN widths or mark of private rows.

    Raises:
        NotEditable: the text cannot be edited to that.
    """
    edited = "\n".join(_edited(text.split("\n"), before, wanted))
    try:
        lines = _with_true_comments(
            text.split("\n"),
            tomllib.loads(text),
            tomllib.loads(edited),
            private=wanted.mechanism != before.mechanism or wanted.rounds != before.rounds,
        )
        made = "\n".join(_edited(lines, before, wanted))
        found = JobSpec.model_validate(tomllib.loads(made))
    except (ValueError, DocumentInvalid) as error:
        raise NotEditable(f"{_UNEDITABLE} ({error})") from error
    if found != wanted:
        raise NotEditable(_UNEDITABLE)
    return made


def check_editable(text: str, job: JobSpec) -> None:
    """Check that whatever tuning finds can be written into a job file's text.

    Args:
        text: the operator's file.
        job: what it says.

    Raises:
        NotEditable: it cannot.
    """
    try:
        # All that tuning may change is written with the values that it has.
        found = JobSpec.model_validate(tomllib.loads("\n".join(_edited(text.split("\n"), None, job))))
    except (ValueError, DocumentInvalid) as error:
        raise NotEditable(f"{_UNEDITABLE} ({error})") from error
    if found != job:
        raise NotEditable(_UNEDITABLE)


def _edited(lines: list[str], before: JobSpec | None, wanted: JobSpec) -> list[str]:
    """Return the lines with the wanted numbers: those that differ from `before`; None: all that tuning may change."""
    for name in _TABLES:
        if before is None or getattr(wanted, name) != getattr(before, name):
            table = _written(getattr(wanted, name).model_dump(mode="json"), keep=("name",))
            # Tables inside it that have a header of their own, such as [training.schedule].
            for inner in [header for _, header in _headers(lines) if header.startswith(f"{name}.")]:
                value = table.pop(inner.removeprefix(f"{name}."), None)
                lines = _without(lines, inner) if value is None else _replaced(lines, inner, value)
            lines = _replaced(lines, name, table)
    if before is None or wanted.rounds != before.rounds:
        lines = _set(lines, "rounds", {"count": wanted.rounds.count})
    if before is None or wanted.aggregation != before.aggregation:
        lines = _set(lines, "aggregation", {"coordinate_bound": wanted.aggregation.coordinate_bound})
    new = wanted.model.model_dump(mode="json")
    if before is None:
        return _set(lines, "model", {key: value for key, value in new.items() if key in _MODEL_KEYS})
    if wanted.model != before.model:
        old = before.model.model_dump(mode="json")
        lines = _set(lines, "model", {key: value for key, value in new.items() if value != old.get(key)})
    if wanted.tuned_on != before.tuned_on:
        lines = _set(lines, "", {"tuned_on": wanted.tuned_on})
    return lines


def _with_true_comments(
    lines: list[str], before: Mapping[str, Any], after: Mapping[str, Any], *, private: bool
) -> list[str]:
    """Return the lines without the comments that the new values may make false.

    Args:
        lines: of the file before.
        before, after: its tables before and after.
        private: whether what members spend may change.
    """
    kept: list[str] = []
    comments: list[str] = []
    table = ""
    for line in lines:
        if line.lstrip().startswith("#"):
            comments.append(line)
            continue
        header, key = _HEADER.match(line), _KEY.match(line)
        changed = key is not None and _value(before, table, key[2]) != _value(after, table, key[2])
        # A comment right above a header is of the table that begins there.
        if not (changed or (private and _states_privacy(comments, "" if header else table))):
            kept += comments
        comments = []
        if header:
            table = header[1].replace(" ", "")
        stale = key and key[5] and (changed or (private and _states_privacy([key[5]], table)))
        kept.append(line[: key.start(5)] if key and stale else line)
    return kept if private and _states_privacy(comments, table) else kept + comments


def _states_privacy(comments: list[str], table: str) -> bool:
    return table == "mechanism" or _PRIVACY.search(" ".join(comments)) is not None


def _value(tables: Mapping[str, Any], table: str, key: str) -> Any:
    """Return a key's value; None if there is no such key."""
    found: Any = tables
    for name in [*filter(None, table.split(".")), key]:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


_UNEDITABLE = (
    "the job file cannot be edited to the tuned numbers; write its tables as [mechanism], [training], [method], "
    "[rounds] and [model], each key on a line of its own"
)


def _written(table: Mapping[str, Any], keep: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None or key in keep}


def _headers(lines: list[str]) -> list[tuple[int, str]]:
    """Return the place and the name of each table's header."""
    return [(at, found[1].replace(" ", "")) for at, line in enumerate(lines) if (found := _HEADER.match(line))]


def _span(lines: list[str], table: str) -> tuple[int, int] | None:
    """Return the lines of a table: after its header, up to the next header. The top level is the table ""."""
    headers = _headers(lines)
    ends = [at for at, _ in headers[1:]] + [len(lines)]
    if not table:
        return 0, headers[0][0] if headers else len(lines)
    for (at, name), end in zip(headers, ends, strict=True):
        if name == table:
            return at + 1, end
    return None


def _without(lines: list[str], table: str) -> list[str]:
    """Return the lines without a table, if there is one, and without the comment right above it."""
    if (span := _span(lines, table)) is None:
        return lines
    first, last = span[0] - 1, span[1]
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    # The comment right above the next table belongs to that table.
    while last < len(lines) and lines[last - 1].lstrip().startswith("#"):
        last -= 1
    return lines[:first] + lines[last:]


def _replaced(lines: list[str], table: str, wanted: Mapping[str, Any]) -> list[str]:
    """Return the lines with a whole table replaced: keys that it no longer has are left out."""
    top = _span(lines, "")
    kept = [
        line
        for at, line in enumerate(lines)
        if not (top and at < top[1] and (found := _KEY.match(line)) and found[2] == table)
    ]
    span = _span(kept, table)
    if span is not None:
        kept[span[0] : span[1]] = [
            line for line in kept[span[0] : span[1]] if not (found := _KEY.match(line)) or found[2] in wanted
        ]
    return _set(kept, table, wanted)


def _set(lines: list[str], table: str, wanted: Mapping[str, Any]) -> list[str]:
    """Return the lines with these keys of a table set; a missing table is appended."""
    lines = list(lines)
    span = _span(lines, table)
    if span is None:
        while lines and not lines[-1].strip():
            lines.pop()
        lines += ["", f"[{table}]", ""]
        span = len(lines) - 1, len(lines) - 1
    left = dict(wanted)
    for at in range(*span):
        found = _KEY.match(lines[at])
        if found and found[2] in left:
            lines[at] = f"{found[1]}{found[2]}{found[3]}{_toml(left.pop(found[2]))}{found[5] or ''}"
    place = span[1]
    while place > span[0] and not lines[place - 1].strip():
        place -= 1
    # The comment right above the next table belongs to that table.
    while place > span[0] and lines[place - 1].lstrip().startswith("#"):
        place -= 1
    while place > span[0] and not lines[place - 1].strip():
        place -= 1
    lines[place:place] = [f"{key} = {_toml(value)}" for key, value in left.items()]
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_toml(each)}' for key, each in value.items())}}}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
