"""Fixtures of all unit tests: two authorities, a coordinator's folder, and an unchanged log configuration."""

from collections.abc import Iterator
from datetime import datetime

import pytest
import structlog

from coordinator.config import CoordinatorFolder
from coordinator.pki import Authority
from tests.support import party


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Restores the log configuration, which a command that runs in the test's process changes."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def authority() -> Authority:
    return party.authority()


@pytest.fixture(scope="session")
def stranger() -> Authority:
    """Another federation's authority."""
    return party.authority(1)


@pytest.fixture
def now() -> datetime:
    return party.present()


@pytest.fixture
def folder(tmp_path) -> CoordinatorFolder:
    return party.coordinator_folder(tmp_path / "federation")
