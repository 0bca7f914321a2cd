"""Parquet and Arrow files and `datasets` folders: the same rows as in JSON lines, and a sentence for each damage."""

import csv
import hashlib
import itertools
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from edge_client.ledger.overlap import Marks, marks_of
from learning.text import columnar
from learning.text.columnar_reader import MAX_CELL, FileInvalid, write_rows
from learning.text.data import data_digest, read_data, read_examples
from learning.text.examples import ColumnMissing, DataInvalid, Example, RowInvalid, check_labels
from learning.text.persons import units_of
from tests.support.places import ROOT

SECRET = "the heron stands"
# Text, label, person: rows that are read, and rows that are not.
ROWS = [
    (SECRET, "A", "ann"),
    ("näher, 近く \u2028 ' \"", "B ", " bob"),
    (None, "A", "ann"),
    ("   ", "A", "ann"),
    (SECRET, None, "ann"),
    (SECRET, "B", None),
    ("last\nwith a line", "A", "ann"),
]
TEXT = pa.string()


def table_of(text: pa.DataType = TEXT, label: pa.DataType = TEXT) -> pa.Table:
    texts, labels, persons = zip(*ROWS, strict=True)
    return pa.table(
        {
            "text": pa.array(texts, pa.string()).cast(text),
            "label": pa.array(labels, pa.string()).cast(label),
            "who": pa.array(persons, pa.string()),
            # Never read, whatever it is.
            "spans": pa.array([[{"begin": 1}]] * len(ROWS)),
        }
    )


def stream(table: pa.Table, path: Path, batch: int = 2) -> None:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def datasets_folder(table: pa.Table, folder: Path, **state: object) -> None:
    """As the `datasets` library's save_to_disk writes it: Arrow streams, and the list of them."""
    folder.mkdir()
    names = [f"data-0000{each}-of-00002.arrow" for each in range(2)]
    stream(table.slice(0, 3), folder / names[0])
    stream(table.slice(3), folder / names[1])
    listed = {"_data_files": [{"filename": each} for each in names], "_fingerprint": "0", "_split": "train"} | state
    (folder / "state.json").write_text(json.dumps(listed))
    (folder / "dataset_info.json").write_text("{}")


WORDS = pa.dictionary(pa.int32(), pa.string())
FORMS: dict[str, Callable[[Path], None]] = {
    "zstd.parquet": lambda path: pq.write_table(table_of(), path, compression="zstd"),
    "gzip.parquet": lambda path: pq.write_table(table_of(), path, compression="gzip", row_group_size=2),
    "plain.parquet": lambda path: pq.write_table(table_of(pa.large_string()), path, use_dictionary=False),
    "words.parquet": lambda path: pq.write_table(table_of(WORDS, WORDS), path, compression="brotli"),
    "lz4.feather": lambda path: pyarrow.feather.write_feather(table_of(), path, compression="lz4"),
    "words.arrow": lambda path: pyarrow.feather.write_feather(table_of(pa.large_string(), WORDS), path, "zstd"),
    "views.arrow": lambda path: pyarrow.feather.write_feather(table_of(pa.string_view()), path, "uncompressed"),
    "stream.arrow": lambda path: stream(table_of(WORDS), path),
    "folder": lambda path: datasets_folder(table_of(), path),
}


def as_jsonl(path: Path) -> Path:
    names = ("text", "label", "who")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in ROWS))
    return path


def marks(examples: list[Example]) -> Marks:
    return marks_of(bytes(32), [each.texts for each in examples], units_of(examples))


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_their_marks_are_those_of_json_lines(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path / form)
    told = read_data(as_jsonl(tmp_path / "rows.jsonl"), person="who", skip_invalid=True)
    found = read_data(tmp_path / form, person="who", skip_invalid=True)
    assert found.examples == told.examples
    assert len(found.examples) == 3
    assert marks(found.examples) == marks(told.examples)
    assert found.skipped.rows == told.skipped.rows == 4
    assert found.skipped.first == tuple(each.replace("line", "row") for each in told.skipped.first)
    # A table's columns are known before its rows.
    assert (found.second_column, told.second_column) == (False, True)
    with pytest.raises(RowInvalid, match="row 3: no text in column 'text'") as refused:
        read_data(tmp_path / form)
    assert SECRET not in str(refused.value)


