"""What a consumer process of the benchmarks is asked to do, and how it measures itself.

A job goes to the process as JSON on its command line; the figures come back as one line of JSON, and the process
ends when its standard input does: by then nsqd has had every answer. The go-nsq contestants
(tools/nsq/consumer) read the same job.

Figures lie between 5 % and 95 % of the copies: the ends say more about nsqd's buffer timer than about the consumer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_EVERY = 0.005
TIMEOUT = 300.0

STAMP = 16
"""Hexadecimal digits of a time in nanoseconds, with which stamped bodies begin."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One contestant's turn."""

    messages: int

    kind: str = ""
    """Which consumer; see `contest.CONTESTANTS`. `contest.contest` fills it in, and the next three."""

    topic: str = ""
    channel: str = ""
    nsqds: list[str] = field(default_factory=list)
    copies: int = 2
    """Of each message, over all nsqds."""

    max_in_flight: int = 2500
    handlers: int = 1
    """Of go-nsq, at the same time."""

    coroutine: bool = False
    """Whether the handler is a coroutine function, one that awaits nothing."""

    work: float = 0.0
    """Seconds that a handler takes, without giving up its thread."""

    window: int = 0
    """Messages that the store remembers; 0: twice as many as there are, so that none slips if an nsqd runs ahead."""

    full: bool = False
    """Whether the table is full of other messages when the reader starts."""

    memcached: str = ""
    """Its address, for those who need one."""

    connection: dict[str, object] = field(default_factory=dict)
    """Further options of the connection, as `nsq.Reader` takes them: TLS, compression."""

    quick: bool = False
    """Whether figures are those from start to end, because there are too few copies to leave any out."""

    check: bool = False
    """Whether each body that is handled is looked at, which costs time."""

    turns: bool = False
    """Whether the turns of the event loop are measured, which makes it spin."""

    stamped: bool = False
    """Whether bodies begin with the time at which they were published; then latency is measured."""


def given_job() -> Job:
    """The job on the command line."""
    return Job(**json.loads(sys.argv[1]))


def digest(bodies: Iterable[bytes]) -> str:
    """Names a set of bodies, whatever their order; each must be there once."""
    every = 0
    for body in bodies:
        every ^= int.from_bytes(hashlib.sha256(body).digest()[:8])
    return f"{every:016x}"


def peak_memory() -> float:
    """Megabytes that this process took at most.

    Not ``ru_maxrss``: that begins with the memory of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


class Sampler:
    """Watches a consumer at work: time and CPU by the number of copies."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._total = job.messages * job.copies
        self._samples: list[tuple[float, float, int]] = []
        self._deadline = time.monotonic() + TIMEOUT

    def goes_on(self, copies: int) -> bool:
        """Note how many copies were handled so far; whether there are more to come."""
        if copies >= self._total:
            return False
        self._samples.append((time.perf_counter(), time.process_time(), copies))
        if time.monotonic() > self._deadline:
            raise SystemExit(f"{self._job.kind}: {copies} of {self._total} copies after {TIMEOUT:g} s")
        return True

    async def watch(self, copies: Callable[[], int]) -> None:
        """Return when all copies were handled, on an event loop."""
        while self.goes_on(copies()):  # noqa: ASYNC110 - an event would have to be set by the contestant
            await asyncio.sleep(SAMPLE_EVERY)

    def figures(self) -> dict[str, float]:
        """What it came to between 5 % and 95 % of the copies; of a check, nothing."""
        if self._job.check:
            return {}
        low, high = self._total * 0.05, self._total * 0.95
        within = [sample for sample in self._samples if self._job.quick or low <= sample[2] <= high]
        if self._job.quick:
            within.append((time.perf_counter(), time.process_time(), self._total))
        if not within or within[0][2] == within[-1][2]:
            raise SystemExit(f"{self._job.kind}: too few samples: give it more messages than {self._job.messages}")
        (began, cpu_before, first), (ended, cpu_after, last) = within[0], within[-1]
        return {
            "us_per_copy": (cpu_after - cpu_before) / (last - first) * 1e6,
            "copies_per_s": (last - first) / (ended - began),
            "peak_mb": peak_memory(),
        }
