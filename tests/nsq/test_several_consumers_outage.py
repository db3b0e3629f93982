"""The memcached that consumers share is killed, or hangs, under load, and comes back.

Some seconds each: a store that does not answer is asked again after 5 s at most.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from consumers import (
    PATIENCE,
    Seen,
    at_rest,
    bodies,
    consuming,
    coroutine,
    nothing_left,
    on_loop,
    publish,
    watched_channel,
)
from messages import give_up_after
from servers import Pair, eventually_async
from several import store_url

from nsqdedupe import MemcachedStore, open_store
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.memcached import wire

AWAY = float(os.environ.get("OUTAGE_SECONDS", "0"))
"""For how long memcached is away, beyond what it takes to see that it is."""

TIMEOUT = 1.0
BATCH = 200


@pytest.fixture
def store(server: Memcached, topic: str) -> Iterator[MemcachedStore]:
    store = open_store(store_url(server, topic, window=100_000))
    assert isinstance(store, MemcachedStore)
    with closing(store):
        yield store


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads on which memcached was waited for, to connect or to answer."""
    found: set[int] = set()
    wait = wire.converse

    def noted(talks: Collection[wire.Talk], timeout: float) -> None:
        found.add(threading.get_ident())
        wait(talks, timeout)

    for module in "servers", "proof":
        monkeypatch.setattr(f"nsqdedupe.memcached.{module}.converse", noted)
    return found


class Load:
    """Publishes on and on, a copy of each message to each nsqd, while there is little to do."""

    def __init__(self, pair: Pair, topic: str, seen: Seen) -> None:
        self.published: list[bytes] = []
        self._publish = lambda messages: publish(pair, topic, messages)
        self._seen = seen
        self._over = False

    async def run(self) -> None:
        while not self._over:
            messages = bodies(BATCH, start=len(self.published))
            self.published += messages
            await asyncio.to_thread(self._publish, messages)
            await eventually_async(self._wants_more, timeout=10 * PATIENCE)

    def _wants_more(self) -> bool:
        return self._over or len(self.published) - len(self._seen.handled) < 5 * BATCH

    def end(self) -> None:
        self._over = True


def dies(server: Memcached) -> Callable[[], object]:
    """Kill it; what brings it back, empty."""
    server.kill()
    return server.start


def hangs(server: Memcached) -> Callable[[], object]:
    """Stop it; what lets it go on."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("ends", [dies, hangs])
@pytest.mark.parametrize("policy", ["process", "requeue"])
def test_nothing_is_lost_when_the_shared_store_is_away_under_load(
    nsqd_pair: Pair,
    topic: str,
    channel: str,
    server: Memcached,
    store: MemcachedStore,
    threads: set[int],
    ends: Callable[[Memcached], Callable[[], object]],
    policy: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "nsqdedupe.ledger")
    monkeypatch.setattr("nsqdedupe.deduper.OUTAGE_DELAY", 0.5)
    for nsqd in nsqd_pair:
        watched_channel(nsqd, topic, channel)
    seen = Seen()
    load = Load(nsqd_pair, topic, seen)
    # Claims that it took while it did not answer are nobody's: they end by their lease.
    options: dict[str, Any] = {"store": store, "on_store_error": policy, "msg_timeout": 5}

    async def main() -> None:
        async with consuming(topic, channel, coroutine(seen.handle), nsqd_pair, **options) as reader:
            loading = asyncio.create_task(load.run())
            await eventually_async(lambda: len(seen.handled) > 5 * BATCH, PATIENCE)
            threads.clear()  # a reader that is made waits for its store's consent
            give_up_after(store, TIMEOUT)
            comes_back = ends(server)
            await eventually_async(lambda: reader.stats.outages, PATIENCE)
            before = reader.stats
            await asyncio.sleep(AWAY)
            if policy == "process":
                await eventually_async(lambda: reader.stats.unprotected > before.unprotected + 2 * BATCH, PATIENCE)
            else:
                await eventually_async(lambda: reader.stats.deferred > before.deferred + 2 * BATCH, PATIENCE)
            # Patient again: who is not answered for want of a turn would tell of an outage that there is not.
            give_up_after(store, 30.0)
            await asyncio.to_thread(comes_back)
            await eventually_async(lambda: len(said(caplog)) == 2, PATIENCE)
            load.end()
            await loading
            await eventually_async(lambda: set(seen.handled) == set(load.published), PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            stats = reader.stats
            assert (stats.outages, stats.failed) == (1, 0)
            assert stats.store_errors > 0
            await eventually_async(lambda: not reader._DedupeReader__runner._deduper._ledger.behind)
            await dedupes_by_its_store(reader)

    async def dedupes_by_its_store(reader: Any) -> None:
        """One nsqd's copies come when the other's are done."""
        before = reader.stats.duplicates
        messages = bodies(BATCH, start=len(load.published))
        for nsqd in nsqd_pair:
            publish([nsqd], topic, messages)
            await nothing_left([nsqd], topic, channel)
        assert [seen.handled[body] for body in messages] == [1] * BATCH
        assert reader.stats.duplicates == before + BATCH

    on_loop(main())
    assert [level for level, _ in said(caplog)] == [logging.WARNING, logging.INFO]
    assert server.tcp_address in said(caplog)[0][1]
    assert threads
    assert threading.get_ident() not in threads, "the event loop waited for the store"


def test_what_is_claimed_for_a_connection_that_is_gone_is_free_for_the_other_copies_at_once(
    nsqd_pair: Pair, topic: str, channel: str, server: Memcached, store: MemcachedStore
) -> None:
    """Not only when the leases end, a minute later."""
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    dies, lives = nsqd_pair
    messages = bodies(BATCH // 4)
    seen = Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, nsqd_pair, store=store) as reader:
            await eventually_async(lambda: len(reader.conns) == 2, PATIENCE)
            goes_on = hangs(server)
            publish([dies], topic, messages)
            await eventually_async(lambda: reader.stats.received == len(messages), PATIENCE)
            dies.kill()
            await eventually_async(lambda: len(reader.conns) == 1, PATIENCE)
            goes_on()
            publish([lives], topic, messages)
            await eventually_async(lambda: len(seen.handled) == len(messages), PATIENCE)
            await nothing_left([lives], topic, channel)
            at_rest(reader)
            assert reader.stats.unanswered == len(messages)

    on_loop(main())
    seen.once_each(messages)


def said(caplog: pytest.LogCaptureFixture) -> Sequence[tuple[int, str]]:
    return [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "nsqdedupe.ledger"]