def write(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_whole_numbers_are_words(tmp_path: Path) -> None:
    path = write(tmp_path / "it.parquet", text=["a", "b"], label=pa.array([2, 7], pa.uint64()), who=pa.array([1, 1]))
    assert read_data(path, person="who").examples == [Example("a", "2", None, "1"), Example("b", "7", None, "1")]
    path = write(tmp_path / "it.parquet", text=["a", "b"], label=pa.array([2, 7]).dictionary_encode())
    assert [each.label for each in read_examples(path)] == ["2", "7"]


def test_a_second_text_is_read_where_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "it.parquet", text=["a", "b"], label=["x", "y"], text_b=["c", None], other=["d", "e"])
    assert read_data(path).examples == [Example("a", "x", "c"), Example("b", "y")]
    assert read_examples(path, text_b="other") == [Example("a", "x", "d"), Example("b", "y", "e")]
    assert read_data(path).second_column
    # One that cannot hold a text is as good as none, unless it was named.
    path = write(tmp_path / "it.parquet", text=["a"], label=["x"], text_b=[1.5])
    assert read_examples(path) == [Example("a", "x")]
    with pytest.raises(DataInvalid, match="'text_b' holds numbers with a fraction"):
        read_examples(path, text_b="text_b")


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        ({"text": ["a"], "kind": ["x"]}, {}, "no column 'label'; there are: text, kind. Name yours with --label"),
        ({"text": ["a"], "label": [1.0]}, {}, "column 'label' holds numbers with a fraction; write text or whole"),
        ({"text": ["a"], "label": [True]}, {}, "column 'label' holds true and false"),
        ({"text": [1], "label": ["x"]}, {}, "column 'text' holds whole numbers; write text"),
        ({"text": [b"a"], "label": ["x"]}, {}, "column 'text' holds bytes"),
        ({"text": [["a"]], "label": ["x"]}, {}, "column 'text' holds lists or structures"),
        ({"text": [{"de": "a"}], "label": ["x"]}, {"text": "text.de"}, "no column 'text.de'"),
        ({"text": ["a"], "label": ["x"], "at": pa.array([1], pa.date32())}, {"person": "at"}, "'at' holds dates"),
        ({"text": pa.array([], pa.string()), "label": pa.array([], pa.string())}, {}, "has no rows"),
        ({"text": pa.nulls(2), "label": ["x", "y"]}, {"skip_invalid": True}, "has no row that can be read"),
    ],
    ids=lambda value: None,
)
def test_a_column_that_cannot_be_used_is_named(
    columns: dict[str, object], options: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(DataInvalid, match=re.escape(sentence)) as refused:
        read_data(write(tmp_path / "it.parquet", **columns), **options)
    assert isinstance(refused.value, ColumnMissing) == sentence.startswith("no column")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["x"])], names=["text", "text", "label"])
    pyarrow.feather.write_feather(table, tmp_path / "it.feather")
    with pytest.raises(DataInvalid, match="two columns have the same name"):
        read_data(tmp_path / "it.feather")


def test_bytes_that_are_not_utf8_are_of_their_row(tmp_path: Path) -> None:
    raw = pa.array([SECRET.encode(), b"\xff" + SECRET.encode(), b"c"])
    words = raw.dictionary_encode()
    for form in (raw.view(TEXT), pa.DictionaryArray.from_arrays(words.indices, words.dictionary.view(TEXT))):
        table = pa.table({"text": form, "label": ["x", "y", "z"]})
        pyarrow.feather.write_feather(table, tmp_path / "it.arrow")
        found = read_data(tmp_path / "it.arrow", skip_invalid=True)
        assert ([each.label for each in found.examples], found.skipped.first) == (
            ["x", "z"],
            ("row 2: not UTF-8; save the file as UTF-8",),
        )


