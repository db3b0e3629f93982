"""Stopping: gracefully, at once, and at awkward moments. What is stopped stays silent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from consumers import (
    KINDS,
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
    told,
)
from servers import Pair, eventually, eventually_async

from nsqdedupe import BODY, DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

SILENCE = 20.0
"""Seconds: longer than pynsq takes to connect again (15), to poll (1 here), to redistribute RDY (5)."""


def test_a_stopped_reader_keeps_silent(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    """Stopped under load, it lets go of all it has, and nothing reaches it or comes of it again.

    Two readers: one finds its nsqds through nsqlookupd, one is told where they are.
    """
    found, given = f"{channel}-found", f"{channel}-given"
    servers = (*nsqd_pair, lookupd)
    for nsqd in nsqd_pair:
        for one in (found, given):
            nsqd.create_channel(topic, one)
    publish(nsqd_pair, topic, bodies(5000))
    seen = Seen()

    def all_told(counter: str) -> set[int]:
        return {count for one in (found, given) for count in told(nsqd_pair, topic, one, counter)}

    async def main() -> None:
        gates = Gate(free=300), Gate(free=300)
        handlers = [gated(seen.handle, gate) for gate in gates]
        async with (
            consuming(topic, found, handlers[0], lookupd, max_in_flight=100) as first,
            consuming(topic, given, handlers[1], nsqd_pair, max_in_flight=100) as second,
        ):
            readers = (first, second)
            await eventually_async(lambda: all(gate.waiting for gate in gates), PATIENCE)
            await eventually_async(lambda: all(len(reader.conns) == 2 for reader in readers), PATIENCE)
            stopping = [asyncio.ensure_future(reader.stop(PATIENCE)) for reader in readers]
            for reader in readers:
                conns = list(reader.conns.values())
                await eventually_async(lambda conns=conns: all(conn.said_goodbye for conn in conns))
            for gate in gates:
                gate.open()
            assert await asyncio.gather(*stopping) == [0, 0]
            for reader in readers:
                at_rest(reader)
                assert 300 < reader.stats.handled < 5000
            await eventually_async(lambda: all_told("client_count") == {0})
            await eventually_async(lambda: all_told("in_flight_count") == {0})
            before = len(seen.runs), [reader.stats for reader in readers]
            logs = [server.log_path.stat().st_size for server in servers]
            await asyncio.sleep(SILENCE)
            assert all_told("client_count") == {0}
            assert (len(seen.runs), [reader.stats for reader in readers]) == before
            said = [
                line
                for server, start in zip(servers, logs, strict=True)
                for line in server.log_path.read_bytes()[start:].decode().splitlines()
                # Our own question, and what nsqds do with nsqlookupd and their disks.
                if not any(word in line.lower() for word in ("/stats", "ping", "diskqueue"))
            ]
            assert said == []

    on_loop(main())
    assert all_told("timeout_count") == {0}
    assert set(seen.handled.values()) <= {1, 2}, "once for each channel"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stopped_under_load_is_finished_by_the_next_reader(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, kind: str
) -> None:
    """Ten readers after each other, on one store: nothing times out, and nothing is handled twice."""
    messages = bodies(4000)
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    publish(nsqd_pair, topic, messages)
    seen = Seen()

    async def main() -> None:
        store: Any = None
        handler = KINDS[kind](seen.handle, 0.0005 if kind == "plain" else 0.005)
        for _ in range(10):
            before = len(seen.handled)
            async with consuming(topic, channel, handler, lookupd, store=store, max_in_flight=200) as reader:
                store = reader.store
                await eventually_async(lambda before=before: len(seen.handled) >= min(before + 200, 4000), PATIENCE)
                assert await reader.stop(30) == 0
                at_rest(reader)
            # What it wrote last has left this process, and reaches nsqd in a moment.
            await eventually_async(lambda: told(nsqd_pair, topic, channel, "in_flight_count") == [0, 0])
        async with consuming(topic, channel, handler, lookupd, store=store, max_in_flight=1000):
            await eventually_async(lambda: len(seen.handled) == 4000, PATIENCE)
            await nothing_left(nsqd_pair, topic, channel)

    on_loop(main())
    seen.once_each(messages)
    assert told(nsqd_pair, topic, channel, "timeout_count") == [0, 0]


def test_stop_says_how_many_were_left(nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str) -> None:
    publish(nsqd_pair, topic, bodies(3))
    started: list[Any] = []

    async def handle(message: Any) -> bool:
        started.append(message)
        await asyncio.Event().wait()
        return True

    async def main() -> None:
        async with consuming(topic, channel, handle, lookupd) as reader:
            await eventually_async(lambda: len(started) == 3 and reader.stats.standbys == 3, PATIENCE)
            first, second = await asyncio.gather(reader.stop(0.2), reader.stop(30))
            assert first == second == 6, "three messages run, and their other copies wait for them"
            await eventually_async(lambda: reader.stats.in_flight == 0 or not reader.conns)
            assert await reader.stop(1) == 6

    on_loop(main())
    assert told(nsqd_pair, topic, channel, "in_flight_count") == [3, 3], "nsqd has them still, until they time out"


def test_what_is_answered_while_stopping_is_not_left(nsqd: Nsqd, topic: str, channel: str) -> None:
    nsqd.create_channel(topic, channel)
    publish([nsqd], topic, bodies(40))
    kept: list[Any] = []

    def handle(message: Any) -> None:
        message.enable_async()
        kept.append(message)

    async def main() -> None:
        options = {"requeue_delay": 600, "max_in_flight": 100}
        async with consuming(topic, channel, handle, [nsqd], **options) as reader:
            await eventually_async(lambda: len(kept) == 40)
            stopping = asyncio.ensure_future(reader.stop(PATIENCE))
            await eventually_async(lambda: all(conn.said_goodbye for conn in reader.conns.values()))
            assert not stopping.done()
            for number, message in enumerate(kept):
                message.finish() if number % 2 else message.requeue()
            assert await stopping == 0
            assert (reader.stats.handled, reader.stats.failed) == (20, 20)

    on_loop(main())
    eventually(lambda: told([nsqd], topic, channel, "deferred_count") == [20])
    eventually(lambda: told([nsqd], topic, channel, "in_flight_count") == [0])


def test_a_handler_may_stop_its_reader(nsqd: Nsqd, topic: str, channel: str) -> None:
    publish([nsqd], topic, bodies(100))
    stopping: list[asyncio.Task[int]] = []

    async def main() -> None:
        def handle(message: Any) -> bool:
            if message.body == b"50-":
                stopping.append(asyncio.ensure_future(reader.stop()))
            return True

        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: stopping)
            assert await stopping[0] == 0

    on_loop(main())
    eventually(lambda: told([nsqd], topic, channel, "in_flight_count") == [0])


@pytest.mark.parametrize("end", ["close", "stop"])
def test_it_may_be_ended_before_it_began(nsqd: Nsqd, topic: str, channel: str, end: str) -> None:
    nsqd.create_channel(topic, channel)

    async def main() -> None:
        reader = DedupeReader(topic, channel, lambda _: True, nsqd_tcp_addresses=nsqd.tcp_address, key=BODY)
        if end == "stop":
            assert await reader.stop(1) == 0
        else:
            reader.close()
        reader.close()
        await asyncio.sleep(0.1)
        assert reader.conns == {}
        assert await reader.stop(1) == 0

    on_loop(main())
    eventually(lambda: told([nsqd], topic, channel, "client_count") == [0])
    assert "V2" not in nsqd.log_path.read_text(), "it connected"


@contextlib.contextmanager
def listener() -> Iterator[socket.socket]:
    """Something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.mark.parametrize("end", ["close", "stop"])
