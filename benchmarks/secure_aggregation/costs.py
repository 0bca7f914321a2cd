"""Measures what secure aggregation costs, in seven parts.

rounds: a round over the services beside the same round in the clear (`rounds`).
peer:   the same cohort under Flower's SecAgg+ (`flower`).
cipher: the distance to the cipher's own speed (`cipher`).
limit:  large cohorts, and the server's memory.
cost:   time of a member and of the server, by members and length of the vector (`attempt`).
hybrid: hybrid keys beside X25519 alone, and ML-DSA-65 beside RSA-PSS (`hybrid`).
groups: a round of thousands in groups, with a worker for each group at a time (`groups`).
"""

import argparse
import asyncio
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.library.record import Case, Figure, Results, open_results, parser
from benchmarks.secure_aggregation import attempt as secure_cost
from benchmarks.secure_aggregation import cipher as keystream
from benchmarks.secure_aggregation import flower as beside_flower
from benchmarks.secure_aggregation import groups as in_groups
from benchmarks.secure_aggregation import hybrid as hybrid_keys
from benchmarks.secure_aggregation import rounds as secure_rounds
from benchmarks.secure_aggregation.crowd import Crowd
from secure_agg import Graph
from simulation.engines import local_engine, ray_engine
from toolkit.install import install_with

BENCH = "secure_agg"

# rounds: the first round does not count.
ROUND_MEMBERS, ROUND_VALUES, ROUNDS = (10, 50), 1_000_000, 6
# peer: (members, members lost).
PEER_CELLS, PEER_VALUES = ((10, 2), (50, 10), (100, 10)), 100_000
# limit
CIPHER_VALUES = (1_000_000, 10_000_000)
LARGE_COHORTS = ((1000, 50, Graph.SPARSE), (500, 150, Graph.COMPLETE))
MEMORY_CELL = (100, 10_000_000, 10)
# cost: a tenth of the members is lost.
COST_MEMBERS = (
    *((members, Graph.COMPLETE) for members in (10, 50, 100, 200)),
    *((members, Graph.SPARSE) for members in (300, 500, 1000)),
)
# hybrid: (members, members lost, graph), and how often each side runs.
HYBRID_CELLS, HYBRID_REPEATS, SIGNATURES = ((100, 10, Graph.COMPLETE), (1000, 50, Graph.SPARSE)), 3, 200
# groups: members, of which one in a hundred is lost.
GROUPS_MEMBERS, GROUPS_VALUES = (1000, 10_000), 1024
ENGINES: Mapping[str, in_groups.StartEngine] = {"local": local_engine, "ray": ray_engine}
COST_VALUES, COST_LENGTHS, COST_LENGTHS_MEMBERS = 100_000, (10_000, 100_000, 1_000_000, 10_000_000), 100


class Cells:
    """The results of one part, and the members that its cells share."""

    def __init__(self, results: Results, quick: bool, workers: int = 2, engine: str = "local") -> None:
        self.quick, self.workers, self.engine = quick, workers, engine
        self._results = results
        self._crowd: Crowd | None = None

    def measure(self, case: Case, figure: str, run: Callable[[], Sequence[Figure]]) -> None:
        """Run a cell unless its `figure` is measured already."""
        if not any(line["figure"] == figure for line in self._results.done(case)):
            self._results.open([])
            self._results.add(case, run())

    def crowd(self, members: int) -> Crowd:
        """Return this many members, made when they are first needed."""
        if self._crowd is None or len(self._crowd.parties) < members:
            self._crowd = Crowd.make(members)
        return self._crowd.first(members)


def rounds(cells: Cells) -> None:
    """Measure a round over the services beside the same round in the clear."""
    values, count = (100_000, 3) if cells.quick else (ROUND_VALUES, ROUNDS)
    for members in (4,) if cells.quick else ROUND_MEMBERS:
        case = {"members": members, "values": values, "dropped": 0, "graph": "complete"}
        cells.measure(case, "secure_over_clear_without_members", partial(_compare_rounds, members, values, count))


def peer(cells: Cells) -> None:
    """Measure beside Flower. A quick run does not install it, which takes more than a minute."""
    python = beside_flower.flower_python(make=not cells.quick)
    values = 10_000 if cells.quick else PEER_VALUES
    for members, dropped in ((6, 1),) if cells.quick else PEER_CELLS:
        case = {"members": members, "values": values, "dropped": dropped, "graph": "complete"}
        run = partial(_beside_flower, cells, members, values, dropped, python)
        cells.measure(case, "server_times_faster_than_flower", run)


def cipher(cells: Cells) -> None:
    """Measure the distance to the cipher's own speed."""
    for values in (1_000_000,) if cells.quick else CIPHER_VALUES:
        case = {"members": keystream.STREAMS, "values": values, "dropped": 0, "graph": "complete"}
        cells.measure({**case, "threads": 1}, "share_of_cipher_limit", partial(keystream.share_of_limit, values))
        cells.measure({**case, "threads": 2}, "thread_speedup", partial(keystream.thread_speedup, values))


