"""Fixtures of all unit tests: authorities, a coordinator's folder, one for plugins, and ONNX conversions made once."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for installed distributions. Plugins that were loaded from it are unloaded."""
    from tests.support.plugins import forgotten

    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    forgotten()
