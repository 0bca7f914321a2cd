"""Runs `benchmarks.simulation.speed`: `python -m benchmarks.simulation`."""

import sys

from benchmarks.simulation.speed import main

if __name__ == "__main__":
    sys.exit(main())
