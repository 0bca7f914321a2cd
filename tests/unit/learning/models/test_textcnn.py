"""TextCNN: no influence of padding, weights from a seed, and parameters in and out."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from learning.models import ParametersDiffer, build, build_blank, load_shared, shared_parameters
from learning.models.draws import TorchDraws
from tacit.model import TextCNNModel

torch.set_num_threads(1)
MODEL = TextCNNModel(embedding=6, widths=(2, 3, 5), maps=7, max_tokens=20)
VOCABULARY, LABELS, PAD = 30, 4, 3


def batch_of(*lengths: int, width: int, seed: int = 0) -> torch.Tensor:
    """Random texts of these lengths, padded to one width."""
    random = np.random.default_rng(seed)
    ids = np.full((len(lengths), width), PAD, dtype=np.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = random.choice([token for token in range(VOCABULARY) if token != PAD], length)
    return torch.from_numpy(ids)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 6, 12])
@torch.no_grad()
def test_logits_do_not_depend_on_how_far_a_text_is_padded(length: int) -> None:
    module = build(MODEL, VOCABULARY, LABELS, PAD, seed=1)
    # Biases that would make a window of padding the strongest, and a padding row that is not zero (after noise).
    for convolution in module.filters.values():
        convolution.bias.fill_(5.0)
        convolution.weight.neg_()
    module.embedding.weight[PAD] = 3.0
    alone = module(batch_of(length, width=max(length, 5), seed=length))
    for width in (5, 6, 7, 13, 20):
        if width >= length:
            padded = module(batch_of(length, 0, width=width, seed=length))[:1]
            torch.testing.assert_close(padded, alone, rtol=0, atol=1e-6)


@torch.no_grad()
def test_features_are_those_of_the_paper() -> None:
    """Kim 2014: c_i = f(w . x_{i:i+h-1} + b), the maximum over i, for every map of every width."""
    module = build(MODEL, VOCABULARY, LABELS, PAD, seed=2)
    ids = batch_of(9, width=9)
    words = module.embedding.weight[ids[0]]
    features = []
    for width in MODEL.widths:
        weight, bias = module.filters[str(width)].weight, module.filters[str(width)].bias
        for this in range(MODEL.maps):
            answers = [(weight[this].T * words[at : at + width]).sum() + bias[this] for at in range(9 - width + 1)]
            features.append(functional.relu(torch.stack(answers)).max())
    expected = module.output.weight @ torch.stack(features) + module.output.bias
    torch.testing.assert_close(module(ids)[0], expected, rtol=0, atol=1e-5)


def test_gradients_do_not_depend_on_padding_either() -> None:
    module = build(MODEL, VOCABULARY, LABELS, PAD, seed=3)
    gradients = []
    for width in (8, 20):
        module.zero_grad()
        functional.cross_entropy(module(batch_of(8, 3, 1, width=width)), torch.tensor([0, 1, 2])).backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    for short, long in zip(*gradients, strict=True):
        torch.testing.assert_close(short, long, rtol=0, atol=1e-6)
    assert not module.embedding.weight.grad[PAD].any()


def test_an_empty_text_has_finite_logits_and_gradients() -> None:
    module = build(MODEL, VOCABULARY, LABELS, PAD)
    logits = module(batch_of(0, 4, width=6))
    assert torch.equal(logits[0], module.output.bias)
    logits.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


def test_a_seed_determines_the_weights_and_leaves_torchs_rng_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = shared_parameters(build(MODEL, VOCABULARY, LABELS, PAD, seed=9))
    assert torch.equal(torch.rand(3), expected)
    second = shared_parameters(build(MODEL, VOCABULARY, LABELS, PAD, seed=9))
    other = shared_parameters(build(MODEL, VOCABULARY, LABELS, PAD, seed=10))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)


def test_a_blank_module_is_zero_and_leaves_torchs_rng_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    blank = build_blank(MODEL, VOCABULARY, LABELS, PAD)
    assert torch.equal(torch.rand(3), expected)
    assert not any(parameter.any() for parameter in blank.parameters())
    drawn = build(MODEL, VOCABULARY, LABELS, PAD, seed=9)
    load_shared(blank, shared_parameters(drawn))
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    assert torch.equal(blank(ids), drawn(ids))
    assert not blank.training


def test_starting_weights_have_the_documented_distribution() -> None:
    model = TextCNNModel(embedding=64, widths=(2, 4), maps=50, embedding_std=0.15)
    tensors = shared_parameters(build(model, 2000, 6, 0, seed=1))
    assert not tensors["embedding.weight"][0].any()
    assert abs(tensors["embedding.weight"][1:].std() - 0.15) < 0.001
    bound = (64 * 4) ** -0.5
    weight = tensors["filters.4.weight"]
    assert np.abs(weight).max() <= bound
    assert abs(weight.std() - bound / 3**0.5) < 0.02 * bound
    assert np.abs(tensors["filters.4.bias"]).max() <= bound
    assert np.abs(tensors["output.weight"]).max() <= 100**-0.5


def test_shared_parameters_have_stable_names_and_are_copies() -> None:
    module = build(MODEL, VOCABULARY, LABELS, PAD)
    tensors = shared_parameters(module)
    assert list(tensors) == [
        "embedding.weight",
        "filters.2.weight",
        "filters.2.bias",
        "filters.3.weight",
        "filters.3.bias",
        "filters.5.weight",
        "filters.5.bias",
        "output.weight",
        "output.bias",
    ]
    assert {array.dtype for array in tensors.values()} == {np.dtype(np.float32)}
    before = tensors["output.bias"].copy()
    with torch.no_grad():
        module.output.bias.add_(1)
    assert np.array_equal(tensors["output.bias"], before)


def test_saved_parameters_load_back_unchanged() -> None:
    tensors = shared_parameters(build(MODEL, VOCABULARY, LABELS, PAD, seed=1))
    for array in tensors.values():
        array.setflags(write=False)  # Like views into a version's bytes.
    module = build(MODEL, VOCABULARY, LABELS, PAD, seed=2)
    load_shared(module, tensors)
    again = shared_parameters(module)
    assert all(np.array_equal(tensors[name], again[name]) for name in tensors)


def test_another_models_parameters_are_refused_completely() -> None:
    module = build(MODEL, VOCABULARY, LABELS, PAD, seed=1)
    before = shared_parameters(module)
    wider = shared_parameters(build(MODEL, VOCABULARY + 1, LABELS, PAD, seed=2))
    with pytest.raises(ParametersDiffer, match=r"embedding\.weight has shape \[31, 6\].*\[30, 6\]"):
        load_shared(module, wider)
    lacking = {name: array for name, array in before.items() if name != "output.bias"} | {"extra": wider["output.bias"]}
    with pytest.raises(ParametersDiffer, match=r"missing \['output\.bias'\], surplus \['extra'\]"):
        load_shared(module, lacking)
    last_differs = before | {
        "output.bias": np.zeros(99, dtype=np.float32),
        "embedding.weight": before["embedding.weight"] + 1,
    }
    with pytest.raises(ParametersDiffer):
        load_shared(module, last_differs)
    after = shared_parameters(module)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_dropout_keeps_the_mean_and_follows_its_seed() -> None:
    dropout = build(MODEL, VOCABULARY, LABELS, PAD).dropout
    x = torch.ones(200, 200)
    assert dropout(x) is x  # Built in evaluation mode.
    dropout.train()
    dropout.draws = TorchDraws.seeded(1, torch.device("cpu"))
    first = dropout(x)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert abs(first.mean().item() - 1) < 0.03
    dropout.draws = TorchDraws.seeded(1, torch.device("cpu"))
    assert torch.equal(dropout(x), first)


def test_narrowing_changes_no_logit_and_puts_rows_back() -> None:
    module = build(MODEL, VOCABULARY, LABELS, PAD, seed=4)
    whole = module.embedding
    before = whole.weight.detach().clone()
    ids = batch_of(9, 4, 0, width=12)
    used = sorted(set(ids.flatten().tolist()))
    with torch.no_grad():
        expected = module(ids)
        with module.narrowed(ids.numpy()) as small:
            assert module.embedding.num_embeddings == len(used) < VOCABULARY
            assert torch.equal(module(torch.from_numpy(small)), expected)
            module.embedding.weight.add_(1)
    assert module.embedding is whole
    assert module.pad_id == PAD
    moved = (whole.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert moved == used


def test_ids_of_another_tokenizer_are_refused() -> None:
    module = build(MODEL, VOCABULARY, LABELS, PAD)
    for wrong in (VOCABULARY, -1):
        with pytest.raises(ValueError, match="outside the embedding of 30 rows"), module.narrowed(np.array([[wrong]])):
            pass


def test_the_widest_filter_sets_the_shortest_sequence() -> None:
    assert MODEL.min_tokens == build(MODEL, VOCABULARY, LABELS, PAD).min_tokens == 5
