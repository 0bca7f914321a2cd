"""The lines between shared, private and frozen parameters: every value is one of them, and nothing loads partially."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from learning.models import EVERYTHING_SHARED, Division, ParametersDiffer, TextClassifier, build, division_of
from learning.models.division import private_tokens
from tacit.method import FedRecon, Method
from tacit.model import BiLSTMModel, Model, TextCNNModel

torch.set_num_threads(1)
WORDS = ["[PAD]", "[UNK]", "a", "room", "12", "b2", "door", "3"]
DIGITS = [4, 5, 7]
MODELS: dict[str, Model] = {
    "textcnn": TextCNNModel(embedding=3, widths=(1, 2), maps=4, max_tokens=6),
    "bilstm": BiLSTMModel(embedding=3, hidden=4, max_tokens=6),
}
METHODS: dict[str, Any] = {
    "local": {"name": "local"},
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedprox"},
    "lg-fedavg": {"name": "lg-fedavg"},
    "lg-embedding": {"name": "lg-fedavg", "private": ["embedding"]},
    "lg-encoder": {"name": "lg-fedavg", "private": ["encoder"]},
    "fedrecon": {"name": "fedrecon"},
    "fedvocab": {"name": "fedvocab"},
}
# The first components of private parameters' names.
STAY = {
    "local": {"embedding", "encoder", "filters", "output"},
    "fedavg": set(),
    "fedprox": set(),
    "lg-fedavg": {"embedding", "encoder", "filters"},
    "lg-embedding": {"embedding"},
    "lg-encoder": {"encoder", "filters"},
    "fedrecon": set(),
    "fedvocab": {"embedding"},
}


def method(name: str) -> Method:
    found: Method = TypeAdapter(Method).validate_python(METHODS[name])
    return found


def module_of(model: Model, seed: int = 1) -> TextClassifier:
    return build(model, len(WORDS), 2, 0, seed=seed)


def values(module: TextClassifier) -> dict[str, np.ndarray]:
    return {name: each.detach().numpy().copy() for name, each in module.named_parameters()}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def test_every_parameter_belongs_to_a_part(model: Model) -> None:
    module = module_of(model)
    parts = {name: module.part_of(name) for name, _ in module.named_parameters()}
    assert set(parts.values()) == {"embedding", "encoder", "head"}
    assert [name for name, part in parts.items() if part == "embedding"] == ["embedding.weight"]
    assert {name.split(".")[0] for name, part in parts.items() if part == "head"} == {"output"}


@pytest.mark.parametrize("name", METHODS)
def test_every_value_is_shared_or_private_and_never_both(model: Model, name: str) -> None:
    module = module_of(model)
    # All values differ, so each can be recognised.
    start = 0
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel(), dtype=torch.float32).view_as(parameter))
            start += parameter.numel()
    division = division_of(method(name), module, WORDS)
    shared, private = division.shared(module), division.private(module)
    everything = np.concatenate([each.ravel() for each in (*shared.values(), *private.values())])
    assert np.array_equal(np.sort(everything), np.arange(start))
    if name != "fedrecon":
        assert {each.split(".")[0] for each in private} == STAY[name] & {each.split(".")[0] for each in values(module)}
        assert not shared.keys() & private.keys()
    # The manifest's order is the module's.
    assert list(shared) == [each for each in values(module) if each in shared]


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_what_the_model_does_not_train_is_frozen_and_not_shared(model: Model, name: str) -> None:
    fixed = model.model_copy(update={"freeze_embedding": True})
    source, target = module_of(fixed, seed=1), module_of(fixed, seed=2)
    division = division_of(method(name), source, WORDS)
    frozen, shared = division.frozen_values(source), division.shared(source)
    assert frozen.keys() == {"embedding.weight"}
    assert division.private(source) == {}
    assert [*frozen, *shared] == list(values(source))
    with pytest.raises(ParametersDiffer, match=r"surplus \['embedding.weight'\]"):
        division.load_shared(target, EVERYTHING_SHARED.shared(source))
    with pytest.raises(ParametersDiffer, match=r"missing \['embedding.weight'\]"):
        division.load_frozen(target, {})
    division.load_shared(target, shared)
    assert not np.array_equal(values(target)["embedding.weight"], frozen["embedding.weight"])
    division.load_frozen(target, frozen)
    wanted, found = values(source), values(target)
    assert all(np.array_equal(wanted[each], found[each]) for each in wanted)
    # Public numbers that nobody trains are nobody's own, whatever the method keeps.
    kept = division_of(method("fedvocab"), source)
    assert (kept.names, kept.frozen) == (frozenset(), frozenset({"embedding.weight"}))


def test_fedrecon_divides_the_embedding_by_rows(model: Model) -> None:
    module = module_of(model)
    table = values(module)["embedding.weight"]
    division = division_of(method("fedrecon"), module, WORDS)
    assert division.rows is not None
    assert division.rows.tolist() == DIGITS
    assert division.private(module).keys() == {"embedding.weight"}
    assert np.array_equal(division.private(module)["embedding.weight"], table[DIGITS])
    assert np.array_equal(division.shared(module)["embedding.weight"], table[[0, 1, 2, 3, 6]])
    assert division.shared(module).keys() == values(module).keys()


def test_private_tokens_are_the_named_ones_or_those_with_digits() -> None:
    named = TypeAdapter(FedRecon).validate_python({"tokens": ["door", "room", "12", "cellar"]})
    assert private_tokens(named, [*WORDS, None]).tolist() == [3, 4, 6]
    # Digits of other scripts count too; an id without a word has none.
    assert private_tokens(FedRecon(), ["x", None, "٣", ""]).tolist() == [2]
    with pytest.raises(ValueError, match="the vocabulary has none of the private tokens"):
        division_of(FedRecon(tokens=("cellar",)), module_of(MODELS["bilstm"]), WORDS)


@pytest.mark.parametrize("name", METHODS)
def test_both_sides_load_back_into_a_module(model: Model, name: str) -> None:
    source, target = module_of(model, seed=1), module_of(model, seed=2)
    division = division_of(method(name), source, WORDS)
    # Read-only, like views into a version's bytes.
    for load, arrays in (
        (division.load_shared, division.shared(source)),
        (division.load_private, division.private(source)),
    ):
        for array in arrays.values():
            array.flags.writeable = False
        load(target, arrays)
    wanted, found = values(source), values(target)
    assert all(np.array_equal(wanted[each], found[each]) for each in wanted)


def test_each_side_is_loaded_without_the_other(model: Model) -> None:
    source, target = module_of(model, seed=1), module_of(model, seed=2)
    division = division_of(method("fedvocab"), source, WORDS)
    before = values(target)
    division.load_shared(target, division.shared(source))
    assert np.array_equal(values(target)["embedding.weight"], before["embedding.weight"])
    assert np.array_equal(values(target)["output.weight"], values(source)["output.weight"])
    division.load_private(target, division.private(source))
    assert np.array_equal(values(target)["embedding.weight"], values(source)["embedding.weight"])


def test_returned_arrays_are_copies(model: Model) -> None:
    module = module_of(model)
    division = division_of(method("fedrecon"), module, WORDS)
    before = values(module)
    for arrays in (division.shared(module), division.private(module), EVERYTHING_SHARED.shared(module)):
        for array in arrays.values():
            array[...] = -9
    assert all(np.array_equal(before[name], each) for name, each in values(module).items())


@pytest.mark.parametrize("side", ["shared", "private"])
def test_arrays_that_do_not_fit_change_nothing(model: Model, side: str) -> None:
    module = module_of(model)
    division = division_of(method("lg-fedavg"), module, WORDS)
    arrays = getattr(division, side)(module_of(model, seed=2))
    load = getattr(division, f"load_{side}")
    last = list(arrays)[-1]
    before = values(module)
    for wrong, says in (
        ({name: array for name, array in arrays.items() if name != last}, f"missing ['{last}']"),
        ({**arrays, "output.more": np.zeros(3, np.float32)}, "surplus ['output.more']"),
        ({**arrays, last: np.zeros((5, 5, 5), np.float32)}, f"{last} has shape [5, 5, 5]"),
    ):
        with pytest.raises(ParametersDiffer) as refused:
            load(module, wrong)
        assert says in str(refused.value)
    assert all(np.array_equal(before[name], each) for name, each in values(module).items())


def test_a_manifest_cannot_release_private_parameters(model: Model) -> None:
    """A version that names a private parameter does not load, whatever its other names are."""
    module = module_of(model)
    division = division_of(method("fedvocab"), module)
    with pytest.raises(ParametersDiffer, match=r"surplus \['embedding.weight'\]"):
        division.load_shared(module, EVERYTHING_SHARED.shared(module))
    assert "embedding.weight" not in division.shared(module)
    assert Division().names == frozenset()
