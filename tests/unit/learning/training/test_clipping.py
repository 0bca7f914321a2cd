"""Clipped sums against a backward pass for each example and against Opacus, and the modules that must be refused."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.models import build
from learning.models.classifier import Dropout, TextClassifier
from learning.training import clipping
from learning.training.clipping import (
    ClippedGradients,
    PerExampleGradientsUnavailable,
    check_examples_apart,
    clip_factors,
)
from learning.training.local import TrainingDiverged
from tacit.model import BiLSTMModel, TextCNNModel

PAD, VOCABULARY, LABELS, BATCH = 3, 40, 4, 7
MODEL = TextCNNModel(embedding=10, widths=(1, 2, 4), maps=9, dropout=0.0, max_tokens=16)


def texts(seed=0, batch=BATCH, width=12):
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCABULARY, size=(batch, width))
    ids[ids == PAD] = PAD + 1
    ids[0, :6] = 5  # A repeated word, whose rows add up within an example.
    for row, length in enumerate(random.integers(1, width + 1, size=batch)):
        ids[row, length:] = PAD
    ids[-1] = PAD  # An empty text.
    return torch.from_numpy(ids), torch.from_numpy(random.integers(0, LABELS, size=batch))


def textcnn(**changes):
    return build(MODEL.model_copy(update=changes), VOCABULARY, LABELS, PAD, seed=3).train()


class Classifier(TextClassifier):
    """A minimal text classifier; each variant below breaks it in one place."""

    def __init__(self, vocabulary=VOCABULARY, width=6):
        super().__init__()
        torch.manual_seed(1)
        self.pad_id, self.min_tokens, self.dropout = PAD, 3, Dropout(0.0)
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.output = nn.Linear(width, LABELS)

    def words(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def pooled(self, ids: Tensor, x: Tensor) -> Tensor:
        return (x * (ids != self.pad_id)[:, :, None]).sum(dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.pooled(ids, self.words(ids)).tanh())


class Sequence(Classifier):
    """Layers over positions, and one that only Opacus can sample."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.strided = nn.Conv1d(6, 6, 3, stride=2, padding=1)

    def words(self, ids):
        x = self.norm(torch.relu(self.inner(self.embedding(ids))))
        return x + self.strided(x.transpose(1, 2)).mean(dim=2)[:, None, :]

    def pooled(self, ids, x):
        # Padding to other lengths would change the strided layer's mean, so this ignores padding.
        return x.sum(dim=1)


class LayersOfSeveral(Classifier):
    """Input rows of its own for each example, and layers that are frozen, half frozen or without bias."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        self.embedding.padding_idx = None
        self.output.bias.requires_grad_(False)
        self.convolution = nn.Conv1d(6, 6, 2)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def words(self, ids):
        return self.frozen(self.inner(self.embedding(ids))) + self.convolution(
            self.embedding_of_positions(ids).transpose(1, 2)
        ).transpose(1, 2)

    def embedding_of_positions(self, ids):
        return torch.linspace(0, 1, ids.shape[1] + 1)[None, :, None].repeat(len(ids), 1, 6)


def by_hand(module, ids, labels, clip):
    """The definition: one example at a time, alone in its batch, clipped over all its parameters."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    total = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
    norms = []
    for row in range(len(ids)):
        loss = functional.cross_entropy(module(ids[row : row + 1]), labels[row : row + 1])
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        norm = float(torch.sqrt(sum(g.double().square().sum() for g in found if g is not None)))
        norms.append(norm)
        for name, g in zip(trained, found, strict=True):
            if g is not None:
                total[name] += g * (min(1.0, clip / norm) if norm else 1.0)
    return total, norms


def ours(module, ids, labels, clip):
    with ClippedGradients(module) as clipped:
        clipped.add(functional.cross_entropy(module(ids), labels, reduction="none"), clip)
    return {name: values * clip for name, values in clipped.sums.items()}


