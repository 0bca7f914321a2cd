"""Reading a member's data: every format gives the same rows, and every error helps without showing text."""

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from learning.text.data import data_digest, read_examples
from learning.text.examples import DataInvalid, Example, check_labels, label_ids
from learning.text.textual import read_text
from tests.support.places import SHARED_DATA

SECRET = "biopsy Mrs Almeida"
SHARED = SHARED_DATA

ROWS = [Example("where is it, exactly?", "LOC"), Example('she said "now"', "HUM"), Example("naïve café, 値", "7")]
JSONL = "\n".join(json.dumps({"text": row.text, "label": row.label}) for row in ROWS) + "\n"
CSV = 'label,text\nLOC,"where is it, exactly?"\nHUM,"she said ""now"""\n7,"naïve café, 値"\n'
TSV = 'text\tlabel\nwhere is it, exactly?\tLOC\nshe said "now"\tHUM\nnaïve café, 値\t7\n'


def written(folder: Path, name: str, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path = folder / name
    path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    return path


def refusal(path: Path, **columns: str | None) -> str:
    """The sentence of a refusal, after checking that the error carries nothing of the file's text."""
    with pytest.raises(DataInvalid) as caught:
        read_examples(path, **columns)
    error: BaseException | None = caught.value
    assert error is not None
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    for word in SECRET.split():
        assert word not in str(error)
    return str(error)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(("suffix", "content"), [("jsonl", JSONL), ("csv", CSV), ("tsv", TSV)])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str, content: str, ending: str) -> None:
    assert read_examples(written(tmp_path, f"rows.{suffix}{ending}", content)) == ROWS


@pytest.mark.parametrize(("suffix", "content"), [("jsonl", JSONL), ("csv", CSV), ("tsv", TSV)])
def test_files_of_other_systems_are_read(tmp_path: Path, suffix: str, content: str) -> None:
    windows = b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode()
    assert read_examples(written(tmp_path, f"ROWS.{suffix.upper()}", windows)) == ROWS


def test_columns_have_other_names_and_labels_may_be_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.jsonl", '{"q": "why?", "class": 3}\n\n{"q": "who?", "class": " HUM "}')
    assert read_examples(path, text="q", label="class") == [Example("why?", "3"), Example("who?", "HUM")]
    assert read_examples(path, text="q", label=None) == [Example("why?", None), Example("who?", None)]


def test_a_line_separator_inside_a_json_string_is_text(tmp_path: Path) -> None:
    row = json.dumps({"text": "one\u2028two\x85three", "label": "A"}, ensure_ascii=False)
    assert read_examples(written(tmp_path, "rows.jsonl", row))[0].text == "one\u2028two\x85three"


def test_a_csv_cell_may_hold_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.csv", 'text,label\n"two\nlines",A\n\nmore,B\n')
    assert read_examples(path) == [Example("two\nlines", "A"), Example("more", "B")]


def test_a_quotation_mark_in_tsv_is_text(tmp_path: Path) -> None:
    """Otherwise a mark that nothing closes would swallow the rows after it."""
    path = written(tmp_path, "rows.tsv", 'text\tlabel\n"now, she said\tA\nmore\tB\n')
    assert read_examples(path) == [Example('"now, she said', "A"), Example("more", "B")]


