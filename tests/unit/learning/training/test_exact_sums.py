"""One row or person more moves a step's sum by at most one clip, whatever the others are and however many.

A coordinator chooses the lot, the clip and the weights, and so the numbers that are added up. In float32, rows can be
chosen so that each addition is rounded one way beside one running sum and the other way beside a neighbour's.
"""

from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from learning.models.classifier import Dropout, TextClassifier
from learning.models.lstm import LSTM
from learning.training import head
from learning.training.clipping import ClippedGradients, Groups, _Embedding
from learning.training.head import LinearHead, RowProducts, clipped_sums_of_persons, counted_clip
from learning.training.persons import DrawnPersons, Persons
from learning.training.private import train_private
from secure_agg import SystemRandom
from tacit.job import Training
from tacit.mechanism import DpSgd, PersonRows

torch.set_num_threads(1)

# Sums near 2^12 clips, beside which float32 rounds to 2^-11 above and 2^-12 below.
POWER = 12
MANY = 2**POWER
LITTLE = -0.97 * 2.0 ** (POWER - 24)
# The row that a neighbour lacks, first.
VALUES = [1.0] + [1.0] * MANY + [LITTLE] * (MANY - 1)


class OneWeight(nn.Module):
    """A model whose gradient by its only weight that counts is the row's value."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, nn.Embedding):
            return self.layer(torch.full((len(values), 1), 3))[:, 0, 0] * values
        return self.layer(values[:, None, None])[:, 0, 0]

    @property
    def gradient_of_interest(self) -> tuple[int, int]:
        return (3, 0) if isinstance(self.layer, nn.Embedding) else (0, 0)


LAYERS = {
    "embedding": lambda: nn.Embedding(8, 1),
    "linear": lambda: nn.Linear(1, 1, bias=False),
}


def summed(made, values, batch, *, persons: bool = False) -> float:
    """What the values add up to, in clips. As persons, each has two rows whose mean is its value."""
    module = OneWeight(made())
    rows = torch.tensor(values)
    with ClippedGradients(module) as clipped:
        for part in rows.split(batch):
            if persons:
                person = torch.arange(len(part)).repeat_interleave(2)
                both = torch.stack([part * 0.5, part * 1.5], dim=1).flatten()
                clipped.add(module(both), 1.0, Groups(person, torch.full((len(both),), 0.5, dtype=torch.float64)))
            else:
                clipped.add(module(part), 1.0)
    return float(clipped.sums["layer.weight"][module.gradient_of_interest])


def summed_in_float32(values, batch) -> float:
    """The arithmetic that `ClippedGradients` had: each piece's products are added to a float32 sum."""
    total = torch.zeros(1, 1)
    for part in torch.tensor(values).split(batch):
        total.addmm_(torch.ones(1, len(part)), part[:, None])
    return float(total)


def looked_up_in_float32(values, batch) -> float:
    total = torch.zeros(1, 1)
    for part in torch.tensor(values).split(batch):
        total.index_add_(0, torch.zeros(len(part), dtype=torch.int64), part[:, None])
    return float(total)


