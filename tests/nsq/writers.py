"""Writers for tests on real servers: one that must leave nothing behind, and what the nsqds then hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from consumers import PATIENCE, consuming, nothing_left
from servers import Servers, eventually, eventually_async

from nsqdedupe import PublishError, ReplicatedWriter
from nsqdedupe.cli.local_nsq import Nsqd
from nsqdedupe.pipeline import Pipeline


def addresses(nsqds: Iterable[Nsqd]) -> list[str]:
    return [nsqd.tcp_address for nsqd in nsqds]


@contextlib.asynccontextmanager
async def writing(to: Iterable[Nsqd | str], copies: int = 2, **options: Any) -> AsyncIterator[ReplicatedWriter]:
    """A writer; after it, no task, timer or socket of it is left."""
    before = asyncio.all_tasks(), _sockets()
    writer = ReplicatedWriter([nsqd if isinstance(nsqd, str) else nsqd.tcp_address for nsqd in to], copies, **options)
    # A question to nsqlookupd cannot be called back: it ends when it is answered, or after its 2 s.
    asks = "lookupd_http_addresses" in options
    try:
        yield writer
    finally:
        writer.close()
        writer.close()
    await eventually_async(lambda: (asyncio.all_tasks(), _sockets()), until=lambda now: now == before)
    await eventually_async(_timers, timeout=5 if asks else 0, until=lambda left: left == [])


async def turns(count: int) -> None:
    """Let the event loop go round so often. After two, what was published is sent, if it need not wait."""
    for _ in range(count):
        await asyncio.sleep(0)


def ready(writer: ReplicatedWriter) -> int:
    """How many nsqds take its commands now."""
    return len(writer._cluster.ready)


def pipelines(writer: ReplicatedWriter) -> list[Pipeline]:
    """One for each nsqd that it knows."""
    return [member.pipeline for member in writer._cluster._members.values()]


def tls(servers: Servers, directory: Path) -> tuple[Nsqd, dict[str, Any]]:
    """An nsqd that offers TLS, and the options of a client that trusts it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    file = directory / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    options = {"ssl_version": ssl.PROTOCOL_TLS_CLIENT, "ca_certs": str(directory / "ca.pem")}
    return servers.nsqd(f"--tls-cert={file}", f"--tls-key={file}"), {"tls_v1": True, "tls_options": options}


async def failure(writer: ReplicatedWriter, topic: str, body: bytes = b"body") -> PublishError:
    with pytest.raises(PublishError) as failed:
        await writer.publish(topic, body)
    return failed.value


async def works_again(writer: ReplicatedWriter, topic: str) -> tuple[str, ...]:
    async def attempt() -> tuple[str, ...]:
        with contextlib.suppress(PublishError):
            return await writer.publish(topic, b"again")
        return ()

    answer: tuple[str, ...] = await eventually_async(attempt, timeout=30)
    return answer


@contextlib.contextmanager
def frozen(nsqd: Nsqd) -> Iterator[None]:
    """It stays silent, and the kernel goes on accepting connections for it."""
    assert nsqd.pid is not None
    os.kill(nsqd.pid, signal.SIGSTOP)
    try:
        # The signal is on its way when kill returns.
        eventually(lambda: _states(nsqd.pid), until=lambda states: states == {"T"})
        yield
    finally:
        os.kill(nsqd.pid, signal.SIGCONT)


def _states(process: int | None) -> set[str]:
    """The states of its threads, in the kernel's letters: R, S, T (stopped)."""
    stats = [thread.read_text() for thread in Path(f"/proc/{process}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


async def on_each(nsqds: Iterable[Nsqd], topic: str, channel: str) -> list[Counter[bytes]]:
    """The bodies that each nsqd holds, and how often. They are taken out."""
    return [await _take_out(nsqd, topic, channel) for nsqd in nsqds]


async def _take_out(nsqd: Nsqd, topic: str, channel: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()

    def handle(message: Any) -> bool:
        found[message.body] += 1
        return True

    nsqd.create_channel(topic, channel)
    async with consuming(topic, channel, handle, [nsqd], store=False):
        await nothing_left([nsqd], topic, channel, PATIENCE)
    return found


def _timers() -> list[asyncio.TimerHandle]:
    loop: Any = asyncio.get_running_loop()
    return [timer for timer in loop._scheduled if not timer.cancelled()]


def _sockets() -> set[int]:
    loop: Any = asyncio.get_running_loop()
    return set(loop._selector.get_map())
