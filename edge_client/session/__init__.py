"""The member's session: a pure machine, and the agent that carries its effects out.

`machine.transition(environment, state, event) -> (state, effects)` decides what the member says and does; `agent`
dials, trains, uploads and remembers. `preparation` is what happens between an assignment and READY.
"""
