"""nsqlookupds that are down, slow, or talk nonsense: what the others say counts, and one warning tells of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from consumers import Seen, bodies, consuming, on_loop, publish
from listening import listening
from servers import Servers, eventually, eventually_async

from nsqdedupe import DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd
from nsqdedupe.lookupd import LARGEST

OK = "200 OK"
REFUSED = "127.0.0.1:1"
"""Where nobody listens."""


class FakeLookupd:
    """Says what a real one never says; it hangs until `go` is set."""

    def __init__(self) -> None:
        self.status = OK
        self.body = b"{}"
        self.head = ""
        self.asked: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.address = ""

    def says(self, document: object) -> None:
        """From now on it answers this."""
        self.body = document if isinstance(document, bytes) else json.dumps(document).encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            request = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(request.split()[1].decode())
            await self.go.wait()
            head = f"HTTP/1.1 {self.status}\r\nContent-Length: {len(self.body)}\r\n{self.head}\r\n"
            writer.write(head.encode() + self.body)
            await writer.drain()


@contextlib.asynccontextmanager
async def fake_lookupd() -> AsyncIterator[FakeLookupd]:
    """One on a port of its own."""
    fake = FakeLookupd()
    async with listening(fake.serve) as port:
        fake.address = f"127.0.0.1:{port}"
        try:
            yield fake
        finally:
            fake.go.set()


def record(nsqd: Nsqd, **changed: Any) -> dict[str, Any]:
    """How an nsqlookupd lists it."""
    ports = {"tcp_port": nsqd.tcp_port, "http_port": nsqd.http_port}
    whole = {"hostname": "host", "broadcast_address": "127.0.0.1", "version": "1.3.0", **ports}
    return {name: value for name, value in {**whole, **changed}.items() if value is not ...}


def answer(*records: object) -> dict[str, Any]:
    return {"channels": [], "producers": list(records)}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == "nsqdedupe.lookupd"]
    return [record.getMessage() for record in records if record.levelno == logging.WARNING]


def lookups(*addresses: str, **options: Any) -> dict[str, Any]:
    """Options for these, which are asked once; nobody is given up because this machine has a lot to do."""
    patient = {"lookupd_poll_interval": 3600, "lookupd_connect_timeout": 30, "lookupd_request_timeout": 30}
    return {"lookupd_http_addresses": list(addresses), **patient, **options}


def test_all_are_asked_in_each_poll_and_their_answers_are_joined(servers: Servers, topic: str, channel: str) -> None:
    """Each knows another nsqd; one poll is enough, and a dead and a slow one are in nobody's way."""
    known = [servers.lookupd(), servers.lookupd()]
    nsqds = [servers.nsqd(lookupds=[lookupd]) for lookupd in known]
    messages, seen = bodies(200), Seen()
    for nsqd in nsqds:
        nsqd.create_channel(topic, channel)

    async def main() -> None:
        async with fake_lookupd() as slow:
            slow.go.clear()
            addresses = REFUSED, slow.address, *(lookupd.http_address for lookupd in known)
            options = lookups(*addresses, lookupd_request_timeout=3600)
            async with consuming(topic, channel, seen.handle, (), **options) as reader:
                await eventually_async(lambda: len(reader.conns) == 2)
                assert len(slow.asked) == 1
                publish(nsqds, topic, messages)
                await eventually_async(lambda: reader.stats.duplicates == 200)

    on_loop(main())
    seen.once_each(messages)


