"""Clipped sums of LSTMs and transformers, against a backward pass for each example and against Opacus."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.models import TextClassifier, build
from learning.models.bilstm import BiLSTM
from learning.models.lstm import LSTM
from learning.training.clipping import ClippedGradients, PerExampleGradientsUnavailable, check_examples_apart
from learning.training.private import train_private
from tacit.job import Training
from tacit.mechanism import DpSgd
from tacit.model import BiLSTMModel, TransformerModel
from tacit.prompt import LoRA, NoInjection
from tests.support.apart import assert_same, by_hand, clipped_sum
from tests.support.random_sources import Seeded

torch.set_num_threads(1)
PAD, VOCABULARY, LABELS, BATCH = 3, 40, 4, 7
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "initializer_range": 0.2,
}
DISTILBERT = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 24}


def bilstm(pooling="max", dropout=0.0, **more) -> TextClassifier:
    model = BiLSTMModel(embedding=10, hidden=6, pooling=pooling, dropout=dropout, max_tokens=16, **more)
    return build(model, VOCABULARY, LABELS, PAD, seed=3).train()


def transformer(config, dropout=0.0, **more) -> TextClassifier:
    model = TransformerModel(config=config, dropout=dropout, max_tokens=16, **more)
    return build(model, VOCABULARY, LABELS, PAD, seed=3).train()


MADE: dict[str, Callable[..., TextClassifier]] = {
    "max": lambda **more: bilstm("max", **more),
    "mean": lambda **more: bilstm("mean", **more),
    "last": lambda **more: bilstm("last", **more),
    "bert": lambda **more: transformer({"model_type": "bert", **SIZES}, **more),
    "roberta": lambda **more: transformer({"model_type": "roberta", **SIZES}, **more),
    "distilbert": lambda **more: transformer(
        {"model_type": "distilbert", "initializer_range": 0.2, **DISTILBERT}, **more
    ),
}
of_each = pytest.mark.parametrize("made", MADE.values(), ids=MADE)


def texts(seed=0, batch=BATCH, width=12) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCABULARY, size=(batch, width))
    ids[ids == PAD] = PAD + 1
    ids[0, :6] = 5  # A repeated word, whose rows add up within an example.
    for row, length in enumerate(random.integers(1, width + 1, size=batch)):
        ids[row, length:] = PAD
    ids[-1] = PAD  # An empty text.
    return torch.from_numpy(ids), torch.from_numpy(random.integers(0, LABELS, size=batch))


@of_each
@pytest.mark.parametrize("share", [0.3, 1.0, 100.0])
def test_the_sum_is_that_of_a_backward_pass_for_each_example(made, share) -> None:
    module = made()
    ids, labels = texts()
    _, norms = by_hand(module, ids, labels, 1.0)
    clip = share * float(np.median(norms))  # All, half and none of the examples are clipped.
    expected, _ = by_hand(module, ids, labels, clip)
    found = clipped_sum(module, ids, labels, clip)
    assert_same(found, expected, clip * BATCH)
    # Each parameter agrees to a ten-thousandth of itself, too.
    for name, parameter in expected.items():
        assert float((found[name] - parameter).norm()) <= 1e-4 * float(parameter.norm()) + 1e-6 * clip, name


@of_each
def test_each_layers_norms_are_those_of_its_gradients(made) -> None:
    """The joint norm could hide a layer whose norm is too small behind a large one."""
    module = made()
    ids, labels = texts()
    with ClippedGradients(module) as clipped:
        losses = functional.cross_entropy(module(ids), labels, reduction="none")
        gradients = clipped.gradients(losses.sum(), BATCH, keep_graph=True)
        found = {
            f"{call.name}.{short}": norms
            for call in clipped._calls
            for short, norms in clipped._makers[call.name](clipped._layers[call.name], call.x, gradients[call.name])
            .squared_norms()
            .items()
        }
        names = dict(module.named_parameters())
        assert found.keys() == names.keys()
        for row in range(BATCH):
            alone = torch.autograd.grad(losses[row], list(names.values()), retain_graph=True)
            for name, g in zip(names, alone, strict=True):
                norm, expected = float(found[name][row]) ** 0.5, float(g.double().norm())
                # The gradient of the keys' bias is rounding alone: its positions cancel, a thousandth of which counts.
                cancels = any(part in name for part in ("k_lin.bias", "key.bias"))
                assert norm == pytest.approx(expected, rel=2e-2, abs=1e-3 if cancels else 1e-6), name
                assert norm >= expected * (1 - 1e-5) - 1e-6, name


@of_each
def test_the_check_passes_with_dropout_and_a_frozen_embedding(made) -> None:
    for seed in range(2):
        for more in ({}, {"dropout": 0.4}, {"freeze_embedding": True}):
            module = made(**more)
            module.seed(seed)
            check_examples_apart(module, seed)
            assert all(parameter.grad is None for parameter in module.parameters())


@of_each
def test_an_example_depends_neither_on_its_batch_nor_on_padding(made) -> None:
    module = made()
    ids, labels = texts()
    ids[0, 8:] = PAD
    alone = clipped_sum(module, ids[:1, :8], labels[:1], 0.1)
    rest = clipped_sum(module, ids[1:], labels[1:], 0.1)
    together = clipped_sum(module, functional.pad(ids, (0, 4), value=PAD), labels, 0.1)
    assert_same(together, {name: alone[name] + rest[name] for name in alone}, 0.1, 2e-5)


@of_each
def test_frozen_parts_do_not_count_in_norm_and_sum(made) -> None:
    """Training phases freeze everything but the embedding, or but the head."""
    ids, labels = texts()
    for part in ("embedding", "encoder", "head"):
        module = made()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(module.part_of(name) == part)
        expected, norms = by_hand(module, ids, labels, 0.05)
        assert {module.part_of(name) for name in expected} == {part}
        assert max(norms) > 0.05
        assert_same(clipped_sum(module, ids, labels, 0.05), expected, 0.05 * BATCH, 5e-5)


@pytest.mark.parametrize("frozen", ["weight_ih", "weight_hh", "bias"])
def test_single_tensors_of_an_lstm_can_be_frozen(frozen) -> None:
    module = bilstm()
    assert isinstance(module, BiLSTM)
    for direction in module.encoder.values():
        direction.get_parameter(frozen).requires_grad_(False)
    ids, labels = texts()
    expected, _ = by_hand(module, ids, labels, 0.05)
    assert not any(name.startswith("encoder") and name.endswith(frozen) for name in expected)
    assert_same(clipped_sum(module, ids, labels, 0.05), expected, 0.05 * BATCH)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_an_lstms_norms_match_opacus() -> None:
    """DPLSTM has two biases, each with the gradient of our single one."""
    from opacus.grad_sample import GradSampleModule
    from opacus.layers import DPLSTM

    torch.manual_seed(4)
    ours, theirs = LSTM(5, 6), DPLSTM(5, 6, batch_first=True)
    with torch.no_grad():
        for name in ("weight_ih", "weight_hh"):
            ours.get_parameter(name).normal_()
        ours.bias.normal_()
    theirs.load_state_dict(
        {
            "weight_ih_l0": ours.weight_ih.detach(),
            "weight_hh_l0": ours.weight_hh.detach(),
            "bias_ih_l0": ours.bias.detach(),
            "bias_hh_l0": torch.zeros(24),
        }
    )
    x, weight = torch.randn(7, 9, 5), torch.randn(7, 9, 6)
    sampled = GradSampleModule(theirs, batch_first=True, loss_reduction="sum")
    (sampled(x)[0] * weight).sum().backward()
    expected = {name: parameter.grad_sample for name, parameter in sampled._module.named_parameters()}
    module = nn.ModuleDict({"layer": ours})
    with ClippedGradients(module) as clipped:
        gradients = clipped.gradients((ours(x) * weight).sum(), 7)
        (call,) = clipped._calls
        norms = clipped._makers["layer"](ours, call.x, gradients["layer"]).squared_norms()
    for name, their_name in (("weight_ih", "weight_ih_l0"), ("weight_hh", "weight_hh_l0"), ("bias", "bias_ih_l0")):
        wanted = expected[their_name].double().flatten(1).square().sum(dim=1)
        torch.testing.assert_close(norms[name], wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("x", "g", "clip"), [(1e18, 1e-24, 1e-30), (1e-20, 1e-20, 1e-43), (1.0, 1e-30, 1e-33)])
def test_no_size_of_weights_switches_an_lstms_clipping_off(x, g, clip) -> None:
    """A coordinator that writes the weights decides how close float32 is to the ends of its range."""
    layer = LSTM(4, 3)
    module = nn.ModuleDict({"layer": layer})
    with ClippedGradients(module) as clipped:
        states = layer(torch.full((1, 5, 4), x))
        clipped.gradients = lambda *_, **__: {"layer": torch.full((1, 5, 12), g)}
        clipped.add(states.flatten(1).sum(dim=1), clip)
    norm = float(sum(values.square().sum() for values in clipped.sums.values()) ** 0.5)
    assert 0.95 < norm <= 1 + 1e-5


def test_positions_that_cancel_do_not_switch_an_lstms_clipping_off() -> None:
    layer = LSTM(4, 3)
    module = nn.ModuleDict({"layer": layer})
    random = torch.Generator().manual_seed(1)
    for size in (1e3, 1e6, 1e12):
        x = torch.randn(1, 1, 4, generator=random).repeat(1, 2, 1) * size
        g = torch.randn(1, 1, 12, generator=random) * torch.tensor([1.0, -1.0 - 1e-6])[None, :, None]
        with ClippedGradients(module) as clipped:
            states = layer(x)
            # g is bound now, as the loop goes on.
            clipped.gradients = lambda *_, g=g, **__: {"layer": g}
            clipped.add(states.flatten(1).sum(dim=1), 1.0)
        assert float(sum(values.square().sum() for values in clipped.sums.values())) <= 1.01


def test_an_example_that_is_not_finite_adds_and_spoils_nothing() -> None:
    for made in MADE.values():
        module = made()
        ids, labels = texts()
        ids[ids == 17] = 18
        ids[2, 0] = 17
        with torch.no_grad():
            module.embedding.weight[17] = float("nan")
        others = [row for row in range(BATCH) if row != 2]
        expected = clipped_sum(module, ids[others], labels[others], 0.1)
        assert_same(clipped_sum(module, ids, labels, 0.1), expected, 0.1, 2e-5)


class Broadcast(BiLSTM):
    """One row of initial vectors for the whole batch, which careless code would clip as one example."""

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        states = self.encoder["onward"](vectors[:1]).expand(len(vectors), -1, -1).mean(dim=1)
        both = torch.cat([states, self.encoder["backward"](vectors).mean(dim=1)], dim=1)
        logits: Tensor = self.output(both)
        return logits


class Twice(BiLSTM):
    """Both directions through one layer: the norm would lack terms of the two calls."""

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        onward = self.encoder["onward"]
        both = torch.cat([onward(vectors).mean(dim=1), onward(vectors.flip(1)).mean(dim=1)], dim=1)
        logits: Tensor = self.output(both)
        return logits


@pytest.mark.parametrize(
    ("kind", "message"), [(Broadcast, "layer encoder.onward takes 1 rows for 3"), (Twice, "onward was called 2 times")]
)
def test_an_lstm_not_called_once_for_the_batch_is_refused(kind, message) -> None:
    module = kind(BiLSTMModel(embedding=10, hidden=6, dropout=0.0), VOCABULARY, LABELS, PAD, 1).train()
    with pytest.raises(PerExampleGradientsUnavailable, match=message):
        check_examples_apart(module, 0)


def test_broadcast_positions_are_refused() -> None:
    """transformers' default: one row of positions for all texts."""
    module = transformer({"model_type": "bert", **SIZES})
    encoder = module.encoder
    whole = encoder.embeddings.forward
    encoder.embeddings.forward = lambda **given: whole(**{**given, "position_ids": given["position_ids"][:1]})
    with pytest.raises(PerExampleGradientsUnavailable, match=r"position_embeddings takes 1 rows for 3 examples"):
        check_examples_apart(module, 0)


