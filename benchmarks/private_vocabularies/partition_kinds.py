"""Draws the members' labels and rows under four kinds of partitions.

The kinds are labels and numbers of rows by Dirichlet draws, given ratios, and a column of the data. By column, every
member holds the questions of one of TREC's 50 fine kinds, which decide the label, as an archive of one kind would.
"""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.library.record import SHARED, Figure, Results, open_results, parser
from benchmarks.private_vocabularies.quality import read_data
from learning.text.data import read_examples
from learning.text.examples import Example
from simulation.partitions import Partition, by_column, by_label, by_quantity, by_ratios

__all__ = ["KINDS", "main", "measure"]

BENCH = "partition_kinds"
SEED, MEMBERS, ALPHA, MIN = 0, 40, 1.0, 10
RATIOS = tuple(range(10, 10 + MEMBERS))

# By name: a function from labels and the column's values to a partition.
KINDS: Mapping[str, Callable[[Sequence[str], Sequence[str]], Partition]] = {
    f"by label, alpha {ALPHA:g}": lambda labels, _: by_label(labels, MEMBERS, ALPHA, SEED, least=MIN),
    f"by quantity, alpha {ALPHA:g}": lambda labels, _: by_quantity(len(labels), MEMBERS, ALPHA, SEED, least=MIN),
    f"by ratios, {RATIOS[0]} to {RATIOS[-1]}": lambda labels, _: by_ratios(len(labels), RATIOS, SEED, least=MIN),
    "by column": lambda _, values: by_column(values, least=MIN),
}


def measure(results: Results, rows: Sequence[Example], column: Sequence[str]) -> None:
    """Add a line for each kind that is not dealt yet. column: a value for each row."""
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
    """Command line. words: arguments without the program's name."""
    chosen = parser("private_vocabularies.partition_kinds").parse_args(words)
    rows = read_data("trec").train
    column = [each.label or "" for each in read_examples(SHARED / "trec" / "train.jsonl.gz", label="fine")]
    measure(open_results(BENCH, quick=chosen.quick), rows, column)


if __name__ == "__main__":
    main()
