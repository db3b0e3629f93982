"""Connections that are lost, and nsqds that come back: how soon, and who is left alone."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest
from consumers import PATIENCE, Seen, at_rest, bodies, consuming, nothing_left, on_loop, publish, told, watched_channel
from fake_nsqd import connected
from listening import listening
from proxy import recording
from servers import Servers, eventually, eventually_async

from nsqdedupe import BODY, DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd
from nsqdedupe.link import Link
from nsqdedupe.pauses import Pauses


def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{holder.getsockname()[1]}"


# -- an nsqd that restarts -----------------------------------------------------------------------


@pytest.mark.parametrize("also", ["", "a lookupd that is down"])
def test_an_nsqd_given_by_address_is_back_within_two_seconds_of_its_return(
    nsqd: Nsqd,
    topic: str,
    channel: str,
    also: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several attempts find nobody, and no pause between two is as long as that."""
    caplog.set_level(logging.INFO)
    options: dict[str, Any] = {"lookupd_http_addresses": nobody()} if also else {}
    before, after, seen = bodies(200), bodies(200, start=200), Seen()
    nsqd.create_channel(topic, channel)
    pauses: list[float] = []
    real = Pauses.next

    def noted(self: Pauses, *, hurry: bool = True) -> float:
        pauses.append(real(self, hurry=hurry))
        return pauses[-1]

    monkeypatch.setattr(Pauses, "next", noted)

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, [nsqd], **options) as reader:
            publish([nsqd], topic, before)
            await eventually_async(lambda: len(seen.handled) == 200)
            await nothing_left([nsqd], topic, channel)
            await asyncio.to_thread(nsqd.kill)
            await eventually_async(lambda: len(pauses) >= 5)
            await asyncio.to_thread(nsqd.start)
            await eventually_async(lambda: reader.conns)
            publish([nsqd], topic, after)
            await eventually_async(lambda: len(seen.handled) == 400)
            at_rest(reader)

    on_loop(main())
    seen.once_each(before + after)
    assert max(pauses) <= 1.5
    assert len([line for line in caplog.messages if "no connection: " in line]) == 1
    assert len([line for line in caplog.messages if "connected again" in line]) == 1


def test_an_nsqd_found_by_lookupd_is_connected_to_again_before_the_next_poll(
    servers: Servers, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    """It is not asked more than once in this test."""
    nsqd = servers.nsqd(lookupds=[lookupd])
    nsqd.create_channel(topic, channel)
    messages, seen = bodies(100), Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, lookupd, lookupd_poll_interval=3600) as reader:
            await eventually_async(lambda: reader.conns)
            for _ in range(3):
                (conn,) = reader.conns.values()
                conn.stream.close()
                await eventually_async(lambda conn=conn: reader.conns and conn not in reader.conns.values())
            publish([nsqd], topic, messages)
            await eventually_async(lambda: len(seen.handled) == 100)

    on_loop(main())
    seen.once_each(messages)


def test_connections_that_break_in_the_middle_lose_nothing(nsqd: Nsqd, topic: str, channel: str) -> None:
    """Five times under load. What was in flight comes again after the message timeout: this takes some seconds."""
    messages, seen = bodies(5000), Seen()
    watched_channel(nsqd, topic, channel)
    publish([nsqd], topic, messages)

    async def main() -> None:
        async with recording(nsqd) as (proxy,):
            options: dict[str, Any] = {"nsqd_tcp_addresses": proxy.address, "max_in_flight": 100, "msg_timeout": 1}
            async with consuming(topic, channel, seen.handle, (), **options) as reader:
                for cut in range(5):
                    await eventually_async(lambda cut=cut: len(seen.handled) > 500 * (cut + 1))
                    proxy.line.cut()
                    await eventually_async(lambda cut=cut: len(proxy.lines) == cut + 2)
                await eventually_async(lambda: len(seen.handled) == 5000, PATIENCE)
                await nothing_left([nsqd], topic, channel)
                at_rest(reader)

    on_loop(main())
    seen.once_each(messages)


# -- an nsqd that does not do what it should -----------------------------------------------------


