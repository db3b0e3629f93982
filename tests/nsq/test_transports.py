"""Whatever pynsq negotiates, messages take one path."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from certificates import Certificates
from consumers import PATIENCE, Seen, at_rest, bodies, consuming, nothing_left, on_loop, publish, told
from servers import Servers, eventually_async

MESSAGES = 20_000
ROUNDS = 40

TRANSPORTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "snappy": {"snappy": True},
    "deflate": {"deflate": True},
    "TLS": {"tls_v1": True},
    "TLS with snappy": {"tls_v1": True, "snappy": True},
    "TLS with deflate": {"tls_v1": True, "deflate": True, "deflate_level": 1},
}


@pytest.mark.parametrize("options", TRANSPORTS.values(), ids=TRANSPORTS)
def test_under_load_each_message_is_handled_once(
    options: dict[str, Any], certificates: Certificates, servers: Servers, topic: str, channel: str
) -> None:
    """20,000 messages of 180 bytes, two copies of each: takes some seconds."""
    nsqds = [servers.nsqd(*certificates.nsqd_flags), servers.nsqd(*certificates.nsqd_flags)]
    messages = bodies(MESSAGES, size=180)
    for nsqd in nsqds:
        nsqd.create_channel(topic, channel)
    publish(nsqds, topic, messages)
    seen = Seen()
    if "tls_v1" in options:
        options = {**certificates.options, **options}

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, nsqds, max_in_flight=1000, **options) as reader:
            await eventually_async(lambda: reader.stats.duplicates == MESSAGES, timeout=PATIENCE)
            await nothing_left(nsqds, topic, channel)
            at_rest(reader)
            assert reader.stats.received == 2 * MESSAGES
            assert {conn._bare is None for conn in reader.conns.values()} == {bool(options)}
            for nsqd in nsqds:
                (client,) = nsqd.channel_stats(topic, channel)["clients"]
                used = {"tls_v1": client["tls"], "snappy": client["snappy"], "deflate": client["deflate"]}
                assert used == {name: bool(options.get(name)) for name in used}

    on_loop(main())
    seen.once_each(messages)


@pytest.mark.parametrize("options", TRANSPORTS.values(), ids=TRANSPORTS)
def test_small_batches_are_answered_at_once(
    options: dict[str, Any], certificates: Certificates, servers: Servers, topic: str, channel: str
) -> None:
    """Nothing stays in a buffer of TLS or of a decompressor until something else comes. Two seconds.

    Each batch is awaited before the next is published. Some bodies are larger than what is read at a time, half of them
    cannot be compressed, and reads end wherever they happen to.
    """
    nsqd = servers.nsqd(*certificates.nsqd_flags)
    seen, chance = Seen(), random.Random(7)
    published: list[bytes] = []
    if "tls_v1" in options:
        options = {**certificates.options, **options}

    def some() -> list[bytes]:
        sizes = [chance.choice((0, 10, 300, 20_000, 150_000)) for _ in range(chance.choice((1, 2, 20)))]
        return [
            b"%d " % chance.getrandbits(64) + (chance.randbytes(size) if chance.random() < 0.5 else bytes(size))
            for size in sizes
        ]

    async def main() -> None:
        async with consuming(topic, channel, seen.handle, [nsqd], **options) as reader:
            await eventually_async(lambda: reader.conns)
            (conn,) = reader.conns.values()
            for _ in range(ROUNDS):
                batch = some()
                published.extend(batch)
                await asyncio.to_thread(publish, [nsqd], topic, batch)
                await eventually_async(lambda: len(seen.handled) == len(published), timeout=PATIENCE)
            await nothing_left([nsqd], topic, channel)
            assert reader.conns == {conn.id: conn}, "it is the first one still"
            assert told([nsqd], topic, channel, "timeout_count") == [0]
            at_rest(reader)

    on_loop(main())
    seen.once_each(published)
