"""Runs `benchmarks.frontier.accuracy`: `python -m benchmarks.frontier`."""

from benchmarks.frontier.accuracy import main

if __name__ == "__main__":
    main()