def test_the_lstm_is_fused_again_afterwards() -> None:
    module = bilstm()
    assert isinstance(module, BiLSTM)
    ids, labels = texts()
    clipped_sum(module, ids, labels, 1.0)
    with pytest.raises(RuntimeError, match="stop"), ClippedGradients(module):
        raise RuntimeError("stop")
    assert all(direction._observer is None for direction in module.encoder.values())


@of_each
def test_every_coordinate_is_trained_with_noise(made) -> None:
    module = made(dropout=0.2)
    ids, labels = texts(batch=30)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    mechanism = DpSgd(noise_multiplier=1.0, clip=0.5, lot=8, steps=3)
    recipe = Training(optimiser="sgd", learning_rate=0.1, batch=8)
    train_private(module, ids.numpy(), labels.numpy(), recipe, mechanism, random=Seeded("a"), seed=1)
    for name, parameter in module.named_parameters():
        moved = parameter != before[name]
        # Every coordinate has noise except the padding's row (RoBERTa's positions have one too).
        if name == "embedding.weight":
            assert not moved[PAD].any()
        assert float(moved.float().mean()) > 0.9, name
    assert not module.training


EVERYWHERE = LoRA(rank=3, matrices=("query", "key", "value", "output", "up", "down"))
INJECTED = {
    "bert": ("bert", EVERYWHERE, {"down", "up", "output"}),
    "roberta": ("roberta", EVERYWHERE, {"down", "up", "output"}),
    "distilbert": ("distilbert", EVERYWHERE, {"down", "up", "output"}),
    "one matrix": ("bert", EVERYWHERE.model_copy(update={"train": "up"}), {"up", "output"}),
    "head alone": ("bert", NoInjection(), {"output"}),
}


