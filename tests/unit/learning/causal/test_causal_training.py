"""Causal models in the training loops: the plain steps, DP-SGD, and mechanisms on whole updates."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learning.causal.model import CausalModel
from learning.causal.sizes import IGNORED
from learning.mechanisms.correlated import classes_of
from learning.mechanisms.protection import protection_of
from learning.models import widened
from learning.models.division import division_of, shared_parameters
from learning.training.divergence import check_not_diverged
from learning.training.local import train
from learning.training.outcome import TrainingDiverged, VersionDiverged
from learning.training.persons import Persons
from learning.training.private import train_private
from learning.training.task import LocalTraining
from tacit.job import JobDocument, Precision, Rounds, Training
from tacit.mechanism import DpSgd, PersonRows
from tacit.method import FedAvg
from tacit.model import TextCNNModel
from tests.support.products import Multiplied
from tests.support.random_sources import Seeded
from tests.support.tiny_causal import causal, pairs, rounded_backbone, rows

torch.set_num_threads(1)
SGD = Training(batch=5, optimiser="sgd", learning_rate=0.1)
of_each = pytest.mark.parametrize(("family", "injection"), pairs("lora", "lora-up", "prompt", "prefix"))


def trained(module: CausalModel) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.named_parameters() if each.requires_grad}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, atol=atol, rtol=1e-4, msg=name)


# ---- plain steps ---------------------------------------------------------------------------------------------


@of_each
def test_a_step_is_that_of_the_batchs_mean_loss(family: str, injection: str) -> None:
    ids, targets = rows()
    module, by_hand = causal(family, injection), causal(family, injection)
    result = train(module, ids, targets, SGD, seed=1)
    losses = by_hand.losses(torch.from_numpy(ids), torch.from_numpy(targets))
    moving = [each for each in by_hand.parameters() if each.requires_grad]
    before, gradients = trained(by_hand), torch.autograd.grad(losses.mean(), moving)
    with torch.no_grad():
        for parameter, gradient in zip(moving, gradients, strict=True):
            parameter.sub_(0.1 * gradient)
    assert_near(trained(module), trained(by_hand))
    assert any(not torch.equal(each, before[name]) for name, each in trained(module).items())
    assert (result.steps, result.count) == (1, 5)
    assert result.loss_sum == pytest.approx(float(losses.detach().sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("microbatch", "checkpointing"),
    [
        (1, False),
        (4, True),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, False), (4, False), (1, True), (2, True))),
    ],
)
def test_accumulated_pieces_make_the_step_of_the_whole_batch(microbatch: int, checkpointing: bool) -> None:
    ids, targets = rows(11)
    seen: list[int] = []
    made = []
    for recipe in (SGD, SGD.model_copy(update={"microbatch": microbatch, "checkpointing": checkpointing})):
        # The layers in double precision: six steps of float32, summed in another order, round by more than the bound.
        module = causal("qwen2", "lora").double()
        # Rows as short as these share a pass; here they are cut into pieces all the same.
        module.piece_positions = 1
        seen.clear()
        handle = module.lora["layer0_query"].register_forward_hook(lambda _, x, __: seen.append(len(x[0])))
        train(module, ids, targets, recipe.model_copy(update={"epochs": 2}), seed=1)
        handle.remove()
        made.append(trained(module))
        assert max(seen) <= (recipe.microbatch or 2)
        assert not module.checkpointing
    assert_near(made[1], made[0])


def test_frozen_matrices_stay_the_same_to_the_bit() -> None:
    ids, targets = rows()
    module = causal("llama", "lora-up")
    before = division_of(FedAvg(), module).frozen_values(module)
    train(module, ids, targets, Training(optimiser="adamw", weight_decay=0.5, learning_rate=0.1), seed=1)
    for name, values in division_of(FedAvg(), module).frozen_values(module).items():
        np.testing.assert_array_equal(values, before[name])


def test_adamw_decays_what_has_no_gradient_and_adam_does_not() -> None:
    ids, targets = rows()
    targets[:] = IGNORED
    found = {}
    for name, decay in (("adam", None), ("adamw", None), ("adamw", 0.5)):
        module = causal("llama", "lora")
        start = trained(module)
        train(module, ids, targets, Training(optimiser=name, weight_decay=decay, learning_rate=0.1), seed=1)
        found[name, decay] = trained(module), start
    for (_, decay), (after, start) in found.items():
        assert_near(after, {key: each * (0.95 if decay else 1.0) for key, each in start.items()})


def test_training_learns_and_repeats_itself() -> None:
    ids, targets = rows(8)
    recipe = Training(epochs=12, batch=4, optimiser="adamw", learning_rate=0.05, microbatch=2)
    results = []
    for _ in range(2):
        module = causal("llama", "lora", dropout=0.1)
        result = train(module, ids, targets, recipe, seed=4)
        results.append((result.loss_sum, shared_parameters(module)))
    first = causal("llama", "lora").losses(torch.from_numpy(ids), torch.from_numpy(targets)).sum()
    assert results[0][0] < 0.7 * float(first.detach())
    assert results[0][0] == results[1][0]
    for name, values in results[0][1].items():
        np.testing.assert_array_equal(values, results[1][1][name])


def test_a_diverged_training_raises_and_a_diverged_version_is_refused() -> None:
    ids, targets = rows()
    with pytest.raises(TrainingDiverged, match="lower training"):
        train(causal("llama", "prompt"), ids, targets, SGD.model_copy(update={"learning_rate": math.inf}), seed=1)
    module = causal("llama", "lora")
    check_not_diverged(module, SGD, 1)
    with torch.no_grad():
        for each in module.parameters():
            each.mul_(1e12)
    with pytest.raises(VersionDiverged):
        check_not_diverged(module, SGD, 1)


# ---- DP-SGD --------------------------------------------------------------------------------------------------

QUIET = DpSgd(noise_multiplier=1e-9, clip=0.2, lot=7, steps=1)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@of_each
def test_a_private_step_is_the_clipped_sum_over_the_lot(family: str, injection: str, precision: Precision) -> None:
    """In bfloat16 it is the step of a float32 network whose matrices were rounded."""
    ids, targets = rows()
    module = causal(family, injection)
    by_hand = causal(family, injection, on=rounded_backbone(family) if precision == "bfloat16" else None)
    if injection == "prefix":
        # It starts as keys and values of the network, which are public and whole.
        by_hand.load_state_dict(module.state_dict())
    recipe = SGD.model_copy(
        update={"microbatch": 2, "checkpointing": True, "learning_rate": 1.0, "precision": precision}
    )
    train_private(module, ids, targets, recipe, QUIET, random=Seeded("quiet"), seed=0, rate=1.0)
    moving = [each for each in by_hand.parameters() if each.requires_grad]
    total = [torch.zeros_like(each) for each in moving]
    for row in range(len(ids)):
        loss = by_hand.losses(torch.from_numpy(ids[row : row + 1]), torch.from_numpy(targets[row : row + 1]))[0]
        gradient = torch.autograd.grad(loss, moving)
        norm = float(torch.cat([each.flatten() for each in gradient]).norm())
        for place, each in enumerate(gradient):
            total[place] += each * min(1.0, 0.2 / norm)
    with torch.no_grad():
        for parameter, each in zip(moving, total, strict=True):
            parameter.sub_(each / 7)
    assert_near(trained(module), trained(by_hand), atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_private_step_keeps_matrices_in_bfloat16_and_computes_nothing_in_it(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widened, "has_matrix_units", lambda: True)
    ids, targets = rows()
    module, kept = causal(family, "lora"), []
    before = frozen(module)
    through = CausalModel.judged

    def watched(self: CausalModel, *rest: Any) -> Any:
        kept.append(frozen(self))
        return through(self, *rest)

    monkeypatch.setattr(CausalModel, "judged", watched)
    recipe = SGD.model_copy(update={"precision": "bfloat16"})
    with Multiplied() as seen:
        train_private(module, ids, targets, recipe, QUIET, random=Seeded("kept"), seed=0, rate=1.0)
    assert seen.made <= {torch.float32, torch.float64}
    assert seen.kinds <= {torch.float32, torch.float64}
    assert kept
    for name, each in kept[0].items():
        # A family's normalisations and biases are a thousandth of its values.
        assert each.dtype is (torch.bfloat16 if each.ndim == 2 and "wpe" not in name else torch.float32), name
    after = frozen(module)
    assert after.keys() == before.keys()
    assert all(after[name].data_ptr() == each.data_ptr() for name, each in before.items())


def test_matrices_are_not_kept_where_states_are_rounded() -> None:
    module = causal("llama", "lora")
    for precision in ("float32", "bfloat16"):
        with (
            module.computing_in("bfloat16"),
            pytest.raises(RuntimeError, match="states are not float32"),
            module.keeping_in(precision),
        ):
            pass
    with pytest.raises(MemoryError), module.keeping_in("bfloat16"):
        raise MemoryError
    assert {each.dtype for each in frozen(module).values()} == {torch.float32}


def test_a_network_that_runs_out_of_memory_halfway_is_whole_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = causal("llama", "lora")
    through, left = Tensor.to, [5]

    def short(self: Tensor, *rest: Any, **more: Any) -> Tensor:
        if rest[:1] == (torch.bfloat16,):
            left[0] -= 1
            if not left[0]:
                raise MemoryError
        return through(self, *rest, **more)

    for context in (module.keeping_in, module.computing_in):
        left[0] = 5
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "to", short)
            with pytest.raises(MemoryError), context("bfloat16"):
                pytest.fail("it had room")
        assert {each.dtype for each in frozen(module).values()} == {torch.float32}


def frozen(module: CausalModel) -> dict[str, Tensor]:
    """The values of the network's layers that no parameter has."""
    return {
        f"{name}.{key}": each
        for name, layer in module.layers.named_modules()
        for key, each in vars(layer).items()
        if isinstance(each, Tensor)
    }


