"""Publishes events to every nsqd, in a burst twice a second, and writes down which ones all have acknowledged.

While an nsqd is down, what it has not acknowledged is published again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nsqdedupe
from nsqdedupe.cli.cluster.account import PUBLISHED, Journal, event_id

PERIOD = 0.5
"""Seconds from burst to burst: between two of them the nsqds are empty for a moment, and the summary sees it."""

AT_ONCE = 20
"""Bursts on their way: when so many wait for an nsqd that is down, no more are made."""

RETRY_PAUSE = 0.5
"""Seconds before publishing again what not all nsqds acknowledged."""

TIMEOUT = 1.0
"""Seconds that the nsqds have to acknowledge."""


class Publisher:
    """Publishes events, each until all nsqds have it.

    Args:
        addresses: ``host:port`` of each nsqd.

        topic: where to.

        journal: where it is written down.
    """

    def __init__(self, addresses: Sequence[str], topic: str, journal: Journal) -> None:
        self._addresses = list(addresses)
        self._topic = topic
        self._journal = journal

    async def run(self, rate: int, messages: int | None) -> None:
        """Return when so many messages are acknowledged by all nsqds; None: never.

        Args:
            rate: messages a second.

            messages: how many.
        """
        run = f"{time.time_ns():x}"  # so that no id comes again when the program is started again
        room = asyncio.Semaphore(AT_ONCE)
        loop = asyncio.get_running_loop()
        async with (
            nsqdedupe.ReplicatedWriter(self._addresses, copies=len(self._addresses), timeout=TIMEOUT) as writer,
            asyncio.TaskGroup() as group,
        ):
            made = 0
            next_burst = loop.time()
            while messages is None or made < messages:
                await room.acquire()
                await asyncio.sleep(next_burst - loop.time())
                next_burst = max(next_burst + PERIOD, loop.time())
                size = max(1, round(rate * PERIOD))
                burst = range(made, made + size if messages is None else min(made + size, messages))
                made = burst.stop
                task = group.create_task(self._publish(writer, [event_id(run, number) for number in burst]))
                task.add_done_callback(lambda _: room.release())

    async def _publish(self, writer: nsqdedupe.ReplicatedWriter, events: Sequence[str]) -> None:
        bodies = [json.dumps({"id": event}).encode() for event in events]
        while True:
            try:
                await writer.publish_many(self._topic, bodies)
            except nsqdedupe.PublishError:
                # Some nsqd may have them: so there will be further copies, which consumers recognise.
                await asyncio.sleep(RETRY_PAUSE)
            else:
                self._journal.write(PUBLISHED, events)
                return


def main(argv: Sequence[str] | None = None) -> None:
    """Run it until all is published, or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topic", default="events")
    parser.add_argument("--nsqd-tcp-address", action="append", required=True, help="give it once for each nsqd")
    parser.add_argument("--account", type=Path, required=True, help="the directory of the journals")
    parser.add_argument("--rate", type=int, default=100, help="events a second")
    parser.add_argument("--messages", type=int, help="how many; else it goes on until it is stopped")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio.run makes one
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        journal = Journal(args.account, "publisher")
        await Publisher(args.nsqd_tcp_address, args.topic, journal).run(args.rate, args.messages)

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(run())


if __name__ == "__main__":
    main()
