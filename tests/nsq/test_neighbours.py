"""Other consumers of a channel are noticed: an embedded store cannot see what goes to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import nsq
import pytest
from consumers import PATIENCE, Seen, consuming, on_loop
from servers import Pair, eventually_async, silent_ports

from nsqdedupe import BODY, DedupeReader, MemoryStore, Store, Traits
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd
from nsqdedupe.neighbours import Neighbours


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqdedupe.neighbours.FIRST_LOOK", 0.3)
    monkeypatch.setattr("nsqdedupe.neighbours.NEXT_LOOK", 0.05)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each look found."""
    found: list[str] = []
    look = Neighbours._look

    async def noted(self: Neighbours) -> str:
        found.append(await look(self))
        return found[-1]

    monkeypatch.setattr(Neighbours, "_look", noted)
    return found


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "nsqdedupe.neighbours" and record.levelno >= logging.WARNING
    ]


def test_a_foreign_consumer_is_told_of_once(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, looks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, lookupd) as reader:
            await eventually_async(lambda: len(reader.conns) == 2)
            await eventually_async(lambda: len(looks) >= 3)
            assert warnings_in(caplog) == []
            where = [lookupd.http_address]
            foreign = nsq.Reader(topic, channel, lambda _: True, lookupd_http_addresses=where)
            await eventually_async(lambda: len(foreign.conns) == 2)
            await eventually_async(lambda: warnings_in(caplog))
            assert looks[-1] == looks[-2] != ""
            # It looks no more, so it cannot tell of it again.
            assert reader._DedupeReader__neighbours is not None
            assert reader._DedupeReader__neighbours._task is not None
            await reader._DedupeReader__neighbours._task
            foreign.close()

    on_loop(main())
    (told,) = warnings_in(caplog)
    assert f"{topic}/{channel} has 1 other client(s) on 127.0.0.1:" in told


