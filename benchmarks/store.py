"""MemcachedStore beside the naive form, one get and one set for each message: speed, and memory of memcached.

Speed: of new messages, which are looked up and recorded (claim and confirm; get and set), and of duplicates, which
are looked up (claim; get), in batches of 1 to 1,000. The naive form knows no batches. Every bucket is full. Told are
messages per second by the clock of the wall, memcached on another core, and by the client's CPU, which is what one
core could do.

Memory: how much memcached grows while it is told three windows of messages, so that every bucket is full, divided by
the window; and how much with a key for each message of one window. A claim takes memory beside that, while a message
is handled and for 10 s afterwards: so it goes by the rate, not by the window.

    make bench BENCH=store                     # some minutes
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from figures import Conditions, markdown, options, settle, spread, tell
from pymemcache import Client

from nsqdedupe import MemcachedStore
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.memcached.items import BUCKET_BYTES
from nsqdedupe.store import Claim, Verdict

RECALL = 0.999
BATCHES = (1, 10, 100, 1_000)
FEW = 2_000
"""Messages of one measurement, where each takes round trips of its own."""

MANY = 20_000
MEMORY_ROUNDS = 2
"""Figures of memory hardly differ, and take minutes."""

PIPELINE = 1_000
LEASE = 62.0
NAIVE = "a get and a set"
UNHEARD = "the same, nobody waits for the set"
MARKER = "a claim in memcached, until 10 s after its end"

_serials = itertools.count(1)


class Speed(NamedTuple):
    """Messages per second."""

    wall: float
    cpu: float
    """What one core could do, by the CPU that the client took."""


class Round(NamedTuple):
    """One measurement of one way."""

    new: Speed
    claimed: Speed
    """The first half of it: new messages looked up."""

    duplicate: Speed


class Growth(NamedTuple):
    """Bytes for each message."""

    resident: float
    slabs: float
    """By memcached's own account: the chunks that are in use."""


def digests_of(count: int) -> list[bytes]:
    digests = random.randbytes(16 * count)
    return [digests[at : at + 16] for at in range(0, len(digests), 16)]


def claims_of(digests: Sequence[bytes]) -> list[Claim]:
    return [
        Claim(digest, b"127.0.0.1:4150 a", b"process1" + next(_serials).to_bytes(8, "big"), LEASE) for digest in digests
    ]


def batches_of(claims: Sequence[Claim], size: int) -> Iterator[Sequence[Claim]]:
    for start in range(0, len(claims), size):
        yield claims[start : start + size]


def store_of(memcached: Memcached, window: int) -> MemcachedStore:
    # Patient, as nobody waits: a machine with much else to do is no outage.
    return MemcachedStore(memcached.tcp_address, window=window, recall=RECALL, connect_timeout=10, timeout=10)


class Stopwatch:
    """Adds up what the parts of a job take."""

    def __init__(self) -> None:
        self._wall = self._cpu = 0.0

    def __enter__(self) -> None:
        self._wall -= time.perf_counter()
        self._cpu -= time.process_time()

    def __exit__(self, *exc_info: object) -> None:
        self._wall += time.perf_counter()
        self._cpu += time.process_time()

    def speed(self, messages: int) -> Speed:
        """If it took so long for so many."""
        return Speed(messages / self._wall, messages / self._cpu)


def round_of(messages: int, looked: Stopwatch, recorded: Stopwatch, again: Stopwatch) -> Round:
    claimed, confirmed, duplicate = (watch.speed(messages) for watch in (looked, recorded, again))
    new = Speed(*(1 / (1 / one + 1 / other) for one, other in zip(claimed, confirmed, strict=True)))
    return Round(new, claimed, duplicate)


def batched(store: MemcachedStore, size: int, messages: int) -> Round:
    """What a batch of this size does. A batch is done before the next one comes.

    Raises:
        SystemExit: the store has not answered as it should.
    """
    new, copies = (list(batches_of(claims_of(digests), size)) for digests in [digests_of(messages)] * 2)
    told: list[Verdict] = []
    claim, confirm, again = Stopwatch(), Stopwatch(), Stopwatch()
    for batch in new:
        with claim:
            answers = store.claim(batch)
        with confirm:
            store.confirm(batch)
        told += [answer.verdict for answer in answers]
    for batch in copies:
        with again:
            answers = store.claim(batch)
        told += [answer.verdict for answer in answers]
    if told != [Verdict.NEW] * messages + [Verdict.DONE] * messages:
        raise SystemExit("the store has let a duplicate in, or left a new message out")
    return round_of(messages, claim, confirm, again)


def naive(client: Client, messages: int, *, noreply: bool) -> Round:
    """What people write first."""
    keys = [digest.hex() for digest in digests_of(messages)]
    told: list[bool] = []
    get, put, again = Stopwatch(), Stopwatch(), Stopwatch()
    with get:
        told += [client.get(key) is not None for key in keys]
    with put:
        for key in keys:
            client.set(key, b"1", noreply=noreply)
    client.version()  # they have all arrived when it answers
    with again:
        told += [client.get(key) is not None for key in keys]
    if told != [False] * messages + [True] * messages:
        raise SystemExit("memcached has let a duplicate in, or left a new message out")
    return round_of(messages, get, put, again)


