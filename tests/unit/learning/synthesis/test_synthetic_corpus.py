"""The corpus as a file: rows without provenance, never larger than its bound, written completely or not at all."""

import json
import stat

import pytest

from learning.synthesis.sampling import SyntheticText
from learning.synthesis.writing import CorpusWritten, write_corpus

LABELS = ("bad", "good")
TEXTS = [
    SyntheticText("the sea.", 1),
    SyntheticText("  ", 0),
    SyntheticText("the sea.", 1),
    SyntheticText("the sea.", 0),
    SyntheticText("café ☕", 0),
    SyntheticText("", 1),
]


def test_rows_are_text_and_label_and_nothing_else(tmp_path):
    path = tmp_path / "corpus.jsonl"
    written = write_corpus(path, iter(TEXTS), LABELS, max_bytes=10_000)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [
        {"text": "the sea.", "label": "good"},
        {"text": "the sea.", "label": "bad"},
        {"text": "café ☕", "label": "bad"},
    ]
    assert written == CorpusWritten(rows=3, bytes=path.stat().st_size, empty=2, repeated=1, beyond=0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_never_larger_than_its_bound(tmp_path):
    path, row = tmp_path / "corpus.jsonl", len(b'{"text": "the sea.", "label": "good"}\n')
    for bound, rows, beyond in ((row - 1, 0, 3), (row, 1, 2), (2 * row - 1, 2, 1), (2 * row - 2, 1, 2)):
        written = write_corpus(path, TEXTS, LABELS, max_bytes=bound)
        assert (written.rows, written.beyond) == (rows, beyond)
        assert path.stat().st_size == written.bytes <= bound
        assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_an_old_file_stays_if_writing_fails(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write_corpus(path, TEXTS, LABELS, max_bytes=10_000)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="2 labels"):
        write_corpus(path, [*TEXTS, SyntheticText("the ship", 2)], LABELS, max_bytes=10_000)
    with pytest.raises(ValueError, match="max_bytes must be at least 1"):
        write_corpus(path, TEXTS, LABELS, max_bytes=0)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
