"""One member in a process of its own: imports, opens the backbone, trains two rounds, and prints what that took.

It runs in the environment that is measured, so it imports nothing that a small device does not install.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def memory(key: str) -> int:
    """A figure of this process in bytes: VmRSS (now) or VmHWM (the peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def main() -> None:
    """Usage: worker RUNTIME BUNDLE ROWS [only-start]."""
    runtime, bundle, rows, *more = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]
    # What `edge_client run` imports before it connects.
    import edge_client.agent.runner  # noqa: F401
    from edge_client.session.preparation import _trainer
    from learning.artifacts import checked_manifest
    from learning.training.device import pick_device
    from tacit.job import JobDocument
    from tacit.manifest import Manifest

    if runtime == "torch":
        pick_device("cpu")
    print(json.dumps({"ready": True}), flush=True)
    if more:
        return
    from learning.backbones.onnx_features import OnnxBackbone
    from learning.backbones.stored import read_backbone
    from learning.mechanisms.protection import protection_of
    from learning.text.corpus import EncodedExamples
    from learning.text.data import read_examples
    from secure_agg.randomness import SystemRandom

    job = JobDocument.from_json((bundle / "job.json").read_bytes(), what="job.json")
    manifest = checked_manifest((bundle / "manifest.json").read_bytes(), job.values)
    frozen = Manifest.from_json((bundle / "frozen.json").read_bytes(), what="frozen.json")
    model: Any = job.model
    backbone: Any = (
        read_backbone(bundle / "backbone.safetensors", model.config)
        if runtime == "torch"
        else OnnxBackbone(bundle / "backbone.onnx", bytes(model.onnx.digest))
    )
    examples = read_examples(rows)
    corpus = EncodedExamples(examples, job, (bundle / "tokenizer.json").read_bytes())
    seconds, busy = [], []
    for _ in range(2):
        began, worked = time.perf_counter(), time.process_time()
        _trainer("torch" if runtime == "torch" else "device")(
            job=job,
            manifest=manifest,
            corpus=corpus,
            base=(bundle / "weights.bin").read_bytes(),
            protection=protection_of(job, len(examples)),
            frozen=frozen.unflatten(frozen.decode((bundle / "frozen.bin").read_bytes())),
            backbone=backbone,
            random=SystemRandom(),
            seed=1,
            device="cpu",
            progress=lambda *_: None,
            cancelled=lambda: False,
        )
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
    told = {"rounds": seconds, "processor": busy, "resident": memory("VmHWM"), "after": memory("VmRSS")}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
