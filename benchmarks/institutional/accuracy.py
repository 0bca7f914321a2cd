"""Measures TextCNN's accuracy on TREC with 1 to 4 members, without noise.

One member is plain training on all the data. Two to four are processes with a coordinator, over mutual TLS and secure
aggregation. Two members need an explicit exception in their policies. The figure is the test accuracy of the last
version. `python -m benchmarks.report` draws the curve beside it, which decides nothing.

These choices were fixed in advance, from section 4 of the paper: Adam 0.001, batches of 64, dropout 0.5, filters 2 to 5
of 400 maps, frequent averaging. The paper averages every 2 batches, for at most 50 epochs. Here a round is one epoch
over each member's part, and there are 20 rounds. Plain training gets the same 20 epochs.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.institutional.setup import GLOVE, PIECES, TREC, VOCABULARIES, Tester, Vocabulary, check_data, deal
from benchmarks.library.federation import BIN, federation
from benchmarks.library.record import Figure, open_results, parser, summarise

BENCH = "institutional"

MEMBERS = (1, 2, 3, 4)
SEEDS = (0, 1, 2)
ROUNDS = 20
PAPER = {1: 0.912, 2: 0.900, 3: 0.878, 4: 0.864}
CELL_SECONDS = 1800.0

POLICY = 'schema = 1\nmechanisms = ["none"]\n'
# Each of two members can read the other's update out of the sum, so both policies must accept that explicitly.
POLICY_OF_TWO = POLICY + "min_cohort = 2\nassumed_corrupt = 0\nallow_two_party_sums = true\n"


@dataclass(frozen=True)
class Cell:
    """One training, by members, vocabulary and seed."""

    members: int
    vocabulary: Vocabulary
    seed: int
    rounds: int = ROUNDS
    rows: int | None = None

    @property
    def case(self) -> dict[str, Any]:
        """The keys of the case in the results."""
        return {
            "members": self.members,
            "mechanism": "none",
            "load": "equal",
            "vocabulary": self.vocabulary.name,
            "rounds": self.rounds,
        }

    def specification(self, labels: Sequence[str]) -> str:
        """Return the job file. All other options are defaults."""
        two = "[aggregation]\nassumed_corrupt = 0\n" if self.members == 2 else ""
        return (
            f'schema = 1\nname = "trec"\nlabels = {json.dumps(labels)}\nseed = {self.seed}\n{self.vocabulary.toml()}'
            f"[training]\nepochs = 1\n{two}"
            f"[rounds]\ncount = {self.rounds}\nmin_members = {3 if self.members == 1 else self.members}\n"
        )


def centralised(cell: Cell, folder: Path, rows: Sequence[str], labels: Sequence[str]) -> list[float]:
    """Train the job's model on all rows, and return the test accuracy after each epoch.

    One optimiser runs through all epochs. A copy is taken at the end of each and tested afterwards.
    """
    import numpy as np

    from export.bundle import make_job_bundle
    from learning.models import load_shared
    from learning.text.data import read_examples
    from learning.text.examples import label_ids
    from learning.training.local import Progress, train
    from tacit.job import JobSpec

    spec_file, data = folder / "job.toml", folder / "train.jsonl"
    spec_file.write_text(cell.specification(labels))
    spec = JobSpec.from_toml(spec_file)
    make_job_bundle(spec, folder, folder / "bundle")
    # The seed decides the order of the rows, as when they are dealt to members.
    data.write_text("\n".join(deal(rows, 1, cell.seed)[0]) + "\n", encoding="utf-8")
    examples = read_examples(data)
    tester = Tester(folder / "bundle")
    start = tester.bundle.manifest.decode(tester.bundle.weights)
    load_shared(tester.module, tester.bundle.parameters(start))
    ids = tester.encoder.encode([example.text for example in examples])
    used = np.unique(np.append(ids, tester.encoder.pad_id))
    snapshots: list[dict[str, Any]] = []

    def watch(at: Progress) -> None:
        if at.step * at.epochs == at.epoch * at.steps:
            snapshots.append({name: value.detach().clone() for name, value in tester.module.state_dict().items()})

    recipe = spec.training.model_copy(update={"epochs": cell.rounds})
    train(tester.module, ids, label_ids(examples, spec.labels), recipe, seed=cell.seed, progress=watch)
    last = tester.accuracy()
    curve = []
    for snapshot in snapshots:
        # Training keeps only the embedding rows that the data uses; they go back to their places.
        whole = tester.module.state_dict()
        embedding = whole["embedding.weight"].clone()
        embedding[used] = snapshot.pop("embedding.weight")
        tester.module.load_state_dict({**whole, **snapshot, "embedding.weight": embedding})
        curve.append(tester.accuracy())
    if curve[-1] != last:
        raise RuntimeError(f"the curve ends at {curve[-1]}, but the training at {last}: the snapshots are wrong")
    return curve


async def federated(cell: Cell, folder: Path, rows: Sequence[str], labels: Sequence[str]) -> list[float]:
    """Train through the services, and return the test accuracy of each version after version 0."""
    names = [f"member-{number}" for number in range(1, cell.members + 1)]
    policy = POLICY_OF_TWO if cell.members == 2 else POLICY
    async with federation(folder, policy, names) as running:
        for name, part in zip(names, deal(rows, cell.members, cell.seed), strict=True):
            data = folder / f"{name}.jsonl"
            data.write_text("\n".join(part) + "\n", encoding="utf-8")
            words: list[str | Path] = [BIN / "edge_client", "run", "--log-format", "json", "--device", "cpu"]
            running.spawn(name, [*words, "--home", running.home(name), "--data", data])
        await running.connected(cell.members)
        await asyncio.to_thread(running.create_job, "trec", cell.specification(labels))
        detail = await running.finished("trec", CELL_SECONDS)
        for each in detail.rounds:
            if len(each.attempts[-1].survivors) != cell.members:
                raise RuntimeError(f"round {each.number} lost a member")
        running.end(*names)
        tester = Tester(folder / "bundle-trec")
        return [tester.accuracy(data) async for number, data in running.versions(detail) if number]


def measure(cell: Cell) -> list[Figure]:
    """Train and test one cell."""
    check_data(cell.vocabulary)
    from learning.text.textual import read_text

    rows = read_text(TREC / "train.jsonl.gz").splitlines()
    labels = sorted({json.loads(row)["label"] for row in rows})
    if cell.rows is not None:
        rows = rows[: cell.rows]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        if cell.members == 1:
            curve = centralised(cell, Path(scratch), rows, labels)
        else:
            curve = asyncio.run(federated(cell, Path(scratch), rows, labels))
    seconds = round(time.monotonic() - began, 1)
    return [
        Figure("test_accuracy", curve[-1], more={"curve": [round(point, 4) for point in curve], "seconds": seconds}),
    ]


def main() -> None:
    """Command line."""
    options = parser("institutional.accuracy")
    options.add_argument("--members", type=int, nargs="*", default=MEMBERS, choices=MEMBERS)
    options.add_argument("--seeds", type=int, nargs="*", default=SEEDS, choices=SEEDS)
    options.add_argument("--vocabulary", nargs="*", default=list(VOCABULARIES), choices=list(VOCABULARIES))
    chosen = options.parse_args()
    results = open_results(BENCH, quick=chosen.quick)
    if chosen.quick:
        cells = [Cell(members, GLOVE, 0, rounds=2, rows=600) for members in (1, 2)]
    else:
        cells = [
            Cell(members, VOCABULARIES[name], seed)
            for name in chosen.vocabulary
            for members in chosen.members
            for seed in chosen.seeds
        ]
    for cell in cells:
        check_data(cell.vocabulary)
        if not results.done(cell.case, cell.seed):
            results.open(chosen.seeds)
            results.add(cell.case, measure(cell), seed=cell.seed)
        if not chosen.quick:
            paper = {"paper": PAPER[cell.case["members"]]} if cell.case["vocabulary"] == PIECES.name else {}
            summarise(results, cell.case, SEEDS, more=paper)


if __name__ == "__main__":
    main()