@pytest.mark.parametrize(("old", "batch"), [(looked_up_in_float32, 64), (summed_in_float32, 1)])
def test_a_sum_in_float32_moves_by_more_than_a_clip(old, batch) -> None:
    assert old(VALUES, batch) - old(VALUES[1:], batch) > 1.9


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(("layer", "persons"), [("embedding", False), ("linear", False), ("linear", True)])
def test_ours_moves_by_at_most_a_clip(layer, persons, batch) -> None:
    values = VALUES if batch > 1 else VALUES[: MANY // 8]
    moved = summed(LAYERS[layer], values, batch, persons=persons)
    moved -= summed(LAYERS[layer], values[1:], batch, persons=persons)
    # What one row or person adds alone, to the bit.
    assert moved == summed(LAYERS[layer], values[:1], batch, persons=persons)
    assert 0.999 < moved <= 1.0


class Tiny(TextClassifier):
    """The logit is the mean of one number a word, so the version alone decides the gradients."""

    parts: ClassVar = {"embedding": "embedding"}

    def __init__(self, height: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 1, padding_idx=0)
        self.dropout = Dropout(0.0)
        self.pad_id, self.min_tokens = 0, 1
        with torch.no_grad():
            self.embedding.weight.fill_(height)
            self.embedding.weight[0] = 0

    def classify(self, vectors, seen):
        mean = (vectors[..., 0] * seen).sum(1) / seen.sum(1).clamp(min=1)
        return torch.stack([mean, torch.zeros_like(mean)], 1)


def test_a_training_released_with_hardly_any_noise_tells_at_most_a_clip() -> None:
    """From end to end: the version makes rows of label 1 a little negative and clips those of label 0."""
    clip, lot = 0.5, 2 * MANY
    share = -LITTLE * clip
    released = []
    for there in (True, False):
        labels = np.array([0] * (MANY + there) + [1] * (MANY - 1), dtype=np.int64)
        module = Tiny(float(np.log(share / (1 - share))))
        before = float(module.embedding.weight[5, 0].detach())
        mechanism = DpSgd(noise_multiplier=2.0**-12, clip=clip, lot=lot, steps=1)
        recipe = Training(optimiser="sgd", learning_rate=1.0, batch=64)
        ids = np.full((len(labels), 1), 5, dtype=np.int64)
        train_private(module, ids, labels, recipe, mechanism, random=SystemRandom(), seed=1, rate=1.0, population=lot)
        released.append((before - float(module.embedding.weight[5, 0].detach())) * lot / clip)
    # The weight is float32, and holds a step to about a hundredth of a clip.
    assert abs(released[0] - released[1]) == pytest.approx(1.0, abs=0.05)


WAYS = {
    "linear": (lambda: nn.Linear(7, 5), (3, 7), (3, 5)),
    "a linear layer of one token": (lambda: nn.Linear(7, 5), (7,), (5,)),
    "a narrow linear layer": (lambda: nn.Linear(7, 2), (9, 7), (9, 2)),
    "convolution": (lambda: nn.Conv1d(4, 3, 2), (4, 6), (3, 5)),
    "normalisation": (lambda: nn.LayerNorm(4), (3, 4), (3, 4)),
    "lstm": (lambda: LSTM(4, 3), (5, 4), (5, 12)),
    "embedding": (lambda: nn.Embedding(9, 4), (6,), (6, 4)),
    # By a sampler of Opacus.
    "another layer": (lambda: nn.GroupNorm(2, 4), (4, 6), (4, 6)),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_sum_is_exactly_that_of_what_each_row_adds_whatever_the_pieces_are(name) -> None:
    """x and g are given, so that no kernel of the passes rounds them otherwise in another piece."""
    made, shape, out = WAYS[name]
    rows, source = 41, torch.Generator().manual_seed(2)
    layer = made()
    x = torch.randn(rows, *shape, generator=source)
    if isinstance(layer, nn.Embedding):
        x = torch.randint(9, (rows, *shape), generator=source)
    # Of all sizes, so that some are clipped and some are not.
    g = torch.randn(rows, *out, generator=source) * torch.logspace(-6, 3, rows).view(-1, *[1] * len(out))
    module = nn.ModuleDict({"layer": layer})

    def total(places, most):
        with ClippedGradients(module, rows) as clipped:
            for first in range(0, len(places), most):
                piece = places[first : first + most]
                output = layer(x[piece])
                clipped.gradients = lambda *_, piece=piece, **__: {"layer": g[piece]}
                clipped.add(output.flatten(1).sum(dim=1), 0.1)
        return torch.cat([each.flatten() for each in clipped.sums.values()])

    everyone = list(range(rows))
    whole, apart = total(everyone, 64), [total([row], 64) for row in everyone]
    assert all(0 < float(each.norm()) <= 1 for each in apart)
    assert sum(float(each.norm()) > 0.9 for each in apart) > 5
    for place, value in enumerate(whole.tolist()):
        assert Fraction(value) == sum(Fraction(float(each[place])) for each in apart)
    for most in (1, 2, 7):
        assert torch.equal(whole, total(everyone, most))
        assert torch.equal(whole, total(everyone[::-1], most))
        assert torch.equal(whole - apart[0], total(everyone[1:], most))


def test_more_rows_than_the_grid_is_made_for_are_refused() -> None:
    module = OneWeight(nn.Linear(1, 1, bias=False))
    with ClippedGradients(module, 4) as clipped:
        clipped.add(module(torch.ones(3)), 1.0)
        with pytest.raises(ValueError, match="exact for 4"):
            clipped.add(module(torch.ones(2)), 1.0)
        clipped.clear()
        assert not clipped.sums["layer.weight"].any()
        clipped.add(module(torch.ones(4)), 1.0)
    assert float(clipped.sums["layer.weight"]) == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize("units", [1, 3, 1 << 27, 1 << 36])
def test_rounding_to_the_grid_never_passes_the_clip(units) -> None:
    """Also on a coarse grid, and where all values of a gradient lie above the middle of a cell."""
    source = torch.Generator().manual_seed(1)
    for values in range(280, 300):
        module = OneWeight(nn.Linear(1, values, bias=False))
        for x in (torch.full((1, 1, 1), 100.0), torch.randn(1, 1, 1, generator=source) * 100):
            with ClippedGradients(module, units) as clipped:
                clipped.add(module.layer(x).sum(dim=(1, 2)), 1.0)
            exact = sum(Fraction(float(each)) ** 2 for each in clipped.sums["layer.weight"].flatten())
            assert 0.99 < exact <= 1


def test_rows_of_a_person_that_cancel_are_not_added_up_at_full_length() -> None:
    """A head adds a person's rows apart, so rounding is that of their lengths, and their sum must not hide these."""
    x = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0**-15]])
    made = LinearHead(np.zeros((2, 2), np.float32), np.zeros(2, np.float32), trains_bias=False)
    persons = Persons(np.zeros(3, np.int64), 1, PersonRows(max_examples=3, combine="sum"))
    drawn = DrawnPersons(np.arange(3), np.zeros(3, np.int64), np.ones(3))
    products = RowProducts.of(x, persons, trains_bias=False)
    assert products is not None
    # The first two rows cancel exactly. The third alone would be stretched to a whole clip from 2^-15 of their length.
    weight, _, _ = clipped_sums_of_persons(made, x, np.zeros(3, np.int64), drawn, 1e-6, products)
    assert 2.0**-8 < float(np.linalg.norm(weight)) < 2.0**-4