def test_it_may_be_ended_while_it_connects(topic: str, channel: str, end: str) -> None:
    async def main(server: socket.socket) -> None:
        address = "127.0.0.1:{1}".format(*server.getsockname())
        reader = DedupeReader(topic, channel, lambda _: True, nsqd_tcp_addresses=[address], key=BODY)
        peer, _ = await asyncio.get_running_loop().sock_accept(server)
        with peer:
            if end == "stop":
                assert await reader.stop(1) == 0
            else:
                reader.close()
            reader.close()
            peer.setblocking(False)
            data = b"?"
            while data:
                data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(peer, 4096), PATIENCE)
        assert reader.conns == {}

    with listener() as server:
        on_loop(main(server))


def test_a_connection_that_is_ready_too_late_is_closed(nsqd: Nsqd, topic: str, channel: str) -> None:
    nsqd.create_channel(topic, channel)

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, [nsqd]) as reader:
            await eventually_async(lambda: reader.conns)
            (conn,) = reader.conns.values()
        # As if it had been negotiating until now.
        reader._on_connection_ready(conn)
        assert reader.conns == {}
        assert reader.connect_to_nsqd("127.0.0.1", nsqd.tcp_port) is None

    on_loop(main())
    eventually(lambda: told([nsqd], topic, channel, "client_count") == [0])