# What a file can be, and what is said of it.
def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.parquet"
    for content, sentence in (
        (b"", "neither Parquet nor Arrow"),
        (b'{"text": "%s"}' % SECRET.encode(), "neither Parquet nor Arrow"),
        (b"FEA1" + bytes(100), "neither Parquet nor Arrow"),
        (b"PARE" + bytes(100), "it is encrypted"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataInvalid, match=sentence) as refused:
            read_data(path)
        assert SECRET not in str(refused.value)
    with pytest.raises(DataInvalid, match="does not exist"):
        read_data(tmp_path / "other.parquet")
    with pytest.raises(DataInvalid, match="unknown file type"):
        read_data(tmp_path / "it.parquet.gz")


@pytest.mark.parametrize("form", ["zstd.parquet", "lz4.feather", "stream.arrow"])
def test_a_truncated_file_gives_no_rows_or_a_fault(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path / form)
    whole = (tmp_path / form).read_bytes()
    rows: list[object] = []
    write_rows([tmp_path / form], ["text"], rows.append)
    for length in range(0, len(whole) - 8, 29):
        (tmp_path / form).write_bytes(whole[:length])
        read: list[object] = []
        try:
            write_rows([tmp_path / form], ["text"], read.append)
        except FileInvalid:
            continue
        # Only a stream ends anywhere: at the end of a batch it is whole.
        assert form == "stream.arrow"
        assert read == rows[: len(read)]
    (tmp_path / form).write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataInvalid, match="cut short or damaged"):
        read_data(tmp_path / form, skip_invalid=True)


def test_an_offset_outside_of_the_file_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "it.arrow"
    pyarrow.feather.write_feather(pa.table({"text": ["a", "b", "c"], "label": ["x"] * 3}), path, "uncompressed")
    offsets = struct.pack("<4i", 0, 1, 2, 3)
    assert path.read_bytes().count(offsets) == 2
    path.write_bytes(path.read_bytes().replace(offsets, struct.pack("<4i", 0, 1, 1 << 30, 3)))
    with pytest.raises(DataInvalid, match="cut short or damaged"):
        read_data(path, skip_invalid=True)


def test_a_codec_that_is_not_built_in_is_named(tmp_path: Path) -> None:
    path = tmp_path / "it.parquet"
    pq.write_table(pa.table({"text": ["a"], "label": ["x"]}), path, compression="snappy")
    content = path.read_bytes()
    footer = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
    # A column's metadata: its path, then its codec, a varint in zigzag. 1 is snappy; 3 is LZO, which nobody builds in.
    forged = content[footer:].replace(b"\x04text\x15\x02", b"\x04text\x15\x06")
    assert forged != content[footer:]
    path.write_bytes(content[:footer] + forged)
    with pytest.raises(DataInvalid, match="compression or an encoding that the installed pyarrow does not read"):
        read_data(path)


def test_a_page_that_unpacks_to_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch) -> None:
    """64 MiB in a file of some KB, with 24 MiB to read it in besides what Python and pyarrow take."""
    table = pa.table({"text": ["a" * (64 << 20)], "label": ["x"]})
    pq.write_table(table, tmp_path / "it.parquet", compression="zstd", use_dictionary=False)
    pyarrow.feather.write_feather(table, tmp_path / "it.feather", "zstd")
    del table
    monkeypatch.setattr(columnar, "_MAX_MEMORY", 60 << 20)
    for name in ("it.parquet", "it.feather"):
        assert (tmp_path / name).stat().st_size < 1 << 16
        with pytest.raises(DataInvalid, match="takes more than 60 MiB of memory"):
            read_data(tmp_path / name)


def test_one_long_text_for_many_rows_is_refused(tmp_path: Path, monkeypatch) -> None:
    """A dictionary of one text of 1 MiB, for 100,000 rows, in a file of some KB."""
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), ["a" * (1 << 20)])
    pq.write_table(pa.table({"text": long, "label": ["x"] * 100_000}), tmp_path / "it.parquet", compression="zstd")
    monkeypatch.setattr(columnar, "_MAX_UNPACKED", 4 << 20)
    with pytest.raises(DataInvalid, match="holds more than 100 times its size"):
        read_data(tmp_path / "it.parquet")
    monkeypatch.undo()
    # A text may be long, and not too long.
    write(tmp_path / "it.parquet", text=["a" * MAX_CELL, "a" * (MAX_CELL + 1)], label=["x", "y"])
    found = read_data(tmp_path / "it.parquet", skip_invalid=True)
    assert [len(each.text) for each in found.examples] == [MAX_CELL]
    assert found.skipped.first == ("row 2: a text of more than 16 MiB; shorten it or leave it out",)


