"""Rounds: a pure machine for each job, and the driver that carries out its effects.

`machine.transition(state, event, now_ms) -> (state, effects)` decides everything. `driver` persists, sends and counts,
in that order, and turns what happens outside into events. Time, randomness and transport come in from outside, so a
whole federation can run in one thread under a fake clock.
"""
