"""The member's side: one file per phase, one type per state, each state used once.

advertise() -> AwaitingRoster -> AwaitingDealings [-> Complaining] -> ReadyToMask -> AwaitingSurvivors
-> AwaitingConfirmations -> Answered

Guarantees: a method either returns the next state and the message to send, or raises `Refusal` and changes nothing.
After it has returned, the state on which it was called refuses everything. So one set of keys is used with one roster
and one mask with one vector, and one session signs one U3 and answers one request to unmask. A caller that may have to
send a message again keeps its bytes. States are in memory, for one attempt: a restarted member is a dropout of that
attempt. `forget` ends an attempt early, in any state: its secrets are overwritten, and it refuses everything from then
on.

Policy is left to the caller: before it calls `advertise`, it compares the context with its own limits and stores the
highest (round, attempt) on disk.
"""

from secure_agg.member.advertise import AwaitingRoster, advertise
from secure_agg.member.complain import Complaining
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
    "Complaining",
    "ReadyToMask",
    "advertise",
]
