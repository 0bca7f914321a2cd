"""Each method's phases, and that a training runs exactly them.

Frozen parameters stay the same to the bit, and nothing of one phase is left in the next.
"""

import hashlib
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch.nn import functional

import learning.training.private
from learning.mechanisms.protection import protection_of
from learning.methods import Setting, phases_of
from learning.models import EVERYTHING_SHARED, TextClassifier, build, division_of
from learning.models.division import EMBEDDING
from learning.text.corpus import EncodedExamples
from learning.text.encoder import word_tokenizer
from learning.text.examples import Example
from learning.training import local, task
from learning.training.local import Progress, TrainingDiverged, train
from learning.training.phases import Phase
from learning.training.task import LocalTraining
from learning.training.update import train_update
from tacit.job import JobDocument, Training
from tacit.manifest import Manifest
from tacit.method import FedAvg, FedProx, FedRecon, FedVocab, LgFedAvg, Local, Method
from tacit.model import BiLSTMModel
from tests.support.sum_fleet import SeededRandom

torch.set_num_threads(1)
MODEL = BiLSTMModel(embedding=4, hidden=5, dropout=0.3, max_tokens=8)
WORDS: list[str | None] = [None, "[UNK]", *(f"w{at}" if at % 3 == 0 else f"w{'abcdefgh'[at % 8]}" for at in range(18))]
RECIPE = Training(epochs=2, batch=4, learning_rate=0.05)
Arrays = dict[str, NDArray[np.float32]]
OPTIMISERS: list[dict[str, Any]] = [
    *({"optimiser": each} for each in get_args(Training.model_fields["optimiser"].annotation)),
    {"optimiser": "adamw", "weight_decay": 0.5},
]


def texts(count: int = 14, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    ids = np.zeros((count, 8), dtype=np.int64)
    for row in ids:
        length = random.integers(2, 9)
        row[:length] = random.integers(1, len(WORDS), size=length)
    return ids, random.integers(2, size=count)


def module_of(model: BiLSTMModel = MODEL) -> TextClassifier:
    return build(model, len(WORDS), 2, 0, seed=3)


def values(module: torch.nn.Module) -> Arrays:
    """Parameters by name, which are the same while the embedding is narrowed."""
    return {name: each.detach().numpy().copy() for name, each in module.named_parameters()}


def setting_of(method: Method, module: TextClassifier, examples: int = 14, *, moves: bool = True) -> Setting:
    names = frozenset(name for name, _ in module.named_parameters())
    division = division_of(method, module, WORDS)
    return Setting(names, division, examples, RECIPE.epochs, len(WORDS), moves, seed=9)


ALL = frozenset(values(module_of()))
REST = ALL - {EMBEDDING}


# ---- the phases of each method --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "moves", "expected"),
    [
        (Local(), True, (Phase(2, ALL),)),
        (FedAvg(), False, (Phase(2, ALL),)),
        (FedProx(mu=0.25), False, (Phase(2, ALL, mu=0.25),)),
        (LgFedAvg(), True, (Phase(2, ALL),)),
        (FedVocab(), True, (Phase(1, frozenset({EMBEDDING})), Phase(2, ALL))),
        (FedVocab(adaptive=False), True, (Phase(2, ALL),)),
        (FedVocab(), False, (Phase(2, REST),)),
        (FedVocab(adaptive=False), False, (Phase(2, REST),)),
    ],
)
def test_phases(method: Method, moves: bool, expected: tuple[Phase, ...]) -> None:
    assert phases_of(method, setting_of(method, module_of(), moves=moves)) == expected


