"""Who masks with whom and who deals to whom.

Guarantees: neighbourhood is symmetric, and nobody is their own neighbour. On the complete graph everybody is
everybody's neighbour, and a member deals to itself as well, so that its own share counts (three members with
a threshold of three can open a sum).
"""

from __future__ import annotations

from secure_agg.context import Graph
from secure_agg.identity import MemberId

__all__ = ["neighbours", "receivers"]


def neighbours(graph: Graph, members: tuple[MemberId, ...], member: MemberId) -> tuple[MemberId, ...]:
    """The members that `member` shares a pairwise mask with, in the order of `members` (sorted)."""
    if graph is not Graph.COMPLETE:
        raise ValueError(f"no neighbourhood is defined for the graph {graph!r}")
    return tuple(other for other in members if other != member)


def receivers(graph: Graph, members: tuple[MemberId, ...], dealer: MemberId) -> tuple[MemberId, ...]:
    """The members that `dealer` makes shares for, in the order of `members` (sorted)."""
    if graph is not Graph.COMPLETE:
        raise ValueError(f"no receivers are defined for the graph {graph!r}")
    return members
