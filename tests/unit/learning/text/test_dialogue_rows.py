"""Rows of dialogues in files: columns, rows without a response, and what is refused before anything is read further."""

import json

import pytest

from learning.text.data import read_data
from learning.text.dialogue import Dialogue, Turn
from learning.text.examples import (
    ColumnMissing,
    DataInvalid,
    Example,
    RowInvalid,
    check_dialogues,
    check_labels,
    dialogue_of,
)

SECRET = "biopsy Mrs Almeida"
ROWS = [("what is good?", "the food"), ("where?", "near, the river"), ("who?", None)]
EXAMPLES = [Example(p, None, r, None, Dialogue.of(p, r)) for p, r in ROWS]
JSONL = "".join(json.dumps({"prompt": p, **({} if r is None else {"response": r})}) + "\n" for p, r in ROWS)
CSV = "prompt,response\n" + "".join(f'{p},"{r or ""}"\n' for p, r in ROWS)
CHAT = [{"role": "system", "content": "be good"}, {"role": "user", "content": "why?"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "so", "name": "x"}]


def written(path, content):
    path.write_text(content)
    return path


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", JSONL), ("rows.csv", CSV)], ids=["jsonl", "csv"])
def test_prompts_and_responses_are_read_by_their_columns(tmp_path, name, content):
    found = read_data(written(tmp_path / name, content))
    assert found.examples == EXAMPLES
    assert found.dialogue_columns
    renamed = written(tmp_path / f"other-{name}", content.replace("prompt", "question").replace("response", "answer"))
    with pytest.raises(DataInvalid, match="no column 'text'"):
        read_data(renamed)
    assert read_data(renamed, prompt="question").examples[0].dialogue == Dialogue.of("what is good?")
    # A column that is named must have a text in each row.
    with pytest.raises(RowInvalid, match=r"no column 'answer'|no text in column 'answer'"):
        read_data(renamed, prompt="question", response="answer")
    assert len(read_data(renamed, prompt="question", response="answer", skip_invalid=True).examples) == 2
    with pytest.raises(DataInvalid, match=r"no column 'reply'.*--response"):
        read_data(renamed, prompt="question", response="reply")


def test_turns_are_read_from_json_lines_and_from_json_in_a_cell(tmp_path):
    dialogue = Dialogue((Turn("system", "be good"), Turn("user", "why?"), Turn("assistant", "so")))
    (example,) = read_data(written(tmp_path / "a.jsonl", json.dumps({"messages": ANSWERED}) + "\n")).examples
    assert example == Example("be good\nwhy?", None, "so", None, dialogue)
    cell = json.dumps(ANSWERED).replace('"', '""')
    table = written(tmp_path / "a.csv", f'id,turns\n1,"{cell}"\n')
    assert read_data(table, messages="turns").examples == [example]
    (unanswered,) = read_data(written(tmp_path / "b.jsonl", json.dumps({"messages": CHAT}) + "\n")).examples
    assert (unanswered.text_b, dialogue_of(unanswered)) == (None, None)
    with pytest.raises(DataInvalid, match="name one kind"):
        read_data(table, messages="turns", prompt="id")


def test_a_row_may_have_a_text_and_a_label_beside_its_dialogue(tmp_path):
    row = {"text": "t", "label": "x", "prompt": "p", "response": "r", "who": "w"}
    (example,) = read_data(written(tmp_path / "a.jsonl", json.dumps(row) + "\n"), person="who").examples
    assert example == Example("t", "x", None, "w", Dialogue.of("p", "r"))
    check_labels([example], ["x"])
    with pytest.raises(DataInvalid, match="no label"):
        check_labels(EXAMPLES, ["x"])
    with pytest.raises(DataInvalid, match="--person prompt"):
        read_data(tmp_path / "a.jsonl", person="prompt", prompt="prompt")


@pytest.mark.parametrize("other", [{"messages": 3}, {"messages": [{"role": "tool", "content": "x"}]}, {"prompt": 7}])
def test_a_column_that_nobody_named_may_hold_something_else_beside_a_text(tmp_path, other):
    path = written(tmp_path / "a.jsonl", json.dumps({"text": "t", "label": "x", **other}) + "\n")
    assert read_data(path).examples == [Example("t", "x")]
    assert read_data(path, skip_invalid=True).examples == [Example("t", "x")]
    (column,) = other
    with pytest.raises(RowInvalid, match=column):
        read_data(path, **{column: column})


