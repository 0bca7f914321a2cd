"""Writes a synthetic corpus as a file of lines, {"text": ..., "label": ...}, like any other data set.

Guarantees: no row says which member made it or from what. Empty texts and repeated rows are left out and counted. The
file is never larger than its bound and ends with a complete row; it exists completely or not at all. Nothing here
compares with private text: what is left out follows from the synthetic texts alone.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from learning.synthesis.sampling import SyntheticText
from toolkit.durable import Faults, durable_file, no_faults

__all__ = ["CorpusWritten", "write_corpus"]


@dataclass(frozen=True, slots=True)
class CorpusWritten:
    """What was written: `rows` and `bytes`; and the texts left out as `empty`, `repeated`, or `beyond` the bound."""

    rows: int
    bytes: int
    empty: int
    repeated: int
    beyond: int


def write_corpus(
    path: Path,
    texts: Iterable[SyntheticText],
    labels: Sequence[str],
    *,
    max_bytes: int,
    faults: Faults = no_faults,
) -> CorpusWritten:
    """Writes rows until the next one would exceed `max_bytes`; all later rows are counted as beyond.

    Only the owner can read the file: a corpus is the member's until it consents to the upload.

    Raises:
        ValueError: The bound is below 1, or a text has a label that the job does not have.
        OSError: The file cannot be written; what was there before stays.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    seen: set[tuple[str, int]] = set()
    lines: list[bytes] = []
    size = empty = repeated = beyond = 0
    for each in texts:
        if not 0 <= each.label < len(labels):
            raise ValueError(f"label index {each.label} is not one of {len(labels)} labels")
        text = each.text.strip()
        if not text:
            empty += 1
        elif (text, each.label) in seen:
            repeated += 1
        else:
            seen.add((text, each.label))
            line = json.dumps({"text": text, "label": labels[each.label]}, ensure_ascii=False).encode() + b"\n"
            if beyond or size + len(line) > max_bytes:
                beyond += 1
            else:
                lines.append(line)
                size += len(line)
    durable_file(path, b"".join(lines), "corpus", faults)
    return CorpusWritten(len(lines), size, empty, repeated, beyond)
