"""The server's side: one file per phase, immutable states that collect what members send.

open_attempt() -> CollectingAdvertisements -> CollectingDealings -> CollectingMasked -> CollectingConfirmations
    -> CollectingUnmaskings -> OpenedSum

Guarantees: nothing is mutated. `receive` returns a new state, or a `Dropped` that says why the message is not
acceptable (and changes nothing: the driver decides and calls `drop`). A byte-identical repeat, even of an earlier
phase's message, returns the same state. `close` ends the phase: members that have not answered are dropped, and it
returns either the next state and the messages to send, or an `Abandoned` if too few members are left.

`drop` removes a member from what follows. In the first two phases its answer is withdrawn, too, because nobody has seen
it. From the mask phase on, an accepted answer remains valid (its input is in the sum, its signature counts), and the
server only stops waiting for the member.
"""

from secure_agg.server.advertise import CollectingAdvertisements, open_attempt
from secure_agg.server.collecting import Seated
from secure_agg.server.confirm import CollectingConfirmations
from secure_agg.server.mask import CollectingMasked
from secure_agg.server.opened import OpenedSum
from secure_agg.server.share import CollectingDealings, serve_group
from secure_agg.server.unmask import CollectingUnmaskings

__all__ = [
    "CollectingAdvertisements",
    "CollectingConfirmations",
    "CollectingDealings",
    "CollectingMasked",
    "CollectingUnmaskings",
    "OpenedSum",
    "Seated",
    "open_attempt",
    "serve_group",
]
