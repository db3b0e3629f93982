"""A consumer in a process of its own, so that it can be killed.

Usage: consumer_process.py JOURNAL OPTIONS, where OPTIONS is JSON: those of DedupeReader that JSON can say, and

    mode: "handle" (the default), "fail", "hang" (never answer), "block" (never return) or "die" (kill the process)
    free: how many handler runs go on; all others wait for SIGUSR1 (the default: none waits)
    pause: seconds that each handler run takes at least
    timeout: that of nsqdedupe.run
    path: of a store in a file
    url: of a store
    decorated: a stock reader whose handler is decorated

Each line of the journal is one fact, written at once: ``start COPY TRIES TIME``, ``failed COPY`` and ``done COPY``,
where COPY is BODY NSQD PROCESS; ``gave-up BODY``, ``stopped IN_FLIGHT``, ``stats JSON`` and, once all but those that
wait are, ``confirmed``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import nsq
from tornado.ioloop import IOLoop

import nsqdedupe

Note = Callable[..., None]
Counting = nsqdedupe.DedupeReader | nsqdedupe.DedupedHandler


def store_in(path: str | None, url: str | None) -> nsqdedupe.Store | None:
    if url is not None:
        return nsqdedupe.open_store(url)
    return None if path is None else nsqdedupe.MemoryStore(window=10_000, path=path)


async def confirmed(counting: Counting, count: int) -> None:
    """Return when so many messages are."""
    while counting.stats.handled < count:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


def consumer(
    handle: Callable[[Any], Any], note: Note, store: nsqdedupe.Store | None, *, decorated: bool, **options: Any
) -> Counting:
    """A reader at work, or what counts for it."""
    if decorated:
        assert store is not None
        scope = f"{options['topic']}/{options['channel']}"
        handler = nsqdedupe.dedupe(store, key=nsqdedupe.BODY, scope=scope)(handle)
        nsq.Reader(message_handler=handler, max_tries=0, **options)
        return handler

    class Reader(nsqdedupe.DedupeReader):
        def giving_up(self, message: Any) -> None:
            note("gave-up", message.body.decode())

    return Reader(message_handler=handle, key=nsqdedupe.BODY, store=store, **options)


def main() -> None:
    journal = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    options = json.loads(sys.argv[2])
    mode = options.pop("mode", "handle")
    free = options.pop("free", math.inf)
    pause = options.pop("pause", 0.0)
    timeout = options.pop("timeout", 30)
    store = store_in(options.pop("path", None), options.pop("url", None))
    decorated = options.pop("decorated", False)
    logging.basicConfig(level=logging.INFO)
    gate = asyncio.Event()
    begun = itertools.count(1)
    IOLoop.current().asyncio_loop.add_signal_handler(signal.SIGUSR1, gate.set)  # type: ignore[attr-defined]

    def note(*words: object) -> None:
        os.write(journal, " ".join(map(str, words)).encode() + b"\n")

    async def handle(message: Any) -> bool:
        about = message.body.decode(), message.conn.id, os.getpid()
        note("start", *about, message.tries, time.monotonic())
        if mode == "hang":
            await asyncio.Event().wait()
        if mode == "block":
            time.sleep(600)  # noqa: ASYNC251 - that is what a handler does that must be killed
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        number = next(begun)
        if number == free + 1:
            await confirmed(counting, free)
            note("confirmed")
        if number > free:
            await gate.wait()
        if pause:
            await asyncio.sleep(pause)
        if mode == "fail":
            note("failed", *about)
            message.requeue(backoff=False)  # else the other copy would come after the backoff only
            return False
        note("done", *about)
        return True

    quick = {"output_buffer_timeout": 25, **options}
    counting = consumer(handle, note, store, decorated=decorated, **quick)
    nsqdedupe.run(timeout=timeout)
    note("stopped", counting.stats.in_flight)
    note("stats", json.dumps(counting.stats.as_dict(), separators=(",", ":")))


if __name__ == "__main__":
    main()
