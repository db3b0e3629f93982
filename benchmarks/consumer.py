"""One consumer process of the benchmarks: pynsq or nsqdedupe. See `job` for what goes in and comes out."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nsq
import nsq.conn
from filling import fill
from handlers import Handler, Handling
from job import Job, Sampler, given_job

import nsqdedupe
from nsqdedupe.fingerprint import key_hasher

RECALL = 0.999
LIMIT = 0.01
"""Seconds that a turn of the event loop should not exceed, beside what one run of the handler takes."""

Copies = Callable[[], int]
"""How many copies were handled or finished so far."""


def start(job: Job, handling: Handling, folder: Path) -> Copies:
    """Start the contestant."""
    options: dict[str, Any] = {
        "topic": job.topic,
        "channel": job.channel,
        "nsqd_tcp_addresses": job.nsqds,
        "max_in_flight": job.max_in_flight,
        "output_buffer_timeout": 25,
        **job.connection,
    }
    if job.kind == "pynsq":
        nsq.conn.SnappySocket = Patient
        nsq.Reader(message_handler=handling.handle, **options)
        return handling.runs
    if job.kind == "naive":
        handler, copies = naively(job, handling.handle)
        nsq.Reader(message_handler=handler, **options)
        return copies
    store = store_of(job, folder)
    if job.kind == "dedupe":
        decorated = nsqdedupe.dedupe(store, key=nsqdedupe.BODY, scope=f"{job.topic}/{job.channel}")(handling.handle)
        nsq.Reader(message_handler=decorated, max_tries=0, **options)
        return lambda: answered(decorated)
    reader = nsqdedupe.DedupeReader(message_handler=handling.handle, key=nsqdedupe.BODY, store=store, **options)
    return lambda: answered(reader)


class Patient(nsq.conn.SnappySocket):  # type: ignore[misc] # pynsq has no types
    """pynsq's own, but where a read ends within a compressed frame: that closes its connection, and is mended here.

    Else a turn would wait now and then for nsqd's message timeout of a minute.
    """

    def _recv(self, size: int, method: Callable[[int], bytes]) -> Any:  # noqa: ANN401 - pynsq's
        try:
            return super()._recv(size, method)
        except OSError as error:
            if error.args != (errno.EWOULDBLOCK,):
                raise
            raise BlockingIOError(*error.args, "within a frame") from None


def answered(counting: nsqdedupe.DedupeReader | nsqdedupe.DedupedHandler) -> int:
    stats = counting.stats
    return int(stats.received - stats.in_flight)


def store_of(job: Job, folder: Path) -> Any:  # noqa: ANN401 - a store, or False for none
    """Where the contestant remembers messages."""
    if job.kind == "batching":
        return False
    window = job.window or 2 * job.messages
    if job.kind == "memcached":
        # In a namespace of its own, so that no window of another job is in the way. Patient: a message that is
        # handled without its store being asked may be handled twice, and ends the benchmark.
        options = f"window={window}&recall={RECALL}&namespace={job.topic}&connect_timeout=10&timeout=10"
        return nsqdedupe.open_store(f"memcached://{job.memcached}?{options}")
    store = nsqdedupe.MemoryStore(window=window, recall=RECALL, path=folder / "table" if job.kind == "file" else None)
    if job.full:
        fill(store.table)
    return store


def naively(job: Job, handler: Handler) -> tuple[Handler, Copies]:
    """What people write first: ask memcached before each message, and tell it afterwards."""
    host, _, port = job.memcached.rpartition(":")
    client = importlib.import_module("pymemcache").Client((host, int(port)), no_delay=True, timeout=10)
    fingerprint = key_hasher(job.topic, job.channel, "BODY")
    copies = 0

    def handle(message: Any) -> Any:  # noqa: ANN401 - pynsq's
        nonlocal copies
        copies += 1
        key = fingerprint(message.body).hex()
        if client.get(key) is not None:
            return True
        outcome = handler(message)
        client.set(key, b"1", expire=3600)
        return outcome

    return handle, lambda: copies


class Turns:
    """Measures the turns of the event loop while copies are handled, by a callback in each."""

    def __init__(self, copies: Copies, limit: float) -> None:
        self._copies = copies
        self._limit = limit
        self._last = self._last_cpu = 0.0
        self._all: list[tuple[float, float]] = []
        self._collecting = self._longest_collection = 0.0
        gc.callbacks.append(self._on_collection)
        self._look()

    def _on_collection(self, phase: str, _: object) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._longest_collection = max(self._longest_collection, time.thread_time() - self._collecting)

    def _look(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        if self._all or self._copies():
            self._all.append((now - self._last, cpu - self._last_cpu))
        else:
            self._longest_collection = 0.0
        self._last, self._last_cpu = now, cpu
        asyncio.get_running_loop().call_soon(self._look)

    def figures(self) -> dict[str, float]:
        """The longest turn, and the most CPU that one took: a busy machine makes turns long that do little.

        Python's garbage collector goes through all objects now and then, in whatever turn that falls.
        """
        longest, most = (max(values) * 1e3 for values in zip(*self._all, strict=True))
        over, over_cpu = (sum(value > self._limit for value in values) for values in zip(*self._all, strict=True))
        return {
            "longest_ms": longest,
            "over": over,
            "most_cpu_ms": most,
            "over_cpu": over_cpu,
            "collection_ms": self._longest_collection * 1e3,
            "turns": len(self._all),
        }


async def measure(job: Job) -> None:
    """Start the contestant, watch it, print the figures, and wait to be let go."""
    handling = Handling(job)
    with tempfile.TemporaryDirectory() as folder:
        copies = start(job, handling, Path(folder))
        sampler = Sampler(job)
        turns = Turns(copies, LIMIT + job.work) if job.turns else None
        await sampler.watch(copies)
        figures = sampler.figures() | handling.figures() | (turns.figures() if turns else {})
        print(json.dumps(figures), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(measure(given_job()))
