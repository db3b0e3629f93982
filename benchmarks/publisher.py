"""Messages per second that ReplicatedWriter publishes to two nsqds, beside stock nsq.Writer.

Two real nsqds, every message to both, acknowledged by both. One publishing process at a time, rounds interleaved.
Stock pynsq has one `nsq.Writer` per nsqd, and publishes each message with a callback on both, many at a time.
The figures of one machine mean little: read the ratios.

    make bench BENCH=publisher          # 5 rounds of 100,000 messages x 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import nsq
from figures import spread, tell

import nsqdedupe
from nsqdedupe.cli.local_nsq import Nsqd

HERE = Path(__file__).parent
KINDS = {
    "pub": "nsq.Writer x 2, pub",
    "publish": "ReplicatedWriter, publish",
    "mpub": "nsq.Writer x 2, mpub",
    "publish_many": "ReplicatedWriter, publish_many",
}
STOCK = {"pub": "pub", "publish": "pub", "mpub": "mpub", "publish_many": "mpub"}
"""Whose rate each is divided by."""

AT_ONCE = 1_000
"""Messages that wait for their acknowledgements."""

BATCH = 500
"""Messages of one mpub or publish_many."""

DEADLINE = 300.0
"""Seconds that one contestant may take."""

Callback = Callable[[object, object], None]


class Stock:
    """How pynsq publishes to several nsqds: a writer for each, and a callback for each answer."""

    def __init__(self, addresses: list[str]) -> None:
        self.writers = [nsq.Writer([address]) for address in addresses]

    async def connect(self) -> None:
        """Return when every nsqd is connected."""
        while not all(len(writer.conns) == 1 for writer in self.writers):  # noqa: ASYNC110 - pynsq tells nobody
            await asyncio.sleep(0.01)

    def when_all_answered(self, then: Callable[[], None], failed: asyncio.Future[None]) -> Callback:
        """What nsqds that were all sent the same call; then it goes on."""
        owed = len(self.writers)

        def callback(_: object, data: object) -> None:
            nonlocal owed
            owed -= 1
            if data != b"OK":
                failed.set_exception(RuntimeError(f"nsqd answered {data!r}"))
            elif not owed:
                then()

        return callback

    async def pub(self, topic: str, bodies: list[bytes]) -> None:
        """Publish one by one, many at a time."""
        rest, left = iter(bodies), len(bodies)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def send() -> None:
            body = next(rest, None)
            if body is not None:
                callback = self.when_all_answered(answered, done)
                for writer in self.writers:
                    writer.pub(topic, body, callback)

        def answered() -> None:
            nonlocal left
            left -= 1
            send()
            if not left:
                done.set_result(None)

        for _ in range(AT_ONCE):
            send()
        await done

    async def mpub(self, topic: str, bodies: list[bytes]) -> None:
        """Publish batches."""

        async def publish(chunk: list[bytes]) -> None:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            callback = self.when_all_answered(lambda: done.set_result(None), done)
            for writer in self.writers:
                writer.mpub(topic, chunk, callback)
            await done

        await in_batches(publish, bodies)


class Ours:
    """How nsqdedupe does."""

    def __init__(self, addresses: list[str]) -> None:
        self.writer = nsqdedupe.ReplicatedWriter(addresses, copies=len(addresses))

    async def connect(self) -> None:
        """Return when every nsqd is connected."""
        await self.writer.publish("connecting", b"hello")

    async def pub(self, topic: str, bodies: list[bytes]) -> None:
        """Publish one by one, many at a time."""
        rest = iter(bodies)

        async def work() -> None:
            for body in rest:
                await self.writer.publish(topic, body)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())

    async def mpub(self, topic: str, bodies: list[bytes]) -> None:
        """Publish batches."""
        await in_batches(lambda chunk: self.writer.publish_many(topic, chunk), bodies)


async def in_batches(publish: Callable[[list[bytes]], Coroutine[Any, Any, object]], bodies: list[bytes]) -> None:
    """As many at a time as wait for their acknowledgements."""
    room = asyncio.Semaphore(AT_ONCE // BATCH)
    async with asyncio.TaskGroup() as group:
        for start in range(0, len(bodies), BATCH):
            await room.acquire()
            task = group.create_task(publish(bodies[start : start + BATCH]))
            task.add_done_callback(lambda _: room.release())


async def measure(args: argparse.Namespace) -> dict[str, float]:
    """One contestant, in a process of its own."""
    source = random.Random(args.seed)
    bodies = [source.randbytes(args.size // 2).hex().encode() for _ in range(args.messages)]
    contestant = (Stock if args.kind in {"pub", "mpub"} else Ours)(args.nsqd)
    await contestant.connect()
    run = contestant.pub if args.kind in {"pub", "publish"} else contestant.mpub
    cpu, start = time.process_time(), time.perf_counter()
    async with asyncio.timeout(DEADLINE):
        await run(args.topic, bodies)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"messages_per_s": args.messages / seconds, "us_per_message": cpu / args.messages * 1e6}


def contest(kind: str, nsqds: list[Nsqd], topic: str, number: int, args: argparse.Namespace) -> dict[str, float]:
    """Start one contestant; its measurements. Both nsqds must hold all that it published."""
    for nsqd in nsqds:
        nsqd.create_topic(topic)
    command = [sys.executable, __file__, "--kind", kind, "--topic", topic, "--seed", str(number)]
    command += ["--messages", str(args.messages), "--size", str(args.size)]
    for nsqd in nsqds:
        command += ["--nsqd", nsqd.tcp_address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr.strip()}")
    for nsqd in nsqds:
        if nsqd.depth(topic) != args.messages:
            raise SystemExit(f"{kind}: {nsqd.tcp_address} holds {nsqd.depth(topic)} messages, not {args.messages}")
        nsqd.request("POST", "/topic/delete", topic=topic)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def report(results: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> str:
    """A table: ratios to stock pynsq of the same round first, then the medians they come from."""
    job = f"{args.messages:,} messages of {args.size} B x 2 nsqds, {AT_ONCE:,} at once, {BATCH} to an mpub"
    lines = [
        f"{args.rounds} rounds, {job}; medians, (lowest to highest).",
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "| publisher | rate, x pynsq | CPU, x less than pynsq | messages/s | us of CPU per message |",
        "|---|---|---|---|---|",
    ]
    for kind, name in KINDS.items():
        pairs = list(zip(results[STOCK[kind]], results[kind], strict=True))
        cells = [
            spread([mine["messages_per_s"] / base["messages_per_s"] for base, mine in pairs], "{:.1f}"),
            spread([base["us_per_message"] / mine["us_per_message"] for base, mine in pairs], "{:.1f}"),
            spread([one["messages_per_s"] for one in results[kind]], "{:,.0f}"),
            spread([one["us_per_message"] for one in results[kind]], "{:.2f}"),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=200, help="bytes of a body")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)  # one contestant's process
    parser.add_argument("--topic", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--nsqd", action="append", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        print(json.dumps(asyncio.run(measure(args))))
        return
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with Nsqd("--mem-queue-size=10000000") as one, Nsqd("--mem-queue-size=10000000") as other:
        for number in range(args.rounds):
            for kind in random.sample(list(KINDS), len(KINDS)):
                results[kind].append(contest(kind, [one, other], f"bench_{kind}_{number}", number, args))
                print(f"round {number + 1}, {kind}: {results[kind][-1]}", file=sys.stderr)
    tell(f"publisher-{args.size}", report(results, args))


if __name__ == "__main__":
    main()
