"""Lists the benchmarks: `python -m benchmarks`."""

import argparse
import signal

from benchmarks.library.catalogue import BENCHMARKS, TOOLS, summary

__all__ = ["main"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Lists the benchmarks.", epilog="To run one: python -m benchmarks.NAME"
    )
    parser.add_argument("--names", action="store_true", help="print the names that `make bench` runs, and nothing else")
    if parser.parse_args().names:
        print("\n".join(BENCHMARKS))
        return
    # `| head` reads a few lines and closes the pipe.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print("Run one with `python -m benchmarks.NAME`; `--help` says more. docs/benchmarks.md has the results.\n")
    known = {**BENCHMARKS, **TOOLS}
    width = max(map(len, known))
    for name, text in known.items():
        print(f"{name:{width}}  {summary(text)}")


if __name__ == "__main__":
    main()
