"""`make demo` runs a federation of five members on this machine, one of them killed and one late."""
