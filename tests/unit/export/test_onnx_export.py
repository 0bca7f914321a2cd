"""An exported file computes what the module does, at every length and batch, or is not written."""

import gc
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

import export.onnx
from export.bundle import JobBundle
from export.onnx import TOLERANCE, ExportReport, ParityFailed, checked_parity, export_model
from export.predictor import Predictor
from learning.models import TextClassifier, build, load_shared
from learning.text.encoder import TextEncoder
from tacit.bundle import read_bundle
from tacit.documents import DocumentInvalid
from tests.support import conversions
from tests.unit.export.conftest import SAMPLES

Exported = tuple[Path, ExportReport]


def module_of(job: JobBundle, weights: bytes | None = None) -> tuple[TextClassifier, TextEncoder]:
    """The trained module of a version, by default of the start, and its encoder."""
    encoder = TextEncoder(job.tokenizer, 12, 4)
    module = build(job.document.model, encoder.vocabulary_size, 3, encoder.pad_id)
    load_shared(module, job.manifest.unflatten(job.manifest.decode(job.weights if weights is None else weights)))
    return module, encoder


def test_the_bundle_says_where_the_model_came_from(exported: Exported, job: JobBundle) -> None:
    out, report = exported
    bundle = read_bundle(out, "model")
    facts = bundle.index.model
    assert facts is not None
    assert facts.job == "questions"
    assert facts.version == hashlib.sha256(job.weights).digest()
    assert (facts.max_tokens, facts.min_tokens) == (12, 4)
    assert facts.parity == report.max_difference <= 1e-5
    assert facts.texts == report.texts == 5
    assert report.files == {name: len(data) for name, data in bundle.files.items()}
    assert bundle.files["tokenizer.json"] == job.tokenizer
    assert bundle.files["labels.json"] == b'{"labels":["HUM","LOC","NUM"],"schema":1}'


