"""`python -m coordinator.relay SETTINGS`: started by `coordinator serve`, by nobody else."""

from coordinator.relay.process import main

main()
