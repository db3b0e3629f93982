"""What nsqd refuses for good reaches the application: a method, one line in the log, a counter, the end of run()."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

import pytest
from consumers import Seen, bodies, consuming, on_loop, publish
from fake_nsqd import ERROR, connected, frame, message
from servers import eventually, eventually_async

import nsqdedupe
from nsqdedupe import BODY, DedupeReader, FatalError
from nsqdedupe.cli.local_nsq import Nsqd


class Refused(DedupeReader):
    """Keeps what it is told."""

    told: list[FatalError]

    def fatal_error(self, error: FatalError) -> None:
        """As an application would override it."""
        self.told = [*getattr(self, "told", []), error]


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqdedupe.pauses.LONGEST", 0.05)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        pytest.param({"msg_timeout": 3}, "E_BAD_BODY", marks=pytest.mark.nsqd_flags("--max-msg-timeout=2s")),
        pytest.param(
            {"heartbeat_interval": 3}, "E_BAD_BODY", marks=pytest.mark.nsqd_flags("--max-heartbeat-interval=2s")
        ),
    ],
    ids=["message timeout", "heartbeat"],
)
def test_a_refusal_is_told_each_time_counted_each_time_and_logged_once(
    nsqd: Nsqd, topic: str, channel: str, options: dict[str, Any], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with consuming(topic, channel, lambda _: True, [nsqd], Refused, **options) as reader:
            await eventually_async(lambda: reader.stats.fatal_errors >= 3)
            assert len(reader.told) == reader.stats.fatal_errors
            assert {error.code for error in reader.told} == {code}
            assert {error.nsqd for error in reader.told} == {nsqd.tcp_address}
            assert reader.stats.received == 0

    on_loop(main())
    (line,) = errors(caplog)
    assert code in line
    assert nsqd.tcp_address in line


@pytest.mark.nsqd_flags("--max-channel-consumers=1")
def test_who_is_refused_at_the_subscription_gets_in_when_there_is_room(
    nsqd: Nsqd, topic: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsqdedupe.dialer")
    nsqd.create_channel(topic, channel)
    seen = Seen()

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, [nsqd], Refused) as second:
            await eventually_async(lambda: second.stats.fatal_errors >= 2)
            assert "E_SUB_FAILED" in str(second.told[0])
            await first.stop()
            publish([nsqd], topic, messages)
            await eventually_async(lambda: len(seen.handled) == len(messages))

    async def both() -> None:
        nonlocal first
        async with consuming(topic, channel, seen.handle, [nsqd]) as first:
            await eventually_async(lambda: nsqd.channel_stats(topic, channel)["client_count"] == 1)
            await main()

    first: Any = None
    messages = bodies(100)
    on_loop(both())
    seen.once_each(messages)
    assert len(errors(caplog)) == 1
    assert [line for line in caplog.messages if "connected again" in line]


def test_a_refusal_in_the_middle_loses_nothing_and_is_told_too() -> None:
    """nsqd answers a command that it does not take with an error, and hangs up."""
    seen = Seen()

    async def main() -> None:
        async with connected(seen.handle) as (fake, reader, conn):
            await fake.send(message(1, b"before") + frame(ERROR, b"E_INVALID cannot RDY in current state"))
            fake.writer.close()
            await eventually_async(conn.closed)
            await eventually_async(lambda: reader.conns and fake.subscribed == 2)
            await fake.send(message(2, b"after"))
            await eventually_async(lambda: len(seen.handled) == 2)
            assert reader.stats.fatal_errors == 1

    on_loop(main())


def test_an_answer_that_came_too_late_is_no_refusal() -> None:
    async def main() -> None:
        async with connected(lambda _: True) as (fake, reader, conn):
            for code in (b"E_FIN_FAILED", b"E_REQ_FAILED", b"E_TOUCH_FAILED"):
                await fake.send_apart(conn, frame(ERROR, code + b" FIN 1 failed ID not in flight"))
            assert reader.stats.fatal_errors == 0
            assert reader.stats.fin_failed == 1
            assert not conn.closed()

    on_loop(main())


def test_a_hook_that_fails_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with connected(lambda _: True) as (fake, reader, _):
            reader.fatal_error = 7
            await fake.send(frame(ERROR, b"E_BAD_TOPIC"))
            fake.writer.close()
            await eventually_async(lambda: fake.subscribed == 2 and reader.conns)

    on_loop(main())
    assert "fatal_error() failed" in caplog.text


@pytest.mark.nsqd_flags("--max-msg-timeout=2s")
def test_run_ends_on_a_refusal_if_asked_to(
    nsqd: Nsqd, servers: Any, topic: str, channel: str, loop: asyncio.AbstractEventLoop
) -> None:
    """All readers are stopped as on a signal; what is in hand is answered."""
    seen = Seen()
    other = servers.nsqd()
    options = {"key": BODY, "msg_timeout": 3, "output_buffer_timeout": 25}
    refused: list[DedupeReader] = []

    async def handle(message: Any) -> bool:
        refused.append(DedupeReader(topic, channel, lambda _: True, nsqd_tcp_addresses=nsqd.tcp_address, **options))
        await eventually_async(lambda: refused[0].stats.fatal_errors)
        return seen.handle(message)

    publish([other], topic, [b"in hand"])
    good = DedupeReader(topic, channel, handle, nsqd_tcp_addresses=other.tcp_address, **options)
    with pytest.raises(FatalError, match="E_BAD_BODY") as caught:
        nsqdedupe.run(timeout=10, end_on_fatal_error=True)
    assert caught.value.nsqd == nsqd.tcp_address
    seen.once_each([b"in hand"])
    assert good.stats.in_flight == 0
    eventually(lambda: other.unfinished(topic, channel) == 0)


@pytest.mark.nsqd_flags("--max-msg-timeout=2s")
def test_run_goes_on_if_not_asked_to_end(nsqd: Nsqd, topic: str, channel: str, loop: asyncio.AbstractEventLoop) -> None:
    reader = Refused(topic, channel, lambda _: True, nsqd_tcp_addresses=nsqd.tcp_address, key=BODY, msg_timeout=3)

    async def later() -> None:
        await eventually_async(lambda: reader.stats.fatal_errors >= 3)
        signal.raise_signal(signal.SIGTERM)

    task = loop.create_task(later())
    nsqdedupe.run(timeout=5)
    assert task.done()
    assert len(reader.told) >= 3
