"""A plugin's module is examined before training: shapes, draws, and that a text's numbers are its own."""

import numpy as np
import pytest
import torch

from learning.models import build
from learning.plugins.examination import examine
from learning.plugins.installed import PluginUnusable
from learning.plugins.loading import admit
from learning.training.clipping import check_examples_apart
from learning.training.outcome import ModelUnsuitable
from learning.training.private import padded_lengths, train_private
from tacit.job import Training
from tacit.mechanism import DpSgd
from tests.support.plugins import GOOD, forgotten, installed, model_of
from tests.support.random_sources import Seeded

MEAN = "return (vectors * seen[:, :, None]).sum(dim=1) / seen.sum(dim=1, keepdim=True).clamp(min=1)"
assert MEAN in GOOD


@pytest.fixture
def put(site):
    def put(text=GOOD, **changes):
        installed(site, {"tacit_own.py": text})
        model = model_of(**changes)
        admit(model)
        return model

    return put


@pytest.mark.parametrize("seed", range(20))
def test_a_module_that_keeps_its_contract_passes(put, seed):
    examine(put(dropout=0.4), 3, seed)


@pytest.mark.parametrize("sizes", [{"max_tokens": 1}, {"max_tokens": 4096}, {"freeze_embedding": True}])
def test_it_passes_at_the_limits_of_its_lengths(put, sizes):
    examine(put(**sizes), 3, 1)


def test_one_process_examines_a_model_once(put, monkeypatch):
    model = put()
    examine(model, 3, 1)
    monkeypatch.setattr("learning.plugins.examination.plugin_classifier", None)
    examine(model, 3, 2)
    with pytest.raises(TypeError):
        examine(model, 4, 2)


# Each is a mistake that an honest author could make, and what it does to a member is in the comment.
LEAKS = {
    # The statistics of other texts, as values.
    "normalised over the batch": (
        "# LATER",
        "x = (x - x.mean(dim=0)) / (x.std(dim=0, correction=0) + 0.1)",
        "logits depend on the other texts",
    ),
    "without running statistics": (
        "# LATER",
        # It refuses a batch of one by itself.
        "x = nn.functional.batch_norm(x, None, None, training=True)",
        "raises ValueError on probe texts",
    ),
    # Nothing in the values, and other texts' gradients in each one's own.
    "in the gradient alone": (
        "# LATER",
        "x = x + (x.mean(dim=0) - x.mean(dim=0).detach())",
        "gradient depends on the other texts",
    ),
    # Gradients of one loss at a time are small, and zero at the other texts.
    "in the sum of steep losses alone": (
        "# LATER",
        "if x.requires_grad: x.register_hook(lambda g: g / g.norm().clamp(min=10.0))",
        "gradient depends on the other texts",
    ),
    "the neighbour's text": ("# LATER", "x = x + 0.1 * x.roll(1, dims=0)", "logits depend on the other texts"),
    # How far it is padded is the length of the longest other text.
    "padding in the mean": (MEAN, "return vectors.mean(dim=1)", "logits depend on .* how far it is padded"),
    "the padded length": (
        MEAN,
        "return vectors.sum(dim=1) / vectors.shape[1]",
        "logits depend on .* how far it is padded",
    ),
    "padding in a softmax": (
        MEAN,
        "return (vectors.sum(2).softmax(1)[:, :, None] * vectors).sum(dim=1)",
        "logits depend on .* how far it is padded",
    ),
    # Texts of the probe fill one part alone.
    "parts of long texts": (
        MEAN,
        "return torch.stack([(v * s[:, :, None]).sum(1) / s.sum(1, keepdim=True).clamp(min=1)"
        " for v, s in zip(vectors.split(32, 1), seen.split(32, 1))]).mean(dim=0)",
        "logits depend on .* how far it is padded",
    ),
    "only in training": (
        "# LATER",
        "x = x - x.mean(dim=0) if self.training else x",
        "logits depend on the other texts",
    ),
    "only in prediction": (
        "# LATER",
        "x = x if self.training else x - x.mean(dim=0)",
        "logits depend on the other texts",
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("seed", range(3))
def test_a_text_whose_numbers_are_not_its_own_is_refused(put, leak, seed):
    old, new, says = LEAKS[leak]
    with pytest.raises(PluginUnusable, match=says):
        examine(put(GOOD.replace(old, new)), 3, seed)


def test_gradients_that_are_bounded_text_by_text_pass(put):
    new = "if x.requires_grad: x.register_hook(lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=10.0))"
    examine(put(GOOD.replace("# LATER", new)), 3, 1)


def test_a_leak_that_starts_at_zero_is_found(put):
    """Its parameter is zero in version 0, and not after a step."""
    text = GOOD.replace("# MORE", "nn.init.zeros_(self.output.weight)").replace(
        "# LATER", "x = x + self.output.weight.sum() * x.mean(dim=0)"
    )
    with pytest.raises(PluginUnusable, match="logits depend on the other texts"):
        examine(put(text), 3, 1)


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ("x = x[:1]", "of shape .* for 3 texts"),
        ("x = x[:, None]", "of shape"),
        ("return [x]", "gives a list"),
        ("return self.output(x).double()", "torch.float64"),
        ("x = x / 0", "not finite"),
        ("raise RuntimeError('secret')", "raises RuntimeError on probe texts"),
        ("raise SystemExit('secret')", "raises SystemExit on probe texts"),
        ("x = nn.functional.dropout(x, 0.5, self.training)", "other logits for the same texts and the same seed"),
        ("self.kept = getattr(self, 'kept', 0) + 1; x = x * self.kept", "same texts and the same seed|raises|depend"),
    ],
)
def test_what_a_module_computes_must_have_its_shape_and_no_randomness(put, new, says):
    with pytest.raises(PluginUnusable, match=says) as refused:
        examine(put(GOOD.replace("# LATER", new)), 3, 1)
    assert "secret" not in str(refused.value)