def test_readers_that_share_a_store_are_no_strangers(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, looks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for nsqd in nsqd_pair:
        nsqd.create_channel(topic, channel)
    store = MemoryStore(window=1000)

    async def main() -> None:
        async with (
            consuming(topic, channel, lambda _: True, lookupd, store=store) as first,
            consuming(topic, channel, lambda _: True, lookupd, store=store) as second,
            consuming(topic, f"{channel}-other", lambda _: True, lookupd, store=store),
        ):
            await eventually_async(lambda: len(first.conns) == len(second.conns) == 2)
            before = len(looks)
            await eventually_async(lambda: len(looks) >= before + 9)
            # Not later: whoever is closed is forgotten here before nsqd has noticed that it is gone.
            assert warnings_in(caplog) == []
            assert set(looks) == {""}

    on_loop(main())


def test_readers_with_stores_of_their_own_are_strangers(
    nsqd_pair: Pair, lookupd: Nsqlookupd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with (
            consuming(topic, channel, lambda _: True, lookupd),
            consuming(topic, channel, lambda _: True, lookupd),
        ):
            for nsqd in nsqd_pair:
                nsqd.create_channel(topic, channel)
            await eventually_async(lambda: len(warnings_in(caplog)) == 2, PATIENCE)

    on_loop(main())


class Shared(MemoryStore):
    """A store that says of itself that other processes see it."""

    @property
    def traits(self) -> Traits:
        return super().traits._replace(shared=True)


@pytest.mark.parametrize("store", [False, Shared(window=100)], ids=["none", "shared"])
def test_where_nothing_can_be_missed_nobody_looks(
    nsqd: Nsqd, topic: str, channel: str, store: Store | bool, looks: list[str]
) -> None:
    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, [nsqd], store=store) as reader:
            await eventually_async(lambda: reader.conns)
            assert reader._DedupeReader__neighbours is None

    on_loop(main())
    assert looks == []


class Http:
    """Answers GET with what it was given for a path, else with 404."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        path = request.split()[1].decode()
        self.asked.append(path)
        page = self.pages.get(path.split("?")[0])
        status = b"404 Not Found" if page is None else b"200 OK"
        page = page or b""
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(page), page))
        writer.close()


@contextlib.asynccontextmanager
async def http_server(sock: socket.socket | None = None) -> AsyncIterator[tuple[Http, int]]:
    """On a port of its own, or on a socket that is bound already."""
    http = Http()
    where: dict[str, Any] = {"host": "127.0.0.1", "port": 0} if sock is None else {"sock": sock}
    server = await asyncio.start_server(http.serve, **where)
    try:
        yield http, server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Conn:
    def __init__(self, host: str, port: int) -> None:
        self.host, self.port, self.id = host, port, f"{host}:{port}"


class Someone:
    """As much of a reader as is looked at."""

    def __init__(self, conn: Conn, *lookupds: str) -> None:
        self.name = "someone"
        self.topic = "topic"
        self.channel = "channel"
        self.conns = {conn.id: conn}
        self.lookupd_http_addresses = list(lookupds)


def stats(*counts: int | None) -> bytes:
    return json.dumps({"topics": [{"channels": [{"client_count": count} for count in counts]}, {}]}).encode()


async def found_by(someone: Someone, *family: Someone) -> bool:
    return bool(await Neighbours(someone, lambda: family or [someone])._look())


def test_the_http_port_comes_from_nsqlookupd() -> None:
    async def main() -> None:
        async with http_server() as (lookupd, lookupd_port), http_server() as (nsqd, http_port):
            silent = "http://{}:{}".format(*nobody.getsockname())
            producers = [
                {"broadcast_address": "127.0.0.1", "tcp_port": 9, "http_port": 9},
                {"broadcast_address": "127.0.0.1", "tcp_port": 4150, "http_port": http_port},
            ]
            lookupd.pages["/lookup"] = json.dumps({"producers": producers}).encode()
            nsqd.pages["/stats"] = stats(1, 2)
            conn = Conn("127.0.0.1", 4150)
            assert await found_by(Someone(conn, silent, f"127.0.0.1:{lookupd_port}")) is True
            assert await found_by(Someone(conn, f"http://127.0.0.1:{lookupd_port}/")) is True
            nsqd.pages["/stats"] = stats(1, None)
            assert await found_by(Someone(conn, f"127.0.0.1:{lookupd_port}")) is False
            assert nsqd.asked[0] == "/stats?format=json&topic=topic&channel=channel"

    with silent_ports() as (nobody, _):
        on_loop(main())


NONSENSE = (
    *(b"", b"[]", b"not JSON", b'{"topics": null}', b'{"topics": 7}', b'{"topics": [7]}'),
    *(b'{"topics": [{"channels": null}]}', b'{"topics": [{"channels": ["x"]}]}', b'{"topics": [{"channels": 7}]}'),
    *(b'{"topics": [{"channels": [{"client_count": "x"}]}]}', b'{"topics": [{"channels": [{"client_count": [9]}]}]}'),
)


@pytest.mark.parametrize("producers", [7, [7], [None], [{"broadcast_address": "127.0.0.1", "tcp_port": 4150}], "all"])
def test_a_lookupd_that_talks_nonsense_ends_no_watch(producers: object) -> None:
    async def main() -> None:
        async with http_server() as (lookupd, port):
            lookupd.pages["/lookup"] = json.dumps({"producers": producers}).encode()
            assert await found_by(Someone(Conn("127.0.0.1", 4150), f"127.0.0.1:{port}")) is False
            assert lookupd.asked

    on_loop(main())


def test_who_is_gone_at_the_next_look_was_no_stranger(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nsqd counts a reader of ours for a moment after it was closed."""
    monkeypatch.setattr("nsqdedupe.neighbours.FIRST_LOOK", 0.0)
    looks = iter(["", "1 a", "", "1 b", "", "1 c", "1 d", "no look"])

    async def look(_: Neighbours) -> str:
        return next(looks)

    monkeypatch.setattr(Neighbours, "_look", look)

    async def main() -> None:
        someone = Someone(Conn("127.0.0.1", 4150))
        neighbours = Neighbours(someone, lambda: [someone])
        neighbours.start()
        await eventually_async(neighbours._task.done)

    on_loop(main())
    (told,) = warnings_in(caplog)
    assert "topic/channel has 1 d: copies" in told
    assert list(looks) == ["no look"]


def test_else_it_is_the_next_one_if_an_nsqd_says_so_there() -> None:
    async def main(tcp: socket.socket, http: socket.socket) -> None:
        port = int(tcp.getsockname()[1])
        someone = Someone(Conn("127.0.0.1", port))
        assert await found_by(someone) is False, "nobody answers"
        async with http_server(http) as (nsqd, _):
            nsqd.pages["/stats"] = stats(2)
            assert await found_by(someone) is False, "whoever answers there is no nsqd"
            nsqd.pages["/info"] = json.dumps({"tcp_port": port + 7}).encode()
            assert await found_by(someone) is False, "it is another nsqd"
            nsqd.pages["/info"] = json.dumps({"tcp_port": port}).encode()
            assert await found_by(someone) is True
            for nonsense in NONSENSE:
                nsqd.pages["/stats"] = nonsense
                assert await found_by(someone) is False, nonsense

    with silent_ports() as ports:
        on_loop(main(*ports))


def test_a_reader_that_is_not_connected_there_has_no_neighbours_there() -> None:
    async def main(tcp: socket.socket, http: socket.socket) -> None:
        port = int(tcp.getsockname()[1])
        async with http_server(http) as (nsqd, _):
            nsqd.pages["/info"] = json.dumps({"tcp_port": port}).encode()
            nsqd.pages["/stats"] = stats(5)
            someone = Someone(Conn("127.0.0.1", port))
            other = Someone(Conn("127.0.0.1", port))
            other.channel = "another"
            assert await found_by(someone, other) is False
            assert await found_by(someone, someone, someone) is True

    with silent_ports() as ports:
        on_loop(main(*ports))


def test_a_reader_that_is_closed_stops_looking(nsqd: Nsqd, topic: str, channel: str, looks: list[str]) -> None:
    async def main() -> None:
        async with consuming(topic, channel, Seen().handle, [nsqd]) as reader:
            await eventually_async(lambda: looks)
            assert reader._DedupeReader__neighbours is not None
            task = reader._DedupeReader__neighbours._task
            assert task is not None
        await eventually_async(task.done)
        assert task.cancelled()
        # Stopped before it started: nothing to stop.
        unstarted = DedupeReader(topic, channel, Seen().handle, nsqd_tcp_addresses=nsqd.tcp_address, key=BODY)
        unstarted.close()

    on_loop(main())
