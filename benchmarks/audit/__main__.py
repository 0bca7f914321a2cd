"""Runs `benchmarks.audit.jobs`: `python -m benchmarks.audit`."""

from benchmarks.audit.jobs import main

if __name__ == "__main__":
    main()
