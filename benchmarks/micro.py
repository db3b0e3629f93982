"""What the parts cost: nanoseconds of CPU for a fingerprint, for a look-up, for a claim and its confirmation.

- A fingerprint, by the size of the body and the kind of key.
- Claim and confirm per message, in batches of 1 to 1,000, by how many messages are remembered. A new message is
  claimed and confirmed, a duplicate is claimed and found done. Every table is full, with all its pages in memory.
  *Warm*: what is needed of the table was just looked at. *Cold*: half a gigabyte of other memory was, since.
- The same for the table alone: looked up and added in one go, or in two, or as a reader does, that is, looked up in a
  batch and each added at the place that was found when its handler has returned.
- The same for other ways to remember: a set, an OrderedDict that evicts the oldest, rbloom, and the classic table of
  one slot per hash index. What they take of memory and what they forget is told by the benchmark ``memory``.
- The time to make a table of 10^8 slots, and the first messages in it, which meet pages that are not there yet.

Of several rounds, in which the order is of chance, the medians are told.

    make bench BENCH=micro                     # 1.7 GB of memory, some minutes
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Conditions, markdown, options, settle, spread, tell
from filling import fill
from lookups import AT_ONCE, COLUMNS, TABLE_BATCH, WAYS, Deeds, Place, by_other, compare, in_batches, table_of, timed
from memory import BATCH, come
from memory import WAYS as OTHERS
from plots import lines

from nsqdedupe import BODY, MemoryStore, json_field
from nsqdedupe.fingerprint import fingerprinter
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter

SIZES = (20, 100, 200, 1_000, 2_000, 10_000, 100_000)
REMEMBERED = tuple(10**power for power in range(4, 9))
COMPARED = {
    "MemoryStore(recall=0.999)": 10**6,
    "classic: 1 way, whole ids, for 99 %": 10**5,
    "set of 16-byte hashes": 10**6,
    "OrderedDict of 16-byte hashes, oldest evicted": 10**6,
    "rbloom": 10**6,
}
"""Ways to remember of the benchmark `memory`, and how many messages each gets at most: they need too much for more."""
SLOTS = 10**8
FIRST = 100_000
"""Messages in a table that was just made."""

ROUNDS = 9


@dataclass(frozen=True)
class Message:
    """What a key is taken from."""

    body: bytes


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


def claims(remembered: Sequence[int], rounds: int, results: Path | None) -> str:
    """A table of what claims cost, and a plot."""
    stores = {count: MemoryStore(window=count, recall=0.999) for count in remembered}
    for store in stores.values():
        fill(store.table)
    places = {
        Place(count, way): Deeds(functools.partial(deeds, stores[count]), stores[count].table.contains_many)
        for way, deeds in WAYS.items()
        for count in remembered
    }
    found = compare(places, rounds)
    panels = {
        f"messages remembered ({title})": {
            way: {count: found[Place(count, way)][column] for count in remembered} for way in WAYS
        }
        for column, title in enumerate(COLUMNS)
    }
    lines("micro", "ns of CPU per message", panels, results)
    return table_of(found)


def others(remembered: Sequence[int], rounds: int) -> str:
    """A table of what other ways to remember cost, each as full as it gets."""
    found: dict[Place, list[list[float]]] = {}
    for _ in range(rounds):
        for place, columns in compare(begun_anew(remembered), 1).items():
            for values, (one,) in zip(found.setdefault(place, [[] for _ in columns]), columns, strict=True):
                values.append(one)
    return table_of(found)


def begun_anew(remembered: Sequence[int]) -> dict[Place, Deeds]:
    """The other ways to remember, filled; what does not forget would be fuller after each round."""
    places = {}
    for name, most in COMPARED.items():
        way = OTHERS[name]
        for count in remembered:
            if 10 * AT_ONCE <= count <= most and (way.package is None or importlib.util.find_spec(way.package)):
                memory = way.make(count)
                come(memory, random.Random(count), (count if way.forgets else count - 2 * AT_ONCE) // BATCH)
                places[Place(count, name)] = Deeds(functools.partial(by_other, memory), memory.knows)
    return places


def construction(slots: int, rounds: int) -> str:
    """A table of what it takes to make one, and to begin with it."""
    found: dict[str, tuple[list[float], list[float]]] = {
        what: ([], []) for what in ("in memory", "in a file, made", "in a file, opened again")
    }
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            paths = (None, Path(folder) / "table", Path(folder) / "table")
            for (made, begun), path in zip(found.values(), paths, strict=True):
                batches = in_batches([random.randbytes(16) for _ in range(FIRST)], TABLE_BATCH)
                began = time.perf_counter()
                store = MemoryStore(slots=slots, path=path)
                made.append((time.perf_counter() - began) * 1e3)
                begun.append(timed(lambda table=store.table, batches=batches: begin(table, batches), FIRST))  # type: ignore[misc]
                store.close()
    rows = [[what, spread(made, "{:,.1f}"), spread(begun, "{:,.0f}")] for what, (made, begun) in found.items()]
    return markdown([f"a table of {slots:,} slots", "to make it, ms", f"the first {FIRST:,} messages, ns each"], rows)


def begin(table: OppositeBloomFilter, batches: Sequence[Sequence[bytes]]) -> None:
    for some in batches:
        table.check_and_set_many(some)


def report(args: argparse.Namespace) -> str:
    sizes, remembered, slots = (SIZES[:3], REMEMBERED[:2], 10**5) if args.quick else (SIZES, REMEMBERED, SLOTS)
    conditions = Conditions()
    parts = [
        fingerprints(sizes, args.rounds),
        claims(remembered, args.rounds, args.results),
        others(remembered, args.rounds),
        construction(slots, args.rounds),
    ]
    packages = [package for package in ("mmh3", "msgspec", "rbloom") if importlib.util.find_spec(package)]
    header = [f"{args.rounds} rounds; medians, (lowest to highest).", *conditions.lines(packages=packages)]
    return "\n\n".join(["\n".join(header), *parts])


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(rounds=ROUNDS)
    given = settle(parser.parse_args())
    tell("micro", report(given), given.results)
