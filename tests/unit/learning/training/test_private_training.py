"""DP-SGD is exactly the algorithm that is accounted for, draw by draw and value by value."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

from learning.mechanisms import correlated, noise
from learning.mechanisms.noise import lattice_step
from learning.models import build, shared_parameters
from learning.models.draws import SecretDraws, TorchDraws
from learning.training import private
from learning.training.clipping import ClippedGradients, PerExampleGradientsUnavailable
from learning.training.local import TrainingCancelled, TrainingDiverged, evaluate, pieces_of, train
from learning.training.private import train_private
from tacit.job import Training
from tacit.mechanism import DpSgd
from tacit.model import TextCNNModel
from tests.support.random_sources import Seeded

PAD, VOCABULARY, LABELS = 0, 60, 3
MODEL = TextCNNModel(embedding=6, widths=(1, 2), maps=5, dropout=0.5, max_tokens=8)
SGD = Training(optimiser="sgd", learning_rate=0.5, batch=8)
ADAM = Training(optimiser="adam", learning_rate=0.01, batch=8)
QUIET = DpSgd(noise_multiplier=1e-6, clip=0.01, lot=10, steps=4)


def module_of(seed=1, **changes):
    return build(MODEL.model_copy(update=changes), VOCABULARY, LABELS, PAD, seed=seed)


def data(count=40, words=30, seed=0):
    """Texts that use half of the vocabulary; the label is the group of their words."""
    random = np.random.default_rng(seed)
    labels = random.integers(LABELS, size=count)
    ids = 1 + (random.integers(words // LABELS, size=(count, 8)) * LABELS + labels[:, None])
    ids[np.arange(8) >= random.integers(2, 9, size=count)[:, None]] = PAD
    return ids.astype(np.int64), labels.astype(np.int64)


def change(module, *arguments, seed="member", **options):
    before = shared_parameters(module)
    result = train_private(module, *arguments, random=Seeded(seed), seed=0, **options)
    after = shared_parameters(module)
    return {name: after[name] - before[name] for name in before}, result


def by_hand(module, ids, labels, recipe, mechanism, seed):
    """The module's docstring line by line: every draw, one example at a time, no pieces, the whole embedding."""
    source = Seeded(seed)
    source.bytes(8)  # The probe texts.
    source.bytes(8)  # Dropout's coins.
    own = recipe.embedding_learning_rate or recipe.learning_rate
    optimiser = (torch.optim.SGD if recipe.optimiser == "sgd" else torch.optim.Adam)(
        [
            {"params": [each], "lr": own if name == "embedding.weight" else recipe.learning_rate}
            for name, each in module.named_parameters()
        ]
    )
    parameters = list(module.parameters())
    module.train()
    for _ in range(mechanism.steps):
        drawn = noise.draw_poisson(len(ids), min(1, mechanism.lot / len(ids)), source)
        for _ in parameters:
            source.bytes(32)  # The noise's keys; the noise itself is too small to matter here.
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for row in drawn:
            logits = module(torch.from_numpy(ids[row : row + 1]))
            loss = functional.cross_entropy(logits, torch.from_numpy(labels[row : row + 1]))
            found = torch.autograd.grad(loss, parameters)
            norm = float(torch.sqrt(sum(g.square().sum() for g in found)))
            for whole, g in zip(total, found, strict=True):
                whole.add_(g * min(1, mechanism.clip / norm))
        for parameter, whole in zip(parameters, total, strict=True):
            parameter.grad = whole / mechanism.lot
        optimiser.step()


@pytest.mark.parametrize(
    ("clip", "lot", "recipe"),
    [
        *((clip, lot, SGD) for clip in (0.01, 0.5, 100.0) for lot in (10, 40, 400)),
        (0.5, 10, SGD.model_copy(update={"embedding_learning_rate": 0.05})),
    ],
)
def test_it_is_the_algorithm_by_hand(clip, lot, recipe):
    """A lot larger than N draws all examples, and the sum is still divided by the lot."""
    ids, labels = data()
    mechanism = DpSgd(noise_multiplier=1e-9, clip=clip, lot=lot, steps=3)
    module, expected = module_of(dropout=0.0), module_of(dropout=0.0)
    start = shared_parameters(module)
    train_private(module, ids, labels, recipe, mechanism, random=Seeded("hand"), seed=3)
    by_hand(expected, ids, labels, recipe, mechanism, "hand")
    found, wanted = shared_parameters(module), shared_parameters(expected)
    for name in wanted:
        moved = np.abs(wanted[name] - start[name]).max()
        assert moved > 0
        assert np.allclose(found[name], wanted[name], rtol=0, atol=max(1e-4 * moved, 2e-7)), name


