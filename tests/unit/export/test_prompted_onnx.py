"""Prompted models as ONNX: one file with the prompt inside, and one backbone file with prompts beside it."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from export.prompted import PromptedBackbone, PromptFile, PromptInvalid, convert_backbone, convert_prompted, prompt_file
from learning.prompts.setting import Cloze, PromptTuning, PTuning
from tests.support import conversions
from tests.support.tiny_prompts import CLOZE, VOCABULARY, prompted, texts

torch.set_num_threads(1)


@pytest.mark.parametrize(("family", "injection"), [("bert", "lstm"), ("t5", "prefix-mlp")], ids=["bert", "t5"])
def test_the_file_gives_the_modules_logits_at_every_shape(family, injection) -> None:
    module = prompted(family, injection).eval()
    with conversions.light():
        data = convert_prompted(module)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    seen, largest = [], 0.0
    for batch in (1, 2, 5):
        for width in (3, 4, 11, 24):
            ids = texts(family, seed=batch, batch=max(batch, 3), width=width)[0][:batch]
            with torch.no_grad():
                expected = module(ids).numpy()
            (found,) = session.run(["logits"], {"input_ids": ids.numpy()})
            largest = max(largest, float(np.abs(found - expected).max()))
            seen.append(expected)
    # If logits hardly differed between texts, they would agree whatever the graph does.
    assert np.concatenate(seen).std(axis=0).min() > 0.01
    assert largest <= 1e-5
    graph = onnx.load_from_string(data).graph
    shapes = [tuple(each.dims) for each in graph.initializer]
    # The prompt is inside, but not the modules that made it, with hidden layers of 7 and 9.
    assert not [node for node in graph.node if node.op_type == "LSTM"]
    assert not [shape for shape in shapes if {7, 9, 14, 28} & set(shape)]
    # The embedding is there once, for reading; the vocabulary projection has only the label words' four rows.
    assert [shape for shape in shapes if VOCABULARY in shape] == [(VOCABULARY, 16)]
    assert {(4, 16), (16, 4)} & set(shapes)


@pytest.fixture(scope="module")
def split() -> tuple[bytes, PromptedBackbone]:
    """A RoBERTa file for any soft prompt, and a session that runs it."""
    with conversions.light():
        data = convert_backbone(prompted("roberta"))
    return data, PromptedBackbone(data, threads=1)


def test_many_prompts_run_on_one_backbone_file(split) -> None:
    data, running = split
    other = Cloze(((20, 21, 22), (30,), (31, 32)))
    tasks = [
        (PromptTuning(4), CLOZE),
        (PromptTuning(7), other),
        (PromptTuning(1), other),
        (PTuning(5, "mlp", 6), CLOZE),
    ]
    for number, (injection, task) in enumerate(tasks):
        module = prompted("roberta", injection, task, seed=number).eval()
        written = prompt_file(module, data).to_bytes()
        assert len(written) < len(data) / 20
        prompt = PromptFile.from_bytes(written)
        for batch, width in ((1, 3), (2, 11), (5, 20)):
            ids = texts("roberta", seed=width, batch=max(batch, 3), width=width)[0][:batch]
            with torch.no_grad():
                expected = module(ids).numpy()
            np.testing.assert_allclose(running.logits(ids.numpy(), prompt), expected, rtol=0, atol=1e-5)


def test_a_prompt_for_another_backbone_file_is_refused(split) -> None:
    data, running = split
    ids = texts("roberta")[0].numpy()
    prompt = prompt_file(prompted("roberta"), data)
    with pytest.raises(PromptInvalid, match="belongs to backbone"):
        running.logits(ids, prompt_file(prompted("roberta"), data + b" "))
    with pytest.raises(PromptInvalid, match="shapes are not the backbone's"):
        running.logits(ids, replace(prompt, prompt=prompt.prompt[:, :8]))
    with pytest.raises(PromptInvalid, match="shapes are not the backbone's"):
        running.logits(ids, replace(prompt, rows=prompt.rows[:, :8]))


def test_a_file_that_is_not_a_prompt_is_refused(split) -> None:
    written = prompt_file(prompted("roberta"), split[0])
    for broken in (b"", b"\x08" + bytes(20), written.to_bytes()[:-1]):
        with pytest.raises(PromptInvalid, match="is not a prompt file"):
            PromptFile.from_bytes(broken)
    for change in ({"words": (1, 1)}, {"words": (4, 0)}, {"bias": written.bias[:1]}):
        with pytest.raises(PromptInvalid, match="do not fit together"):
            PromptFile.from_bytes(replace(written, **change).to_bytes())


def test_lora_is_exported_only_as_one_file(split) -> None:
    module = prompted("roberta", "lora")
    for refused in (lambda: convert_backbone(module), lambda: prompt_file(module, split[0])):
        with pytest.raises(PromptInvalid, match="without --split"):
            refused()
