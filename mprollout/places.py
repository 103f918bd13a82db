"""`Places`: at most `max_running_samples` samples run on a worker; training and evaluation share them.

    request() -> Place --wait()--> held --release()--> the next in line

Two lines, each first come, first served. While both want places, one that gets free goes to the side that holds fewer; alone, a side
may have all. So neither starves: between two of its grants the other side has at most as many as were free or given back meanwhile,
half of them in the long run. Training wants a place while a sample of it stands in line, or while the claim loop waits for room.

Invariant: `held <= limit`. A place is granted in `offer` alone, which checks it; `release` is idempotent and works in every state, so a
cancelled sample, even one whose task never ran, gives its place back exactly once.
"""

from __future__ import annotations

import asyncio
import collections


class Place:
    """A request for one sample place, granted at once or later. Whoever made it calls `release`, whatever happened."""

    def __init__(self, places: Places, evaluates: bool) -> None:
        self._places, self._evaluates = places, evaluates
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._released = False

    async def wait(self) -> None:
        """Return once the place is held."""
        await asyncio.shield(self._granted)

    def release(self) -> None:
        """Give the place, or the place in the line, back. Idempotent."""
        if not self._released:
            self._released = True
            self._places._give_back(self)


class Places:
    """The sample places of one worker; used in one event loop.

    Example:
        >>> async def two_of_one():
        ...     places = Places(1)
        ...     first, second = places.request(), places.request()
        ...     await first.wait()
        ...     first.release()
        ...     await second.wait()
        ...     return places.held
        >>> asyncio.run(two_of_one())
        1
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self.evaluating = 0
        """Of the places held, an evaluation's."""
        self._training: collections.deque[Place] = collections.deque()
        self._evaluation: collections.deque[Place] = collections.deque()
        self._claiming = False
        self._evaluation_was_last = False
        self._room = asyncio.Event()

    def request(self, evaluates: bool = False) -> Place:
        """Stand in line; takes effect at once, before any await."""
        place = Place(self, evaluates)
        (self._evaluation if evaluates else self._training).append(place)
        self.offer()
        return place

    async def wait_room(self) -> None:
        """Return when a place is free that is training's to have and that no sample of it waits for. Who then claims nothing calls `offer`."""
        self._claiming = True
        try:
            self.offer()
            await self._room.wait()
        finally:
            self._claiming = False

    def offer(self) -> None:
        """Give what is free to those in line."""
        while self.held < self.limit and (line := self._next()) is not None:
            place = line.popleft()
            self.held += 1
            self.evaluating += place._evaluates
            self._evaluation_was_last = place._evaluates
            place._granted.set_result(None)
        if self.held < self.limit and not self._training:
            self._room.set()
        else:
            self._room.clear()

    def _next(self) -> collections.deque[Place] | None:
        """The line whose turn it is; None: nobody's, or the claim loop's."""
        for line in (self._training, self._evaluation):
            while line and line[0]._released:
                line.popleft()
        if not (self._training or self._claiming):
            return self._evaluation or None
        more = self.held - 2 * self.evaluating  # that training holds than evaluation
        if self._evaluation and (more > 0 or (more == 0 and not self._evaluation_was_last)):
            return self._evaluation
        return self._training or None

    def _give_back(self, place: Place) -> None:
        if place._granted.done():
            self.held -= 1
            self.evaluating -= place._evaluates
        self.offer()  # one that still stood in line is passed over there