def test_adam_is_the_algorithm_by_hand():
    """Adam divides by the gradient's size, so even tiny noise matters in idle coordinates; only others are compared."""
    ids, labels = data()
    mechanism = DpSgd(noise_multiplier=1e-9, clip=1.0, lot=20, steps=5)
    module, expected = module_of(dropout=0.0), module_of(dropout=0.0)
    train_private(module, ids, labels, ADAM, mechanism, random=Seeded("hand"), seed=3)
    by_hand(expected, ids, labels, ADAM, mechanism, "hand")
    found, wanted = shared_parameters(module), shared_parameters(expected)
    for name in ("output.weight", "output.bias"):
        assert np.allclose(found[name], wanted[name], rtol=0, atol=1e-4), name


def test_the_same_source_gives_the_same_weights_and_another_does_not():
    ids, labels = data()
    for recipe in (SGD, ADAM):
        made = []
        for seed in ("one", "one", "two"):
            module = module_of()
            mechanism = DpSgd(noise_multiplier=1, lot=20, steps=3)
            train_private(module, ids, labels, recipe, mechanism, random=Seeded(seed), seed=0)
            made.append(shared_parameters(module))
        assert all(np.array_equal(made[0][name], made[1][name]) for name in made[0])
        assert not any(np.array_equal(made[0][name], made[2][name]) for name in made[0])


def test_the_public_seed_decides_nothing():
    """Draws, noise and dropout come from the source, so the seed reveals none of them."""
    ids, labels = data()
    made = []
    for seed in (0, 1):
        module = module_of()
        train_private(module, ids, labels, SGD, QUIET, random=Seeded("same"), seed=seed)
        made.append(shared_parameters(module))
    assert all(np.array_equal(made[0][name], made[1][name]) for name in made[0])

    # Dropout follows the source too: here with the same draws and other coins. All 32 bytes of its seed count, since a
    # seed of which only four bytes counted could be found by trying.
    class OtherCoins(Seeded):
        def bytes(self, n, /):
            given = super().bytes(n)
            return given[:8] + bytes(n - 8) if self.calls == 2 else given

    module = module_of()
    train_private(module, ids, labels, SGD, QUIET, random=OtherCoins("same"), seed=0)
    assert not np.array_equal(shared_parameters(module)["output.weight"], made[0]["output.weight"])


def test_tf32_is_off_from_the_first_check_on_and_restored_afterwards():
    """CUDA's convolutions use it by default. It is exact to 2^-11, and an example's bound counts on 2^-24.

    The check of examples apart compares more closely than TF32 computes.
    """
    ids, labels = data()
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    seen, before = set(), (convolutions.allow_tf32, products.allow_tf32)
    convolutions.allow_tf32 = products.allow_tf32 = True
    module = module_of()
    watched = module.register_forward_hook(lambda *_: seen.add((convolutions.allow_tf32, products.allow_tf32)))
    try:
        train_private(module, ids, labels, SGD, QUIET, random=Seeded("whole"), seed=0)
        assert convolutions.allow_tf32
        assert products.allow_tf32
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before
        watched.remove()
    assert seen == {(False, False)}


def test_no_step_draws_from_a_guessable_generator(monkeypatch):
    """On a CPU, torch's generator uses 32 bits of its seed; a sum over 1,000 texts reveals them."""
    ids, labels = data()
    module, drawn = module_of(), []

    def kept(self, like, probability):
        drawn.append(type(self))
        return torch.ones_like(like)

    monkeypatch.setattr(TorchDraws, "kept", kept)
    monkeypatch.setattr(SecretDraws, "kept", kept)
    train_private(module, ids, labels, SGD, QUIET, random=Seeded("secret"), seed=0)
    # The probe texts come first, and are no data.
    probes = drawn.count(TorchDraws)
    assert 0 < probes < 5
    assert drawn[probes:] == [SecretDraws] * (len(drawn) - probes)
    assert len(drawn) - probes >= QUIET.steps


