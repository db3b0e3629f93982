"""One of the consumers of `several`: shares a memcached, and has coroutine handlers of 20 ms.

Gets a `job.Job`. Prints how many handler runs there were when its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from job import Job, given_job

import nsqdedupe

WORK = 0.02
"""Seconds that a handler takes, while others run."""


async def consume(job: Job) -> None:
    """Consume until told to end."""
    runs = 0

    async def handle(_: Any) -> bool:  # noqa: ANN401 - pynsq's, ours
        nonlocal runs
        runs += 1
        await asyncio.sleep(WORK)
        return True

    # Patient: a message that is handled without its store being asked may be handled twice.
    shared = f"window={10 * job.messages}&namespace={job.topic}&connect_timeout=10&timeout=10"
    reader = nsqdedupe.DedupeReader(
        topic=job.topic,
        channel=job.channel,
        message_handler=handle,
        nsqd_tcp_addresses=job.nsqds,
        max_in_flight=job.max_in_flight,
        output_buffer_timeout=25,
        key=nsqdedupe.BODY,
        store=nsqdedupe.open_store(f"memcached://{job.memcached}?{shared}"),
    )
    await asyncio.to_thread(sys.stdin.read)
    await reader.stop()
    print(runs)


if __name__ == "__main__":
    asyncio.run(consume(given_job()))
