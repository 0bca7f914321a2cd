"""Fixtures of all unit tests: two authorities, a coordinator's folder, and ONNX conversions that are made once."""

from collections.abc import Iterator
from datetime import datetime

import pytest

from coordinator.config import CoordinatorFolder
from coordinator.pki import Authority
from tests.support import conversions, party


@pytest.fixture(scope="session")
def authority() -> Authority:
    return party.authority()


@pytest.fixture(scope="session")
def stranger() -> Authority:
    """Another federation's authority."""
    return party.authority(1)


@pytest.fixture(scope="session", autouse=True)
def _conversions_made_once() -> Iterator[None]:
    with conversions.shared():
        yield


@pytest.fixture
def now() -> datetime:
    return party.present()


@pytest.fixture
def folder(tmp_path) -> CoordinatorFolder:
    return party.coordinator_folder(tmp_path / "federation")