def test_the_public_seed_does_not_reveal_the_probe_texts(monkeypatch):
    ids, labels = data()
    seeds = []
    monkeypatch.setattr(private, "check_examples_apart", lambda module, seed: seeds.append(seed))
    for source, seed in (("one", 0), ("one", 1), ("two", 1)):
        train_private(module_of(), ids, labels, SGD, QUIET, random=Seeded(source), seed=seed)
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[0] == int.from_bytes(Seeded("one").bytes(8), "little")


def test_the_batch_in_memory_changes_nothing():
    ids, labels = data()
    mechanism = DpSgd(noise_multiplier=1e-9, clip=0.1, lot=40, steps=3)
    made = []
    for batch in (1, 7, 64):
        module = module_of(dropout=0.0)
        recipe = SGD.model_copy(update={"batch": batch, "epochs": batch})
        train_private(module, ids, labels, recipe, mechanism, random=Seeded("pieces"), seed=0)
        made.append(shared_parameters(module))
    for other in made[1:]:
        assert all(np.allclose(made[0][name], other[name], atol=1e-6) for name in other)


@pytest.mark.parametrize(("most", "count"), [(1, 40), (8, 5), (100, 3)])
@pytest.mark.parametrize("key", ["batch", "microbatch"])
def test_pieces_hold_no_more_than_the_batch(most, count, key):
    recipe = Training(**{"batch": 200, key: most})
    lengths = np.random.default_rng(1).integers(1, 9, size=40)
    pieces = list(pieces_of(np.arange(40), lengths, recipe, "cpu"))
    assert len(pieces) == count
    assert max(map(len, pieces)) <= max(most, 1)
    assert sorted(np.concatenate(pieces).tolist()) == list(range(40))
    some = np.arange(1, 40, 3)
    for drawn in (np.arange(40), some):
        by_length = np.concatenate(list(pieces_of(drawn, lengths, recipe, "cpu")))
        assert sorted(by_length.tolist()) == drawn.tolist()
        assert (np.diff(lengths[by_length]) >= 0).all()
    assert list(pieces_of(np.zeros(0, dtype=np.int64), lengths, recipe, "cpu")) == []


# ---- the noise ---------------------------------------------------------------------------------------------


def standardised(recipe, mechanism, seed, module=None, count=40):
    """The change by a training with tiny gradients, in standard deviations of the noise that it should have."""
    ids, labels = data(count)
    module = module or module_of()
    moved, _ = change(module, ids, labels, recipe, mechanism, seed=seed)
    std = recipe.learning_rate * mechanism.noise_multiplier * mechanism.clip / mechanism.lot
    return {name: each / (std * math.sqrt(mechanism.steps)) for name, each in moved.items()}, ids


@pytest.mark.parametrize("steps", [1, 5])
def test_noise_of_plain_sgd_is_on_every_coordinate_with_its_variance(steps):
    # Enough noise to hide the clipped gradients (40 at most).
    mechanism = DpSgd(noise_multiplier=10_000, clip=0.3, lot=10, steps=steps)
    recipe = SGD.model_copy(update={"learning_rate": 1e-3})
    used_rows, idle_rows, others = [], [], []
    for number in range(12):
        found, ids = standardised(recipe, mechanism, f"noise {number}")
        rows = found.pop("embedding.weight")
        used = np.setdiff1d(np.unique(ids), [PAD])
        idle = np.setdiff1d(np.arange(VOCABULARY), np.append(used, PAD))
        assert len(used) >= 20
        assert len(idle) >= 20
        assert not rows[PAD].any()
        used_rows.append(rows[used])
        idle_rows.append(rows[idle])
        others += [each.ravel() for each in found.values()]
    # Rows that no text uses cannot be told from rows that are used.
    for values in (np.concatenate(used_rows).ravel(), np.concatenate(idle_rows).ravel(), np.concatenate(others)):
        assert stats.kstest(values, "norm").pvalue > 0.01
        assert values.std() == pytest.approx(1, abs=4 / math.sqrt(2 * len(values)))
    assert stats.ks_2samp(np.concatenate(used_rows).ravel(), np.concatenate(idle_rows).ravel()).pvalue > 0.01


