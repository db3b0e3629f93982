"""The store goes out of reach in mid-stream, and comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from consumers import (
    KINDS,
    PATIENCE,
    Seen,
    at_rest,
    bodies,
    consuming,
    nothing_left,
    on_loop,
    publish,
    told,
    watched_pair,
)
from servers import Pair, eventually_async

from nsqdedupe import Answer, Claim, MemoryStore, Release, StoreUnavailable
from nsqdedupe.cli.local_nsq import Nsqlookupd


class Unreliable(MemoryStore):
    """A real store behind a switch."""

    def __init__(self) -> None:
        super().__init__(window=100_000)
        self.away = False
        self.refused = 0

    def _check(self, items: Sequence[Any]) -> None:
        if self.away:
            self.refused += len(items)
            raise StoreUnavailable("the switch is off")

    def claim(self, claims: Sequence[Claim]) -> list[Answer]:
        self._check(claims)
        return super().claim(claims)

    def confirm(self, claims: Sequence[Claim]) -> list[bool]:
        self._check(claims)
        return super().confirm(claims)

    def release(self, releases: Sequence[Release]) -> list[bool]:
        self._check(releases)
        return super().release(releases)

    def extend(self, claims: Sequence[Claim]) -> list[bool]:
        self._check(claims)
        return super().extend(claims)


def told_of(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "nsqdedupe.ledger"]


BEGIN = (logging.WARNING, "store out of reach: StoreUnavailable: the switch is off")
END = (logging.INFO, "store is back")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["process", "requeue"])
def test_nothing_is_lost_when_the_store_is_away_for_a_while(
    nsqd_pair: Pair,
    lookupd: Nsqlookupd,
    topic: str,
    channel: str,
    policy: str,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "nsqdedupe.ledger")
    monkeypatch.setattr("nsqdedupe.deduper.OUTAGE_DELAY", 0.5)
    watched_pair(nsqd_pair, lookupd, topic, channel)
    first, second, third = bodies(1000), bodies(1000, start=1000), bodies(1000, start=2000)
    publish(nsqd_pair, topic, first)
    seen = Seen()
    store = Unreliable()

    async def main() -> None:
        handler = KINDS[kind](seen.handle, 0.0 if kind == "plain" else 0.005)
        async with consuming(topic, channel, handler, lookupd, store=store, on_store_error=policy) as reader:
            await eventually_async(lambda: len(seen.handled) == 1000 and len(reader.conns) == 2, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            store.away = True
            publish(nsqd_pair, topic, second)
            if policy == "process":
                await eventually_async(lambda: len(seen.handled) == 2000, PATIENCE)
                await nothing_left(nsqd_pair, topic, channel)
                # Within one process the other copies find the first one, or its success, all the same.
                assert reader.stats.unprotected == 1000
            else:
                await eventually_async(lambda: reader.stats.deferred >= 2000, PATIENCE)
                assert len(seen.handled) == 1000
            store.away = False
            publish(nsqd_pair, topic, third)
            await eventually_async(lambda: len(seen.handled) == 3000, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            await eventually_async(lambda: told_of(caplog) == [BEGIN, END])
            at_rest(reader)
            stats = reader.stats
            assert stats.outages == 1
            assert stats.store_errors == store.refused > 0
            assert (stats.failed, stats.unanswered) == (0, 0)
            # What was handled while it was away is known to it by now.
            before = stats.duplicates
            await eventually_async(lambda: not reader._DedupeReader__runner._deduper._ledger.behind)
            publish(nsqd_pair[:1], topic, [*first, *second, *third])
            await nothing_left(nsqd_pair, topic, channel)
            assert reader.stats.duplicates == before + 3000

    on_loop(main())
    seen.once_each([*first, *second, *third])
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]


def failing_once(seen: Seen) -> Callable[[Any], bool]:
    def handle(message: Any) -> bool:
        if not seen.runs_of(message.body):
            seen.run(message)
            return False
        return seen.handle(message)

    return handle


def test_who_fails_while_the_store_is_away_is_tried_again(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    seen = Seen()
    store = Unreliable()

    async def main() -> None:
        options = {"store": store, "requeue_delay": 1, "max_backoff_duration": 1, "low_rdy_idle_timeout": 1}
        async with consuming(topic, channel, failing_once(seen), lookupd, **options) as reader:
            await eventually_async(lambda: len(reader.conns) == 2)
            store.away = True
            publish(nsqd_pair, topic, [b"message"])
            await eventually_async(lambda: reader.stats.failed == 1, PATIENCE)
            store.away = False
            await eventually_async(lambda: seen.handled, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())
    assert 1 <= seen.handled[b"message"] <= 2


def test_the_store_may_go_between_the_claim_and_the_confirmation(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The success is kept in the process, and the other copy finds it there."""
    caplog.set_level(logging.INFO, "nsqdedupe.ledger")
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    first, second = nsqd_pair
    messages = bodies(200)
    seen = Seen()
    store = Unreliable()

    async def main() -> None:
        def handle(message: Any) -> bool:
            store.away = True
            return seen.handle(message)

        async with consuming(topic, channel, handle, lookupd, store=store, max_in_flight=1000) as reader:
            await eventually_async(lambda: len(reader.conns) == 2)
            publish([first], topic, messages)
            await nothing_left([first], topic, channel)
            publish([second], topic, messages)
            await nothing_left([second], topic, channel)
            assert reader.stats.duplicates == 200
            store.away = False
            await eventually_async(lambda: not reader._DedupeReader__runner._deduper._ledger.behind)
            assert store.refused == reader.stats.store_errors
            at_rest(reader)

    on_loop(main())
    seen.once_each(messages)
    assert told_of(caplog) == [BEGIN, END]
