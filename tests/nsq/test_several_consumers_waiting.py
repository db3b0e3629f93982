"""Copies whose owner is in another consumer: how many of them wait, and how they ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from consumers import (
    PATIENCE,
    Gate,
    Seen,
    at_rest,
    bodies,
    consuming,
    gated,
    nothing_left,
    on_loop,
    publish,
    watched_channel,
)
from relay import Relay
from servers import Pair, eventually_async

from nsqdedupe import Answer, Claim, DedupeReader, Store, open_store
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.waiting import Waiting


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """Of the consumer that has the messages."""
    with closing(open_store(url)) as store:
        yield store


@pytest.fixture
def store_here(line: Relay, memcached: Memcached, url: str) -> Iterator[Store]:
    """Of the consumer whose copies wait."""
    with closing(open_store(url.replace(memcached.tcp_address, line.address))) as store:
        yield store


def test_so_many_wait_that_new_work_always_finds_a_place(
    nsqd_pair: Pair, topic: str, channel: str, store: Store, store_here: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 3 s: what does not wait comes again after one."""
    for nsqd in nsqd_pair:
        watched_channel(nsqd, topic, channel)
    held, fresh = bodies(40), bodies(40, start=40)
    seen, seen_here = Seen(), Seen()
    waiting: list[int] = []
    add = Waiting.add

    def counted(self: Waiting, *args: object) -> None:
        add(self, *args)  # type: ignore[arg-type]
        waiting.append(self.copies)

    monkeypatch.setattr(Waiting, "add", counted)

    async def main() -> None:
        gate = Gate()
        owner = consuming(topic, channel, gated(seen.handle, gate), nsqd_pair[:1], store=store)
        beside = consuming(topic, channel, seen_here.handle, nsqd_pair[1:], store=store_here, max_in_flight=10)
        async with owner, beside as reader:
            publish(nsqd_pair[:1], topic, held)
            await eventually_async(lambda: gate.waiting == 40 and reader.conns, PATIENCE)
            publish(nsqd_pair[1:], topic, [*held, *fresh])
            await eventually_async(lambda: len(seen_here.handled) == 40, PATIENCE)
            assert reader.stats.deferred > 0
            gate.open()
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())
    assert max(waiting) == 5, "half of RDY"
    seen.once_each(held)
    seen_here.once_each(fresh)


class Watched:
    """Holds the claims of a store back while it is told to, and counts what each call of them took.

    Args:
        store: whose claims.

        line: over which it is asked.
    """

    def __init__(self, store: Store, line: Relay) -> None:
        self.calls: list[tuple[int, int]] = []
        """Claims and round trips of each since it held one back."""
        self.entered = threading.Event()
        self._free = threading.Event()
        self._free.set()
        self._claim = store.claim
        self._line = line
        store.claim = self  # type: ignore[method-assign]

    def __call__(self, claims: Sequence[Claim]) -> Sequence[Answer]:
        if not self._free.is_set():
            self.calls.clear()
            self.entered.set()
            assert self._free.wait(PATIENCE)
        before = self._line.trips
        answers = self._claim(claims)
        self.calls.append((len(claims), self._line.trips - before))
        return answers

    def hold_back(self) -> None:
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()


def test_all_that_wait_ask_in_one_pipeline(
    nsqd_pair: Pair, topic: str, channel: str, store: Store, store_here: Store, line: Relay
) -> None:
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    messages = bodies(50)
    seen, seen_here = Seen(), Seen()
    watched = Watched(store_here, line)

    def nobody_is_yet_to_ask(reader: DedupeReader) -> bool:
        return reader._DedupeReader__runner._deduper.next_poll() is None  # type: ignore[attr-defined,no-any-return]

    async def main() -> None:
        gate = Gate()
        owner = consuming(topic, channel, gated(seen.handle, gate), nsqd_pair[:1], store=store)
        beside = consuming(topic, channel, seen_here.handle, nsqd_pair[1:], store=store_here)
        async with owner, beside as reader:
            publish(nsqd_pair[:1], topic, messages)
            await eventually_async(lambda: gate.waiting == 50 and reader.conns, PATIENCE)
            publish(nsqd_pair[1:], topic, messages)
            await eventually_async(lambda: reader.stats.standbys == 50, PATIENCE)
            watched.hold_back()
            await eventually_async(lambda: watched.entered.is_set() and nobody_is_yet_to_ask(reader), PATIENCE)
            watched.let_go()
            await eventually_async(lambda: len(watched.calls) >= 2, PATIENCE)
            gate.open()
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert reader.stats.duplicates == 50

    on_loop(main())
    (first, trips), (rest, trips_of_rest), *_ = watched.calls
    assert first == 50 or first + rest == 50
    assert trips == trips_of_rest == 2, "one to claim, one to look at the claims that were met"
    seen.once_each(messages)
    assert seen_here.runs == []
