"""Members with keys and certificates, which are made once for all tests of secure aggregation's benchmarks."""

import pytest

from benchmarks.secure_aggregation.crowd import Crowd


@pytest.fixture(scope="session")
def members() -> Crowd:
    return Crowd.make(24)