def test_no_two_steps_or_parameters_share_their_noise():
    mechanism = DpSgd(noise_multiplier=10_000, clip=1.0, lot=10, steps=1)
    recipe = SGD.model_copy(update={"learning_rate": 1e-3})
    found, _ = standardised(recipe, mechanism, "shared")
    flat = np.concatenate([each.ravel() for each in found.values()])
    flat = flat[flat != 0]
    # Some values fall on the same lattice point.
    assert len(np.unique(flat)) > 0.95 * len(flat)
    twice, _ = standardised(recipe, mechanism.model_copy(update={"steps": 2}), "shared")
    both = np.concatenate([each.ravel() for each in twice.values()])
    both = both[both != 0] * math.sqrt(2)  # z1 + z2, where z1 is the noise above: correlation 1 / sqrt 2.
    idle = np.abs(np.corrcoef(flat[-100:], both[-100:])[0, 1])
    assert idle < 0.95


def test_adam_steps_every_row_of_the_embedding_at_every_step():
    """Adam's first step is learning_rate * sign(gradient), which is zero in a row without noise."""
    ids, labels = data()
    mechanism = DpSgd(noise_multiplier=1.0, clip=1.0, lot=10, steps=1)
    moved, _ = change(module_of(), ids, labels, ADAM, mechanism)
    rows = moved.pop("embedding.weight")
    assert not rows[PAD].any()
    for each in (np.delete(rows, PAD, axis=0), *moved.values()):
        assert np.abs(each) == pytest.approx(ADAM.learning_rate, rel=1e-2)
    # Every further step has fresh noise, including rows that no text uses.
    idle = np.setdiff1d(np.arange(VOCABULARY), np.append(np.unique(ids), PAD))
    moved, _ = change(module_of(), ids, labels, ADAM, mechanism.model_copy(update={"steps": 8}))
    walk = np.abs(moved["embedding.weight"][idle]) / ADAM.learning_rate
    assert walk.min() < 3 < walk.max() < 8.01


def test_unused_rows_move_like_used_rows():
    """The weights are so large that float32 loses one step's noise; the noise of all steps at once would show."""
    ids, labels = data()
    module = module_of()
    with torch.no_grad():
        module.embedding.weight.fill_(1024.0)
        module.embedding.weight[PAD] = 0
    # 225 steps of a fifth of half the distance to the next float below would together be three times that half.
    mechanism = DpSgd(noise_multiplier=1e4, clip=1e-3, lot=1, steps=225)
    recipe = SGD.model_copy(update={"learning_rate": 6e-6 / 10})
    moved, _ = change(module, ids, labels, recipe, mechanism)
    used = np.setdiff1d(np.unique(ids), [PAD])
    idle = np.setdiff1d(np.arange(VOCABULARY), np.append(used, PAD))
    rows = np.abs(moved["embedding.weight"]) > 5e-5
    assert moved["output.weight"].any()
    assert rows[used].mean() == pytest.approx(rows[idle].mean(), abs=0.02)


def test_every_row_has_its_own_noise_at_every_step(handed):
    ids, labels = data()
    change(module_of(), ids, labels, SGD, DpSgd(noise_multiplier=1.0, lot=10, steps=3))
    first, second, third = (each["embedding.weight"][1:] for each in handed)
    assert len(first) == VOCABULARY - 1
    for one, other in ((first, second), (second, third), (first, third)):
        assert (one == other).mean() < 0.02
        assert (one == 0).mean() < 0.02


# ---- the lattice -------------------------------------------------------------------------------------------


@pytest.fixture
def handed(monkeypatch):
    """The gradients that the optimiser gets at each step, as float64."""
    steps, make = [], private.make_optimiser  # type: ignore[attr-defined]

    def watched(module, recipe):
        optimiser = make(module, recipe)
        optimiser.register_step_pre_hook(
            lambda *_: steps.append({name: p.grad.double().numpy().copy() for name, p in module.named_parameters()})
        )
        return optimiser

    monkeypatch.setattr(private, "make_optimiser", watched)
    return steps


@pytest.mark.parametrize(("multiplier", "clip", "lot"), [(1.0, 1.0, 10), (10.0, 0.3, 7), (0.7, 1e-6, 1000)])
def test_the_optimiser_sees_only_lattice_values(handed, multiplier, clip, lot):
    ids, labels = data()
    mechanism = DpSgd(noise_multiplier=multiplier, clip=clip, lot=lot, steps=2)
    std = multiplier * clip / lot
    step = 2.0 ** (math.floor(math.log2(std)) - 10)
    for recipe in (SGD, ADAM):
        change(module_of(), ids, labels, recipe, mechanism)
    assert len(handed) == 4
    for each in handed:
        flat = np.concatenate([values.ravel() for values in each.values()]) / step
        assert np.array_equal(flat, np.rint(flat))
        # Nothing coarser is rounded: odd and even points are equally frequent.
        assert 0.4 < (flat % 2).mean() < 0.6


