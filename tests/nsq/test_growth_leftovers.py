"""When all is answered and the reader is closed, nothing of it is left: it is counted."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections import Counter
from typing import Any

import pytest
from consumers import PATIENCE, Seen, bodies, consuming, nothing_left, on_loop, publish, watched_channel
from proxy import recording
from servers import Pair, eventually_async

from nsqdedupe import DedupeReader, MemoryStore
from nsqdedupe.cli.local_nsq import Nsqlookupd
from nsqdedupe.connection import Connection
from nsqdedupe.delivery import Delivery
from nsqdedupe.runner import Runner


def left() -> Counter[str]:
    """What an event loop and a process may be left with: tasks, timers, open files, objects of ours."""
    gc.collect()
    loop = asyncio.get_running_loop()
    counts = Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, OURS))
    counts["tasks"] = len(asyncio.all_tasks())
    counts["timers"] = sum(not timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]
    counts["files"] = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - its own handle is one of them each time
    return +counts


OURS = (DedupeReader, Runner, Connection, Delivery)


def listeners(reader: DedupeReader) -> list[int]:
    """How many listeners each connection has."""
    return [sum(len(called) for called in conn._EventedMixin__listeners.values()) for conn in reader.conns.values()]


class Life:
    """A handler of every kind: each message's number says what becomes of it. All are handled in the end."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.failed: set[bytes] = set()

    def handle(self, message: Any) -> Any:
        kind = int(message.body.partition(b"-")[0]) % 7
        first = message.body not in self.failed
        self.failed.add(message.body)
        if kind == 1 and first:
            return False
        if kind == 2 and first:
            raise ValueError("as planned")
        if kind == 3 and first:
            message.requeue(delay=0, backoff=False)
            return False
        if kind == 4:
            return self.later(message, good=not first)
        if kind == 5:
            message.enable_async()
            message.on("finish", lambda **_: None)
            asyncio.get_running_loop().call_later(0.01, self.finish, message)
            return None
        return self.seen.handle(message)

    async def later(self, message: Any, *, good: bool) -> bool:
        await asyncio.sleep(0.01)
        return good and self.seen.handle(message)

    def finish(self, message: Any) -> None:
        message.touch()
        self.seen.handle(message)
        message.finish()


@pytest.mark.nsqd_flags("--msg-timeout=1s")
@pytest.mark.parametrize("graceful", [False, True], ids=["close", "stop"])
def test_nothing_is_left_of_a_full_life(
    nsqd_pair: Pair,
    lookupd: Nsqlookupd,
    topic: str,
    channel: str,
    caplog: pytest.LogCaptureFixture,
    graceful: bool,
) -> None:
    """Failures, standbys, answers that come later, a message timeout and a lost connection. Takes 5 s."""
    # What pytest keeps of a log would keep the frames of what was raised, and with them messages.
    for name in ("nsqdedupe.handling", "nsq.reader"):
        caplog.set_level(logging.CRITICAL, name)
    for nsqd in nsqd_pair:
        watched_channel(nsqd, topic, channel)
    messages = bodies(700)
    life = Life()

    async def whole(store: MemoryStore, proxies: Any) -> None:
        options: dict[str, Any] = {
            "nsqd_tcp_addresses": [proxy.address for proxy in proxies],
            "lookupd_http_addresses": "127.0.0.1:1",
            "store": store,
            "max_backoff_duration": 0.1,
            "requeue_delay": 0,
            "max_tries": 0,
        }
        async with consuming(topic, channel, life.handle, (), **options) as reader:
            await eventually_async(lambda: len(reader.conns) == 2, PATIENCE)
            at_first = listeners(reader)
            await asyncio.to_thread(publish, nsqd_pair, topic, messages)
            await eventually_async(lambda: len(life.seen.handled) > 100, PATIENCE)
            proxies[0].line.cut()
            await eventually_async(lambda: len(proxies[0].lines) == 2 and len(reader.conns) == 2, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            assert reader.stats.in_flight == 0
            assert store.kept() == 0
            assert listeners(reader) == at_first
            if graceful:
                assert await reader.stop() == 0

    async def main() -> None:
        async with recording(*nsqd_pair) as proxies:
            store = MemoryStore(window=1000)
            await asyncio.sleep(0)
            before = left()
            await whole(store, proxies)
            await eventually_async(lambda: all(proxy.open == 0 for proxy in proxies))
            await eventually_async(lambda: left() - before, 6, until=lambda more: not more)

    on_loop(main())
    assert set(life.seen.handled) == set(messages)
