"""`make mutants`: its list fits the code, and what it says of a mutation is so."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

CODE = "def double(number):\n    return number + number\n"
TEST = "from code_under_test import double\n\n\ndef test_double():\n    assert double({}) == {}\n"


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("mutants")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Code, and a test of it that sees only whether 3 becomes 6."""
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-ra'\n")
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "test_it.py").write_text(TEST.format(3, 6))
    return tmp_path


def test_every_mutation_fits_the_code(mutants: Any) -> None:
    for mutation in mutants.MUTATIONS:
        assert mutants.mutated(mutation, ROOT), mutation.name


def test_names_say_which_mutation_it_is(mutants: Any) -> None:
    names = [mutation.name for mutation in mutants.MUTATIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ("number + 1", "caught "),
        ("number * 2", "SURVIVED "),
        ("nothing", "caught "),
        ("return", "BROKEN "),
    ],
)
def test_what_is_said_of_a_mutation_is_so(mutants: Any, tree: Path, new: str, says: str) -> None:
    edit = mutants.Edit("code_under_test.py", "number + number", new)
    verdict = str(mutants.judge(mutants.Mutation("it", (edit,), ("test_it.py",)), tree))
    assert verdict.startswith(says)
    assert ("test_it.py::test_double" in verdict) == says.startswith("caught")
    assert (tree / "code_under_test.py").read_text() == CODE


@pytest.mark.parametrize(
    "setup",
    [
        "import absent\n",
        "import pytest\n\n\n@pytest.fixture(autouse=True)\ndef server():\n    raise OSError('it does not start')\n\n\n",
    ],
)
def test_tests_that_cannot_run_have_noticed_nothing(mutants: Any, tree: Path, setup: str) -> None:
    (tree / "test_it.py").write_text(setup + TEST.format(3, 6))
    edit = mutants.Edit("code_under_test.py", "number + number", "number + 1")
    verdict = str(mutants.judge(mutants.Mutation("it", (edit,), ("test_it.py",)), tree))
    assert verdict.startswith("BROKEN ")


@pytest.mark.parametrize("old", ["number - number", "number"])
def test_a_mutation_of_what_is_not_there_once_is_refused(mutants: Any, tree: Path, old: str) -> None:
    edit = mutants.Edit("code_under_test.py", old, "1")
    verdict = str(mutants.judge(mutants.Mutation("it", (edit,), ("test_it.py",)), tree))
    assert verdict.startswith("BROKEN ")
    assert "not once" in verdict
