"""A folder from a stranger in place of an exported model that writes: it is refused in a sentence, or does no harm."""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import tacit
from export.causal_file import FileRefused, check_causal_file
from export.generating import Generator, ModelFailed, PromptTooLong, Sampling
from learning.text.dialogue_tokenizer import own_dialogue_form
from learning.text.turns import Dialogue
from tacit.bundle import CACHE_FILE, WEIGHTS_FILE, BundleInvalid, read_bundle, write_bundle
from tests.support.tiny_generators import causal_library_model, write_generator_of
from tests.support.tiny_writers import writer_tokenizer

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("generator") / "bundle"
    write_generator_of(causal_library_model("llama"), made)
    return made


@pytest.fixture(scope="module")
def generator(bundle: Path) -> Generator:
    return Generator.load(bundle, threads=1)


@pytest.fixture
def remade(bundle: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes the bundle with other files and facts, whose digests are right."""

    def make(files: dict[str, bytes], **facts: Any) -> Path:
        read = read_bundle(bundle)
        told = read.index.generator.model_dump() | facts
        write_bundle(
            tmp_path / "bundle", "generator", {**read.files, **files}, generator=type(read.index.generator)(**told)
        )
        return tmp_path / "bundle"

    return make


def graph_of(bundle: Path) -> Any:
    return onnx.load(bundle / "model.onnx", load_external_data=False)


# ---- the graph -------------------------------------------------------------------------------------------------


def test_weights_that_no_digest_covers_are_refused(bundle: Path, remade: Callable[..., Path]) -> None:
    model = graph_of(bundle)
    next(each for each in model.graph.initializer if each.external_data).external_data[0].value = "other.bin"
    folder = remade({"model.onnx": model.SerializeToString()})
    # onnxruntime would read it.
    shutil.copy(folder / WEIGHTS_FILE, folder / "other.bin")
    with pytest.raises(
        BundleInvalid, match=r"model\.onnx is not a model that `export` wrote.*weights from 'other\.bin'"
    ):
        Generator.load(folder, threads=1)


def endless(model: Any) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["again"])],
        "body",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("again", TensorProto.BOOL, [])],
    )
    model.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    model.graph.node.insert(0, helper.make_node("Loop", ["", "yes"], [], body=body))


def foreign_operator(model: Any) -> None:
    model.graph.node[0].domain = "ai.onnx.contrib"


def function(model: Any) -> None:
    model.functions.append(helper.make_function("", "Add", [], [], [], []))


def hidden_graph(model: Any) -> None:
    model.graph.node[1].attribute.append(helper.make_attribute("body", helper.make_graph([], "g", [], [])))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (endless, "field 6"),  # A Loop's body is an attribute of its own kind.
        (foreign_operator, "operator 'Shape'"),
        (function, "field 25"),
        (hidden_graph, "field 6"),
        (lambda model: setattr(model.graph.node[2], "op_type", "Loop"), "operator 'Loop'"),
    ],
)
def test_a_graph_that_may_never_end_is_refused(
    change: Callable[[Any], None], says: str, bundle: Path, remade: Callable[..., Path]
) -> None:
    model = graph_of(bundle)
    change(model)
    with pytest.raises(BundleInvalid, match=f"is not a model that `export` wrote: its graph has .*{says}"):
        Generator.load(remade({"model.onnx": model.SerializeToString()}), threads=1)


def test_a_part_of_a_file_is_refused(bundle: Path) -> None:
    data = (bundle / "model.onnx").read_bytes()
    check_causal_file(data)
    # The graph is the last part but one, and every cut is inside it.
    for cut in range(1, len(data) - 60, 499):
        with pytest.raises(FileRefused):
            check_causal_file(data[:cut])


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    # As a whole file, and as its graph. Another error would fail the test.
    for each in (data, b"\x3a" + bytes([len(data)]) + data):
        with suppress(FileRefused):
            check_causal_file(each)


@pytest.mark.parametrize("what", ["input", "logits"])
def test_a_graph_with_another_face_is_refused(what: str, bundle: Path, remade: Callable[..., Path]) -> None:
    model = graph_of(bundle)
    if what == "input":
        model.graph.input[1].name = "mask"
        for node in model.graph.node:
            for at, name in enumerate(node.input):
                node.input[at] = "mask" if name == "lengths" else name
    else:
        model.graph.output[0].type.tensor_type.shape.dim[2].dim_param = "any"
    with pytest.raises(BundleInvalid, match="has other inputs than a model that writes"):
        Generator.load(remade({"model.onnx": model.SerializeToString()}), threads=1)


def test_weights_that_are_no_numbers_are_told(bundle: Path, remade: Callable[..., Path]) -> None:
    weights = (bundle / WEIGHTS_FILE).read_bytes()
    start = 8 + int.from_bytes(weights[:8], "little")
    broken = weights[:start] + np.full((len(weights) - start) // 4, np.nan, dtype="<f4").tobytes()
    loaded = Generator.load(remade({WEIGHTS_FILE: broken}), threads=1)
    for sampling in (Sampling(), Sampling(1.0)):
        with pytest.raises(ModelFailed, match="the model's logits are not numbers"):
            loaded.write(Dialogue.of(QUESTION), sampling)


# ---- other files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", WEIGHTS_FILE])
def test_a_pipe_in_place_of_a_file_is_refused(name: str, remade: Callable[..., Path]) -> None:
    folder = remade({})
    (folder / name).unlink()
    os.mkfifo(folder / name)
    # In a process of its own: who reads a pipe that nobody writes waits for ever.
    program = "import sys, tacit\ntry: tacit.load(sys.argv[1])\nexcept ValueError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", program, folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert f"{folder / name} is not a plain file" in done.stdout


def test_a_file_that_is_too_large_is_not_read(remade: Callable[..., Path]) -> None:
    folder = remade({})
    # Without blocks on the disk. Reading it would take all memory.
    os.truncate(folder / "tokenizer.json", 1 << 40)
    with pytest.raises(
        BundleInvalid, match=r"tokenizer\.json differs from what bundle\.json lists \(1099511627776 bytes"
    ):
        Generator.load(folder, threads=1)


def test_tokens_outside_the_model_are_refused(bundle: Path, remade: Callable[..., Path]) -> None:
    with pytest.raises(BundleInvalid, match="tokens that its model does not know"):
        Generator.load(remade({}, end_ids=(100_000,)), threads=1)
    model = graph_of(bundle)
    table = next(each for each in model.graph.initializer if each.name == "model.embed_tokens.weight")
    entries = {each.key: each for each in table.external_data}
    entries["length"].value = str(int(entries["length"].value) // table.dims[0] * 40)
    table.dims[0] = 40
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 40
    for each in model.graph.initializer:
        if each.name == "vocabulary":
            each.raw_data = np.array([40], dtype=np.int64).tobytes()
    with pytest.raises(BundleInvalid, match="tokens that its model does not know"):
        Generator.load(remade({"model.onnx": model.SerializeToString()}, end_ids=(1,)), threads=1)


@pytest.mark.parametrize("fact", ["room", "soft", "max_new_tokens", "max_tokens"])
def test_facts_without_a_bound_are_refused(fact: str, remade: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="131072"):
        remade({}, **{fact: 10**12})


def arrays_like(generator: Generator, soft: int = 3) -> dict[str, Any]:
    return {
        name: np.ones((1, each.shape[1], soft, each.shape[3]), np.float32) for name, each in generator._start.items()
    }


def packed(arrays: dict[str, Any], save: Any = np.savez) -> bytes:
    made = io.BytesIO()
    save(made, **arrays)
    return made.getvalue()


def test_a_sound_cache_is_read(generator: Generator, remade: Callable[..., Path]) -> None:
    arrays = arrays_like(generator)
    loaded = Generator.load(remade({CACHE_FILE: packed(arrays)}, soft=3), threads=1)
    assert loaded._start.keys() == arrays.keys()
    assert all((loaded._start[name] == arrays[name]).all() for name in arrays)
    assert loaded.answer(QUESTION) != generator.answer(QUESTION)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: packed({name: each[:, :, :2] for name, each in arrays.items()}),  # Fewer than `soft`.
        lambda arrays: packed({name: np.repeat(each, 2, axis=0) for name, each in arrays.items()}),
        lambda arrays: packed({name: each.astype(np.float64) for name, each in arrays.items()}),
        lambda arrays: packed({name: each * np.nan for name, each in arrays.items()}),
        lambda arrays: packed({name: np.array([{"x": 1}], dtype=object) for name in arrays}),
        lambda arrays: packed({**arrays, "more": np.zeros(3)}),
        lambda arrays: packed(arrays, np.savez_compressed),
        lambda arrays: packed(arrays).replace(b"'fortran_order': False", b"'fortran_order': 1+1+1"),
        lambda arrays: packed(arrays)[:-40],
        lambda _: b"\x93NUMPY\x01\x00",
    ],
)
def test_another_cache_is_refused(
    change: Callable[[dict[str, Any]], bytes], generator: Generator, remade: Callable[..., Path]
) -> None:
    folder = remade({CACHE_FILE: change(arrays_like(generator))}, soft=3)
    with pytest.raises(BundleInvalid, match=r"cache\.npz is not a cache of this model"):
        Generator.load(folder, threads=1)


def test_a_tokenizer_that_is_a_program_is_refused(remade: Callable[..., Path]) -> None:
    plain = own_dialogue_form(writer_tokenizer("smollm2"))
    wrong = plain.replace(
        b'"normalizer":null', b'"normalizer":{"type":"Replace","pattern":{"Regex":"(a+)+$"},"content":""}'
    )
    assert wrong != plain
    with pytest.raises(BundleInvalid, match="not a supported BPE tokenizer"):
        Generator.load(remade({"tokenizer.json": wrong}), threads=1)


# ---- what is asked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-310, 5e-324, 1e-30])
def test_a_tiny_temperature_is_the_largest_logit(temperature: float) -> None:
    logits = np.array([3.0, 90.0, -40.0, 89.0], dtype=np.float32)
    sampling = Sampling(temperature)
    assert sampling.probabilities(logits).tolist() == [0, 1, 0, 0]
    assert sampling.choose(logits, sampling.random()) == 1


def test_a_prompt_of_several_is_named_before_anything_is_written(generator: Generator) -> None:
    rows = [Dialogue.of("x")] * 9 + [Dialogue.of("late " * 300)]
    with pytest.raises(PromptTooLong, match="prompt 10 of 10: the prompt has"):
        next(generator.write_all(rows, batch=2))


def test_memory_that_is_not_there_is_told(generator: Generator) -> None:
    generator = Generator(
        generator._session,
        generator._encoder,
        generator.facts.model_copy(update={"room": 1 << 50}),
        generator._start,
    )
    with pytest.raises(ModelFailed, match="there is no memory for"):
        generator.write(Dialogue.of("x"), max_new_tokens=1 << 45)


def test_load_returns_what_the_bundle_is(bundle: Path, generator: Generator, tmp_path: Path) -> None:
    loaded = tacit.load(str(bundle), threads=1)
    assert isinstance(loaded, Generator)
    assert loaded.answer(QUESTION) == "".join(generator.write(Dialogue.of(QUESTION)))
    said = loaded.answer(QUESTION, system="be brief", max_new_tokens=5)
    assert said == "".join(generator.write(Dialogue.of(QUESTION, system="be brief"), max_new_tokens=5))
    with pytest.raises(BundleInvalid, match=r"holds no bundle\.json"):
        tacit.load(tmp_path)