def assert_same(found, expected, clip, relative=1e-5):
    assert found.keys() == expected.keys()
    for name in expected:
        assert float((found[name] - expected[name]).norm()) <= relative * clip, name


@pytest.mark.parametrize("made", [textcnn, Classifier, Sequence, LayersOfSeveral])
@pytest.mark.parametrize("share", [0.3, 1.0, 100.0])
def test_the_sum_is_that_of_a_backward_pass_for_each_example(made, share):
    module = made()
    ids, labels = texts()
    _, norms = by_hand(module, ids, labels, 1.0)
    clip = share * float(np.median(norms))  # All, half and none of the examples are clipped.
    expected, _ = by_hand(module, ids, labels, clip)
    assert_same(ours(module, ids, labels, clip), expected, clip * BATCH)
    # Each parameter agrees to a hundred-thousandth of itself, too.
    found = ours(module, ids, labels, clip)
    for name, parameter in expected.items():
        assert float((found[name] - parameter).norm()) <= 1e-5 * float(parameter.norm()) + 1e-7, name


def opacus_sum(module, ids, labels, clip):
    """Opacus' exact per-example gradients (hooks mode), clipped here, without the padding's row."""
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(copy.deepcopy(module), loss_reduction="sum")
    functional.cross_entropy(wrapped(ids), labels, reduction="sum").backward()
    samples = {name: parameter.grad_sample for name, parameter in wrapped._module.named_parameters()}
    samples["embedding.weight"][:, module.pad_id] = 0
    norms = torch.sqrt(sum(sample.double().flatten(1).square().sum(dim=1) for sample in samples.values()))
    factors = (clip / norms).clamp(max=1).float()
    return {name: torch.tensordot(factors, sample, dims=1) for name, sample in samples.items()}


opacus_warns = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@opacus_warns
@pytest.mark.parametrize("clip", [0.05, 1.0])
def test_the_sum_matches_opacus(clip):
    module = textcnn()
    ids, labels = texts(seed=5, batch=16)
    assert_same(ours(module, ids, labels, clip), opacus_sum(module, ids, labels, clip), clip * 16)


@opacus_warns
def test_the_papers_size_agrees_with_opacus():
    module = build(TextCNNModel(dropout=0.0), 500, 6, 0, seed=1).train()
    random = np.random.default_rng(2)
    ids, labels = torch.from_numpy(random.integers(1, 500, (6, 20))), torch.from_numpy(random.integers(0, 6, 6))
    assert_same(ours(module, ids, labels, 0.5), opacus_sum(module, ids, labels, 0.5), 3.0)


def test_sums_are_added_up_in_units_of_the_clip():
    module = textcnn()
    ids, labels = texts()
    whole = ours(module, ids, labels, 0.1)
    # A sum is added to what is there, so two pieces give the same sum.
    with ClippedGradients(module) as clipped:
        for rows in (slice(0, 3), slice(3, None)):
            losses = functional.cross_entropy(module(ids[rows]), labels[rows], reduction="none")
            clipped.add(losses, 0.1)
    assert_same({name: values * 0.1 for name, values in clipped.sums.items()}, whole, 0.1)


def test_an_example_does_not_depend_on_its_batch():
    module = textcnn()
    ids, labels = texts()
    ids[0, 8:] = PAD
    alone = {name: g.clone() for name, g in ours(module, ids[:1, :8], labels[:1], 0.1).items()}
    rest = {name: g.clone() for name, g in ours(module, ids[1:], labels[1:], 0.1).items()}
    together = ours(module, functional.pad(ids, (0, 5), value=PAD), labels, 0.1)
    assert_same(together, {name: alone[name] + rest[name] for name in alone}, 0.1)


def test_no_example_adds_more_than_the_clip():
    module = textcnn()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(30)
    ids, labels = texts()
    for row in range(BATCH - 1):
        found = ours(module, ids[row : row + 1], labels[row : row + 1], 0.7)
        assert float(torch.sqrt(sum(g.double().square().sum() for g in found.values()))) <= 0.7 * (1 + 1e-5)


