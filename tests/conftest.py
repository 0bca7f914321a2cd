"""What holds for every test."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _default_logs() -> Iterator[None]:
    """A command that runs in the test's process configures its logs, and hides lines from the tests that follow."""
    yield
    structlog.reset_defaults()
