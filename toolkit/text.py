"""Text from another machine, made fit for a log, a table and a terminal.

`clean` replaces every character that a terminal or a log viewer acts on, and cuts what is too long. Three places call
it, so that no string gets past all of them:

1. where messages arrive: `tacit.fields` says what each text field of tacit.v1 holds, `tacit.wire`, `tacit.guard` and
   `coordinator.services.guard` apply that to every message, `tacit.status` cleans the sentence of a failed call;
2. where the log is written (`toolkit.logs`), every value once more;
3. where a command prints (`toolkit.console`), every sentence and cell once more.
"""

import unicodedata

__all__ = ["MAX_DETAIL", "MAX_SHOWN", "MAX_STATUS", "clean", "is_clean"]

# Characters of a sentence inside a message, of the sentence of a gRPC status, and of whatever is printed or logged.
MAX_DETAIL, MAX_STATUS, MAX_SHOWN = 500, 2000, 64 * 1024

_REPLACEMENT, _CUT = "\N{REPLACEMENT CHARACTER}", "\N{HORIZONTAL ELLIPSIS}"
# Controls (C0, DEL, C1), formats (bidi overrides and isolates, zero-width marks, tags), lone surrogates, private use,
# unassigned, line and paragraph separators.
_ACTED_ON = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Persian and Indic scripts need these two, and they only choose the shape of the letters beside them.
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
_BREAKS = "\t\n\v\f\r"


def clean(text: str, most: int, *, lines: bool = False) -> str:
    """The text with nothing in it that a terminal acts on, and at most `most` characters long.

    A line break or tab becomes a space, every other such character U+FFFD; what is cut ends with an ellipsis. Cleaning
    twice gives the same as cleaning once.

    Args:
        text: anything, also lone surrogates.
        most: characters of the result, at least 1.
        lines: keep line feeds and tabs, for a traceback or a table.
    """
    cut = text[:most]
    if not (cut.isascii() and cut.isprintable()):
        cut = "".join(_shown(each, lines) for each in cut)
    return cut if len(text) <= most else cut[: most - 1] + _CUT


def _shown(letter: str, lines: bool) -> str:
    if letter in _BREAKS:
        return letter if lines and letter in "\t\n" else " "
    if letter.isprintable() or letter in _JOINERS or unicodedata.category(letter) not in _ACTED_ON:
        return letter
    return _REPLACEMENT


def is_clean(text: str) -> bool:
    """Whether nothing in a text would be replaced: what labels and other names that people choose are held to."""
    return clean(text, max(1, len(text))) == text