def test_the_step_of_the_lattice_is_public_and_a_power_of_two():
    for std in (1.0, 1.999, 2.0, 0.75, 3e-33, 1e-200, 1e30):
        step = lattice_step(std)
        assert 1024 * step <= std < 2048 * step
        assert math.frexp(step)[0] == 0.5
    for wrong in (0.0, -1.0, math.inf, math.nan, 1e-300):
        with pytest.raises(ValueError, match="no lattice"):
            lattice_step(wrong)


def test_sum_and_noise_meet_in_float64_and_are_rounded_once():
    """By hand, with several blocks of values, and sums whose last bits float32 would lose next to the noise."""
    count, unit, std = 2 * private._BLOCK + 5, 0.1 / 7, 0.3 / 7
    module = nn.ParameterDict({"all": nn.Parameter(torch.zeros(count))})
    # float32 would move a sum by up to a hundredth of a cell.
    sums = torch.linspace(-30, 30, count, dtype=torch.float64)
    private.add_noise(module, {"all": sums}, unit, std, Seeded("lattice"))
    source, expected, step = Seeded("lattice"), [], lattice_step(std)
    for part in sums.split(private._BLOCK):
        drawn = torch.zeros_like(part)
        noise.fill_gaussian(drawn, std, source)
        expected.append(np.rint((part.numpy() * unit + drawn.numpy()) / step) * step)
    found = module["all"].grad.double().numpy()
    assert (found != np.concatenate(expected)).sum() <= 1e-6 * count


@pytest.mark.parametrize("recipe", [SGD, ADAM])
def test_the_optimiser_starts_new_in_each_training(recipe):
    ids, labels = data()
    mechanism = DpSgd(noise_multiplier=1.0, lot=10, steps=3)
    module = module_of()
    train_private(module, ids, labels, recipe, mechanism, random=Seeded("first"), seed=0)
    again = module_of()
    again.load_state_dict(module.state_dict())
    for each in (module, again):
        train_private(each, ids, labels, recipe, mechanism, random=Seeded("second"), seed=0)
    found, expected = shared_parameters(module), shared_parameters(again)
    assert all(np.array_equal(found[name], expected[name]) for name in found)


def test_an_empty_draw_is_a_step_of_noise():
    ids, labels = data(count=2000)
    mechanism = DpSgd(noise_multiplier=1.0, clip=1.0, lot=1, steps=20)
    losses = []
    _, result = change(module_of(), ids, labels, SGD, mechanism, progress=lambda at: losses.append(at.loss))
    assert result.steps == len(losses) == 20
    empty = [math.isnan(loss) for loss in losses]
    assert 2 <= sum(empty) <= 15  # About 20 / e.

    # In a draw that is certainly empty, the weights move by noise alone.
    class NobodyDrawn(Seeded):
        def bytes(self, n, /):
            return b"\xff" * n if n > 32 else super().bytes(n)

    module = module_of()
    before = shared_parameters(module)
    mechanism = DpSgd(noise_multiplier=1.0, clip=1.0, lot=1, steps=1)
    train_private(module, ids, labels, SGD, mechanism, random=NobodyDrawn("empty"), seed=0)
    moved = np.concatenate([(shared_parameters(module)[name] - before[name])[1:].ravel() for name in before])
    assert stats.kstest(moved / SGD.learning_rate, "norm").pvalue > 0.01


@pytest.mark.parametrize(("lot", "expected"), [(10, 0.1), (50, 0.5), (100, 1.0), (1000, 1.0)])
def test_every_step_draws_at_the_rate_that_is_charged(monkeypatch, lot, expected):
    ids, labels = data(count=100)
    rates, drawn = [], []

    def draw(count, rate, random):
        rates.append((count, rate))
        drawn.append(noise.draw_poisson(count, rate, random))
        return drawn[-1]

    monkeypatch.setattr(correlated, "draw_poisson", draw)
    whole = SGD.model_copy(update={"batch": 100})
    change(module_of(), ids, labels, whole, DpSgd(noise_multiplier=1.0, lot=lot, steps=30))
    assert rates == [(100, expected)] * 30
    seen = np.bincount(np.concatenate(drawn), minlength=100)
    # Independent draws, not epochs, in which every example would come once.
    if expected < 1:
        assert seen.std() == pytest.approx(math.sqrt(30 * expected * (1 - expected)), rel=0.25)
    assert seen.mean() == pytest.approx(30 * expected, rel=0.1)


