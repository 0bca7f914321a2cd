"""Lets these tests use the fleet of the secure aggregation's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "secure_agg"))
