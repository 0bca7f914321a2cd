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
import subprocess
import sys
import tempfile
from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"
# libFuzzer ends an input that takes longer, in seconds, or a process that grows beyond, in MiB.
INPUT_SECONDS, MEMORY_MIB = 20, 2048
MAX_INPUT_BYTES = 65_536
_DONE = re.compile(r"Done (\d+) runs in (\d+) second")
_COVERED = re.compile(r"cov: (\d+)")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", help="a target, or `all`")
    parser.add_argument("files", nargs="*", type=Path, help="inputs to run again, instead of fuzzing")
    parser.add_argument("--seconds", type=int, default=60, help="how long to fuzz each target")
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
        words = [found, str(SEEDS / name), f"-max_total_time={seconds}", f"-timeout={INPUT_SECONDS}"]
        words += [f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={MAX_INPUT_BYTES}", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *words], TARGETS[name])
        atheris.Fuzz()
    return 0


def _all(seconds: int) -> int:
    """Each target in a process of its own: libFuzzer ends the process that it runs in."""
    from tests.fuzz.targets import TARGETS

    failed = []
    for name in TARGETS:
        words = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(seconds)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ})
        runs, covered = _DONE.search(done.stderr), _COVERED.findall(done.stderr)
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
