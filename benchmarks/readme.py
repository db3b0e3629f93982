"""Puts the table of results into README.md, between the two comments that name it.

make bench BENCH=readme                    # after make bench
make bench BENCH=readme ARGS=--check       # does README.md say what the results do?
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from figures import RESULTS, markdown

README = RESULTS.parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- from benchmarks/results/(?P<file>[\w.-]+) -->\n).*?(<!-- to here -->)", re.DOTALL)
COLUMNS = 6
"""The first ones: the README has no room for all."""


def table_of(report: str) -> str:
    """The first table of a report, as far as the README has it."""
    lines = [line for line in report.partition("\n\n")[2].partition("\n\n")[0].splitlines() if line.startswith("| ")]
    head, *rows = [line.strip("|").split("|")[:COLUMNS] for line in lines]
    return markdown([cell.strip() for cell in head], [[cell.strip() for cell in row] for row in rows])


def with_results(text: str, results: Path) -> str:
    """The README with the tables of the results.

    Raises:
        SystemExit: it has no place for one.
    """
    if not BLOCK.search(text):
        raise SystemExit(f"{README.name} has no comment such as <!-- from benchmarks/results/reader-200.md -->")
    return BLOCK.sub(lambda block: block[1] + table_of((results / block["file"]).read_text()) + "\n" + block[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it would change something")
    args = parser.parse_args()
    before = README.read_text()
    after = with_results(before, RESULTS)
    if not args.check:
        README.write_text(after)
    elif after != before:
        raise SystemExit(f"{README.name} does not say what {RESULTS.name} do: make bench BENCH=readme")


if __name__ == "__main__":
    main()
