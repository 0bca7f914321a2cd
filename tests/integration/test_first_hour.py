"""docs/first-hour.md typed as written: a shell, and every command in order.

The commands run in warm processes, and in the long tests as installed: the wheel in an environment of its own. Like a
newcomer, the test types a block only after the output that the page shows for the block before has appeared. The
page's installation would download for an hour, so the test builds the wheel and installs it beside the dependencies of
the environment that runs the tests. MiniLM, 84 MB, comes from the package index that pip is configured with. If pip
cannot fetch it, the test is skipped.
"""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import tacit
from learning.backbones.collection import Collection
from learning.backbones.packaged import PACKAGED
from learning.text.data import read_examples
from simulation.word_counts import predicted
from tacit.job import JobSpec
from tacit.mechanism import NoMechanism
from tests.support.packaged_backbones import wheel_of
from tests.support.processes import ROOT, free_ports  # type: ignore[attr-defined]
from tests.support.warm_command import commands

PAGE = ROOT / "docs" / "first-hour.md"
INSTALLATION = """\
python3.11 -m venv .venv
.venv/bin/pip install -c constraints.txt torch==2.13.0
.venv/bin/pip install -c constraints.txt '.[coordinator,edge,export]'
export PATH="$PWD/.venv/bin:$PATH"
"""
PATIENCE = 300.0
DESK, JOB = ROOT / "examples" / "desk", ROOT / "examples" / "first-hour" / "job.toml"
# Per cent of the test messages that the best classifier on word counts gets: without noise, with all rows in one place.
WORD_COUNTS = 84.0


@dataclass
class Step:
    """The commands of a block, and the output that the page shows beneath it (`...` stands for anything)."""

    typed: str
    shown: list[str] = field(default_factory=list)


def steps_of(page: str) -> list[Step]:
    steps: list[Step] = []
    for kind, text in re.findall(r"^```(\w*)$\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE):
        if kind == "bash":
            steps.append(Step(text))
        else:
            assert kind == "text", f"a block of kind {kind!r}: nobody runs it, nobody shows it"
            steps[-1].shown = text.splitlines()
    return steps


def pattern_of(line: str) -> re.Pattern[str]:
    """A pattern for a line of the page. Runs of spaces count as one space, and `...` matches anything."""
    words = " ".join(line.split())
    return re.compile(".*".join(re.escape(part.strip()) for part in words.split("...")))


def missing(shown: list[str], printed: list[str]) -> str | None:
    """The first line of the page that was not printed, searched in the page's order."""
    at = 0
    flat = [" ".join(line.split()) for line in printed]
    for line in shown:
        if line.strip() == "...":
            continue
        pattern = pattern_of(line)
        found = next((number for number in range(at, len(flat)) if pattern.fullmatch(flat[number])), None)
        if found is None:
            return line
        at = found + 1
    return None


class Shell:
    """An interactive bash with job control. The output of the shell and its children arrives line by line."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._number = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def type(self, step: Step) -> list[str]:
        """Types the lines one by one and waits for the output that the page shows. Every line must succeed.

        Returns:
            The lines that were printed meanwhile.
        """
        printed: list[str] = []
        for command in step.typed.splitlines():
            self._number += 1
            done = f"--- {self._number} ended with"
            assert self._process.stdin is not None
            self._process.stdin.write(f"{command}\necho '{done}' $?\n")
            self._process.stdin.flush()
            status = self._until(lambda line, done=done: line.startswith(done), printed, command)
            assert status.endswith(" 0"), f"{command}: {status}\n" + "\n".join(printed)
        if missing(step.shown, printed) is not None:
            self._until(lambda _: missing(step.shown, printed) is None, printed, f"{step.typed}to show its lines")
        return printed

    def _until(self, holds, printed: list[str], what: str) -> str:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"waited for {what}; there is only:\n" + "\n".join(printed))
            if not line.startswith("--- "):
                printed.append(line)
            if holds(line):
                return line

    def close(self) -> None:
        """Ends the shell and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=PATIENCE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the built wheel and the dependencies of the environment that runs tests."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, ROOT], check=True, capture_output=True, timeout=200)
    (wheel,) = folder.glob("tacit_federation-*.whl")
    home = folder / "environment"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", wheel], check=True, capture_output=True, timeout=200
    )
    packages = Path(sysconfig.get_path("purelib", vars={"base": home, "platbase": home}))
    # This path comes after the wheel's own folder. Python does not process .pth files in a path added like this, so the
    # one that points to the working copy has no effect.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    rooms = "tacit", "toolkit", "secure_agg", "learning", "coordinator", "edge_client", "export", "simulation"
    code = f"import {', '.join(rooms)}; print(*(room.__path__[0] for room in ({', '.join(rooms)})))"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd=folder).stdout.split()
    assert found
    assert all(Path(place).is_relative_to(packages) for place in found), found
    return home / "bin"


