"""Measures one attempt with the `secure_agg` of the tree that it runs in, and prints one JSON object.

`hybrid` runs it twice: in this tree, and in that of the commit before the hybrid keys. So it uses only what both have.

Processor time comes from `cohort.play`, as in `attempt`. Bytes are those of one member's messages until it masks, as
protobuf encodes them: its advertisement, the roster and its parts, its dealing, and what was dealt to it.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import secure_agg
from benchmarks.secure_aggregation.attempt import context_of
from benchmarks.secure_aggregation.cohort import Server, play
from benchmarks.secure_aggregation.crowd import Crowd, due_of_server, layout_for
from benchmarks.secure_aggregation.flower import lost_of
from secure_agg import Graph
from tacit import wire
from tacit.attempt import AttemptId
from tacit.limits import DIGEST_ROSTER_ABOVE
from tacit.messages import AttemptMessage

__all__ = ["measured"]

_TIMED = 5
_AT = AttemptId("benchmark", 1, 1)


class _Weighing(Server):
    """A server that also weighs the messages of one member until it masks."""

    def __init__(self, one: str, *given: Any) -> None:
        super().__init__(*given)
        self.one, self.weighed = one, 0

    def take(self, member: str, message: Any) -> None:
        """Take an answer in any phase except masking."""
        super().take(member, message)
        if member == self.one and isinstance(message, secure_agg.Advertisement | secure_agg.Dealing):
            self.weighed += wire.to_coordinator(AttemptMessage(_AT, message)).ByteSize()

    def close(self) -> Mapping[str, Any]:
        """End the phase, and return the messages to the members."""
        inbox = super().close()
        message = inbox.get(self.one)
        if isinstance(message, secure_agg.Roster):
            if len(message.advertisements) > DIGEST_ROSTER_ABOVE:
                session = self._state.session
                # A member fetches its neighbours' keys; certificates are cached.
                keys = getattr(session, "keys", {})
                self.weighed += sum(len(keys.get(each, b"")) for each in session.neighbours(self.one))
                message = secure_agg.roster_by_digest(message)
            self.weighed += wire.to_member(AttemptMessage(_AT, message)).ByteSize()
        elif isinstance(message, secure_agg.ReceivedDealings):
            self.weighed += wire.to_member(AttemptMessage(_AT, message)).ByteSize()
        return inbox


def measured(members: int, values: int, dropped: int, graph: Graph, repeats: int) -> dict[str, float]:
    """Return processor seconds of a member and of the server, the least of `repeats`, and bytes a neighbour."""
    crowd, layout = Crowd.make(members), layout_for(members, values)
    context = context_of(members, layout, graph)
    names, lost = [party.member for party in crowd.parties], lost_of(members, dropped)
    clients, servers, weight = [], [], 0.0
    for _ in range(repeats):
        # The last member is never among the lost.
        server = _Weighing(
            names[-1], context, layout, names, crowd.verify, crowd.key_of, due_of_server(context, dropped)
        )
        outcome = play(crowd, context, layout, lost, server, timed=min(_TIMED, members - dropped))
        clients.append(outcome.member_cpu)
        servers.append(server.watch.cpu)
        neighbours = members - 1 if context.sparse is None else context.sparse.degree
        weight = server.weighed / neighbours
    return {"client": min(clients), "server": min(servers), "bytes": weight}


if __name__ == "__main__":
    size, length, gone, kind, count = sys.argv[1:]
    print(json.dumps(measured(int(size), int(length), int(gone), Graph(kind), int(count))))