def test_an_nsqd_that_hangs_up_at_once_is_not_hammered(pauses: list[float]) -> None:
    """The pauses grow although each attempt connects."""

    async def main() -> None:
        async with connected(lambda _: True) as (fake, reader, _):
            for number in range(2, 13):
                fake.writer.close()
                await eventually_async(lambda number=number: fake.subscribed == number and reader.conns)
                await eventually_async(lambda: next(iter(reader.conns.values())).subscribed)

    on_loop(main())
    assert pauses[:11] == [min(60, 0.1 * 2**number) for number in range(11)]


def test_a_connection_that_stood_begins_with_short_pauses_again(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqdedupe.dialer.STEADY", 0.0)

    async def main() -> None:
        async with connected(lambda _: True) as (fake, reader, _):
            for number in range(2, 6):
                await eventually_async(lambda: next(iter(reader.conns.values())).subscribed)
                fake.writer.close()
                await eventually_async(lambda number=number: fake.subscribed == number and reader.conns)

    on_loop(main())
    assert pauses[:4] == [0.1] * 4


def test_an_nsqd_that_never_answers_is_given_up_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts, and says nothing: pynsq waits for ever, and connects once more beside it."""
    monkeypatch.setattr("nsqdedupe.dialer.NEGOTIATION", 0.1)
    open_now: list[asyncio.StreamWriter] = []
    met: list[bool] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(not open_now)
        open_now.append(writer)
        await reader.read(1 << 16)
        await reader.read()
        open_now.remove(writer)

    async def main() -> None:
        async with listening(serve) as port:
            options: dict[str, Any] = {"nsqd_tcp_addresses": f"127.0.0.1:{port}", "key": BODY, "timeout": 0.1}
            reader = DedupeReader("topic", "channel", lambda _: True, **options)
            await eventually_async(lambda: len(met) >= 3)
            reader.close()
            await eventually_async(lambda: not open_now)

    on_loop(main())
    assert all(met), "two at a time"


def test_a_reader_closed_while_it_connects_leaves_nothing_open() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(writer)
        await reader.read(1 << 16)
        await reader.read()
        met.remove(writer)

    met: list[asyncio.StreamWriter] = []

    async def main() -> None:
        async with listening(serve) as port:
            for turns in range(6):
                for host in ("127.0.0.1", "localhost"):
                    address = f"{host}:{port}"
                    reader = DedupeReader("topic", "channel", lambda _: True, nsqd_tcp_addresses=address, key=BODY)
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    reader.close()
            await eventually_async(lambda: not met)

    on_loop(main())


# -- names and addresses -------------------------------------------------------------------------


def test_an_ipv6_address_will_do(servers: Servers, topic: str, channel: str) -> None:
    nsqd = servers.nsqd("--tcp-address=[::1]:0")
    port = eventually(lambda: int(nsqd.log_path.read_text().split("TCP: listening on [::1]:")[1].split()[0]))
    nsqd.create_channel(topic, channel)
    messages, seen = bodies(100), Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, (), nsqd_tcp_addresses=f"[::1]:{port}") as reader:
            publish([nsqd], topic, messages)
            await eventually_async(lambda: len(seen.handled) == 100)
            assert list(reader.conns) == [f"::1:{port}"]

    on_loop(main())
    seen.once_each(messages)


@pytest.mark.parametrize("first", [socket.AF_INET, socket.AF_INET6])
def test_every_address_of_a_name_is_tried(
    nsqd: Nsqd, topic: str, channel: str, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The name has two addresses, and the nsqd listens on one of them."""
    ask = socket.getaddrinfo

    def resolve(host: str, port: int, *args: int) -> list[Any]:
        if host != "both.example":
            return ask(host, port, *args)
        found = [ask("127.0.0.1", port, *args)[0], ask("::1", port, *args)[0]]
        return sorted(found, key=lambda info: info[0] != first)

    def asked(host: str, port: int, family: int = 0, kind: int = 0, protocol: int = 0, flags: int = 0) -> list[Any]:
        if flags & socket.AI_NUMERICHOST and host == "both.example":
            raise socket.gaierror
        return resolve(host, port, family, kind, protocol, flags)

    monkeypatch.setattr("socket.getaddrinfo", asked)
    seen = Seen()

    async def main() -> None:
        address = f"both.example:{nsqd.tcp_port}"
        async with consuming(topic, channel, seen.handle, (), nsqd_tcp_addresses=address):
            publish([nsqd], topic, [b"body"])
            await eventually_async(lambda: seen.handled)

    on_loop(main())
    seen.once_each([b"body"])


def test_a_name_that_does_not_exist_is_told_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        reader = DedupeReader("topic", "channel", bool, nsqd_tcp_addresses="no-such-host.invalid:4150", key=BODY)
        begun = []
        reader.connect_to_nsqd = lambda *address: (
            begun.append(address) or DedupeReader.connect_to_nsqd(reader, *address)
        )
        await eventually_async(lambda: len(begun) >= 3)
        reader.close()

    on_loop(main())
    (line,) = [line for line in caplog.messages if "no connection: " in line]
    assert "no-such-host.invalid" in line


def test_who_closes_a_connection_on_hearing_that_it_failed_hears_of_its_end_once() -> None:
    async def main() -> None:
        heard = []
        link = Link("\N{SNOWMAN}" * 64, 4150)  # no host can have that name
        link.on("error", lambda conn, error: conn.close())
        link.on("close", lambda conn: heard.append(conn.closed()))
        link.connect()
        await eventually_async(lambda: heard)
        await asyncio.sleep(0)
        assert heard == [True]

    on_loop(main())


def test_an_nsqd_under_two_names_is_told_of_and_nothing_is_handled_twice(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nsqd shares the channel out between the two connections; and this is not another consumer."""
    monkeypatch.setattr("nsqdedupe.neighbours.FIRST_LOOK", 0.0)
    nsqd.create_channel(topic, channel)
    messages, seen = bodies(1000), Seen()
    names = [f"127.0.0.1:{nsqd.tcp_port}", f"localhost:{nsqd.tcp_port}"]

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, (), nsqd_tcp_addresses=names) as reader:
            await eventually_async(lambda: sorted(reader.conns) == sorted(names))
            await eventually_async(lambda: "is the same nsqd as" in caplog.text)
            publish([nsqd], topic, messages)
            await eventually_async(lambda: len(seen.handled) == 1000)
            await nothing_left([nsqd], topic, channel)
            assert told([nsqd], topic, channel, "client_count") == [2]
            assert reader.total_rdy <= reader.max_in_flight
            at_rest(reader)

    on_loop(main())
    seen.once_each(messages)
    assert "other client" not in caplog.text
    assert len([line for line in caplog.messages if "is the same nsqd as" in line]) == 1


# -- hooks of applications -----------------------------------------------------------------------


def test_an_overridden_connect_to_nsqd_is_asked_each_time(nsqd: Nsqd, topic: str, channel: str) -> None:
    """And may decline, or fail: it is asked again."""
    asked: list[tuple[str, int]] = []

    class Choosy(DedupeReader):
        def connect_to_nsqd(self, host: str, port: int) -> Any:
            asked.append((host, port))
            if len(asked) == 1:
                raise OSError("not now")
            return None if len(asked) == 2 else super().connect_to_nsqd(host, port)

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, [nsqd], Choosy) as reader:
            await eventually_async(lambda: reader.conns)
            next(iter(reader.conns.values())).stream.close()
            await eventually_async(lambda: len(asked) == 4 and reader.conns)

    on_loop(main())
    assert set(asked) == {("127.0.0.1", nsqd.tcp_port)}


def test_who_connects_by_hand_is_slowed_down_as_in_pynsq(nsqd: Nsqd, topic: str, channel: str) -> None:
    """And without nsqlookupd, what was connected to by hand is connected to again."""

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, (), nsqd_tcp_addresses=nobody()) as reader:
            first = reader.connect_to_nsqd("127.0.0.1", nsqd.tcp_port)
            assert first is not None
            await eventually_async(lambda: first in reader.conns.values())
            first.stream.close()
            await eventually_async(lambda: first not in reader.conns.values())
            assert reader.connect_to_nsqd("127.0.0.1", nsqd.tcp_port) is None
            await eventually_async(lambda: reader.conns)

    on_loop(main())
