"""The contestants among readers, and one turn of one of them on real nsqds."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from job import Job, digest

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.cli.local_nsq import Nsqd

HERE = Path(__file__).parent
TOOLS = HERE.parent / "tools"
FLAGS = ("--mem-queue-size=1000000", "--max-rdy-count=10000", "--max-body-size=100000000")
"""Room in memory for a whole backlog, and not much more: what is empty is looked at by nsqd's garbage collector too."""

BATCH = 1000
PATIENCE = 30.0
"""Seconds until nsqd must have had every answer of a consumer that has handled every copy."""

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A consumer that takes part."""

    name: str
    """As reports have it."""

    program: str = "consumer.py"
    dedupes: bool = False
    """Whether it handles each message once."""

    slow: bool = False
    """Whether it gets a fifth of the messages: a turn of it would take minutes else."""

    handlers: int = 1
    memcached: bool = False
    """Whether it needs one."""

    packages: tuple[str, ...] = ()
    """What it needs beside nsqdedupe."""


CONTESTANTS = {
    "pynsq": Contestant(name="stock pynsq, every copy handled", slow=True),
    "naive": Contestant(
        name="stock pynsq, a memcached get and set per message",
        dedupes=True,
        slow=True,
        memcached=True,
        packages=("pymemcache",),
    ),
    "gnsq": Contestant(
        name="gnsq, every copy handled", program="other_clients.py", slow=True, packages=("gnsq", "gevent")
    ),
    "ansq": Contestant(name="ansq, every copy handled", program="other_clients.py", slow=True, packages=("ansq",)),
    "go_1": Contestant(name="go-nsq, 1 handler, every copy handled", program="go"),
    "go_4": Contestant(name="go-nsq, 4 handlers, every copy handled", program="go", handlers=4),
    "go_map": Contestant(name="go-nsq, 1 handler, a map of all bodies", program="go", dedupes=True),
    "dedupe": Contestant(name="stock pynsq, @dedupe with MemoryStore", dedupes=True, slow=True),
    "batching": Contestant(name="DedupeReader, store=False"),
    "memory": Contestant(name="DedupeReader, MemoryStore", dedupes=True),
    "file": Contestant(name="DedupeReader, MemoryStore in a file", dedupes=True),
    "memcached": Contestant(
        name="DedupeReader, MemcachedStore", dedupes=True, memcached=True, packages=("pymemcache",)
    ),
}


@functools.cache
def go_program() -> Path | str:
    """The go-nsq contestants' program, or why there is none."""
    found = subprocess.run(
        [sys.executable, str(TOOLS / "build-nsq"), "--consumer"], capture_output=True, text=True, check=False
    )
    return " ".join(found.stderr.split()) if found.returncode else Path(found.stdout.strip())


