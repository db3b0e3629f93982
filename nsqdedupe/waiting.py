"""Copies whose owner is in another process, or gone: when each asks the store again."""

from __future__ import annotations

import heapq
import itertools
import math
import random

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import Delivery, State

FIRST_POLL = 0.025
LONGEST_POLL = 10.0
PAUSED_POLL = 0.25
"""How soon a copy asks again, how seldom in the end, and how often while the application pauses the reader."""

TOGETHER = 0.005
"""Seconds from one moment at which copies ask to the next, so that many ask in one call of the store."""


class Waiting:
    """Deliveries that are `State.WAITING`, each with its time to ask again.

    They may be as many as are in flight: when a connection is lost, every message that it had is asked for. So what
    happens to one of them takes no longer when others wait.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deliveries: dict[Delivery, None] = {}
        self._queue: list[tuple[float, int, Delivery]] = []
        """A heap of times to ask; entries of what waits no more, or until another time, are dropped when met."""
        self._serial = itertools.count()
        self.copies = 0
        """How many copies wait, those that stand by them included; whoever adds or takes away one of those says so."""

    def __bool__(self) -> bool:
        return bool(self._deliveries)

    def all(self) -> list[Delivery]:
        """All of them, as a list of its own."""
        return list(self._deliveries)

    def add(self, delivery: Delivery) -> None:
        """It waits from now on, and is due at once; `later` says when instead."""
        delivery.state = State.WAITING
        delivery.poll_after = FIRST_POLL
        self._deliveries[delivery] = None
        self.copies += 1 + len(delivery.standbys or ())
        self._ask_at(delivery, self._clock())

    def remove(self, delivery: Delivery) -> None:
        """It waits no more."""
        del self._deliveries[delivery]
        self.copies -= 1 + len(delivery.standbys or ())

    def later(self, delivery: Delivery, longest: float = LONGEST_POLL) -> None:
        """It asks again after its pause, ``longest`` seconds at most; the pause after that is twice as long."""
        pause = min(delivery.poll_after, longest, LONGEST_POLL)
        delivery.poll_after = pause * 2
        at = self._clock() + pause * random.uniform(0.8, 1.2)
        self._ask_at(delivery, math.ceil(at / TOGETHER) * TOGETHER)

    def due(self) -> list[Delivery]:
        """Those whose time has come. They are not due again before `later` or `pause` was called for them."""
        now = self._clock()
        due: dict[Delivery, None] = {}
        while (at := self.next_poll()) is not None and at <= now:
            due[heapq.heappop(self._queue)[2]] = None
        return list(due)

    def pause(self, deliveries: list[Delivery]) -> None:
        """These look again soon whether the pause is over."""
        for delivery in deliveries:
            self._ask_at(delivery, self._clock() + PAUSED_POLL)

    def next_poll(self) -> float | None:
        """When the next one is due, by the clock; None if nobody waits."""
        queue = self._queue
        while queue:
            at, _, delivery = queue[0]
            if delivery in self._deliveries and delivery.poll_at == at:
                return at
            heapq.heappop(queue)
        return None

    def _ask_at(self, delivery: Delivery, at: float) -> None:
        delivery.poll_at = at
        heapq.heappush(self._queue, (at, next(self._serial), delivery))
