"""`python -m coordinator.relay SETTINGS`, which only `coordinator serve` starts."""

from coordinator.relay.process import main

main()
