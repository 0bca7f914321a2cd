"""Measures a member without torch beside one with it: bytes, memory, time and accuracy.

The job trains a head over MiniLM (layers 2, 4, 6) with dp-sgd, 30 full lots, on 300 of TREC's questions, one thread.

    installed_bytes   files of the extra's packages and of all that they depend on, without pip
    resident_bytes    peak of the member's process over two rounds; beside it what is resident afterwards
    start_seconds     from the start of the process until everything is imported that runs before the connection
    round_seconds     a round that finds its features; beside it the first, which computes them
    accuracy          TREC's test questions under a head that was trained without noise on the same features

The runtime `device` is installed into a fresh environment under build/, and runs from there; `torch` is the environment
that runs the benchmark. Lines have processor seconds beside a clock's, which other work on the machine lengthens.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.library.minilm import minilm
from benchmarks.library.record import ROOT, SHARED, Figure, NoData, open_results, parser

if TYPE_CHECKING:
    from learning.text.examples import Example

__all__ = ["BENCH", "installed_bytes", "measured"]

BENCH = "device"
REVISION = 1
RUNTIMES = ("torch", "device", "device-int8")
ROWS, TRAIN, STARTS = 300, 1000, 3
# Run in the environment that is measured: the bytes of a list of packages and of what they depend on.
_INSTALLED = """
import importlib.metadata as m, json, sys
from packaging.requirements import Requirement
todo, seen, total = json.loads(sys.argv[1]), set(), 0
while todo:
    need = Requirement(todo.pop())
    name = need.name.lower().replace("_", "-")
    if name in seen or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
        continue
    try:
        found = m.distribution(name)
    except m.PackageNotFoundError:
        continue
    seen.add(name)
    todo += found.requires or []
    places = [each.locate() for each in found.files or []]
    total += sum(each.stat().st_size for each in places if each.is_file())
print(json.dumps([total, len(seen)]))
"""


def installed_bytes(python: Path, extra: str) -> tuple[int, int]:
    """The bytes and the number of the packages that an extra of this project installs, where they are installed."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, todo = list(project["dependencies"]), [extra]
    while todo:
        for each in project["optional-dependencies"][todo.pop()]:
            if each.startswith(project["name"]):
                todo += each.partition("[")[2].rstrip("]").split(",")
            else:
                wanted.append(each)
    total, count = json.loads(_run(python, "-c", _INSTALLED, json.dumps(wanted)))
    return total, count


def measured(runtime: str, python: Path, bundle: Path, rows: Path) -> list[Figure]:
    """The figures of one runtime."""
    size, packages = installed_bytes(python, "edge" if runtime == "torch" else "device")
    kind = "torch" if runtime == "torch" else "device"
    starts = [_started(python, kind, bundle, rows) for _ in range(STARTS)]
    clock, busy = (statistics.median(each) for each in zip(*starts, strict=True))
    told = json.loads(_run(python, _WORKER, kind, str(bundle), str(rows)).splitlines()[-1])
    return [
        Figure("installed_bytes", size, "bytes", {"packages": packages}),
        Figure("resident_bytes", told["resident"], "bytes", {"afterwards": told["after"]}),
        Figure("start_seconds", clock, "s", {"processor": busy}),
        Figure(
            "round_seconds",
            told["rounds"][1],
            "s",
            {
                "first": told["rounds"][0],
                "rows": ROWS,
                "processor": told["processor"][1],
                "first_processor": told["processor"][0],
            },
        ),
    ]


_WORKER = str(ROOT / "benchmarks" / "device" / "worker.py")


