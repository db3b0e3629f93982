"""What the benchmarks share: how figures of several rounds are written down."""

from __future__ import annotations

import statistics
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def spread(values: list[float], form: str) -> str:
    """The median, and between what the rounds lay."""
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"


def tell(name: str, text: str) -> None:
    """Print a report, and keep it in ``results``."""
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text + "\n")