def fill(store: MemcachedStore, memcached: Memcached) -> None:
    """Put a random tag into every slot."""
    client = Client(("127.0.0.1", memcached.tcp_port))
    for number in range(store.slots * 8 // BUCKET_BYTES):
        client.set(f"nsqdedupe:b:{number}", random.randbytes(BUCKET_BYTES))
    client.version()  # they have all arrived when it answers
    client.close()


def speeds(args: argparse.Namespace) -> str:
    with Memcached(memory=1024) as memcached:
        store = store_of(memcached, args.window)
        fill(store, memcached)
        client = Client(("127.0.0.1", memcached.tcp_port), no_delay=True, timeout=10)
        ways: dict[str, Callable[[], Round]] = {
            NAIVE: lambda: naive(client, args.few, noreply=False),
            UNHEARD: lambda: naive(client, args.few, noreply=True),
        }
        for size in BATCHES:
            messages = args.few if size == 1 else args.many
            ways[f"MemcachedStore, batches of {size:,}"] = lambda size=size, messages=messages: batched(  # type: ignore[misc]
                store, size, messages
            )
        found: dict[str, list[Round]] = {name: [] for name in ways}
        for number in range(args.rounds):
            for name in random.sample(list(ways), len(ways)):
                found[name].append(ways[name]())
                print(f"round {number + 1}, {name}: {found[name][-1]}", file=sys.stderr)
        client.close()
        store.close()
    return "\n\n".join(speed_table(found, clock) for clock in Speed._fields)


def speed_table(found: dict[str, list[Round]], clock: str) -> str:
    """By one clock: ratios to the naive form of the same round first."""
    rows = []
    for name, rounds in found.items():
        cells = [name]
        for part in ("new", "duplicate"):
            pairs = [
                (getattr(getattr(one, part), clock), getattr(getattr(base, part), clock))
                for one, base in zip(rounds, found[NAIVE], strict=True)
            ]
            cells.append(spread([mine / base for mine, base in pairs], "{:.1f}"))
        cells += [spread([getattr(getattr(one, part), clock) for one in rounds], "{:,.0f}") for part in Round._fields]
        rows.append(cells)
    by = {"wall": "by the wall's clock", "cpu": "by the client's CPU"}[clock]
    columns = [by, "new, x naive", "duplicates, x naive", "new/s", "of it claimed/s", "duplicates/s"]
    return markdown(columns, rows)


def grown(tell_all: Callable[[Memcached, list[bytes]], None], messages: int, window: int) -> Growth:
    """What a memcached grows by for each of a window when it is told so many messages."""
    with Memcached(memory=2048) as memcached:
        tell_all(memcached, digests_of(PIPELINE))  # what is needed on the way is there before
        before = sizes(memcached)
        for start in range(0, messages, window):
            tell_all(memcached, digests_of(min(window, messages - start)))
        after = sizes(memcached)
        if int(memcached.stats()["evictions"]):
            raise SystemExit("memcached had too little memory")
    return Growth(*((now - then) / min(window, messages) for now, then in zip(after, before, strict=True)))


def sizes(memcached: Memcached) -> tuple[int, int]:
    """Resident memory; and the chunks in use, of whatever size."""
    status = Path(f"/proc/{memcached.pid}/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    stats = memcached.stats("slabs")
    classes = {name.partition(":")[0] for name in stats if ":" in name}
    used = sum(int(stats[f"{number}:used_chunks"]) * int(stats[f"{number}:chunk_size"]) for number in classes)
    return resident, used


def memory(args: argparse.Namespace) -> str:
    window = args.window

    def batched_by(verb: str) -> Callable[[Memcached, list[bytes]], None]:
        def tell_all(memcached: Memcached, digests: list[bytes]) -> None:
            store = store_of(memcached, window)
            for batch in batches_of(claims_of(digests), PIPELINE):
                getattr(store, verb)(batch)
            store.close()

        return tell_all

    ways = {
        f"MemcachedStore(recall={RECALL})": (batched_by("confirm"), 3 * window),
        "a key for each message": (set_one_by_one, window),
        MARKER: (batched_by("claim"), window // 10),
    }
    rows = []
    for name, (deed, messages) in ways.items():
        rounds = [grown(deed, messages, window) for _ in range(min(args.rounds, MEMORY_ROUNDS))]
        rows.append([name, *(spread(list(values), "{:.1f}") for values in zip(*rounds, strict=True))])
        print(rows[-1], file=sys.stderr)
    return markdown(["memory of memcached", "bytes per message, resident", "by its slabs"], rows)


def set_one_by_one(memcached: Memcached, digests: list[bytes]) -> None:
    """A key for each."""
    client = Client(("127.0.0.1", memcached.tcp_port))
    for digest in digests:
        client.set(digest.hex(), b"1")
    client.version()  # they have all arrived when it answers
    client.close()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--window", type=int, default=1_000_000)
    args = settle(parser.parse_args())
    args.few, args.many = FEW, MANY
    if args.quick:
        args.few, args.many, args.window = 200, 2_000, 50_000
    conditions = Conditions()
    with Memcached() as memcached:
        version = f"memcached {memcached.stats()['version']}"
    tables = [speeds(args), memory(args)]
    job = f"{args.rounds} rounds, a window of {args.window:,} messages at {RECALL:.1%}, every bucket full"
    header = [f"{job}; medians, (lowest to highest).", *conditions.lines(version, packages=["pymemcache"])]
    tell("store", "\n".join([*header, "", "\n\n".join(tables)]), args.results)


if __name__ == "__main__":
    main()
