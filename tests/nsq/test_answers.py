"""What handlers may do with a message, from whichever thread, and what must not cost a connection."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
from servers import Pair, eventually, eventually_async

from nsqdedupe import DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd
from nsqdedupe.errors import ConfigError


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_finish_requeue_and_touch_from_other_threads_are_all_answered(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, executor: ThreadPoolExecutor
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    messages = bodies(200)
    publish(nsqd_pair, topic, messages)
    seen = Seen()
    mistakes: list[Exception] = []

    def work(message: Any) -> None:
        try:
            message.touch()
            if message.tries == 0 and int(message.body[:-1]) % 4 == 0:
                message.requeue(delay=0, backoff=False)
            else:
                seen.handle(message)
                message.finish()
        except Exception as mistake:  # noqa: BLE001 - looked at below
            mistakes.append(mistake)

    def handle(message: Any) -> None:
        message.enable_async()
        executor.submit(work, message)

    async def main() -> None:
        async with consuming(topic, channel, handle, lookupd) as reader:
            await eventually_async(lambda: len(reader.conns) == 2)
            conns = list(reader.conns.values())
            await eventually_async(lambda: len(seen.handled) == 200, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            stats = reader.stats
            assert (stats.handled, stats.failed, stats.unanswered, stats.fin_failed) == (200, 50, 0, 0)
            assert list(reader.conns.values()) == conns
            assert all(conn.connected() for conn in conns)

    on_loop(main())
    assert mistakes == []
    seen.once_each(messages)
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]


def test_a_future_from_an_executor_is_an_answer(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, executor: ThreadPoolExecutor
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    messages = bodies(200)
    publish(nsqd_pair, topic, messages)
    seen = Seen()

    def work(message: Any) -> bool:
        if message.tries == 0 and int(message.body[:-1]) % 20 == 0:
            raise ValueError(message.id)
        return seen.handle(message)

    def handle(message: Any) -> Future[bool]:
        return executor.submit(work, message)

    async def main() -> None:
        options = {"requeue_delay": 0, "max_backoff_duration": 1, "low_rdy_idle_timeout": 1}
        async with consuming(topic, channel, handle, lookupd, **options) as reader:
            await eventually_async(lambda: len(seen.handled) == 200, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert (reader.stats.handled, reader.stats.failed) == (200, 10)

    on_loop(main())
    seen.once_each(messages)


class Nasty:
    """Neither comparable nor a truth value: as an array of numbers is."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


def returns_it(message: Any) -> Any:
    return Nasty()


async def returns_it_later(message: Any) -> Any:
    return Nasty()


def listens_and_breaks(message: Any) -> bool:
    message.on("requeue", lambda **_: 1 // 0)
    return False


async def listens_and_breaks_later(message: Any) -> bool:
    message.on("requeue", lambda **_: 1 // 0)
    return False


def requeues_nonsense(message: Any) -> None:
    message.requeue(delay=float("nan"))


ODDITIES = [returns_it, returns_it_later, listens_and_breaks, listens_and_breaks_later, requeues_nonsense]


@pytest.mark.parametrize("oddity", ODDITIES, ids=lambda oddity: oddity.__name__)
def test_an_odd_handler_fails_its_message_and_nothing_else(
    nsqd: Nsqd, topic: str, channel: str, oddity: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    watched_channel(nsqd, topic, channel)
    messages = bodies(50)
    publish([nsqd], topic, messages)
    seen = Seen()

    def handle(message: Any) -> Any:
        if message.body == messages[20] and message.tries == 0:
            seen.run(message)
            return oddity(message)
        return seen.handle(message)

    async def main() -> None:
        options = {"requeue_delay": 0, "max_backoff_duration": 1, "low_rdy_idle_timeout": 1}
        async with consuming(topic, channel, handle, [nsqd], **options) as reader:
            await eventually_async(lambda: len(seen.handled) == 50, PATIENCE)
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)
            assert (reader.stats.handled, reader.stats.failed) == (50, 1)

    on_loop(main())
    seen.once_each(messages)
    assert len(seen.runs_of(messages[20])) == 2
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert messages[20].decode() not in caplog.text, "bodies are not for logs"


@pytest.mark.parametrize("slow", [False, True], ids=["plain", "coroutine"])
def test_a_listener_that_breaks_after_a_success_undoes_nothing(
    nsqd: Nsqd, topic: str, channel: str, slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    messages = bodies(50)
    publish([nsqd], topic, messages)
    seen = Seen()

    def handle(message: Any) -> Any:
        if message.body == messages[20]:
            message.on("finish", lambda **_: 1 // 0)
        return later(message) if slow else seen.handle(message)

    async def later(message: Any) -> bool:
        return seen.handle(message)

    async def main() -> None:
        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: len(seen.handled) == 50, PATIENCE)
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)
            assert (reader.stats.handled, reader.stats.failed) == (50, 0)

    on_loop(main())
    seen.once_each(messages)
    assert "ZeroDivisionError" in caplog.text


def test_listeners_hear_each_answer_once_and_can_leave(nsqd: Nsqd, topic: str, channel: str) -> None:
    publish([nsqd], topic, bodies(3))
    heard: Counter[str] = Counter()

    def handle(message: Any) -> bool:
        def gone(**_: Any) -> None:
            heard["gone"] += 1

        message.on("finish", lambda message: heard.update(["finish"]))
        message.on("touch", lambda message: heard.update(["touch"]))
        message.on("touch", gone)
        message.off("touch", gone)
        message.touch()
        if message.body == b"1-":
            message.finish()
        return True

    async def main() -> None:
        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: reader.stats.handled == 3)
            await nothing_left([nsqd], topic, channel)

    on_loop(main())
    assert heard == {"finish": 3, "touch": 3}


def test_answering_twice_is_an_error_and_only_the_first_counts(nsqd: Nsqd, topic: str, channel: str) -> None:
    publish([nsqd], topic, [b"message"])
    refused: list[str] = []

    def handle(message: Any) -> bool:
        with pytest.raises(ConfigError, match=r"requeue\(time_ms\)"):
            message.requeue(time_ms="soon")
        assert not message.has_responded()
        message.finish()
        for again in (message.finish, message.requeue, message.touch):
            with pytest.raises(AssertionError, match="responded to") as error:
                again()
            refused.append(str(error.value))
        return False

    async def main() -> None:
        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: reader.stats.received == 1 and not reader.stats.in_flight)
            await nothing_left([nsqd], topic, channel)
            assert reader.stats.handled == 1

    on_loop(main())
    assert len(refused) == 3
    assert told([nsqd], topic, channel, "requeue_count") == [0]