NONSENSE: dict[str, object] = {
    "empty": b"",
    "no JSON": b"<html>It works!</html>",
    "half of it": b'{"producers": [{"broadcast_addr',
    "no text": b"\xff\xfe\x00",
    "a list": [],
    "a number": 7,
    "null": None,
    "nothing in it": {},
    "null producers": {"producers": None},
    "producers by name": {"producers": {"a": 1}},
    "a word for producers": {"producers": "none"},
    "the envelope of old": {"status_code": 200, "data": {"producers": []}},
    "10 MB": b'{"producers": [' + b" " * (10 << 20) + b"]}",
    "much too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_told_once_and_what_the_other_says_counts(
    nonsense: object, servers: Servers, lookupd: Nsqlookupd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And when it talks sense again, that is told once too."""
    caplog.set_level(logging.INFO)
    nsqd = servers.nsqd(lookupds=[lookupd])
    nsqd.create_channel(topic, channel)

    async def main() -> None:
        async with fake_lookupd() as fake:
            fake.says(nonsense)
            options = lookups(fake.address, lookupd.http_address)
            async with consuming(topic, channel, lambda _: True, (), **options) as reader:
                await eventually_async(lambda: reader.conns)
                await reader.query_lookupd()
                await reader.query_lookupd()
                assert len(fake.asked) >= 2
                assert len(warnings(caplog)) == 1
                assert fake.address in warnings(caplog)[0]
                fake.says(answer())
                await reader.query_lookupd()
                assert len([line for line in caplog.messages if "answers again" in line]) == 1
                assert len(reader.conns) == 1

    on_loop(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


STATUS = ["500 Internal Server Error", "404 Not Found", "403 Forbidden", "204 No Content"]


@pytest.mark.parametrize("status", STATUS)
def test_an_http_error_is_trouble(
    status: str, nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with fake_lookupd() as fake:
            fake.status, fake.body = status, b""
            async with consuming(topic, channel, lambda _: True, (), **lookups(fake.address)) as reader:
                await eventually_async(lambda: warnings(caplog))
                fake.status = OK
                fake.says(answer(record(nsqd)))
                await reader.query_lookupd()
                await eventually_async(lambda: reader.conns)

    on_loop(main())
    assert len(warnings(caplog)) == 1


def test_a_topic_that_nobody_published_to_is_no_trouble(
    lookupd: Nsqlookupd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, lookupd) as reader:
            await reader.query_lookupd()
            assert reader.conns == {}

    on_loop(main())
    assert warnings(caplog) == []


def test_redirects_are_followed_but_not_for_ever(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with fake_lookupd() as moved, fake_lookupd() as here:
            moved.status, moved.head = "302 Found", f"Location: http://{moved.address}/again\r\n"
            async with consuming(topic, channel, lambda _: True, (), **lookups(moved.address)) as reader:
                await eventually_async(lambda: warnings(caplog))
                moved.head = f"Location: http://{here.address}/lookup\r\n"
                here.says(answer(record(nsqd)))
                await reader.query_lookupd()
                await eventually_async(lambda: reader.conns)

    on_loop(main())
    assert len(warnings(caplog)) == 1


BAD_RECORDS: dict[str, Any] = {
    **{f"a record that is {value!r}": value for value in (None, 7, "nsqd", [], {})},
    **{f"port {port!r}": {"tcp_port": port} for port in (0, -1, 65536, 1e9, 4150.5, "4150", None, True, [4150], ...)},
    **{
        f"host {host!r:.20}": {"broadcast_address": host}
        for host in ("", None, 7, ["127.0.0.1"], "a b", "a\n", "a\0", "\ud800", "x" * 300, "a/b", ...)
    },
}


def test_bad_records_are_skipped_and_the_good_one_among_them_is_used(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [record(nsqd, **odd) if isinstance(odd, dict) and odd else odd for odd in BAD_RECORDS.values()]

    async def main() -> None:
        async with fake_lookupd() as fake:
            fake.says(answer(*bad, record(nsqd), *bad))
            async with consuming(topic, channel, lambda _: True, (), **lookups(fake.address)) as reader:
                await eventually_async(lambda: reader.conns)
                await reader.query_lookupd()
                assert list(reader.connection_attempts) == list(reader.conns) == [nsqd.tcp_address]

    on_loop(main())
    (line,) = warnings(caplog)
    assert f"{2 * len(bad)} of its records" in line


def test_other_fields_may_be_nonsense(nsqd: Nsqd, topic: str, channel: str) -> None:
    odd = record(nsqd, hostname=7, version=None, http_port="x", remote_address=[], topics=3, tombstones={"a": 1})

    async def main() -> None:
        async with fake_lookupd() as fake:
            fake.says({**answer(odd), "channels": 7, "message": ["?"]})
            async with consuming(topic, channel, lambda _: True, (), **lookups(fake.address)) as reader:
                await eventually_async(lambda: reader.conns)

    on_loop(main())


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_a_broadcast_address_may_be_a_name_or_ipv6(servers: Servers, topic: str, channel: str, host: str) -> None:
    nsqd = servers.nsqd(*(["--tcp-address=[::1]:0"] if host == "::1" else []))
    log = nsqd.log_path.read_text
    port = eventually(lambda: int(log().split("TCP: listening on ")[1].split()[0].rpartition(":")[2]))
    seen = Seen()
    nsqd.publish(topic, b"body")

    async def main() -> None:
        async with fake_lookupd() as fake:
            fake.says(answer(record(nsqd, broadcast_address=host, tcp_port=port)))
            async with consuming(topic, channel, seen.handle, (), **lookups(fake.address)) as reader:
                await eventually_async(lambda: seen.handled)
                assert list(reader.conns) == [f"{host}:{port}"]

    on_loop(main())


def test_who_is_lost_and_listed_no_more_is_left(
    servers: Servers, lookupd: Nsqlookupd, topic: str, channel: str
) -> None:
    """And found when it registers again."""
    nsqd = servers.nsqd(lookupds=[lookupd])
    nsqd.create_channel(topic, channel)
    seen = Seen()

    async def main() -> None:
        options = lookups(lookupd.http_address)
        async with consuming(topic, channel, seen.handle, (), **options) as reader:
            await eventually_async(lambda: reader.conns)
            await asyncio.to_thread(nsqd.stop)
            await eventually_async(lambda: not reader.conns and not lookupd.nodes())
            await reader.query_lookupd()
            assert reader._DedupeReader__dialer._nsqds == {}
            nsqd.start()
            await eventually_async(lambda: lookupd.lookup(topic))
            await reader.query_lookupd()
            await eventually_async(lambda: reader.conns)
            publish([nsqd], topic, [b"body"])
            await eventually_async(lambda: seen.handled)

    on_loop(main())


def test_who_is_listed_no_more_but_connected_stays(nsqd: Nsqd, topic: str, channel: str) -> None:
    """Until the connection is lost. While the only one that listed it is down, what it said counts."""

    async def main() -> None:
        async with fake_lookupd() as fake:
            fake.says(answer(record(nsqd)))
            async with consuming(topic, channel, lambda _: True, (), **lookups(fake.address)) as reader:
                await eventually_async(lambda: reader.conns)
                fake.says(b"down")
                await reader.query_lookupd()
                (first,) = reader.conns.values()
                first.stream.close()
                await eventually_async(lambda: reader.conns and first not in reader.conns.values())
                fake.says(answer())
                await reader.query_lookupd()
                (second,) = reader.conns.values()
                second.stream.close()
                await eventually_async(lambda: not reader._DedupeReader__dialer._nsqds)
                assert reader.conns == {}

    on_loop(main())


def test_who_is_given_by_address_is_never_left(nsqd: Nsqd, topic: str, channel: str) -> None:
    async def main() -> None:
        async with fake_lookupd() as fake:
            fake.says(answer())
            options = lookups(fake.address, nsqd_tcp_addresses=nsqd.tcp_address)
            async with consuming(topic, channel, lambda _: True, (), **options) as reader:
                await eventually_async(lambda: reader.conns)
                await reader.query_lookupd()
                (first,) = reader.conns.values()
                first.stream.close()
                await eventually_async(lambda: reader.conns and first not in reader.conns.values())

    on_loop(main())


def test_an_address_may_have_a_path_and_a_query_as_in_pynsq(topic: str, channel: str) -> None:
    async def main() -> None:
        async with fake_lookupd() as fake:
            addresses = (f"http://{fake.address}/proxy/lookup?dc=a&dc=b", f"http://{fake.address}/", fake.address)
            async with consuming(topic, channel, lambda _: True, (), **lookups(*addresses)) as reader:
                await reader.query_lookupd()
            asked = {f"/proxy/lookup?dc=a&dc=b&topic={topic}", f"/lookup?topic={topic}"}
            assert set(fake.asked) == asked

    on_loop(main())


def test_query_lookupd_may_be_overridden(nsqd: Nsqd, topic: str, channel: str) -> None:
    """As applications do that find their nsqds elsewhere."""

    class Elsewhere(DedupeReader):
        def query_lookupd(self) -> None:
            self.connect_to_nsqd("127.0.0.1", nsqd.tcp_port)

    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, (), Elsewhere, **lookups(REFUSED)) as reader:
            await eventually_async(lambda: reader.conns)

    on_loop(main())


def test_an_answer_that_comes_after_the_end_connects_to_nobody(nsqd: Nsqd, topic: str, channel: str) -> None:
    async def main() -> None:
        async with fake_lookupd() as fake:
            fake.go.clear()
            fake.says(answer(record(nsqd)))
            async with consuming(topic, channel, lambda _: True, (), **lookups(fake.address)) as reader:
                await eventually_async(lambda: fake.asked)
                reader.close()
                fake.go.set()
                await reader.query_lookupd()
                assert reader.connection_attempts == {}

    on_loop(main())


def test_an_answer_at_the_limit_is_looked_at(nsqd: Nsqd, topic: str, channel: str) -> None:
    async def main() -> None:
        async with fake_lookupd() as fake:
            whole = json.dumps(answer(record(nsqd))).encode()
            fake.says(whole + b" " * (LARGEST - len(whole)))
            async with consuming(topic, channel, lambda _: True, (), **lookups(fake.address)) as reader:
                await eventually_async(lambda: reader.conns)

    on_loop(main())
