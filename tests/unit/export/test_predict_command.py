"""`predict` as a person runs it: texts in, labels out, and no torch in the process."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import typer

from edge_client.cli.predict import predict
from export.onnx import ExportReport
from export.predictor import Predictor
from tacit.bundle import read_bundle
from toolkit.console import CommandFailed, ExitCode

Exported = tuple[Path, ExportReport]
LABELS = {"HUM", "LOC", "NUM"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs the command with these arguments and this standard input; returns the lines that it printed."""

    def command(*arguments: object, stdin: bytes = b"") -> list[str]:
        app = typer.Typer()
        app.command()(predict)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False))
        monkeypatch.setattr(sys, "argv", ["predict", *map(str, arguments)])
        app(args=[str(argument) for argument in arguments], standalone_mode=False)
        return capsys.readouterr().out.splitlines()

    return command


def test_every_way_to_give_texts_gives_the_same_lines(
    run: Callable[..., list[str]], exported: Exported, tmp_path: Path, examples_file: Path
) -> None:
    texts = [json.loads(line)["text"] for line in examples_file.read_text(encoding="utf-8").splitlines()]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts) + "\r\n", encoding="utf-8")
    (tmp_path / "v1.2.tsv").write_text("no\tquestion\n" + "".join(f"1\t{text}\n" for text in texts), encoding="utf-8")
    lines = run("--bundle", exported[0], *texts)
    assert len(lines) == len(texts)
    for line, prediction in zip(lines, Predictor.load(exported[0]).predict(texts), strict=True):
        label, probability = line.split()
        assert label == prediction.label
        assert float(probability) == pytest.approx(prediction.probability, abs=1e-4)
    assert run("--bundle", exported[0], "--file", examples_file) == lines
    assert run("--bundle", exported[0], "--file", tmp_path / "texts.txt") == lines
    assert run("--bundle", exported[0], "--file", tmp_path / "v1.2.tsv", "--text", "question") == lines
    assert run("--bundle", exported[0], "--batch", 2, stdin="\n".join(texts).encode()) == lines


def test_an_answer_that_is_no_number_is_refused(
    run: Callable[..., list[str]], exported: Exported, damaged: Callable[..., Path]
) -> None:
    model = onnx.load_from_string(read_bundle(exported[0]).files["model.onnx"])
    bias = next(each for each in model.graph.initializer if list(each.dims) == [3])
    bias.CopyFrom(onnx.numpy_helper.from_array(np.array([np.nan, 0, 0], np.float32), bias.name))
    with pytest.raises(CommandFailed, match="logits are not numbers") as failed:
        run("--bundle", damaged("model.onnx", model.SerializeToString(), signed=True), "--json", "where")
    assert failed.value.code == ExitCode.FAILED


def test_json_prints_one_object_on_each_line(run: Callable[..., list[str]], exported: Exported) -> None:
    lines = run("--bundle", exported[0], "--json", "who wrote the book", "where")
    assert len(lines) == 2
    for line in lines:
        content: dict[str, Any] = json.loads(line)
        assert content.keys() == {"label", "probability", "probabilities"}
        assert content["probabilities"].keys() == LABELS
        assert content["probabilities"][content["label"]] == content["probability"]


def test_unreadable_rows_are_skipped_on_request(
    run: Callable[..., list[str]], exported: Exported, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "who wrote the book"}\n{"text": ""}\n{"text": "where \xff"}\n{"text": "where"}\n')
    with pytest.raises(CommandFailed, match=r"line 3: not UTF-8.*; or skip such rows with --skip-invalid"):
        run("--bundle", exported[0], "--file", file)
    expected = run("--bundle", exported[0], "who wrote the book", "where")
    assert run("--bundle", exported[0], "--file", file, "--skip-invalid") == expected
    plain = tmp_path / "rows.txt"
    plain.write_text("who")
    with pytest.raises(CommandFailed, match=r"is for files with columns"):
        run("--bundle", exported[0], "--file", plain, "--skip-invalid")


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        (["--file", "BESIDE/none.jsonl"], b"", ExitCode.NOT_FOUND, "none.jsonl does not exist"),
        (["--file", "BESIDE/rows.jsonl", "--text", "words"], b"", ExitCode.USAGE, "there are: text, label"),
        (["--file", "BESIDE/rows.jsonl", "text too"], b"", ExitCode.USAGE, "not both"),
        ([], b"\n \n", ExitCode.USAGE, "no text to label"),
        ([], b"\xff\xfe", ExitCode.USAGE, "standard input is not UTF-8"),
        (["  "], b"", ExitCode.USAGE, "no text to label"),
    ],
)
def test_a_refusal_gives_a_sentence(
    run: Callable[..., list[str]],
    exported: Exported,
    examples_file: Path,
    arguments: list[str],
    stdin: bytes,
    code: ExitCode,
    says: str,
) -> None:
    given = [argument.replace("BESIDE", str(examples_file.parent)) for argument in arguments]
    with pytest.raises(CommandFailed, match=says) as caught:
        run("--bundle", exported[0], *given, stdin=stdin)
    assert caught.value.code == code


def test_a_missing_or_damaged_bundle_gives_a_sentence(
    run: Callable[..., list[str]], tmp_path: Path, damaged: Callable[..., Path]
) -> None:
    with pytest.raises(CommandFailed, match="does not exist") as caught:
        run("--bundle", tmp_path / "none", "who")
    assert caught.value.code == ExitCode.NOT_FOUND
    with pytest.raises(CommandFailed, match=r"model\.onnx differs") as caught:
        run("--bundle", damaged("model.onnx", b"", signed=False), "who")
    assert caught.value.code == ExitCode.USAGE


def test_no_torch_is_imported(exported: Exported) -> None:
    program = """
import sys, typer
from edge_client.cli.predict import predict
light = {"torch", "numpy", "tokenizers", "onnxruntime"} & sys.modules.keys()
assert not light, f"imported at start-up: {light}"
app = typer.Typer()
app.command()(predict)
try:
    app()
finally:
    sys.stderr.write(" ".join(sorted({"torch", "transformers", "opacus", "onnx", "onnxscript"} & sys.modules.keys())))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--bundle", exported[0]],
        input="who wrote the book?\nwhere\n",
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stderr == ""
    assert [line.split()[0] in LABELS for line in done.stdout.splitlines()] == [True, True]
