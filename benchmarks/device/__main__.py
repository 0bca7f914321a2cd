"""`python -m benchmarks.device` runs the benchmark of small devices."""

from benchmarks.device.costs import main

if __name__ == "__main__":
    main()
