"""Measures proofs that masked vectors are short, in a prototype.

cost: time and bytes of a member and of the coordinator, by length of the vector.
lies: what the coordinator accepts, and the longest vector that it may accept.
reach: how far one liar moves a cohort's mean, in one sum, in groups, and with proofs.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.library.record import Case, Figure, Results, open_results, parser
from benchmarks.secure_aggregation.bounds.lies import Cohort, Ring, aim_together, honest_vector, statement_of
from benchmarks.secure_aggregation.bounds.numbers import with_noise
from benchmarks.secure_aggregation.bounds.statement import OutOfBounds, Statement
from secure_agg import default_thresholds, grouped_thresholds
from secure_agg.distributed import Grid
from secure_agg.packing import packed_size
from secure_agg.randomness import SystemRandom

__all__ = ["PARTS", "main"]

BENCH = "masked_bounds"

MEMBERS, TOGETHER = 10, 2
LENGTHS = (1_000, 10_000, 100_000)
# reach: (members, groups, corrupt members).
COHORTS = ((10, 3, 1), (15, 5, 1), (30, 3, 6), (30, 10, 1), (100, 5, 10))

_RANDOM = SystemRandom()


def grid_of(members: int, values: int) -> Grid:
    """Returns the grid of a job with clip 1, noise multiplier 1 and default thresholds."""
    threshold, corrupt = default_thresholds(members)
    return Grid(1.0, 1.0, threshold - corrupt, values, members)


def cost(grid: Grid) -> list[Figure]:
    """Measures an honest cohort, once the public matrices of the code are made."""
    statement = statement_of(grid, TOGETHER)
    _cohort(statement, grid, 2).run()
    cohort = _cohort(statement, grid, grid.members)
    verdict = cohort.run()
    if len(verdict.proven) != grid.members:
        raise RuntimeError(f"an honest cohort was not accepted: {verdict.refused}")
    combinations = statement.numbers.combinations
    answers = packed_size(combinations * grid.members, statement.bits)
    proof = max(answer.proof.size for answer in cohort.answers.values())
    today, then = (packed_size(values, bits) for values, bits in _vectors(grid, statement))
    return [
        Figure("member_cpu_seconds", round(cohort.prover.cpu / grid.members, 3), "s"),
        Figure("verifier_cpu_seconds", round(cohort.verifier.cpu / grid.members, 3), "s", {"of": "one member's proof"}),
        Figure("proof_bytes", proof, "B", {"answers_bytes": answers}),
        Figure("vector_bytes", then, "B", {"today_bytes": today, "bits": statement.bits}),
    ]


def _vectors(grid: Grid, statement: Statement) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns length and width of the vector today, and with the pads in the wider ring."""
    today = grid.values, grid.bits_needed(grid.members)
    return today, (grid.values + statement.numbers.combinations, statement.bits)


def _cohort(statement: Statement, grid: Grid, members: int) -> Cohort:
    return Cohort.of(statement, [honest_vector(grid, statement.bits, _RANDOM) for _ in range(members)], _RANDOM)


