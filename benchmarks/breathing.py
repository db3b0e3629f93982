"""The longest turn of the event loop while a reader is at work: how long anything else in the process must wait.

Two real nsqds with a backlog, every message on both, one consumer process at a time, turns interleaved. A callback in
each turn of the loop measures it, by the clock on the wall and by the CPU it took: on a busy machine a turn is long
because others had their turn. *Over* counts those of more than 10 ms, or 15 ms where the handler takes 5. Python's
garbage collector takes part: now and then it goes through all objects that there are, in one turn.

    make bench BENCH=breathing
"""

from __future__ import annotations

import random
import sys

from contest import CONTESTANTS, Figures, contest, servers
from figures import Conditions, markdown, options, settle, spread, tell
from job import Job

KINDS = ("pynsq", "batching", "memory", "memcached")
WORKS = {"counts only": 0.0, "takes 5 ms": 0.005}
MESSAGES = {"counts only": 50_000, "takes 5 ms": 400}
QUICK = {"counts only": 2_000, "takes 5 ms": 20}
COLUMNS = (
    ("longest_ms", "longest turn, ms", "{:.1f}"),
    ("over", "over", "{:,.0f}"),
    ("most_cpu_ms", "most CPU in a turn, ms", "{:.1f}"),
    ("over_cpu", "over by CPU", "{:,.0f}"),
    ("collection_ms", "longest garbage collection, ms", "{:.1f}"),
    ("turns", "turns", "{:,.0f}"),
)


def report(
    results: dict[tuple[str, str], list[Figures]], rounds: int, messages: dict[str, int], header: list[str]
) -> str:
    """A table; the highest of all rounds is what counts."""
    rows = [
        [CONTESTANTS[kind].name, handler, *(spread([one[key] for one in mine], form) for key, _, form in COLUMNS)]
        for (kind, handler), mine in results.items()
    ]
    job = ", ".join(f"{messages[handler]:,} messages where the handler {handler}" for handler in WORKS)
    table = markdown(["consumer", "handler", *(column for _, column, _ in COLUMNS)], rows)
    return "\n".join([f"{rounds} rounds, {job}; medians, (lowest to highest).", *header, "", table])


def main() -> None:
    args = settle(options(__doc__).parse_args())
    messages = QUICK if args.quick else MESSAGES
    results: dict[tuple[str, str], list[Figures]] = {(kind, handler): [] for kind in KINDS for handler in WORKS}
    conditions = Conditions()
    with servers(2, memcached=True) as started:
        for number in range(args.rounds):
            for kind, handler in random.sample(list(results), len(results)):
                count, work = messages[handler], WORKS[handler]
                job = Job(messages=count, work=work, turns=True, memcached=started.cache, quick=args.quick)
                figures = contest(kind, job, started.nsqds, seed=number)
                results[kind, handler].append(figures)
                print(f"round {number + 1}, {kind}, {handler}: {figures}", file=sys.stderr)
        header = conditions.lines(*started.versions(), packages=["pynsq", "tornado"])
    tell("breathing", report(results, args.rounds, messages, header), args.results)


if __name__ == "__main__":
    main()
