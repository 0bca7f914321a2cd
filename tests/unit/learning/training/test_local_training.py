"""Local training learns, repeats itself, stops when asked, and is the plain algorithm that it claims to be."""

import copy
import math
import threading
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from learning.models import TextClassifier, build, shared_parameters
from learning.training import local
from learning.training.local import Progress, TrainingCancelled, TrainingDiverged, evaluate, train
from learning.training.mixture import log_mixture, training_mixture
from tacit.job import Training
from tacit.model import TextCNNModel

torch.set_num_threads(1)
MODEL = TextCNNModel(embedding=8, widths=(1, 2, 3), maps=6, max_tokens=12, dropout=0.5)
VOCABULARY, LABELS, PAD = 50, 3, 0


def texts(count: int, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Texts of 1 to 12 tokens, one of which gives the label."""
    random = np.random.default_rng(seed)
    labels = random.integers(LABELS, size=count)
    ids = np.full((count, 12), PAD, dtype=np.int64)
    for row, label in zip(ids, labels, strict=True):
        length = random.integers(1, 13)
        row[:length] = random.integers(10, 40, size=length)
        row[random.integers(length)] = 1 + label
    return ids, labels


def module_of(model: TextCNNModel = MODEL, seed: int = 1) -> TextClassifier:
    return build(model, VOCABULARY, LABELS, PAD, seed=seed)


def same(first: TextClassifier, second: TextClassifier) -> bool:
    one, two = shared_parameters(first), shared_parameters(second)
    return all(np.array_equal(one[name], two[name]) for name in one)


def test_tf32_is_off_in_training_and_scoring_and_restored_afterwards(monkeypatch) -> None:
    """A GPU would end elsewhere than the CPU: TF32 is exact to 2^-11."""
    ids, labels = texts(20)
    convolutions, seen, module = torch.backends.cudnn, [], module_of()
    monkeypatch.setattr(convolutions, "allow_tf32", True)
    module.register_forward_hook(
        lambda *_: seen.append((convolutions.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
    )
    train(module, ids, labels, Training(epochs=1, batch=20), seed=1)
    assert convolutions.allow_tf32
    evaluate(module, ids, labels)
    assert convolutions.allow_tf32
    # Twenty rows are one piece.
    assert seen == [(False, False)] * 2


def test_it_learns_and_leaves_padding_at_zero() -> None:
    ids, labels = texts(300)
    module = module_of()
    before = evaluate(module, ids, labels)
    result = train(module, ids, labels, Training(epochs=8, batch=32, learning_rate=0.02), seed=1)
    after = evaluate(module, *texts(200, seed=7))
    assert before.accuracy < 0.6
    assert after.accuracy > 0.95
    assert after.loss < 0.3 < before.loss
    assert (result.steps, result.count) == (8 * 10, 300)
    assert 0.8 * 300 < result.correct <= 300
    assert 0 < result.loss_sum < 300
    assert not module.training
    assert not module.embedding.weight[PAD].any()


@pytest.mark.parametrize("own", [None, 0.001, 0.05])
@pytest.mark.parametrize(("optimiser", "decay"), [("adam", None), ("sgd", None), ("adamw", None), ("adamw", 0.9)])
def test_it_is_the_plain_algorithm_over_the_whole_embedding(
    optimiser: Literal["adam", "adamw", "sgd"], decay: float | None, own: float | None
) -> None:
    """Narrowed rows, fused steps, batches in pieces and two rates give the same as torch's plain loop."""
    ids, labels = texts(70)
    recipe = Training(
        epochs=3,
        batch=16,
        optimiser=optimiser,
        learning_rate=0.01,
        embedding_learning_rate=own,
        weight_decay=decay,
    )
    quick, plain = (
        module_of(MODEL.model_copy(update={"dropout": 0.0})),
        module_of(MODEL.model_copy(update={"dropout": 0.0})),
    )
    orders = np.random.Generator(np.random.Philox(3))
    train(quick, ids, labels, recipe, seed=3)

    groups = [
        {"params": [each], "lr": own if own is not None and name == "embedding.weight" else 0.01}
        for name, each in plain.named_parameters()
    ]
    stepper: torch.optim.Optimizer
    match optimiser:
        case "adam":
            stepper = torch.optim.Adam(groups)
        case "adamw":
            stepper = torch.optim.AdamW(groups, weight_decay=decay or 0.0)
        case "sgd":
            stepper = torch.optim.SGD(groups)
    orders.integers(2**63)  # Dropout's seed is drawn first.
    for _ in range(3):
        order = orders.permutation(70)
        for first in range(0, 70, 16):
            rows = order[first : first + 16]
            stepper.zero_grad()
            functional.cross_entropy(plain(torch.from_numpy(ids[rows])), torch.from_numpy(labels[rows])).backward()
            stepper.step()
    for name, array in shared_parameters(quick).items():
        np.testing.assert_allclose(array, shared_parameters(plain)[name], rtol=0, atol=2e-5, err_msg=name)
    unseen = sorted(set(range(VOCABULARY)) - set(ids.ravel().tolist()))
    assert unseen
    found, start = (shared_parameters(each)["embedding.weight"][unseen] for each in (quick, module_of()))
    # Every row decays, but only what moved can be told apart.
    assert np.array_equal(found, start) == (decay is None)


def test_logit_adjustment_adds_log_label_shares_to_the_plain_algorithm() -> None:
    ids, labels = texts(70)
    labels[:40] = 1
    recipe = Training(epochs=2, batch=16, optimiser="sgd", learning_rate=0.05, logit_adjustment=True)
    still = MODEL.model_copy(update={"dropout": 0.0})
    quick, plain = module_of(still), module_of(still)
    result = train(quick, ids, labels, recipe, seed=3)
    shares = torch.tensor([(np.sum(labels == label) + 1) / (70 + LABELS) for label in range(LABELS)])
    stepper = torch.optim.SGD(plain.parameters(), lr=0.05)
    orders = np.random.Generator(np.random.Philox(3))
    orders.integers(2**63)  # Dropout's seed is drawn first.
    for _ in range(2):
        order, losses, right = orders.permutation(70), 0.0, 0
        for first in range(0, 70, 16):
            rows = order[first : first + 16]
            stepper.zero_grad()
            answers = plain(torch.from_numpy(ids[rows])) + shares.log().float()
            loss = functional.cross_entropy(answers, torch.from_numpy(labels[rows]))
            loss.backward()
            stepper.step()
            losses += loss.item() * len(rows)
            right += int((answers.argmax(dim=1).numpy() == labels[rows]).sum())
    for name, array in shared_parameters(quick).items():
        np.testing.assert_allclose(array, shared_parameters(plain)[name], rtol=0, atol=2e-5, err_msg=name)
    assert (result.loss_sum, result.correct) == (pytest.approx(losses, rel=1e-4), right)


@pytest.mark.parametrize("adjusted", [False, True])
def test_with_logit_adjustment_label_frequencies_are_not_learnt(adjusted: bool) -> None:
    """The texts tell nothing and nine in ten have one label: the model answers with the label shares, or evenly."""
    ids, labels = np.full((200, 4), 20, dtype=np.int64), np.zeros(200, dtype=np.int64)
    labels[:10], labels[10:20] = 1, 2
    module = module_of(MODEL.model_copy(update={"dropout": 0.0}))
    train(module, ids, labels, Training(epochs=60, batch=200, learning_rate=0.03, logit_adjustment=adjusted), seed=0)
    logits = module(torch.from_numpy(ids[:1])).detach().numpy()[0]
    lead = logits[0] - logits[1:]
    assert np.abs(lead - (0 if adjusted else np.log(180 / 10))).max() < (0.15 if adjusted else 0.4)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_with_logit_adjustment_one_label_alone_teaches_nothing(optimiser: Literal["adam", "sgd"]) -> None:
    """Adam turns even tiny gradients into whole steps, and all of this member's would point the same way."""
    ids, _ = texts(64)
    recipe = Training(epochs=2, batch=16, optimiser=optimiser, learning_rate=0.01)
    adjusted = recipe.model_copy(update={"logit_adjustment": True})
    for alone in (np.full(64, 1), np.append(np.full(63, 1), 0)):
        told, module = module_of(), module_of()
        train(told, ids, alone, recipe, seed=3)
        result = train(module, ids, alone, adjusted, seed=3)
        assert not same(told, module_of())
        assert same(module, module_of()) == (len(set(alone)) == 1)
    assert result.loss_sum > 0
    # To a member with two labels, a third is rare and not impossible.
    two = np.array([0, 1, 1])
    assert np.array_equal(training_mixture(two, LABELS), log_mixture(two, LABELS))
    result = train(module_of(), ids, np.full(64, 1), adjusted, seed=3)
    assert (result.loss_sum, result.correct, result.count) == (0, 64, 64)


def test_every_epoch_meets_every_example_once(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[list[int]] = []
    pieces = local.pieces_of

    def watched(batch: NDArray[np.int64], *rest: Any, **more: Any) -> object:
        met.append(batch.tolist())
        return pieces(batch, *rest, **more)

    monkeypatch.setattr(local, "pieces_of", watched)
    ids, labels = texts(37)
    train(module_of(), ids, labels, Training(epochs=2, batch=10), seed=1)
    assert [len(batch) for batch in met] == [10, 10, 10, 7] * 2
    first, second = ([row for batch in epoch for row in batch] for epoch in (met[:4], met[4:]))
    assert sorted(first) == sorted(second) == list(range(37))
    assert first != second != sorted(second)


def test_pieces_hold_the_batch_by_length() -> None:
    lengths = np.array([9, 1, 5, 3, 7, 2, 8])
    batch = np.array([0, 1, 3, 4, 6])
    recipe = Training(batch=8)

    def pieces(*of: Any, **more: Any) -> list[list[int]]:
        return [piece.tolist() for piece in local.pieces_of(*of, **more)]

    assert pieces(batch, lengths, recipe, "cpu") == [[1, 3], [4, 6], [0]]
    assert pieces(batch[:2], lengths, recipe, "cpu") == [[1], [0]]
    assert pieces(batch, lengths, recipe, "cuda") == [[1, 3, 4, 6, 0]]
    assert pieces(batch, lengths, Training(batch=8, microbatch=2), "cuda") == [[1, 3], [4, 6], [0]]


@pytest.mark.parametrize(("least", "count"), [(8, 3), (9, 2), (12, 2), (13, 1), (25, 1)])
def test_short_rows_share_a_pass(least: int, count: int) -> None:
    lengths = np.array([9, 1, 5, 3, 7])
    pieces = list(local.pieces_of(np.arange(5), lengths, Training(batch=8), "cpu", least=least))
    assert len(pieces) == count
    assert np.concatenate(pieces).tolist() == [1, 3, 2, 4, 0]
    # What must fit into memory stays apart all the same.
    assert len(list(local.pieces_of(np.arange(5), lengths, Training(batch=8, microbatch=1), "cpu", least=least))) == 5


def test_the_same_seed_repeats_a_training_and_another_does_not() -> None:
    ids, labels = texts(60)
    modules = [module_of() for _ in range(3)]
    results = [
        train(module, ids, labels, Training(batch=16), seed=seed)
        for module, seed in zip(modules, (5, 5, 6), strict=True)
    ]
    assert same(modules[0], modules[1])
    assert results[0].loss_sum == results[1].loss_sum
    assert not same(modules[0], modules[2])


def test_concurrent_trainings_do_not_disturb_each_other() -> None:
    """In a simulation members share a process, so dropout must not draw from a common source."""
    ids, labels = texts(120)
    recipe = Training(epochs=3, batch=8)
    alone = module_of()
    train(alone, ids, labels, recipe, seed=5)
    beside = [module_of() for _ in range(3)]
    threads = [
        threading.Thread(target=train, args=(module, ids, labels, recipe), kwargs={"seed": 5}) for module in beside
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(alone, module) for module in beside)


def test_torchs_own_randomness_is_left_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    train(module_of(), *texts(20), Training(), seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_no_gradient_or_generator_stays_on_the_module() -> None:
    module = module_of()
    train(module, *texts(20), Training(), seed=1)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.dropout.draws.generator is None  # type: ignore[attr-defined]
    copy.deepcopy(module)


def test_dropout_is_on_while_training_and_off_while_evaluating() -> None:
    ids, labels = texts(64)
    still = Training(batch=64, learning_rate=1e-9)
    with_dropout, without = module_of(), module_of(MODEL.model_copy(update={"dropout": 0.0}))
    scores = evaluate(with_dropout, ids, labels)
    assert evaluate(without, ids, labels) == scores
    assert train(without, ids, labels, still, seed=1).loss_sum / 64 == pytest.approx(scores.loss, abs=1e-5)
    assert train(with_dropout, ids, labels, still, seed=1).loss_sum / 64 != pytest.approx(scores.loss, abs=1e-3)


def test_metrics_are_those_of_the_last_epoch() -> None:
    ids, labels = texts(50)
    losses: list[Progress] = []
    result = train(module_of(), ids, labels, Training(epochs=3, batch=50), seed=1, progress=losses.append)
    assert [(at.step, at.epoch, at.steps, at.epochs) for at in losses] == [(1, 1, 3, 3), (2, 2, 3, 3), (3, 3, 3, 3)]
    assert result.loss_sum == pytest.approx(50 * losses[-1].loss)
    assert (result.count, result.steps) == (50, 3)
    assert result.seconds > 0


def test_it_stops_before_the_next_step_when_asked() -> None:
    ids, labels = texts(40)
    done: list[Progress] = []
    module = module_of()
    with pytest.raises(TrainingCancelled, match="after step 2 of 8"):
        train(
            module,
            ids,
            labels,
            Training(epochs=2, batch=10),
            seed=1,
            progress=done.append,
            cancelled=lambda: len(done) == 2,
        )
    assert len(done) == 2
    assert module.embedding.num_embeddings == VOCABULARY
    assert not module.training


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    module = module_of()
    with torch.no_grad():
        module.output.weight[0, 0] = math.nan
    with pytest.raises(
        TrainingDiverged, match=r"the loss was not a finite number at step 1 of 2; lower training\.learning_rate"
    ):
        train(module, *texts(20), Training(batch=10), seed=1)
    with pytest.raises(TrainingDiverged, match=r"\(it is 0\.001\) or training\.embedding_learning_rate \(2\) in the"):
        train(module, *texts(20), Training(batch=10, embedding_learning_rate=2.0), seed=1)


def test_a_weight_that_overflows_in_the_last_step_is_found() -> None:
    """The loss uses the weights before the step, so it cannot show this."""
    module = module_of()

    def overflow(_: Progress) -> None:
        with torch.no_grad():
            module.output.weight[0, 0] = math.inf

    with pytest.raises(TrainingDiverged, match="a weight was not a finite number at step 1 of 1"):
        train(module, *texts(20), Training(), seed=1, progress=overflow)


@pytest.mark.parametrize(("rows", "labels"), [(0, 0), (3, 2)])
def test_ids_and_labels_that_do_not_fit_are_refused(rows: int, labels: int) -> None:
    ids, marks = np.zeros((rows, 4), dtype=np.int64), np.zeros(labels, dtype=np.int64)
    for work in (lambda: train(module_of(), ids, marks, Training(), seed=1), lambda: evaluate(module_of(), ids, marks)):
        with pytest.raises(ValueError, match="no examples" if not rows else "targets of shape"):
            work()


def test_scores_do_not_depend_on_the_batch() -> None:
    ids, labels = texts(45)
    module = module_of()
    whole = evaluate(module, ids, labels, batch=45)
    assert evaluate(module, ids, labels, batch=1).loss == pytest.approx(whole.loss, abs=1e-6)
    assert evaluate(module, ids, labels, batch=7).accuracy == whole.accuracy
    with torch.no_grad():
        logits = module(torch.from_numpy(ids))
    assert whole.accuracy == (logits.argmax(dim=1).numpy() == labels).mean()
    assert whole.loss == pytest.approx(functional.cross_entropy(logits, torch.from_numpy(labels)).item(), abs=1e-6)
    assert whole.count == 45