def test_clip_factors_follow_the_definition():
    factors = clip_factors(torch.tensor([0.0, 0.25, 4.0, 1e30]), 1.0)
    assert factors.tolist() == pytest.approx([1.0, 1.0, 0.5, 1e-15])


class Scored(nn.Module):
    """A layer whose gradient g at its output is set by the test."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def added(self, x, g, clip):
        """The norm that examples x (B, ...) with g (B, ...) add to the sum, in units of the clip as in training."""
        with ClippedGradients(self) as clipped:
            # g is set directly: a loss of output * g could be any number if the output is large.
            output = self.layer(x)
            clipped.gradients = lambda *_, **__: {"layer": g}
            clipped.add(output.flatten(1).sum(dim=1), clip)
        return float(sum(values.square().sum() for values in clipped.sums.values()) ** 0.5)


EXTREMES = [(1e18, 9.6e-24, 1e-30), (1e-20, 1e-20, 1e-43), (1e20, 1e20, 1.0), (1e30, 1e-44, 1e-30), (1.0, 1e-30, 1e-33)]


@pytest.mark.parametrize(("x", "g", "clip"), EXTREMES)
@pytest.mark.parametrize(
    ("layer", "shape", "out"),
    [
        (lambda: nn.Linear(4, 3), (4,), (3,)),
        (lambda: nn.Linear(4, 3, bias=False), (5, 4), (5, 3)),
        (lambda: nn.Conv1d(4, 3, 2, bias=False), (4, 6), (3, 5)),
        (lambda: nn.LayerNorm(4), (4,), (4,)),
    ],
)
def test_no_size_of_weights_switches_clipping_off(layer, shape, out, x, g, clip):
    """A coordinator that writes the weights decides how close float32 is to the ends of its range."""
    module = Scored(layer())
    found = module.added(torch.full((1, *shape), x), torch.full((1, *out), g), clip)
    assert found <= 1 + 1e-5
    # A clipped example counts as one, if its gradient is finite.
    assert found > 0.95 or isinstance(module.layer, nn.LayerNorm)


@pytest.mark.parametrize(("g", "clip"), [(1e-24, 1e-30), (1e-38, 1e-42), (1e30, 1.0)])
def test_no_size_of_gradients_switches_an_embeddings_clipping_off(g, clip):
    module = Scored(nn.Embedding(5, 3))
    found = module.added(torch.tensor([[1, 2, 2]]), torch.full((1, 3, 3), g), clip)
    assert found == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 3, bias=False), lambda: nn.Conv1d(4, 3, 1, bias=False)])
def test_positions_that_cancel_do_not_switch_clipping_off(layer):
    """Terms that cancel leave only rounding in float32, whose norm is not the gradient's."""
    module = Scored(layer())
    random = torch.Generator().manual_seed(1)
    for size in (1e3, 1e6, 1e12):
        x = torch.randn(1, 1, 4, generator=random).repeat(1, 2, 1) * size
        g = torch.randn(1, 1, 3, generator=random) * torch.tensor([1.0, -1.0 - 1e-6])[None, :, None]
        if isinstance(module.layer, nn.Conv1d):
            x, g = x.transpose(1, 2), g.transpose(1, 2)
        assert module.added(x, g, 1.0) <= 1 + 1e-3


def test_an_example_too_large_to_be_added_counts_for_nothing():
    module = Scored(nn.Linear(4, 3))
    assert module.added(torch.full((1, 4), 2e30), torch.full((1, 3), 1e-30), 1.0) == 0
    assert module.added(torch.full((1, 4), 1e30), torch.full((1, 3), 1e-30), 1.0) > 0.9
    # The same for a weighted g, which float32 would make infinite, and nan where x is zero.
    module = Scored(nn.Linear(4, 3, bias=False))
    x, g = torch.zeros(2, 2, 4), torch.full((2, 2, 3), 1.0)
    x[:, 0], g[0, 1] = 1e-3, 1e35
    assert module.added(x, g, 1e-6) == pytest.approx(1, rel=1e-5)
    assert module.added(x[:1], g[:1], 1e-6) == 0


