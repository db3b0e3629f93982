"""The programs under examples/ do what they say."""

from __future__ import annotations

import difflib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import Servers, eventually

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


def end(program: subprocess.Popen[str]) -> list[str]:
    """What a program that ends well has printed."""
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=DEADLINE)
    assert (program.returncode, err) == (0, "")
    return out.splitlines()


def test_consumers_that_share_a_memcached_handle_each_line_once(
    published: tuple[Nsqd, Nsqd], lookupd: Nsqlookupd, servers: Servers
) -> None:
    store = f"memcached://{servers.memcached().tcp_address}?window=1000&timeout=30"
    where = "--lookupd-http-address", lookupd.http_address, "--store", store
    programs = [start("shared_memcached.py", *where) for _ in range(2)]
    # One may have handled all before the other runs; that one must not be ended before it can take it.
    eventually(lambda: [nsqd.channel_stats("events", "example")["client_count"] for nsqd in published] == [2, 2])
    eventually(lambda: [nsqd.unfinished("events", "example") for nsqd in published] == [0, 0], timeout=DEADLINE)
    outputs = [end(program) for program in programs]
    events = [line for *lines, _ in outputs for line in lines]
    assert len(events) == LINES
    assert len(set(events)) == LINES
    words = [summary.replace(",", "").split() for *_, summary in outputs]
    assert [one[0::2] for one in words] == [["handled", "duplicates", "outages"]] * 2
    assert [sum(int(one[n]) for one in words) for n in (1, 3, 5)] == [LINES, LINES, 0]


@pytest.mark.parametrize(("name", "prints"), [("wrapped_before.py", 2 * LINES), ("wrapped_after.py", LINES)])
def test_a_wrapped_consumer_prints_each_line_once(
    published: tuple[Nsqd, Nsqd], lookupd: Nsqlookupd, name: str, prints: int
) -> None:
    program = start(name, lookupd.http_address)
    eventually(lambda: [nsqd.unfinished("events", "example") for nsqd in published] == [0, 0], timeout=DEADLINE)
    events = end(program)
    assert len(events) == prints
    assert len(set(events)) == LINES


def test_a_consumer_is_wrapped_by_two_lines() -> None:
    before, after = ((EXAMPLES / f"wrapped_{name}.py").read_text().splitlines() for name in ("before", "after"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[1:].strip()]
    assert [line[:12] for line in changes] == ["+ import nsq", "+ @nsqdedupe"]


def test_keys_are_tried_on_bodies() -> None:
    bodies = [
        {"id": 1, "order": "a", "step": 1},
        {"id": 1, "order": "a", "step": 1},
        {"id": 2, "order": "a", "step": 1},  # published anew by a producer that gives another id
        {"id": 3, "order": "a", "step": 2},
        {"order": "a", "step": 3},
    ]
    out, err = start("choosing_a_key.py", lines="".join(json.dumps(body) + "\n" for body in bodies)).communicate()
    assert (out.splitlines(), err) == (
        [
            "5 bodies",
            "BODY: 4 different messages, 0 bodies without a key",
            'json_field("id"): 3 different messages, 1 bodies without a key',
            "order_and_step: 3 different messages, 0 bodies without a key",
        ],
        "",
    )


def test_each_example_is_run() -> None:
    tested = Path(__file__).read_text()
    assert [file.name for file in EXAMPLES.iterdir() if file.suffix == ".py" and f'"{file.name}"' not in tested] == []
