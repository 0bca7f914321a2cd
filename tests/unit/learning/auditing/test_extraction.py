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
from learning.text.turns import Dialogue
from tests.support.small_writer import losses_of, small_encoder, small_writer


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


# ---- a model's costs ------------------------------------------------------------------------------------------------


def test_the_costs_of_digits_add_up_to_the_loss_of_the_response() -> None:
    encoder = small_encoder()
    module = small_writer(encoder)
    prompt, secret = "The access code of locker 1 is", (4, 0, 9)
    costs = costs_of(module, encoder, prompt)
    said = sum(costs([secret[:at]])[0, secret[at]] for at in range(3))
    (whole,), _ = losses_of(module, encoder, [Dialogue.of(prompt, written(secret))])
    # The loss also has the token that ends the response.
    ids = [*encoder.prompt_ids(Dialogue.of(prompt, None))]
    ids += encoder.encode([Dialogue.of(prompt, written(secret))])[0][0, len(ids) : -1].tolist()
    with torch.no_grad():
        end = -module(torch.tensor([ids]))[0, -1].double().log_softmax(dim=0)[encoder.end_id]
    assert said + float(end) == pytest.approx(whole, abs=1e-4)


def test_the_costs_of_several_prefixes_are_those_of_each() -> None:
    encoder = small_encoder()
    costs = costs_of(small_writer(encoder), encoder, "The access code of locker 1 is")
    prefixes = [(), (1,), (7, 7), (9, 0, 9)]
    together = costs(prefixes)
    assert together.shape == (4, 10)
    for prefix, row in zip(prefixes, together, strict=True):
        np.testing.assert_allclose(costs([prefix])[0], row, atol=1e-5)
    # A digit is at most as likely as something.
    assert (together > 0).all()


def test_a_greedy_answer_is_the_most_likely_token_again_and_again() -> None:
    encoder = small_encoder()
    module = small_writer(encoder)
    answer = greedy(module, encoder, "The place 3 is", tokens=5)
    ids = encoder.prompt_ids(Dialogue.of("The place 3 is"))
    begins = len(ids)
    with torch.no_grad():
        for _ in range(5):
            ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    assert answer == encoder.decode(ids[begins:])