def test_rows_that_unpack_to_far_more_than_the_file_are_refused(tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "it.parquet", text=["a" * 1000] * 3000, label=["x"] * 3000)
    monkeypatch.setattr(columnar, "_MAX_UNPACKED", 1 << 20)
    with pytest.raises(DataInvalid, match="holds more than 100 times its size, and more than 1 MiB"):
        read_data(path)
    monkeypatch.undo()
    assert len(read_data(path).examples) == 3000


def test_a_file_larger_than_the_memory_is_read_in_pages(tmp_path: Path, monkeypatch) -> None:
    """40 MB of text that does not compress, with 30 MiB to read them in besides what Python and pyarrow take."""
    texts = [hashlib.shake_256(each.to_bytes(2)).hexdigest(2_000) for each in range(10_000)]
    table = pa.table({"text": texts, "label": ["x"] * len(texts)})
    pq.write_table(table, tmp_path / "it.parquet", use_dictionary=False, row_group_size=len(texts))
    stream(table, tmp_path / "it.arrow", 500)
    del table
    monkeypatch.setattr(columnar, "_MAX_MEMORY", 65 << 20)
    for name in ("it.parquet", "it.arrow"):
        assert [each.text for each in read_examples(tmp_path / name)] == texts


def test_a_reader_that_dies_is_a_sentence(tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "it.parquet", text=["a"], label=["x"])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DataInvalid, match=r"the process that read it ended \(1\)"):
        read_data(path)


def test_without_pyarrow_the_sentence_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "it.parquet", text=["a"], label=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataInvalid, match=re.escape("needs pyarrow; `pip install '.[arrow]'` in Tacit's source")):
        read_data(path)


