"""Rows from tables of word vectors and from other models' embeddings: the right rows, and no others."""

import gzip
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from learning.text.encoder import word_tokenizer, wordpiece_tokenizer
from learning.text.tables import TableInvalid, entries_of, fill_from_table, width_of, words_of

WORDS = ["cat", "dog", "##s", "the"]
IDS = entries_of(word_tokenizer(WORDS))
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "Cat"]


def started() -> np.ndarray:
    """An embedding at its start: zero for the padding, anything for the rest."""
    embedding = np.full((6, 3), 9, dtype=np.float32)
    embedding[0] = 0
    return embedding


def test_the_padding_is_not_an_entry():
    assert IDS == {"[UNK]": 1, "cat": 2, "dog": 3, "##s": 4, "the": 5}


@pytest.mark.parametrize("name", ["table.txt", "table.txt.gz"])
def test_words_of_a_text_table(tmp_path, name):
    table = b"cat 1 2 3\nzebra 0 0 0\ncat 7 7 7\nthe -1 0.5 1e-3\n[PAD] 1 1 1\n"
    (tmp_path / name).write_bytes(gzip.compress(table) if name.endswith("gz") else table)
    embedding = started()
    assert fill_from_table(embedding, tmp_path / name, IDS) == 2
    assert embedding[2].tolist() == [1, 2, 3]
    assert np.array_equal(embedding[5], np.array([-1, 0.5, 1e-3], dtype=np.float32))
    assert not embedding[0].any()
    assert (embedding[[1, 3, 4]] == 9).all()


def test_a_tables_words_come_in_its_order(tmp_path):
    (tmp_path / "table.txt").write_text("The 1 2 3\r\nnew york 4 5 6\ncat 7 8 9\n\n", encoding="utf-8-sig")
    assert list(words_of(tmp_path / "table.txt")) == ["The", "new york", "cat", ""]
    assert list(words_of(checkpoint(tmp_path / "bert"))) == PIECES
    with pytest.raises(TableInvalid, match=r"none does not exist; check --embedding"):
        next(words_of(tmp_path / "none", named="--embedding"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableInvalid, match=r"neither vocab\.txt nor tokenizer\.json; check --embedding"):
        next(words_of(tmp_path / "empty", named="--embedding"))


@pytest.mark.parametrize("start", ["400000 3\n", "\n", "cat\t1\t2\t3\n", "cat 1\n"])
def test_a_first_line_without_a_word_and_its_vector_is_refused(tmp_path, start):
    """And before the rest is read, since the words would be wrong."""
    table = tmp_path / "table.txt"
    table.write_text(start + "the 1 2 3\n" * 9)
    with pytest.raises(TableInvalid, match=r"table\.txt, line 1: \d numbers, and not a word and its vector.*header"):
        next(words_of(table))
    with pytest.raises(TableInvalid, match=r"table\.txt, line 1: \d numbers, and not a word and its vector"):
        width_of(table)


@pytest.mark.parametrize("name", ["table.txt", "table.txt.gz"])
def test_the_width_of_a_text_table_is_that_of_its_first_line(tmp_path, name):
    table = b"cat 1 2 3 4\r\nnew york 4 5 6 7\n"
    (tmp_path / name).write_bytes(gzip.compress(table) if name.endswith("gz") else table)
    assert width_of(tmp_path / name) == 4
    assert fill_from_table(np.zeros((6, 4), np.float32), tmp_path / name, IDS) == 1
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    with pytest.raises(TableInvalid, match=r"is empty; check --embedding"):
        width_of(tmp_path / name, named="--embedding")


def test_the_width_of_a_checkpoint_is_found_without_reading_numbers(tmp_path):
    import tracemalloc

    assert width_of(checkpoint(tmp_path / "bert")) == 3
    large = checkpoint(tmp_path / "half", np.zeros((500_000, 7), np.float16))
    tracemalloc.start()
    try:
        assert width_of(large) == 7
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The file has 7 million bytes.
    assert peak < 1_000_000
    with pytest.raises(TableInvalid, match="its embedding has shape 9 and is not a matrix"):
        width_of(checkpoint(tmp_path / "flat", np.zeros(9, np.float32)))


def test_a_text_table_is_never_whole_in_memory(tmp_path):
    import tracemalloc

    with gzip.open(tmp_path / "large.gz", "wt", compresslevel=1) as file:
        for number in range(60_000):
            file.write(f"word{number} {number}.125 2.25 3.5{'0' * 200}\n")
        file.write("cat 1 2 3\n")
    embedding = started()
    tracemalloc.start()
    try:
        assert fill_from_table(embedding, tmp_path / "large.gz", IDS) == 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The table has 14 million bytes.
    assert peak < 2_000_000


def checkpoint(folder, rows=None, *, name="bert.embeddings.word_embeddings.weight", pieces=PIECES, **more):
    folder.mkdir(exist_ok=True)
    rows = np.arange(24, dtype=np.float32).reshape(8, 3) if rows is None else rows
    save_file(
        {name: rows, "encoder.layer.0.weight": np.zeros((2, 2), np.float32), **more}, folder / "model.safetensors"
    )
    if pieces:
        (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return folder


def test_rows_of_a_checkpoint_go_by_piece(tmp_path):
    embedding = started()
    assert fill_from_table(embedding, checkpoint(tmp_path / "bert"), IDS) == 4
    # There, "the" is piece 4, "cat" 5 and "##s" 6; they have [UNK] too.
    assert [embedding[IDS[word], 0] for word in ("the", "cat", "##s", "[UNK]", "dog")] == [12, 15, 18, 3, 9]
    assert not embedding[0].any()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_widths_of_floats_are_taken(tmp_path, dtype):
    folder = checkpoint(tmp_path / "bert", np.arange(24, dtype=dtype).reshape(8, 3))
    embedding = started()
    assert fill_from_table(embedding, folder, IDS) == 4
    assert embedding[5].tolist() == [12, 13, 14]


def test_bfloat16_is_taken(tmp_path):
    import torch
    from safetensors.torch import save_file as save_torch

    folder = checkpoint(tmp_path / "bert")
    rows = torch.arange(24, dtype=torch.bfloat16).reshape(8, 3)
    save_torch({"embeddings.word_embeddings.weight": rows}, folder / "model.safetensors")
    embedding = started()
    assert fill_from_table(embedding, folder, IDS) == 4
    assert embedding[5].tolist() == [12, 13, 14]


def test_weights_in_parts_and_pieces_in_a_tokenizer(tmp_path):
    folder = checkpoint(tmp_path / "bert", pieces=None)
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    save_file({"pooler.weight": np.zeros(2, np.float32)}, folder / "model-1.safetensors")
    index = {"weight_map": {"pooler.weight": "model-1.safetensors", "embeddings": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_bytes(wordpiece_tokenizer(PIECES))
    embedding = started()
    assert fill_from_table(embedding, folder, IDS) == 4
    assert embedding[5].tolist() == [12, 13, 14]
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(TableInvalid, match=r"names model-2\.safetensors and does not have it"):
        fill_from_table(embedding, folder, IDS)


def spoil_pieces(folder):
    (folder / "vocab.txt").unlink()


def spoil_tokenizer(folder):
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {}}}))


