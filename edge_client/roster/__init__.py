"""The member's copy of the roster log: what it has seen, what contradicts it, and who has signed it."""
