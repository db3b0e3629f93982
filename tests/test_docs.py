"""What the documentation says of the tests is so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"`(test_\w+)`")


def existing() -> set[str]:
    """The names of all tests there are."""
    trees = [ast.parse(file.read_text()) for file in (ROOT / "tests").rglob("test_*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_failure_in_the_table_names_tests_that_there_are() -> None:
    text = (ROOT / "docs" / "semantics.md").read_text()
    _, _, section = text.partition("## What each failure costs")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        assert NAME.search(row), f"no test shows it: {row}"
    assert {name for row in rows for name in NAME.findall(row)} - existing() == set()


def test_the_readme_says_what_the_results_of_the_benchmarks_do() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "readme.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