def test_the_clip_of_a_head_is_less_by_what_rounding_may_add() -> None:
    assert counted_clip(1.0, 1000) == pytest.approx(1, abs=1e-8)
    examples, persons = [(units, None, 1) for units in (2**11, 2**20, 2**24)], [(2**12, 64, 2**10), (2**17, 64, 2**10)]
    for units, rows, apart in examples + persons:
        clip = counted_clip(1.0, units, rows)
        # Two neighbours, each off by a unit for each term of the chain, times the lengths of all terms.
        off = 2 * units * clip * apart * (2048 + units * (rows or 1) / 2048) * 2.0**-53
        assert clip + off <= 1


# ---- what a person adds is a function of its own rows ----------------------------------------------------------


def test_persons_in_a_piece_have_equally_many_rows() -> None:
    """One with more rows would lay out the others wider, and their positions are then added up in another order."""
    counts = np.random.default_rng(0).integers(1, 6, 40)
    person = np.repeat(np.arange(40), counts)
    drawn = DrawnPersons(np.arange(len(person)), person, np.ones(len(person)))
    pieces = list(drawn.pieces(16))
    assert all(len(set(np.bincount(each.person))) == 1 for each in pieces)
    assert all(len(each.rows) <= 16 for each in pieces)
    assert sorted(np.concatenate([each.rows for each in pieces])) == list(range(len(person)))


@pytest.mark.parametrize("kind", ["bias", "layer-norm", "embedding"])
def test_positions_that_cancel_leave_no_room_for_their_order(kind) -> None:
    """In float64 too, 2^20 + 2^80 - 2^80 depends on the order, which beside a wider person is another one.

    By their own norm, each of these persons would add a whole clip with one order and nothing with the other.
    """
    rows = torch.tensor([0.0, 2.0**20, 0.0, 0.0, 2.0**80, -(2.0**80)])
    made = {
        "bias": lambda: nn.Linear(1, 1),
        "layer-norm": lambda: nn.LayerNorm(2),
        "embedding": lambda: nn.Embedding(8, 1),
    }[kind]()
    if kind == "bias":
        made.weight.requires_grad_(False)

    def total(*, wider: bool) -> torch.Tensor:
        values, person = rows.repeat(64), torch.arange(64).repeat_interleave(6)
        if wider:
            values, person = torch.cat([values, torch.zeros(8)]), torch.cat([person, torch.full((8,), 64)])
        with ClippedGradients(made, 128) as clipped:
            if kind == "embedding":
                outputs = made(torch.full((len(values), 1), 3))[:, 0, 0]
            else:
                x = (
                    torch.zeros(len(values), 1)
                    if kind == "bias"
                    else torch.tensor([[1.0, -1.0]]).repeat(len(values), 1)
                )
                outputs = made(x)[:, 0]
            losses = outputs * values
            clipped.add(losses, 1.0, Groups(person, torch.ones(len(values), dtype=torch.float64)))
            return torch.cat([each.flatten() for each in clipped.sums.values()])

    assert float((total(wider=True) - total(wider=False)).norm()) < 1e-9


