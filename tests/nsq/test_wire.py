"""Bytes on the wire: cut anywhere, large, hostile; and connections that end or come twice."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import struct
import time
from collections import Counter
from typing import Any

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
    plain,
    publish,
    told,
)
from fake_nsqd import ERROR, IDENTITY, MESSAGE, RESPONSE, FakeNsqd, connected, frame, message, message_id
from servers import Pair, eventually, eventually_async

from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

HEARTBEAT = frame(RESPONSE, b"_heartbeat_")


def test_frames_may_be_cut_at_every_byte() -> None:
    """Two messages with a heartbeat between them, in two parts, cut at every place; then byte by byte."""
    seen = Seen()

    def three(number: int) -> bytes:
        first, second = (message(number + i, b"body %d" % (number + i)) for i in range(2))
        return first + HEARTBEAT + second

    cuts = range(1, len(three(100)))

    async def main() -> None:
        async with connected(seen.handle) as (fake, reader, conn):
            for cut in cuts:
                data = three(100 + 2 * cut)
                await fake.send_apart(conn, data[:cut], data[cut:])
            last = three(900)
            await fake.send_apart(conn, *(last[i : i + 1] for i in range(len(last))))
            expected = [number for cut in cuts for number in (100 + 2 * cut, 101 + 2 * cut)] + [900, 901]
            await eventually_async(lambda: len(fake.answers(b"FIN")) == len(expected))
            assert fake.answers(b"FIN") == [message_id(number) for number in expected]
            assert [run.body for run in seen.runs] == [b"body %d" % number for number in expected]
            assert fake.commands.count(b"NOP") == len(cuts) + 1
            at_rest(reader)
            assert list(reader.conns.values()) == [conn]

    on_loop(main())


@pytest.mark.parametrize("alone", [False, True], ids=["whole-head", "size-alone"])
@pytest.mark.parametrize("size", [-(1 << 31), -1, 0, 3, (100 << 20) + 1, (1 << 31) - 1])
def test_a_size_that_is_none_ends_the_connection_and_not_the_reader(
    size: int,
    alone: bool,
    lookupd: Nsqlookupd,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = Seen()
    head = struct.pack(">i", size) + (b"" if alone else struct.pack(">i", MESSAGE) + bytes(40))

    async def main() -> None:
        # With an nsqlookupd that has not heard of it, what was given must be connected to again all the same.
        options = {"lookupd_http_addresses": [lookupd.http_address]}
        async with connected(seen.handle, **options) as (fake, reader, conn):
            await fake.send(message(1, b"before"))
            await eventually_async(lambda: fake.answers(b"FIN") == [message_id(1)])
            await fake.send(head)
            await eventually_async(conn.closed)
            await eventually_async(lambda: fake.subscribed == 2)
            await eventually_async(lambda: reader.conns and fake.commands[-1] == b"RDY 1")
            await fake.send(message(2, b"after"))
            await eventually_async(lambda: fake.answers(b"FIN") == [message_id(1), message_id(2)])
            at_rest(reader)

    on_loop(main())
    seen.once_each([b"before", b"after"])
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert f"frame of {size} bytes" in errors[0]


@pytest.mark.parametrize("size", [4, 14, 29])
def test_a_message_shorter_than_its_head_ends_the_connection(size: int, caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    short = frame(MESSAGE, bytes(size - 4))

    async def main() -> None:
        async with connected(seen.handle) as (fake, reader, conn):
            await fake.send(short + message(1, b"never"))
            await eventually_async(conn.closed)
            await eventually_async(lambda: not reader.conns)
            assert reader.stats.received == 0

    on_loop(main())
    assert f"message frame of {size} bytes: shorter" in caplog.text
    assert seen.runs == []


def test_an_empty_body_and_unknown_frames_are_none_of_these(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle, key=lambda message: message.id) as (fake, reader, conn):
            await fake.send(message(1, b"") + frame(7, b"from the future") + frame(RESPONSE, b"") + message(2, b"x"))
            await eventually_async(lambda: len(fake.answers(b"FIN")) == 2)
            assert not conn.closed()
            assert reader.stats.handled == 2

    on_loop(main())
    assert [run.body for run in seen.runs] == [b"", b"x"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_attempts_are_unsigned() -> None:
    """Where attempts decide, after 32767 deliveries a message is given up and not tried for ever."""
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle, store=False, max_tries=5) as (fake, reader, _):
            await fake.send(message(1, b"old", attempts=40_000))
            await eventually_async(lambda: fake.answers(b"FIN"))
            assert reader.stats.given_up == 1

    on_loop(main())
    assert seen.runs == []


def test_an_nsqd_that_negotiates_nothing_has_its_defaults() -> None:
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle, identity={}) as (fake, reader, conn):
            assert conn.source.msg_timeout == 60
            await fake.send(message(1, b"body"))
            await eventually_async(lambda: fake.answers(b"FIN"))
            assert reader.stats.handled == 1

    on_loop(main())


def test_refused_answers_are_counted_and_cost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle) as (fake, reader, conn):
            for word in (b"FIN", b"REQ", b"TOUCH", b"FIN"):
                await fake.send(frame(ERROR, b"E_" + word + b"_FAILED " + word + b" x failed ID not in flight"))
            await fake.send(message(1, b"body"))
            await eventually_async(lambda: fake.answers(b"FIN"))
            assert reader.stats.fin_failed == 2
            assert not conn.closed()
            await fake.send(frame(ERROR, b"E_INVALID what was that"))
            await eventually_async(lambda: "E_INVALID" in caplog.text)

    on_loop(main())
    refused = [record for record in caplog.records if "_FAILED" in record.getMessage()]
    assert [record.levelno for record in refused] == [logging.INFO] * 4
    assert [record.levelno for record in caplog.records if "E_INVALID" in record.getMessage()] == [logging.ERROR]


def test_a_late_message_after_the_goodbye_goes_back_at_once() -> None:
    """nsqd may send one more after it agreed to send none."""
    seen = Seen()

    async def main() -> None:
        gate = Gate()
        async with connected(gated(seen.handle, gate)) as (fake, reader, conn):
            await fake.send(message(1, b"in hand"))
            await eventually_async(lambda: reader.stats.in_flight == 1)
            stopping = asyncio.ensure_future(reader.stop(PATIENCE))
            await eventually_async(lambda: conn.said_goodbye)
            await fake.send(message(2, b"late"))
            await eventually_async(lambda: b"REQ " + message_id(2) + b" 0" in fake.commands)
            gate.open()
            assert await stopping == 0
            assert (reader.stats.handled, reader.stats.deferred) == (1, 1)
            await eventually_async(lambda: fake.answers(b"FIN") == [message_id(1)])

    on_loop(main())
    seen.once_each([b"in hand"])


def test_an_nsqd_that_hangs_up_instead_of_agreeing_to_the_goodbye_is_not_waited_for() -> None:
    """Its messages cannot be answered any more; their handlers are waited for all the same."""
    kept: list[Any] = []

    def handle(message: Any) -> None:
        message.enable_async()
        kept.append(message)

    async def main() -> None:
        async with connected(handle) as (fake, reader, conn):
            await fake.send(message(1, b"in hand"))
            await eventually_async(lambda: kept)
            fake.deaf = True
            stopping = asyncio.ensure_future(reader.stop(PATIENCE))
            await eventually_async(lambda: conn._goodbye is not None)
            assert not conn.said_goodbye
            fake.writer.close()
            await eventually_async(lambda: conn.said_goodbye)
            assert not stopping.done()
            kept[0].finish()
            assert await asyncio.wait_for(stopping, PATIENCE) == 0
            assert (reader.stats.unanswered, reader.stats.handled) == (1, 0)

    on_loop(main())


def test_what_cannot_be_written_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        @staticmethod
        def encode(data: bytes) -> bytes:
            raise OSError("the compressor is broken")

    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle) as (fake, reader, conn):
            conn.encoder = Broken()
            await fake.send(message(1, b"body"))
            await eventually_async(conn.closed)
            await eventually_async(lambda: not reader.conns)
            assert fake.answers(b"FIN") == []

    on_loop(main())
    seen.once_each([b"body"])
    assert "failed to write" in caplog.text


def test_bodies_of_a_mebibyte_come_whole(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    large = [bytes([number]) * ((1 << 20) - number) for number in range(16)]
    for body in large:
        for nsqd in nsqd_pair:
            nsqd.publish(topic, body)
    digests: Counter[bytes] = Counter()

    async def main() -> None:
        def handle(message: Any) -> bool:
            digests[hashlib.sha256(message.body).digest()] += 1
            return True

        async with consuming(topic, channel, handle, lookupd) as reader:
            await eventually_async(lambda: len(digests) == 16, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)
            assert (reader.stats.handled, reader.stats.duplicates) == (16, 16)

    on_loop(main())
    assert digests == Counter(hashlib.sha256(body).digest() for body in large)
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]


def test_reading_waits_for_slow_handlers_and_goes_on(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqdedupe.runner.BACKLOG", 500_000)
    messages = bodies(300, size=10_000)
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    seen = Seen()
    waiting: list[int] = []

    async def main() -> None:
        def work(message: Any) -> bool:
            waiting.append(len(reader._DedupeReader__runner._stalled))
            return seen.handle(message)

        async with consuming(topic, channel, plain(work, 0.009), lookupd, max_in_flight=400) as reader:
            # Both at once: else one could be done before the other begins.
            await eventually_async(lambda: len(reader.conns) == 2, PATIENCE)
            for nsqd, half in zip(nsqd_pair, (messages[:150], messages[150:]), strict=True):
                for start in range(0, 150, 50):
                    nsqd.mpublish(topic, half[start : start + 50])
            await eventually_async(lambda: len(seen.handled) == 300, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)
            at_rest(reader)

    on_loop(main())
    seen.once_each(messages)
    assert max(waiting) == 2, "reading never paused: this tests nothing"
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]


def test_a_connection_that_ends_while_its_reading_waits_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it had in hand is left to nsqd."""
    monkeypatch.setattr("nsqdedupe.runner.BACKLOG", 300_000)
    runs: list[bytes] = []
    frames = b"".join(message(number, bytes(10_000)) for number in range(200))

    async def main() -> None:
        def handle(message: Any) -> bool:
            time.sleep(0.009)
            runs.append(message.id)
            if reader._DedupeReader__runner._stalled:
                conn.close()
            return True

        async with connected(handle, key=lambda message: message.id) as (fake, reader, conn):
            sending = asyncio.ensure_future(fake.send(frames))
            await eventually_async(lambda: not reader.conns, PATIENCE)
            with contextlib.suppress(ConnectionError):
                await sending
            await eventually_async(lambda: not reader.stats.in_flight)
            assert reader._DedupeReader__runner._stalled == []
            assert reader.stats.unanswered > 0

    on_loop(main())
    assert 0 < len(runs) < 200


