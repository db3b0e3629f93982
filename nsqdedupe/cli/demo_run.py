"""One run of the demo: servers, producer and consumer, and the nsqd that is killed on the way."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path

import nsqdedupe
from nsqdedupe.cli.demo_events import Event
from nsqdedupe.cli.demo_publish import Publisher
from nsqdedupe.cli.demo_score import Score
from nsqdedupe.cli.demo_screen import NsqdView, Screen, View
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd
from nsqdedupe.clock import monotonic

DOWN = 3.0
"""Seconds for which the killed nsqd stays away."""

PUBLISH_TIMEOUT = 1.0
"""Seconds until a publish fails that not all nsqds acknowledged."""

PATIENCE = 30.0
"""Seconds without any progress after which the run ends unfinished."""

RECALL = 0.999999
"""How surely an event is still recognised when one of its copies comes a whole run late."""

TOPIC, CHANNEL = "lines", "demo"

# Nothing is kept in memory only, so what is queued outlives the kill. What is being delivered at that moment does
# not: the other nsqd has it. --sync-every=1 would let nsqd know to the message how far it was, at two fsyncs per
# message: 930 messages a second were measured on a disk, in place of 115,000. Without, it may give some out again.
_QUEUE_ON_DISK = "--mem-queue-size=0"

_LOOK = 0.05
_RATE_OVER = 2.0


class Run:
    """Publishes, consumes and kills, until every event is handled and no nsqd has anything left.

    Args:
        events: what is published.

        screen: where it is shown.

        directory: for the servers' data and logs.

        observe: the reader only looks on.
    """

    def __init__(self, events: Sequence[Event], screen: Screen, directory: Path, *, observe: bool = False) -> None:
        self.score = Score(events)
        self.store = nsqdedupe.MemoryStore(window=len(events), recall=RECALL)
        self.seconds = 0.0
        self._events = events
        self._screen = screen
        self._directory = directory
        self._observe = observe
        self.nsqds: dict[str, Nsqd] = {}
        self._past: deque[tuple[float, int, int]] = deque()

    def go(self) -> nsqdedupe.Stats:
        """Run it all; returns the reader's counters at the end."""
        with contextlib.ExitStack() as servers:
            lookupd = servers.enter_context(Nsqlookupd(directory=self._directory / "nsqlookupd"))
            for number in (1, 2):
                nsqd = Nsqd(_QUEUE_ON_DISK, lookupds=[lookupd], directory=self._directory / f"nsqd-{number}")
                self.nsqds[f"nsqd {number}"] = servers.enter_context(nsqd)
                nsqd.create_channel(TOPIC, CHANNEL)
            return asyncio.run(self._go(lookupd))

    async def _go(self, lookupd: Nsqlookupd) -> nsqdedupe.Stats:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio.run makes one
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        addresses = sorted(nsqd.tcp_address for nsqd in self.nsqds.values())
        await _until(lambda: lookupd.lookup(TOPIC) == addresses)
        writer = nsqdedupe.ReplicatedWriter(nsqd_tcp_addresses=addresses, copies=2, timeout=PUBLISH_TIMEOUT)
        reader = nsqdedupe.DedupeReader(
            topic=TOPIC,
            channel=CHANNEL,
            message_handler=self.score.handle,
            lookupd_http_addresses=[lookupd.http_address],
            key=nsqdedupe.json_field("id"),
            store=self.store,
            max_in_flight=1000,
            requeue_delay=1,
            max_backoff_duration=0.5,
            lookupd_poll_interval=1,
            output_buffer_timeout=25,
            observe=self._observe,
        )
        self.publisher = Publisher(writer, TOPIC, self._events, self.score)
        self._start = monotonic()
        try:
            await _first_of(self._all_done(), self._stalled(reader), self._show(reader))
            self.seconds = monotonic() - self._start
            await reader.stop(timeout=5)
        finally:
            reader.close()
            writer.close()
        return reader.stats

    async def _all_done(self) -> None:
        """Return when every event is acknowledged and handled, and every copy answered."""
        await asyncio.gather(self.publisher.run(), self._kill())
        await _until(lambda: self.score.handled == self.score.total and not self._owed())

    def _owed(self) -> int:
        """How many copies the nsqds have not been answered for."""
        return sum(
            nsqd.unfinished(TOPIC, CHANNEL) + int(nsqd.topic_stats(TOPIC)["depth"]) for nsqd in self.nsqds.values()
        )

    async def _stalled(self, reader: nsqdedupe.DedupeReader) -> None:
        """Return when nothing has moved for long."""
        before: object = None
        since = monotonic()
        while monotonic() - since < PATIENCE:
            await asyncio.sleep(_LOOK)
            now = len(self.score.acknowledged), reader.stats.received
            if now != before:
                before, since = now, monotonic()

    async def _kill(self) -> None:
        """Kill the second nsqd when half of the events are handled, and start it again."""
        score = self.score
        # A consumer that cannot keep pace shall not delay it until all are published.
        await _until(lambda: score.handled * 2 >= score.total or len(score.acknowledged) * 4 >= score.total * 3)
        victim = self.nsqds["nsqd 2"]
        victim.kill()
        self._say(f"nsqd 2 killed with SIGKILL; {score.handled:,} events are handled so far")
        await asyncio.sleep(DOWN)
        await asyncio.to_thread(victim.start)
        self._say(f"nsqd 2 started again; {self.publisher.open:,} events are on nsqd 1 only, so far")

    def _say(self, text: str) -> None:
        self._screen.say(f"{monotonic() - self._start:5.1f} s  {text}")

    async def _show(self, reader: nsqdedupe.DedupeReader) -> None:
        while True:
            self._screen.show(self._view(reader.stats))
            await asyncio.sleep(self._screen.every)

    def _view(self, stats: nsqdedupe.Stats) -> View:
        elapsed = monotonic() - self._start
        published, handled = len(self.score.acknowledged), self.score.handled
        past = self._past
        past.append((elapsed, published, handled))
        while past[0][0] < elapsed - _RATE_OVER:
            past.popleft()
        then, published_then, handled_then = past[0]
        span = elapsed - then or 1.0
        return View(
            elapsed=elapsed,
            total=self.score.total,
            published=published,
            to_repeat=self.publisher.waiting,
            publish_rate=(published - published_then) / span,
            handled=handled,
            handle_rate=(handled - handled_then) / span,
            duplicates=stats.duplicates,
            standbys=stats.standbys,
            failures=stats.failed,
            observed=stats.observed if self._observe else None,
            nsqds=nsqd_views(self.nsqds, stats),
        )


def nsqd_views(nsqds: Mapping[str, Nsqd], stats: nsqdedupe.Stats) -> list[NsqdView]:
    """What came from each nsqd so far."""
    views = []
    for name, nsqd in nsqds.items():
        tally = Counter(stats.nsqds.get(nsqd.tcp_address, {}))  # absent until it was connected
        views.append(NsqdView(name, nsqd.alive, tally["received"], tally["handled"], tally["duplicates"]))
    return views


async def _until(look: Callable[[], bool]) -> None:
    """Return when something is so; it is looked at in a thread, for it may ask a server."""
    while not await asyncio.to_thread(look):  # noqa: ASYNC110 - nobody sends an event
        await asyncio.sleep(_LOOK)


async def _first_of(*works: Coroutine[object, object, None]) -> None:
    """Run all of them until one returns, or raises; the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
