"""Handlers that fail: each message is tried again, and given up once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from consumers import (
    PATIENCE,
    Seen,
    at_rest,
    bodies,
    consuming,
    nothing_left,
    on_loop,
    publish,
    told,
    watched_channel,
    watched_pair,
)
from servers import Pair, eventually_async

from nsqdedupe import DedupeReader, KeyExtractionError
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

QUICK = {"requeue_delay": 1, "max_backoff_duration": 1, "low_rdy_idle_timeout": 1}
"""Options with which a failure costs a second, and hardly any backoff."""


class BrokenError(Exception):
    """What a handler of these tests raises."""


def raises(message: Any) -> bool:
    raise BrokenError(message.id)


def returns_false(message: Any) -> bool:
    return False


def requeues(message: Any) -> None:
    message.requeue(delay=0)


def requeues_without_backoff(message: Any) -> None:
    message.requeue(backoff=False, delay=0.5)


async def requeues_in_a_coroutine(message: Any) -> None:
    await asyncio.sleep(0)
    message.requeue(backoff=False)


def says_nothing(message: Any) -> None:
    pass


def returns_text(message: Any) -> Any:
    return "done"


async def raises_later(message: Any) -> bool:
    await asyncio.sleep(0)
    raise BrokenError(message.id)


async def returns_none_later(message: Any) -> None:
    await asyncio.sleep(0)


async def is_cancelled(message: Any) -> None:
    raise asyncio.CancelledError


def raises_in_async_mode(message: Any) -> None:
    message.enable_async()
    raise BrokenError(message.id)


def requeues_later(message: Any) -> None:
    message.enable_async()
    asyncio.get_running_loop().call_later(0.01, message.requeue)


FAILURES = [
    *(raises, returns_false, requeues, requeues_without_backoff, says_nothing, returns_text),
    *(raises_later, returns_none_later, requeues_in_a_coroutine, raises_in_async_mode, requeues_later),
]


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_what_fails_once_is_handled_in_the_end(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, fail: Callable[[Any], Any]
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    messages = bodies(100)
    chosen = set(messages[10:20])
    publish(nsqd_pair, topic, messages)
    seen = Seen()

    def handle(message: Any) -> Any:
        if message.body in chosen and message.tries == 0:
            seen.run(message)
            return fail(message)
        return seen.handle(message)

    async def main() -> None:
        async with consuming(topic, channel, handle, lookupd, **QUICK) as reader:
            await eventually_async(lambda: len(seen.handled) == 100, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            stats = reader.stats
            assert (stats.handled, stats.failed) == (100, 10)
            assert stats.duplicates == 100
            assert stats.unanswered == 0

    on_loop(main())
    seen.once_each(messages)
    assert Counter(run.body for run in seen.runs) == Counter(messages) + Counter(chosen)
    for body in chosen:
        assert [run.tries for run in seen.runs_of(body)] == [0, 1]


def test_a_cancelled_handler_costs_no_try(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    messages = bodies(10)
    publish(nsqd_pair, topic, messages)
    seen = Seen()

    async def handle(message: Any) -> bool:
        first = not seen.runs_of(message.body)
        seen.run(message)
        if first:
            await is_cancelled(message)
        seen.handled[message.body] += 1
        return True

    async def main() -> None:
        # A limit of one try: had it cost one, nothing would be handled.
        async with consuming(topic, channel, handle, lookupd, max_tries=1) as reader:
            await eventually_async(lambda: len(seen.handled) == 10, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert (reader.stats.handled, reader.stats.failed, reader.stats.given_up) == (10, 10, 0)
            assert not reader.backoff_timer.get_interval()

    on_loop(main())
    seen.once_each(messages)
    assert [run.tries for run in seen.runs] == [0] * 20


class Undertaker(DedupeReader):
    """Writes down what is given up."""

    def __init__(self, *args: Any, trouble: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given_up: list[bytes] = []
        self.trouble = trouble

    def giving_up(self, message: Any) -> None:
        self.given_up.append(message.body)
        if len(self.given_up) <= self.trouble:
            raise BrokenError(message.id)


@pytest.mark.parametrize("slow", [False, True], ids=["plain", "coroutine"])
def test_a_message_that_always_fails_runs_max_tries_times_in_all_and_is_given_up_once(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, slow: bool
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    publish(nsqd_pair, topic, [b"poison"])
    seen = Seen()

    def handle(message: Any) -> Any:
        seen.run(message)
        if slow:
            return requeues_in_a_coroutine(message)
        # A backoff would add what its RDY 1 needs to find the only message there is.
        message.requeue(backoff=False)
        return None

    async def main() -> None:
        options = {**QUICK, "max_tries": 3}
        async with consuming(topic, channel, handle, lookupd, Undertaker, **options) as reader:
            await eventually_async(lambda: reader.given_up, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert reader.given_up == [b"poison"]
            stats = reader.stats
            assert (stats.failed, stats.given_up, stats.duplicates, stats.handled) == (3, 1, 1, 0)

    on_loop(main())
    assert [run.tries for run in seen.runs] == [0, 1, 2]
    pauses = [after.at - before.at for before, after in zip(seen.runs, seen.runs[1:], strict=False)]
    for number, pause in enumerate(pauses, start=1):
        # As with one copy: requeue_delay times the tries (nsqd's clock is another one), and what a loaded machine
        # adds to it, but not the default of 90 s.
        assert number - 0.05 <= pause < number + 60


def test_what_giving_up_cannot_bury_is_not_lost(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    publish(nsqd_pair, topic, [b"poison"])
    seen = Seen()

    def handle(message: Any) -> bool:
        seen.run(message)
        return False

    async def main() -> None:
        options = {**QUICK, "max_tries": 1, "trouble": 2}
        async with consuming(topic, channel, handle, lookupd, Undertaker, **options) as reader:
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert reader.given_up == [b"poison"] * 3
            assert (reader.stats.given_up, reader.stats.handled) == (1, 0)

    on_loop(main())
    assert len(seen.runs) == 1, "who fails to bury it has not run the handler"


def test_giving_up_may_requeue_and_the_message_comes_again(nsqd: Nsqd, topic: str, channel: str) -> None:
    watched_channel(nsqd, topic, channel)
    nsqd.publish(topic, b"poison")
    calls: list[int] = []

    class Undecided(DedupeReader):
        def giving_up(self, message: Any) -> None:
            calls.append(message.tries)
            if len(calls) == 1:
                message.requeue(delay=0)

    async def main() -> None:
        async with consuming(topic, channel, returns_false, [nsqd], Undecided, max_tries=1, **QUICK) as reader:
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)
            assert (reader.stats.failed, reader.stats.given_up) == (2, 1)

    on_loop(main())
    assert calls == [1, 1]


def test_with_max_tries_0_nothing_is_ever_given_up(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    publish(nsqd_pair, topic, [b"stubborn"])
    seen = Seen()

    def handle(message: Any) -> bool:
        if message.tries < 8:
            seen.run(message)
            message.requeue(delay=0.1, backoff=False)
            return False
        return seen.handle(message)

    async def main() -> None:
        options = {"max_tries": 0}
        async with consuming(topic, channel, handle, lookupd, Undertaker, **options) as reader:
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert reader.given_up == []
            assert (reader.stats.failed, reader.stats.handled, reader.stats.given_up) == (8, 1, 0)

    on_loop(main())
    assert [run.tries for run in seen.runs] == [*range(9)]


def no_key(message: Any) -> bytes:
    raise KeyExtractionError("none of these has one")


@pytest.mark.parametrize("key", [no_key, lambda _: None, lambda _: 1 // 0], ids=["says-so", "none", "breaks"])
def test_without_a_key_attempts_decide_when_a_message_is_given_up(
    nsqd: Nsqd, topic: str, channel: str, key: Callable[[Any], Any]
) -> None:
    watched_channel(nsqd, topic, channel)
    nsqd.publish(topic, b"poison")
    seen = Seen()

    def handle(message: Any) -> bool:
        seen.run(message)
        return False

    async def main() -> None:
        options = {**QUICK, "max_tries": 3, "requeue_delay": 0, "key": key}
        async with consuming(topic, channel, handle, [nsqd], Undertaker, **options) as reader:
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)
            assert reader.given_up == [b"poison"]
            stats = reader.stats
            assert (stats.failed, stats.given_up) == (3, 1)
            assert stats.key_errors == stats.unprotected == 4

    on_loop(main())
    assert [run.attempts for run in seen.runs] == [1, 2, 3]


def test_without_a_key_both_copies_are_handled(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    publish(nsqd_pair, topic, bodies(50))
    seen = Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, lookupd, key=no_key) as reader:
            await eventually_async(lambda: reader.stats.handled == 100, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert reader.stats.key_errors == reader.stats.unprotected == 100

    on_loop(main())
    assert seen.handled == Counter(bodies(50) * 2)
    assert told(nsqd_pair, topic, channel, "requeue_count") == [0, 0]
