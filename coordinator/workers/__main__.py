"""`python -m coordinator.workers SETTINGS`, which only `coordinator serve` starts."""

from coordinator.workers.process import main

main()