def test_settings_that_ask_for_more_memory_than_a_member_has_build_nothing(put):
    with pytest.raises(PluginUnusable, match=r"model\.settings: .* values are more than"):
        examine(put(settings={"hidden": 2**30}), 3, 1)


def test_a_buffer_that_training_changes_is_refused(put):
    text = GOOD.replace("# MORE", "self.register_buffer('seen_so_far', torch.zeros(4))").replace(
        "# LATER", "self.seen_so_far += x.detach().sum(dim=0) * self.training"
    )
    with pytest.raises(PluginUnusable, match="changes seen_so_far in training"):
        examine(put(text), 3, 1)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        "torch.embedding_renorm_(self.places.weight, at, 1.0, 2.0)",
        # No row of the probe's weights is as long, and after some steps of training one may be.
        "torch.embedding_renorm_(self.places.weight, at, 1e9, 2.0)",
        "self.places.weight.data[at] /= self.places.weight[at].norm(dim=1, keepdim=True).clamp(min=1)",
    ],
)
def test_a_parameter_that_training_changes_by_itself_is_refused(put, trained, write):
    """What a forward pass writes is clipped by nobody and has no noise: here, how long the longest text is."""
    text = GOOD.replace("# MORE", f"self.places = nn.Embedding(sizes.max_tokens, 6).requires_grad_({trained})")
    text = text.replace('"hidden": "encoder"', '"hidden": "encoder", "places": "encoder"')
    text = text.replace("return (sizes.embedding", "return sizes.max_tokens * 6 + (sizes.embedding")
    text = text.replace(
        "def classify(self, vectors, seen):",
        """def classify(self, vectors, seen):
        at = torch.arange(vectors.shape[1])
        if self.training:
            with torch.no_grad():
                WRITE
        vectors = vectors + self.places(at.expand(len(vectors), -1))""".replace("WRITE", write),
    )
    model = put(text)
    # Its gradients are clipped as they should be.
    check_examples_apart(build(model, 20, 3, 0, seed=1).train(), 7)
    with pytest.raises(PluginUnusable, match=r"changes places\.weight in training"):
        examine(model, 3, 1)