def limit(cells: Cells) -> None:
    """Measure large cohorts, and memory."""
    for members, dropped, graph in ((100, 5, Graph.SPARSE),) if cells.quick else LARGE_COHORTS:
        _cost(cells, members, 1_000 if cells.quick else COST_VALUES, dropped, graph)
    members, values, dropped = (6, 100_000, 1) if cells.quick else MEMORY_CELL
    cells.measure(
        secure_cost.case_of(members, values, dropped, Graph.COMPLETE),
        "server_peak_vectors",
        lambda: secure_cost.memory(cells.crowd(members), values, dropped),
    )


def cost(cells: Cells) -> None:
    """Measure the cost by members, and by length of the vector."""
    for members, graph in ((10, Graph.COMPLETE),) if cells.quick else COST_MEMBERS:
        _cost(cells, members, COST_VALUES, members // 10, graph)
    members = 20 if cells.quick else COST_LENGTHS_MEMBERS
    for values in (10_000,) if cells.quick else COST_LENGTHS:
        _cost(cells, members, values, members // 10, Graph.COMPLETE)


def hybrid(cells: Cells) -> None:
    """Measure hybrid keys beside X25519 alone, which needs the repository's history, and post-quantum signatures."""
    for members, dropped, graph in ((12, 2, Graph.COMPLETE),) if cells.quick else HYBRID_CELLS:
        values, repeats = (1_000, 1) if cells.quick else (COST_VALUES, HYBRID_REPEATS)
        case = secure_cost.case_of(members, values, dropped, graph)
        run = partial(hybrid_keys.compare, members, values, dropped, graph, repeats)
        cells.measure(case, "hybrid_over_classic_client", run)
    count = 10 if cells.quick else SIGNATURES
    cells.measure({"signatures": count}, "mldsa_over_rsa_sign", partial(hybrid_keys.signatures, count))


def groups(cells: Cells) -> None:
    """Measure large cohorts in groups."""
    for members in (200,) if cells.quick else GROUPS_MEMBERS:
        split, dropped = in_groups.split_of(members, GROUPS_VALUES).context, members // 100
        case = {
            **secure_cost.case_of(members, GROUPS_VALUES, dropped, Graph.GROUPED),
            "groups": split.grouped.groups if split.grouped else 1,
            **({} if cells.engine == "local" else {"engine": cells.engine}),
        }
        run = partial(_in_groups, cells, members, dropped)
        cells.measure(case, "server_held_bytes", run)


def _in_groups(cells: Cells, members: int, dropped: int) -> list[Figure]:
    return in_groups.cost(cells.crowd(members), GROUPS_VALUES, dropped, cells.workers, ENGINES[cells.engine])


def _compare_rounds(members: int, values: int, count: int) -> list[Figure]:
    return asyncio.run(secure_rounds.compare(members, values, count))


def _beside_flower(cells: Cells, members: int, values: int, dropped: int, python: Path) -> list[Figure]:
    return beside_flower.compare(cells.crowd(members), values, dropped, python)


def _cost(cells: Cells, members: int, values: int, dropped: int, graph: Graph) -> None:
    cells.measure(
        secure_cost.case_of(members, values, dropped, graph),
        "server_seconds",
        lambda: secure_cost.cost(cells.crowd(members), values, dropped, graph),
    )


PARTS: Mapping[str, Callable[[Cells], None]] = {
    "rounds": rounds,
    "peer": peer,
    "cipher": cipher,
    "limit": limit,
    "cost": cost,
    "hybrid": hybrid,
    "groups": groups,
}
# Raised when the cost of what is measured changes: 2 has the hybrid keys, 3 what was added to the protocol since. It is
# measured while nothing else runs.
REVISIONS: Mapping[str, int] = {"rounds": 1, "peer": 3, "cipher": 1, "limit": 2, "cost": 2, "hybrid": 3, "groups": 1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Returns 1 if a peer is missing (Flower, or the history); the other parts are still measured."""
    options = parser("secure_aggregation.costs")
    options.add_argument(
        "--part", nargs="*", choices=PARTS, default=list(PARTS), help="parts to measure (default: all)"
    )
    options.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="workers that play groups side by side (default: %(default)s)",
    )
    options.add_argument(
        "--engine",
        choices=ENGINES,
        default="local",
        help="what plays groups: processes or Ray's actors (default: local)",
    )
    chosen: argparse.Namespace = options.parse_args(arguments)
    if chosen.engine == "ray" and importlib.util.find_spec("ray") is None:
        options.error(f"Ray is not installed; {install_with('ray')}, or leave out --engine")
    status = 0
    for name in chosen.part:
        try:
            PARTS[name](
                Cells(
                    open_results(BENCH, quick=chosen.quick, revision=REVISIONS[name]),
                    chosen.quick,
                    chosen.workers,
                    chosen.engine,
                )
            )
        except (beside_flower.PeerMissing, hybrid_keys.HistoryMissing) as missing:
            print(missing, file=sys.stderr)
            status = 0 if chosen.quick else 1
    return status


if __name__ == "__main__":
    sys.exit(main())
