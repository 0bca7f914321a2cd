"""A coordinator without rounds for each test of the operator's service and commands."""

import asyncio
from collections.abc import Callable

import pytest
import structlog

from tests.support.operator_house import Scenario, started
from tests.support.processes import PATIENCE


@pytest.fixture(autouse=True)
def quiet():
    """Silences the service's log, which is not part of a command's output."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


@pytest.fixture
def house(tmp_path) -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            async with started(tmp_path) as house:
                await asyncio.wait_for(scenario(house), PATIENCE)

        asyncio.run(whole())

    return run
