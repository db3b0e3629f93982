"""Handlers that take their time: longer than nsqd's patience, or so long that the event loop must breathe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from consumers import (
    PATIENCE,
    Kind,
    Seen,
    at_rest,
    bodies,
    consuming,
    coroutine,
    coroutine_at_once,
    nothing_left,
    on_loop,
    plain,
    publish,
    told,
    watched_channel,
    watched_pair,
)
from servers import Pair, eventually_async

from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd


def touching(work: Callable[[Any], bool], pause: float) -> Callable[[Any], None]:
    """A handler that answers later, and touches its message until then."""

    def handle(message: Any) -> None:
        message.enable_async()
        ends = time.monotonic() + pause
        look(message, ends)

    def look(message: Any, ends: float) -> None:
        if time.monotonic() < ends:
            message.touch()
            asyncio.get_running_loop().call_later(0.1, look, message, ends)
        else:
            work(message)
            message.finish()

    return handle


# A lease is nsqd's timeout and 2 s: what is longer than that, somebody must say that it still runs. Who touches
# has a timeout that a busy machine does not exceed between two touches.
SLOW = {
    "plain": (plain, 1.4, 3, 1),
    "coroutine, within the lease": (coroutine, 2.0, 5, 1),
    "coroutine, beyond the lease": (coroutine, 5.0, 5, 1),
    "enable_async, beyond the lease, touched": (touching, 5.0, 5, 2),
}


@pytest.mark.parametrize(("kind", "pause", "count", "msg_timeout"), SLOW.values(), ids=SLOW)
def test_a_handler_slower_than_the_message_timeout_runs_once(
    nsqd_pair: Pair,
    lookupd: Nsqlookupd,
    topic: str,
    channel: str,
    kind: Any,
    pause: float,
    count: int,
    msg_timeout: int,
) -> None:
    watched_pair(nsqd_pair, lookupd, topic, channel)
    messages = bodies(count)
    publish(nsqd_pair, topic, messages)
    seen = Seen()

    async def main() -> None:
        handler = kind(seen.handle, pause)
        async with consuming(topic, channel, handler, lookupd, msg_timeout=msg_timeout) as reader:
            await eventually_async(lambda: len(seen.handled) == count, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())
    seen.once_each(messages)
    # It is the longer way round: nsqd did lose its patience, except with who was touched.
    assert (sum(told(nsqd_pair, topic, channel, "timeout_count")) > 0) == (kind is not touching)


@pytest.mark.nsqd_flags("--msg-timeout=1s")
def test_an_answer_after_the_message_timeout_and_within_the_lease_is_the_only_one_asked_for(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a busy machine may need longer than the lease to get to the answers. Not more: the copies that stand by
    # are sent back for the rest of it.
    monkeypatch.setattr("nsqdedupe.delivery.LEASE_MARGIN", 4.0)
    watched_pair(nsqd_pair, lookupd, topic, channel)
    messages = bodies(5)
    publish(nsqd_pair, topic, messages)
    kept: list[Any] = []
    seen = Seen()

    def handle(message: Any) -> None:
        message.enable_async()
        kept.append(message)

    async def main() -> None:
        async with consuming(topic, channel, handle, lookupd) as reader:
            await eventually_async(lambda: len(kept) == 5, PATIENCE)
            await eventually_async(lambda: sum(told(nsqd_pair, topic, channel, "timeout_count")) > 0, PATIENCE)
            for message in kept:
                seen.handle(message)
                message.finish()
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())
    seen.once_each(messages)


@pytest.mark.nsqd_flags("--msg-timeout=1s")
def test_who_answers_too_late_is_heard_all_the_same(nsqd: Nsqd, topic: str, channel: str) -> None:
    """Nobody could know that it would answer, so the message was handled again. Its success still counts."""
    watched_channel(nsqd, topic, channel)
    publish([nsqd], topic, [b"message"])
    kept: list[Any] = []
    seen = Seen()

    def handle(message: Any) -> None:
        message.enable_async()
        kept.append(message)
        seen.run(message)

    async def main() -> None:
        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: len(kept) == 2, PATIENCE)
            first, second = kept
            assert first.id == second.id
            first.finish()
            await eventually_async(lambda: reader.stats.late_confirms == 1)
            assert reader.stats.handled == 0
            second.finish()
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)
            assert reader.stats.handled == 1
            assert reader.stats.takeovers + reader.stats.unanswered >= 1

    on_loop(main())
    assert len(seen.runs) == 2
    assert [run.tries for run in seen.runs] == [0, 0], "a message that nobody answered has not failed"


@pytest.mark.nsqd_flags("--msg-timeout=1s")
def test_what_waited_too_long_for_its_turn_is_left_to_its_next_delivery(nsqd: Nsqd, topic: str, channel: str) -> None:
    watched_channel(nsqd, topic, channel)
    messages = bodies(6)
    publish([nsqd], topic, messages)
    seen = Seen()

    def handle(message: Any) -> bool:
        if len(seen.runs) == 1:
            # The second has company: RDY was 1 until the first was there.
            time.sleep(1.3)
        return seen.handle(message)

    async def main() -> None:
        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: len(seen.handled) == 6, PATIENCE)
            await nothing_left([nsqd], topic, channel)
            at_rest(reader)
            assert reader.stats.unanswered >= 4
            assert reader.stats.handled == 6

    on_loop(main())
    seen.once_each(messages)
    assert len(seen.runs) == 6


@pytest.mark.parametrize("kind", [plain, coroutine_at_once])
def test_handlers_of_5_ms_leave_the_loop_its_turns(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, kind: Kind
) -> None:
    for nsqd, messages in zip(nsqd_pair, (bodies(300), bodies(300, start=300)), strict=True):
        nsqd.create_channel(topic, channel)
        publish([nsqd], topic, messages)
    runs_of_a_turn: list[int] = [0]

    def work(message: Any) -> bool:
        time.sleep(0.005)
        runs_of_a_turn[-1] += 1
        return True

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def probe() -> None:
            runs_of_a_turn.append(0)
            if sum(runs_of_a_turn) < 600:
                loop.call_soon(probe)

        async with consuming(topic, channel, kind(work, 0.0), lookupd, max_in_flight=500) as reader:
            loop.call_soon(probe)
            await eventually_async(lambda: reader.stats.handled == 600, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            assert len(reader.conns) == 2

    on_loop(main())
    # 8 ms of a turn are for handlers, and one more may start: 2 of 5 ms, or 1 where 5 ms take longer. Counted,
    # not timed, so that it does not matter what else the machine does.
    assert max(runs_of_a_turn) <= 2
    assert sum(runs_of_a_turn) == 600


def test_heartbeats_are_answered_while_seconds_of_work_are_queued(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    for nsqd, messages in zip(nsqd_pair, (bodies(250), bodies(250, start=250)), strict=True):
        nsqd.create_channel(topic, channel)
        publish([nsqd], topic, messages)
    beats: list[float] = []

    async def main() -> None:
        handler = plain(lambda _: True, 0.012)
        options = {"max_in_flight": 500, "heartbeat_interval": 2}
        async with consuming(topic, channel, handler, lookupd, **options) as reader:
            reader.heartbeat = lambda _: beats.append(time.monotonic())
            await eventually_async(lambda: len(reader.conns) == 2)
            conns = list(reader.conns.values())
            await eventually_async(lambda: reader.stats.handled == 500, PATIENCE)
            # nsqd hangs up on a client that is silent for two heartbeats; the work takes three.
            assert list(reader.conns.values()) == conns
            assert len(beats) >= 3
            await nothing_left(nsqd_pair, topic, channel)
            assert reader.stats.unanswered == 0

    on_loop(main())
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]
    assert told(nsqd_pair, topic, channel, "requeue_count") == [0, 0]
