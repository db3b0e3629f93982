"""What the benchmarks share: their options, and how figures of several rounds are written down."""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def spread(values: list[float], form: str) -> str:
    """The median, and between what the rounds lay."""
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return "\n".join([head, "|---" * len(columns) + "|", *lines])


def tell(name: str, text: str, results: Path | None = RESULTS) -> None:
    """Print a report, and keep it; ``results`` None: only print it."""
    print(text)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{name}.md").write_text(text + "\n")


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks of readers have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of small numbers, to see that it works")
    parser.add_argument("--results", type=Path, help="where reports and plots go; --quick keeps none by default")
    return parser


def settle(args: argparse.Namespace) -> argparse.Namespace:
    """What ``--quick`` means for the options that all have."""
    if args.quick:
        args.rounds = 1
    elif args.results is None:
        args.results = RESULTS
    return args


class Conditions:
    """Under which conditions a benchmark ran. Made before it begins, for the load."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]

    def lines(self, *programs: str, packages: Sequence[str] = ()) -> list[str]:
        """What a report begins with.

        Args:
            programs: names and versions of what else took part, such as ``nsqd 1.3.0``.

            packages: those of Python that took part.
        """
        cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ":?")
        memory = int(next(line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")).split()[1])
        machine = f"{os.cpu_count()} cores of {cpu.partition(':')[2].strip()}, {memory / (1 << 20):.0f} GiB"
        software = [
            f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
            f"Python {platform.python_version()}",
            *programs,
        ]
        software += [f"{package} {version(package)}" for package in packages]
        return [
            f"On {machine}; load {self._load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end.",
            f"{', '.join(software)}.",
        ]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
