"""Notices other consumers of a channel, whose copies an embedded store cannot see."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from urllib.parse import urlencode

from nsqdedupe.lookupd import get_json, lookup_url

logger = logging.getLogger(__name__)

FIRST_LOOK = 1.0
"""Seconds after the first connection: nsqd counts our subscription by then."""

NEXT_LOOK = 60.0


class ReaderLike(Protocol):
    """What is needed of a reader: pynsq's own names."""

    name: str
    topic: str
    channel: str
    conns: dict[str, Any]
    lookupd_http_addresses: list[str]


class Neighbours:
    """Asks each nsqd from time to time how many clients the channel has, and warns once of others.

    Args:
        reader: whose channel is watched.

        family: the readers of this process that share its store, itself among them.
    """

    def __init__(self, reader: ReaderLike, family: Callable[[], Iterable[ReaderLike]]) -> None:
        self._reader = reader
        self._family = family
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch until others were seen. Idempotent."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._watch())

    def stop(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        pause = FIRST_LOOK
        strangers = ""
        while True:
            await asyncio.sleep(pause)
            before, strangers = strangers, await self._look()
            if before and strangers:
                break
            # For a moment nsqd still counts a reader of ours that is closed, or counts one before it is connected here.
            pause = FIRST_LOOK if strangers else NEXT_LOOK
        reader = self._reader
        logger.warning(
            "[%s] channel %s/%s has %s: copies that go there are not seen here, because "
            "this store is embedded; run one consumer per channel, or share a store between them",
            *(reader.name, reader.topic, reader.channel, strangers),
        )

    async def _look(self) -> str:
        """How many clients the channel has that are none of ours, and where. "": none."""
        reader = self._reader
        for conn in list(reader.conns.values()):
            clients = await self._clients(conn.host, conn.port)
            # All connections to this nsqd, be it under another name.
            family = [r for r in self._family() if (r.topic, r.channel) == (reader.topic, reader.channel)]
            ours = sum(conn is other or conn.peer == other.peer for r in family for other in r.conns.values())
            if clients > ours > 0:
                return f"{clients - ours} other client(s) on {conn.id}"
        return ""

    async def _clients(self, host: str, port: int) -> int:
        """How many clients the channel has on this nsqd; 0 if it cannot be had."""
        try:
            return await self._count(host, port)
        except Exception:  # noqa: BLE001 - this is a courtesy: whatever was answered must never trouble the consumer
            return 0

    async def _count(self, host: str, port: int) -> int:
        http_port = await self._http_port(host, port)
        if http_port is None:
            return 0
        reader = self._reader
        query = urlencode({"format": "json", "topic": reader.topic, "channel": reader.channel})
        stats = await _get(f"http://{_in_url(host)}:{http_port}/stats?{query}")
        channels = [channel for topic in stats.get("topics") or () for channel in topic.get("channels") or ()]
        return sum(int(channel.get("client_count") or 0) for channel in channels)

    async def _http_port(self, host: str, port: int) -> int | None:
        """Nsqlookupd knows it; else it is mostly the next one, if the nsqd there says so itself."""
        for lookupd in self._reader.lookupd_http_addresses:
            found = await _get(lookup_url(lookupd, self._reader.topic))
            for producer in found.get("producers") or ():
                if (producer.get("broadcast_address"), producer.get("tcp_port")) == (host, port):
                    http_port: int | None = producer.get("http_port")
                    return http_port
        info = await _get(f"http://{_in_url(host)}:{port + 1}/info")
        return port + 1 if info.get("tcp_port") == port else None


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _get(url: str) -> dict[str, Any]:
    """The JSON object at an address; an empty one if it cannot be had, for whatever reason."""
    try:
        return await get_json(url)
    except Exception:  # noqa: BLE001 - as above
        return {}
