"""`nsqdedupe.run`: what a signal does to a consumer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from consumers import PATIENCE, Seen, at_rest, bodies, coroutine, publish, told
from processes import Journal, consumer_process
from servers import Pair, eventually, eventually_async

from nsqdedupe import BODY, ConfigError, DedupeReader, run
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd
from nsqdedupe.reader import live_readers


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def reader_of(lookupd: Nsqlookupd, topic: str, channel: str, handler: Any, **options: Any) -> DedupeReader:
    quick = {"output_buffer_timeout": 25, "lookupd_poll_interval": 1, "max_in_flight": 100}
    return DedupeReader(
        topic, channel, handler, key=BODY, lookupd_http_addresses=[lookupd.http_address], **{**quick, **options}
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_under_load_drains_all_readers(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, loop: asyncio.AbstractEventLoop, number: int
) -> None:
    channels = f"{channel}-1", f"{channel}-2"
    for nsqd in nsqd_pair:
        for one in channels:
            nsqd.create_channel(topic, one)
    publish(nsqd_pair, topic, bodies(2000))
    seen = Seen()

    def handle(message: Any) -> bool:
        if len(seen.runs) == 500:
            loop.call_soon(send, number)
        seen.run(message)
        return True

    readers = [reader_of(lookupd, topic, one, coroutine(handle, 0.01)) for one in channels]
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    run(timeout=PATIENCE)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    for reader in readers:
        at_rest(reader)
        assert reader.stats.unanswered == 0
    assert 500 < len(seen.runs) < 4000
    for one in channels:
        eventually(lambda one=one: told(nsqd_pair, topic, one, "in_flight_count") == [0, 0])
        assert told(nsqd_pair, topic, one, "timeout_count") == [0, 0]


def test_two_signals_in_one_turn_of_the_loop_end_it(loop: asyncio.AbstractEventLoop) -> None:
    """The second one comes before the first has begun to stop anything."""
    hung = []

    def give_up() -> None:
        hung.append(True)
        loop.stop()

    loop.call_soon(lambda: (send(signal.SIGTERM), send(signal.SIGINT)))
    timer = loop.call_later(PATIENCE, give_up)
    run(timeout=PATIENCE)
    timer.cancel()
    assert not hung


def test_a_second_signal_ends_it_at_once(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, loop: asyncio.AbstractEventLoop
) -> None:
    publish(nsqd_pair, topic, [b"message"])
    sent: list[float] = []

    async def handle(message: Any) -> bool:
        for _ in range(2):
            sent.append(time.monotonic())
            send(signal.SIGTERM)
            await asyncio.sleep(0.3)
        await asyncio.Event().wait()
        return True

    reader = reader_of(lookupd, topic, channel, handle)
    run(timeout=3600)
    assert len(sent) == 2
    assert time.monotonic() - sent[1] < PATIENCE
    assert reader.stats.in_flight >= 1
    # What it began is over: the loop can be used by whoever wants to clean up.
    reader.close()
    others = asyncio.all_tasks(loop)
    for task in others:
        task.cancel()
    loop.run_until_complete(asyncio.wait(others))


def test_a_signal_does_not_wait_longer_than_the_timeout(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, loop: asyncio.AbstractEventLoop
) -> None:
    publish(nsqd_pair, topic, [b"message"])

    def handle(message: Any) -> None:
        message.enable_async()
        loop.call_soon(send, signal.SIGTERM)

    reader = reader_of(lookupd, topic, channel, handle)
    started = time.monotonic()
    run(timeout=0.5)
    assert time.monotonic() - started < PATIENCE
    assert reader.stats.received >= 1
    assert reader.conns == {} or all(conn.closed() for conn in reader.conns.values())


def test_readers_of_another_loop_are_left_alone(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, loop: asyncio.AbstractEventLoop
) -> None:
    """Another thread's, or of an asyncio.run() that is over: they cannot be stopped from here."""
    others: list[DedupeReader] = []

    async def elsewhere() -> None:
        others.append(reader_of(lookupd, topic, channel, lambda _: True))
        await eventually_async(lambda: len(others[0].conns) == 2 or not lookupd.lookup(topic))

    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    with asyncio.Runner() as another:
        another.run(elsewhere())
        asyncio.set_event_loop(loop)
        ours = reader_of(lookupd, topic, channel, lambda _: True)
        loop.call_later(0.05, send, signal.SIGTERM)
        run(timeout=5)
        assert ours not in live_readers()
        assert others[0] in live_readers()
        others[0].close()
        asyncio.set_event_loop(loop)