@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize(("family", "injection"), [("llama", "lora-up"), ("gpt2", "lora"), ("qwen3", "prefix")])
def test_a_private_step_by_persons_is_the_clipped_sum_over_persons(family: str, injection: str, combine: Any) -> None:
    """A loop with one backward pass a person is the definition, in pieces that hold rows of several persons."""
    ids, targets = rows()
    whose = np.array([0, 1, 0, 2, 1])
    persons = Persons(whose, 3, PersonRows(max_examples=2, combine=combine))
    module, by_hand = causal(family, injection), causal(family, injection)
    moving = [each for each in by_hand.parameters() if each.requires_grad]
    alone = []
    for person in range(3):
        own = np.flatnonzero(whose == person)
        losses = by_hand.losses(torch.from_numpy(ids[own]), torch.from_numpy(targets[own]))
        alone.append(torch.autograd.grad(losses.mean() if combine == "mean" else losses.sum(), moving))
    norms = [float(torch.cat([each.flatten() for each in gradient]).norm()) for gradient in alone]
    # One person is not clipped, and another is.
    clip = float(np.median(norms))
    with torch.no_grad():
        for place, parameter in enumerate(moving):
            total = sum(gradient[place] * min(1.0, clip / norm) for gradient, norm in zip(alone, norms, strict=True))
            parameter.sub_(total / 7)
    mechanism = DpSgd(noise_multiplier=1e-9, clip=clip, lot=7, steps=1, unit="person", person=persons._use)
    recipe = SGD.model_copy(update={"microbatch": 2, "checkpointing": True, "learning_rate": 1.0})
    train_private(module, ids, targets, recipe, mechanism, random=Seeded("persons"), seed=0, rate=1.0, persons=persons)
    assert_near(trained(module), trained(by_hand), atol=2e-6)


