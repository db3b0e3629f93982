"""The benchmarks run, with small numbers, and notice a consumer that does not do its work."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import Servers

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MESSAGES = 500


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that has a contestant consume a backlog."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("contest")


@pytest.fixture
def job(contest: Any) -> Any:
    """One whose contestant looks at each body."""
    return contest.Job(messages=MESSAGES, check=True)


def quick(name: str, results: Path, *args: str) -> list[list[str]]:
    """Run a benchmark with small numbers; the rows of the tables in its reports, heads and rules left out."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--results", str(results), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = []
    for report in sorted(results.glob("*.md")):
        lines = [line.strip("| ").split(" | ") for line in report.read_text().splitlines() if line.startswith("| ")]
        rows += [row for row in lines if any("(" in cell and " to " in cell for cell in row)]
    return rows


def test_readers_are_measured_beside_stock_pynsq(tmp_path: Path) -> None:
    rows = quick("run", tmp_path, "--cases", "200", "coroutine", "--only", "pynsq", "memory")
    assert [row[0] for row in rows] == [
        "stock pynsq, every copy handled",
        "DedupeReader, MemoryStore",
        "stock pynsq, every copy handled",
        "DedupeReader, MemoryStore",
    ]
    assert rows[0][1] == "1.0 (1.0 to 1.0)"


def test_latency_is_measured(tmp_path: Path) -> None:
    assert len(quick("latency", tmp_path)) == 3


def test_turns_of_the_loop_are_measured(tmp_path: Path) -> None:
    rows = quick("breathing", tmp_path)
    assert len(rows) == 8
    # The handler alone takes 5 ms.
    assert all(float(row[2].split()[0]) >= 5 for row in rows if row[1] == "takes 5 ms")


def test_growth_is_measured(tmp_path: Path) -> None:
    rows = quick("growth", tmp_path)
    assert [row[1] for row in rows] == ["2", "4", "2", "3", "10,000", "100,000", "1", "2"]


def test_several_consumers_are_measured_beside_one(tmp_path: Path) -> None:
    rows = quick("several", tmp_path)
    assert [row[:2] for row in rows] == [["1", "1.00 (1.00 to 1.00)"], ["3", rows[1][1]]]


def test_outages_of_memcached_are_measured(tmp_path: Path) -> None:
    rows = quick("outage", tmp_path)
    assert [row[:2] for row in rows] == [["none", "process"], ["none", "requeue"], ["killed", "process"]]


def test_transports_are_measured(tmp_path: Path) -> None:
    rows = quick("transports", tmp_path)
    assert [row[0] for row in rows] == ["plain TCP", "plain TCP", "snappy", "snappy", "TLS", "TLS", "TLS with snappy"]


def test_parts_are_measured(tmp_path: Path) -> None:
    rows = quick("micro", tmp_path)
    others = 5 if importlib.util.find_spec("rbloom") else 4
    assert len(rows) == 3 + 7 * 2 + others + 3


def test_memory_is_measured(tmp_path: Path) -> None:
    rows = {row[0]: row for row in quick("memory", tmp_path)}
    ours, classic = rows["MemoryStore(recall=0.99)"], rows["classic: 1 way, whole ids, for 99 %"]
    assert float(ours[1].split()[0]) * 50 < float(classic[1].split()[0].replace(",", ""))
    assert all(float(row[2].split("%")[0]) > 98 for row in (ours, classic))


def test_the_memcached_store_is_measured_beside_a_get_and_a_set(tmp_path: Path) -> None:
    rows = quick("store", tmp_path)
    speed, by_cpu, memory = rows[:6], rows[6:12], rows[12:]
    assert [row[0] for row in speed] == [row[0] for row in by_cpu]
    assert speed[0][:3] == ["a get and a set", "1.0 (1.0 to 1.0)", "1.0 (1.0 to 1.0)"]
    table, key_each, _ = (float(row[2].split()[0]) for row in memory)
    assert table < key_each / 2


@pytest.mark.parametrize("kind", ["pynsq", "dedupe", "batching", "memory", "file"])
def test_a_contestant_that_handles_what_was_published_passes(
    contest: Any, job: Any, servers: Servers, kind: str
) -> None:
    figures = contest.contest(kind, job, [servers.nsqd(), servers.nsqd()])
    assert figures["runs"] == MESSAGES * (1 if contest.CONTESTANTS[kind].dedupes else 2)


def test_a_contestant_that_lets_duplicates_through_is_noticed(
    contest: Any, job: Any, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims_to = dataclasses.replace(contest.CONTESTANTS["batching"], dedupes=True)
    monkeypatch.setitem(contest.CONTESTANTS, "batching", claims_to)
    with pytest.raises(SystemExit, match=f"ran {2 * MESSAGES} times, not {MESSAGES}"):
        contest.contest("batching", job, [servers.nsqd(), servers.nsqd()])


def test_a_contestant_that_handles_other_messages_is_noticed(
    contest: Any, job: Any, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = contest.publish
    monkeypatch.setattr(contest, "publish", lambda nsqds, job, size, seed: publish(nsqds, job, size, seed + 1))
    with pytest.raises(SystemExit, match="not what was published"):
        contest.contest("memory", job, [servers.nsqd(), servers.nsqd()])


def test_a_contestant_that_fails_is_noticed_with_what_it_said(contest: Any, job: Any, servers: Servers) -> None:
    nowhere = dataclasses.replace(job, max_in_flight=0)
    with pytest.raises(SystemExit, match="max_in_flight"):
        contest.contest("memory", nowhere, [servers.nsqd()])
