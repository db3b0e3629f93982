"""A reader that shares a memcached, with coroutine handlers; as a program, one of the consumers of `several`.

The program gets a `job.Job`, and prints how many handler runs there were when its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from job import Job, given_job

import nsqdedupe

WORK = 0.02
"""Seconds that a handler takes in `several`, while others run."""

PATIENT = "&connect_timeout=10&timeout=10"
"""For the store: a message that is handled without its being asked may be handled twice."""


class Sharing:
    """Such a reader, at work until its process ends.

    Args:
        job: what it consumes.

        work: seconds that a handler takes.

        store: further options of the store.

        options: further options of the reader.
    """

    def __init__(self, job: Job, work: float, store: str = "", **options: Any) -> None:  # noqa: ANN401 - a reader's
        self.runs = 0
        """How often a handler was called."""
        self._work = work
        self.reader = nsqdedupe.DedupeReader(
            topic=job.topic,
            channel=job.channel,
            message_handler=self._handle,
            nsqd_tcp_addresses=job.nsqds,
            max_in_flight=job.max_in_flight,
            output_buffer_timeout=25,
            key=nsqdedupe.BODY,
            store=nsqdedupe.open_store(
                f"memcached://{job.memcached}?window={10 * job.messages}&namespace={job.topic}{store}"
            ),
            **options,
        )

    async def _handle(self, _: Any) -> bool:  # noqa: ANN401 - pynsq's, ours
        self.runs += 1
        await asyncio.sleep(self._work)
        return True


async def consume(job: Job) -> None:
    """Consume until told to end."""
    sharing = Sharing(job, WORK, PATIENT)
    await asyncio.to_thread(sys.stdin.read)
    await sharing.reader.stop()
    print(sharing.runs)


if __name__ == "__main__":
    asyncio.run(consume(given_job()))
