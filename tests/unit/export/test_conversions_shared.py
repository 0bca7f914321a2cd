"""Tests share a conversion only where everything that it reads is the same (`tests/support/conversions.py`)."""

import pytest
import torch

from export.prompted import convert_prompted
from tests.support.conversions import _key, _once, anew
from tests.support.tiny_prompts import prompted


def wrapped(inner, by=1.0):
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids) * by

    return Wrapper().eval()


def key(module, length=5, output="logits", least=3):
    dims = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", min=least)},)
    return _key(module, (torch.zeros(2, length, dtype=torch.int64),), ["input_ids"], output, dims)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_only_the_same_conversion_has_the_same_key(kind):
    inner = prompted(kind)
    same = key(wrapped(inner))
    assert same is not None
    assert same == key(wrapped(prompted(kind)))
    changed = prompted(kind)
    with torch.no_grad():
        next(changed.parameters()).view(-1)[0] += 1e-6
    others = [
        key(wrapped(changed)),
        key(wrapped(inner, by=2.0)),
        key(wrapped(prompted(kind, "lora"))),
        key(wrapped(inner), length=6),
        key(wrapped(inner), output="features"),
        key(wrapped(inner), least=2),
    ]
    assert len({same, *others}) == 7


def test_a_prompted_model_is_converted_once():
    """Its wrapper's functions hold the module torch, besides the model and the prompt."""
    assert convert_prompted(prompted("bert")) is convert_prompted(prompted("bert"))


def test_it_is_made_once_and_again_where_a_test_asks():
    made = []
    converted = _once(lambda *given: made.append(given) or bytes([len(made)]))
    given = torch.nn.Linear(2, 2), (torch.zeros(1, 2),), ["x"], "once", ({},)
    assert (converted(*given), converted(*given)) == (b"\1", b"\1")
    with anew():
        assert converted(*given) == b"\2"
    assert converted(*given) == b"\1"
