"""`Places`: at most `max_running_samples` samples run on a worker; who asks first runs first.

    request() -> Place --wait()--> held --release()--> the next in line

Invariant: `held <= limit`. A place is granted in `_grant` alone, which checks it; `release` is idempotent and works in every state, so a
cancelled sample, even one whose task never ran, gives its place back exactly once.
"""

from __future__ import annotations

import asyncio
import collections


class Place:
    """A request for one sample place, granted at once or later. Whoever made it calls `release`, whatever happened."""

    def __init__(self, places: Places) -> None:
        self._places = places
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
        self._line: collections.deque[Place] = collections.deque()
        self._room = asyncio.Event()
        self._grant()

    def request(self) -> Place:
        """Stand in line; takes effect at once, before any await."""
        place = Place(self)
        self._line.append(place)
        self._grant()
        return place

    async def wait_room(self) -> None:
        """Return when a place is free that nobody in line wants."""
        await self._room.wait()

    def _grant(self) -> None:
        while self._line and self.held < self.limit:
            place = self._line.popleft()
            if not place._released:
                self.held += 1
                place._granted.set_result(None)
        if self.held < self.limit:
            self._room.set()
        else:
            self._room.clear()

    def _give_back(self, place: Place) -> None:
        if place._granted.done():
            self.held -= 1
        self._grant()  # one that still stood in line is passed over there