@pytest.fixture(params=["warm", pytest.param("installed", marks=pytest.mark.long)])
def shell(request: pytest.FixtureRequest, pip_cache: Path, tmp_path: Path) -> Iterator[Shell]:
    # Where pip looks is the machine's own matter, as for a newcomer.
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("LANG", "LC_ALL", "TMPDIR") or name.startswith("PIP_") or name.lower().endswith("_proxy")
    }
    (tmp_path / ".config").mkdir()
    if (settings := Path("~/.config/pip").expanduser()).is_dir():
        (tmp_path / ".config" / "pip").symlink_to(settings)
    if request.param == "warm":
        programs = tmp_path / ".bin"
        programs.mkdir()
        kept |= commands(programs)
    else:
        programs = request.getfixturevalue("installed")
    opened = Shell(
        ROOT,
        kept
        | {"HOME": str(tmp_path), "PIP_CACHE_DIR": str(pip_cache), "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin"},
    )
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def pip_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache in which pip has MiniLM when the page asks. Skips a test where pip cannot fetch it."""
    cache = tmp_path_factory.mktemp("pip-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CACHE_DIR", str(cache))
        wheel_of("minilm", tmp_path_factory.mktemp("minilm"))
        yield cache


@pytest.mark.timeout(900)
def test_every_command_of_the_first_hour_works_as_written(shell: Shell, tmp_path: Path) -> None:
    installation, *steps = steps_of(PAGE.read_text(encoding="utf-8"))
    assert installation.typed == INSTALLATION
    # The only change to the page: ports that nobody else uses.
    made = [step for step in steps if step.typed == "coordinator init federation\n"]
    assert len(made) == 1
    ports = zip(("enrolment", "federation", "metrics"), free_ports(3), strict=True)
    made[0].typed = f"coordinator init federation {' '.join(f'--{name}-port={port}' for name, port in ports)}\n"
    measured = [step for step in steps if "coordinator evaluate first-hour " in step.typed]
    assert len(measured) == 1
    for step in steps:
        printed = shell.type(step)
        if step is measured[0]:
            (accuracy,) = re.findall(r"^version \d+: accuracy ([\d.]+) %", "\n".join(printed), re.MULTILINE)
    # What the page promises, under noise.
    assert float(accuracy) > WORD_COUNTS
    # The member has an ONNX file to keep, and no token is left.
    assert (tmp_path / "first-hour" / "model" / "model.onnx").is_file()
    assert not list((tmp_path / "first-hour").glob("*.token"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_first_hours_job_beats_word_counts_with_noise_and_by_more_without(tmp_path: Path) -> None:
    """The page's figures, by virtual members over the same rows and the same MiniLM. Noise is drawn from a seed."""
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert "The accuracy is about 90 %" in page
    assert "Without noise the same layer gets 93." in page
    assert "gets [77 to 84](" in page
    train, test = (read_examples(DESK / f"{part}.jsonl") for part in ("train", "test"))
    counted = predicted(train, test)
    words = 100 * sum(label == row.label for label, row in zip(counted, test, strict=True)) / len(test)
    assert 77 <= words <= WORD_COUNTS
    collection = Collection(tmp_path / "backbones")
    (tmp_path / "wheel").mkdir()
    collection.add_packaged(
        PACKAGED["minilm"], wheel_of("minilm", tmp_path / "wheel"), show=False, progress=lambda done, total: None
    )
    noised = JobSpec.from_toml(JOB)
    plain = noised.model_copy(update={"mechanism": NoMechanism()})
    how = {"members": 3, "test": DESK / "test.jsonl", "backbones": collection.path}
    found = [
        100 * tacit.simulate(job, DESK / "train.jsonl", seed=seed, **how).accuracy
        for job, seed in ((noised, 0), (noised, 1), (plain, 0))
    ]
    *private, without = found
    assert all(87 <= each <= 93 for each in private), found
    assert without == pytest.approx(93, abs=1.5), found


def test_what_is_installed_imports_and_answers(installed: Path) -> None:
    """In every run. The long tests type the whole page with it."""
    for program in ("coordinator", "edge_client"):
        done = subprocess.run([installed / program, "--help"], capture_output=True, text=True, check=True, timeout=200)
        assert f"Usage: {program}" in done.stdout


def test_a_line_that_was_never_printed_is_found() -> None:
    printed = ["ok    name  localhost:7441 is 127.0.0.1", "ok    session  taken"]
    assert missing(["...", "ok name ...", "ok   session  taken"], printed) is None
    assert missing(["ok session taken", "ok name ..."], printed) == "ok name ..."
    assert missing(["ok tls ..."], printed) == "ok tls ..."