@pytest.mark.parametrize(("examples", "support", "wanted"), [(14, 0.5, 7), (14, 0.1, 1), (14, 0.9, 13), (2, 0.5, 1)])
def test_fedrecon_splits_examples_and_rows(examples: int, support: float, wanted: int) -> None:
    method = FedRecon(support=support, epochs=5)
    setting = setting_of(method, module_of(), examples)
    made, trained = phases_of(method, setting)
    assert (made.epochs, trained.epochs) == (5, 2)
    assert (made.names, trained.names) == (frozenset({EMBEDDING}), ALL)
    assert made.examples is not None
    assert trained.examples is not None
    assert len(made.examples) == wanted
    assert sorted([*made.examples, *trained.examples]) == list(range(examples))
    # Rows of tokens with a digit are reconstructed on the support, and all others trained on the query.
    digits = [bool(word and any(map(str.isdigit, word))) for word in WORDS]
    assert 0 < sum(digits) < len(digits)
    assert made.rows is not None
    assert trained.rows is not None
    assert made.rows.tolist() == digits
    assert trained.rows.tolist() == [not each for each in digits]
    # The split follows from the seed, which depends on round and member.
    again, other = (phases_of(method, replace(setting, seed=seed))[0].examples for seed in (9, 10))
    assert again is not None
    assert other is not None
    assert np.array_equal(again, made.examples)
    assert wanted != 7 or not np.array_equal(other, made.examples)


def test_a_single_example_is_support_and_query() -> None:
    made, trained = phases_of(FedRecon(), setting_of(FedRecon(), module_of(), 1))
    assert made.examples is not None
    assert trained.examples is not None
    assert (made.examples.tolist(), trained.examples.tolist()) == ([0], [0])


# ---- training in phases ---------------------------------------------------------------------------------------------


def trained(
    module: TextClassifier, phases: tuple[Phase, ...], recipe: Training = RECIPE
) -> tuple[list[Arrays], list[Progress]]:
    """The parameters after each step (with the narrowed embedding), and the progress reports."""
    ids, labels = texts()
    seen, steps = [], []

    def watch(progress: Progress) -> None:
        seen.append(values(module))
        steps.append(progress)

    train(module, ids, labels, recipe, seed=5, phases=phases, progress=watch)
    return seen, steps


def test_in_each_phase_only_its_parameters_move() -> None:
    module = module_of()
    start = values(module)
    method = FedVocab()
    seen, steps = trained(module, phases_of(method, setting_of(method, module)))
    # Four steps of the adaptive epoch, then eight in two epochs on everything.
    assert [each.epoch for each in steps] == [1] * 4 + [2] * 4 + [3] * 4
    assert {(each.steps, each.epochs) for each in steps} == {(12, 3)}
    for arrays in seen[:4]:
        assert all(np.array_equal(arrays[name], start[name]) for name in REST)
    moved = [not np.array_equal(one[EMBEDDING], other[EMBEDDING]) for one, other in pairwise(seen)]
    assert all(moved)
    assert all(not np.array_equal(seen[4][name], start[name]) for name in REST)


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_parameters_that_no_phase_names_stay_to_the_bit(optimiser: dict[str, Any]) -> None:
    module = module_of()
    recipe = TypeAdapter(Training).validate_python(RECIPE.model_dump() | optimiser)
    start = values(module)
    trained(module, phases_of(FedVocab(), setting_of(FedVocab(), module, moves=False)), recipe)
    end = values(module)
    assert np.array_equal(end[EMBEDDING], start[EMBEDDING])
    assert all(not np.array_equal(end[name], start[name]) for name in REST)
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_fedrecon_trains_private_rows_on_support_and_the_rest_on_query(optimiser: dict[str, Any]) -> None:
    module, method = module_of(), FedRecon(epochs=1)
    recipe = TypeAdapter(Training).validate_python(RECIPE.model_dump() | optimiser)
    made, rest = phases_of(method, setting_of(method, module))
    assert made.rows is not None
    start = values(module)
    trained(module, (made,), recipe)
    between = values(module)
    changed = (between[EMBEDDING] != start[EMBEDDING]).any(axis=1)
    assert changed.any()
    assert not changed[~made.rows].any()
    assert all(np.array_equal(between[name], start[name]) for name in REST)
    trained(module, (rest,), recipe)
    end = values(module)
    changed = (end[EMBEDDING] != between[EMBEDDING]).any(axis=1)
    assert changed.any()
    assert not changed[made.rows].any()
    assert all(not np.array_equal(end[name], between[name]) for name in REST)


