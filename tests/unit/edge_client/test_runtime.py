"""What trains here is chosen by what is installed, and each runtime says which jobs it cannot train."""

import sys

import pytest

from edge_client.runtime import RuntimeUnavailable, cannot_train, pick_runtime
from tacit.prompt import PromptedModel
from tests.support.fleet import job_document


def test_torch_trains_where_it_is_installed(monkeypatch):
    assert pick_runtime("auto") == "torch"
    assert pick_runtime("device") == "device"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert pick_runtime("auto") == "device"
    with pytest.raises(RuntimeUnavailable, match=r"needs what is not installed here \(torch\): `pip install"):
        pick_runtime("torch")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RuntimeUnavailable, match="onnxruntime"):
        pick_runtime("auto")


def test_there_are_two_runtimes():
    with pytest.raises(RuntimeUnavailable, match="'gpu' is not a runtime"):
        pick_runtime("gpu")


def test_a_device_trains_heads_alone():
    job = job_document()
    assert cannot_train(job, "torch") is None
    assert "only jobs of a head" in str(cannot_train(job, "device"))
    model = {"config": {"model_type": "bert", "vocab_size": 30}, "backbone": "22" * 32, "injection": "none"}
    head = job.model_copy(update={"model": PromptedModel.model_validate(model | {"task": "head"})})
    assert "the job has no ONNX backbone" in str(cannot_train(head, "device"))
    onnx = {"onnx": {"digest": "33" * 32, "size": 1}}
    with_file = PromptedModel.model_validate(model | {"task": "head"} | onnx)
    assert cannot_train(job.model_copy(update={"model": with_file}), "device") is None
