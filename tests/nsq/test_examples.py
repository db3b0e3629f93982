"""The programs under examples/ do what they say."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import eventually

from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = 200
DEADLINE = 60


def start(name: str, *args: str, lines: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / name), *args]
    program = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdin is not None
    program.stdin.write(lines)
    program.stdin.close()
    program.stdin = None
    return program


@pytest.fixture
def published(nsqd_pair: tuple[Nsqd, Nsqd]) -> tuple[Nsqd, Nsqd]:
    """Two nsqds to which the publisher example has published 200 lines, half of them equal."""
    for nsqd in nsqd_pair:
        nsqd.create_topic("events")
        nsqd.create_channel("events", "example")
    lines = "".join(f"line {number // 2}\n" for number in range(LINES))
    args = [word for nsqd in nsqd_pair for word in ("--nsqd-tcp-address", nsqd.tcp_address)]
    out, err = start("publisher.py", *args, lines=lines).communicate(timeout=DEADLINE)
    assert (out, err) == (f"published {LINES}\n", "")
    # From the topic they go to the channel in a moment.
    eventually(lambda: [nsqd.depth("events", "example") for nsqd in nsqd_pair] == [LINES, LINES])
    return nsqd_pair


def test_reader_handles_each_line_once_and_ends_on_sigterm(published: tuple[Nsqd, Nsqd], lookupd: Nsqlookupd) -> None:
    program = start("reader.py", "--lookupd-http-address", lookupd.http_address)
    eventually(lambda: [nsqd.unfinished("events", "example") for nsqd in published] == [0, 0], timeout=DEADLINE)
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=DEADLINE)
    *events, summary = out.splitlines()
    assert (program.returncode, err) == (0, "")
    assert len(events) == LINES
    assert len(set(events)) == LINES
    assert summary == f"handled {LINES}, duplicates {LINES}, unanswered 0"


def test_coroutine_reader_ends_when_it_has_enough(published: tuple[Nsqd, Nsqd]) -> None:
    args = [word for nsqd in published for word in ("--nsqd-tcp-address", nsqd.tcp_address)]
    program = start("coroutine_reader.py", *args, "--messages", str(LINES))
    out, err = program.communicate(timeout=DEADLINE)
    assert (program.returncode, out, err) == (0, f"handled {LINES}, left in flight 0\n", "")