def test_a_folder_is_one_that_datasets_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    datasets_folder(table_of(), folder)
    first = data_digest(folder)
    assert first == hashlib.sha256(b"".join(data_digest(each) for each in sorted(folder.glob("*.arrow")))).digest()
    with pytest.raises(DataInvalid, match="is a folder; name a file in it, or a folder that the datasets library"):
        read_data(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test\\u001b[2J", "dev"]}')
    with pytest.raises(DataInvalid, match=re.escape(f"several splits (train, dev); name the folder of one, such as {tmp_path}/train")):  # fmt: skip # noqa: E501
        read_data(tmp_path)
    pq.write_table(table_of().rename_columns(["a", "b", "c", "d"]), folder / "other.arrow")
    for named, sentence in (
        ("data-00000-of-00001.arrow", "does not exist"),
        ("../rows.arrow", "does not list the folder's files"),
        ("", "does not list the folder's files"),
        (3, "does not list the folder's files"),
    ):
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": named}]}))
        with pytest.raises(DataInvalid, match=sentence):
            read_data(folder)
    for state in ("[]", "{", '{"_data_files": 7}', "[" * 100_000):
        (folder / "state.json").write_text(state)
        with pytest.raises(DataInvalid, match=r"cannot be read; write the folder again|does not list"):
            read_data(folder)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00002.arrow"}, {"filename": "other.arrow"}]})
    )
    with pytest.raises(DataInvalid, match="its files have different columns"):
        read_data(folder, skip_invalid=True)
    (folder / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(DataInvalid, match="has no rows"):
        read_data(folder)


def test_the_reader_imports_no_numpy(tmp_path: Path) -> None:
    """Its import takes as long as pyarrow's, and more memory than a page."""
    path = write(tmp_path / "it.parquet", text=["a"], label=["x"])
    start = "runpy.run_module('learning.text.columnar_reader', run_name='__main__')"
    code = f"import runpy, sys; {start}; print(sys.modules['numpy'])"
    request = json.dumps({"files": [str(path)], "columns": ["text"], "limit": 1 << 30})
    done = subprocess.run([sys.executable, "-c", code], input=request, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ['["a"]', "null", "None"]


def test_the_reader_is_started_alone(tmp_path: Path) -> None:
    """It loads nothing that a member's data could name, and stands below everything that knows a network."""
    source = (ROOT / "learning" / "text" / "columnar_reader.py").read_text()
    assert not re.search(r"^\s*(from|import) (learning|edge_client|coordinator|tacit)", source, re.MULTILINE)


def test_columns_of_dialogues_are_read_like_json_lines(tmp_path):
    asked = [{"prompt": "who?", "response": "she"}, {"prompt": "when?", "response": "at noon"}]
    messages = [[{"role": "user", "content": "who?"}, {"role": "assistant", "content": "she"}]]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    pq.write_table(pa.Table.from_pylist(asked), tmp_path / "asked.parquet")
    pq.write_table(pa.table({"messages": [json.dumps(each) for each in messages]}), tmp_path / "told.parquet")
    (tmp_path / "told.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    pq.write_table(pa.table({"messages": messages}), tmp_path / "nested.parquet")
    for name in ("asked", "told"):
        found = read_data(tmp_path / f"{name}.parquet")
        assert found.dialogue_columns
        assert found.examples == read_data(tmp_path / f"{name}.jsonl").examples
    with pytest.raises(DataInvalid, match=r"column 'messages' holds .* write text, which for messages is their JSON"):
        read_data(tmp_path / "nested.parquet")
    # Beside a text, columns that nobody named may hold something else.
    pq.write_table(
        pa.table({"text": ["t"], "label": ["x"], "messages": messages, "response": [3]}), tmp_path / "texts.parquet"
    )
    assert read_data(tmp_path / "texts.parquet").examples == [Example("t", "x")]
    with pytest.raises(DataInvalid, match=r"column '(messages|response)' holds"):
        read_data(tmp_path / "texts.parquet", messages="messages")
    # Prompts alone are read as in a table with commas, and are no labelled texts.
    pq.write_table(pa.table({"prompt": ["who?"]}), tmp_path / "half.parquet")
    (tmp_path / "half.csv").write_text("prompt\nwho?\n")
    (half,) = read_data(tmp_path / "half.parquet").examples
    assert [half] == read_data(tmp_path / "half.csv").examples
    with pytest.raises(DataInvalid, match="an example has no label"):
        check_labels([half], ["x"])


TURNS = json.dumps([{"role": "user", "content": "who?"}, {"role": "assistant", "content": "we"}])
CELLS = {"text": "a text", "prompt": "what?", "response": "so", "messages": TURNS, "label": "A"}


@pytest.mark.parametrize(
    "named", [{}, {"prompt": "prompt"}, {"response": "response"}, {"messages": "messages"}], ids=str
)
@pytest.mark.parametrize("label", [None, "label"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_whatever_columns_a_file_has_it_is_read_or_refused_as_a_table(
    tmp_path: Path, named: dict[str, str], label: str | None, count: int
) -> None:
    for columns in itertools.combinations(CELLS, count):
        row = {each: CELLS[each] for each in columns}
        parquet = write(tmp_path / "it.parquet", **{name: [cell] for name, cell in row.items()})
        with (tmp_path / "it.csv").open("w", newline="") as file:
            csv.writer(file).writerows([row.keys(), row.values()])
        assert outcome(parquet, label, named) == outcome(tmp_path / "it.csv", label, named), columns


def outcome(path: Path, label: str | None, named: dict[str, str]) -> tuple[list[Example], bool] | type[DataInvalid]:
    """The examples and whether they can be dialogues, or how the file is refused."""
    try:
        found = read_data(path, label=label, rows_for="prompts", **named)
    except DataInvalid as error:
        return type(error)
    return found.examples, found.dialogue_columns


def test_prompts_alone_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "it.parquet", prompt=["What is it?", "And?"])
    found = read_data(path, label=None, rows_for="prompts")
    assert [each.text for each in found.examples] == ["What is it?", "And?"]
    assert not found.dialogue_columns
