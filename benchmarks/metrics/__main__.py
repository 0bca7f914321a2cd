"""Runs `benchmarks.metrics.coverage`: `python -m benchmarks.metrics`."""

from benchmarks.metrics.coverage import main

if __name__ == "__main__":
    main()
