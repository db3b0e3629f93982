"""nsqds that ask an auth server whom to let in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from auth_server import AuthServer, auth_server
from certificates import Certificates
from consumers import Seen, bodies, consuming, nothing_left, on_loop, told
from servers import Servers, eventually_async

from nsqdedupe import DedupeReader, FatalError, PublishError, ReplicatedWriter
from nsqdedupe.cli.local_nsq import Nsqd

SECRET = "a secret that no log shows"


@pytest.fixture
def auth() -> Iterator[AuthServer]:
    """An auth server that knows no secret yet."""
    with auth_server() as server:
        yield server


@pytest.fixture
def guarded(auth: AuthServer, servers: Servers) -> Nsqd:
    """An nsqd that asks it."""
    return servers.nsqd(f"--auth-http-address={auth.address}")


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("nsqdedupe.pauses.LONGEST", 0.05)
    caplog.set_level(logging.INFO)


class Refused(DedupeReader):
    """Keeps what it is told."""

    told: tuple[FatalError, ...] = ()

    def fatal_error(self, error: FatalError) -> None:
        """As an application would override it."""
        self.told = (*self.told, error)


async def filled(nsqd: Nsqd, topic: str, channel: str, messages: list[bytes]) -> None:
    """Queue messages past the auth server: HTTP asks for no permission."""
    await asyncio.to_thread(nsqd.create_channel, topic, channel)
    await asyncio.to_thread(nsqd.mpublish, topic, messages)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("transport", [{}, {"tls_v1": True}, {"snappy": True}], ids=["plain", "TLS", "snappy"])
def test_who_knows_the_secret_gets_in(
    auth: AuthServer,
    servers: Servers,
    topic: str,
    channel: str,
    transport: dict[str, bool],
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    auth.allow(SECRET, topic=f"^{topic}$", channel=f"^{channel}$")
    certificates = Certificates(tmp_path)
    nsqds = [servers.nsqd(f"--auth-http-address={auth.address}", *certificates.nsqd_flags) for _ in range(2)]
    options = {**certificates.options, **transport} if "tls_v1" in transport else transport
    messages, seen = bodies(2000), Seen()

    async def main() -> None:
        for nsqd in nsqds:
            await filled(nsqd, topic, channel, messages)
        async with consuming(topic, channel, seen.handle, nsqds, auth_secret=SECRET, **options) as reader:
            await eventually_async(lambda: reader.stats.duplicates == len(messages))
            await nothing_left(nsqds, topic, channel)
            assert reader.stats.fatal_errors == 0
            for nsqd in nsqds:
                (client,) = nsqd.channel_stats(topic, channel)["clients"]
                assert client["authed"]
                assert client["auth_identity"] == "tester"

    on_loop(main())
    seen.once_each(messages)
    assert {asked["tls"] for asked in auth.asked} == {str("tls_v1" in transport).lower()}
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("secret", "code"),
    [
        (None, "E_AUTH_FIRST"),
        ("wrong", "E_UNAUTHORIZED"),
        ("for another topic", "E_UNAUTHORIZED"),
        ("broken", "E_AUTH_FAILED"),
    ],
)
def test_who_does_not_is_told_so(
    guarded: Nsqd,
    auth: AuthServer,
    topic: str,
    channel: str,
    secret: str | None,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And goes on asking: the secret may be made known meanwhile."""
    auth.allow("for another topic", topic="^another$")
    auth.allowed["broken"] = {"ttl": 0}
    messages, seen = bodies(100), Seen()

    async def main() -> None:
        await filled(guarded, topic, channel, messages)
        async with consuming(topic, channel, seen.handle, [guarded], Refused, auth_secret=secret) as reader:
            await eventually_async(lambda: len(reader.told) >= 3)
            assert {error.code for error in reader.told} == {code}
            assert reader.stats.fatal_errors == len(reader.told)
            assert not seen.runs
            if secret is not None:
                auth.allow(secret)
                await eventually_async(lambda: len(seen.handled) == len(messages))

    on_loop(main())
    (line,) = errors(caplog)
    assert code in line


def test_while_the_auth_server_is_away_who_is_in_stays_in(
    guarded: Nsqd, auth: AuthServer, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the token has expired: nsqd looks at it when somebody subscribes or publishes."""
    auth.allow(SECRET, ttl=1)
    first, second, third, seen = bodies(100), bodies(100, start=100), bodies(100, start=200), Seen()

    async def main() -> None:
        await filled(guarded, topic, channel, first)
        async with consuming(topic, channel, seen.handle, [guarded], Refused, auth_secret=SECRET) as reader:
            await eventually_async(lambda: len(seen.handled) == 100)
            (conn,) = reader.conns.values()
            await asyncio.to_thread(auth.stop)
            await asyncio.sleep(1.1)  # the token's time to live, in whole seconds
            await filled(guarded, topic, channel, second)
            await eventually_async(lambda: len(seen.handled) == 200)
            assert list(reader.conns.values()) == [conn]
            # Who must connect anew waits for the auth server, and says so once.
            conn.stream.close()
            await filled(guarded, topic, channel, third)
            await eventually_async(lambda: len(reader.told) >= 3)
            assert {error.code for error in reader.told} == {"E_AUTH_FAILED"}
            assert len(seen.handled) == 200
            auth.start()
            await eventually_async(lambda: len(seen.handled) == 300)
            await nothing_left([guarded], topic, channel)
            assert told([guarded], topic, channel, "client_count") == [1]

    on_loop(main())
    seen.once_each(first + second + third)
    assert len(errors(caplog)) == 1
    assert len([line for line in caplog.messages if "connected again" in line]) == 1


def test_a_writer_is_asked_for_its_secret_too(guarded: Nsqd, auth: AuthServer, topic: str) -> None:
    """Permission to publish is looked at with each message, once the token has expired."""
    auth.allow(SECRET, ttl=1, may="publish", channel=".*")

    async def main() -> None:
        options: dict[str, Any] = {"copies": 1, "timeout": 2}
        async with ReplicatedWriter([guarded.tcp_address], auth_secret=SECRET, **options) as writer:
            await writer.publish(topic, b"one")
        async with ReplicatedWriter([guarded.tcp_address], auth_secret="wrong", **options) as writer:
            with pytest.raises(PublishError, match="E_UNAUTHORIZED"):
                await writer.publish(topic, b"two")

    on_loop(main())
    assert guarded.depth(topic) == 1
