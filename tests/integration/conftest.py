"""The order of the integration tests, and a check that their commands start warm."""

from collections.abc import Iterator

import pytest

from tests.support import warm

# The longest modules, longest first. With modules in parallel, none of them starts when the others are nearly done.
_LONGEST = (
    "test_first_hour",
    "test_demonstration",
    "test_fedprompt",
    "test_certificates",
    "test_federation",
    "test_privacy",
    "test_operator_versions",
    "test_secrets",
    "test_synthesis",
    "test_faults_members",
    "test_faults_network",
    "test_fedvocab",
    "test_durability",
    "test_prometheus",
    "test_kill_in_every_phase",
    "test_without_torch",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the longest modules to the front."""
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="module", autouse=True)
def _commands_stay_warm() -> Iterator[None]:
    """A variable that a module leaves behind would start every later command of this process cold, at ten times the
    cost, and no test would fail.
    """
    yield
    assert warm.as_at_the_start(), "this module left a variable that libraries read on import, see tests.support.warm"
