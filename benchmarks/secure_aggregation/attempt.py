"""What an attempt costs a member and the server, by members and length of the vector, and the server's memory.

Times are those of `cohort`: in memory, certificates verified before. Memory is `spooling`'s.
"""

from benchmarks.library.record import Figure
from benchmarks.secure_aggregation.cohort import Outcome, Server, play
from benchmarks.secure_aggregation.crowd import Crowd, complete_context, due_of_server, layout_for, sparse_context
from benchmarks.secure_aggregation.flower import lost_of
from benchmarks.secure_aggregation.spooling import SeparateServer
from secure_agg import Graph, Layout, RoundContext

__all__ = ["MEMBER_CPU_TARGET", "PEAK_TARGET", "SERVER_TARGETS", "case_of", "cost", "memory"]

# At most: processor seconds of a member at n = 1000 with k = 120 and d = 100,000.
MEMBER_CPU_TARGET = 0.2
# At most, in seconds, by members and members lost, at d = 100,000.
SERVER_TARGETS = {(1000, 50): 6.0, (500, 150): 10.0}
# At most: the server's peak above idle, in vectors.
PEAK_TARGET = 4.0
_TARGET_VALUES = 100_000
# Where they are many, so many members are timed.
_TIMED, _ALL = 5, 20


def context_of(members: int, layout: Layout, graph: Graph) -> RoundContext:
    """The default thresholds of either graph."""
    return complete_context(members, layout) if graph is Graph.COMPLETE else sparse_context(members, layout)


def case_of(members: int, values: int, dropped: int, graph: Graph) -> dict[str, int | str]:
    """A cell's keys; `neighbours` where the graph is sparse."""
    case: dict[str, int | str] = {"members": members, "values": values, "dropped": dropped, "graph": graph.value}
    if graph is Graph.SPARSE:
        sparse = context_of(members, layout_for(members, 1), graph).sparse
        if sparse is not None:
            case["neighbours"] = sparse.degree
    return case


def cost(crowd: Crowd, values: int, dropped: int, graph: Graph) -> list[Figure]:
    """`client_cpu_seconds` and `server_seconds` of one attempt."""
    members = len(crowd.parties)
    layout = layout_for(members, values)
    context = context_of(members, layout, graph)
    names = [party.member for party in crowd.parties]
    server = Server(context, layout, names, crowd.verify, crowd.key_of, due_of_server(context, dropped))
    timed = _TIMED if members > _ALL else None
    outcome = play(crowd, context, layout, lost_of(members, dropped), server, timed=timed)
    return figures(context, dropped, outcome, server, crowd.certificate_seconds)


def figures(
    context: RoundContext, dropped: int, outcome: Outcome, server: Server, certificate_seconds: float
) -> list[Figure]:
    """The figures of an attempt, with the targets where it is one that has them."""
    n, sparse, at_length = context.cohort, context.sparse is not None, context.values == _TARGET_VALUES
    of_member: dict[str, object] = {
        "seconds": round(outcome.member_wall, 5),
        "timed": outcome.timed,
        "checked": dict(outcome.checked),
        "certificate_seconds": round(certificate_seconds, 6),
    }
    if sparse and n == 1000 and at_length:
        of_member["target"] = MEMBER_CPU_TARGET
    of_server: dict[str, object] = {"cpu_seconds": round(server.watch.cpu, 4)}
    if at_length and (n, dropped) in SERVER_TARGETS:
        of_server["target"] = SERVER_TARGETS[n, dropped]
    return [
        Figure("client_cpu_seconds", round(outcome.member_cpu, 5), "s", of_member),
        Figure("server_seconds", round(server.watch.wall, 4), "s", of_server),
    ]


def memory(crowd: Crowd, values: int, dropped: int) -> list[Figure]:
    """`server_peak_vectors`: a vector is `values` numbers of four bytes. The ring has 32 bits."""
    members = len(crowd.parties)
    layout = layout_for(members, values, bits=32)
    context = complete_context(members, layout)
    with SeparateServer(crowd, context, layout, dropped) as server:
        play(crowd, context, layout, lost_of(members, dropped), server, timed=1)
        highest = server.peak.highest()
    peak = server.peak
    more = {"target": PEAK_TARGET, "idle_bytes": peak.idle, "peak_bytes": highest, "method": peak.method}
    return [Figure("server_peak_vectors", round((highest - peak.idle) / (4 * values), 2), "vectors", more)]