def test_only_the_examples_of_a_phase_count() -> None:
    """The texts and labels of other examples change nothing."""
    ids, labels = texts()
    phase = Phase(2, ALL, examples=np.array([1, 3, 4, 8, 11]))
    others = np.setdiff1d(np.arange(len(ids)), [1, 3, 4, 8, 11])
    wrong, turned = ids.copy(), labels.copy()
    wrong[others, :2] = wrong[others, :2][:, ::-1]
    turned[others] = 1 - turned[others]
    ends = []
    for each_ids, each_labels in ((ids, labels), (wrong, turned)):
        module = module_of()
        result = train(module, each_ids, each_labels, RECIPE, seed=5, phases=(phase,))
        ends.append(values(module))
        assert (result.steps, result.count) == (2 * 2, 5)
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ALL)


def test_an_optimiser_starts_new_in_each_phase_and_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[torch.optim.Optimizer, set[str], bool]] = []
    make = local.make_optimiser

    def watched(module: TextClassifier, recipe: Training) -> torch.optim.Optimizer:
        optimiser = make(module, recipe)
        places = {id(each) for group in optimiser.param_groups for each in group["params"]}
        names = {name for name, each in module.named_parameters() if id(each) in places}
        clean = all(each.grad is None for each in module.parameters())
        made.append((optimiser, names, clean and not optimiser.state))
        return optimiser

    monkeypatch.setattr(local, "make_optimiser", watched)
    module = module_of()
    trained(module, phases_of(FedVocab(), setting_of(FedVocab(), module)))
    assert [(names, clean) for _, names, clean in made] == [({EMBEDDING}, True), (ALL, True)]
    assert made[0][0] is not made[1][0]
    # No gradient outlives the training.
    assert all(each.grad is None for each in module.parameters())


def by_hand(module: TextClassifier, phases: tuple[Phase, ...], recipe: Training) -> Arrays:
    """The same written plainly: whole batches, the whole embedding, a torch optimiser for each phase."""
    ids, labels = texts()
    shuffle = np.random.Generator(np.random.Philox(5))
    shuffle.integers(2**63)
    named = dict(module.named_parameters())
    anchors = {name: each.detach().clone() for name, each in named.items()}
    module.train()
    for phase in phases:
        for name, each in named.items():
            each.requires_grad_(name in phase.names)
            each.grad = None
        optimiser = torch.optim.Adam([named[name] for name in phase.names], lr=recipe.learning_rate)
        for _ in range(phase.epochs):
            order = shuffle.permutation(len(ids))
            for first in range(0, len(order), recipe.batch):
                rows = order[first : first + recipe.batch]
                loss = functional.cross_entropy(module(torch.from_numpy(ids[rows])), torch.from_numpy(labels[rows]))
                for name in phase.names:
                    loss = loss + phase.mu / 2 * (named[name] - anchors[name]).square().sum()
                optimiser.zero_grad()
                torch.autograd.backward(loss)
                optimiser.step()
    return values(module)


@pytest.mark.parametrize("method", [FedVocab(), FedProx(mu=0.5), FedProx(mu=1000)], ids=str)
def test_it_is_the_algorithm_by_hand(method: Method) -> None:
    model = MODEL.model_copy(update={"dropout": 0.0})
    module, other = module_of(model), module_of(model)
    phases = phases_of(method, setting_of(method, module))
    trained(module, phases)
    expected, start = by_hand(other, phases, RECIPE), values(module_of(model))
    found = values(module)
    for name in ALL:
        assert np.abs(found[name] - expected[name]).max() < 2e-4
        assert np.abs(found[name] - start[name]).max() > 0.01


