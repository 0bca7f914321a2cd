"""Which of several coordinators a witness asks. Two processes: tests/integration/test_roster.py."""

import asyncio

import pytest

from edge_client.identity.handshake import HandshakeFailed
from edge_client.roster.witness import NobodyAnswers, Witness, WitnessRefuses
from tests.support.processes import free_ports

NAME = bytes(32)


class Answered(Witness):
    """Answers for the addresses in `answers`, and asks the network about all others."""

    async def look(self, address, federation):
        if address not in ANSWERS:
            return await super().look(address, federation)
        if isinstance(ANSWERS[address], Exception):
            raise ANSWERS[address]
        return ANSWERS[address]


ANSWERS = {
    "b:1": "the head",
    "c:1": "another head",
    "split:1": WitnessRefuses("SPLIT VIEW"),
    "down:1": HandshakeFailed("tcp", "nobody listens at down:1"),
}


def looked(tmp_path, *addresses):
    return asyncio.run(Answered(tmp_path).look_at_any(addresses, NAME))


def test_an_address_that_is_down_is_passed_over(tmp_path):
    (closed,) = free_ports(1)
    assert looked(tmp_path, f"localhost:{closed}", "down:1", "b:1", "c:1") == ("the head", "b:1")


def test_a_witness_without_any_coordinator_says_why_for_each(tmp_path):
    (closed,) = free_ports(1)
    with pytest.raises(NobodyAnswers, match=f"nobody listens at localhost:{closed}.*; nobody listens at down:1"):
        looked(tmp_path, f"localhost:{closed}", "down:1")


def test_a_log_that_does_not_hold_is_not_outweighed_by_another_one(tmp_path):
    with pytest.raises(WitnessRefuses):
        looked(tmp_path, "down:1", "split:1", "b:1")