def test_an_example_does_not_print_its_text() -> None:
    assert SECRET not in repr([Example(SECRET, "A")])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.xlsx", "x", "the suffix must be one of .jsonl, .csv, .tsv, .jsonl.gz"),
        ("rows.gz", "x", "unknown file type"),
        ("rows.jsonl", "", "has no rows"),
        ("rows.csv", "text,label\n", "has no rows"),
        ("rows.csv", "", "has no rows"),
        ("rows.jsonl", f'{{"text": "a", "label": "A"}}\n{{"text": "{SECRET}"', "line 2: not JSON"),
        ("rows.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("rows.jsonl", f'["{SECRET}"]', "line 1: not a JSON object"),
        ("rows.jsonl", f'{{"words": "{SECRET}", "label": 1}}', "no column 'text'; there are: words, label. "),
        ("rows.jsonl", f'{{"text": "{SECRET}"}}', "no column 'label'; there are: text"),
        ("rows.jsonl", '{"text": " ", "label": 1}', "line 1: no text in column 'text'"),
        ("rows.jsonl", '{"text": null, "label": 1}', "line 1: no text in column 'text'"),
        ("rows.jsonl", f'{{"text": "{SECRET}\\ud800", "label": 1}}', "surrogate"),
        ("rows.jsonl", f'{{"text": "{SECRET}", "label": true}}', "line 1: no label in column 'label'"),
        ("rows.jsonl", f'{{"text": "{SECRET}", "label": 0.5}}', "a word or a whole number"),
        ("rows.jsonl", f'{{"text": "{SECRET}", "label": ""}}', "line 1: no label"),
        ("rows.csv", f"text,label\na,A\n\n{SECRET},A,B\n", "line 4: 3 cells under 2 columns"),
        ("rows.csv", f'text,label\n"{SECRET},A\n', "check its quotes"),
        ("rows.csv", f'text,label\n{SECRET} of 5",A\n', "line 2: a quote in a cell without quotes; put quotes around"),
        ("rows.csv", '"text;"label",more\n', "line 1: ',' expected after '\"'; check its quotes"),
        ("rows.csv", '"text,label\na,A\n', "line 2: unexpected end of data; check its quotes"),
        ("rows.csv", 'text,the "label"\na,A\n', "line 1: a quote in a cell without quotes; put quotes around"),
        ("rows.csv", "text,text\na,b\n", "two columns have the same name"),
        ("rows.tsv", f"{SECRET}\tLOC\n{SECRET}\tLOC\n", "LOC (1 not shown, since they may be text"),
        ("rows.csv", b"text,label\nok,A\n\xff\xfe,A\n", "line 3: not UTF-8"),
        ("rows.jsonl", f'{{"text": "{SECRET}"}}\n'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_refusal_says_where_and_what(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    sentence = refusal(path)
    assert says in sentence
    assert str(path) in sentence


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.csv", f"text;label\n{SECRET}, now;A\n", "line 1: the header has ';' and no ','; save it separated by "),
        ("rows.csv", "sep=;\ntext;label\na;A\n", "line 1: the header has ';' and no ',';"),
        ("rows.csv", "text\tlabel\na\tA\n", "line 1: the header has tabs and no ',';"),
        ("rows.csv", "sep=,\ntext,label\na,A\n", "line 1: 'sep=' is read by spreadsheets only; remove this line"),
        ("rows.csv", f"text,label\n{SECRET}\n", "line 2: 1 cell under 2 columns; add the missing cells, or write"),
        ("rows.csv", 'text;"label"\na;A\n', "line 1: the header has ';' and no ',';"),
        ("rows.csv", '"text";"label"\na;A\n', "line 1: the header has ';' and no ',';"),
        ("rows.csv", f"text\n{SECRET}, now\n", "line 2: 2 cells under 1 column; put quotes around cells that have"),
        ("rows.tsv", f"text\tlabel\n{SECRET}\tnow\tA\n", "line 2: 3 cells under 2 columns; take tabs out of the"),
    ],
)
def test_a_wrong_separator_is_named(tmp_path: Path, name: str, content: str, says: str) -> None:
    path = written(tmp_path, name, content)
    assert says in refusal(path)
    assert ("quotes" in refusal(path)) == ("put quotes" in says)


def test_a_semicolon_or_a_tab_in_a_header_with_commas_is_a_part_of_a_name(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.csv", "text,a;b,c\td\nwhy?,A,B\n")
    assert read_examples(path, label="a;b") == [Example("why?", "A")]
    path = written(tmp_path, "rows.csv", "text,a;b\nwhy?,A\n")
    assert read_examples(path, label="a;b") == [Example("why?", "A")]
    path = written(tmp_path, "rows.tsv", "a;b\nwhy?\n")
    assert read_examples(path, text="a;b", label=None) == [Example("why?", None)]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["Fråga text", "Ämne"], "there are: Fråga text, Ämne. Name"),
        (["प्रश्न", "質問"], "there are: प्रश्न, 質問. Name"),
        (["answer_" + "x" * 25, "id"], f"there are: answer_{'x' * 25}, id. Name"),
        # What follows may be a row: long, of several words, with signs, with an odd space, or what a terminal acts on.
        (["å" * 25, "id"], "there are: id (1 not shown, since they may be text"),
        (["har ont idag", "id"], "there are: id (1 not shown"),
        (["ont, idag", "id"], "there are: id (1 not shown"),
        (["har  ont", "id"], "there are: id (1 not shown"),
        (["ont ", "id"], "there are: id (1 not shown"),
        (["1 ont", "id"], "there are: id (1 not shown"),
        (["ont\u202ei", "id"], "there are: id (1 not shown"),
    ],
)
def test_names_of_columns_in_any_language_are_shown_if_they_are_short(
    tmp_path: Path, names: list[str], shown: str
) -> None:
    row = json.dumps(dict.fromkeys(names, "x"))
    assert shown in refusal(written(tmp_path, "rows.jsonl", row))


