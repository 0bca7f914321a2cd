"""A plugin's module is built within its contract: sizes, parts, seeds, and nothing that a version would not hold."""

import numpy as np
import pytest
import torch

from learning.models import build, build_blank, embedding_width, shared_parameters, values_of
from learning.plugins.installed import PluginUnusable
from learning.plugins.loading import admit
from tests.support.plugins import GOOD, installed, model_of


@pytest.fixture
def put(site):
    def put(text=GOOD, **changes):
        installed(site, {"tacit_own.py": text})
        model = model_of(**changes)
        admit(model)
        return model

    return put


def test_the_same_seed_gives_the_same_module_and_another_seed_another(put):
    model = put()
    first, again, other = (shared_parameters(build(model, 9, 3, 2, seed=seed)) for seed in (1, 1, 2))
    assert list(first) == ["hidden.weight", "hidden.bias", "output.weight", "output.bias", "embedding.weight"]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)
    assert not first["embedding.weight"][2].any()
    assert sum(each.size for each in first.values()) == values_of(model, 9, 3)
    assert embedding_width(model) == 6
    assert not any(each.any() for each in shared_parameters(build_blank(model, 9, 3, 2)).values())


def test_building_leaves_the_process_random_numbers_alone(put):
    model = put()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(model, 9, 3, 2, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_the_embedding_depends_on_all_of_a_secret_seed(put):
    """Torch's generator uses 32 bits of a seed, and a member's own embedding starts from a secret."""
    model = put()
    one, other = (build(model, 9, 3, 2, seed=seed).embedding.weight for seed in (1, 1 + 2**32))
    assert not torch.equal(one, other)


def test_the_jobs_keys_reach_the_module(put):
    module = build(put(freeze_embedding=True, dropout=0.25, settings={"hidden": 7}), 9, 3, 2)
    assert not module.embedding.weight.requires_grad
    assert module.dropout.probability == 0.25
    assert module.get_parameter("hidden.weight").shape == (7, 6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"settings": {"width": 3}}, "model.settings: width: unknown key"),
        ({"settings": {"hidden": "many"}}, "model.settings: hidden"),
        (
            {"min_tokens": 2},
            "model.min_tokens: plugin tacit-own 1.0 reads texts with min_tokens = 1, and the job says 2",
        ),
        ({"frame": True}, "model.frame: plugin tacit-own 1.0 reads texts with frame = false, and the job says true"),
    ],
)
def test_keys_that_are_not_the_plugins_are_named(put, change, says):
    with pytest.raises(PluginUnusable, match=says):
        build(put(**change), 9, 3, 2)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("self.norm = nn.BatchNorm1d(4)", "keeps statistics of batches in norm"),
        ("self.norm = nn.BatchNorm1d(4, track_running_stats=False)", "normalises over the batch in norm"),
        ("self.drop = nn.Dropout(0.5)", "has a dropout drop, whose draws nobody seeds"),
        ("self.embedding = nn.Embedding(3, 3)", "builds an embedding or a dropout of its own"),
        ("self.extra = nn.Linear(2, 2)", "says of no part that it has extra.weight"),
        ("self.output.double()", "builds output.weight as torch.float64"),
        ("self.output.weight.data[0, 0] = torch.inf", "starts output.weight with values that are not finite"),
        ("self.hidden.again = self.hidden.weight", "uses hidden.again under two names"),
        ("self.hidden.more = nn.Linear(2, 2)", "builds .* values above the embedding, and counts"),
        ("raise ValueError('secret')", "raises ValueError when it builds its module"),
        ("raise SystemExit", "raises SystemExit when it builds its module"),
        ("import random; self.output.bias.data += random.random()", "starts with other values when it is built again"),
        ("import os; nn.init.constant_(self.output.bias, os.urandom(1)[0] + os.urandom(4)[0])", "built again from the"),
        ("self.register_buffer('drawn', torch.rand(2))", "draws drawn, which no version holds"),
    ],
)
def test_a_module_outside_its_contract_is_refused(put, more, says):
    model = put(GOOD.replace("# MORE", more))
    with pytest.raises(PluginUnusable, match=says) as refused:
        build(model, 9, 3, 2, seed=1)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("where", "more"),
    [
        # Training reads this loss and nothing else does: with it, a text's loss holds the other texts of its batch.
        (
            "    def mean(",
            """    def judged(self, ids, targets, adjusted=None):
        losses, right = super().judged(ids, targets, adjusted)
        logits = self(ids)
        return losses + (logits - logits.mean(dim=0)).square().sum(dim=1), right

""",
        ),
        ("    def mean(", "    room = 3\n\n"),
        ("        # MORE", "        self.judged = lambda ids, targets, adjusted=None: None\n"),
    ],
)
def test_what_every_model_is_given_is_not_a_plugins_to_change(put, where, more):
    """The examination asks for other losses than training does, so it does not see these."""
    with pytest.raises(PluginUnusable, match=r"changes (judged|room), which every model is given; put it"):
        build(put(GOOD.replace(where, more + where)), 9, 3, 2, seed=1)


def test_a_constant_that_is_no_parameter_is_allowed(put):
    build(put(GOOD.replace("# MORE", "self.register_buffer('constant', torch.arange(3.0))")), 9, 3, 2, seed=1)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("module=Module", "module=lambda settings, sizes: nn.Linear(2, 2)", "builds a Linear"),
        ('"hidden": "encoder"', '"hidden": "middle"', "must name its parts"),
        ('"embedding": "embedding", ', "", "must name its parts"),
        ("return (sizes.embedding + 1)", "return 1 / 0", "raises ZeroDivisionError when it counts its values"),
    ],
)
def test_what_is_registered_must_fit_together(put, old, new, says):
    assert old in GOOD
    with pytest.raises(PluginUnusable, match=says):
        build(put(GOOD.replace(old, new)), 9, 3, 2, seed=1)