def test_the_proximal_term_holds_a_member_near_the_version() -> None:
    def distance(mu: float | None) -> float:
        module = module_of()
        start = values(module)
        recipe = RECIPE.model_copy(update={"optimiser": "sgd", "epochs": 6, "learning_rate": 0.02})
        trained(module, (Phase(6, ALL),) if mu is None else (Phase(6, ALL, mu=mu),), recipe)
        return float(sum(np.square(end - start[name]).sum() for name, end in values(module).items()) ** 0.5)

    free, near, nearer = distance(None), distance(5.0), distance(40.0)
    assert nearer < near < free
    assert nearer < 0.5 * free


def test_fedavg_is_the_training_without_phases() -> None:
    ids, labels = texts()
    plain, phased = module_of(), module_of()
    first = train(plain, ids, labels, RECIPE, seed=5)
    second = train(phased, ids, labels, RECIPE, seed=5, phases=phases_of(FedAvg(), setting_of(FedAvg(), phased)))
    assert all(np.array_equal(each, values(phased)[name]) for name, each in values(plain).items())
    assert replace(first, seconds=0) == replace(second, seconds=0)


# ---- an update ------------------------------------------------------------------------------------------------------

TOKENIZER = word_tokenizer([word for word in WORDS[2:] if word])
EXAMPLES = [Example(f"w{'abcdefgh'[at % 8]} w{at % 18} w{at % 3 * 6}", "ab"[at % 2]) for at in range(20)]
GAUSSIAN = {"name": "gaussian-update", "noise_multiplier": 2.0, "clip": 0.5, "lot": 1000}
DP_SGD = {"name": "dp-sgd", "noise_multiplier": 2.0, "clip": 0.5, "lot": 8, "steps": 2}


class Place:
    """A job with a public vocabulary, and what its members start from."""

    def __init__(self, method: Any, mechanism: Any = "none", **training: Any) -> None:
        model = MODEL.model_copy(update={"dropout": 0.0})
        read = {
            "schema": 1,
            "name": "desk",
            "labels": ["a", "b"],
            "method": method,
            "mechanism": mechanism,
            "model": model.model_dump(),
            "training": {**({} if mechanism == DP_SGD else {"epochs": 2}), "batch": 8, **training},
            "manifest": "00" * 32,
            "weights": "00" * 32,
            "tokenizer": hashlib.sha256(TOKENIZER).hexdigest(),
            "values": 1,
        }
        private = {"manifest": "00" * 32, "weights": "00" * 32, "values": 1}
        name = method if isinstance(method, str) else method["name"]
        keeps = name in ("fedvocab", "lg-fedavg", "fedrecon")
        draft = JobDocument.model_validate({**read, **({"private": private} if keeps else {})})
        corpus = EncodedExamples(EXAMPLES, draft, TOKENIZER)
        self.module = build(model, corpus.vocabulary_size, 2, corpus.pad_id, seed=3)
        self.division = division_of(draft.method, self.module, corpus.words())
        tensors = self.division.shared(self.module)
        self.manifest, self.private = Manifest.of(tensors), self.division.private(self.module)
        self.base = self.manifest.encode(self.manifest.flatten(tensors))
        self.job = draft.model_copy(update={"values": self.manifest.values})
        self.corpus = corpus

    def update(self) -> Any:
        return train_update(
            job=self.job,
            manifest=self.manifest,
            corpus=self.corpus,
            base=self.base,
            protection=protection_of(self.job, len(EXAMPLES)),
            private=self.private,
            random=SeededRandom("methods"),
            seed=4,
            device="cpu",
            progress=lambda *_: None,
            cancelled=lambda: False,
        )


