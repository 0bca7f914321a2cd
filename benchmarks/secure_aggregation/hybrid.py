"""Compares hybrid keys with X25519 alone, and ML-DSA-65 with RSA-PSS.

The classic side is the code of the commit before the hybrid keys, taken from this repository's history and run beside
ours, by the same script (`one_side`), on the same machine and in turn: classic, hybrid, classic, hybrid. Each side's
figure is its least, because other work on the machine only adds.
"""

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

from benchmarks.library.record import ROOT, Figure
from secure_agg import Graph

__all__ = ["BYTES_TARGET", "CLASSIC", "CLIENT_TARGET", "HistoryMissing", "compare", "signatures"]

# The last commit whose keys are X25519 alone.
CLASSIC = "6c40ad1"
CLIENT_TARGET, BYTES_TARGET = 1.6, 6500
_TREES = ("benchmarks", "coordinator", "edge_client", "learning", "proto", "secure_agg", "toolkit")
_SCRIPT = Path("benchmarks/secure_aggregation/one_side.py")
_TIMEOUT = 1800.0


class HistoryMissing(RuntimeError):
    """The repository's history does not hold the classic side."""


def compare(members: int, values: int, dropped: int, graph: Graph, repeats: int) -> list[Figure]:
    """Measure both sides `repeats` times in turn.

    Raises:
        HistoryMissing: there is no history with the classic side, as in an archive or a shallow clone.
    """
    with tempfile.TemporaryDirectory(prefix="tacit-classic-") as folder:
        classic = Path(folder)
        _take_out(classic)
        (classic / _SCRIPT).write_bytes((ROOT / _SCRIPT).read_bytes())
        case = (str(members), str(values), str(dropped), graph.value, "1")
        sides: dict[str, list[dict[str, float]]] = {"classic": [], "hybrid": []}
        for _ in range(repeats):
            sides["classic"].append(_run(classic, case))
            sides["hybrid"].append(_run(ROOT, case))
    least = {
        side: {what: min(each[what] for each in runs) for what in ("client", "server", "bytes")}
        for side, runs in sides.items()
    }
    old, new = least["classic"], least["hybrid"]
    return [
        *(
            Figure(
                f"hybrid_over_classic_{side}",
                round(new[side] / old[side], 2),
                "1",
                {
                    "hybrid_seconds": round(new[side], 5),
                    "classic_seconds": round(old[side], 5),
                    "repeats": repeats,
                    **({"target": CLIENT_TARGET} if side == "client" and members == 100 else {}),
                },
            )
            for side in ("client", "server")
        ),
        Figure(
            "hybrid_bytes_per_neighbour",
            round(new["bytes"] - old["bytes"]),
            "B",
            {"target": BYTES_TARGET, "hybrid_bytes": round(new["bytes"]), "classic_bytes": round(old["bytes"])},
        ),
    ]


def signatures(count: int) -> list[Figure]:
    """Measure ML-DSA-65 beside RSA-PSS with 3072 bits: median processor time of signing and verifying, and bytes."""
    message = bytes(300)
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
    classic, post_quantum = rsa.generate_private_key(65537, 3072), MLDSA65PrivateKey.generate()
    of_rsa, of_mldsa = classic.sign(message, pss, hashes.SHA256()), post_quantum.sign(message)
    rsa_public, mldsa_public = classic.public_key(), post_quantum.public_key()
    seconds = {
        "rsa_sign": _median(lambda: classic.sign(message, pss, hashes.SHA256()), count),
        "rsa_verify": _median(lambda: rsa_public.verify(of_rsa, message, pss, hashes.SHA256()), count),
        "mldsa_sign": _median(lambda: post_quantum.sign(message), count),
        "mldsa_verify": _median(lambda: mldsa_public.verify(of_mldsa, message), count),
    }
    micro = {name: round(1e6 * value, 1) for name, value in seconds.items()}
    return [
        Figure(
            "mldsa_over_rsa_sign",
            round(seconds["mldsa_sign"] / seconds["rsa_sign"], 2),
            "1",
            {"mldsa_us": micro["mldsa_sign"], "rsa_us": micro["rsa_sign"]},
        ),
        Figure(
            "mldsa_over_rsa_verify",
            round(seconds["mldsa_verify"] / seconds["rsa_verify"], 2),
            "1",
            {"mldsa_us": micro["mldsa_verify"], "rsa_us": micro["rsa_verify"]},
        ),
        Figure("mldsa_signature_bytes", len(of_mldsa), "B", {"rsa_bytes": len(of_rsa)}),
    ]


def _median(call: Callable[[], object], count: int) -> float:
    took = []
    for _ in range(count):
        start = time.process_time()
        call()
        took.append(time.process_time() - start)
    return statistics.median(took)


def _take_out(into: Path) -> None:
    command = ["git", "-C", str(ROOT), "archive", CLASSIC, *_TREES]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise HistoryMissing(
            f"this repository's history lacks commit {CLASSIC}, which the hybrid keys are compared with; clone it whole"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(into, filter="data")


def _run(tree: Path, case: tuple[str, ...]) -> dict[str, float]:
    paths = os.pathsep.join((str(tree), str(tree / "proto")))
    done = subprocess.run(
        [sys.executable, str(tree / _SCRIPT), *case],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        timeout=_TIMEOUT,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
