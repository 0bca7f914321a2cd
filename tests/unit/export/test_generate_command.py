"""`generate` as a person runs it: a question in, an answer as it is written, and no torch in the process."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from edge_client.cli.generate import generate
from export.generating import Generator, Sampling, Writing
from learning.text.dialogue import DialogueEncoder
from learning.text.turns import Dialogue, Turn
from tacit.bundle import write_bundle
from tests.support.tiny_generators import causal_library_model, write_generator_of
from toolkit.console import CommandFailed, ExitCode

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("generator") / "bundle"
    write_generator_of(causal_library_model("qwen3"), made)
    return made


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the command with these arguments and this standard input; returns what it printed."""

    def command(*arguments: object, stdin: bytes = b"") -> str:
        app = typer.Typer()
        app.command()(generate)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False))
        monkeypatch.setattr(sys, "argv", ["generate", *map(str, arguments)])
        app(args=[str(argument) for argument in (*arguments, "--threads", 1)], standalone_mode=False)
        return capsysbinary.readouterr().out.decode()

    return command


def answer_of(bundle: Path, dialogue: Dialogue, sampling: Sampling | None = None, **how: object) -> str:
    return "".join(Generator.load(bundle, threads=1).write(dialogue, sampling, **how))


def test_every_way_to_ask_gives_the_same_answer(run: Callable[..., str], bundle: Path, tmp_path: Path) -> None:
    expected = answer_of(bundle, Dialogue.of(QUESTION))
    assert run("--bundle", bundle, QUESTION) == f"{expected}\n"
    assert run("--bundle", bundle, stdin=QUESTION.encode()) == f"{expected}\n"
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "not read"}]
    rows.write_text(f"{json.dumps({'prompt': QUESTION})}\n\n{json.dumps({'messages': messages})}\n")
    printed = [json.loads(line) for line in run("--bundle", bundle, "--file", rows, "--json").splitlines()]
    assert [each["response"] for each in printed] == [expected, expected]
    assert run("--bundle", bundle, "--file", rows) == f"{expected}\n\n" * 2


def test_the_answer_appears_piece_by_piece(
    run: Callable[..., str], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    pieces: list[str] = []
    plain = Writing.__iter__

    def seen(writing: Writing) -> object:
        for piece in plain(writing):
            # Everything before this piece is flushed by now.
            pieces.append(piece)
            yield piece
            shown.append(flushed[-1] if flushed else "")

    flushed: list[str] = []
    real = sys.stdout.flush
    monkeypatch.setattr(Writing, "__iter__", seen)
    monkeypatch.setattr(sys.stdout, "flush", lambda: (flushed.append("".join(pieces)), real())[1])
    run("--bundle", bundle, QUESTION)
    assert len(pieces) > 3
    assert shown == ["".join(pieces[: number + 1]) for number in range(len(pieces))]


def test_options_reach_the_model(run: Callable[..., str], bundle: Path) -> None:
    sampling = Sampling(1.3, 40, 0.9, seed=5)
    options = ["--temperature", 1.3, "--top-k", 40, "--top-p", 0.9, "--seed", 5]
    expected = answer_of(bundle, Dialogue.of(QUESTION), sampling)
    assert run("--bundle", bundle, QUESTION, *options) == f"{expected}\n"
    assert expected != answer_of(bundle, Dialogue.of(QUESTION))
    printed = json.loads(run("--bundle", bundle, QUESTION, "--json", "--max-new-tokens", 3))
    assert (printed["tokens"], printed["ended"]) == (3, "length")
    greedy = answer_of(bundle, Dialogue.of(QUESTION))
    stop = greedy[len(greedy) // 2 :][:2]
    assert run("--bundle", bundle, QUESTION, "--stop", stop, "--stop", "never") == f"{greedy[: greedy.index(stop)]}\n"
    said = Dialogue((Turn("system", "be brief"), Turn("user", QUESTION)))
    assert run("--bundle", bundle, QUESTION, "--system", "be brief") == f"{answer_of(bundle, said)}\n"


def test_rows_of_one_prompt_have_answers_of_their_own(run: Callable[..., str], bundle: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": QUESTION}) + "\n")
    (first,) = _responses(run("--bundle", bundle, "--file", rows, "--temperature", 1.3, "--json"))
    assert first == answer_of(bundle, Dialogue.of(QUESTION), Sampling(1.3))
    rows.write_text((json.dumps({"prompt": QUESTION}) + "\n") * 5)
    found = _responses(run("--bundle", bundle, "--file", rows, "--temperature", 1.3, "--batch", 2, "--json"))
    assert found[0] == first
    assert len(set(found)) == 5


def _responses(printed: str) -> list[str]:
    return [json.loads(line)["response"] for line in printed.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["--bundle", "{there}"], "there is no question", ExitCode.USAGE),
        (["--bundle", "{there}", "  "], "there is no question", ExitCode.USAGE),
        (["--bundle", "{there}", "x", "--file", "y"], "a question or --file, not both", ExitCode.USAGE),
        (["--bundle", "{there}", "--file", "nowhere.jsonl"], "nowhere.jsonl does not exist", ExitCode.NOT_FOUND),
        (["--bundle", "{folder}/nowhere", "x"], "nowhere does not exist", ExitCode.NOT_FOUND),
        (["--bundle", "{folder}", "x"], "holds no bundle.json", ExitCode.USAGE),
        (["--bundle", "{there}", "late " * 300], r"the prompt has .* tokens.*shorten the prompt", ExitCode.USAGE),
        (["--bundle", "{there}", "x", "--top-p", "2"], "top_p is 2", ExitCode.USAGE),
        (["--bundle", "{there}", "x", "--stop", ""], "a stop string is empty", ExitCode.USAGE),
    ],
)
def test_what_cannot_be_answered_is_told(
    run: Callable[..., str], bundle: Path, tmp_path: Path, arguments: list[str], says: str, code: ExitCode
) -> None:
    with pytest.raises(CommandFailed, match=says) as failed:
        run(*(each.format(there=bundle, folder=tmp_path) for each in arguments))
    assert failed.value.code == code


@pytest.mark.parametrize(
    "row", ["[1]", "{", '{"prompt": 3}', '{"messages": []}', '{"messages": [{"role": "root", "content": "x"}]}']
)
def test_a_row_that_is_no_prompt_is_named(run: Callable[..., str], bundle: Path, tmp_path: Path, row: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "x"}}\n{row}\n')
    with pytest.raises(CommandFailed, match="line 2") as failed:
        run("--bundle", bundle, "--file", tmp_path / "rows.jsonl")
    assert failed.value.code == ExitCode.USAGE


