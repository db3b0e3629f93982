"""One consumer process of the benchmark: reads a prepared backlog, measures itself, prints JSON.

Samples of (time, CPU, copies) are taken every few milliseconds; what is reported lies between 5 % and
95 % of the copies. The ends say more about nsqd's buffer timer than about the consumer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import nsq

import nsqdedupe

SAMPLE_EVERY = 0.005
TIMEOUT = 300.0


def make_reader(kind: str, options: dict[str, Any], messages: int) -> tuple[Any, Any, Any]:
    """The contestant, a function that counts copies, and one that counts handler runs."""
    runs = 0

    def handle(_: object) -> bool:
        nonlocal runs
        runs += 1
        return True

    if kind == "pynsq":
        return nsq.Reader(message_handler=handle, **options), lambda: runs, lambda: runs
    store: Any = False
    if kind == "dedupe":
        store = nsqdedupe.MemoryStore(window=messages, recall=0.999)
        scope = f"{options['topic']}/{options['channel']}"
        handler = nsqdedupe.dedupe(store, key=nsqdedupe.BODY, scope=scope)(handle)
        return nsq.Reader(message_handler=handler, max_tries=0, **options), lambda: answered(handler), lambda: runs
    if kind == "memory":
        store = nsqdedupe.MemoryStore(window=messages, recall=0.999)
    reader = nsqdedupe.DedupeReader(message_handler=handle, key=nsqdedupe.BODY, store=store, **options)
    return reader, lambda: answered(reader), lambda: runs


def answered(counting: nsqdedupe.DedupeReader | nsqdedupe.DedupedHandler) -> int:
    stats = counting.stats
    return int(stats.received - stats.in_flight)


async def measure(args: argparse.Namespace) -> dict[str, float]:
    options = {
        "topic": args.topic,
        "channel": args.channel,
        "nsqd_tcp_addresses": args.nsqd,
        "max_in_flight": args.max_in_flight,
        "output_buffer_timeout": 25,
    }
    total = args.messages * len(args.nsqd)
    _, copies, runs = make_reader(args.kind, options, args.messages)
    samples = []
    deadline = time.monotonic() + TIMEOUT
    while (done := copies()) < total:
        samples.append((time.perf_counter(), time.process_time(), done))
        if time.monotonic() > deadline:
            raise SystemExit(f"{args.kind}: {done} of {total} copies after {TIMEOUT:g} s")
        await asyncio.sleep(SAMPLE_EVERY)
    start = next(sample for sample in samples if sample[2] >= total * 0.05)
    end = [sample for sample in samples if sample[2] <= total * 0.95][-1]
    expected = args.messages if args.kind in ("memory", "dedupe") else total
    if runs() != expected:
        raise SystemExit(f"{args.kind}: handler ran {runs()} times, not {expected}")
    span = end[2] - start[2]
    return {"us_per_copy": (end[1] - start[1]) / span * 1e6, "copies_per_s": span / (end[0] - start[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("pynsq", "dedupe", "batching", "memory"))
    parser.add_argument("--topic", required=True)
    parser.add_argument("--channel", required=True)
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--max-in-flight", type=int, required=True)
    parser.add_argument("--nsqd", action="append", required=True)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
