"""Audits jobs as they are, without noise, and without clipping, on three architectures.

The jobs are on messages of the service desk. An audit is what `edge_client audit` does with 360 rows from version 0,
with 24 rehearsals of one round.
`lower_bound` is the canaries' at 95 % confidence for three tests. Each case is a process of its own,
whose peak memory is `memory`. `processor` is its processor time. Clips are far below the gradients, so that a missing
clip shows.
"""

import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.library.record import ROOT, Figure, open_results, parser
from benchmarks.privacy.audit import Broken, Subject, defect

BENCH = "job_audits"
DESK = ROOT / "examples" / "desk"
ROWS, RUNS, QUICK_RUNS = 360, 24, 3
DELTA = 1e-6
MECHANISM = {"name": "dp-sgd", "noise_multiplier": 4.0, "clip": 0.01, "lot": 600, "steps": 4}
MODELS: dict[str, dict[str, Any]] = {
    "textcnn": {"architecture": "textcnn", "embedding": 32, "widths": [1, 2], "maps": 16},
    "bilstm": {"architecture": "bilstm", "embedding": 32, "hidden": 32},
    "rvae": {"architecture": "rvae", "embedding": 32, "hidden": 48, "latent": 8, "max_tokens": 24},
}
WAYS: tuple[Broken, ...] = ("none", "noise", "unclipped")


def measure(architecture: str, broken: Broken, runs: int) -> list[Figure]:
    """Audit one job in this process."""
    import torch

    import secure_agg
    from export.bundle import make_job_bundle, read_job_bundle
    from learning.auditing import audit
    from learning.auditing.statistics import each_confidence
    from learning.auditing.subject import Subject as Attacked
    from learning.text.data import read_examples
    from tacit.job import JobSpec

    torch.set_num_threads(1)
    rows = read_examples(DESK / "train.jsonl")[:ROWS]
    whole: dict[str, Any] = {
        "schema": 1,
        "name": architecture,
        "labels": sorted({str(each.label) for each in rows}),
        "model": MODELS[architecture],
        "vocabulary": {"kind": "words", "file": "words.txt"},
        "mechanism": MECHANISM,
        "training": {"optimiser": "sgd", "learning_rate": 0.5},
    }
    if architecture == "rvae":
        whole["corpus"] = {"texts": 10}
    with tempfile.TemporaryDirectory(prefix="tacit-audit-") as scratch:
        make_job_bundle(JobSpec.model_validate(whole), DESK, Path(scratch) / "bundle")
        bundle = read_job_bundle(Path(scratch) / "bundle")
    subject = Attacked(bundle.document, bundle.manifest, bundle.weights, bundle.public_tokenizer, frozen=bundle.frozen)
    began, busy = time.perf_counter(), time.process_time()
    # The number of rehearsals is fixed, so that figures can be compared.
    vars(audit)["runs_within"] = lambda *_: lambda _seconds: runs
    with defect(Subject("dp-sgd", None, None), broken):
        outcomes, _, rebuilt = audit.audit_update(
            subject,
            rows,
            secure_agg.SystemRandom(),
            seconds=120,
            delta=DELTA,
            confidence=each_confidence(audit.CONFIDENCE, audit.UPDATE_TESTS),
        )
    found = next(each for each in outcomes if each.attack == "canaries")
    return [
        Figure("lower_bound", round(found.lower_bound, 3), more={"possible": round(found.possible, 3), "runs": runs}),
        Figure("claimed", round(found.claim or 0.0, 3), more={"delta": DELTA}),
        Figure("words_auc", float(rebuilt["auc"])),
        Figure("wall", round(time.perf_counter() - began, 1), "s"),
        Figure("processor", round(time.process_time() - busy, 1), "s"),
        Figure("memory", audit.memory_mib(), "MiB"),
    ]


def main() -> None:
    """Command line."""
    chosen = parser("audit.jobs").parse_args()
    results = open_results(BENCH, quick=chosen.quick)
    for architecture in MODELS:
        for broken in WAYS:
            case: dict[str, object] = {"architecture": architecture, "broken": broken}
            if results.done(case):
                continue
            results.open([])
            with get_context("spawn").Pool(1) as pool:
                found = pool.apply(measure, (architecture, broken, QUICK_RUNS if chosen.quick else RUNS))
            results.add(case, found)


if __name__ == "__main__":
    main()
