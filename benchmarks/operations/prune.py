"""Measures the pruning of a store with a hundred versions of a million values.

The database and the store are those of a coordinator, on this machine's disk. Every version has the state of fedadam,
two more vectors. The newest version and the start stay. `blobs_left` counts blobs that should be gone,
and named blobs that are.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.library.record import Figure, open_results, parser
from coordinator.domain.jobs import EndAttempt, Norms
from coordinator.storage import records
from coordinator.storage.blobs import BlobStore, open_blobs
from coordinator.storage.database import Database, open_database
from coordinator.storage.prune import Retention, prune
from tacit.attempt import AttemptId
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.reason import Reason

BENCH = "prune"
VERSIONS, VALUES = 100, 1_000_000
QUICK_VERSIONS, QUICK_VALUES = 5, 10_000
TARGET_SECONDS = 10.0


def _fill(database: Database, store: BlobStore, versions: int, values: int) -> None:
    manifest = Manifest.of({"weight": np.zeros((values,), np.float32)})
    document = JobDocument(
        name="desk",
        labels=("no", "yes"),
        manifest=store.put(manifest.canonical()),
        tokenizer=store.put(b"{}"),
        weights=store.put(bytes(4 * values)),
        values=values,
    )
    digest = store.put(document.canonical())
    database.run_now(
        lambda s: records.create_job(
            s, name="desk", document=digest, rounds_total=versions, version=document.weights, now_ms=1
        )
    )
    for number in range(1, versions + 1):
        blobs = [store.put(np.full(values, number + part, "<f4").tobytes()) for part in (0, 0.25, 0.5)]

        def publish(s: records.Session, number: int = number, blobs: list[bytes] = blobs) -> None:
            records.open_round(s, "desk", number, number)
            records.open_attempt(s, "desk", number, number, ("a", "b", "c"), number)
            ended = EndAttempt(
                AttemptId("desk", number, number), True, Reason.REASON_UNSPECIFIED, "", ("a", "b", "c"), (), bytes(32)
            )
            records.end_attempt(s, ended, number)
            state = {"momentum": blobs[1], "accumulator": blobs[2]}
            norms = Norms(1.0, 1.0, 1.0)
            records.publish_version(s, "desk", number, blobs[0], number, number, norms=norms, server_state=state)
            records.end_round(s, "desk", number, "published", None, number)

        database.run_now(publish)


def measure(versions: int, values: int) -> list[Figure]:
    """Fills a store, prunes it, and looks at what is left."""
    with tempfile.TemporaryDirectory(prefix="tacit-prune-") as scratch:
        database = open_database(f"sqlite:///{Path(scratch) / 'tacit.db'}")
        store = open_blobs(f"file://{Path(scratch) / 'store'}")
        _fill(database, store, versions, values)
        began = time.perf_counter()
        # A day later, so that every blob is old enough.
        later_ms = int((time.time() + 25 * 3600) * 1000)
        done = prune(database, store, Retention(newest=1), now_ms=later_ms, grace_seconds=24 * 3600, by="bench")
        seconds = time.perf_counter() - began
        found = database.run_now(lambda s: records.versions(s, "desk"))
        left = sum(store.has(each.digest) for each in found[1:-1])
        database.close()
    return [
        Figure("seconds", round(seconds, 3), "s", {"target": TARGET_SECONDS, "blobs": done.blobs}),
        Figure("freed_bytes", done.freed, "B"),
        Figure("blobs_left", left + len(done.missing), "1", {"target": 0}),
    ]


def main() -> None:
    """Command line."""
    chosen = parser("operations.prune").parse_args()
    results = open_results(BENCH, quick=chosen.quick)
    versions, values = (QUICK_VERSIONS, QUICK_VALUES) if chosen.quick else (VERSIONS, VALUES)
    case: dict[str, object] = {"versions": versions, "values": values}
    if not results.done(case):
        results.open([])
        results.add(case, measure(versions, values))


if __name__ == "__main__":
    main()