@pytest.mark.parametrize(
    ("method", "mechanism", "comes_back"),
    [
        ("fedavg", "none", None),
        ("fedprox", "none", None),
        # Reconstructed in every round.
        ("fedrecon", "none", None),
        ("fedvocab", "none", {EMBEDDING}),
        ({"name": "fedvocab", "embedding": "frozen"}, "none", None),
        ("fedvocab", GAUSSIAN, {EMBEDDING}),
        ("fedvocab", DP_SGD, None),
        ({"name": "fedvocab", "embedding": "trained"}, DP_SGD, {EMBEDDING}),
        ("lg-fedavg", "none", {name for name in ALL if not name.startswith("output.")}),
    ],
)
def test_an_update_returns_private_parameters_that_were_trained(method: Any, mechanism: Any, comes_back: Any) -> None:
    place = Place(method, mechanism)
    update = place.update()
    assert update.change.shape == (place.manifest.values,)
    assert np.count_nonzero(update.change) > 0.5 * update.change.size
    if comes_back is None:
        assert update.private is None
        return
    assert update.private.keys() == comes_back
    for name, array in update.private.items():
        assert array.shape == place.private[name].shape
        assert not np.array_equal(array, place.private[name])


def test_the_change_has_shared_parameters_only() -> None:
    """Its length is that of the shared parameters alone."""
    place = Place("fedvocab")
    names = [tensor.name for tensor in place.manifest.tensors]
    assert EMBEDDING not in names
    assert place.manifest.values == sum(
        each.numel() for name, each in place.module.named_parameters() if name != EMBEDDING
    )


def test_a_private_embedding_survives_a_training_that_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a mechanism nothing may fail: noise is sent, and the embedding does not change."""
    place = Place("fedvocab", GAUSSIAN)

    def diverging(module: TextClassifier, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            module.embedding.weight[3] = torch.nan
        raise TrainingDiverged("too far")

    monkeypatch.setattr(task, "train", diverging)
    update = place.update()
    assert np.isfinite(update.change).all()
    assert update.private.keys() == {EMBEDDING}
    assert np.array_equal(update.private[EMBEDDING], place.private[EMBEDDING])


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("fedavg", [ALL]),
        ("fedvocab", [REST]),
        ({"name": "fedvocab", "embedding": "trained", "adaptive": False}, [ALL]),
        ({"name": "fedvocab", "embedding": "trained"}, [{EMBEDDING}, ALL]),
    ],
)
def test_noised_steps_go_over_the_parameters_of_each_phase(
    method: Any, names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, steps = [], []

    def noted(module: TextClassifier, ids: Any, labels: Any, recipe: Any, mechanism: Any, **_: Any) -> Any:
        seen.append({name for name, each in module.named_parameters() if each.requires_grad})
        steps.append(mechanism.steps)
        return SimpleNamespace(loss_sum=0.0, correct=0, count=0)

    monkeypatch.setattr(learning.training.private, "train_private", noted)
    place = Place(method, DP_SGD)
    place.update()
    assert seen == names
    # The charged steps are the steps taken.
    event = protection_of(place.job, len(EXAMPLES)).event
    assert event is not None
    assert event.steps == sum(steps)


def test_output_perturbation_needs_all_examples_or_refuses() -> None:
    job = Place("fedvocab", GAUSSIAN).job
    event = protection_of(job, 1000).event
    assert event is not None
    assert (event.rate, event.steps) == (1.0, 1)
    with pytest.raises(ValueError, match="needs all examples in every round; its lot is 1000"):
        protection_of(job, 1001)
    # With a shared embedding, a lot may be smaller than the data.
    assert protection_of(Place("fedavg", GAUSSIAN).job, 1001).event is not None


def test_a_task_without_a_method_is_fedavg() -> None:
    ids, labels = texts()
    task = LocalTraining.of_all(module_of(), ids, labels, RECIPE, 5, "cpu", lambda _: None, lambda: False)
    assert task.phases(14) == (Phase(2, ALL),)
    assert EVERYTHING_SHARED.private(task.module) == {}
