"""What leaves a job that writes, beside the trained module: ONNX with its first cache, adapters, merged folders."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from export.causal_changes import lora_changes, stores_inwards
from export.causal_hugging_face import adapter_files, common_files, write_merged
from export.generating import Cache, open_session
from export.generator import checked_generator, starting_cache, trained_arrays, write_graph
from export.onnx import ParityFailed
from export.onnx_form import FormRefused, check_graph
from learning.causal.backbone import CausalBackbone
from learning.causal.model import CausalModel
from learning.prompts.assembly import injection_of
from learning.text.dialogue import DialogueEncoder
from learning.text.dialogue_tokenizer import own_dialogue_form
from learning.text.turns import Dialogue
from tacit.bundle import WEIGHTS_FILE
from tacit.generation import TEMPLATES
from tacit.prompt import Generate, LoRA, PrefixTuning, PromptedModel, PromptTuning
from tests.support.plain_merging import looped
from tests.support.tiny_generators import FAMILIES, VOCABULARY, causal_library_model, flat_of, tensors_of
from tests.support.tiny_writers import writer_tokenizer

torch.set_num_threads(1)

SAMPLES = [Dialogue.of(text) for text in ("What is the capital of France?", "x", "the restaurant is near " * 5)]
INJECTIONS = {
    "lora": LoRA(rank=4, alpha=24, matrices=("query", "value", "up")),
    "last": LoRA(rank=4, alpha=40, matrices=("output", "down"), last_layers=1),
    "prompt": PromptTuning(tokens=5),
    "prefix": PrefixTuning(tokens=3),
}


def trained(family: str, injection: str) -> tuple[CausalModel, PromptedModel]:
    """A module whose trained values are random, and the model as its job states it."""
    library = causal_library_model(family)
    config = {**flat_of(library), "vocab_size": VOCABULARY}
    model = PromptedModel(
        config=config,
        backbone=bytes(32),
        injection=INJECTIONS[injection],
        task=Generate(template="chatml", max_new_tokens=8),
        max_tokens=40,
    )
    backbone = CausalBackbone(flat_of(library), tensors_of(library))
    module = CausalModel(backbone, injection_of(model), 0, seed=1).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module, model


def encoder() -> DialogueEncoder:
    return DialogueEncoder(own_dialogue_form(writer_tokenizer("smollm2")), TEMPLATES["chatml"], 40)


def logits_of(module: CausalModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.tensor([ids]))[0]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("injection", INJECTIONS)
def test_onnx_is_the_trained_module(family: str, injection: str, tmp_path: Path) -> None:
    module, model = trained(family, injection)
    alpha = model.injection.alpha if isinstance(model.injection, LoRA) else 1.0
    write_graph(module, alpha, tmp_path, "float32")
    session = open_session(tmp_path / "model.onnx", threads=1)
    start = starting_cache(session, module)
    ids = list(range(3, 27))
    expected = logits_of(module, ids)
    # What was trained changes the logits.
    with torch.no_grad():
        plain = causal_library_model(family)(torch.tensor([ids])).logits[0]
    assert (plain - expected).abs().max() > 0.02 * expected.abs().max()
    for cut in (1, 2, 9, len(ids) - 1):
        cache = Cache(session, start, 1, module.ahead + len(ids))
        found = [cache.read(0, ids[:cut], every=True), cache.read(0, ids[cut:], every=True)]
        assert_close(torch.from_numpy(np.concatenate(found)), expected)
    assert checked_generator(module, session, start, encoder(), SAMPLES, "float32") < 1e-4


@pytest.mark.parametrize("injection", ["lora", "prefix"])
def test_a_graph_that_differs_is_refused(injection: str, tmp_path: Path) -> None:
    module, _ = trained("qwen2", injection)
    # The scale of the change is wrong, or the prefix is.
    write_graph(module, 23.0, tmp_path, "float32")
    session = open_session(tmp_path / "model.onnx", threads=1)
    start = starting_cache(session, module)
    if injection == "prefix":
        start["past.1.key"] = start["past.1.key"] + np.float32(0.1)
    with pytest.raises(ParityFailed, match="nothing was written"):
        checked_generator(module, session, start, encoder(), SAMPLES, "float32")


def test_a_version_that_eight_bits_do_not_hold_is_told(tmp_path: Path) -> None:
    module, _ = trained("qwen2", "lora")
    write_graph(module, 240.0, tmp_path, "int8")
    session = open_session(tmp_path / "model.onnx", threads=1)
    with pytest.raises(ParityFailed, match="Eight bits are too few for this version; leave out --precision"):
        checked_generator(module, session, starting_cache(session, module), encoder(), SAMPLES, "int8")


def test_a_version_without_numbers_is_told(tmp_path: Path) -> None:
    module, _ = trained("qwen2", "lora")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1e30)
    write_graph(module, 24.0, tmp_path, "float32")
    session = open_session(tmp_path / "model.onnx", threads=1)
    with pytest.raises(ParityFailed, match=r"the version's own logits are not numbers.*an earlier one with --version"):
        checked_generator(module, session, starting_cache(session, module), encoder(), SAMPLES, "float32")


def test_heads_that_onnxruntime_cannot_read_are_refused() -> None:
    flat = {**flat_of(causal_library_model("llama")), "head_dim": 8}
    with pytest.raises(FormRefused, match=r"a multiple of 16 values.*--format peft"):
        check_graph(flat)


def write_all(files: dict[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("injection", INJECTIONS)
def test_peft_loads_the_adapter(family: str, injection: str, tmp_path: Path) -> None:
    module, model = trained(family, injection)
    write_all(adapter_files(module, model), tmp_path)
    adapted = PeftModel.from_pretrained(copy.deepcopy(causal_library_model(family)), tmp_path).eval()
    ids = list(range(5, 22))
    given = torch.tensor([ids])
    with torch.no_grad():
        found = adapted(input_ids=given, attention_mask=torch.ones_like(given)).logits[0, -len(ids) :]
    assert_close(found, logits_of(module, ids))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_merged_weights_are_the_bytes_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    """A BLAS has others on other processors, and with other numbers of threads."""
    module, _ = trained(family, "lora")
    config = module.backbone.config
    changes = lora_changes(config, trained_arrays(module), 24.0)
    write_merged(module, 24.0, tmp_path / WEIGHTS_FILE)
    found = load_file(tmp_path / WEIGHTS_FILE)
    for name, base in tensors_of(causal_library_model(family)).items():
        expected = base.copy()
        outwards = expected.T if stores_inwards(config) else expected
        for each in changes.pop(name.removesuffix(".weight"), []):
            part = outwards[each.first : each.first + len(each.up)]
            part[...] = looped(part.copy(), each.up, each.down, each.scale)
        assert found[name].tobytes() == expected.tobytes(), name
    assert not changes


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_merged_folder(family: str, tmp_path: Path) -> None:
    module, model = trained(family, "lora")
    read = encoder()
    write_all(common_files(module, own_dialogue_form(writer_tokenizer("smollm2")), read, model), tmp_path)
    write_merged(module, 24.0, tmp_path / WEIGHTS_FILE)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(causal_library_model(family))
    ids = list(range(5, 22))
    with torch.no_grad():
        assert_close(loaded(torch.tensor([ids])).logits[0], logits_of(module, ids))
    # It writes until one of the template's ends.
    assert loaded.generation_config.eos_token_id == sorted(read.end_ids)
    assert loaded.generation_config.max_new_tokens == 8
