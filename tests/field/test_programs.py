"""Programs as they are found in the field, first with `nsq.Reader` on one nsqd, then with `DedupeReader` on two.

Both must do the same, and nsqd must count the same: each copy finished, as many requeued as handlers did.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from consumers import PATIENCE, owed, told, watched_channel
from processes import Journal
from servers import Servers, eventually

import nsqdedupe
from nsqdedupe.cli.local_nsq import Nsqd

PROGRAMS = Path(__file__).with_name("programs")
MESSAGES = 20
COUNTERS = ("message_count", "requeue_count", "timeout_count")

Effects = Counter[tuple[str, ...]]


class Program(NamedTuple):
    """A program, what it is given and what it must do with that."""

    effects: Callable[[], list[str]]
    body: Callable[[int], str] = str
    messages: int = MESSAGES
    channels: tuple[str, ...] = ("",)
    failures: int = 0
    """How often its handlers requeue."""
    stock: bool = True
    """It works with `nsq.Reader`."""
    copies_too: Callable[[], list[str]] = list
    """What it does for the second nsqd as well."""


def each(word: str, messages: int = MESSAGES) -> list[str]:
    return [f"{word} {number}" for number in range(messages)]


ALL: dict[str, Program] = {
    "positional": Program(lambda: each("handled")),
    "hooks_on_instance": Program(
        lambda: [f"handled {number} wanted" for number in range(0, MESSAGES, 2)],
        body=lambda number: f'{{"id": {number}, "kind": "{"unwanted" if number % 2 else "wanted"}"}}',
    ),
    "own_class": Program(lambda: each("processing") + each("handled")),
    "handler_later": Program(lambda: [f"{line} later" for line in each("handled")]),
    "batches": Program(lambda: each("written")),
    "async_then_true": Program(lambda: each("finished")),
    "finish_first": Program(lambda: [f"{line} True" for line in each("handled")]),
    "pause": Program(lambda: [*each("handled"), *["paused", "resumed"] * 2]),
    "two_readers": Program(
        lambda: each("handled archive") + each("handled billing"), channels=("-archive", "-billing")
    ),
    "pool": Program(lambda: [*each("handled"), "failed 7", "failed 17"], failures=2, stock=False),
    "pool_on_loop": Program(lambda: each("handled")),
    "jobs_by_id": Program(lambda: each("reported")),
    "coroutines": Program(lambda: [*each("handled"), "failed 4", "failed 14"], failures=2),
    "touch_loop": Program(lambda: each("handled")),
    "relay": Program(lambda: each("published")),
    "own_discovery": Program(lambda: [*each("handled"), "alive 0"], copies_too=lambda: ["alive 1"]),
    "loop_by_hand": Program(lambda: each("handled")),
    "giving_up": Program(
        lambda: [*each("tried", 6) * 2, *(f"buried {number}" for number in (0, 1, 3, 4))], messages=6, failures=10
    ),
}


class Run:
    """One run of a program, in a process of its own.

    Args:
        name: of the program.

        nsqds: one for `nsq.Reader`, two for `DedupeReader`.

        topic: and channel: where it reads.

        directory: for its journal and its log.
    """

    def __init__(self, name: str, nsqds: Sequence[Nsqd], topic: str, channel: str, directory: Path) -> None:
        self.program, self.nsqds, self.topic = ALL[name], nsqds, topic
        self.channels = [channel + suffix for suffix in self.program.channels]
        reader = "stock" if len(nsqds) == 1 else "ours"
        self.journal = Journal(directory / f"{reader}.journal")
        self.log = directory / f"{reader}.log"
        self._command = [sys.executable, PROGRAMS / f"{name}.py"]
        self._env = {
            **os.environ,
            "PYTHONPATH": str(Path(nsqdedupe.__file__).parents[1]),
            "FIELD_READER": reader,
            "FIELD_TOPIC": topic,
            "FIELD_CHANNEL": channel,
            "FIELD_NSQDS": ",".join(nsqd.tcp_address for nsqd in nsqds),
            "FIELD_JOURNAL": str(self.journal.path),
        }

    def start(self, stack: ExitStack) -> None:
        """Publish a copy of each message to each nsqd, and start the program, to be killed with the stack."""
        for nsqd in self.nsqds:
            for channel in self.channels:
                nsqd.create_channel(self.topic, channel)
            if self.program.failures:
                watched_channel(nsqd, self.topic, self.channels[0])
            nsqd.mpublish(self.topic, [self.program.body(number).encode() for number in range(self.program.messages)])
        log = stack.enter_context(self.log.open("wb"))
        self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        stack.callback(self.tell)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    def tell(self) -> None:
        """Let its log be shown if the test fails."""
        print(f"-- {self.log}\n{self.log.read_text()}")  # noqa: T201 - pytest shows it with the failure

    def effects(self) -> Effects:
        """What it has done so far."""
        lines = (tuple(line.split()) for line in self.journal.path.read_text().splitlines())
        return Counter(line for line in lines if line[0] != "stats")

    def work(self) -> None:
        """Wait until it has done all it should and no nsqd owes it anything."""
        wanted = self.expected()
        eventually(self.effects, PATIENCE, until=lambda seen: seen == wanted)
        eventually(self.owed, PATIENCE, until=lambda left: left == 0)

    def end(self) -> None:
        """End it as an operator would."""
        self.process.send_signal(signal.SIGTERM)
        for nsqd in self.nsqds:
            # nsq.run() notices a signal when something else happens.
            nsqd.kill()
        assert self.process.wait(PATIENCE) == 0
        assert self.effects() == self.expected()

    def expected(self) -> Effects:
        program = self.program
        lines = program.effects() + (program.copies_too() if len(self.nsqds) > 1 else [])
        return Counter(tuple(line.split()) for line in lines)

    def owed(self) -> int:
        return sum(owed(nsqd, self.topic, channel) for nsqd in self.nsqds for channel in self.channels)

    def told(self, counter: str) -> int:
        """What the nsqds counted, all together."""
        return sum(sum(told(self.nsqds, self.topic, channel, counter)) for channel in self.channels)


@pytest.mark.parametrize("name", ALL)
def test_program(name: str, servers: Servers, topic: str, channel: str, tmp_path: Path) -> None:
    program = ALL[name]
    # The ids of messages must not depend on the host's name: jobs_by_id goes by them.
    nsqds = [servers.nsqd(f"--node-id={number}") for number in range(3)]
    with ExitStack() as stack:
        ours = Run(name, nsqds[:2], topic, channel, tmp_path)
        stock = Run(name, nsqds[2:], topic, channel, tmp_path)
        runs = [ours, stock] if program.stock else [ours]
        for run in runs:
            run.start(stack)
        for run in runs:
            run.work()
        counted = [{counter: run.told(counter) for counter in COUNTERS} for run in runs]
        for run in runs:
            run.end()
    failed, deferred = (sum(map(int, counts)) for counts in zip(*ours.journal.facts("stats"), strict=True))
    assert failed == program.failures
    assert deferred <= failed, "a copy goes back only when its message failed"
    published = program.messages * len(program.channels)
    expected = [
        {"message_count": 2 * published, "requeue_count": failed + deferred, "timeout_count": 0},
        {"message_count": published, "requeue_count": failed, "timeout_count": 0},
    ]
    assert counted == expected[: len(runs)]


def test_every_program_is_run() -> None:
    assert {file.stem for file in PROGRAMS.glob("*.py")} == {*ALL, "surroundings"}