def test_noise_is_on_every_trained_value_and_on_no_frozen_one() -> None:
    ids, targets = rows()
    module = causal("llama", "lora-up")
    start, frozen = trained(module), division_of(FedAvg(), module).frozen_values(module)
    loud = DpSgd(noise_multiplier=1.0, clip=1e-6, lot=1, steps=1)
    recipe = SGD.model_copy(update={"learning_rate": 1e6})
    train_private(module, ids[:0], targets[:0], recipe, loud, random=Seeded("loud"), seed=0)
    moved = torch.cat([(each - start[name]).flatten() for name, each in trained(module).items()])
    assert bool((moved != 0).all())
    assert float(moved.std()) == pytest.approx(1.0, rel=0.2)
    for name, values in division_of(FedAvg(), module).frozen_values(module).items():
        np.testing.assert_array_equal(values, frozen[name])


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_a_person_with_many_rows_moves_the_model_by_at_most_one_clip(combine: Any) -> None:
    ids, targets = rows()
    module = causal("gpt2", "lora")
    start = trained(module)
    persons = Persons(np.zeros(len(ids), dtype=np.int64), 1, PersonRows(max_examples=4, combine=combine))
    mechanism = DpSgd(noise_multiplier=1e-9, clip=0.01, lot=1, steps=1, unit="person", person=persons._use)
    recipe = SGD.model_copy(update={"learning_rate": 1.0, "checkpointing": True})
    train_private(module, ids, targets, recipe, mechanism, random=Seeded("one"), seed=0, rate=1.0, persons=persons)
    moved = torch.cat([(each - start[name]).flatten() for name, each in trained(module).items()])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_correlated_classes_depend_on_a_row_and_on_no_padding() -> None:
    ids, targets = rows()
    lengths = causal("llama", "lora").lengths(ids, targets)
    key, band = b"k" * 32, 1 << 20
    found = classes_of(key, band, ids, lengths, targets)
    wider = np.pad(ids, ((0, 0), (0, 3))), np.pad(targets, ((0, 0), (0, 3)), constant_values=IGNORED)
    np.testing.assert_array_equal(classes_of(key, band, wider[0], lengths, wider[1]), found)
    other = targets.copy()
    other[0, 3] = 5 if other[0, 3] != 5 else 6
    assert (classes_of(key, band, ids, lengths, other) != found).tolist() == [True] + [False] * 4


