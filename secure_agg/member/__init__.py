"""The member's side: one file a phase, one type a state, each state used once.

advertise() -> AwaitingRoster -> AwaitingDealings -> ReadyToMask -> AwaitingSurvivors -> AwaitingConfirmations
-> Answered

Guarantees: a method either returns the next state and the message to send, or raises `Refusal` and changes
nothing; after it has returned, the state it was called on refuses everything. So one set of keys meets one
roster, one mask meets one vector, one session signs one U3 and answers one request to unmask. A caller that
must send a message again keeps its bytes. States live in memory for one attempt: a restarted member is a
dropout of that attempt. `forget` ends an attempt early, at any state: its secrets are overwritten, and it refuses
everything from then on.

What it leaves to others: policy. The caller compares the context with its own limits, and remembers the
highest (round, attempt) on disk, before it calls `advertise`.
"""

from secure_agg.member.advertise import AwaitingRoster, advertise
from secure_agg.member.confirm import AwaitingSurvivors
from secure_agg.member.mask import ReadyToMask
from secure_agg.member.share import AwaitingDealings
from secure_agg.member.unmask import Answered, AwaitingConfirmations

__all__ = [
    "Answered",
    "AwaitingConfirmations",
    "AwaitingDealings",
    "AwaitingRoster",
    "AwaitingSurvivors",
    "ReadyToMask",
    "advertise",
]
