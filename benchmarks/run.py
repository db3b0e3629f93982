"""CPU per copy and copies per second of DedupeReader, beside stock pynsq and other clients.

Two real nsqds, every message on both, one consumer process at a time with a handler that only counts. Each round is
one turn of every contestant, in an order of chance, on the same messages; slow ones get a fifth of them. Before the
first round each contestant proves, on other messages, that it handles just what was published. The figures of one
machine mean little: read the ratios, which are made of turns of the same round.

    make bench                                         # 5 rounds of 200,000 messages x 2 in each case: half an hour
    make bench ARGS="--rounds 3 --cases 200 --only pynsq memory"
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from contest import CONTESTANTS, Contestant, Figures, Servers, contest, go_version, hindrance, servers
from figures import Conditions, markdown, options, settle, spread, tell
from job import Job
from plots import bars

OURS, GO, STOCK = "memory", "go_1", "pynsq"
CHECKED = 2_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the contestants of one report have to do."""

    kinds: Sequence[str]
    size: int = 200
    max_in_flight: int = 2500
    coroutine: bool = False
    share: float = 1.0
    """Of the messages."""

    @property
    def words(self) -> str:
        """For its report."""
        handler = "coroutine handler awaits nothing" if self.coroutine else "handler counts only"
        return f"{self.size} B x 2 nsqds, max_in_flight {self.max_in_flight:,}, {handler}"


FEW = (STOCK, "dedupe", "batching", OURS, "memcached")
CASES = {
    "200": Case(kinds=list(CONTESTANTS)),
    "2000": Case(kinds=list(CONTESTANTS), size=2000, share=0.5),
    "in-flight-100": Case(kinds=FEW, max_in_flight=100, share=0.5),
    "in-flight-10": Case(kinds=FEW, max_in_flight=10, share=0.2),
    "coroutine": Case(kinds=FEW, coroutine=True),
}

Rounds = dict[str, list[Figures]]


class Suite:
    """All cases on one pair of nsqds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._left_out = {kind: why for kind in args.only if (why := hindrance(of(kind)))}
        self._cases = {name: CASES[name] for name in args.cases}
        self._results: dict[str, Rounds] = {
            name: {kind: [] for kind in case.kinds if kind in args.only and kind not in self._left_out}
            for name, case in self._cases.items()
        }

    def run(self) -> None:
        """Have all contestants prove themselves, run all rounds, write the reports."""
        conditions = Conditions()
        kinds = list({kind: None for results in self._results.values() for kind in results})
        with servers(2, memcached=any(of(kind).memcached for kind in kinds)) as started:
            for kind in kinds:
                self._turn(kind, Job(messages=CHECKED, memcached=started.cache, check=True), started, 200, -1)
            for number in range(self._args.rounds):
                for name, case in self._cases.items():
                    for kind in random.sample(list(self._results[name]), len(self._results[name])):
                        job = Job(
                            messages=self._messages(case, of(kind)),
                            max_in_flight=case.max_in_flight,
                            coroutine=case.coroutine,
                            memcached=started.cache,
                            quick=self._args.quick,
                        )
                        figures = self._turn(kind, job, started, case.size, number)
                        if figures is not None:
                            self._results[name][kind].append(figures)
                            print(f"round {number + 1}, {name}, {kind}: {figures}", file=sys.stderr)
            others = [go_version()] if any(of(kind).program == "go" for kind in kinds) else []
            packages = sorted({package for kind in kinds for package in of(kind).packages})
            header = conditions.lines(*started.versions(), *others, packages=["pynsq", "tornado", *packages])
        for name in self._cases:
            tell(f"reader-{name}", self._report(name, header), self._args.results)
        self._plot()

    def _turn(self, kind: str, job: Job, started: Servers, size: int, seed: int) -> Figures | None:
        """A contestant's figures; None if it is somebody else's and failed: then it is left out of all reports."""
        if kind in self._left_out:
            return None
        try:
            return contest(kind, job, started.nsqds, size, seed)
        except SystemExit as why:
            if of(kind).program == "consumer.py":
                raise
            print(f"{kind} is left out: {why}", file=sys.stderr)
            self._left_out[kind] = str(why).splitlines()[-1]
            for results in self._results.values():
                results.pop(kind, None)
            return None

    def _messages(self, case: Case, contestant: Contestant) -> int:
        return int(self._args.messages * case.share * (0.2 if contestant.slow else 1))

    def _report(self, name: str, header: list[str]) -> str:
        """A table: ratios to stock pynsq of the same round first, then the medians they come from."""
        case, results = self._cases[name], self._results[name]
        all_of_them = f"{self._args.messages * case.share:,.0f} messages (slow ones: a fifth)"
        lines = [f"{self._args.rounds} rounds, {all_of_them} of {case.words}; medians, (lowest to highest).", *header]
        lines += [f"Left out: {of(kind).name} ({why})." for kind, why in self._left_out.items()]
        columns = ["consumer", "CPU, x less than pynsq", "rate, x pynsq", "us of CPU per copy", "copies/s"]
        rows = [self._row(results, kind) for kind in results]
        lines += ["", markdown([*columns, "nsqds, us per copy", "peak MB"], rows)]
        if OURS in results and GO in results:
            ratios = [spread(pair, "{:.1f}") for pair in beside(results, OURS, GO)]
            lines += ["", f"{of(OURS).name}, beside {of(GO).name}: {ratios[0]} x less CPU, {ratios[1]} x its rate."]
        return "\n".join(lines)

    def _row(self, results: Rounds, kind: str) -> list[str]:
        ratios = [spread(pair, "{:.1f}") for pair in beside(results, kind, STOCK)] if STOCK in results else ["", ""]
        forms = {"us_per_copy": "{:.2f}", "copies_per_s": "{:,.0f}", "nsqd_us_per_copy": "{:.1f}", "peak_mb": "{:.0f}"}
        figures = [spread([one[key] for one in results[kind]], form) for key, form in forms.items()]
        return [of(kind).name, *ratios, *figures]

    def _plot(self) -> None:
        panels = {}
        for name, results in self._results.items():
            panels[f"{self._cases[name].words}"] = {
                of(kind).name: [one["us_per_copy"] for one in rounds] for kind, rounds in results.items()
            }
        bars("reader", "us of CPU per copy", panels, self._args.results)


def of(kind: str) -> Contestant:
    return CONTESTANTS[kind]


def beside(results: Rounds, kind: str, base: str) -> tuple[list[float], list[float]]:
    """How many times less CPU a contestant needs than another one, and how many times its rate it has, by round."""
    pairs = list(zip(results[base], results[kind], strict=True))
    less = [theirs["us_per_copy"] / mine["us_per_copy"] for theirs, mine in pairs]
    return less, [mine["copies_per_s"] / theirs["copies_per_s"] for theirs, mine in pairs]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="contestants")
    args = settle(parser.parse_args())
    if args.quick:
        args.messages = 2_000
    Suite(args).run()


if __name__ == "__main__":
    main()