def test_the_file_computes_what_the_module_does(exported: Exported, job: JobBundle) -> None:
    session = onnxruntime.InferenceSession(exported[0] / "model.onnx", providers=["CPUExecutionProvider"])
    (given,), (found,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("input_ids", "tensor(int64)", ["batch", "sequence"])
    assert (found.name, found.shape) == ("logits", ["batch", 3])
    module, encoder = module_of(job)
    random = np.random.default_rng(0)
    for batch, length in [(1, 4), (1, 5), (1, 12), (2, 4), (7, 9), (64, 12), (3, 40)]:
        ids = random.integers(0, encoder.vocabulary_size, size=(batch, length))
        ids[0, length // 2 :] = encoder.pad_id
        (logits,) = session.run(None, {"input_ids": ids})
        with torch.no_grad():
            np.testing.assert_allclose(logits, module(torch.from_numpy(ids)).numpy(), rtol=0, atol=1e-5)


def test_the_file_holds_nothing_about_this_machine(exported: Exported) -> None:
    data = (exported[0] / "model.onnx").read_bytes()
    for trace in (b".py", str(Path.cwd()).encode(), b"site-packages", b'File "', b"forward"):
        assert trace not in data
    assert sorted(path.name for path in exported[0].iterdir()) == sorted(
        ["README.md", "bundle.json", "labels.json", "model.onnx", "tokenizer.json"]
    )


def test_a_file_that_computes_something_else_is_not_written(
    job: JobBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the conversion, 0.001 is added to one bias of the module."""
    convert = export.onnx._convert

    def convert_then_change(module: torch.nn.Module, encoder: TextEncoder) -> bytes:
        data = convert(module, encoder)
        with torch.no_grad():
            module.output.bias[0] += 1e-3
        return data

    monkeypatch.setattr(export.onnx, "_convert", convert_then_change)
    with pytest.raises(ParityFailed, match=r"differ from the trained model's by 0\.001"):
        export_model(job.document, job.manifest, job.weights, job.tokenizer, tmp_path / "model", ["who wrote the book"])
    assert not list(tmp_path.iterdir())


def test_a_difference_of_nan_is_a_failure(job: JobBundle) -> None:
    module, encoder = module_of(job)
    with pytest.raises(ParityFailed, match=r"differ from the trained model's by nan.*nothing was written"):
        checked_parity(module, lambda ids: np.full((len(ids), 3), np.nan, np.float32), encoder, SAMPLES)


def run_of(module: TextClassifier) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
    """Maps ids (B, S) to the module's own logits (B, labels)."""

    def run(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.no_grad():
            found: NDArray[np.float32] = module(torch.from_numpy(ids)).numpy()
        return found

    return run


def exploded(job: JobBundle, times: float) -> bytes:
    """A version with the start's values times a number."""
    return job.manifest.encode((job.manifest.decode(job.weights) * times).astype(np.float32))


def test_a_version_that_exploded_is_exported(job: JobBundle, tmp_path: Path) -> None:
    """Its logits are finite and large, and so is what float32 rounds."""
    out, weights = tmp_path / "model", exploded(job, 300)
    report = export_model(job.document, job.manifest, weights, job.tokenizer, out, SAMPLES)
    highest = np.abs(Predictor.load(out).logits(SAMPLES)).max()
    assert TOLERANCE < report.max_difference < 1e-6 * highest


@pytest.mark.parametrize(("times", "share"), [(1, 1.0), (300, None)])
def test_a_difference_is_judged_by_the_largest_logit_and_by_1_if_all_are_small(
    job: JobBundle, times: float, share: float | None
) -> None:
    """With the limit of the version's logits, one logit of a text is off by a tenth less, and then by a tenth more."""
    module, encoder = module_of(job, exploded(job, times))
    highest = max(float(np.abs(run_of(module)(ids)).max()) for ids in export.onnx._batches(encoder, SAMPLES))
    assert (highest > 1) is (share is None)

    def off_by(difference: float) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        return lambda ids: run_of(module)(ids) + np.float32(difference) * (np.arange(3) == 1)

    limit = TOLERANCE * (share or highest)
    assert checked_parity(module, off_by(0.9 * limit), encoder, SAMPLES) == pytest.approx(0.9 * limit, rel=0.02)
    with pytest.raises(ParityFailed, match="nothing was written"):
        checked_parity(module, off_by(1.1 * limit), encoder, SAMPLES)


def test_a_version_whose_logits_are_no_numbers_is_told(job: JobBundle, tmp_path: Path) -> None:
    """No version of a library cures that."""
    with pytest.raises(ParityFailed, match="the version's own logits are not numbers") as failed:
        export_model(job.document, job.manifest, exploded(job, 1e20), job.tokenizer, tmp_path / "model", SAMPLES)
    assert "constraints.txt" not in str(failed.value)
    assert not list(tmp_path.iterdir())


def test_parity_covers_single_texts_batches_and_every_length(job: JobBundle) -> None:
    encoder = TextEncoder(job.tokenizer, 12, 4)
    shapes = {
        ids.shape for ids in export.onnx._batches(encoder, ["who", "where is the city", "what is the man " * 9] * 2)
    }
    assert {(1, 4), (1, 12), (3, 12), (6, 12), (2, 12)} <= shapes


def test_weights_of_another_model_are_refused(job: JobBundle, tmp_path: Path) -> None:
    with pytest.raises(DocumentInvalid, match="the version has 4 bytes"):
        export_model(job.document, job.manifest, b"\x00" * 4, job.tokenizer, tmp_path / "model", ["who"])
    with pytest.raises(ValueError, match="no texts to compare"):
        export_model(job.document, job.manifest, job.weights, job.tokenizer, tmp_path / "model", [])


def test_exporting_prints_nothing(
    job: JobBundle, tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    with conversions.anew():
        export_model(job.document, job.manifest, job.weights, job.tokenizer, tmp_path / "model", ["who wrote the book"])
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == ""
    assert not [str(warning.message) for warning in recwarn]


def test_conversions_share_torchs_table_and_give_the_same_file(
    exported: Exported, job: JobBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion with a table of its own gives the same bytes. Garbage is collected again afterwards."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    shared: Any = ONNXRegistry.from_torchlib
    # Of all conversions of this process, however many.
    assert shared.cache_info().misses == 1
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(shared.__wrapped__))
    with conversions.anew():
        export_model(job.document, job.manifest, job.weights, job.tokenizer, tmp_path / "own", SAMPLES)
    assert (tmp_path / "own" / "model.onnx").read_bytes() == (exported[0] / "model.onnx").read_bytes()
    assert gc.isenabled()
