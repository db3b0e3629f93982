"""The other Python clients that still run, as contestants: gnsq (gevent) and ansq (asyncio).

Each is used as its documentation shows, with a handler that counts; see `job` for what goes in and comes out.
asyncnsq 1.2 is no contestant: it sends RDY before SUB, and nsqd closes the connection.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import Any

from job import SAMPLE_EVERY, Job, Sampler, digest, given_job

SAMPLE_EACH = 100
"""Copies after which gnsq takes a sample."""


class Counter:
    """Handles a message by counting it."""

    def __init__(self, job: Job) -> None:
        self.runs = 0
        self._check = job.check
        self._bodies: set[bytes] = set()

    def handle(self, body: bytes) -> None:
        """A copy was delivered."""
        self.runs += 1
        if self._check:
            self._bodies.add(bytes(body))

    def tell(self, sampler: Sampler) -> None:
        """Print the figures."""
        figures: dict[str, Any] = {**sampler.figures(), "runs": self.runs}
        if self._check:
            figures["digest"] = digest(self._bodies)
        print(json.dumps(figures), flush=True)


def gnsq(job: Job) -> None:
    """The gevent client."""
    gevent, client = importlib.import_module("gevent"), importlib.import_module("gnsq")
    counter, sampler = Counter(job), Sampler(job)

    def handle(_: object, message: Any) -> None:  # noqa: ANN401 - it has no types
        counter.handle(message.body)
        # Here, because as long as there is something to read no other greenlet has its turn.
        if not counter.runs % SAMPLE_EACH:
            sampler.goes_on(counter.runs)

    consumer = client.Consumer(
        job.topic,
        job.channel,
        job.nsqds,
        message_handler=handle,
        max_in_flight=job.max_in_flight,
        output_buffer_timeout=25,
    )
    consumer.start(block=False)
    while sampler.goes_on(counter.runs):
        gevent.sleep(SAMPLE_EVERY)
    counter.tell(sampler)
    gevent.get_hub().threadpool.apply(sys.stdin.read)


async def ansq(job: Job) -> None:
    """The asyncio client. Its reader knows RDY 1 alone; its connections can be told more."""
    client = importlib.import_module("ansq")
    reader = await client.create_reader(job.topic, job.channel, nsqd_tcp_addresses=job.nsqds)
    for connection in reader.connections:
        await connection.rdy(job.max_in_flight // len(job.nsqds))
    counter, sampler = Counter(job), Sampler(job)

    async def work() -> None:
        async for message in reader.messages():
            counter.handle(message.body)
            await message.fin()

    worker = asyncio.create_task(work())
    watch = asyncio.create_task(sampler.watch(lambda: counter.runs))
    await asyncio.wait((worker, watch), return_when=asyncio.FIRST_COMPLETED)
    if worker.done():
        worker.result()  # raises what went wrong
    counter.tell(sampler)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    job = given_job()
    if job.kind == "gnsq":
        gnsq(job)
    else:
        asyncio.run(ansq(job))


if __name__ == "__main__":
    main()