@pytest.mark.parametrize("rate", [0.02, 0.25, 1.0])
def test_a_given_rate_is_the_one_used(monkeypatch, rate):
    ids, labels = data(count=100)
    rates = []
    draw = correlated.draw_poisson  # type: ignore[attr-defined]
    monkeypatch.setattr(correlated, "draw_poisson", lambda count, p, source: rates.append(p) or draw(count, p, source))
    change(module_of(), ids, labels, SGD, DpSgd(noise_multiplier=1.0, lot=10, steps=3), rate=rate)
    assert rates == [rate] * 3


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.01, math.nan])
def test_an_invalid_rate_is_refused(rate):
    with pytest.raises(ValueError, match="sampling rate"):
        change(module_of(), *data(), SGD, QUIET, rate=rate)


@pytest.mark.parametrize("rate", [None, 0.3])
def test_without_examples_every_step_is_noise(monkeypatch, rate):
    ids, labels = data()
    checked, heard = [], []
    probe = private.check_examples_apart  # type: ignore[attr-defined]
    monkeypatch.setattr(private, "check_examples_apart", lambda module, seed: checked.append(probe(module, seed)))
    recipe = SGD.model_copy(update={"learning_rate": 1.0})
    mechanism = DpSgd(noise_multiplier=1e4, lot=10, steps=4)
    moved, result = change(
        module_of(), ids[:0], labels[:0], recipe, mechanism, rate=rate, progress=lambda at: heard.append(at.loss)
    )
    assert len(checked) == 1
    assert result.steps == len(heard) == 4
    assert all(math.isnan(loss) for loss in heard)
    values = np.concatenate([moved["embedding.weight"][1:].ravel(), moved["output.weight"].ravel()])
    assert stats.kstest(values / (1e3 * 2), "norm").pvalue > 0.01


def test_the_sum_is_divided_by_the_lot_and_not_by_the_number_drawn():
    """Twenty equal examples whose gradient exceeds the clip: a step over all of them has length 20 / lot * clip."""
    ids, labels = np.full((20, 4), 5), np.zeros(20, dtype=np.int64)
    for lot in (20, 40, 200):
        mechanism = DpSgd(noise_multiplier=1e-6, clip=1e-3, lot=lot, steps=1)
        moved, _ = change(module_of(dropout=0.0), ids, labels, SGD, mechanism)
        norm = math.sqrt(sum(float(np.square(each, dtype=np.float64).sum()) for each in moved.values()))
        assert norm == pytest.approx(SGD.learning_rate * 20 / lot * 1e-3, rel=1e-2)


