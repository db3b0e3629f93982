"""How the CPU per copy of DedupeReader grows: it should not, but for misses of the CPU's caches.

Real nsqds with a backlog, one consumer process at a time with a handler that only counts and a MemoryStore. Four
questions, each with all else equal, turns interleaved:

- nsqds: 2 to 8 of them, every message on two.
- copies of a message: 2 to 4, on four nsqds.
- messages remembered: 10^4 to 10^8, in a table that is full when the reader starts; one nsqd has both copies.
- connections: 1 to 16, all to one nsqd that has both copies.

    make bench BENCH=growth                    # 5 rounds of 100,000 messages; 10^8 remembered take 1.5 GB
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import replace

from contest import Figures, contest, servers
from figures import Conditions, markdown, options, settle, spread, tell
from job import Job
from plots import lines

from nsqdedupe.cli.local_nsq import Nsqd

KIND = "memory"
NSQDS = 8


def questions(nsqds: list[Nsqd], plain: Job) -> Mapping[str, Mapping[int, tuple[list[Nsqd], Job]]]:
    """For each question and each place on its axis: where the messages are, and the job."""
    return {
        "nsqds": {count: (nsqds[:count], plain) for count in (2, 4, 8)},
        "copies of a message": {copies: (nsqds[:4], replace(plain, copies=copies)) for copies in (2, 3, 4)},
        "messages remembered": {
            10**power: (nsqds[:1], replace(plain, window=10**power, full=True)) for power in range(4, 9)
        },
        "connections": {
            count: (nsqds[:1], replace(plain, nsqds=spellings(nsqds[0], count))) for count in (1, 2, 4, 8, 16)
        },
    }


def spellings(nsqd: Nsqd, count: int) -> list[str]:
    """An nsqd's address, written differently: a reader makes a connection to each."""
    return [f"127.0.0.{1:0{width}}:{nsqd.tcp_port}" for width in range(1, count + 1)]


Results = dict[str, dict[int, list[Figures]]]


def report(results: Results, job: str, header: list[str]) -> str:
    """A table: how many times the CPU of the first place on the axis, in the same round."""
    rows = []
    for question, places in results.items():
        base = next(iter(places.values()))
        for place, mine in places.items():
            ratios = [one["us_per_copy"] / first["us_per_copy"] for first, one in zip(base, mine, strict=True)]
            cells = [spread(ratios, "{:.2f}"), spread([one["us_per_copy"] for one in mine], "{:.2f}")]
            rows.append([question, f"{place:,}", *cells, spread([one["peak_mb"] for one in mine], "{:,.0f}")])
    table = markdown(["what grows", "to", "CPU per copy, x the first", "us of CPU per copy", "peak MB"], rows)
    return "\n".join([f"{job}; medians, (lowest to highest).", *header, "", table])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    args = settle(parser.parse_args())
    messages = 2_000 if args.quick else args.messages
    conditions = Conditions()
    with servers(NSQDS) as started:
        asked = questions(started.nsqds, Job(messages=messages, quick=args.quick))
        if args.quick:
            asked = {question: dict(list(places.items())[:2]) for question, places in asked.items()}
        results: Results = {question: {place: [] for place in places} for question, places in asked.items()}
        turns = [(question, place) for question, places in asked.items() for place in places]
        for number in range(args.rounds):
            for question, place in random.sample(turns, len(turns)):
                where, job = asked[question][place]
                results[question][place].append(figures := contest(KIND, job, where, seed=number))
                print(f"round {number + 1}, {question} {place}: {figures}", file=sys.stderr)
        header = conditions.lines(*started.versions(), packages=["pynsq", "tornado"])
    words = f"{args.rounds} rounds, {messages:,} messages of 200 B, DedupeReader with a MemoryStore"
    tell("growth", report(results, words, header), args.results)
    panels = {
        question: {KIND: {place: [one["us_per_copy"] for one in mine] for place, mine in places.items()}}
        for question, places in results.items()
    }
    lines("growth", "us of CPU per copy", panels, args.results)


if __name__ == "__main__":
    main()