def spoil_json(folder):
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer.json").write_text("[]")


def spoil_model(folder):
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordPiece", "vocab": {"a": "x"}}}))


def pickle_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def spoil_weights(folder):
    (folder / "model.safetensors").write_bytes(b"x" * 100)


def lose_weights(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_pieces, r"has neither vocab\.txt nor tokenizer\.json; check --word-vectors"),
        (spoil_tokenizer, "its tokenizer is BPE, whose entries are neither words"),
        (spoil_json, "is not a JSON object; download"),
        (spoil_model, "is not a tokenizer; download"),
        (
            spoil_weights,
            r"model\.safetensors cannot be read as safetensors \(.*\); download it again; check --word-vectors",
        ),
        (lose_weights, r"has no model\.safetensors; .*; check --word-vectors"),
        (pickle_weights, r"has pytorch_model\.bin and no model\.safetensors: a pickle can run code"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, spoil, says):
    folder = checkpoint(tmp_path / "bert")
    spoil(folder)
    with pytest.raises(TableInvalid, match=says):
        fill_from_table(started(), folder, IDS, named="--word-vectors")
    with pytest.raises(TableInvalid, match=says):
        width_of(folder, named="--word-vectors")


@pytest.mark.parametrize(
    ("rows", "more", "says"),
    [
        (np.zeros((8, 4), np.float32), {}, "is 8 by 4, and model.embedding is 3; use a checkpoint of that width"),
        (np.zeros((5, 3), np.float32), {}, "more entries than its embedding has rows"),
        (np.full((8, 3), np.nan, np.float32), {}, "row 1 of its embedding is not finite"),
        (None, {"decoder.embed_tokens.weight": np.zeros((8, 3), np.float32)}, "2 embeddings of tokens"),
        (None, {"name": "lstm.weight"}, "no embedding of tokens among its weights"),
        (None, {"pieces": ["[PAD]", "a", "b"]}, "none of its words is in the vocabulary"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, rows, more, says):
    folder = checkpoint(tmp_path / "bert", rows, **more)
    embedding = started()
    with pytest.raises(TableInvalid, match=says):
        fill_from_table(embedding, folder, IDS)
    assert np.array_equal(embedding, started())
    # Asking for the width finds what is wrong with its shape or names.
    if "rows" in says or "of tokens" in says:
        with pytest.raises(TableInvalid, match=says):
            width_of(folder)


def test_a_missing_table_or_one_of_another_width_is_refused(tmp_path):
    (tmp_path / "table.txt").write_text("cat 1 2\n")
    with pytest.raises(TableInvalid, match=r"line 1: 2 numbers, and model.embedding is 3; use a table of that width"):
        fill_from_table(started(), tmp_path / "table.txt", IDS)
    with pytest.raises(TableInvalid, match=r"none\.txt does not exist; check --word-vectors"):
        fill_from_table(started(), tmp_path / "none.txt", IDS, named="--word-vectors")
