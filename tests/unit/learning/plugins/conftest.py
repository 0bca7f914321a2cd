"""A folder on the path for plugins, which are unloaded after each test."""

import pytest

from tests.support.plugins import forgotten


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    forgotten()