class Alarmed(DedupeReader):
    """Its hook breaks on every heartbeat."""

    beats = 0

    def heartbeat(self, conn: Any) -> None:
        self.beats += 1
        raise ValueError("the hook is broken")


def test_a_broken_heartbeat_hook_does_not_deafen_the_connection(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd.create_channel(topic, channel)
    seen = Seen()

    async def main() -> None:
        # Not 1 s: nsqd hangs up on a client from which it hears nothing for two of them, however busy the machine.
        async with consuming(topic, channel, seen.handle, [nsqd], Alarmed, heartbeat_interval=2) as reader:
            await eventually_async(lambda: reader.beats >= 1, PATIENCE)
            publish([nsqd], topic, [b"after"])
            await eventually_async(lambda: seen.handled)
            await eventually_async(lambda: reader.beats >= 2, PATIENCE)
            assert all(conn.connected() for conn in reader.conns.values())

    on_loop(main())
    seen.once_each([b"after"])
    assert "the hook is broken" in caplog.text


class Moody(DedupeReader):
    """Its hook, which pynsq asks whenever it gives RDY, breaks when it is told to."""

    moody = False

    def disabled(self) -> bool:  # type: ignore[override]
        if self.moody:
            self.moody = False
            raise ValueError("the hook is broken")
        return False


@pytest.mark.filterwarnings("ignore:disabled")
@pytest.mark.nsqd_flags("--msg-timeout=1s")
def test_a_hook_that_breaks_on_arrival_costs_a_redelivery_and_no_connection(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched_channel(nsqd, topic, channel)
    seen = Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, [nsqd], Moody) as reader:
            await eventually_async(lambda: [conn for conn in reader.conns.values() if conn.rdy == 1])
            (conn,) = reader.conns.values()
            reader.moody = True
            publish([nsqd], topic, [b"message"])
            await nothing_left([nsqd], topic, channel)
            assert list(reader.conns.values()) == [conn]

    on_loop(main())
    seen.once_each([b"message"])
    assert "the hook is broken" in caplog.text


@pytest.mark.filterwarnings("ignore:disabled")
def test_a_hook_that_breaks_at_the_end_of_a_backoff_costs_no_answer(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched_channel(nsqd, topic, channel)
    publish([nsqd], topic, [b"message"])
    seen = Seen()

    async def main() -> None:
        def handle(message: Any) -> bool:
            reader.moody = message.tries == 1
            return message.tries == 1 and seen.handle(message)

        options = {"requeue_delay": 0, "max_backoff_duration": 1}
        async with consuming(topic, channel, handle, [nsqd], Moody, **options) as reader:
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)

    on_loop(main())
    seen.once_each([b"message"])
    assert "the hook is broken" in caplog.text
    assert told([nsqd], topic, channel, "timeout_count") == [0]


def test_a_handler_that_ends_the_program_leaves_its_message_to_others(nsqd: Nsqd, topic: str, channel: str) -> None:
    watched_channel(nsqd, topic, channel)
    publish([nsqd], topic, bodies(3))

    def handle(message: Any) -> bool:
        raise SystemExit(3)

    async def main() -> None:
        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: reader.stats.received and not reader.stats.in_flight, PATIENCE)

    with pytest.raises(SystemExit):
        on_loop(main())
    # What it wrote last has left this process, and reaches nsqd in a moment.
    eventually(lambda: told([nsqd], topic, channel, "requeue_count") == [1])


def test_a_cancelled_plain_handler_is_as_a_cancelled_coroutine(nsqd: Nsqd, topic: str, channel: str) -> None:
    watched_channel(nsqd, topic, channel)
    publish([nsqd], topic, [b"message"])
    seen = Seen()

    def handle(message: Any) -> bool:
        seen.run(message)
        if len(seen.runs) == 1:
            raise asyncio.CancelledError
        return True

    async def main() -> None:
        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: reader.stats.handled == 1, PATIENCE)
            assert not reader.backoff_timer.get_interval()

    on_loop(main())
    assert [run.tries for run in seen.runs] == [0, 0]
