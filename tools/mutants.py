#!/usr/bin/env python3
# ruff: noqa: S603, T201 - every command here is made of this project's own words; what is printed is the result
"""Breaks the code in every way that `mutations.py` lists, one at a time, and sees whether the tests notice.

Works on copies in a temporary directory, two at a time. Each way must be noticed within a minute; first every choice
of tests must pass on the code as it is. Ends with 1 if something went unnoticed, or could not be tried.
Tests with servers look for them as always: `make mutants` says where they are.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import mutations
import mutations_memcached
from mutations import Edit, Mutation

MUTATIONS = (*mutations.MUTATIONS, *mutations_memcached.MUTATIONS)

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("nsqdedupe", "tests", "pyproject.toml", "README.md")
AT_ONCE = 2
LIMIT = 60.0
"""Seconds in which the tests must notice."""

PATIENCE = 600.0
"""Seconds after which tests are ended; on a busy machine those that notice nothing take minutes."""

_SOME_FAILED = 1
"""What pytest ends with then; other codes say that it could not run them."""

_FAILED = re.compile(r"^FAILED (\S+(?: - .*)?)", re.MULTILINE)
"""A line of pytest's summary. An ERROR is none: a server that does not start has noticed nothing."""


class Verdict(NamedTuple):
    """What came of one mutation."""

    name: str
    seconds: float
    noticed_by: str | None
    trouble: str | None = None
    """Why it could not be tried, or was noticed too late."""

    def __str__(self) -> str:
        if self.trouble is not None:
            return f"BROKEN    {self.seconds:5.1f} s  {self.name}\n{self.trouble}"
        if self.noticed_by is None:
            return f"SURVIVED  {self.seconds:5.1f} s  {self.name}"
        return f"caught    {self.seconds:5.1f} s  {self.name}: {self.noticed_by}"


def misfit(edit: Edit, root: Path) -> str | None:
    """Why an edit cannot be made, or None."""
    count = (root / edit.file).read_text().count(edit.old)
    return None if count == 1 else f"{edit.file} has this {count} times, not once: the code moved on\n{edit.old}"


def mutated(mutation: Mutation, root: Path) -> dict[str, str]:
    """The files that a mutation changes, as they are then; a ValueError says why it cannot be made."""
    files: dict[str, str] = {}
    for edit in mutation.edits:
        text = files.get(edit.file) or (root / edit.file).read_text()
        problem = misfit(edit, root)
        if problem is not None:
            raise ValueError(problem)
        files[edit.file] = text.replace(edit.old, edit.new)
    for name, text in files.items():
        compile(text, name, "exec")
    return files


def make_copy(directory: Path) -> Path:
    """Copy what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            directory.mkdir(exist_ok=True)
            shutil.copy2(source, directory / name)
    return directory


def run_tests(copy: Path, arguments: Sequence[str]) -> tuple[int | None, str]:
    """Run tests on a copy until one fails; the exit code (None: they took too long), and what was printed."""
    # Bytecode is found by a file's size and the second it was written in: two mutants may have both in common.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "--timeout=120"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired as late:
        return None, str(late)
    return done.returncode, done.stdout + done.stderr


def judge(mutation: Mutation, copy: Path) -> Verdict:
    """Make a mutation on a copy, run its tests, and undo it."""
    start = time.monotonic()
    try:
        files = mutated(mutation, copy)
    except (ValueError, SyntaxError) as error:
        return Verdict(mutation.name, 0.0, None, str(error))
    before = {name: (copy / name).read_text() for name in files}
    try:
        for name, text in files.items():
            (copy / name).write_text(text)
        code, output = run_tests(copy, mutation.tests)
    finally:
        for name, text in before.items():
            (copy / name).write_text(text)
    seconds = time.monotonic() - start
    failed = _FAILED.search(output)
    if code == 0:
        return Verdict(mutation.name, seconds, None)
    if code == _SOME_FAILED and failed is not None:
        late = f"noticed too late by {failed[1]}" if seconds > LIMIT else None
        return Verdict(mutation.name, seconds, failed[1], late)
    return Verdict(mutation.name, seconds, None, f"pytest ended with {code}\n{output[-2000:]}")


def check_baseline(copy: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Why a failing test would say nothing: the copy is not what is imported, or its tests fail as it is."""
    where = [sys.executable, "-c", "import nsqdedupe; print(nsqdedupe.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    imported = subprocess.run(where, cwd=copy, env=environment, capture_output=True, text=True, check=True).stdout
    if not Path(imported.strip()).is_relative_to(copy):
        return [f"not the copy is imported, but {imported}"]
    problems = []
    for tests in dict.fromkeys(mutation.tests for mutation in mutations):
        start = time.monotonic()
        code, output = run_tests(copy, tests)
        print(f"unbroken  {time.monotonic() - start:5.1f} s  {' '.join(tests)}", flush=True)
        if code != 0:
            problems.append(f"these tests fail on the code as it is: {' '.join(tests)}\n{output[-2000:]}")
    return problems


def main() -> int:
    """Try all mutations, or those whose names contain a text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text", nargs="?", default="", help="only mutations whose names contain this")
    text = parser.parse_args().text
    chosen = [mutation for mutation in MUTATIONS if text in mutation.name]
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(AT_ONCE):
            copies.put(make_copy(Path(directory) / str(number)))

        def in_a_copy(mutation: Mutation) -> Verdict:
            copy = copies.get()
            try:
                return judge(mutation, copy)
            finally:
                copies.put(copy)

        problems = check_baseline(Path(directory) / "0", chosen)
        if problems:
            print(*problems, sep="\n", file=sys.stderr)
            return 1
        caught = 0
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for verdict in pool.map(in_a_copy, chosen):
                print(verdict, flush=True)
                caught += verdict.noticed_by is not None and verdict.trouble is None
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
