"""Persons in DP-SGD: who is drawn, which rows, and the clipped sum beside a loop over persons."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from learning.mechanisms.noise import draw_poisson
from learning.models import build
from learning.models.classifier import TextClassifier
from learning.training import head as heads
from learning.training import persons as drawing
from learning.training.clipping import ClippedGradients, Groups, PerExampleGradientsUnavailable
from learning.training.head import RowProducts, clipped_sums_of_persons, train_private_head
from learning.training.persons import DrawnPersons, Persons
from learning.training.private import train_private
from secure_agg.randomness import SystemRandom
from tacit.job import Training
from tacit.mechanism import DpSgd, PersonRows
from tacit.model import TextCNNModel
from tests.support.apart import assert_same
from tests.support.audited_jobs import NOISED, rows_of, subject_of
from tests.support.heads import arrays
from tests.support.random_sources import Seeded
from tests.support.tiny_prompts import SOME_PAIRS, prompted, texts

torch.set_num_threads(1)
WIDTH, LABELS = 12, 5
# Of eight texts: three persons with three, one and two rows, and two rows that no draw has.
DRAWN = DrawnPersons(
    np.array([4, 0, 5, 2, 1, 3]), np.array([0, 0, 0, 1, 2, 2]), np.array([1 / 3, 1 / 3, 1 / 3, 1.0, 0.5, 0.5])
)

ORDER = np.array([3, 0, 5, 1, 4, 2])


def of_a_person(module: nn.Module, forward, labels: Tensor, drawn: DrawnPersons, person: int) -> dict[str, Tensor]:
    """The weighted sum of a person's gradients, one backward pass a row: the definition."""
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    total = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in trained.items()}
    for row, whose, weight in zip(drawn.rows, drawn.person, drawn.weights, strict=True):
        if whose == person:
            loss = functional.cross_entropy(forward(slice(int(row), int(row) + 1)), labels[row : row + 1])
            for name, g in zip(
                trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True
            ):
                if g is not None:
                    total[name] += weight * g.double()
    return total


def norm_of(gradient: dict[str, Tensor]) -> float:
    return float(torch.cat([each.flatten() for each in gradient.values()]).norm())


def by_hand(module, forward, labels, drawn, clip) -> tuple[dict[str, Tensor], list[float]]:
    """The persons' clipped gradients added up, and the norm of each."""
    each = [of_a_person(module, forward, labels, drawn, person) for person in range(drawn.persons)]
    norms = [norm_of(gradient) for gradient in each]
    total = {name: torch.zeros_like(first) for name, first in each[0].items()}
    for gradient, norm in zip(each, norms, strict=True):
        for name, part in gradient.items():
            total[name] += part * (min(1.0, clip / norm) if norm else 1.0)
    return total, norms


@pytest.mark.parametrize(("family", "injection"), SOME_PAIRS)
def test_a_prompted_models_sum_is_that_of_a_loop_over_persons(family, injection) -> None:
    module = prompted(family, injection)
    ids, labels = texts(family)
    _, norms = by_hand(module, lambda at: module(ids[at]), labels, DRAWN, 1.0)
    for share in (0.3, 1.0, 100.0):  # All, some and none of the persons are clipped.
        clip = share * float(np.median(norms))
        expected, _ = by_hand(module, lambda at: module(ids[at]), labels, DRAWN, clip)
        with ClippedGradients(module) as clipped:
            # In any order: whose a row is follows from its number alone.
            rows = DRAWN.rows[ORDER]
            losses = functional.cross_entropy(module(ids[rows]), labels[rows], reduction="none")
            groups = Groups(torch.from_numpy(DRAWN.person[ORDER]), torch.from_numpy(DRAWN.weights[ORDER]))
            clipped.add(losses, clip, groups=groups)
        found = {name: values * clip for name, values in clipped.sums.items()}
        assert_same(found, expected, clip * 3)
        assert sum(float(each.square().sum()) for each in found.values()) > 0


