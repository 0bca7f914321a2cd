"""The server's side: one file a phase, immutable states that collect what members send.

open_attempt() -> CollectingAdvertisements -> CollectingDealings -> CollectingMasked ->
CollectingConfirmations
    -> CollectingUnmaskings -> Opened

Guarantees: nothing is mutated. `receive` returns a new state, or a `Dropped` that says why the message is not
acceptable (and changes nothing: the driver decides and calls `drop`); a byte-identical repeat, also of an
earlier phase's message, returns the same state. `close` ends the phase: those still waited for are dropped,
and either the next state and the messages to send come back, or an `Abandoned` where fewer than t members are
left.

`drop` takes a member out of what follows. In the first two phases its answer is withdrawn too, since nobody
has seen it; from the mask phase on an accepted answer stands (its input is in the sum, its signature counts),
and the member is only not waited for any more.
"""

from secure_agg.server.advertise import CollectingAdvertisements, open_attempt
from secure_agg.server.collecting import Seated
from secure_agg.server.confirm import CollectingConfirmations
from secure_agg.server.mask import CollectingMasked
from secure_agg.server.opened import OpenedSum
from secure_agg.server.share import CollectingDealings
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
]
