"""Turns are lent in order, at most `places` at once, and a slow holder delays the others by at most `patience`."""

import asyncio

import pytest

from coordinator.services.turns import Turns

LONG = 3600.0


async def settled():
    """Lets the event loop run until nothing more happens by itself."""
    for _ in range(20):
        await asyncio.sleep(0)


class Crowd:
    """Members that each take a turn and keep it until told to go on."""

    def __init__(self, turns):
        self.turns = turns
        self.holding, self.done = [], []
        self.go_on = {}
        self.tasks = {}

    def join(self, *names):
        for name in names:
            self.go_on[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._take(name))

    async def _take(self, name):
        async with self.turns.turn():
            self.holding.append(name)
            await self.go_on[name].wait()
        self.done.append(name)


def test_turns_are_lent_in_order_and_at_most_as_many_as_places():
    async def run():
        crowd = Crowd(Turns(2, LONG))
        crowd.join("a", "b", "c", "d")
        await settled()
        assert crowd.holding == ["a", "b"]
        crowd.go_on["b"].set()
        await settled()
        assert crowd.holding == ["a", "b", "c"]
        for event in crowd.go_on.values():
            event.set()
        await asyncio.gather(*crowd.tasks.values())
        assert crowd.holding == ["a", "b", "c", "d"]

    asyncio.run(run())


def test_a_stalled_member_lets_the_others_continue():
    async def run():
        turns = Turns(1, 0.0)
        crowd = Crowd(turns)
        crowd.join("stalled")
        await settled()
        for _ in range(3):
            async with asyncio.timeout(20), turns.turn():
                assert crowd.holding == ["stalled"]
        assert crowd.done == []
        crowd.go_on["stalled"].set()
        await crowd.tasks["stalled"]

    asyncio.run(run())


def test_a_place_that_was_taken_away_is_not_returned_twice():
    async def run():
        turns = Turns(1, 0.0)
        crowd = Crowd(turns)
        crowd.join("slow")
        await settled()
        # Its place is free after another member took and returned it.
        async with asyncio.timeout(20), turns.turn():
            pass
        crowd.go_on["slow"].set()
        await crowd.tasks["slow"]
        turns._patience = LONG
        crowd.join("b", "c")
        await settled()
        assert crowd.holding == ["slow", "b"]
        crowd.go_on["b"].set()
        crowd.go_on["c"].set()
        await asyncio.gather(*crowd.tasks.values())

    asyncio.run(run())


@pytest.mark.parametrize("waiting", [False, True])
def test_a_cancelled_member_keeps_no_place(waiting):
    async def run():
        crowd = Crowd(Turns(1, LONG))
        crowd.join("first", "second")
        await settled()
        cut = "second" if waiting else "first"
        crowd.tasks[cut].cancel()
        crowd.go_on["first"].set()
        crowd.go_on["second"].set()
        await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)
        crowd.join("third")
        await settled()
        assert crowd.holding[-1] == "third"
        crowd.go_on["third"].set()
        await crowd.tasks["third"]

    asyncio.run(run())
