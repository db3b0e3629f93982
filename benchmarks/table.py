"""What a table in a file costs, beside one in memory: nanoseconds per message, and their ratio.

Both tables do the same work in turns: batches of random fingerprints, new ones looked up and added, old ones
found. Every table is full before the clock starts, and its pages are in memory. What is measured is CPU time,
page faults included. A third table waits for the disk after every batch, as if there were an option for that:
its time is the wall's.

    make bench BENCH=table                          # 2**20 slots, 30 rounds
    make bench BENCH=table ARGS="--slots 16777216 --directory /dev/shm"

The figures of one machine mean little: read the ratios.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import tell

from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter

BATCH = 100
BATCHES = 200
SYNCED = 10
NAMES = {"memory": "in memory", "file": "in a file", "synced": "in a file, on the disk after each batch"}
DEEDS = ("a new message: looked up, then added", "a duplicate: looked up")


def batches_of(count: int) -> list[list[bytes]]:
    several = [random.randbytes(16 * BATCH) for _ in range(count)]
    return [[digests[at : at + 16] for at in range(0, len(digests), 16)] for digests in several]


def timed(deed: Callable[[], None], clock: Callable[[], float], messages: int) -> float:
    began = clock()
    deed()
    return (clock() - began) / messages * 1e9


def fill(tables: dict[str, OppositeBloomFilter]) -> None:
    """Twice as many as there are slots: nearly every bucket is full then."""
    slots = tables["memory"].slots
    for _ in range(2 * slots // (BATCH * BATCHES) + 1):
        for batch in batches_of(BATCHES):
            for table in tables.values():
                table.add_many(batch)


def round_of(name: str, table: OppositeBloomFilter) -> tuple[float, ...]:
    """What a new message took, and a duplicate, for which no disk is waited for."""
    synced = name == "synced"
    clock = time.perf_counter if synced else time.process_time
    fresh = batches_of(SYNCED if synced else BATCHES)
    messages = len(fresh) * BATCH

    def add() -> None:
        for batch in fresh:
            table.contains_many(batch)
            table.add_many(batch)
            if synced:
                table.discard_many(())  # forgets nothing, and waits for the disk

    def find() -> None:
        for batch in fresh:
            table.contains_many(batch)

    new = timed(add, clock, messages)
    if not all(all(table.contains_many(batch)) for batch in fresh):
        raise SystemExit(f"{name}: it has forgotten what it was just told")
    return (new,) if synced else (new, timed(find, clock, messages))


def report(results: dict[str, list[tuple[float, ...]]], args: argparse.Namespace) -> str:
    job = f"{args.slots:,} slots of 8 bytes, batches of {BATCH}, {args.rounds} rounds in turns"
    lines = [
        f"{job}; medians, (middle half of the rounds).",
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "| table | " + " | ".join(f"{deed}, x memory | ns" for deed in DEEDS) + " |",
        "|---|---|---|---|---|",
    ]
    base = [statistics.median(figures) for figures in zip(*results["memory"], strict=True)]
    for name, rounds in results.items():
        cells = []
        for memory, figures in zip(base, zip(*rounds, strict=True), strict=False):
            low, middle, high = statistics.quantiles(figures, n=4)
            cells += [f"{middle / memory:.2f}", f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"]
        lines.append(f"| {NAMES[name]} | {' | '.join((*cells, '', '')[:4])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--directory", help="where the files lie; its disk decides what waiting for it costs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        tables = {
            name: OppositeBloomFilter(args.slots, path=None if name == "memory" else Path(folder) / name)
            for name in NAMES
        }
        fill(tables)
        results: dict[str, list[tuple[float, ...]]] = {name: [] for name in NAMES}
        for _ in range(args.rounds):
            for name in random.sample(list(NAMES), len(NAMES)):
                results[name].append(round_of(name, tables[name]))
        for table in tables.values():
            table.close()
    tell(f"table-{args.slots}", report(results, args))


if __name__ == "__main__":
    main()
