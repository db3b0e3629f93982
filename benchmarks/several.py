"""What three consumers on one channel do, beside one of them alone: they share a memcached.

Two real nsqds, every message on both, coroutine handlers of 20 ms, max_in_flight 50. Each round is a turn of one
consumer process and a turn of three, in an order of chance, with as many messages for each process. Rates lie between
10 % and 90 % of the copies. A turn in which a message was not handled just once ends the benchmark.

    make bench BENCH=several                   # 5 rounds of 5,000 messages for each process
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from contest import Servers, clients, cpu_seconds, publish, servers, wait_for
from figures import Conditions, markdown, options, settle, spread, tell
from job import Job

from nsqdedupe.cli.local_nsq import Nsqd

MAX_IN_FLIGHT = 50
PROCESSES = (1, 3)
LOOK_EVERY = 0.02


class Turn(NamedTuple):
    """What came of one."""

    rate: float
    """Messages a second."""

    deferred: int
    """Most copies that were deferred in one of the nsqds."""

    nsqd_us: float
    """CPU of the nsqds for each copy."""


class Watch:
    """Looks at the nsqds until a channel has nothing left."""

    def __init__(self, nsqds: Sequence[Nsqd], job: Job) -> None:
        self._nsqds = nsqds
        self._job = job
        self._samples: list[tuple[float, int]] = []
        self.deferred = 0

    def over(self) -> bool:
        """Look, and wait a moment; whether nothing is left."""
        left = 0
        for nsqd in self._nsqds:
            stats = nsqd.channel_stats(self._job.topic, self._job.channel)
            left += stats["depth"] + stats["in_flight_count"] + stats["deferred_count"]
            self.deferred = max(self.deferred, stats["deferred_count"])
        self._samples.append((time.perf_counter(), left))
        time.sleep(LOOK_EVERY)
        return left == 0

    def rate(self) -> float:
        """Messages a second."""
        copies = self._job.messages * self._job.copies
        within = [sample for sample in self._samples if 0.1 * copies <= sample[1] <= 0.9 * copies]
        if self._job.quick or len(within) < 2:
            within = self._samples
        (began, most), (ended, least) = within[0], within[-1]
        return (most - least) / self._job.copies / (ended - began)


def turn(processes: int, messages: int, started: Servers, *, quick: bool) -> Turn:
    """Have so many processes consume a backlog.

    Raises:
        SystemExit: a message was lost, or handled twice.
    """
    job = Job(
        messages=processes * messages,
        kind=f"{processes} processes",
        topic=f"several-{random.getrandbits(48):x}",
        channel="bench",
        nsqds=[nsqd.tcp_address for nsqd in started.nsqds],
        max_in_flight=MAX_IN_FLIGHT,
        memcached=started.cache,
        quick=quick,
    )
    for nsqd in started.nsqds:
        nsqd.create_channel(job.topic, job.channel)
    # Channels whose deferred copies are looked after from the first on; nsqd finds new ones every 5 s.
    for nsqd in started.nsqds:
        nsqd.restart()
    program = [sys.executable, str(Path(__file__).with_name("sharing.py")), json.dumps(vars(job))]
    with contextlib.ExitStack() as stack:
        consumers = [
            stack.enter_context(subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(processes)
        ]
        connected = [processes] * len(started.nsqds)
        wait_for("them to connect", lambda: [clients(n, job) for n in started.nsqds] == connected, consumers[0])
        before = sum(map(cpu_seconds, started.nsqds))
        publish(started.nsqds, job, 200, 0)
        watch = Watch(started.nsqds, job)
        while not watch.over():
            if any(consumer.poll() is not None for consumer in consumers):
                raise SystemExit(f"{job.kind}: one of them has ended")
        nsqd_us = (sum(map(cpu_seconds, started.nsqds)) - before) / (job.messages * job.copies) * 1e6
        handled = [int(consumer.communicate("")[0]) for consumer in consumers]
    if sum(handled) != job.messages:
        raise SystemExit(f"{job.kind}: handled {' + '.join(map(str, handled))} messages, not {job.messages}")
    for nsqd in started.nsqds:
        nsqd.request("POST", "/topic/delete", topic=job.topic)
    return Turn(watch.rate(), watch.deferred, nsqd_us)


def report(results: dict[int, list[Turn]], words: str, header: list[str]) -> str:
    """A table: ratios to the one alone in the same round first."""
    rows = []
    for processes, mine in results.items():
        ratios = [ours.rate / alone.rate for alone, ours in zip(results[1], mine, strict=True)]
        shares = [ours.deferred / MAX_IN_FLIGHT for ours in mine]
        cells = [spread(ratios, "{:.2f}"), spread(shares, "{:.2f}"), spread([one.rate for one in mine], "{:,.0f}")]
        rows.append([f"{processes}", *cells, spread([one.nsqd_us for one in mine], "{:.0f}")])
    columns = ["consumers", "rate, x one", "most deferred in an nsqd, x max_in_flight"]
    table = markdown([*columns, "messages/s", "nsqds, us per copy"], rows)
    return "\n".join([f"{words}; medians, (lowest to highest).", *header, "", table])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--messages", type=int, default=5_000, help="for each process")
    args = settle(parser.parse_args())
    messages = 100 if args.quick else args.messages
    results: dict[int, list[Turn]] = {processes: [] for processes in PROCESSES}
    conditions = Conditions()
    with servers(2, memcached=True) as started:
        for number in range(args.rounds):
            for processes in random.sample(PROCESSES, len(PROCESSES)):
                results[processes].append(found := turn(processes, messages, started, quick=args.quick))
                print(f"round {number + 1}, {processes}: {found}", file=sys.stderr)
        header = conditions.lines(*started.versions(), packages=["pynsq", "tornado"])
    words = f"{args.rounds} rounds, {messages:,} messages of 200 B for each consumer, handlers of 20 ms"
    tell("several", report(results, f"{words}, max_in_flight {MAX_IN_FLIGHT}", header), args.results)


if __name__ == "__main__":
    main()
