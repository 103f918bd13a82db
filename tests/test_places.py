"""The places of a worker: never more than there are, and shared by training and evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mprollout.places import Place, Places


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


def held(places: list[Place]) -> list[Place]:
    return [place for place in places if place._granted.done() and not place._released]


@pytest.mark.parametrize("limit", [1, 2, 3, 8])
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_each_side_gets_half_of_what_gets_free_whoever_filled_them_first(limit: int, first: str) -> None:
    async def test() -> None:
        places = Places(limit)
        ours, theirs = [], []
        for evaluates in (True, False) if first == "evaluation" else (False, True):
            (theirs if evaluates else ours).extend(places.request(evaluates) for _ in range(100))
        running = held([*ours, *theirs])
        assert len(running) == limit and places.evaluating == (limit if first == "evaluation" else 0)
        for _ in range(60):  # samples of equal length: the one that began first ends first
            running.pop(0).release()
            running += [place for place in held([*ours, *theirs]) if place not in running]
            assert places.held == len(running) == limit and places.evaluating == len(held(theirs))
        assert abs(sum(p._released for p in ours) - sum(p._released for p in theirs)) <= limit + 1

    run(test)


def test_alone_a_side_has_all_places_and_the_claim_loop_counts_as_training() -> None:
    async def test() -> None:
        places = Places(4)
        evaluation = [places.request(evaluates=True) for _ in range(20)]
        assert places.evaluating == 4
        claiming = asyncio.ensure_future(places.wait_room())
        await asyncio.sleep(0)
        for _ in range(2):  # those that get free stay free, for the ticket that the claim loop is about to claim
            held(evaluation)[0].release()
        await claiming
        assert (places.held, places.evaluating) == (2, 2)
        places.offer()  # there was no ticket
        assert (places.held, places.evaluating) == (4, 4)

    run(test)


def test_a_place_given_back_in_the_line_is_passed_over() -> None:
    async def test() -> None:
        places = Places(1)
        first, second, third = (places.request() for _ in range(3))
        second.release()
        first.release()
        first.release()
        await third.wait()
        assert places.held == 1
        third.release()
        await places.wait_room()
        assert places.held == 0

    run(test)