def test_one_example_moves_a_step_by_at_most_the_clip():
    """The sensitivity that is accounted for, on the outlier that would move it most, without dropout."""
    ids, labels = data()
    wild = ids.copy()
    wild[7] = PAD
    mechanism = DpSgd(noise_multiplier=1e-6, clip=0.05, lot=40, steps=1)
    sums = []
    for texts in (ids, wild):
        module = module_of(dropout=0.0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(5)
            module.embedding.weight[PAD] = 0
        sums.append(change(module, texts, labels, SGD, mechanism)[0])
    distance = math.sqrt(sum(float(np.square(sums[0][name] - sums[1][name]).sum()) for name in sums[0]))
    per_example = SGD.learning_rate * 0.05 / 40
    # The neighbour has an empty text in place of nothing, with a gradient of its own: so twice the clip at most.
    assert 0.2 * per_example < distance < 2.001 * per_example


# ---- results and errors ------------------------------------------------------------------------------------


def test_the_result_has_nothing_of_the_data():
    ids, labels = data()
    heard = []
    _, result = change(module_of(), ids, labels, SGD, QUIET, progress=heard.append)
    assert (result.steps, result.loss_sum, result.correct, result.count) == (4, 0.0, 0, 0)
    assert [(at.step, at.steps, at.epoch, at.epochs) for at in heard] == [(n, 4, 1, 1) for n in range(1, 5)]
    assert all(at.loss > 0 for at in heard)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_it_learns(optimiser):
    ids, labels = data(count=600)
    held_out, answers = data(count=200, seed=9)
    rate = {"sgd": 4.0, "adam": 0.04}[optimiser]
    recipe = Training(optimiser=optimiser, learning_rate=rate, batch=200)
    module = module_of(dropout=0.1)
    assert evaluate(module, held_out, answers).accuracy < 0.6
    mechanism = DpSgd(noise_multiplier=0.8, clip=1.0, lot=100, steps=30)
    train_private(module, ids, labels, recipe, mechanism, random=Seeded("learns"), seed=0)
    assert evaluate(module, held_out, answers).accuracy > 0.8


def test_without_noise_or_clipping_it_is_plain_training():
    """One step over all examples is the plain step, whose loss is the batch's mean."""
    ids, labels = data()
    mechanism = DpSgd(noise_multiplier=1e-9, clip=1000.0, lot=len(ids), steps=1)
    module, plain = module_of(dropout=0.0), module_of(dropout=0.0)
    recipe = SGD.model_copy(update={"batch": len(ids)})
    train_private(module, ids, labels, recipe, mechanism, random=Seeded("plain"), seed=0)
    train(plain, ids, labels, recipe, seed=0)
    found, expected = shared_parameters(module), shared_parameters(plain)
    assert all(np.allclose(found[name], expected[name], atol=2e-6) for name in expected)


def test_it_leaves_no_trace_in_the_module():
    ids, labels = data()
    module = module_of()
    embedding = module.embedding
    change(module, ids, labels, SGD, QUIET)
    assert module.embedding is embedding
    assert module.pad_id == PAD
    assert not module.training
    assert module.dropout.draws.generator is None
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(layer._forward_hooks for layer in module.modules())


def test_it_stops_when_it_is_asked_to():
    ids, labels = data()
    asked = iter([False, False, True])
    module = module_of()
    with pytest.raises(TrainingCancelled, match="after step 2 of 4"):
        change(module, ids, labels, SGD, QUIET, cancelled=lambda: next(asked))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(layer._forward_hooks for layer in module.modules())


def test_an_example_that_is_not_finite_raises_nothing():
    """Whether there is one must not show outside; only a check of noised weights may fail."""
    ids, labels = data()
    module = module_of()
    with torch.no_grad():
        module.embedding.weight[ids[3, 0]] = math.nan
    before = shared_parameters(module)
    with pytest.raises(TrainingDiverged, match="learning_rate"):
        train_private(module, ids, labels, SGD, QUIET, random=Seeded("nan"), seed=0)
    after = shared_parameters(module)
    # That weight was not finite before. All others learned from the other examples.
    assert np.isfinite(after["output.weight"]).all()
    assert not np.array_equal(before["output.weight"], after["output.weight"])


def test_a_module_that_broadcasts_is_refused_before_training():
    class Prompted(type(module_of())):
        def forward(self, ids):
            return super().forward(ids) + self.prompt[:1].expand(len(ids), LABELS)

    module = Prompted(MODEL, VOCABULARY, LABELS, PAD, 0)
    module.prompt = nn.Parameter(torch.randn(2, LABELS))
    ids, labels = data()
    before = shared_parameters(module)
    with pytest.raises(PerExampleGradientsUnavailable, match="prompt"):
        train_private(module, ids, labels, SGD, QUIET, random=Seeded("prompt"), seed=0)
    assert all(np.array_equal(before[name], each) for name, each in shared_parameters(module).items())
    assert not module.training


def test_the_checks_always_run(monkeypatch):
    checked, clipped = [], []
    probe, add = private.check_examples_apart, ClippedGradients.add  # type: ignore[attr-defined]
    monkeypatch.setattr(private, "check_examples_apart", lambda module, seed: checked.append(probe(module, seed)))
    monkeypatch.setattr(
        ClippedGradients,
        "_check_calls",
        lambda self, batch, of=ClippedGradients._check_calls: clipped.append(of(self, batch)),
    )
    ids, labels = data()
    change(module_of(), ids, labels, SGD, DpSgd(noise_multiplier=1.0, lot=400, steps=5))
    assert len(checked) == 1
    assert len(clipped) >= 5 * 5 + 4
    assert add is ClippedGradients.add


def test_ids_and_labels_that_do_not_fit_are_refused():
    ids, labels = data()
    for wrong in ((ids, labels[1:]), (ids[:0], labels), (ids, labels[:0]), (ids[:0, 0], labels[:0])):
        with pytest.raises(ValueError, match=r"targets of shape"):
            train_private(module_of(), *wrong, SGD, QUIET, random=Seeded("none"), seed=0)
