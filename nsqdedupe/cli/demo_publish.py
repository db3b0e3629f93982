"""The demo's producer: publishes at an even pace, and again what was not acknowledged by every nsqd."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from nsqdedupe.cli.demo_events import Event
from nsqdedupe.cli.demo_score import Score
from nsqdedupe.clock import monotonic
from nsqdedupe.errors import PublishError

DURATION = 20.0
"""Seconds over which the events are spread, so that one can watch."""

SLOWEST = 500.0
"""Events a second at least: a short input takes less time."""

RETRY_PAUSE = 0.5
"""Seconds between two attempts while an nsqd is down."""

_BATCHES_A_SECOND = 50
_LARGEST_BATCH = 500
_LARGEST_BATCH_BYTES = 1 << 18
_AT_ONCE = 100
"""Batches: enough for publishing to go on while each of them waits a second for an nsqd that is down."""


class Writer(Protocol):
    """What is needed of a `ReplicatedWriter`."""

    async def publish_many(self, topic: str, bodies: Sequence[bytes], /) -> object:
        """Return when enough nsqds have acknowledged; raise `PublishError` else."""


class Publisher:
    """Publishes events in batches, each until it is acknowledged.

    Args:
        writer: publishes to all nsqds.

        topic: where to.

        events: all of them.

        score: told what is acknowledged.
    """

    def __init__(self, writer: Writer, topic: str, events: Sequence[Event], score: Score) -> None:
        self._writer = writer
        self._topic = topic
        self._events = events
        self._score = score
        self._failed: deque[Sequence[Event]] = deque()
        self.again = 0
        """How many events were not acknowledged by all nsqds at first."""
        self._sent = 0

    @property
    def open(self) -> int:
        """How many events were published but not acknowledged by all nsqds, so far."""
        return self._sent - len(self._score.acknowledged)

    @property
    def waiting(self) -> int:
        """How many events wait to be published again."""
        return sum(len(batch) for batch in self._failed)

    async def run(self) -> None:
        """Return when all events are acknowledged."""
        rate = max(len(self._events) / DURATION, SLOWEST)
        room = asyncio.Semaphore(_AT_ONCE)
        start = monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat())
            for batch in batches(self._events, rate):
                await asyncio.sleep(start + self._sent / rate - monotonic())
                await room.acquire()
                self._sent += len(batch)
                group.create_task(self._publish_first(batch)).add_done_callback(lambda _: room.release())

    async def _publish_first(self, batch: Sequence[Event]) -> None:
        if not await self._publish(batch):
            self.again += len(batch)

    async def _publish(self, batch: Sequence[Event]) -> bool:
        try:
            await self._writer.publish_many(self._topic, [event.body for event in batch])
        except PublishError:
            # Some nsqd may have it; so publishing again makes further copies, which the consumer recognises.
            self._failed.append(batch)
            return False
        self._score.acknowledge(batch)
        return True

    async def _repeat(self) -> None:
        """Publish again what failed, slowly while it fails again."""
        while len(self._score.acknowledged) < len(self._events):
            pause = RETRY_PAUSE
            if self._failed and await self._publish(self._failed.popleft()):
                pause = 0.0
            await asyncio.sleep(pause)


def batches(events: Sequence[Event], rate: float) -> Iterator[Sequence[Event]]:
    """Cut events into batches such that some tens of them are published in a second, none of them too large."""
    most = max(1, min(round(rate / _BATCHES_A_SECOND), _LARGEST_BATCH))
    start = size = 0
    for end, event in enumerate(events):
        if end > start and (end - start >= most or size + len(event.body) > _LARGEST_BATCH_BYTES):
            yield events[start:end]
            start, size = end, 0
        size += len(event.body)
    if events:
        yield events[start:]
