"""Paths of the repository's files, and of public data sets beside it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED_DATA = ROOT.parent / "shared" / "data"
VECTORS = ROOT / "tests" / "vectors"
