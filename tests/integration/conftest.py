"""The order of the integration tests."""

import pytest

# The longest modules, longest first. With modules in parallel, none of them starts when the others are nearly done.
_LONGEST = (
    "test_first_hour",
    "test_demonstration",
    "test_fedprompt",
    "test_certificates",
    "test_federation",
    "test_privacy",
    "test_operator",
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
