"""What the parts cost: nanoseconds of CPU for a fingerprint, for a look-up, for a claim and its confirmation.

- A fingerprint, by the size of the body and the kind of key.
- Claim and confirm per message, in batches of 1 to 1,000, by how many messages are remembered. A new message is
  claimed and confirmed, a duplicate is claimed and found done. Every table is full, with all its pages in memory.
  *Warm*: what is needed of the table was just looked at. *Cold*: half a gigabyte of other memory was, since.
- The same for the table alone: looked up and added in one go or in two, or looked up.
- The time to make a table of 10^8 slots.

Of several rounds, in which the order is of chance, the medians are told.

    make bench BENCH=micro                     # 1.7 GB of memory, some minutes
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from figures import Conditions, markdown, options, settle, spread, tell
from filling import fill
from plots import lines

from nsqdedupe import BODY, MemoryStore, json_field
from nsqdedupe.fingerprint import fingerprinter
from nsqdedupe.store import Claim, Verdict

SIZES = (20, 100, 200, 1_000, 2_000, 10_000, 100_000)
BATCHES = (1, 10, 100, 1_000)
TABLE_BATCH = 100
REMEMBERED = tuple(10**power for power in range(4, 9))
AT_ONCE = 10_000
"""Messages of one measurement; half a window where that is less, so that all are remembered."""

SLOTS = 10**8

T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """What a key is taken from."""

    body: bytes


def timed(deed: Callable[[], None], count: int) -> float:
    """Nanoseconds of CPU for one of so many."""
    began = time.process_time_ns()
    deed()
    return (time.process_time_ns() - began) / count


def fingerprints(sizes: Sequence[int], rounds: int) -> str:
    """A table of what a fingerprint costs."""
    kinds = {
        "BODY": fingerprinter("topic", "channel", BODY),
        "BODY, secret=": fingerprinter("topic", "channel", BODY, b"secret"),
        "json_field": fingerprinter("topic", "channel", json_field("id")),
    }
    rows = []
    for size in sizes:
        count = max(200, 2_000_000 // (size + 100))
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            messages = [Message(document(size)) for _ in range(count)]
            for kind in random.sample(list(kinds), len(kinds)):
                of = kinds[kind]
                found[kind].append(timed(lambda of=of, messages=messages: drain(of, messages), count))  # type: ignore[misc]
        rows.append([f"{size:,}", *(spread(values, "{:,.0f}") for values in found.values())])
    return markdown(["bytes of the body", *(f"{kind}, ns" for kind in kinds)], rows)


def drain(of: Callable[[Message], bytes], messages: Sequence[Message]) -> None:
    for message in messages:
        of(message)


def document(size: int) -> bytes:
    """A JSON body of that size, or a little more, whose first field is an id."""
    head = {"id": f"{random.getrandbits(32):08x}"}
    short = size - len(json.dumps(head)) - len(', "rest": ""')
    return json.dumps(head | ({"rest": random.randbytes(short // 2).hex()} if short > 0 else {})).encode()


class Place(NamedTuple):
    """One line of the table of claims."""

    remembered: int
    way: str


COLUMNS = ("new, warm", "new, cold", "duplicate, warm", "duplicate, cold")


def claims_of(digests: Sequence[bytes]) -> list[Claim]:
    return [Claim(digest, b"127.0.0.1:4150 0123456789abcdef", random.randbytes(16), 62.0) for digest in digests]


def in_batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def measure(store: MemoryStore, place: Place, *, cold: Callable[[], object] | None) -> tuple[float, float]:
    """What a new message costs and what a duplicate does.

    Raises:
        SystemExit: the store has not answered as it should.
    """
    count = min(AT_ONCE, place.remembered // 2)
    digests = [random.randbytes(16) for _ in range(count)]
    prepare = cold or (lambda: store.table.contains_many(digests))
    new, done = WAYS[place.way](store, digests)
    prepare()
    fresh = timed(new, count)
    prepare()
    return fresh, timed(done, count)


def by_claims(
    store: MemoryStore, digests: Sequence[bytes], batch: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    batches, again = (in_batches(claims_of(digests), batch) for _ in range(2))

    def new() -> None:
        for claims in batches:
            if store.claim(claims)[-1].verdict is not Verdict.NEW:
                raise SystemExit("a new message was taken for another one")
            store.confirm(claims)

    def done() -> None:
        for claims in again:
            if store.claim(claims)[-1].verdict is not Verdict.DONE:
                raise SystemExit("a message was forgotten at once")

    return new, done


def by_table(
    store: MemoryStore, digests: Sequence[bytes], *, at_once: bool
) -> tuple[Callable[[], None], Callable[[], None]]:
    batches, table = in_batches(digests, TABLE_BATCH), store.table

    def new() -> None:
        for some in batches:
            if any(table.check_and_set_many(some) if at_once else table.contains_many(some)):
                raise SystemExit("a new message was taken for another one")
            if not at_once:
                table.add_many(some)

    def done() -> None:
        for some in batches:
            if not all(table.contains_many(some)):
                raise SystemExit("a message was forgotten at once")

    return new, done


WAYS = {
    f"table, batches of {TABLE_BATCH}, looked up and added": functools.partial(by_table, at_once=True),
    f"table, batches of {TABLE_BATCH}, looked up, then added": functools.partial(by_table, at_once=False),
    **{f"store, batches of {batch:,}": functools.partial(by_claims, batch=batch) for batch in BATCHES},
}


def claims(remembered: Sequence[int], rounds: int, results: Path | None) -> str:
    """A table of what claims cost, and a plot."""
    stores = {count: MemoryStore(window=count, recall=0.999) for count in remembered}
    for store in stores.values():
        fill(store.table)
    other = random.randbytes(1 << 20) * (512 if max(remembered) > AT_ONCE * 10 else 1)
    places = [Place(count, way) for way in WAYS for count in remembered]
    found: dict[Place, tuple[list[float], ...]] = {place: ([], [], [], []) for place in places}
    for number in range(rounds):
        for place in random.sample(places, len(places)):
            store = stores[place.remembered]
            warm = measure(store, place, cold=None)
            cold = measure(store, place, cold=lambda: other[::64])
            for values, one in zip(found[place], (warm[0], cold[0], warm[1], cold[1]), strict=True):
                values.append(one)
        print(f"round {number + 1} of claims", file=sys.stderr)
    rows = [
        [place.way, f"{place.remembered:,}", *(spread(values, "{:,.0f}") for values in found[place])]
        for place in places
    ]
    panels = {
        f"messages remembered ({title})": {
            way: {count: found[Place(count, way)][column] for count in remembered} for way in WAYS
        }
        for column, title in enumerate(COLUMNS)
    }
    lines("micro", "ns of CPU per message", panels, results)
    return markdown(["what", "messages remembered", *(f"{column}, ns" for column in COLUMNS)], rows)


def construction(slots: int, rounds: int) -> str:
    """A table of what it takes to make one."""
    found: dict[str, list[float]] = {"in memory": [], "in a file, made": [], "in a file, opened again": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            paths = (None, Path(folder) / "table", Path(folder) / "table")
            for what, path in zip(found, paths, strict=True):
                began = time.perf_counter()
                store = MemoryStore(slots=slots, path=path)
                found[what].append((time.perf_counter() - began) * 1e3)
                store.close()
    rows = [[what, spread(values, "{:,.1f}")] for what, values in found.items()]
    return markdown([f"a table of {slots:,} slots", "ms"], rows)


def report(args: argparse.Namespace) -> str:
    sizes, remembered, slots = (SIZES[:3], REMEMBERED[:2], 10**5) if args.quick else (SIZES, REMEMBERED, SLOTS)
    conditions = Conditions()
    parts = [
        fingerprints(sizes, args.rounds),
        claims(remembered, args.rounds, args.results),
        construction(slots, args.rounds),
    ]
    header = [f"{args.rounds} rounds; medians, (lowest to highest).", *conditions.lines(packages=["mmh3", "msgspec"])]
    return "\n\n".join(["\n".join(header), *parts])


if __name__ == "__main__":
    given = settle(options(__doc__).parse_args())
    tell("micro", report(given), given.results)
