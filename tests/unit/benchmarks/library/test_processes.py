"""Tasks of a benchmark in several processes: each runs once, what follows comes first, and a failure ends no other."""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import psutil
import pytest

from benchmarks.library.processes import count, run_in_processes
from benchmarks.library.record import NoData
from tests.support.places import ROOT

_folder = Path()


def begin(folder: Path) -> None:
    global _folder  # noqa: PLW0603
    _folder = folder


def act(task: str) -> list[str]:
    """Appends the task to a file, as one write."""
    with (_folder / "log").open("a") as file:
        file.write(f"{task}\n")
    if task == "bad":
        raise ValueError("no good")
    if task == "no data":
        raise NoData("a data set is missing")
    if task == "dies":
        os._exit(3)
    if task == "waits":
        (_folder / "pid").write_text(str(os.getpid()))
        threading.Event().wait()
    return [f"{task}1", "shared"] if task in ("a", "b") else []


def ran(folder: Path, tasks: list[str], processes: int, until: float = float("inf")) -> tuple[list[str], list[str]]:
    failed = run_in_processes(tasks, act, processes, begin=begin, given=(folder,), until=until, imports=())
    log = folder / "log"
    return failed, log.read_text().split() if log.exists() else []


def test_what_follows_from_a_task_comes_before_what_waits(tmp_path: Path) -> None:
    assert ran(tmp_path, ["a", "b", "c"], 1) == ([], ["a", "a1", "shared", "b", "b1", "c"])


def test_a_failing_task_is_named_and_ends_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failed, log = ran(tmp_path, ["bad", "no data", "a", "b", "a", "c"], 2)
    assert set(failed) == {"bad", "no data"}
    assert sorted(log) == sorted(["a", "a1", "b", "b1", "bad", "c", "no", "data", "shared"])
    assert "bad failed:" in capfd.readouterr().err


def test_no_task_begins_after_the_end(tmp_path: Path) -> None:
    assert ran(tmp_path, ["a"], 2, until=time.monotonic() - 1) == ([], [])


@pytest.mark.parametrize("word", ["0", "1001", "-1", "x", "", "1.5", "\u0663"])
def test_what_is_no_number_of_processes_is_a_sentence(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number from 1 to 1000"):
        count(word)
    assert count("13") == 13


def test_a_process_that_dies_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(BrokenProcessPool):
        ran(tmp_path, ["dies"], 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_the_one_that_began_them(how: signal.Signals, tmp_path: Path) -> None:
    """A GPU would stay taken by trainings that nobody waits for."""
    words = [sys.executable, "-m", "tests.unit.benchmarks.library.test_processes", str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) as run:
        pid = tmp_path / "pid"
        while not (pid.exists() and pid.read_text()):
            assert run.poll() is None
        process = psutil.Process(int(pid.read_text()))
        try:
            run.send_signal(how)
            assert run.wait(30) != 0
            gone, _ = psutil.wait_procs([process], timeout=30)
            assert gone
        finally:
            run.kill()


if __name__ == "__main__":
    # A shell's background jobs ignore it, and so would this one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ran(Path(sys.argv[1]), ["waits"], 1)
