"""The demo cluster from end to end: real nsqds, a real memcached, consumers that are processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import processes_in

from nsqdedupe.cli import demo_cluster
from nsqdedupe.cli.cluster.account import HANDLED, PUBLISHED, Account, Journal
from nsqdedupe.cli.cluster.consumer import MAX_IN_FLIGHT
from nsqdedupe.cli.cluster.summary import Summary
from nsqdedupe.cli.demo_cluster import Program
from nsqdedupe.cli.main import Exit, main

LIMIT = 100
"""Seconds for a run of 10, on a machine that has a lot to do."""

PROCESSES = 7
"""nsqlookupd, two nsqds, memcached, two consumers, the publisher."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, in less time. What the killed consumer held is free after 3 s: msg_timeout and 2 s."""
    monkeypatch.setattr(demo_cluster, "DURATION", 1.5)
    monkeypatch.setattr(demo_cluster, "DOWN", 0.2)
    monkeypatch.setattr(demo_cluster, "NSQD_FLAGS", ("--mem-queue-size=0", "--msg-timeout=1s"))


def figures(lines: list[str]) -> dict[str, int]:
    """The table at the end."""
    rows = [re.fullmatch(r"(\S.*?) {4,}([\d,]+)", line) for line in lines]
    return {row[1]: int(row[2].replace(",", "")) for row in rows if row}


@pytest.mark.usefixtures("quick")
def test_a_consumer_and_an_nsqd_are_killed_and_nothing_is_lost(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some seconds: a lease must end."""
    assert main(["demo-cluster", "--messages", "600"]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "lost 0"
    assert max(map(len, lines)) < 80
    story = [line.partition("s  ")[2] for line in lines if "SIGKILL" in line or "again" in line]
    assert story == ["consumer 1 killed with SIGKILL", "nsqd 2 killed with SIGKILL", "nsqd 2 started again"]
    table = figures(lines)
    assert table["published, acknowledged by both nsqds"] == 600
    assert table["handled, by one consumer or the other"] == 600
    assert table["duplicates finished, not handled (as last reported)"] > 0
    assert table["slips: events handled more than once"] <= MAX_IN_FLIGHT
    assert list(room.iterdir()) == []


def ends_as(monkeypatch: pytest.MonkeyPatch, *facts: tuple[str, list[str]]) -> None:
    """Let a run end with this account, and no nsqd owing anything."""

    def go(run: demo_cluster.Run) -> Summary:
        journal = Journal(run.directory, "told")
        for word, events in facts:
            journal.write(word, events)
        account = Account(run.directory)
        account.read()
        summary = Summary(account, [], "events", "demo")
        summary.lost = account.waiting
        return summary

    monkeypatch.setattr(demo_cluster.Run, "go", go)


EVENTS = [f"a-{number}" for number in range(300)]


def test_a_loss_is_said_and_the_logs_are_kept(
    room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_as(monkeypatch, (PUBLISHED, EVENTS), (HANDLED, EVENTS[1:]))
    assert main(["demo-cluster", "--messages", "300"]) == Exit.FAILED
    *_, broken, logged, last = capsys.readouterr().out.splitlines()
    assert broken == "Acknowledged and never handled: 1 of 300 events."
    assert Path(logged.split()[-1]).parent == room
    assert last == "lost 1"


def test_more_slips_than_the_kill_explains_are_said(
    room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_as(monkeypatch, (PUBLISHED, EVENTS), (HANDLED, EVENTS), (HANDLED, EVENTS[: MAX_IN_FLIGHT + 1]))
    assert main(["demo-cluster", "--messages", "300"]) == Exit.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "Handled more than once: 201 events. The kill explains 200 at most."
    assert lines[-1] == "lost 0"


def test_what_was_not_acknowledged_is_said(
    room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_as(monkeypatch, (PUBLISHED, EVENTS), (HANDLED, EVENTS))
    assert main(["demo-cluster", "--messages", "301"]) == Exit.FAILED
    assert capsys.readouterr().out.splitlines()[-3] == "Not acknowledged by both nsqds: 1 events."


@pytest.mark.parametrize(
    ("program", "option", "why"),
    [("consumer", "--store=nowhere", "ConfigError"), ("publisher", "--rate=none", "invalid int value: 'none'")],
)
def test_a_program_that_ends_by_itself_is_said_with_its_log(
    room: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    option: str,
    why: str,
) -> None:
    own_flags = Program._own_flags

    def with_a_bad_one(process: Program) -> list[str]:
        process._flags += (option,) if process.program == program else ()
        return own_flags(process)

    monkeypatch.setattr(Program, "_own_flags", with_a_bad_one)
    assert main(["demo-cluster", "--messages", "10"]) == Exit.FAILED
    said = capsys.readouterr().err
    assert re.match(f"nsqdedupe demo-cluster: {program} ended by itself with [12]\n", said)
    assert why in said
    assert Path(said.split()[-1]).parent == room


def test_a_cluster_that_does_not_go_on_is_given_up(
    room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_cluster, "PATIENCE", 0)
    assert main(["demo-cluster"]) == Exit.FAILED
    said = capsys.readouterr().err
    assert "nothing has moved for 0 s: published 0, handled 0, waiting 0" in said
    assert Path(said.split()[-1]).parent == room


@pytest.mark.parametrize("name", ["NSQ_BIN_DIR", "MEMCACHED"])
def test_without_its_servers_nothing_is_started(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    assert main(["demo-cluster"]) == Exit.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nsqdedupe demo-cluster: ")
    assert f"{name}=" in said.err
    assert list(room.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_and_leaves_nothing(room: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "nsqdedupe", "demo-cluster"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "  handled " in line:
            break
    assert len(processes_in(room)) == PROCESSES
    demo.send_signal(number)
    out, err = demo.communicate(timeout=LIMIT)
    assert (demo.returncode, err) == (Exit.INTERRUPTED, "nsqdedupe demo-cluster: interrupted\n")
    assert "lost" not in out
    assert list(room.iterdir()) == []
