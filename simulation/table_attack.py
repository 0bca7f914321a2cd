"""What an attacker reads in one member's step if it knows the public table that the member's rows started from.

The attacker sees a single member's step of plain SGD on one text (no secure aggregation, or all others collude), and is
told the text's length. It is also told the entries of the member's vocabulary, which it would have to guess. It uses
the span of the first attention's inputs (`learning.auditing.spans`), with the public table, with the member's present
one, or with a table of random rows. The present table is what keeping it private is measured against; the random one
shows what the attack names by chance.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from learning.models import Division, TextClassifier

__all__ = ["Read", "Step", "read_by_tables", "sentences"]


@dataclass(frozen=True)
class Step:
    """What a member trains on in the attacked step, and with what.

    Attributes:
        module: with the version and the member's present rows.
        division: what of it is shared.
        ids: (N, S), texts, padded; each is a step of its own.
        labels: (N,).
        public: (V, D), the rows that the member's started from, by its own ids; None if only the member knows them.
    """

    module: "TextClassifier"
    division: "Division"
    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    public: NDArray[np.float32] | None


@dataclass(frozen=True)
class Read:
    """F1 of the tokens that an attacker names, over all attacked texts. None: nothing to attack with.

    Attributes:
        public: with the public table.
        present: with the member's present table.
        chance: with random rows, whose mean and standard deviation are those of the present table.
        texts: how many.
        tokens: of these texts, without the first and last of each.
        projected: whether gradients hold the first attention's inputs only as a public random matrix of low rank leaves
            them (LoRA with train = "up"). This attack does not read them.
    """

    public: float | None
    present: float | None
    chance: float | None
    texts: int
    tokens: int = 0
    projected: bool = False


def _gradients(step: Step, row: int) -> "Mapping[str, object]":
    import torch
    from torch.nn import functional

    module = step.module.eval()
    shared = step.division.shared(module).keys()
    trained = {name: each for name, each in module.named_parameters() if name in shared and each.requires_grad}
    length = int((step.ids[row] != module.pad_id).sum())
    ids = torch.from_numpy(step.ids[row : row + 1, : max(length, module.min_tokens)].copy())
    loss = functional.cross_entropy(module(ids), torch.from_numpy(step.labels[row : row + 1].copy()))
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def read_by_tables(steps: Sequence[Step]) -> Read:
    """Attack each text of each step.

    Raises:
        NoSpan: a model has no attention.
    """
    import torch

    from learning.auditing.spans import projections, rows_at_positions

    counts: dict[str, list[int]] = {"public": [0, 0, 0], "present": [0, 0, 0], "chance": [0, 0, 0]}
    texts, projected = 0, False
    for step in steps:
        names = [name for name, _ in projections(step.module)]
        pad = step.module.pad_id
        own = step.module.embedding.weight.detach().numpy().copy()
        drawn = np.random.default_rng(0).normal(own.mean(), own.std(), own.shape)
        tables = {"present": own, "chance": drawn.astype(np.float32)}
        if step.public is not None:
            tables["public"] = step.public
        for row in range(len(step.ids)):
            found = _gradients(step, row)
            # Under LoRA the inputs' span is in the gradient of the matrices that read them.
            weights = [
                each
                for name, each in found.items()
                if isinstance(each, torch.Tensor)
                and (name.removesuffix(".weight") in names or (name.startswith("lora.layer0_") and ".down." in name))
            ]
            if not weights or not any(bool(each.any()) for each in weights):
                projected |= not weights and any(name.startswith("lora.layer0_") for name in found)
                continue
            texts += 1
            truth = [int(at) for at in step.ids[row] if at != pad]
            for which, table in tables.items():
                kept = np.flatnonzero(np.arange(len(table)) != pad)
                places = rows_at_positions(step.module, weights, torch.from_numpy(table[kept]), [len(truth)])
                # The first and last tokens frame every text and say nothing.
                named, there = Counter(int(kept[place]) for place in places), Counter(truth[1:-1])
                for frame in (truth[0], truth[-1]):
                    del named[frame]
                right = (named & there).total()
                counts[which] = [
                    a + b for a, b in zip(counts[which], (right, named.total(), there.total()), strict=True)
                ]
    if not texts:
        return Read(None, None, None, 0, projected=projected)
    known = all(step.public is not None for step in steps)
    public, present, chance = (_f1(counts[which]) for which in ("public", "present", "chance"))
    return Read(public if known else None, present, chance, texts, counts["present"][2], projected)


def _f1(counts: Sequence[int]) -> float:
    right, named, there = counts
    return 2 * right / (named + there) if named + there else 0.0


def sentences(read: Read, whose: str) -> tuple[str, ...]:
    """What keeping the table private is worth, in words. whose: the texts, and the model that was attacked."""
    if read.present is None and read.projected:
        return (
            "An attacker that sees one member's step has the first attention's inputs only as a public random matrix "
            'of low rank leaves them (LoRA with train = "up"). This attack reads nothing of that, which is no defence: '
            "another attack might. Only noise is a guarantee.",
        )
    if read.present is None:
        return (
            "An attacker that sees one member's step has no gradient of the first attention's inputs to read, because "
            "the job does not share one.",
        )
    ahead = (
        f"An attacker that sees one member's step on one text alone, without noise ({read.texts} texts with "
        f"{read.tokens} tokens: {whose})"
    )
    present = f"with the member's present table it would name {100 * read.present:.0f} %"
    chance = f"with random rows, by chance, {100 * (read.chance or 0.0):.0f} %"
    if read.public is None:
        return (
            f"{ahead} has no table to read it with, since rows start from the member's secret; {present}; {chance}.",
        )
    # Of the figures as printed, so that they add up.
    worth = round(100 * read.present) - round(100 * read.public)
    return (
        f"{ahead} names {100 * read.public:.0f} % of the tokens (F1) with the public table that rows start from; "
        f"{present}; {chance}. So keeping the present table private is worth {worth} of 100 points; secure "
        "aggregation and noise protect the rest.",
        "If the embedding were shared, the rows that move would name every token.",
    )