# ---- every mechanism -----------------------------------------------------------------------------------------

MECHANISMS: dict[str, Any] = {
    "none": "none",
    "dp-sgd": {"name": "dp-sgd", "noise_multiplier": 1.1, "clip": 0.7, "lot": 4, "steps": 2},
    "gaussian": {"name": "gaussian-update", "noise_multiplier": 2.0, "clip": 0.5, "lot": 4},
    "laplace": {"name": "laplace-update", "epsilon": 2.0, "bound": 0.25},
    "ring": {"name": "distributed-gaussian", "noise_multiplier": 1.0, "clip": 0.5, "honest": 3},
}


@pytest.mark.parametrize("injection", ["lora", "lora-up", "prefix"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_trains_and_protects_an_update(mechanism: str, injection: str) -> None:
    ids, targets = rows()
    module = causal("llama", injection)
    start = np.concatenate([each.numpy().ravel() for each in trained(module).values()])
    job = JobDocument.model_validate(
        {
            "schema": 1,
            "name": "answers",
            "labels": ["a", "b"],
            "mechanism": MECHANISMS[mechanism],
            "model": TextCNNModel().model_dump(),
            "training": Training().model_dump(),
            "rounds": Rounds(min_members=5, target_members=5).model_dump(),
            "manifest": "00" * 32,
            "tokenizer": "00" * 32,
            "weights": "00" * 32,
            "values": len(start),
        }
    )
    protection, random = protection_of(job, len(ids)), Seeded("members")
    task = LocalTraining.of_all(module, ids, targets, SGD, 3, "cpu", lambda _: None, lambda: False)
    result = protection.train(task, random)
    after = np.concatenate([each.numpy().ravel() for each in trained(module).values()])
    change = protection.protect(after - start, random)
    assert change.shape == start.shape
    assert change.any()
    assert np.isfinite(change).all()
    if mechanism != "none":
        assert result is None or (result.loss_sum, result.correct, result.count) == (0.0, 0, 0)
        assert protection.event is not None
