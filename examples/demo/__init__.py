"""`make demo`: a federation of five on this machine, with one member killed and one late."""
