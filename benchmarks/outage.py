"""How late a timer of a reader's event loop comes while its memcached is away, and its rate before and after.

Two real nsqds with a backlog, every message on both, one consumer process at a time with coroutine handlers of 5 ms.
memcached is killed, or stopped so that it does not answer, and comes back. A timer of 5 ms in the reader's process
tells how long anything else there had to wait, and how much CPU the loop's thread took meanwhile; one in an idle
process tells how late this machine alone makes it.

    make bench BENCH=outage                    # 3 rounds, memcached away for 10 s
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from contest import Servers, publish, servers
from figures import Conditions, markdown, options, settle, spread, tell
from job import Job
from sharing import Sharing

POLICIES = ("process", "requeue")
FAULTS = ("none", "killed", "hangs")
WORK = 0.005
PAUSE = 0.005
SETTLING = 0.5
"""Share of the outage's seconds after its end that do not count for the rate: memcached is asked again by then."""

Figures = dict[str, Any]


async def consume(job: Job, policy: str) -> None:
    """Consume; write figures for each line of standard input."""
    sharing = Sharing(job, WORK, on_store_error=policy) if job.nsqds else None
    probe = Probe()
    measuring = asyncio.create_task(probe.run())
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(probe.figures() | {"runs": sharing.runs if sharing else 0}), flush=True)
    measuring.cancel()


class Probe:
    """Measures how late a timer comes."""

    def __init__(self) -> None:
        self._late = self._cpu = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            began, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(PAUSE)
            late = time.perf_counter() - began - PAUSE
            self._late, self._cpu = max(self._late, late), max(self._cpu, time.thread_time() - cpu)

    def figures(self) -> dict[str, float]:
        """The latest, and the most CPU that the loop's thread took from one to the next."""
        return {"late_ms": self._late * 1e3, "cpu_ms": self._cpu * 1e3}


class Consumer:
    """Such a process.

    Args:
        job: what it consumes; one without nsqds is idle.

        policy: its ``on_store_error``.
    """

    def __init__(self, job: Job, policy: str) -> None:
        program = [sys.executable, __file__, "--consumer", json.dumps(vars(job)), policy]
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def figures(self) -> Figures:
        """What it has measured since its start."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a consumer has ended")
        found: Figures = json.loads(line)
        return found

    def rate(self, seconds: float) -> float:
        """Handler runs a second in the next seconds."""
        began, before = time.perf_counter(), self.figures()["runs"]
        time.sleep(seconds)
        after = self.figures()["runs"]
        return float((after - before) / (time.perf_counter() - began))

    def end(self) -> None:
        """Let it go."""
        self.process.kill()
        self.process.communicate()


def away(started: Servers, fault: str) -> Callable[[], object]:
    """Take memcached away; what brings it back."""
    memcached = started.memcached
    assert memcached is not None
    if fault == "none":
        return lambda: None
    if fault == "killed":
        memcached.kill()
        return memcached.start
    pid = memcached.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def turn(started: Servers, fault: str, policy: str, messages: int, seconds: float, *, quick: bool) -> Figures:
    """One consumer and one fault."""
    nsqds = started.nsqds
    topic = f"outage-{random.getrandbits(48):x}"
    job = Job(messages=messages, topic=topic, channel="bench", max_in_flight=400, memcached=started.cache)
    for nsqd in nsqds:
        nsqd.create_channel(topic, job.channel)
    publish(nsqds, job, 200, 0)
    idle = Consumer(job, policy)
    busy = Consumer(Job(**vars(job) | {"nsqds": [nsqd.tcp_address for nsqd in nsqds]}), policy)
    try:
        while not busy.figures()["runs"]:
            time.sleep(0.1)
        before = busy.rate(seconds / 3)
        comes_back = away(started, fault)
        time.sleep(seconds)
        comes_back()
        time.sleep(seconds * SETTLING)
        after = busy.rate(seconds / 3)
        if not quick and any(nsqd.depth(topic, job.channel) == 0 for nsqd in nsqds):
            raise SystemExit(f"{messages} messages are too few: nothing was left in the end")
        found = busy.figures()
        return {
            "late_ms": found["late_ms"],
            "cpu_ms": found["cpu_ms"],
            "idle_ms": idle.figures()["late_ms"],
            "again": after / max(before, 1.0),
        }
    finally:
        busy.end()
        idle.end()
        for nsqd in nsqds:
            nsqd.request("POST", "/topic/delete", topic=topic)


def report(results: Mapping[tuple[str, str], list[Figures]], words: str, header: list[str]) -> str:
    """A table."""
    forms = {"late_ms": "{:.1f}", "cpu_ms": "{:.1f}", "idle_ms": "{:.1f}", "again": "{:.2f}"}
    rows = [
        [fault, policy, *(spread([one[key] for one in mine], form) for key, form in forms.items())]
        for (fault, policy), mine in results.items()
    ]
    columns = ["memcached", "on_store_error", "timer late by, ms", "most CPU from timer to timer, ms"]
    table = markdown([*columns, "timer of an idle process, ms", "rate afterwards, x before"], rows)
    return "\n".join([f"{words}; medians, (lowest to highest).", *header, "", table])


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which memcached is away")
    args = settle(parser.parse_args())
    cases = [(fault, policy) for fault in FAULTS for policy in POLICIES]
    if args.quick:
        args.seconds, args.messages, cases = 0.3, 20_000, cases[:3]
    results: dict[tuple[str, str], list[Figures]] = {case: [] for case in cases}
    conditions = Conditions()
    with servers(2, memcached=True) as started:
        for number in range(args.rounds):
            for case in random.sample(cases, len(cases)):
                results[case].append(found := turn(started, *case, args.messages, args.seconds, quick=args.quick))
                print(f"round {number + 1}, {case}: {found}", file=sys.stderr)
        header = conditions.lines(*started.versions(), packages=["pynsq", "tornado"])
    words = f"{args.rounds} rounds, away for {args.seconds:g} s, coroutine handlers of 5 ms"
    tell("outage", report(results, words, header), args.results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--consumer"]:
        asyncio.run(consume(Job(**json.loads(sys.argv[2])), sys.argv[3]))
    else:
        main()
