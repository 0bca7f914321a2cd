"""A home of each test's own, and no passphrase from outside."""

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path) -> Path:
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def _no_passphrase(monkeypatch):
    monkeypatch.delenv("TACIT_PASSPHRASE", raising=False)
    monkeypatch.delenv("TACIT_NEW_PASSPHRASE", raising=False)