def _environment(python: Path) -> dict[str, str]:
    # The device's environment has this project installed; the other one finds the working tree.
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])} if python == Path(sys.executable) else {}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | paths | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _run(python: Path, *words: str) -> str:
    done = subprocess.run(
        [str(python), *words],
        capture_output=True,
        text=True,
        env=_environment(python),
        cwd=tempfile.gettempdir(),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def _started(python: Path, kind: str, bundle: Path, rows: Path) -> tuple[float, float]:
    """Seconds of a clock and of the processor until a member's process is ready, and has ended."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    _run(python, _WORKER, kind, str(bundle), str(rows), "only-start")
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def device_environment() -> Path:
    """The Python of a fresh environment with the extra `device`, made under build/."""
    folder = ROOT / "build" / "device-environment"
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"{ROOT}[device]"]
    _run(python, *install)
    return python


def bundles(folder: Path, rows: "list[Example]") -> dict[str, Path]:
    """The bundles of the job, by runtime."""
    from export.bundle import make_job_bundle
    from tacit.job import JobSpec

    found = {}
    for precision in ("float32", "int8"):
        model = {"architecture": "prompted", "base": str(minilm().resolve()), "max_tokens": 64, "injection": "none"}
        spec = {
            "schema": 1,
            "name": "head",
            "labels": sorted({str(each.label) for each in rows}),
            "model": model | {"task": "head", "onnx": precision},
            "mechanism": {"name": "dp-sgd", "noise_multiplier": 8.0, "clip": 0.5, "lot": ROWS, "steps": 30},
            "training": {"optimiser": "sgd", "learning_rate": 2.0},
            "aggregation": {"coordinate_bound": 64},
        }
        make_job_bundle(JobSpec.model_validate(spec), folder, folder / precision)
        found[precision] = folder / precision
    return {"torch": found["float32"], "device": found["float32"], "device-int8": found["int8"]}


def accuracy(bundle: Path, runtime: str, train: "list[Example]", test: "list[Example]") -> Figure:
    """The share of test rows that a head gets right, trained without noise on this runtime's features."""
    from export.bundle import read_job_bundle
    from learning.backbones.onnx_features import OnnxBackbone
    from learning.prompts.features import FeatureStore, features_of
    from learning.text.corpus import EncodedExamples
    from learning.training.head import LinearHead, train_head
    from learning.training.head_update import HeadModel
    from tacit.job import Training

    job = read_job_bundle(bundle)
    parts = [EncodedExamples(each, job.document, job.public_tokenizer) for each in (train, test)]
    encoder: Any = parts[0].encoder
    model: Any = job.document.model
    shared = job.manifest.unflatten(job.manifest.decode(job.weights))
    if runtime == "torch":
        from benchmarks.library.simulation import backbone_of
        from learning.models.assembly import whole_model

        module: Any
        module, _ = whole_model(
            job.document, job.manifest, job.weights, job.public_tokenizer, backbone=backbone_of(job), frozen=job.frozen
        )
        found = [features_of(module, each.read().ids, b"\0" * 32, FeatureStore()) for each in parts]
    else:
        onnx = OnnxBackbone(bundle / "backbone.onnx", bytes(model.onnx.digest))
        reader = HeadModel(job.document, encoder, onnx, shared, job.frozen)
        found = [reader.features(each.read().ids) for each in parts]
    head = LinearHead(shared["output.weight"].copy(), np.zeros(len(job.document.labels), np.float32), False)
    train_head(head, found[0], parts[0].read().labels, Training(epochs=40, batch=64, learning_rate=0.01), seed=1)
    right = head.logits(found[1]).argmax(axis=1) == parts[1].read().labels
    return Figure("accuracy", float(right.mean()), more={"train": len(train), "test": len(test)})


def main() -> None:
    """Command line."""
    from learning.text.data import read_examples

    chosen = parser("device.costs").parse_args()
    results = open_results(BENCH, quick=chosen.quick, revision=REVISION)
    if all(results.done({"runtime": each}) for each in RUNTIMES):
        return
    paths = [SHARED / "trec" / f"{part}.jsonl.gz" for part in ("train", "test")]
    if not all(path.exists() for path in paths):
        raise NoData(f"{paths[0].parent} is missing: this benchmark reads TREC")
    train, test = map(read_examples, paths)
    results.open([0])
    python = {"torch": Path(sys.executable), "device": device_environment()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        made = bundles(folder, train)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps({"text": each.text, "label": each.label}) + "\n" for each in train[:ROWS]))
        some = train[: 200 if chosen.quick else TRAIN], test[: 100 if chosen.quick else None]
        for runtime in RUNTIMES:
            figures = measured(runtime, python["torch" if runtime == "torch" else "device"], made[runtime], rows)
            results.add({"runtime": runtime}, [*figures, accuracy(made[runtime], runtime, *some)])


if __name__ == "__main__":
    main()
