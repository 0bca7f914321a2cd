"""Measures the accuracy of prompts over a frozen language model.

    head        the head for masked words that MiniLM comes without, and how well it names a word
    quality     prompts of 20 tokens under a classification head and as a cloze, ten members, equal and by quantity;
                beside them centralised prompts, the head alone, and fine-tuning of everything
    tokens      1, 5, 10 and 20 tokens (table IV of the paper)
    steps       10, 40 and 100 local steps (its figure 6)
    laplace     its local differential privacy (table V)
    methods     P-tuning, prefixes and LoRA (table VI)
    momentum    the cloze of the quality part with momentum over the mean changes (FedAvgM), which the paper has not;
                added once the cloze's test figures were known to miss the target: no figure of the target's

As in the paper: ten members, all of them in every round, Adam, prompts in front, SST-2, its training part dealt in
equal parts and by a Dirichlet draw of quantities, accuracy on its labelled dev set. Not as there: MiniLM (six layers,
384 wide, 22.6 M values) in place of BERT-base; 40 local steps of 16 in place of 1000, 15 rounds (20); the alpha of the
draw, which its text does not say, is 1. A cloze asks a head that has read 0.5 M words of WikiText: BERT's has read
thousands of times as many. The paper has no classification head.

Members take the same number of steps in every round, whatever they hold: the next so many batches of their rows, and
again from the beginning where there are no more; their weight is the number of rows they hold. `centralised` is one
training on all rows with as many steps in all as the members take together (10 x 40 x 15 = 6,000 of 16): a federated
prompt has a tenth of them one after another. The target is to be within three points of it; its rate is chosen by a
short search as the others' are, so that a rate which suits 480 steps and not 6,000 would make the target easier. Its
versions are single points of a path that Adam's constant rate keeps shaking, a federated one is a mean of ten: `late`
is the mean score of the last five rounds, and the target is three points below the better of the two of `centralised`.
`frozen` trains the linear head alone and nothing in front. `fine-tuning` trains and sends all 22.7 M values, without a
prompt; a cloze has none, as the product fine-tunes under a head only.

872 whole sentences are held out of training, with every phrase that is a part of one. The cloze's template and words
were fixed in advance; `--search` writes down how others do before any training. Rates (of `laplace-update` L1 bounds,
of `momentum` its share) are chosen on them by a short search: four members and three rounds under a head; for a cloze,
which begins on a plateau of more than a hundred steps, three and six; for a momentum, which works over rounds, three
and all. Where a search was not run, the first of its list stands, and `tried` in the recipe is 0. Other numbers of
tokens and of steps have the rate of 20 and 40, `laplace-update` and `momentum` that of the same training without them.
The test rows are scored after every round; figures are those of the last. Fine-tuning has the product's dropout of 0.1,
prompts have none.

`laplace-update` clips a member's whole change in L1 and adds Laplace noise to it. The paper clips "the gradients",
names no epsilon, and counts no rounds. `epsilon_paper` is the epsilon of one round, as if it were all; `epsilon_sound`
is what a member's ledger is charged after the last: epsilons add up. Expect nothing of epsilons that mean something:
the noise on 8,450 coordinates drowns a change of L1 length B by far.

A federated cell takes 6,000 steps of some 0.2 s on a core that has nothing else to do, 0.45 s where all are busy.
"""

import argparse
import time
from collections.abc import Sequence

from benchmarks.library.record import open_results, parser
from benchmarks.prompts.cells import RATES, SEEDS, Cell
from benchmarks.prompts.measuring import BENCH, SEARCH, run, search

__all__ = ["PARTS", "main"]

PARTS = ("head", "quality", "tokens", "steps", "laplace", "methods", "momentum")


def main(words: Sequence[str] | None = None) -> None:
    """Command line; `words` without the program's name."""
    options: argparse.ArgumentParser = parser("prompts.quality")
    options.add_argument("--part", nargs="+", default=["head", "quality"], choices=PARTS, help="which cells to measure")
    options.add_argument("--seeds", type=int, nargs="+", default=[0], choices=SEEDS)
    options.add_argument("--task", nargs="+", choices=["classification", "cloze"], help="these tasks only")
    options.add_argument("--method", nargs="+", choices=sorted(RATES), help="these methods only")
    options.add_argument("--search", action="store_true", help="try other rates, on validation rows")
    options.add_argument("--minutes", type=float, help="start no cell after this many minutes")
    options.add_argument("--workers", type=int, default=1, help="number of processes")
    chosen = options.parse_args(words)
    until = None if chosen.minutes is None else time.monotonic() + 60 * chosen.minutes

    def wanted(cell: Cell) -> bool:
        by_task = chosen.task is None or cell.task in chosen.task
        return by_task and (chosen.method is None or cell.method in chosen.method)

    if chosen.search:
        search(open_results(SEARCH), chosen.part, until=until, wanted=wanted)
        return
    run(
        open_results(BENCH, quick=chosen.quick),
        seeds=chosen.seeds,
        quick=chosen.quick,
        until=until,
        parts=chosen.part,
        workers=chosen.workers,
        wanted=wanted,
    )


if __name__ == "__main__":
    main()
