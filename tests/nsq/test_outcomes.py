"""Everything that a handler can do, with and without assert statements: what pynsq makes of it, and what we do.

Where the two differ stock pynsq leaves the message in flight until its timeout, answers twice, or loses the
connection: there this package sends what the handler can only have meant.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from outcomes import HANDLERS, SECRET

import nsqdedupe

HERE = Path(__file__).parent
FAILS = "REQ 90000, backoff"
SOON = "REQ 1[0-5]??"
"""In a second and a little, without a backoff."""


class Row(NamedTuple):
    """What is sent; a pattern."""

    ours: str
    stock: str = ""
    """"" if it is the same."""
    optimized: str = ""
    """By stock pynsq without assert statements; "" if it is the same as with them."""
    logged: str = ""
    """What we log of it beside the message's id: a word of it."""


ROWS: dict[str, Row] = {
    "returns True": Row("FIN"),
    "returns 1": Row("FIN"),
    "returns False": Row(FAILS),
    "returns 0": Row(FAILS),
    "returns None": Row(FAILS, "nothing", FAILS, logged="ERROR returned None"),
    "returns a str": Row(FAILS, "nothing", logged="ERROR returned a str"),
    "returns a number": Row(FAILS, "nothing", logged="ERROR returned a int"),
    "returns an empty list": Row(FAILS),
    "returns a future": Row("FIN"),
    "raises": Row(FAILS, logged="ERROR BrokenError"),
    "raises with the body in its text": Row(FAILS, logged="ERROR ValueError"),
    "raises after finish()": Row("FIN", logged="ERROR BrokenError"),
    "raises after enable_async()": Row(FAILS, logged="ERROR BrokenError"),
    "raises CancelledError": Row(SOON, "nothing", logged="WARNING cancelled"),
    "finish(), None": Row("FIN"),
    "finish(), False": Row("FIN"),
    "finish() twice": Row("FIN", optimized="FIN, FIN", logged="ERROR AlreadyRespondedError"),
    "enable_async(), True": Row("nothing"),
    "enable_async(), finish() later": Row("FIN"),
    "enable_async(), requeue() later": Row(FAILS),
    "requeue()": Row(FAILS),
    "requeue(delay=0)": Row("REQ 0, backoff"),
    "requeue(delay=2, time_ms=1)": Row("REQ 2000, backoff"),
    "requeue(delay=-1)": Row(FAILS),
    "requeue(delay=1.5)": Row("REQ 1500, backoff", FAILS),
    "requeue(time_ms=250)": Row("REQ 250, backoff"),
    "requeue(time_ms=250.5)": Row("REQ 251, backoff", "backoff, closed", "REQ 250.5, backoff*"),
    "requeue(backoff=False)": Row("REQ 90000"),
    "coroutine: True": Row("FIN"),
    "coroutine: False": Row(FAILS),
    "coroutine: None": Row(FAILS),
    "coroutine: finish(), None": Row("FIN"),
    "coroutine: finish(), raises": Row("FIN", logged="ERROR BrokenError"),
    "coroutine: requeue(), True": Row(FAILS),
    "coroutine: raises": Row(FAILS, logged="ERROR BrokenError"),
    "coroutine: raises with the body in its text": Row(FAILS, logged="ERROR ValueError"),
    "coroutine: raises CancelledError": Row(SOON, "nothing", logged="WARNING cancelled"),
}


def deviations(row: str, answers: dict[str, Any], *, optimized: bool) -> list[str]:
    """Where the answers to a row are not those expected."""
    expected, ours, stock = ROWS[row], answers["ours"], answers["stock"]
    of_stock = (optimized and expected.optimized) or expected.stock or expected.ours
    right = {
        "sent": fnmatch.fnmatchcase(ours["sent"], expected.ours),
        "logged": all(word in ours["logged"] for word in expected.logged.split()),
        "silent": bool(ours["logged"]) == bool(expected.logged),
        "discreet": SECRET not in ours["logged"],
        "stock": fnmatch.fnmatchcase(stock["sent"], of_stock),
    }
    return [f"{row}: not {what}: {answers}" for what, holds in right.items() if not holds]


@pytest.mark.parametrize("flags", [[], ["-O"]], ids=["asserts", "no-asserts"])
def test_what_a_handler_does_is_answered(flags: list[str]) -> None:
    paths = (HERE, HERE.parent, Path(nsqdedupe.__file__).parents[1])
    answer = subprocess.run(
        [sys.executable, *flags, HERE / "outcomes.py"],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert [line for row in ROWS for line in deviations(row, told[row], optimized=bool(flags))] == []


def test_there_is_a_row_for_each_handler() -> None:
    assert list(ROWS) == list(HANDLERS)
