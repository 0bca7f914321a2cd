"""Extraction: the search finds the most likely of all secrets, and asks a model for the costs that it says."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from learning.auditing.exposure import Canary, written
from learning.auditing.extraction import cheapest, costs_of, greedy, says
from learning.causal.backbone import CausalBackbone
from learning.causal.model import CausalModel
from learning.prompts.setting import LoRA
from learning.text.dialogue import DialogueEncoder
from learning.text.turns import Dialogue
from tacit.generation import TEMPLATES
from tests.support.small_writer import small_writer
from tests.support.tiny_writers import writer_tokenizer


def test_the_search_finds_the_cheapest_of_all_secrets() -> None:
    """Costs of each digit depend on all digits before it, so that greedy choices mislead."""
    digits = 4
    for seed in range(5):
        draws = np.random.default_rng(seed)
        table = {
            prefix: draws.exponential(1.0, 10)
            for length in range(digits)
            for prefix in itertools.product(range(10), repeat=length)
        }
        true = min(
            itertools.product(range(10), repeat=digits),
            key=lambda each: sum(table[each[:at]][each[at]] for at in range(digits)),
        )

        def costs(prefixes: Sequence[tuple[int, ...]], table: dict[tuple[int, ...], Any] = table) -> Any:
            return np.array([table[each] for each in prefixes])

        for batch in (1, 7, 64):
            found = cheapest(costs, digits, batch=batch)
            assert found is not None
            assert found.secret == true
            assert found.loss == pytest.approx(sum(table[true[:at]][true[at]] for at in range(digits)))
            # Far fewer than the 1,111 prefixes there are.
            assert found.asked < 700


def test_the_search_gives_up() -> None:
    asked = 0

    def flat(prefixes: Sequence[tuple[int, ...]]) -> Any:
        nonlocal asked
        asked += len(prefixes)
        return np.full((len(prefixes), 10), math.log(10))

    assert cheapest(flat, 6, batch=32, max_asked=500) is None
    assert 500 <= asked < 532


def test_an_answer_says_a_secret_however_it_is_written() -> None:
    canary = Canary("The access code of locker 1 is", (1, 2, 3, 4))
    assert says("It is 1 2 3 4.", canary)
    assert says("12-34", canary)
    assert not says("1 2 4 3", canary)
    assert not says("", canary)
