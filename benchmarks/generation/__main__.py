"""Runs `benchmarks.generation.quality`: `python -m benchmarks.generation`."""

from benchmarks.generation.quality import main

if __name__ == "__main__":
    main()
