"""Bytes of memory per remembered message, beside other ways to remember.

Each way has a process of its own. What is told is the growth of its resident memory, divided by the window: the number
of further messages after which a message is still remembered. Each is measured in its steady state, when more
messages than the window have come. *Recall* is the share of messages that are known after just a window of others.

    make bench BENCH=memory                    # a window of 2,000,000
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from figures import Conditions, markdown, options, settle, spread, tell
from filling import fill

from nsqdedupe.sizing import false_drop_probability, slots_for
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter

BATCH = 1_000
BLOOM_ERROR = 1e-9


class Memory(Protocol):
    """A way to remember."""

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """These came."""

    def knows(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Which of these did."""


class Table:
    """Our own structure, full from the start."""

    def __init__(self, window: int, recall: float, ways: int, tag_bytes: int) -> None:
        self._table = OppositeBloomFilter(slots_for(window, recall, ways), ways, tag_bytes)
        fill(self._table)
        self.add = self._table.add_many
        self.knows = self._table.contains_many


class Collection:
    """A set, or a Bloom filter: it knows all that came, and has to be begun anew some day."""

    def __init__(self, collection: Any) -> None:  # noqa: ANN401 - whatever has update() and `in`
        self._collection = collection
        self.add = collection.update

    def knows(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Which of these came."""
        return [fingerprint in self._collection for fingerprint in fingerprints]


class Evicting:
    """A dict in the order of arrival, whose oldest entry goes when a new one comes."""

    def __init__(self, window: int) -> None:
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._room = window

    def add(self, fingerprints: Iterable[bytes]) -> None:
        """These came."""
        for fingerprint in fingerprints:
            self._kept[fingerprint] = None
            if len(self._kept) > self._room:
                self._kept.popitem(last=False)

    def knows(self, fingerprints: Sequence[bytes]) -> list[bool]:
        """Which of these did."""
        return [fingerprint in self._kept for fingerprint in fingerprints]


@dataclass(frozen=True)
class Way:
    """A line of the report."""

    make: Callable[[int], Memory]
    """For a window."""

    false_drop: str
    """How often a new message is taken for an old one, and so lost."""

    forgets: bool = True
    share: float = 1.0
    """Of the window: some ways would need more memory than there is."""

    package: str | None = None


def table(recall: float, ways: int = 32, tag_bytes: int = 8) -> Callable[[int], Memory]:
    return lambda window: Table(window, recall, ways, tag_bytes)


def bloom(window: int) -> Memory:
    return Collection(importlib.import_module("rbloom").Bloom(window, BLOOM_ERROR))


OURS = f"{false_drop_probability(1, 32, 8):.1e}"
WAYS = {
    "MemoryStore(recall=0.99)": Way(table(0.99), OURS),
    "MemoryStore(recall=0.999)": Way(table(0.999), OURS),
    "classic: 1 way, whole ids, for 99 %": Way(table(0.99, 1, 16), "slots x 2^-128", share=0.05),
    "classic: 1 way, whole ids, for 99.9 %": Way(table(0.999, 1, 16), "slots x 2^-128", share=0.05),
    "set of 16-byte hashes": Way(lambda _: Collection(set()), "2^-128 x messages", forgets=False),
    "OrderedDict of 16-byte hashes, oldest evicted": Way(Evicting, "2^-128 x messages"),
    "rbloom": Way(bloom, f"{BLOOM_ERROR:.0e} when full", forgets=False, package="rbloom"),
}


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(way: Way, window: int) -> dict[str, float]:
    """In a process of its own: bytes per message, and the share of messages that is known a window later."""
    batches = window // BATCH
    rehearsal = way.make(BATCH)
    come(rehearsal, random.Random(0), 10)  # what is needed on the way is there before
    gc.collect()
    before = resident()
    memory = way.make(window)
    source, again = random.Random(1), random.Random(1)  # the second repeats what the first said
    come(memory, source, batches)
    known = 0
    for _ in range(batches):
        known += sum(memory.knows(fingerprints(again)))
        if way.forgets:
            come(memory, source, 1)
    gc.collect()
    return {"bytes": (resident() - before) / window, "recall": known / (batches * BATCH)}


def come(memory: Memory, source: random.Random, batches: int) -> None:
    """So many other messages come."""
    for _ in range(batches):
        memory.add(fingerprints(source))


def fingerprints(source: random.Random) -> list[bytes]:
    digests = source.randbytes(16 * BATCH)
    return [digests[at : at + 16] for at in range(0, len(digests), 16)]


def report(args: argparse.Namespace, header: list[str], found: dict[str, list[dict[str, float]]]) -> str:
    rows = []
    for name, rounds in found.items():
        way = WAYS[name]
        cells = [
            spread([one["bytes"] for one in rounds], "{:,.1f}"),
            spread([one["recall"] for one in rounds], "{:.2%}"),
        ]
        rows.append([name, *cells, "yes" if way.forgets else "no: it grows, or fills up", way.false_drop])
    columns = ["way to remember", "bytes per message", "recall a window later", "bounded", "new ones lost"]
    job = f"{args.rounds} rounds, a window of {args.window:,} messages (of the classic ones: a twentieth)"
    note = (
        "The classic ones are our table with one way, so they have a byte per slot for a cursor that they do not need."
    )
    return "\n".join([f"{job}; medians, (lowest to highest).", note, *header, "", markdown(columns, rows)])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--window", type=int, default=2_000_000)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # the process of one
    args = settle(parser.parse_args())
    if args.way:
        print(json.dumps(measure(WAYS[args.way], args.window)))
        return
    if args.quick:
        args.window = 100_000
    conditions = Conditions()
    found: dict[str, list[dict[str, float]]] = {
        name: []
        for name, way in WAYS.items()
        if way.package is None or importlib.util.find_spec(way.package) is not None
    }
    for number in range(args.rounds):
        for name, rounds in found.items():
            window = int(args.window * WAYS[name].share)
            command = [sys.executable, __file__, "--way", name, "--window", str(window)]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            rounds.append(json.loads(answer))
            print(f"round {number + 1}, {name}: {answer.strip()}", file=sys.stderr)
    packages = [way.package for name, way in WAYS.items() if way.package is not None and name in found]
    tell("memory", report(args, conditions.lines(packages=packages), found), args.results)


if __name__ == "__main__":
    main()
