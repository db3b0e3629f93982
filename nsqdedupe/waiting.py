"""Copies whose owner is in another process, or gone: when each asks the store again."""

from __future__ import annotations

import random

from nsqdedupe.clock import Clock
from nsqdedupe.delivery import Delivery, State

FIRST_POLL = 0.025
LONGEST_POLL = 10.0
PAUSED_POLL = 0.25
"""How soon a copy asks again, how seldom in the end, and how often while the application pauses the reader."""


class Waiting:
    """Deliveries that are `State.WAITING`, each with its time to ask again. They are few: their number is limited.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deliveries: list[Delivery] = []

    def __bool__(self) -> bool:
        return bool(self._deliveries)

    def copies(self) -> int:
        """How many copies wait, those that stand by them included."""
        return sum(1 + len(delivery.standbys or ()) for delivery in self._deliveries)

    def all(self) -> list[Delivery]:
        """All of them, as a list of its own."""
        return list(self._deliveries)

    def add(self, delivery: Delivery) -> None:
        """It waits from now on, and is due at once; `later` says when instead."""
        delivery.state = State.WAITING
        delivery.poll_after = FIRST_POLL
        delivery.poll_at = self._clock()
        self._deliveries.append(delivery)

    def remove(self, delivery: Delivery) -> None:
        """It waits no more."""
        self._deliveries.remove(delivery)

    def later(self, delivery: Delivery, longest: float = LONGEST_POLL) -> None:
        """It asks again after its pause, ``longest`` seconds at most; the pause after that is twice as long."""
        pause = min(delivery.poll_after, longest, LONGEST_POLL)
        delivery.poll_after = pause * 2
        delivery.poll_at = self._clock() + pause * random.uniform(0.8, 1.2)

    def due(self) -> list[Delivery]:
        """Those whose time has come."""
        now = self._clock()
        return [delivery for delivery in self._deliveries if delivery.poll_at <= now]

    def pause(self, deliveries: list[Delivery]) -> None:
        """These look again soon whether the pause is over."""
        for delivery in deliveries:
            delivery.poll_at = self._clock() + PAUSED_POLL

    def next_poll(self) -> float | None:
        """When the next one is due, by the clock; None if nobody waits."""
        return min((delivery.poll_at for delivery in self._deliveries), default=None)
