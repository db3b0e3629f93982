"""A consumer in a process of its own, so that it can be killed.

Usage: consumer_process.py JOURNAL OPTIONS, where OPTIONS is JSON: those of DedupeReader that JSON can say, and

    mode: "handle" (the default), "fail", "hang" (never answer) or "block" (never return)
    free: how many handler runs go on; all others wait for SIGUSR1 (the default: none waits)
    timeout: that of nsqdedupe.run
    path: of a store in a file

Each line of the journal is one fact, written at once: ``start BODY NSQD``, ``done BODY NSQD``, ``stopped``, and, once
all but those that wait are, ``confirmed``.
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
from typing import Any

from tornado.ioloop import IOLoop

import nsqdedupe


def store_in(path: str | None) -> nsqdedupe.MemoryStore | None:
    return None if path is None else nsqdedupe.MemoryStore(window=10_000, path=path)


async def confirmed(reader: nsqdedupe.DedupeReader, count: int) -> None:
    """Return when so many messages are."""
    while reader.stats.handled < count:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


def main() -> None:
    journal = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    options = json.loads(sys.argv[2])
    mode = options.pop("mode", "handle")
    free = options.pop("free", math.inf)
    timeout = options.pop("timeout", 30)
    store = store_in(options.pop("path", None))
    logging.basicConfig(level=logging.INFO)
    gate = asyncio.Event()
    begun = itertools.count(1)
    IOLoop.current().asyncio_loop.add_signal_handler(signal.SIGUSR1, gate.set)  # type: ignore[attr-defined]

    def note(*words: str) -> None:
        os.write(journal, " ".join(words).encode() + b"\n")

    async def handle(message: Any) -> bool:
        about = message.body.decode(), str(message.conn.id)
        note("start", *about)
        if mode == "hang":
            await asyncio.Event().wait()
        if mode == "block":
            time.sleep(600)  # noqa: ASYNC251 - that is what a handler does that must be killed
        number = next(begun)
        if number == free + 1:
            await confirmed(reader, free)
            note("confirmed")
        if number > free:
            await gate.wait()
        if mode == "fail":
            message.requeue(backoff=False)  # else the other copy would come after the backoff only
            return False
        note("done", *about)
        return True

    quick = {"output_buffer_timeout": 25, **options}
    reader = nsqdedupe.DedupeReader(message_handler=handle, key=nsqdedupe.BODY, store=store, **quick)
    nsqdedupe.run(timeout=timeout)
    note("stopped", str(reader.stats.in_flight))


if __name__ == "__main__":
    main()
