"""Who holds what under each kind of partition, for the picture: TREC dealt in four ways. Nothing is trained.

    python -m benchmarks.who_holds_what [--quick]

Labels and numbers of rows by Dirichlet draws, given ratios, and by a column of the data: every member holds the
questions of one of TREC's 50 fine kinds, which decide their label, as an archive that collects one kind would.
"""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.fedvocab import read_data
from benchmarks.partitions import Partition, by_column, by_label, by_quantity, by_ratios
from benchmarks.record import SHARED, Figure, Results, open_results, parser
from learning.text.data import Example, read_examples

__all__ = ["KINDS", "main", "measure"]

BENCH = "who_holds_what"
MODULES = ("who_holds_what.py", "partitions.py")
SEED, MEMBERS, ALPHA, LEAST = 0, 40, 1.0, 10
RATIOS = tuple(range(10, 10 + MEMBERS))

# By name: labels, the values of the column, a partition.
KINDS: Mapping[str, Callable[[Sequence[str], Sequence[str]], Partition]] = {
    f"by label, alpha {ALPHA:g}": lambda labels, _: by_label(labels, MEMBERS, ALPHA, SEED, least=LEAST),
    f"by quantity, alpha {ALPHA:g}": lambda labels, _: by_quantity(len(labels), MEMBERS, ALPHA, SEED, least=LEAST),
    f"by ratios, {RATIOS[0]} to {RATIOS[-1]}": lambda labels, _: by_ratios(len(labels), RATIOS, SEED, least=LEAST),
    "by column": lambda _, values: by_column(values, least=LEAST),
}


def measure(results: Results, rows: Sequence[Example], column: Sequence[str]) -> None:
    """A line for each kind that this code has not dealt. column: a value for each of the rows."""
    labels = [example.label or "" for example in rows]
    for kind, deal in KINDS.items():
        if results.done(case := {"dataset": "trec", "partition": kind}, SEED):
            continue
        results.open([SEED])
        partition = deal(labels, column)
        names, counts = partition.counts(labels)
        more = {"labels": list(names), "counts": counts.tolist()}
        results.add(case, [Figure("rows_per_member", len(rows) / len(partition.members), more=more)], seed=SEED)


def main(words: Sequence[str] | None = None) -> None:
    """Command line; `words` without the program's name."""
    chosen = parser(BENCH, __doc__).parse_args(words)
    rows = read_data("trec").train
    column = [each.label or "" for each in read_examples(SHARED / "trec" / "train.jsonl.gz", label="fine")]
    measure(open_results(BENCH, MODULES, quick=chosen.quick, missing=chosen.missing), rows, column)


if __name__ == "__main__":
    main()