def test_long_rows_take_the_gradients_themselves_and_short_ones_their_products() -> None:
    # 9 positions squared exceed 3 x 5 weights, 2 squared do not; both norms are those of the gradient.
    from learning.training import clipping

    layer = nn.Linear(5, 3)
    generator = torch.Generator().manual_seed(0)
    for positions in (2, 9):
        x = torch.randn(4, positions, 5, generator=generator)
        g = torch.randn(4, positions, 3, generator=generator)
        found = clipping._Linear(layer, x, g).squared_norms()["weight"]
        exact = (g.double().transpose(1, 2) @ x.double()).square().sum(dim=(1, 2))
        assert torch.allclose(found, exact, rtol=1e-4)
        assert bool((found >= exact).all())
        # Where positions cancel, float32 cancels only up to its rounding, so the norm is that of what may be left.
        x, g = torch.ones(1, positions, 5), torch.ones(1, positions, 3)
        g[:, : positions // 2] *= -(positions - positions // 2) / (positions // 2)
        apart = float((x.norm(dim=2) * g.norm(dim=2)).sum())
        assert float(clipping._Linear(layer, x, g).squared_norms()["weight"]) >= (2.0**-10 * apart) ** 2 * 0.99


def products_of(x, drawn: DrawnPersons, *, bias: bool) -> RowProducts:
    """The products of the rows of these persons and of two rows that are nobody else's."""
    whose = np.arange(len(x)) + drawn.persons
    whose[drawn.rows] = drawn.person
    persons = Persons(whose, int(whose.max()) + 1, PersonRows(max_examples=50))
    found = RowProducts.of(x.astype(np.float64), persons, trains_bias=bias)
    assert found is not None
    return found


kept = pytest.mark.parametrize("kept", [False, True], ids=["made", "by-products"])


@kept
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("clip", [0.02, 0.3, 100.0])
def test_a_heads_sum_is_that_of_a_loop_over_persons(clip, bias, kept) -> None:
    made, (x, y) = head(), data(8)
    made.bias.requires_grad_(bias)
    exact = made.double()
    labels = torch.from_numpy(y)
    expected, _ = by_hand(exact, lambda at: exact(torch.from_numpy(x[at]).double()), labels, DRAWN, clip)
    products = products_of(x, DRAWN, bias=bias) if kept else None
    weight, bias_sum, _ = clipped_sums_of_persons(arrays(made), x, y, DRAWN, clip, products)
    # By products, a norm holds a part of what may have cancelled between rows, so a clipped person adds a little less.
    near = {"rtol": 1e-5, "atol": 1e-5 * clip} if kept and clip < 100 else {"rtol": 1e-9, "atol": 1e-12}
    assert np.allclose(weight * clip, expected["weight"], **near)
    if bias:
        assert np.allclose(bias_sum * clip, expected["bias"], **near)


@kept
@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_person_adds_at_most_one_clip_whatever_its_rows_are(combine, scale, kept) -> None:
    made, (x, y) = head(), data(50)
    persons = Persons(np.zeros(50, dtype=np.int64), 1, PersonRows(max_examples=40, combine=combine))
    drawn = persons.draw(1.0, SystemRandom())
    x = x * np.float32(scale)
    products = products_of(x, drawn, bias=True) if kept else None
    weight, bias, _ = clipped_sums_of_persons(arrays(made), x, y, drawn, 0.3, products)
    assert len(drawn.rows) == 40
    assert np.linalg.norm(np.append(weight, bias)) <= 1 + 1e-12


@kept
def test_a_person_whose_gradient_is_not_finite_adds_nothing_and_spoils_nobody(kept) -> None:
    made, (x, y) = head(), data(8)

    def sums(x, drawn):
        products = products_of(x, drawn, bias=True) if kept else None
        return clipped_sums_of_persons(arrays(made), x, y, drawn, 0.3, products)

    whole, _, _ = sums(x, DRAWN)
    alone, biases, _ = sums(x, DrawnPersons(DRAWN.rows[3:], DRAWN.person[3:] - 1, DRAWN.weights[3:]))
    x = x.copy()
    x[0] = np.nan
    spoilt, spoilt_biases, _ = sums(x, DRAWN)
    assert np.allclose(spoilt, alone)
    assert np.allclose(spoilt_biases, biases)
    assert not np.allclose(spoilt, whole)


@kept
@pytest.mark.parametrize("everybody", [True, False])
def test_rows_that_cancel_leave_at_most_one_clip_of_their_rounding(kept, everybody) -> None:
    # Long rows whose gradients cancel: one of each label, weighed by its probability. What is left is the rounding of
    # the gradients, and longer than the clip.
    made = head()
    for seed in range(20):
        random = np.random.default_rng(seed)
        with torch.no_grad():
            made.weight.zero_()
            made.bias.copy_(torch.from_numpy(random.standard_normal(LABELS)))
        chances = torch.softmax(made.bias.detach().double(), 0).numpy()
        drawn = DrawnPersons(np.arange(LABELS), np.zeros(LABELS, dtype=np.int64), chances)
        x, y = (
            np.repeat(1e16 * random.standard_normal((1, WIDTH)).astype(np.float32), LABELS, axis=0),
            np.arange(LABELS),
        )
        if not everybody:
            x, y = np.append(x, x[:1], axis=0), np.append(y, 0)
        products = products_of(x, drawn, bias=True) if kept else None
        weight, bias, _ = clipped_sums_of_persons(arrays(made), x, y, drawn, 0.001, products)
        assert np.linalg.norm(np.append(weight, bias)) <= 1 + 1e-12


def test_products_of_too_many_rows_are_not_kept(monkeypatch) -> None:
    x, _ = data(8)
    persons = Persons(np.array([0, 0, 0, 1, 1, 2, 2, 2]), 3, PersonRows(max_examples=2))
    # Three persons, of each of whom two rows are drawn: public numbers, whatever rows they have.
    monkeypatch.setattr(heads, "_PAIRS_HELD", 9)
    found = RowProducts.of(x.astype(np.float64), persons, trains_bias=False)
    assert found is not None
    # Of the others, a draw leaves a row out.
    assert (len(found.values), found.covered.tolist()) == (3, [False] * 3 + [True] * 2 + [False] * 3)
    monkeypatch.setattr(heads, "_PAIRS_HELD", 8)
    assert RowProducts.of(x.astype(np.float64), persons, trains_bias=False) is None


@pytest.mark.parametrize("most", [2, 50])
def test_training_by_products_of_rows_is_training_by_gradients(monkeypatch, most) -> None:
    x, y = data(40)
    use = PersonRows(max_examples=most)
    persons = Persons(np.arange(40) // 4, 10, use)
    mechanism = DpSgd(noise_multiplier=0.01, clip=0.1, lot=10, steps=8, unit="person", person=use)
    found = []
    for pairs in (1 << 20, 0):
        monkeypatch.setattr(heads, "_PAIRS_HELD", pairs)
        made = arrays(head())
        train_private_head(
            made, x, y, Training(optimiser="sgd", learning_rate=3.0), mechanism, random=Seeded("w"), rate=1.0,
            persons=persons,
        )  # fmt: skip
        found.append(made.weight.copy())
    assert np.allclose(*found, atol=1e-6)
    assert not np.allclose(found[0], head().weight.detach().numpy(), atol=0.1)


@pytest.mark.parametrize("pairs", [1 << 20, 0], ids=["products", "gradients"])
def test_a_draw_of_nobody_adds_noise_alone(monkeypatch, pairs) -> None:
    x, y = data(8)
    persons = Persons(np.arange(8) // 2, 4, PersonRows(max_examples=2))
    mechanism = DpSgd(noise_multiplier=1.0, clip=0.1, lot=1, steps=2, unit="person", person=PersonRows(max_examples=2))
    monkeypatch.setattr(heads, "_PAIRS_HELD", pairs)
    made = arrays(head())
    recipe = Training(optimiser="sgd", learning_rate=1.0)
    train_private_head(made, x, y, recipe, mechanism, random=Seeded("n"), rate=1e-12, persons=persons)
    moved = np.abs(made.weight - head().weight.detach().numpy())
    assert 0 < moved.max() < 1


@given(
    st.lists(st.integers(0, 6), max_size=40),
    st.integers(1, 9),
    st.sampled_from(["mean", "sum"]),
    st.integers(1, 30),
)
def test_a_draw_has_whole_persons_and_no_more_rows_of_one_than_asked(of_rows, most, combine, batch) -> None:
    whose, persons = np.array(of_rows, dtype=np.int64), 7
    drawn = Persons(whose, persons, PersonRows(max_examples=most, combine=combine)).draw(1.0, Seeded("draw"))
    named = whose[drawn.rows]
    assert len(set(drawn.rows.tolist())) == len(drawn.rows)
    # One number of the draw for each person of the data, and the reverse.
    assert len(set(zip(named.tolist(), drawn.person.tolist(), strict=True))) == len(set(of_rows)) == drawn.persons
    counts = Counter(of_rows)
    assert Counter(named.tolist()) == {person: min(count, most) for person, count in counts.items()}
    totals = np.bincount(drawn.person, weights=drawn.weights)
    expected = [1.0 if combine == "mean" else min(counts[person], most) for person in dict.fromkeys(named.tolist())]
    assert totals.tolist() == pytest.approx(expected)
    pieces = list(drawn.pieces(batch))
    told = [(int(row), float(weight)) for each in pieces for row, weight in zip(each.rows, each.weights, strict=True)]
    assert sorted(told) == sorted(zip(drawn.rows.tolist(), drawn.weights.tolist(), strict=True))
    assert sum(each.persons for each in pieces) == drawn.persons
    for each in pieces:
        # Whole persons: each name of the data is one number of this piece.
        assert len(set(zip(whose[each.rows].tolist(), each.person.tolist(), strict=True))) == each.persons
        assert each.persons == 1 or each.persons * np.bincount(each.person).max() <= batch


def test_persons_are_drawn_with_the_rate_whatever_their_rows_and_rows_evenly() -> None:
    # One person with fifty rows, four with one, one of whom no row is trained on.
    whose = np.array([0] * 50 + [1, 2, 3, 4])
    persons, random = Persons(whose, 6, PersonRows(max_examples=5)), SystemRandom()
    seen, rows, rounds = np.zeros(6), np.zeros(54), 4000
    for _ in range(rounds):
        drawn = persons.draw(0.3, random)
        seen[np.unique(whose[drawn.rows])] += 1
        rows[drawn.rows] += 1
    assert seen[5] == 0
    # Six standard deviations of a binomial.
    assert np.abs(seen[:5] / rounds - 0.3).max() < 6 * np.sqrt(0.3 * 0.7 / rounds)
    assert np.abs(rows[:50] / rounds - 0.03).max() < 6 * np.sqrt(0.03 / rounds)


def test_the_rows_of_a_person_are_chosen_anew_in_each_step() -> None:
    persons = Persons(np.zeros(50, dtype=np.int64), 1, PersonRows(max_examples=5))
    random = SystemRandom()
    assert len({tuple(persons.draw(1.0, random).rows.tolist()) for _ in range(20)}) > 15


def test_other_persons_rows_move_nothing_but_their_own_part() -> None:
    # The sum without a person is the sum with it minus what it adds: nobody else's rows, weights or clip change.
    made, (x, y) = head(), data(8)
    whole, _, _ = clipped_sums_of_persons(arrays(made), x, y, DRAWN, 0.3)
    without = DrawnPersons(DRAWN.rows[:4], DRAWN.person[:4], DRAWN.weights[:4])
    only = DrawnPersons(DRAWN.rows[4:], DRAWN.person[4:] - 2, DRAWN.weights[4:])
    rest, _, _ = clipped_sums_of_persons(arrays(made), x, y, without, 0.3)
    part, _, _ = clipped_sums_of_persons(arrays(made), x, y, only, 0.3)
    assert np.allclose(whole, rest + part, atol=1e-12)
    assert np.linalg.norm(part) > 0


def test_a_convolution_is_refused_with_the_reason() -> None:
    module: TextClassifier = build(
        TextCNNModel(embedding=4, widths=(2,), maps=3, max_tokens=6, dropout=0.0), 20, 2, 0, seed=0
    )
    ids = np.ones((4, 6), dtype=np.int64)
    mechanism = DpSgd(noise_multiplier=1.0, lot=2, steps=1, unit="person", person=PersonRows(max_examples=2))
    persons = Persons(np.array([0, 0, 1, 1]), 2, PersonRows(max_examples=2))
    with pytest.raises(PerExampleGradientsUnavailable, match=r"Conv1d.* cannot be added up by person; train a head"):
        train_private(
            module,
            ids,
            np.zeros(4, dtype=np.int64),
            Training(batch=8),
            mechanism,
            random=Seeded("x"),
            seed=0,
            persons=persons,
        )


@pytest.mark.parametrize("injection", ["prompt", "lora", "bitfit"])
def test_a_private_training_by_person_moves_the_weights_as_its_mechanism_says(injection) -> None:
    # With almost no noise and full draws, a step of SGD is the clipped sum divided by the lot.
    module = prompted("bert", injection)
    ids, labels = texts("bert")
    whose = np.array([0, 0, 1, 1, 1, 2, 3, 3][: len(ids)])
    count = int(whose.max()) + 1
    use = PersonRows(max_examples=8, combine="sum")
    drawn = Persons(whose, count, use).draw(1.0, Seeded("all"))
    before = {name: each.detach().clone() for name, each in module.named_parameters() if each.requires_grad}
    module.eval()
    expected, norms = by_hand(module, lambda at: module(ids[at]), labels, drawn, 0.5)
    assert max(norms) > 0.5
    mechanism = DpSgd(noise_multiplier=1e-6, clip=0.5, lot=count, steps=1, unit="person", person=use)
    recipe = Training(optimiser="sgd", learning_rate=1.0, batch=3)
    train_private(
        module,
        ids.numpy(),
        labels.numpy(),
        recipe,
        mechanism,
        random=Seeded("train"),
        seed=0,
        persons=Persons(whose, count, use),
    )
    for name, each in module.named_parameters():
        if each.requires_grad:
            moved = (before[name] - each.detach()).double() * count
            assert float((moved - expected[name]).norm()) < 1e-4


def test_a_head_trains_by_person_and_an_empty_member_sends_noise() -> None:
    for rows in (30, 0):
        made, (x, y) = head(), data(max(rows, 1))
        mechanism = DpSgd(noise_multiplier=1.0, lot=3, steps=4, unit="person", person=PersonRows(max_examples=2))
        persons = Persons(np.arange(rows) // 5, max(rows // 5, 1), PersonRows(max_examples=2))
        before = made.weight.detach().clone()
        train_private_head(
            arrays(made),
            x[:rows],
            y[:rows],
            Training(optimiser="sgd", learning_rate=0.1),
            mechanism,
            random=SystemRandom(),
            rate=0.5,
            persons=persons,
        )
        assert not torch.equal(before, made.weight)


def test_the_rate_that_is_drawn_is_the_rate_that_is_charged(monkeypatch):
    """All persons count among the N, also one of whom no row has a label of the job."""
    asked = []
    monkeypatch.setattr(
        drawing,
        "draw_poisson",
        lambda count, rate, random: asked.append((count, rate)) or draw_poisson(count, rate, random),
    )
    unit = {"unit": "person", "person": {"max_examples": 3}}
    subject = subject_of("head", {**NOISED, "lot": 2, **unit})
    rows = [replace(each, person=f"person {at // 5}") for at, each in enumerate(rows_of(20))]
    strange = [replace(each, person="strange", label="no label of the job") for each in rows_of(6)]
    subject.release([*rows, *strange], SystemRandom(), seed=0)
    event = subject.protection(5).event
    assert event is not None
    assert set(asked) == {(5, event.rate)} == {(5, 0.4)}


def head(seed=0) -> nn.Linear:
    made = nn.Linear(WIDTH, LABELS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 1, generator=generator)
    return made


def data(rows: int, seed=0):
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, WIDTH)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True), random.integers(0, LABELS, size=rows)
