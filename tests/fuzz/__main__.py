"""Fuzzes one target, or each of them in turn.

    python -m tests.fuzz                         lists the targets
    python -m tests.fuzz TARGET --seconds 600    fuzzes it, from the seeds in tests/fuzz/seeds/TARGET
    python -m tests.fuzz all --seconds 600       each of them for so long, and a line for each
    python -m tests.fuzz --write-seeds           writes the seeds anew, from the examples that the tests hold

Needs `pip install atheris`. What it finds is written to `crash-...` in the current folder; `python -m tests.fuzz TARGET
FILE` runs that input again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

SEEDS = Path(__file__).parent / "seeds"
# An input that takes longer, in seconds of processor time, is a finding. So is a process that grows beyond, in MiB.
INPUT_SECONDS, MEMORY_MIB = 20, 2048
# libFuzzer's own limit counts wall time, which passes while other processes have the processor. It ends native code.
STUCK_SECONDS = 900
MAX_INPUT_BYTES = 65_536
_RUNS = re.compile(r"stat::number_of_executed_units: (\d+)")
_COVERED = re.compile(r"cov: (\d+)")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", help="a target, or `all`")
    parser.add_argument("files", nargs="*", type=Path, help="inputs to run again, instead of fuzzing")
    parser.add_argument("--seconds", type=int, default=60, help="processor time for each target, in seconds")
    parser.add_argument("--write-seeds", action="store_true", help="write tests/fuzz/seeds anew")
    options = parser.parse_args()
    if options.target is None:
        return _write_seeds() if options.write_seeds else _list()
    if options.target == "all":
        return _all(options.seconds)
    return _one(options.target, options.files, options.seconds)


def _list() -> int:
    from tests.fuzz.targets import TARGETS

    print("\n".join(TARGETS))
    return 0


def _write_seeds() -> int:
    from tests.fuzz.seeds_of import seeds_of
    from tests.fuzz.targets import TARGETS

    for name in TARGETS:
        folder = SEEDS / name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for number, data in enumerate(seeds_of(name)):
            (folder / f"{number:02}").write_bytes(data)
    return 0


def _one(name: str, files: list[Path], seconds: int) -> int:
    try:
        import atheris  # type: ignore[import-untyped]
    except ImportError:
        sys.exit("fuzzing needs atheris: pip install atheris")
    packages = ["tacit", "toolkit", "secure_agg", "coordinator", "edge_client", "learning", "export"]
    with atheris.instrument_imports(include=packages):
        from tests.fuzz.targets import TARGETS
    if name not in TARGETS:
        sys.exit(f"there is no target {name!r}; `python -m tests.fuzz` lists them")
    if files:
        for file in files:
            try:
                data = file.read_bytes()
            except OSError as error:
                sys.exit(f"{file} cannot be read ({error.strerror}); give an input that a run has written")
            TARGETS[name](data)
        return 0
    with tempfile.TemporaryDirectory() as found:
        words = [found, str(SEEDS / name), f"-timeout={STUCK_SECONDS}", f"-rss_limit_mb={MEMORY_MIB}"]
        words += [f"-max_len={MAX_INPUT_BYTES}", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *words], _timed(TARGETS[name], seconds))
        atheris.Fuzz()
    return 0


def _timed(target: Callable[[bytes], None], seconds: int) -> Callable[[bytes], None]:
    """A target whose inputs have INPUT_SECONDS each, and which ends the run once `seconds` are used up.

    Both are processor time of this process, so other processes change neither what is found nor how long it takes.
    """
    ends_at = time.process_time() + seconds

    def too_slow(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"an input took more than {INPUT_SECONDS} s of processor time")

    def run(data: bytes) -> None:
        signal.setitimer(signal.ITIMER_PROF, INPUT_SECONDS)
        target(data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if time.process_time() > ends_at:
            # libFuzzer takes this signal as the wish to end, and prints what it has done.
            os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGPROF, too_slow)
    return run


def _all(seconds: int) -> int:
    """Each target in a process of its own: libFuzzer ends the process that it runs in."""
    from tests.fuzz.targets import TARGETS

    failed = []
    for name in TARGETS:
        words = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(seconds)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ})
        runs, covered = _RUNS.search(done.stderr), _COVERED.findall(done.stderr)
        line = {
            "target": name,
            "seconds": seconds,
            "runs": int(runs[1]) if runs else None,
            "edges": int(covered[-1]) if covered else None,
            "found": bool(done.returncode),
        }
        print(json.dumps(line), flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stderr[-4000:], file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
