"""The demo's own account of its events, and the judgement at the end.

It is kept in full, by id, and apart from the reader's counters: those are what is put to the test.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from typing import Protocol

from nsqdedupe.cli.demo_events import Event

FAILS_EVERY = 1000
"""One event in so many fails when it is handled for the first time."""

SLOW_EVERY = 100
"""One in so many takes `SLOW` seconds, during which its other copy arrives and has to stand by."""

SLOW = 0.25

SLIPS_BY_KILL = 0
"""How many events may be handled twice because an nsqd was killed: none.

The consumer lives on, and with it all it knows. A handler that runs when the connection is lost runs on, and its
success is recorded; whatever the nsqd gives out again meanwhile stands by, and later is known to be done. The table
keeps each event for the whole run with all but certainty. It would be another matter to kill the consumer: then
each handler that had just ended, unrecorded, may be a slip.
"""


class Message(Protocol):
    """What a handler needs of a message."""

    @property
    def body(self) -> bytes:
        """The event, as JSON."""


class HandlerFailure(Exception):  # noqa: N818 - not an error of this package: it plays the application's
    """The failure that the demo stages."""


class Score:
    """Who was published, handled, and how often."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.total = len(events)
        self.acknowledged: set[str] = set()
        self.runs: Counter[str] = Counter()
        """Successful handler runs, by id."""
        self.failed: set[str] = set()
        first = min(FAILS_EVERY // 2, self.total // 2)
        self._to_fail = {event.id for event in events[first::FAILS_EVERY]}
        self._slow = {event.id for event in events[SLOW_EVERY // 2 :: SLOW_EVERY]}

    @property
    def handled(self) -> int:
        """How many events were handled, be it once or more."""
        return len(self.runs)

    def acknowledge(self, events: Iterable[Event]) -> None:
        """All nsqds acknowledged these."""
        self.acknowledged.update(event.id for event in events)

    def handle(self, message: Message) -> bool | Awaitable[bool]:
        """The application: it notes which event it was given; some are slow, and some fail once."""
        event_id = json.loads(message.body)["id"]
        if event_id in self._slow:
            return self._handle_slowly(event_id)
        return self._note(event_id)

    async def _handle_slowly(self, event_id: str) -> bool:
        await asyncio.sleep(SLOW)
        return self._note(event_id)

    def _note(self, event_id: str) -> bool:
        if event_id in self._to_fail and event_id not in self.failed:
            self.failed.add(event_id)
            raise HandlerFailure(f"staged for {event_id}")
        self.runs[event_id] += 1
        return True

    def result(self) -> Result:
        """The counts that matter."""
        return Result(
            total=self.total,
            published=len(self.acknowledged),
            handled=self.handled,
            retried=len(self.failed & self.runs.keys()),
            slips=sum(runs > 1 for runs in self.runs.values()),
            lost=len(self.acknowledged - self.runs.keys()),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What the run comes to, in events.

    Attributes:
        total: there were to publish.

        published: acknowledged by both nsqds.

        handled: handled, be it once or more.

        retried: failed at first, and handled later.

        slips: handled more than once.

        lost: acknowledged and never handled.
    """

    total: int
    published: int
    handled: int
    retried: int
    slips: int
    lost: int


def broken_promises(result: Result, *, observe: bool = False) -> list[str]:
    """What went wrong, a line each; empty: the demo succeeded.

    Args:
        result: what the run came to.

        observe: the reader only looked on: that events are handled twice is no wonder.
    """
    broken = []
    if result.lost:
        broken.append(f"Acknowledged and never handled: {result.lost:,} of {result.published:,} events.")
    if result.slips > SLIPS_BY_KILL and not observe:
        broken.append(f"Handled more than once: {result.slips:,} events. The kill explains {SLIPS_BY_KILL}.")
    if result.published < result.total:
        broken.append(f"Not acknowledged by both nsqds in time: {result.total - result.published:,} events.")
    return broken
