"""The member's session: a pure state machine, and the agent that carries out its effects.

`machine.transition(environment, state, event) -> (state, effects)` decides what the member says and does. `agent`
connects, trains, uploads and remembers. `preparation` does what happens between an assignment and READY.
"""