def test_only_a_zero_gradient_has_norm_zero():
    module = Scored(nn.Linear(4, 3, bias=False))
    assert module.added(torch.full((1, 4), 1.0), torch.zeros(1, 3), 1e-30) == 0
    tiny = 2.0**-90
    assert module.added(torch.full((1, 4), tiny), torch.full((1, 3), tiny), 1e-300) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite_adds_and_spoils_nothing(wrong):
    module = textcnn()
    ids, labels = texts()
    ids[ids == 17] = 18
    ids[2, 0] = 17
    with torch.no_grad():
        module.embedding.weight[17] = wrong
    others = [row for row in range(BATCH) if row != 2]
    expected = {name: g.clone() for name, g in ours(module, ids[others], labels[others], 0.1).items()}
    found = ours(module, ids, labels, 0.1)
    assert all(bool(torch.isfinite(g).all()) for g in found.values())
    assert_same(found, expected, 0.1)


def test_sound_modules_pass_the_check():
    for made in (textcnn, Classifier, LayersOfSeveral):
        for seed in range(3):
            module = made()
            check_examples_apart(module, seed)
            assert all(parameter.grad is None for parameter in module.parameters())
            assert module.training
    check_examples_apart(textcnn(dropout=0.5), 1)


def test_frozen_parameters_do_not_count():
    module = textcnn()
    module.embedding.requires_grad_(False)
    ids, labels = texts()
    expected, _ = by_hand(module, ids, labels, 0.1)
    assert "embedding.weight" not in expected
    assert_same(ours(module, ids, labels, 0.1), expected, 0.1)
    check_examples_apart(module, 0)


# ---- what must be refused ----------------------------------------------------------------------------------


class Prompt(Classifier):
    """Prompt tuning as in PEFT: the batch shares one prompt, and Opacus clips the batch as one example."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, 6))

    def words(self, ids):
        return self.embedding(ids) + self.prompt[:1].expand(len(ids), 6)[:, None, :]


class PromptLayer(Classifier):
    """The same in a known layer, whose single row is broadcast."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Embedding(2, 6)

    def words(self, ids):
        return self.embedding(ids) + self.prompt(torch.zeros(1, dtype=torch.long))[:, None, :]


class PromptOfTheProbesSize(Classifier):
    """As many prompt rows as there are probe texts, summed: the number of rows is right by chance."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Embedding(3, 6)

    def words(self, ids):
        return self.embedding(ids) + self.prompt(torch.arange(3)).sum(dim=0)


class Twice(Classifier):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def words(self, ids):
        return self.inner(torch.tanh(self.inner(self.embedding(ids))))


class Elsewhere(Classifier):
    """Uses a weight outside its layer too."""

    def words(self, ids):
        x = self.embedding(ids)
        return x + functional.linear(functional.linear(x, self.output.weight), self.output.weight.T)


class Tied(Classifier):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)
        self.outer.weight = self.inner.weight

    def words(self, ids):
        return self.outer(self.inner(self.embedding(ids)))


class Idle(Classifier):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)


class OwnLayer(Classifier):
    """A subclass may compute anything."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def __init__(self):
        super().__init__()
        self.output = self.Doubled(6, LABELS)


class Batched(Classifier):
    def __init__(self, **options):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, **options)

    def words(self, ids):
        return self.norm(self.embedding(ids).transpose(1, 2)).transpose(1, 2)


class Centred(Classifier):
    """Subtracts the mean over the batch, without a layer."""

    def words(self, ids):
        x = self.embedding(ids)
        return x - x.mean(dim=0)


class Counting(Classifier):
    """Depends on the batch through a number that has no gradient."""

    def forward(self, ids):
        return super().forward(ids) * len(torch.unique(ids[:, 0]))