def test_a_constant_that_stays_on_the_cpu_is_found_before_a_training_elsewhere(put):
    """The meta device stands for one that is not the CPU: it computes nothing, and refuses tensors of others."""
    constant = GOOD.replace("# MORE", "self.constant = torch.ones(4)").replace("# LATER", "x = x * self.constant")
    examine(put(constant), 3, 1)
    with pytest.raises(PluginUnusable, match="does not run on meta; register its constants as buffers"):
        examine(put(constant), 3, 1, "meta")
    buffer = constant.replace("self.constant = torch.ones(4)", "self.register_buffer('constant', torch.ones(4))")
    forgotten()
    examine(put(buffer), 3, 1, "meta")


# What only the comparison of clipping sees: the gradients are each text's own, and are counted wrongly.
MISCOUNTED = {
    "a parameter outside a layer": ("# MORE", "self.hidden.register_parameter('scale', nn.Parameter(torch.ones(1)))"),
    "a layer called twice": (
        "# LATER",
        "x = torch.tanh(self.hidden(self.mean(vectors, seen)) + self.hidden(vectors[:, 0]))",
    ),
    "a weight used by itself": ("# LATER", "x = x * self.output.weight.sum()"),
}


@pytest.mark.parametrize("fault", MISCOUNTED)
def test_gradients_that_would_be_clipped_wrongly_are_refused(put, fault):
    old, new = MISCOUNTED[fault]
    text = GOOD.replace(old, new)
    if "scale" in new:
        text = text.replace("# LATER", "x = x * self.hidden.scale").replace(
            "settings.hidden + (", "settings.hidden + 1 + ("
        )
    model = put(text)
    examine(model, 3, 1)
    module = build(model, 20, 3, 0, seed=1).train()
    with pytest.raises(ModelUnsuitable):
        check_examples_apart(module, 7)


def test_a_good_module_is_clipped_as_one_backward_pass_an_example_would(put):
    module = build(put(), 20, 3, 0, seed=1).train()
    check_examples_apart(module, 7)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert np.isfinite(torch.cat([each.flatten() for each in module.parameters()]).detach().numpy()).all()


def test_under_noise_a_long_text_is_padded_no_further_than_the_plugin_has_positions(put):
    """Padded to a multiple of eight, one text of eleven tokens would end the training, and a failure has no noise."""
    positions = "self.hidden.positions = nn.Parameter(torch.zeros(sizes.max_tokens, sizes.embedding), False)"
    text = (
        GOOD.replace("# MORE", positions)
        .replace("self.mean(vectors, seen)", "self.mean(vectors + self.hidden.positions[: seen.shape[1]], seen)")
        .replace("    return (sizes.embedding", "    return sizes.max_tokens * sizes.embedding + (sizes.embedding")
    )
    model = put(text, max_tokens=11)
    examine(model, 3, 1)
    ids = np.zeros((4, 11), dtype=np.int64)
    for row, length in enumerate((2, 5, 8, 11)):
        ids[row, :length] = 1 + np.arange(length)
    for device_step in (8, 32):
        assert padded_lengths(build(model, 20, 3, 0, seed=1), np.array([2, 11]), device_step).tolist()[1] == 11
    mechanism = DpSgd(noise_multiplier=1.0, clip=1.0, lot=4, steps=2)
    labels, recipe = np.zeros(4, dtype=np.int64), Training(batch=4)
    module = build(model, 20, 3, 0, seed=1)
    trained = train_private(module, ids, labels, recipe, mechanism, random=Seeded("one"), seed=0, rate=1.0)
    assert trained.steps == 2