def test_the_column_of_the_prompt_may_have_another_name(run: Callable[..., str], bundle: Path, tmp_path: Path) -> None:
    rows = tmp_path / "qa.csv"
    rows.write_text(f"Fråga,Svar\n{QUESTION},Paris\n")
    with pytest.raises(CommandFailed) as failed:
        run("--bundle", bundle, "--file", rows)
    assert failed.value.sentence.endswith(
        "no column 'prompt' or 'messages'; there are: Fråga, Svar. Name yours with --prompt"
    )
    assert (
        run("--bundle", bundle, "--file", rows, "--prompt", "Fråga")
        == f"{answer_of(bundle, Dialogue.of(QUESTION))}\n\n"
    )
    with pytest.raises(CommandFailed, match=r"no column 'Ask'; there are: Fråga, Svar\. Name yours with --prompt"):
        run("--bundle", bundle, "--file", rows, "--prompt", "Ask")
    with pytest.raises(CommandFailed, match="--prompt names a column of --file"):
        run("--bundle", bundle, QUESTION, "--prompt", "Fråga")
    (tmp_path / "texts.csv").write_text("text\nWhy?\n")
    with pytest.raises(CommandFailed, match="a row has no prompt; name its column with --prompt"):
        run("--bundle", bundle, "--file", tmp_path / "texts.csv")


def test_a_bundle_of_another_kind_is_refused(run: Callable[..., str], bundle: Path, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "README.md": b"x"}
    write_bundle(tmp_path / "hf", "hf", files)
    with pytest.raises(CommandFailed, match="is a hf bundle where a generator bundle is needed"):
        run("--bundle", tmp_path / "hf", "x")


def test_what_a_terminal_acts_on_is_not_printed(
    run: Callable[..., str], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DialogueEncoder, "decode", lambda _, ids: "\x1b[2J\n" * len(ids))
    printed = run("--bundle", bundle, QUESTION)
    assert "\x1b" not in printed
    assert printed == "\ufffd[2J\n" * 12 + "\n"


def test_output_that_cannot_be_written_is_told(
    run: Callable[..., str], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(CommandFailed, match="the answer cannot be written: No space left") as failed:
            run("--bundle", bundle, QUESTION)
        monkeypatch.undo()
    assert failed.value.code == ExitCode.FAILED


def test_a_reader_that_is_gone_is_no_error(
    run: Callable[..., str], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        run("--bundle", bundle, QUESTION)
        monkeypatch.undo()


def test_a_terminal_that_lacks_a_character_shows_another(
    run: Callable[..., str], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(DialogueEncoder, "decode", lambda _, ids: "北" * len(ids))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    run("--bundle", bundle, QUESTION)
    assert written.getvalue() == b"?" * 12 + b"\n"


def test_what_the_system_says_is_for_rows_that_do_not_say_it(
    run: Callable[..., str], bundle: Path, tmp_path: Path
) -> None:
    own = [{"role": "system", "content": "be long"}, {"role": "user", "content": QUESTION}]
    rows = [{"prompt": QUESTION}, {"messages": own}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = run("--bundle", bundle, "--file", tmp_path / "rows.jsonl", "--system", "be brief", "--json")
    said = [answer_of(bundle, Dialogue.of(QUESTION, system=system)) for system in ("be brief", "be long")]
    assert [json.loads(line)["response"] for line in given.splitlines()] == said
    assert said[0] != said[1]


def test_torch_is_not_imported(bundle: Path) -> None:
    program = """
import sys
from edge_client.cli import app
sys.argv = ["edge_client", "generate", "--bundle", sys.argv[1], "--threads", "1", "What is it?"]
try:
    app()
except SystemExit as done:
    assert not done.code, done.code
heavy = {"torch", "transformers", "peft", "opacus", "onnx", "sqlalchemy", "grpc"} & sys.modules.keys()
print(sorted(heavy), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, bundle],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stderr.strip().splitlines()[-1] == "[]"
    assert done.stdout.strip()