def lies(grid: Grid) -> list[Figure]:
    """Counts the members that the coordinator accepts, and states the longest vector that may pass."""
    statement = statement_of(grid, TOGETHER)
    honest = [honest_vector(grid, statement.bits, _RANDOM) for _ in range(3)]
    long = _moved(honest[0], statement, 1.1)
    other = honest_vector(grid, statement.bits, _RANDOM)
    swapped = Cohort.of(statement, [long, *honest[1:]], _RANDOM).run(proved={0: honest[0]})
    uploaded = Cohort.of(statement, [honest[0], *honest[1:]], _RANDOM).run(proved={0: other})
    together = Cohort.of(statement, [long, *honest[1:]], _RANDOM)
    pair = together.run(proved={0: honest[0]}, lie=aim_together(0, 1, long, honest[0]))
    clip = grid.radius
    return [
        Figure("accepted_honest", len(Cohort.of(statement, honest, _RANDOM).run().proven), more={"of": 3}),
        Figure("accepted_too_long", int(_accepts(statement, [long, *honest[1:]])), more={"of": 1}),
        Figure("accepted_other_vector", int(0 in uploaded.proven) + int(0 in swapped.proven), more={"of": 2}),
        Figure("accepted_two_together", len(pair.proven & {0, 1}) // 2, more={"of": 1}),
        Figure("honest_norm", round(statement.numbers.norm / clip, 2), "clips"),
        Figure("longest_accepted", round(statement.numbers.max_norm / clip, 2), "clips"),
    ]


def _accepts(statement: Statement, vectors: Sequence[Ring]) -> bool:
    """Tells whether a member whose own vector is too long finds a proof for it."""
    try:
        return 0 in Cohort.of(statement, vectors, _RANDOM).run().proven
    except OutOfBounds:
        return False


def _moved(vector: Ring, statement: Statement, times: float) -> Ring:
    moved = vector.copy()
    moved[0] = (int(moved[0]) + int(times * statement.numbers.max_norm)) % (1 << statement.bits)
    return moved


def reach(members: int, groups: int, corrupt: int, values: int) -> list[Figure]:
    """Computes how far one liar moves the mean of a cohort under `distributed-gaussian`, in clips (L2).

    In one sum: until a coordinate is beyond what valid inputs can make. In groups: no further than the furthest good
    group, whose mean is as far away as its noise is long, z sqrt(d / (h s)); differences of updates come on top. With
    proofs: the longest vector that passes, divided by n.

    Args:
        members: n.
        groups: g.
        corrupt: n_C.
        values: d.
    """
    threshold, _ = default_thresholds(members, corrupt)
    grid = Grid(1.0, 1.0, threshold - corrupt, values, members)
    # All corrupt members may be in one group: true for all cohorts here.
    honest = grouped_thresholds(members, groups, corrupt)[1] - corrupt
    return [
        Figure("moved_in_one_sum", round(grid.largest / grid.radius * values**0.5, 1), "clips"),
        Figure("moved_in_groups", round((values / (honest * (members // groups))) ** 0.5, 1), "clips"),
        Figure("moved_with_proofs", round(with_noise(grid).max_norm / grid.radius / members, 2), "clips"),
    ]


def _cells(
    results: Results, run: Callable[[Grid], list[Figure]], figure: str, members: int, lengths: Sequence[int]
) -> None:
    for values in lengths:
        _cell(results, {"members": members, "values": values}, figure, partial(run, grid_of(members, values)))


def _cell(results: Results, case: Case, figure: str, run: Callable[[], list[Figure]]) -> None:
    if not any(line["figure"] == figure for line in results.done(case)):
        results.open([])
        results.add(case, run())


def _costs(results: Results, quick: bool) -> None:
    _cells(results, cost, "member_cpu_seconds", *((3, (200,)) if quick else (MEMBERS, LENGTHS)))


def _lies(results: Results, quick: bool) -> None:
    _cells(results, lies, "accepted_honest", *((3, (200,)) if quick else (MEMBERS, LENGTHS[:2])))


def _reaches(results: Results, quick: bool) -> None:
    values = 200 if quick else LENGTHS[1]
    for members, groups, corrupt in COHORTS[:1] if quick else COHORTS:
        case = {"members": members, "groups": groups, "corrupt": corrupt, "values": values}
        _cell(results, case, "moved_in_one_sum", partial(reach, members, groups, corrupt, values))


PARTS: Mapping[str, Callable[[Results, bool], None]] = {"cost": _costs, "lies": _lies, "reach": _reaches}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    options = parser("secure_aggregation.bounds.costs")
    options.add_argument(
        "--part", nargs="*", choices=PARTS, default=list(PARTS), help="parts to measure (default: all)"
    )
    chosen: argparse.Namespace = options.parse_args(arguments)
    for name in chosen.part:
        PARTS[name](open_results(BENCH, quick=chosen.quick), chosen.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
