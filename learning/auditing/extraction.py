"""Whether a model that writes can be made to say a planted secret (`learning.auditing.exposure`).

- `greedy` is what a user of the model sees: the most likely tokens after the prompt.
- `cheapest` searches all secrets of the format for the most likely one: a shortest path in the tree of their digits
  (Carlini et al. 2019, section 7). It is exact, and asks the model about few of the prefixes if it remembers one.

The attacker knows the prompt and the format, and sees the model's probabilities. A secret that is not found this way
may still be in the model: other prompts, other decoders and longer searches are not tried.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from learning.auditing.exposure import Canary, Losses, Secret, written
from learning.text.dialogue import DialogueEncoder
from learning.text.turns import Dialogue

if TYPE_CHECKING:
    from learning.causal.model import CausalModel

__all__ = ["Found", "cheapest", "costs_of", "greedy", "says"]


@dataclass(frozen=True)
class Found:
    """The most likely secret of a search, its loss in nats, and how many prefixes the model was asked about."""

    secret: Secret
    loss: float
    asked: int


def cheapest(
    costs: Callable[[Sequence[Secret]], Losses], digits: int, *, batch: int = 32, max_asked: int = 5000
) -> Found | None:
    """Search the tree of secrets for the most likely one.

    A prefix's cost is the sum of its digits' costs. The cheapest open prefix is extended first, so the first complete
    secret that is cheaper than all open prefixes is the most likely of all 10^digits (Dijkstra 1959; section 7 of
    the paper).

    Args:
        costs: Given prefixes (n of them, of any lengths below `digits`), the loss of each next digit in nats, (n, 10),
            none of them negative.
        digits: Of a secret.
        batch: Prefixes that the model is asked about at once.
        max_asked: Gives up after as many prefixes.

    Returns:
        None if it gave up.
    """
    waiting: list[tuple[float, Secret]] = [(0.0, ())]
    asked = 0
    while waiting:
        if len(waiting[0][1]) == digits:
            loss, secret = waiting[0]
            return Found(secret, loss, asked)
        if asked >= max_asked:
            return None
        # Several at once, as in the paper's parallel search. A complete secret stays until nothing is cheaper.
        opened: list[tuple[float, Secret]] = []
        while waiting and len(opened) < batch and len(waiting[0][1]) < digits:
            opened.append(heapq.heappop(waiting))
        asked += len(opened)
        for (cost, prefix), row in zip(opened, costs([prefix for _, prefix in opened]), strict=True):
            for digit, more in enumerate(row.tolist()):
                heapq.heappush(waiting, (cost + more, (*prefix, digit)))
    return None


def says(answer: str, canary: Canary) -> bool:
    """Whether a generated answer has a canary's secret, however its digits are set apart."""
    digits = "".join(each for each in answer if each.isascii() and each.isdigit())
    return "".join(map(str, canary.secret)) in digits


def costs_of(module: "CausalModel", encoder: DialogueEncoder, prompt: str) -> Callable[[Sequence[Secret]], Losses]:
    """The costs that `cheapest` asks for, of secrets after a prompt.

    Args:
        module: The model, in evaluation mode.
        encoder: Of a tokenizer that gives each digit its own token.
        prompt: Of a canary.

    Raises:
        ValueError: The tokenizer joins digits.
    """
    import torch

    before = encoder.prompt_ids(Dialogue.of(prompt))

    def response_ids(secret: Sequence[int]) -> list[int]:
        ids, targets = encoder.encode([Dialogue.of(prompt, written(secret))])
        # Without the token that ends the response.
        return [int(each) for each in ids[0, 1:][targets[0, :-1] >= 0]][:-1] if len(secret) else []

    # A digit's token where it is first, and what stands before it elsewhere.
    first = [response_ids((digit,)) for digit in range(10)]
    pairs = [response_ids((0, digit)) for digit in range(10)]
    between = pairs[0][len(first[0]) : -1]
    last = [each[-1] for each in pairs]
    if any(len(each) != 1 for each in first) or any(
        each != [*first[0], *between, token] for each, token in zip(pairs, last, strict=True)
    ):
        raise ValueError("this tokenizer joins the digits of a secret, so they cannot be searched one by one")

    def costs(prefixes: Sequence[Secret]) -> Losses:
        rows = []
        for prefix in prefixes:
            said = [first[prefix[0]][0]] if prefix else []
            for digit in prefix[1:]:
                said += [*between, last[digit]]
            rows.append([*before, *said, *(between if prefix else [])])
        length = max(map(len, rows))
        ids = np.full((len(rows), length), encoder.pad_id, np.int64)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = row
        with torch.no_grad():
            logs = module(torch.from_numpy(ids)).double().log_softmax(dim=2).numpy()
        found = np.zeros((len(rows), 10))
        for at, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
            end = len(row)
            tokens = last if prefix else [each[0] for each in first]
            found[at] = -logs[at, end - 1, tokens]
            for place, token in enumerate(between if prefix else []):
                found[at] -= logs[at, end - len(between) - 1 + place, token]
        return found

    return costs


def greedy(module: "CausalModel", encoder: DialogueEncoder, prompt: str, *, tokens: int = 32) -> str:
    """What the model answers to a prompt, always with the most likely token.

    Args:
        module: The model, in evaluation mode, on any device.
        encoder: Its encoder.
        prompt: Of a canary.
        tokens: The most tokens of the answer.
    """
    import torch

    ids = encoder.prompt_ids(Dialogue.of(prompt))
    begins, device = len(ids), next(module.parameters()).device
    with torch.no_grad():
        while len(ids) < begins + tokens:
            token = int(module(torch.tensor([ids], device=device))[0, -1].argmax())
            if token in encoder.end_ids:
                break
            ids.append(token)
    return encoder.decode(ids[begins:])