def test_a_reader_that_never_found_its_nsqd_stops_like_any_other(
    nsqd: Nsqd, topic: str, channel: str, loop: asyncio.AbstractEventLoop
) -> None:
    nsqd.kill()
    reader = DedupeReader(topic, channel, lambda _: True, nsqd_tcp_addresses=nsqd.tcp_address, key=BODY)
    loop.call_later(0.1, send, signal.SIGTERM)
    started = time.monotonic()
    run(timeout=3600)
    assert time.monotonic() - started < PATIENCE
    assert reader.connection_attempts
    assert reader not in live_readers()


def test_without_readers_it_waits_for_the_signal(loop: asyncio.AbstractEventLoop) -> None:
    turns: list[bool] = []
    loop.call_soon(turns.append, True)
    loop.call_later(0.05, send, signal.SIGTERM)
    run()
    assert turns == [True]


def test_afterwards_signals_do_what_they_did_before(loop: asyncio.AbstractEventLoop) -> None:
    def handle(number: int, frame: object) -> None:
        raise AssertionError

    numbers = signal.SIGTERM, signal.SIGINT
    stock = [signal.getsignal(number) for number in numbers]
    try:
        for handlers in ((handle, handle), (signal.SIG_IGN, signal.SIG_DFL)):
            for number, handler in zip(numbers, handlers, strict=True):
                signal.signal(number, handler)
            loop.call_soon(send, signal.SIGTERM)
            run()
            assert tuple(signal.getsignal(number) for number in numbers) == handlers
        # What the event loop had for it is not to be had again; it must not be taken for a handler that does nothing.
        loop.add_signal_handler(signal.SIGTERM, handle)
        loop.call_soon(send, signal.SIGINT)
        run()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in zip(numbers, stock, strict=True):
            signal.signal(number, handler)


def test_a_timeout_that_is_none_is_refused_before_anything_runs(loop: asyncio.AbstractEventLoop) -> None:
    for wrong in (-1, None, float("nan"), "30"):
        with pytest.raises(ConfigError, match=r"^timeout="):
            run(timeout=wrong)  # type: ignore[arg-type]
    assert not loop.is_running()


def test_a_consumer_process_drains_on_sigterm_and_exits_with_0(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, journal: Journal
) -> None:
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    messages = bodies(1000)
    publish(nsqd_pair, topic, messages)
    log = journal.path.with_suffix(".log")
    with consumer_process(journal, topic, channel, lookupd, free=300) as process:
        eventually(lambda: len(journal.facts("done")) == 300 < len(journal.facts("start")), PATIENCE)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: "stopping: messages in flight have" in log.read_text())
        assert process.poll() is None, "handlers are running"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE) == 0
    assert journal.facts("stopped") == [["0"]]
    done = journal.bodies("done")
    assert sorted(journal.bodies("start")) == sorted(done)
    assert 300 < len(done) == len(set(done)) < 1000
    eventually(lambda: told(nsqd_pair, topic, channel, "in_flight_count") == [0, 0])
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]


def test_a_consumer_process_that_hangs_ends_on_the_second_sigterm(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, journal: Journal
) -> None:
    publish(nsqd_pair, topic, [b"message"])
    log = journal.path.with_suffix(".log")
    with consumer_process(journal, topic, channel, lookupd, mode="hang", timeout=3600) as process:
        eventually(lambda: journal.facts("start"), PATIENCE)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: "have 3600 seconds" in log.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert "Traceback" not in log.read_text()
    assert "destroyed" not in log.read_text()


def test_an_idle_consumer_process_ends_at_once(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, journal: Journal
) -> None:
    """nsq.run() notices a signal only when something else wakes its loop."""
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    with consumer_process(journal, topic, channel, lookupd, lookupd_poll_interval=60) as process:
        eventually(lambda: told(nsqd_pair, topic, channel, "client_count") == [1, 1], PATIENCE)
        process.send_signal(signal.SIGTERM)
        # Sooner than the next poll or the next heartbeat, after 60 and 30 s, could have woken it.
        assert process.wait(20) == 0
    assert journal.facts("stopped") == [["0"]]