def test_what_cancels_in_an_embeddings_row_counts() -> None:
    """A GPU adds the positions of a word in no fixed order."""
    g = torch.tensor([[[1.0], [-1.0], [0.0]], [[1.0], [-1.0], [2.0]]])
    made = _Embedding(nn.Embedding(8, 1), torch.tensor([[3, 3, 3], [3, 4, 3]]), g)
    one, other = made.squared_norms()["weight"].tolist()
    assert one == pytest.approx((2 * 2.0**-10) ** 2, rel=1e-3)
    assert other == pytest.approx(3**2 + 1, rel=1e-5)


def heads_sum(x, persons: Persons, drawn: DrawnPersons, *, by: str) -> np.ndarray:
    products = RowProducts.of(x, persons, trains_bias=False) if by == "products" else None
    assert (products is not None) == (by == "products")
    made = LinearHead(np.zeros((3, x.shape[1]), np.float32), np.zeros(3, np.float32), trains_bias=False)
    return clipped_sums_of_persons(made, x, np.zeros(len(x), np.int64), drawn, 1e-4, products)[0]


@pytest.mark.parametrize("by", ["products", "gradients"])
def test_a_person_of_no_weight_moves_no_other(by) -> None:
    """Its rows are zero, so all that it could change is how the others are computed: how many rows, which path."""
    row = np.random.default_rng(1).standard_normal((3, 64)) * 1e20
    near = np.concatenate([row, -row[[1, 2, 0]] * (1 - 2.0**-10)])
    others, zeros = np.tile(near, (500, 1)), np.zeros((60, 64))
    people = np.repeat(np.arange(500), 6), np.concatenate([np.repeat(np.arange(500), 6), np.full(60, 500)])
    found = []
    for x, person in ((others, people[0]), (np.concatenate([others, zeros]), people[1])):
        drawn = DrawnPersons(np.arange(len(x)), person, np.ones(len(x)))
        # One person more than have rows, so N is the same.
        persons = Persons(person, 501, PersonRows(max_examples=60, combine="sum"))
        found.append(heads_sum(x, persons, drawn, by=by))
    assert np.linalg.norm(found[0]) > 1
    assert np.linalg.norm(found[1] - found[0]) < 1e-9


def test_persons_with_more_rows_than_are_drawn_are_summed_beside_the_others() -> None:
    x = np.random.default_rng(2).standard_normal((40, 5))
    person = np.repeat(np.arange(10), 4)
    person[:12] = 0
    persons = Persons(person, 10, PersonRows(max_examples=4, combine="sum"))
    drawn = persons.draw(1.0, SystemRandom())
    both, alone = (heads_sum(x, persons, drawn, by=by) for by in ("products", "gradients"))
    # The two ways clip seven persons to lengths that differ by a millionth. Nothing bounds that for a coordinate in
    # which persons nearly cancel.
    assert np.linalg.norm(both - alone) < 1e-5
    assert np.linalg.norm(alone) > 0.5


@pytest.mark.parametrize(("labels", "width"), [(2, 384), (5, 64), (6, 1152), (20, 100), (77, 768)])
def test_a_rows_scores_do_not_depend_on_how_many_rows_there_are(labels, width) -> None:
    """A version whose numbers cancel turns another order of additions into another gradient."""
    source = np.random.default_rng(3)
    x, matrix = source.standard_normal((67, width)), source.standard_normal((labels, width)) * 1e25
    bias = np.zeros(labels)
    whole, plain = head._scores(x, matrix, bias), 0
    for many in range(1, 67):
        for first in (0, 67 - many):
            rows = slice(first, first + many)
            assert np.array_equal(head._scores(x[rows], matrix, bias), whole[rows])
            plain += not np.array_equal(x[rows] @ matrix.T, (x @ matrix.T)[rows])
    # Without whole tiles, this machine's library would differ somewhere, or the test shows nothing.
    assert plain