def test_close_answers_what_was_handled_and_starts_no_handler(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    publish(nsqd_pair, topic, bodies(100))
    seen = Seen()

    async def main() -> None:
        def handle(message: Any) -> bool:
            seen.handle(message)
            if len(seen.runs) == 50:
                reader.close()
            return True

        async with consuming(topic, channel, handle, lookupd) as reader:
            await eventually_async(lambda: len(seen.runs) >= 50)
            await eventually_async(lambda: not reader.conns)
            stats = reader.stats
            assert (stats.handled, stats.in_flight) == (49, 0)
            assert stats.received == stats.handled + stats.duplicates + stats.unanswered
            finished = stats.handled + stats.duplicates
        eventually(lambda: sum(told(nsqd_pair, topic, channel, "message_count")) - left() == finished)

    def left() -> int:
        return sum(nsqd.unfinished(topic, channel) for nsqd in nsqd_pair)

    on_loop(main())
    assert len(seen.runs) == 50


def test_a_coroutine_that_outlives_the_close_is_not_handled_again(nsqd: Nsqd, topic: str, channel: str) -> None:
    publish([nsqd], topic, [b"message"])
    seen = Seen()

    async def main() -> None:
        gate = asyncio.Event()

        async def handle(message: Any) -> bool:
            seen.run(message)
            await gate.wait()
            return seen.handle(message)

        async with consuming(topic, channel, handle, [nsqd], msg_timeout=1) as reader:
            await eventually_async(lambda: seen.runs)
        gate.set()
        await eventually_async(lambda: seen.handled)
        async with consuming(topic, channel, handle, [nsqd], store=reader.store) as reader:
            await nothing_left([nsqd], topic, channel)
            assert reader.stats.duplicates == 1

    on_loop(main())
    seen.once_each([b"message"])


@pytest.mark.parametrize("closed", [False, True], ids=["stopped", "closed"])
def test_close_works_when_the_loop_has_ended(nsqd: Nsqd, topic: str, channel: str, closed: bool) -> None:
    publish([nsqd], topic, [b"message"])
    readers: list[DedupeReader] = []

    async def main() -> None:
        options = {"nsqd_tcp_addresses": nsqd.tcp_address, "key": BODY}
        readers.append(DedupeReader(topic, channel, lambda message: message.enable_async(), **options))
        await eventually_async(lambda: readers[0].stats.received)

    with asyncio.Runner() as runner:
        runner.run(main())
        if closed:
            runner.close()
        readers[0].close()
        readers[0].close()
    eventually(lambda: told([nsqd], topic, channel, "client_count") == [0])


@pytest.mark.parametrize("order", ["stop, then close", "close, then stop"])
def test_close_ends_a_stop_that_waits_for_handlers(nsqd: Nsqd, topic: str, channel: str, order: str) -> None:
    publish([nsqd], topic, [b"message"])
    started: list[Any] = []

    async def handle(message: Any) -> bool:
        started.append(message)
        await asyncio.Event().wait()
        return True

    async def main() -> None:
        async with consuming(topic, channel, handle, [nsqd]) as reader:
            await eventually_async(lambda: started)
            if order == "stop, then close":
                stopping = asyncio.ensure_future(reader.stop(3600))
                await eventually_async(lambda: all(conn.said_goodbye for conn in reader.conns.values()))
                assert not stopping.done()
                reader.close()
            else:
                reader.close()
                stopping = asyncio.ensure_future(reader.stop(3600))
            assert await asyncio.wait_for(stopping, PATIENCE) == 1

    on_loop(main())


def test_a_pause_before_the_close_leaves_no_timer(nsqd: Nsqd, topic: str, channel: str) -> None:
    """pynsq tries again in 15 s to give the RDY that it could not give in a pause."""
    publish([nsqd], topic, bodies(10))

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, [nsqd], max_in_flight=10) as reader:
            await eventually_async(lambda: reader.stats.handled == 10)
            reader.set_max_in_flight(0)
            (conn,) = reader.conns.values()
            reader._send_rdy(conn, 5)
            assert conn.rdy_timeout is not None
            reader.close()
            assert conn.rdy_timeout is None

    on_loop(main())


def test_a_close_is_no_error(nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, [nsqd]) as reader:
            await eventually_async(lambda: reader.conns)
            await reader.stop()

    on_loop(main())
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
