"""What holds for every test."""

import gc
from collections.abc import Iterator

import pytest
import structlog

from tests.support import command_trees, keys

# The default one formats each logged exception with all its variables in colour, which costs most of a second.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback

command_trees.made_once()

# Until the tests are collected, which makes nothing but objects that live to the end: looking for garbage among them
# took a fifth of the time.
gc.disable()


@pytest.fixture(scope="module", autouse=True)
def _garbage_of_earlier_modules() -> None:
    """Exempts what earlier modules left behind from later collections: imports and caches, which live to the end.

    A whole collection takes a second when all tests' imports and caches are in it. Conversions to ONNX ask for one.
    pytest lets go of a module's last fixtures only after their end, so this is at the start of the next one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _shared_keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The processes of pytest-xdist have folders side by side."""
    base = tmp_path_factory.getbasetemp()
    keys.KEPT = (base.parent if hasattr(request.config, "workerinput") else base) / "keys"
    keys.KEPT.mkdir(mode=0o700, exist_ok=True)


@pytest.fixture(autouse=True)
def _default_logs() -> Iterator[None]:
    """A command that runs in the test's process configures its logs, and hides lines from the tests that follow."""
    yield
    structlog.reset_defaults()


def pytest_collection_finish() -> None:
    """Exempts modules and collected tests, which live to the end, from garbage collection, and allows it again.

    The interpreter runs a whole collection when a quarter of the objects are new. With few other objects that would be
    often, so it also waits for more of the younger generations' collections.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(700, 10, 100)
