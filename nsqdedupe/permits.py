"""`Permits`: how many messages may be pending at once. The others wait, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class _Waiter(NamedTuple):
    since: float
    wants: int
    granted: asyncio.Future[None]


class Permits:
    """A semaphore of which one call may take several permits, and whose state can be asked.

    All of it belongs to one event loop.

    Args:
        limit: how many there are, 1 or more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        """How many are taken."""
        self.wanted = 0
        """How many those that wait want."""
        self._waiters: deque[_Waiter] = deque()
        self._idle: asyncio.Future[None] | None = None

    def take(self, count: int) -> bool:
        """Take permits if they are free and nobody waits for any. Never blocks."""
        if self.wanted or self.used + count > self.limit:
            return False
        self.used += count
        return True

    async def wait(self, count: int) -> None:
        """Take permits as soon as all who came before have theirs.

        Cancelled, it leaves the queue, or gives back what it was just granted.

        Args:
            count: from 1 to the limit.

        Raises:
            Exception: what `refuse` was told to raise here.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.time(), count, loop.create_future())
        self._waiters.append(waiter)
        self.wanted += count
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self.wanted -= count
                self._grant()
            elif waiter.granted.exception() is None:
                self.give(count)
            raise

    def give(self, count: int) -> None:
        """Give permits back."""
        self.used -= count
        self._grant()

    def refuse(self, error: Callable[[], Exception], before: float | None = None) -> None:
        """Let those that wait raise an exception.

        Args:
            error: makes one for each.

            before: a moment on the loop's clock: only those that have waited since then or longer. None: all.
        """
        while self._waiters and (before is None or self._waiters[0].since <= before):
            waiter = self._waiters.popleft()
            if not waiter.granted.done():
                self.wanted -= waiter.wants
                waiter.granted.set_exception(error())
        self._grant()

    async def idle(self) -> None:
        """Return when none is taken and nobody waits."""
        while self.used or self.wanted:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def _grant(self) -> None:
        while self._waiters:
            _, count, granted = self._waiters[0]
            if not granted.done():
                if self.used + count > self.limit:
                    return
                self.used += count
                self.wanted -= count
                granted.set_result(None)
            self._waiters.popleft()
        if self._idle is not None and not self.used and not self.wanted:
            self._idle.set_result(None)
            self._idle = None