class Neighbours(Classifier):
    """Depends a little on the other texts, where no gradient shows it."""

    def forward(self, ids):
        return super().forward(ids) * (1 + 0.002 * len(torch.unique(ids[:, 0])))


class InPlace(Classifier):
    def words(self, ids):
        return torch.tanh_(self.embedding(ids)) * 2


class Keywords(Classifier):
    def words(self, ids):
        return self.embedding(input=ids)


class Renormalised(Classifier):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6, padding_idx=PAD, max_norm=1.0)


class Recurrent(Classifier):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(6, 6, batch_first=True)

    def words(self, ids):
        return self.memory(self.embedding(ids))[0]


class Flattened(Classifier):
    """Passes positions as if they were examples."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def words(self, ids):
        x = self.embedding(ids)
        return self.inner(x.flatten(0, 1)).view(x.shape)


REFUSED = {
    Prompt: "prompt of the module itself",
    PromptLayer: "layer prompt takes 1 rows for 3 examples",
    PromptOfTheProbesSize: "depends on other examples",
    Twice: "layer inner was called 2 times",
    Elsewhere: "not those of a backward pass",
    Tied: "parameters outer.weight and inner.weight are tied",
    Idle: "layer inner was called 0 times",
    OwnLayer: "weight, bias of output .Doubled",
    Batched: "weight, bias of norm .BatchNorm1d",
    Centred: "depends on other examples",
    Counting: "logits depend on the other texts",
    InPlace: "not those of a backward pass",
    Keywords: "more than one tensor",
    Renormalised: "weight of embedding .Embedding",
    Recurrent: "of memory .LSTM",
    Flattened: "layer inner takes 21 rows for 3 examples",
}


@pytest.mark.parametrize("made", REFUSED, ids=lambda made: made.__name__)
def test_modules_without_per_example_gradients_are_refused(made):
    for seed in range(3):
        with pytest.raises(PerExampleGradientsUnavailable, match=REFUSED[made]):
            check_examples_apart(made().train(), seed)


def test_a_device_may_round_with_the_size_of_a_batch_and_not_with_its_texts(monkeypatch):
    """A GPU takes other kernels for other sizes. There, a batch of the same size shows what other texts do."""

    class Sized(Classifier):
        def forward(self, ids):
            return super().forward(ids) * (1 + 0.002 * len(ids))

    for made in (Sized, Neighbours):
        with pytest.raises(PerExampleGradientsUnavailable, match="logits depend on the other texts"):
            check_examples_apart(made().train(), 0)
    monkeypatch.setattr(clipping, "_on_the_cpu", lambda ids: False)
    check_examples_apart(Sized().train(), 0)
    with pytest.raises(PerExampleGradientsUnavailable, match="logits depend on the other texts"):
        check_examples_apart(Neighbours().train(), 0)


def saturated(module, seed, scale):
    """The module after a diverged training: its weights are so large that softmax is exactly 0 or 1."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) * scale)
    return module.train()


@pytest.mark.parametrize(
    ("made", "scale", "seeds"),
    # The BiLSTM's seeds give one text a gradient of about 1e-40, of which float32 keeps a few bits.
    [
        (BiLSTMModel, 10.0, (35, 60, 72, 149)),
        (TextCNNModel, 10.0, range(5)),
        (TextCNNModel, 1e4, range(10)),
        pytest.param(TextCNNModel, 1e4, range(10, 40), marks=pytest.mark.long),
    ],
)
def test_a_sound_but_saturated_model_passes_the_check(made, scale, seeds):
    model = made(embedding=10, dropout=0.0, max_tokens=16)
    for seed in seeds:
        check_examples_apart(saturated(build(model, VOCABULARY, LABELS, PAD, seed=seed), seed, scale), seed)


@pytest.mark.parametrize(
    "made", [Elsewhere, InPlace, Prompt, PromptOfTheProbesSize, Centred], ids=lambda made: made.__name__
)
def test_a_wrong_model_is_refused_even_if_saturated(made):
    module = made().train()
    with torch.no_grad():
        module.output.bias.copy_(500.0 * torch.arange(LABELS))
        logits = module(texts()[0])
    assert float((logits.amax(dim=1) - logits.amin(dim=1)).min()) > 104
    for seed in range(5):
        with pytest.raises(PerExampleGradientsUnavailable):
            check_examples_apart(module, seed)


