"""Measures an attempt's cost for a member and the server, by members and vector length, and the server's memory.

Times come from `cohort`: in memory, with certificates verified before. Memory comes from `spooling`.
"""

from benchmarks.library.record import Figure
from benchmarks.secure_aggregation.cohort import Outcome, Server, play
from benchmarks.secure_aggregation.crowd import Crowd, complete_context, due_of_server, layout_for, sparse_context
from benchmarks.secure_aggregation.flower import lost_of
from benchmarks.secure_aggregation.spooling import SeparateServer
from secure_agg import Graph, Layout, RoundContext

__all__ = ["MEMBER_CPU_TARGET", "PEAK_TARGET", "SERVER_TARGETS", "case_of", "cost", "memory"]

# Goal for a member: at most this many processor seconds at n = 1000, k = 120 and d = 100,000.
MEMBER_CPU_TARGET = 0.2
# Goals for the server: at most this many seconds at d = 100,000, by members and members lost.
SERVER_TARGETS = {(1000, 50): 6.0, (500, 150): 10.0}
# Goal for the server's peak above idle: at most this many vectors.
PEAK_TARGET = 4.0
_TARGET_VALUES = 100_000
# Above _ALL members, only _TIMED of them are timed.
_TIMED, _ALL = 5, 20


def context_of(members: int, layout: Layout, graph: Graph) -> RoundContext:
    """Return a context with the default thresholds of the graph."""
    return complete_context(members, layout) if graph is Graph.COMPLETE else sparse_context(members, layout)


def case_of(members: int, values: int, dropped: int, graph: Graph) -> dict[str, int | str]:
    """Return a cell's keys, with `neighbours` if the graph is sparse."""
    case: dict[str, int | str] = {"members": members, "values": values, "dropped": dropped, "graph": graph.value}
    if graph is Graph.SPARSE:
        sparse = context_of(members, layout_for(members, 1), graph).sparse
        if sparse is not None:
            case["neighbours"] = sparse.degree
    return case


def cost(crowd: Crowd, values: int, dropped: int, graph: Graph) -> list[Figure]:
    """Measure `client_cpu_seconds` and `server_seconds` of one attempt."""
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
    """Return the figures of an attempt, with targets for the cells that have any."""
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
    """Measure `server_peak_vectors`. A vector is `values` numbers of four bytes. The ring has 32 bits."""
    members = len(crowd.parties)
    layout = layout_for(members, values, bits=32)
    context = complete_context(members, layout)
    with SeparateServer(crowd, context, layout, dropped) as server:
        play(crowd, context, layout, lost_of(members, dropped), server, timed=1)
        highest = server.peak.highest()
    peak = server.peak
    more = {"target": PEAK_TARGET, "idle_bytes": peak.idle, "peak_bytes": highest, "method": peak.method}
    return [Figure("server_peak_vectors", round((highest - peak.idle) / (4 * values), 2), "vectors", more)]
