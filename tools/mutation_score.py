#!/usr/bin/env python3
# ruff: noqa: S603, T201 - the command is made of this project's own words; what is printed is the result
"""Has mutmut change the files of the lower floors in every small way it knows, and says how many the tests notice.

Works on a copy in ``.tools/mutmut``, where a further run goes on with what was not tried yet. Prints a line per file,
then every change that was not noticed. Ends with 1 if less than 90 % were.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from mutants import ROOT, make_copy

COPY = ROOT / ".tools" / "mutmut"
MUTMUT = Path(sys.executable).with_name("mutmut")
ENOUGH = 0.9

NOTICED = ("killed", "timeout")
"""A change after which a test does not end was noticed by it."""

UNFIT = (
    # It starts processes; mutmut forks one in which pytest runs already.
    "tests/unit/test_table_killed.py",
    # Many random walks, or many lines counted: seconds for each change. What they alone would notice goes unnoticed.
    "tests/unit/test_deduper_properties.py",
    "tests/unit/test_opposite_bloom_model.py",
    "tests/unit/test_growth.py",
)
"""Tests that are left out."""

_RESULT = re.compile(r"^\s*(\S+): (.+)$", re.MULTILINE)


def configuration(files: list[str]) -> str:
    """What mutmut is told, as TOML."""
    options = ["-k", "not scale", "-p", "no:cacheprovider", *(f"--ignore={name}" for name in UNFIT)]
    settings = {
        "source_paths": ["nsqdedupe"],
        "only_mutate": files,
        "also_copy": ["README.md"],
        "pytest_add_cli_args_test_selection": ["tests/unit", "tests/contract"],
        "pytest_add_cli_args": options,
    }
    return "\n[tool.mutmut]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def mutmut(*arguments: str, quiet: bool = True) -> str:
    """Run it on the copy; what it printed, unless that is shown as it goes."""
    command = ["nice", "-n", "19", str(MUTMUT), *arguments]
    done = subprocess.run(command, cwd=COPY, stdout=subprocess.PIPE if quiet else None, text=True, check=True)
    return done.stdout or ""


def prepare(files: list[str]) -> None:
    """Make the copy, or bring it up to date and keep what mutmut knows of code that has not changed."""
    known = COPY / "mutants"
    kept = known.rename(COPY.with_suffix(".kept")) if known.exists() else None
    shutil.rmtree(COPY, ignore_errors=True)
    make_copy(COPY)
    if kept is not None:
        kept.rename(known)
    with (COPY / "pyproject.toml").open("a") as file:
        file.write(configuration(files))


def report(module: str) -> bool:
    """Print what came of it; True if enough was noticed of what a module's name chooses."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    survivors = []
    for name, status in _RESULT.findall(mutmut("results", "--all", "true")):
        file = name.rpartition(".")[0].removeprefix("nsqdedupe.")
        if module in file and status != "not checked":
            counts[file]["noticed" if status in NOTICED else status] += 1
            if status not in NOTICED:
                survivors.append(name)
    for file, of_file in sorted(counts.items()):
        tried = of_file.total()
        others = ", ".join(f"{count} {status}" for status, count in of_file.items() if status != "noticed")
        print(f"{of_file['noticed'] / tried:7.1%}  {of_file['noticed']:4} of {tried:4}  {file}  {others}")
    for name in survivors:
        print(mutmut("show", name))
    noticed = sum(of_file["noticed"] for of_file in counts.values())
    tried = sum(of_file.total() for of_file in counts.values())
    if not tried:
        print("nothing was tried")
        return False
    print(f"{noticed / tried:7.1%}  {noticed:4} of {tried:4}  in all")
    return noticed / tried >= ENOUGH


def main() -> int:
    """Try all files, or those whose names contain a text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", help="what may be changed, with commas between; a * stands for any name")
    parser.add_argument("module", nargs="?", default="", help="only modules whose names contain this")
    parser.add_argument("--report", action="store_true", help="only say what came of it last time")
    given = parser.parse_args()
    if not given.report:
        prepare(given.files.split(","))
        mutmut("run", "--max-children", "2", *([f"*{given.module}*"] if given.module else []), quiet=False)
    return 0 if report(given.module) else 1


if __name__ == "__main__":
    sys.exit(main())