@pytest.mark.parametrize("near", ["Text", " text ", "TEXT"])
def test_a_name_that_differs_in_case_or_spaces_is_said(tmp_path: Path, near: str) -> None:
    said = refusal(written(tmp_path, "rows.csv", f'{near},label\n"{SECRET}",A\n'))
    assert f"no column 'text', but {near!r}, which differs in case or spaces; rename it" in said
    said = refusal(written(tmp_path, "rows.csv", f'text,{near}\n"{SECRET}",A\n'), text="text", label=near.lower() + "s")
    assert "which differs" not in said


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.jsonl")
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in refusal(tmp_path / "folder.csv")


@pytest.mark.parametrize(
    "data", [b"plain", gzip.compress(JSONL.encode())[:-9], gzip.compress(b"x", mtime=0)[:10] + b"\xff" * 20]
)
def test_a_broken_gzip_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(data)
    assert "not a complete gzip file" in refusal(path)


def test_labels_that_the_job_does_not_know_are_named() -> None:
    examples = [Example("x", label) for label in ("HUM", "HUMAN", "HUMAN", "PLACE", SECRET * 3)]
    with pytest.raises(DataInvalid) as caught:
        check_labels(examples, ["HUM", "LOC"])
    sentence = str(caught.value)
    assert "'HUMAN' (2 rows), 'PLACE' (1 rows)" in sentence
    assert "It knows 'HUM', 'LOC'" in sentence
    assert SECRET not in sentence  # As with a wrong column, whose texts would be labels.
    check_labels(examples[:1], ["HUM", "LOC"])


def test_many_unknown_labels_are_counted() -> None:
    with pytest.raises(DataInvalid, match="and 95 more"):
        check_labels([Example("x", f"L{number}") for number in range(100)], ["HUM"])


def test_rows_without_a_label_are_refused() -> None:
    with pytest.raises(DataInvalid, match="has no label"):
        check_labels([Example("x", None)], ["HUM"])


def test_label_ids_are_indices_into_the_jobs_labels() -> None:
    ids = label_ids([Example("x", "LOC"), Example("y", "HUM"), Example("z", "LOC")], ["HUM", "LOC"])
    assert ids.tolist() == [1, 0, 1]
    assert ids.dtype == np.int64
    with pytest.raises(DataInvalid, match="does not know"):
        label_ids([Example("x", "NUM")], ["HUM", "LOC"])


def test_a_data_set_is_named_by_its_bytes(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.jsonl", JSONL)
    assert data_digest(path) == hashlib.sha256(JSONL.encode()).digest()
    with pytest.raises(DataInvalid, match="does not exist"):
        data_digest(tmp_path / "none.jsonl")
    with pytest.raises(DataInvalid, match="is a folder"):
        data_digest(tmp_path)


def test_text_files_are_read_whole(tmp_path: Path) -> None:
    assert read_text(written(tmp_path, "a.txt.gz", "one\ntwo\n")) == "one\ntwo\n"


@pytest.mark.parametrize(
    ("name", "rows", "labels"), [("trec/train", 5452, 6), ("sst2/dev", 872, 2), ("ag_news/test", 7600, 4)]
)
def test_published_counts_hold(name: str, rows: int, labels: int) -> None:
    path = SHARED / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{name} is not beside the repository")
    examples = read_examples(path)
    assert len(examples) == rows
    assert len({example.label for example in examples}) == labels