@pytest.mark.parametrize(
    "messages",
    [
        SECRET,
        [],
        {},
        [SECRET],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "tool", "content": SECRET}],
        [{"role": ["user"], "content": SECRET}],
        [{"role": "user", "content": " "}],
        [{"role": "user", "content": f"{SECRET}\ud800"}],
        [{"role": "user", "content": SECRET}] * 1001,
    ],
)
def test_turns_that_are_none_are_named_without_their_text(tmp_path, messages):
    path = written(tmp_path / "a.jsonl", JSONL + json.dumps({"messages": messages}) + "\n")
    with pytest.raises(RowInvalid, match="line 4") as refused:
        read_data(path)
    assert SECRET not in str(refused.value)
    assert read_data(path, skip_invalid=True).examples == EXAMPLES


@pytest.mark.parametrize("cell", ["{", "", "[" * 100_000])
def test_a_cell_that_is_no_json_is_named(tmp_path, cell):
    path = written(tmp_path / "a.csv", f"messages,x\n{cell},1\n")
    with pytest.raises(RowInvalid, match="line 2: no dialogue"):
        read_data(path)


@pytest.mark.parametrize(
    ("header", "there"),
    [("text,label", False), ("prompt,text,label", False), ("prompt,response", True), ("messages,x", True)],
)
def test_only_the_header_decides_whether_there_are_columns_of_dialogues(tmp_path, header, there):
    cells = {"messages": '"[{""role"": ""user"", ""content"": ""a""}]"'}
    row = ",".join(cells.get(name, "a") for name in header.split(","))
    found = read_data(written(tmp_path / "a.csv", f"{header}\n{row}\n"))
    assert found.dialogue_columns is there
    if header == "prompt,response":
        check_dialogues(found.examples)
        return
    with pytest.raises(DataInvalid, match="--prompt and --response") as refused:
        check_dialogues(found.examples, dialogue_columns=there)
    assert isinstance(refused.value, ColumnMissing) is not there


def test_rows_that_cannot_be_learnt_are_counted():
    check_dialogues(EXAMPLES[:2])
    with pytest.raises(DataInvalid, match="2 of 4 rows have no response"):
        check_dialogues([*EXAMPLES, Example("a", "x")])
    system = Example("a", None, "b", None, Dialogue.of("a", "b", system="c"))
    check_dialogues([system])
    with pytest.raises(DataInvalid, match=r"1 of 1 rows .* turns of user, assistant only"):
        check_dialogues([system], ("user", "assistant"))
    later = Dialogue((*Dialogue.of("a", "b").turns, Turn("user", "c"), Turn("assistant", " ")))
    assert dialogue_of(Example("a", None, None, None, later)) is None
    # What follows the last response is not learnt from, whatever its role.
    ended = Dialogue((*Dialogue.of("a", "b").turns, Turn("user", "c"), Turn("system", "d")))
    assert dialogue_of(Example("a", None, None, None, ended), ("user", "assistant")) == Dialogue.of("a", "b")
    assert Dialogue.of("a").answered == Dialogue(())


def test_a_dialogue_prints_no_text():
    assert SECRET not in repr(Example("a", None, None, None, Dialogue.of(SECRET)))


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
@pytest.mark.parametrize(
    ("rows_for", "says"),
    [
        ("texts", "no column 'text'; there are: Fråga, Svar. Name yours with --text"),
        (
            "texts or dialogues",
            "no column 'text', 'prompt' or 'messages'; there are: Fråga, Svar. Name yours with --text; for a model "
            "that writes, with --prompt and --response, or with --messages",
        ),
        ("prompts", "no column 'prompt' or 'messages'; there are: Fråga, Svar. Name yours with --prompt"),
        (
            "dialogues",
            "no column 'prompt' or 'messages'; there are: Fråga, Svar. Rename yours to 'prompt' and 'response'",
        ),
    ],
)
def test_a_file_of_neither_texts_nor_dialogues_is_told_which_columns_to_name(tmp_path, name, rows_for, says):
    path = tmp_path / name
    path.write_text("Fråga,Svar\nVad?,Det.\n" if name == "rows.csv" else '{"Fråga": "Vad?", "Svar": "Det."}\n')
    with pytest.raises(DataInvalid) as failed:
        read_data(path, rows_for=rows_for)
    assert str(failed.value).endswith(says)
    # Whoever named a column is told of that one.
    with pytest.raises(DataInvalid, match=r"no column 'fraga'; .* Name yours with --text$"):
        read_data(path, text="fraga", rows_for=rows_for)
    with pytest.raises(DataInvalid, match=r"no column 'fraga'; .* Name yours with --prompt$"):
        read_data(path, prompt="fraga", rows_for=rows_for)
    assert read_data(path, prompt="Fråga", response="Svar", rows_for=rows_for).examples[0].dialogue is not None