def test_one_wrong_norm_is_found_in_a_saturated_model(monkeypatch):
    whole = clipping._Linear.squared_norms

    def first_is_half(self):
        return {name: norms * torch.tensor([0.25, 1.0, 1.0]) for name, norms in whole(self).items()}

    monkeypatch.setattr(clipping._Linear, "squared_norms", first_is_half)
    for seed in range(5):
        with pytest.raises(PerExampleGradientsUnavailable, match="not those of a backward pass"):
            check_examples_apart(saturated(textcnn(), seed, 10.0), seed)


def test_a_model_that_is_not_finite_is_called_diverged():
    module = textcnn()
    with torch.no_grad():
        module.output.weight.fill_(torch.inf)
    with pytest.raises(TrainingDiverged, match="not finite"):
        check_examples_apart(module, 0)


@opacus_warns
def test_the_broadcast_prompt_would_be_silently_wrong_in_opacus():
    """Without our check, a batch with one prompt is clipped as one example."""
    from opacus.grad_sample import GradSampleModule

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1, 6)

        def forward(self, x):
            return (x * self.table(torch.zeros(1, dtype=torch.long))).sum(dim=1)

    module = GradSampleModule(Adapter())
    module(torch.randn(5, 6)).sum().backward()
    assert module._module.table.weight.grad_sample.shape[0] == 1  # For five examples, and without an error.


@pytest.mark.parametrize("options", [{"affine": False}, {"affine": False, "track_running_stats": False}])
def test_batch_normalisation_without_parameters_is_refused_too(options):
    expected = "running_mean" if "track_running_stats" not in options else "depends on other examples"
    with pytest.raises(PerExampleGradientsUnavailable, match=expected):
        check_examples_apart(Batched(**options).train(), 0)


def test_every_batch_is_checked():
    """A layer may be skipped or broadcast only in a later forward pass."""

    class Moody(Classifier):
        mood = "well"

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def words(self, ids):
            x = self.embedding(ids)
            match self.mood:
                case "well":
                    return self.inner(x)
                case "skips":
                    return x
                case _:
                    return self.inner(x[:1]).expand_as(x)

    module = Moody().train()
    check_examples_apart(module, 0)
    ids, labels = texts()
    ours(module, ids, labels, 1.0)
    for mood, message in (("skips", "called 0 times"), ("broadcasts", "takes 1 rows for 7")):
        module.mood = mood
        with pytest.raises(PerExampleGradientsUnavailable, match=message):
            ours(module, ids, labels, 1.0)


def test_a_parameter_without_a_norm_is_refused(monkeypatch):
    from learning.training import clipping

    whole = clipping._Linear.squared_norms
    module, (ids, labels) = textcnn(), texts()
    monkeypatch.setattr(clipping._Linear, "squared_norms", lambda self: {"weight": whole(self)["weight"]})
    with pytest.raises(PerExampleGradientsUnavailable, match=r"parameter output\.bias"):
        ours(module, ids, labels, 1.0)
    monkeypatch.setattr(
        clipping._Linear, "squared_norms", lambda self: {name: norm[:1] for name, norm in whole(self).items()}
    )
    with pytest.raises(PerExampleGradientsUnavailable, match=r"parameter output\.weight"):
        ours(module, ids, labels, 1.0)


def test_a_module_with_nothing_to_train_is_refused():
    with pytest.raises(PerExampleGradientsUnavailable, match="no parameter to train"):
        ClippedGradients(Classifier().requires_grad_(False))


def test_hooks_are_removed():
    module = textcnn()
    with ClippedGradients(module):
        assert any(layer._forward_hooks for layer in module.modules())
    assert not any(layer._forward_hooks for layer in module.modules())
