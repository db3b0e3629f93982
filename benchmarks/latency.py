"""Milliseconds from publishing a message to its handler, at 1,000 messages a second, beside stock pynsq.

Two real nsqds, every message published to both; what counts is the first copy that reaches a handler. One consumer
process at a time, turns interleaved, ``output_buffer_timeout=25``. The body says when it was about to be published,
by a clock that all processes of a machine share.

    make bench BENCH=latency                   # 5 rounds of 10 seconds
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import time
from collections.abc import Sequence

from contest import CONTESTANTS, Figures, contest, servers
from figures import Conditions, markdown, options, percentile, settle, spread, tell
from job import STAMP, Job

from nsqdedupe.cli.local_nsq import Nsqd

KINDS = ("pynsq", "memory", "memcached")
SIZE = 200
RATE = 1_000
LONGEST = 25.0
"""Seconds that a turn may take: an nsqd asks after 30 whether its publisher is still there."""

SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
OK = b"\x00\x00\x00\x06\x00\x00\x00\x00OK"


class Steadily:
    """Publishes to each nsqd, at a pace."""

    def __init__(self, nsqds: Sequence[Nsqd], rate: int) -> None:
        self._nsqds = nsqds
        self._rate = rate

    def __call__(self, job: Job) -> None:
        """Publish the messages of a job, each to all nsqds before the next.

        Raises:
            SystemExit: an nsqd did not take one.
        """
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(connect(nsqd)) for nsqd in self._nsqds]
            head = f"PUB {job.topic}\n".encode() + SIZE.to_bytes(4)
            began = time.perf_counter()
            for number in range(job.messages):
                time.sleep(max(0.0, began + number / self._rate - time.perf_counter()))
                rest = random.randbytes((SIZE - STAMP) // 2).hex()
                command = head + f"{time.monotonic_ns():0{STAMP}x}{rest}".encode()
                for connection in connections:
                    connection.sendall(command)
                for connection in connections:
                    if (answer := connection.recv(len(OK))) != OK:
                        raise SystemExit(f"nsqd answered {answer!r} to PUB")


def connect(nsqd: Nsqd) -> socket.socket:
    """A connection to publish on, as plain as can be."""
    connection = socket.create_connection(("127.0.0.1", nsqd.tcp_port), timeout=LONGEST)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"  V2")
    return connection


def report(results: dict[str, list[Figures]], rounds: int, job: str, header: list[str]) -> str:
    """A table: ratios to stock pynsq of the same round first."""
    rows = []
    for kind, mine in results.items():
        cells = []
        for share in SHARES.values():
            at = [[percentile(one["latencies_ms"], share) for one in results[other]] for other in (kind, KINDS[0])]
            cells.append((spread([ours / stock for ours, stock in zip(*at, strict=True)], "{:.2f}"), at[0]))
        figures = [spread(values, "{:.1f}") for _, values in cells]
        cpu = spread([one["us_per_copy"] for one in mine], "{:.1f}")
        rows.append([CONTESTANTS[kind].name, *(ratio for ratio, _ in cells), *figures, cpu])
    ratios, figures = [f"{name}, x pynsq" for name in SHARES], [f"{name}, ms" for name in SHARES]
    table = markdown(["consumer", *ratios, *figures, "us of CPU per copy"], rows)
    return "\n".join([f"{rounds} rounds, {job}; medians, (lowest to highest).", *header, "", table])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help=f"of each turn, {LONGEST:g} at most")
    args = settle(parser.parse_args())
    seconds = 0.2 if args.quick else min(args.seconds, LONGEST)
    results: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
    conditions = Conditions()
    with servers(2, memcached=True) as started:
        publisher = Steadily(started.nsqds, RATE)
        for number in range(args.rounds):
            for kind in random.sample(KINDS, len(KINDS)):
                job = Job(messages=int(RATE * seconds), stamped=True, memcached=started.cache, quick=args.quick)
                figures = contest(kind, job, started.nsqds, live=publisher)
                if len(figures["latencies_ms"]) != RATE * seconds:
                    raise SystemExit(f"{kind}: it has not handled every message")
                results[kind].append(figures)
                print(f"round {number + 1}, {kind}: {figures['us_per_copy']:.1f} us", file=sys.stderr)
        header = conditions.lines(*started.versions(), packages=["pynsq", "tornado"])
    words = f"{seconds:g} s of {RATE:,} messages a second of {SIZE} B x 2 nsqds"
    tell("latency", report(results, args.rounds, words, header), args.results)


if __name__ == "__main__":
    main()