@pytest.mark.parametrize("freeze", [False, True], ids=["embedding trained", "embedding frozen"])
@pytest.mark.parametrize(("family", "injection", "parts"), INJECTED.values(), ids=INJECTED)
def test_what_is_trained_over_a_frozen_encoder_is_clipped_by_example(
    family: str, injection: LoRA | NoInjection, parts: set[str], freeze: bool
) -> None:
    module = MADE[family](injection=injection, freeze_embedding=freeze)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Away from the start, where half of the changes have no gradient.
            if name.endswith(".up.weight"):
                parameter.normal_(std=0.2)
    ids, labels = texts()
    _, norms = by_hand(module, ids, labels, 1.0)
    for share in (0.3, 1.0):
        clip = share * float(np.median(norms))
        expected, _ = by_hand(module, ids, labels, clip)
        assert {name.split(".")[-2] for name in expected} == parts | (set() if freeze else {"embedding"})
        assert_same(clipped_sum(module, ids, labels, clip), expected, clip * BATCH)
    check_examples_apart(module, 0)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    mechanism = DpSgd(noise_multiplier=1.0, clip=0.5, lot=8, steps=3)
    recipe = Training(optimiser="sgd", learning_rate=0.1, batch=8)
    train_private(module, ids.numpy(), labels.numpy(), recipe, mechanism, random=Seeded("a"), seed=1)
    for name, parameter in module.named_parameters():
        share = float((parameter != before[name]).float().mean())
        # Noise on every value that is trained, and none on others.
        assert share > 0.9 if name in expected else share == 0, name
