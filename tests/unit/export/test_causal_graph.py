"""The hand-written graph of every family beside transformers: at once, in pieces, in batches, merged, and as int8."""

import copy
import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file

from export.causal_changes import Change, lora_changes, matrix_of, stores_inwards
from export.causal_graph import BLOCK, causal_graph
from export.causal_weights import quantised, write_weights
from export.generating import Cache, empty_cache, open_session
from learning.causal.config import sizes_of
from tacit.bundle import WEIGHTS_FILE
from tests.support.tiny_generators import (
    FAMILIES,
    VOCABULARY,
    causal_library_model,
    flat_of,
    tensors_of,
    write_graph_of,
)

torch.set_num_threads(1)

# The largest difference of logits, relative to the largest logit.
CLOSE = 5e-6


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model of transformers and the session of its graph."""
    model = causal_library_model(request.param)
    return model, write_graph_of(model, tmp_path_factory.mktemp("graph"))


def ids_of(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (rows, length))


def expected_of(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(np.ascontiguousarray(ids))).logits.numpy()


def assert_close(found: np.ndarray, expected: np.ndarray, limit: float = CLOSE) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= limit * np.abs(expected).max()


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 7), (2, 33), (1, 60)])
def test_logits_are_those_of_transformers(written: tuple[Any, Any], shape: tuple[int, int]) -> None:
    model, session = written
    ids = ids_of(*shape)
    empty = {name: np.repeat(each, shape[0], axis=0) for name, each in empty_cache(session).items()}
    all_places = np.tile(np.arange(shape[1]), (shape[0], 1))
    lengths = np.full(shape[0], shape[1])
    logits, *_ = session.run(None, {"ids": ids, "lengths": lengths, "wanted": all_places, **empty})
    expected = expected_of(model, ids)
    # A test that any model would pass tells nothing.
    assert np.abs(expected).max() > 1
    assert_close(logits, expected)
    # Chosen places, in any order.
    some = all_places[:, ::-1][:, :2]
    logits, *_ = session.run(None, {"ids": ids, "lengths": lengths, "wanted": some, **empty})
    assert_close(logits, np.take_along_axis(expected, some[:, :, None], axis=1))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, 39), max_size=6), spare=st.integers(0, 20))
def test_a_prefill_may_be_split_in_any_way(written: tuple[Any, Any], cuts: set[int], spare: int) -> None:
    model, session = written
    (ids,) = ids_of(1, 40, seed=3)
    cache = Cache(session, empty_cache(session), 1, 40 + spare)
    bounds = [0, *sorted(cuts), 40]
    found = [cache.read(0, list(ids[a:b]), every=True) for a, b in itertools.pairwise(bounds)]
    assert_close(np.concatenate(found), expected_of(model, ids[None])[0])


def test_steps_of_unlike_rows_are_those_of_each_row_alone(written: tuple[Any, Any]) -> None:
    model, session = written
    ids, lengths = ids_of(3, 30, seed=5), (5, 11, 1)
    cache = Cache(session, empty_cache(session), 3, 30)
    for number, length in enumerate(lengths):
        assert_close(
            cache.read(number, list(ids[number, :length])), expected_of(model, ids[number, None, :length])[:, -1]
        )
    for step in range(8):
        found = cache.step(np.array([row[length + step] for row, length in zip(ids, lengths, strict=True)]))
        for number, length in enumerate(lengths):
            expected = expected_of(model, ids[number, None, : length + step + 1])[0, -1]
            assert_close(found[number], expected)


def test_a_batch_of_first_tokens_may_be_padded(written: tuple[Any, Any]) -> None:
    model, session = written
    ids = ids_of(2, 12, seed=6)
    empty = {name: np.repeat(each, 2, axis=0) for name, each in empty_cache(session).items()}
    given = {"ids": ids, "lengths": np.array([12, 5]), "wanted": np.array([[11], [4]])}
    logits, *present = session.run(None, {**given, **empty})
    assert_close(logits[0, 0], expected_of(model, ids)[0, 11])
    assert_close(logits[1, 0], expected_of(model, ids[1:, :5])[0, 4])
    cache = dict(zip(empty, present, strict=True))
    step = {"ids": ids[:, 5:6], "lengths": np.array([13, 6]), "wanted": np.zeros((2, 1), dtype=np.int64)}
    logits, *_ = session.run(None, {**step, **cache})
    assert_close(logits[1, 0], expected_of(model, ids[1:, :6])[0, 5])


def test_the_weights_are_the_file_that_transformers_loads(tmp_path: Path) -> None:
    model = causal_library_model("qwen2")
    write_graph_of(model, tmp_path)
    loaded = load_file(tmp_path / WEIGHTS_FILE)
    expected = tensors_of(model)
    assert loaded.keys() == expected.keys()
    assert all(np.array_equal(loaded[name], expected[name]) for name in expected)


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    digests = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write_graph_of(causal_library_model("qwen3"), tmp_path / name, "int8")
        files = ("model.onnx", WEIGHTS_FILE)
        digests.append([hashlib.sha256((tmp_path / name / each).read_bytes()).hexdigest() for each in files])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_is_close_and_small(family: str, tmp_path: Path) -> None:
    model = causal_library_model(family)
    (tmp_path / "whole").mkdir()
    (tmp_path / "small").mkdir()
    write_graph_of(model, tmp_path / "whole")
    session = write_graph_of(model, tmp_path / "small", "int8")
    sizes = [(tmp_path / name / WEIGHTS_FILE).stat().st_size for name in ("whole", "small")]
    # Narrow matrices are padded to whole blocks.
    assert sizes[1] < 0.45 * sizes[0]
    (ids,) = ids_of(1, 20)
    cache = Cache(session, empty_cache(session), 1, 20)
    found = np.concatenate([cache.read(0, list(ids[:13]), every=True), cache.read(0, list(ids[13:]), every=True)])
    expected = expected_of(model, ids[None])[0]
    assert_close(found, expected, 0.1)
    # The difference is of rounding, and not none.
    assert np.abs(found - expected).max() > 1e-4 * np.abs(expected).max()


def test_quantised_values_are_within_half_a_step() -> None:
    matrix = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    matrix[2, :BLOCK] = 0
    matrix[3, 0] = 300
    steps, scales = quantised(matrix)
    assert steps.shape == (5, 2, BLOCK)
    assert steps.dtype == np.uint8
    values = ((steps.astype(np.float32) - 128) * scales[:, :, None]).reshape(5, -1)
    assert np.array_equal(values[:, 40:], np.zeros((5, 24)))
    assert np.array_equal(values[2, :BLOCK], np.zeros(BLOCK))
    bound = np.repeat(scales, BLOCK, axis=1)[:, :40] / 2 * 1.0001
    assert (np.abs(values[:, :40] - matrix) <= bound).all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_lora_is_merged_where_it_belongs(family: str, tmp_path: Path) -> None:
    """Compared with peft, which adds the same matrices by its own code."""
    model = copy.deepcopy(causal_library_model(family))
    flat, random = flat_of(model), np.random.default_rng(1)
    kinds = ("query", "value", "output", "up", "down") + (() if family == "gpt2" else ("key", "gate"))
    values = {}
    for layer in range(sizes_of(flat).layers):
        for kind in kinds:
            inputs, outputs = sizes_of(flat).matrix(kind)
            name = f"lora.layer{layer}_{kind}"
            values[f"{name}.down.weight"] = random.standard_normal((4, inputs)).astype(np.float32) * 0.1
            values[f"{name}.up.weight"] = random.standard_normal((outputs, 4)).astype(np.float32) * 0.1
    changes = lora_changes(flat, values, 24.0)
    plain = expected_of(model, ids_of(1, 9))
    if family == "gpt2":
        # peft knows no parts of a matrix, so the library's own matrices are changed.
        with torch.no_grad():
            for layer in range(sizes_of(flat).layers):
                for kind in kinds:
                    module = model.get_submodule(matrix_of(flat, layer, kind).module)
                    name, width = f"lora.layer{layer}_{kind}", sizes_of(flat).width
                    first = {"query": 0, "value": 2 * width}.get(kind, 0)
                    change = 6 * values[f"{name}.up.weight"] @ values[f"{name}.down.weight"]
                    module.weight[:, first : first + len(change)] += torch.from_numpy(change.T)
        adapted = model
    else:
        targets = sorted({name.rpartition(".")[2] for name in changes})
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=24, target_modules=targets)).eval()
        with torch.no_grad():
            for name, (each,) in changes.items():
                owner: Any = adapted.get_submodule(f"base_model.model.{name}")
                owner.lora_A["default"].weight.copy_(torch.from_numpy(each.down))
                owner.lora_B["default"].weight.copy_(torch.from_numpy(each.up))
    expected = expected_of(adapted, ids_of(1, 9))
    assert np.abs(expected - plain).max() > 0.05 * np.abs(plain).max()
    session = write_graph_of(causal_library_model(family), tmp_path, changes=changes)
    cache = Cache(session, empty_cache(session), 1, 9)
    assert_close(cache.read(0, list(ids_of(1, 9)[0]), every=True), expected[0], 2e-5)


def test_a_change_of_no_matrix_is_refused(tmp_path: Path) -> None:
    change = Change(np.zeros((1, 64), dtype=np.float32), np.zeros((64, 1), dtype=np.float32), 1.0)
    with pytest.raises(KeyError, match=r"model\.layers\.9"):
        write_graph_of(causal_library_model("llama"), tmp_path, changes={"model.layers.9.self_attn.q_proj": [change]})


def test_weights_may_lie_beyond_two_gibibytes(tmp_path: Path) -> None:
    """The file has a hole, so it takes no more of the disk than its tensors."""
    model = causal_library_model("gpt2")
    flat, hole = flat_of(model), 5 * 2**29
    places = write_weights(tensors_of(model), {}, tmp_path / "near", inwards=stores_inwards(flat))
    data = (tmp_path / "near").read_bytes()
    with (tmp_path / WEIGHTS_FILE).open("wb") as far:
        far.seek(hole)
        far.write(data)
    moved = {name: type(each)(each.shape, each.offset + hole, each.length, each.kind) for name, each in places.items()}
    graph = causal_graph(flat, moved, WEIGHTS_FILE, positions=64, precision="float32")
    (tmp_path / "model.onnx").write_bytes(graph)
    session = open_session(tmp_path / "model.onnx", threads=1)
    (ids,) = ids_of(1, 6)
    found = Cache(session, empty_cache(session), 1, 6).read(0, list(ids), every=True)
    assert_close(found, expected_of(model, ids[None])[0])
