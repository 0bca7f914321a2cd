"""Makes text from another machine safe for logs, tables and terminals.

`clean` replaces every character on which a terminal or log viewer acts, and cuts text that is too long. It is called in
three places, so that no string gets past all of them:

1. where messages arrive: `tacit.fields` says what each text field of tacit.v1 may hold; `tacit.wire`, `tacit.guard` and
   `coordinator.services.guard` apply that to every message; `tacit.status` cleans the sentence of a failed call;
2. where the log is written (`toolkit.logs`): every value again;
3. where a command prints (`toolkit.console`): every sentence and cell again.
"""

import unicodedata

__all__ = ["MAX_DETAIL", "MAX_SHOWN", "MAX_STATUS", "clean", "is_clean"]

# Maximum characters of a sentence in a message, of the sentence of a gRPC status, and of anything printed or logged.
MAX_DETAIL, MAX_STATUS, MAX_SHOWN = 500, 2000, 64 * 1024

_REPLACEMENT, _CUT = "\N{REPLACEMENT CHARACTER}", "\N{HORIZONTAL ELLIPSIS}"
# Controls (C0, DEL, C1), formats (bidi overrides and isolates, zero-width marks, tags), lone surrogates, private use,
# unassigned, line and paragraph separators.
_ACTED_ON = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Persian and Indic scripts need these two, which only choose the shape of adjacent letters.
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
_BREAKS = "\t\n\v\f\r"


def clean(text: str, most: int, *, lines: bool = False) -> str:
    """Replaces every character on which a terminal acts, and cuts the text to `most` characters.

    Line breaks and tabs become spaces, every other such character becomes U+FFFD. Cut text ends with an ellipsis.
    Cleaning is idempotent.

    Args:
        text: any text, including lone surrogates.
        most: maximum characters of the result, at least 1.
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
    """Whether `clean` would change nothing. Labels and other names that people choose must be clean."""
    return clean(text, max(1, len(text))) == text
