"""BiLSTM: the two directions match torch's own, padding has no influence, and the unrolled layer is the fused one."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from learning.models import build, build_blank, load_shared, shared_parameters
from learning.models.bilstm import BiLSTM
from learning.models.lstm import LSTM
from tacit.model import BiLSTMModel

torch.set_num_threads(1)
VOCABULARY, LABELS, PAD, WIDTH, HIDDEN = 30, 4, 3, 6, 5
POOLINGS = ["max", "mean", "last"]
NAMES = [
    "embedding.weight",
    "encoder.onward.weight_ih",
    "encoder.onward.weight_hh",
    "encoder.onward.bias",
    "encoder.backward.weight_ih",
    "encoder.backward.weight_hh",
    "encoder.backward.bias",
    "output.weight",
    "output.bias",
]


def table(pooling="max", **changes) -> BiLSTMModel:
    return BiLSTMModel(embedding=WIDTH, hidden=HIDDEN, pooling=pooling, max_tokens=20, **changes)


def made(pooling="max", *, seed=1, **changes) -> BiLSTM:
    module = build(table(pooling, **changes), VOCABULARY, LABELS, PAD, seed=seed)
    assert isinstance(module, BiLSTM)
    return module


def texts_of(*lengths: int, width: int, seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng(seed)
    ids = np.full((len(lengths), width), PAD, dtype=np.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = random.choice([token for token in range(VOCABULARY) if token != PAD], length)
    return torch.from_numpy(ids)


def torchs(module: BiLSTM) -> nn.LSTM:
    """nn.LSTM with the module's weights."""
    theirs = nn.LSTM(WIDTH, HIDDEN, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for name, suffix in (("onward", ""), ("backward", "_reverse")):
            ours = module.encoder[name]
            theirs.get_parameter(f"weight_ih_l0{suffix}").copy_(ours.weight_ih)
            theirs.get_parameter(f"weight_hh_l0{suffix}").copy_(ours.weight_hh)
            theirs.get_parameter(f"bias_ih_l0{suffix}").copy_(ours.bias)
            theirs.get_parameter(f"bias_hh_l0{suffix}").zero_()
    return theirs


@pytest.mark.parametrize("pooling", POOLINGS)
@torch.no_grad()
def test_logits_match_torchs_packed_lstm(pooling: str) -> None:
    module = made(pooling, seed=3)
    lengths = torch.tensor([7, 1, 12, 4])
    ids = texts_of(*lengths.tolist(), width=14)
    packed = pack_padded_sequence(module.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
    states, (last, _) = torchs(module)(packed)
    whole, _ = pad_packed_sequence(states, batch_first=True, padding_value=-torch.inf)
    expected = {
        "max": whole.amax(dim=1),
        "mean": whole.masked_fill(whole.isinf(), 0).sum(dim=1) / lengths[:, None],
        "last": torch.cat([last[0], last[1]], dim=1),
    }[pooling]
    torch.testing.assert_close(module(ids), module.output(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("length", [0, 1, 2, 5, 12])
@torch.no_grad()
def test_logits_do_not_depend_on_how_far_a_text_is_padded(length: int, pooling: str) -> None:
    module = made(pooling)
    # Make padding visible if it had influence: a row that is not zero (as after noise), and large biases.
    module.embedding.weight[PAD] = 3.0
    for direction in module.encoder.values():
        direction.bias.add_(1.0)
    alone = module(texts_of(length, width=max(length, 1), seed=length))
    for width in (1, 2, 6, 13, 20):
        if width >= length:
            padded = module(texts_of(length, 0, width=width, seed=length))[:1]
            torch.testing.assert_close(padded, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_do_not_depend_on_padding_either(pooling: str) -> None:
    module = made(pooling, seed=3)
    gradients = []
    for width in (8, 20):
        module.zero_grad()
        functional.cross_entropy(module(texts_of(8, 3, 1, width=width)), torch.tensor([0, 1, 2])).backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    for short, long in zip(*gradients, strict=True):
        assert short.any()
        torch.testing.assert_close(short, long, rtol=0, atol=1e-6)
    assert not module.embedding.weight.grad[PAD].any()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_empty_text_has_finite_logits_and_gradients(pooling: str) -> None:
    module = made(pooling)
    logits = module(texts_of(0, 4, width=6))
    assert torch.equal(logits[0], module.output.bias)
    logits.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


def test_both_ends_of_a_text_reach_the_last_states() -> None:
    module = made("last")
    ids = texts_of(9, width=12)
    for at in (0, 8):
        other = ids.clone()
        other[0, at] = (ids[0, at] + 1) % VOCABULARY if (ids[0, at] + 1) % VOCABULARY != PAD else 0
        assert not torch.allclose(module(ids), module(other), atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_unrolled_layer_is_the_fused_one(length: int) -> None:
    torch.manual_seed(0)
    layer = LSTM(WIDTH, HIDDEN)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    vectors = torch.randn(7, length, WIDTH, requires_grad=True)
    weight = torch.randn(7, length, HIDDEN)
    leaves = [vectors, *layer.parameters()]
    fused = layer(vectors)
    expected = torch.autograd.grad((fused * weight).sum(), leaves)
    seen = []
    layer.observe(lambda *call: seen.append(call))
    unrolled = layer(vectors)
    torch.testing.assert_close(unrolled, fused, rtol=0, atol=1e-6)
    for found, wanted in zip(torch.autograd.grad((unrolled * weight).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    ((x, before, inputs),) = seen
    assert torch.equal(x, vectors)
    assert not before[:, 0].any()
    torch.testing.assert_close(before[:, 1:], fused[:, :-1], rtol=0, atol=1e-6)
    assert (x.requires_grad, before.requires_grad, inputs.requires_grad) == (False, False, True)
    layer.observe(None)
    layer(vectors)
    assert len(seen) == 1


def test_the_unrolled_layer_has_second_derivatives() -> None:
    """Reconstruction from an update follows gradients of gradients."""
    module = made(seed=2)
    for direction in module.encoder.values():
        direction.observe(lambda *_: None)
    vectors = torch.randn(2, 4, WIDTH, requires_grad=True)
    seen = torch.ones(2, 4, dtype=torch.bool)
    logits = module.classify(vectors, seen)
    parameters = [parameter for name, parameter in module.named_parameters() if name != "embedding.weight"]
    first = torch.autograd.grad(functional.cross_entropy(logits, torch.tensor([0, 1])), parameters, create_graph=True)
    (second,) = torch.autograd.grad(sum(g.square().sum() for g in first), vectors)
    assert second.abs().max() > 1e-6
    assert torch.isfinite(second).all()


def test_a_seed_determines_the_weights_and_leaves_torchs_rng_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = shared_parameters(made(seed=9))
    assert torch.equal(torch.rand(3), expected)
    second, other = shared_parameters(made(seed=9)), shared_parameters(made(seed=10))
    assert list(first) == NAMES
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)


def test_a_blank_module_is_zero_and_takes_weights() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    blank = build_blank(table(), VOCABULARY, LABELS, PAD)
    assert torch.equal(torch.rand(3), expected)
    assert not any(parameter.any() for parameter in blank.parameters())
    drawn = made(seed=9)
    load_shared(blank, shared_parameters(drawn))
    ids = texts_of(5, 2, width=5)
    assert torch.equal(blank(ids), drawn(ids))
    assert not blank.training


def test_starting_weights_have_the_documented_distribution() -> None:
    model = BiLSTMModel(embedding=64, hidden=50, embedding_std=0.15)
    tensors = shared_parameters(build(model, 2000, 6, 0, seed=1))
    assert not tensors["embedding.weight"][0].any()
    assert abs(tensors["embedding.weight"][1:].std() - 0.15) < 0.001
    bound = 50**-0.5
    for name in NAMES[1:7]:
        assert np.abs(tensors[name]).max() <= bound
        assert abs(tensors[name].std() - bound / 3**0.5) < 0.06 * bound
    assert np.abs(tensors["output.weight"]).max() <= 100**-0.5
    # The paper's size: 300 in each direction over vectors of 300, 1.44 million without biases.
    whole = build_blank(BiLSTMModel(), 10, 4, 0)
    assert sum(parameter.numel() for parameter in whole.encoder.parameters()) == 1_440_000 + 2 * 4 * 300


def test_parameters_belong_to_three_parts() -> None:
    assert [BiLSTM.part_of(name) for name in NAMES] == ["embedding", *["encoder"] * 6, "head", "head"]


def test_dropout_is_before_the_head_and_follows_its_seed() -> None:
    module = made(dropout=0.5).train()
    ids = texts_of(8, 3, width=8)
    module.seed(4)
    first = module(ids)
    module.seed(4)
    assert torch.equal(module(ids), first)
    module.seed(5)
    assert not torch.equal(module(ids), first)
    module.dropout.probability = 0.0
    assert torch.equal(module(ids), module.eval()(ids))


def test_a_frozen_embedding_has_no_gradient() -> None:
    module = made(freeze_embedding=True)
    module(texts_of(4, width=5)).sum().backward()
    assert module.embedding.weight.grad is None
    assert all(parameter.grad is not None for name, parameter in module.named_parameters() if name != NAMES[0])


@torch.no_grad()
def test_narrowing_changes_no_logit() -> None:
    module = made(seed=4)
    ids = texts_of(9, 4, 0, width=12)
    expected = module(ids)
    with module.narrowed(ids.numpy()) as small:
        assert torch.equal(module(torch.from_numpy(small)), expected)