def hindrance(contestant: Contestant) -> str | None:
    """Why a contestant cannot take part, or None."""
    if contestant.program == "go":
        program = go_program()
        return program if isinstance(program, str) else None
    missing = [package for package in contestant.packages if importlib.util.find_spec(package) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Servers:
    """Real ones, for as long as a benchmark runs."""

    nsqds: list[Nsqd]
    memcached: Memcached | None

    @property
    def cache(self) -> str:
        """Memcached's address; empty if there is none."""
        return self.memcached.tcp_address if self.memcached else ""

    def versions(self) -> list[str]:
        """What takes part, for `figures.Conditions`."""
        found = [f"nsqd {self.nsqds[0].request('GET', '/info')['version']}"]
        return [*found, f"memcached {self.memcached.stats()['version']}"] if self.memcached else found


@contextlib.contextmanager
def servers(nsqds: int, *flags: str, memcached: bool = False) -> Iterator[Servers]:
    """Start so many nsqds, with further flags, and a memcached if it is needed."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(Nsqd(*FLAGS, *flags)) for _ in range(nsqds)]
        yield Servers(started, stack.enter_context(Memcached(memory=1024)) if memcached else None)


def go_version() -> str:
    """Which go-nsq the program is built with."""
    pinned = (TOOLS / "nsq" / "go.mod").read_text()
    return "go-nsq " + pinned.partition("github.com/nsqio/go-nsq v")[2].split()[0]


def bodies_of(messages: int, size: int, seed: int) -> Iterator[list[bytes]]:
    """Batches of random bodies, so that fingerprints are spread as in life; the same ones for the same seed."""
    source = random.Random(seed)
    for start in range(0, messages, BATCH):
        yield [source.randbytes(size // 2).hex().encode() for _ in range(min(BATCH, messages - start))]


def publish(nsqds: Sequence[Nsqd], job: Job, size: int, seed: int) -> None:
    """Every message to as many nsqds as it has copies, by turns; to one twice if there is one."""
    for number, bodies in enumerate(bodies_of(job.messages, size, seed)):
        for copy in range(job.copies):
            nsqds[(number + copy) % len(nsqds)].mpublish(job.topic, bodies)


Publisher = Callable[[Job], None]
"""What publishes the messages of a job while its contestant is connected."""


def contest(
    kind: str, job: Job, nsqds: Sequence[Nsqd], size: int = 200, seed: int = 0, live: Publisher | None = None
) -> Figures:
    """Have one contestant consume a backlog, or what is being published.

    Args:
        kind: which contestant.

        job: what it is to do; kind, topic, channel, nsqds and handlers are filled in here. Addresses that are
            there already stay.

        nsqds: where the messages are.

        size: bytes of a body in the backlog.

        seed: of the bodies in the backlog.

        live: publishes in place of a backlog.

    Returns:
        The contestant's own figures, and ``nsqd_us_per_copy``.

    Raises:
        SystemExit: it failed, or has not handled every message as it should.
    """
    contestant = CONTESTANTS[kind]
    topic = f"{kind}-{seed}-{random.getrandbits(32):x}"
    addresses = job.nsqds or [nsqd.tcp_address for nsqd in nsqds]
    job = replace(job, kind=kind, topic=topic, channel="bench", nsqds=addresses, handlers=contestant.handlers)
    for nsqd in nsqds:
        nsqd.create_channel(topic, job.channel)
    if live is None:
        publish(nsqds, job, size, seed)
    before = sum(map(cpu_seconds, nsqds))
    found = consume(contestant, job, nsqds, live)
    found["nsqd_us_per_copy"] = (sum(map(cpu_seconds, nsqds)) - before) / (job.messages * job.copies) * 1e6
    expected = job.messages * (1 if contestant.dedupes else job.copies)
    if found["runs"] != expected:
        raise SystemExit(f"{kind}: handler ran {found['runs']} times, not {expected}")
    if job.check and found["digest"] != digest(body for batch in bodies_of(job.messages, size, seed) for body in batch):
        raise SystemExit(f"{kind}: what it handled is not what was published")
    for nsqd in nsqds:
        nsqd.request("POST", "/topic/delete", topic=topic)
    return found


def consume(contestant: Contestant, job: Job, nsqds: Sequence[Nsqd], live: Publisher | None) -> Figures:
    """Run a contestant's process until nsqd has had all its answers; its figures."""
    program = [str(go_program())] if contestant.program == "go" else [sys.executable, str(HERE / contestant.program)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*program, json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            if live is not None:
                wait_for("it to connect", lambda: all(clients(nsqd, job) for nsqd in nsqds), process)
                live(job)
            line = process.stdout.readline()
            if line:
                wait_for("its answers", lambda: not any(n.unfinished(job.topic, job.channel) for n in nsqds), process)
            process.stdin.close()
        if not line or process.returncode:
            errors.seek(0)
            raise SystemExit(f"{job.kind} ended with {process.returncode}: {errors.read().strip()}")
    figures: Figures = json.loads(line)
    return figures


def wait_for(what: str, done: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something is so that a consumer does in a moment, or until it has ended."""
    deadline = time.monotonic() + PATIENCE
    while not done() and process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"waited {PATIENCE:g} s for {what}: {process.args!r}")
        time.sleep(0.01)


def clients(nsqd: Nsqd, job: Job) -> int:
    """How many consumers an nsqd has."""
    return int(nsqd.channel_stats(job.topic, job.channel)["client_count"])


def cpu_seconds(nsqd: Nsqd) -> float:
    """User and system time of a process (Linux)."""
    fields = Path(f"/proc/{nsqd.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