def test_an_nsqd_is_not_connected_to_twice(nsqd: Nsqd, topic: str, channel: str) -> None:
    """pynsq may do so when a connect takes longer than 10 s, and then forgets the one that lives."""
    messages = bodies(500)
    nsqd.create_channel(topic, channel)
    seen = Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, [nsqd]) as reader:
            first = reader.connect_to_nsqd("127.0.0.1", nsqd.tcp_port)
            assert first is not None
            for _ in range(2):
                reader.connection_attempts.clear()
                assert reader.connect_to_nsqd("127.0.0.1", nsqd.tcp_port) is None
                await eventually_async(lambda: list(reader.conns.values()) == [first])
            publish([nsqd], topic, messages)
            await eventually_async(lambda: len(seen.handled) == 500)
            await nothing_left([nsqd], topic, channel)
            assert told([nsqd], topic, channel, "client_count") == [1]
            at_rest(reader)

    on_loop(main())
    seen.once_each(messages)
    eventually(lambda: told([nsqd], topic, channel, "client_count") == [0])


def test_an_nsqd_that_is_down_is_no_end(nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture) -> None:
    nsqd.create_channel(topic, channel)
    nsqd.kill()

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, [nsqd]) as reader:
            await eventually_async(lambda: reader.connection_attempts and not reader._DedupeReader__dialer.connecting)
            assert reader.conns == {}

    on_loop(main())
    assert "Traceback" not in caplog.text


def test_it_takes_the_identity_that_nsqd_agreed_to() -> None:
    assert FakeNsqd().identity == IDENTITY

    async def main() -> None:
        async with connected(lambda _: True, identity={**IDENTITY, "msg_timeout": 2500}) as (_, reader, conn):
            assert conn.source.msg_timeout == 2.5
            assert conn.source.lease == 4.5
            assert reader.stats.nsqds == {conn.id: dict.fromkeys(reader.stats.nsqds[conn.id], 0)}

    on_loop(main())
