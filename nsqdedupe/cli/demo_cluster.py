"""`nsqdedupe demo-cluster`: two consumers share a memcached; one of them and an nsqd are killed. What is lost?"""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from nsqdedupe.cli.cluster.account import Account
from nsqdedupe.cli.cluster.consumer import MAX_IN_FLIGHT
from nsqdedupe.cli.cluster.summary import Summary
from nsqdedupe.cli.demo_screen import WIDTH, PlainScreen, Row
from nsqdedupe.cli.local_memcached import Memcached, find_memcached
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd, find_binary
from nsqdedupe.cli.local_server import LocalProcess
from nsqdedupe.cli.workplace import workplace
from nsqdedupe.errors import DedupeError

MESSAGES = 20_000
"""How many events there are by default."""

DURATION = 10.0
"""Seconds over which they are published, so that one can watch."""

DOWN = 3.0
"""Seconds for which the killed nsqd stays away."""

PATIENCE = 60.0
"""Seconds without any progress after which it is given up."""

RECALL = 0.999999
"""How surely an event is still recognised when one of its copies comes a whole run late."""

TOPIC, CHANNEL = "events", "demo"

# What is queued outlives the kill of an nsqd. What a killed consumer had in hand is given out again after 3 s.
NSQD_FLAGS = ("--mem-queue-size=0", "--msg-timeout=3s")

_LOOK = 0.05

_STORY = (
    "Publishing {:,} events to two real nsqds each. Two consumers on one channel share a memcached, so each event "
    "must be handled once, wherever its copies arrive. On the way one consumer and then one nsqd are killed. "
    "Is any event lost?"
)
_EXPLAINED = (
    f"The kill of a consumer explains up to {MAX_IN_FLIGHT} slips: what it had done and not yet told memcached. "
    "The kill of an nsqd explains none."
)


def run_demo_cluster(messages: int = MESSAGES) -> bool:
    """Run it on standard output, until it is done. Blocks.

    Args:
        messages: how many events are published.

    Returns:
        Whether all promises were kept.

    Raises:
        MissingDependency: there is no nsqd or no memcached; nothing was started.

        LocalServerError: a server or a program did not start, or ended by itself.

        StalledError: it did not come to its end.
    """
    for server in (Nsqd, Nsqlookupd):
        find_binary(server.program)
    find_memcached()
    screen = PlainScreen(sys.stdout)
    with workplace() as directory:
        for line in textwrap.wrap(_STORY.format(messages), WIDTH):
            screen.say(line)
        summary = Run(messages, screen, directory).go()
        broken = _broken_promises(summary, messages)
        screen.table(_rows(summary))
        logged = [*broken, f"What the servers and programs logged: {directory}"]
        for line in logged if broken else textwrap.wrap(_EXPLAINED, WIDTH):
            screen.say(line)
        screen.say(f"lost {len(summary.lost):,}")
        if not broken:
            shutil.rmtree(directory)
    return not broken


def _rows(summary: Summary) -> list[Row]:
    account = summary.account
    return [
        Row("published, acknowledged by both nsqds", f"{account.published:,}"),
        Row("handled, by one consumer or the other", f"{account.handled:,}"),
        Row("duplicates finished, not handled (as last reported)", f"{account.duplicates:,}"),
        Row("slips: events handled more than once", f"{account.twice:,}"),
        Row("lost: events acknowledged, never handled", f"{len(summary.lost):,}"),
    ]


def _broken_promises(summary: Summary, messages: int) -> list[str]:
    """What went wrong, a line each."""
    account = summary.account
    broken = []
    if summary.lost:
        broken.append(f"Acknowledged and never handled: {len(summary.lost):,} of {account.published:,} events.")
    if account.twice > MAX_IN_FLIGHT:
        broken.append(f"Handled more than once: {account.twice:,} events. The kill explains {MAX_IN_FLIGHT} at most.")
    if account.published < messages:
        broken.append(f"Not acknowledged by both nsqds: {messages - account.published:,} events.")
    return broken


class StalledError(DedupeError):
    """The cluster does not go on; the text says how it stands."""


class Program(LocalProcess):
    """One of the cluster's Python programs, as a process.

    Args:
        module: which one of `nsqdedupe.cli.cluster`.

        options: its command line.

        directory: where its log lies.
    """

    def __init__(self, module: str, *options: str, directory: Path) -> None:
        self.program = module
        super().__init__(Path(sys.executable), *options, directory=directory)

    def _own_flags(self) -> list[str]:
        return ["-m", f"nsqdedupe.cli.cluster.{self.program}"]

    def _answers(self) -> bool:
        return True  # there is nothing to ask it: the account tells what it does


class Run:
    """Starts the cluster, kills a consumer and then an nsqd, and ends when no nsqd has anything left.

    Args:
        messages: how many events are published.

        screen: where it is told.

        directory: for data, logs and the account.
    """

    def __init__(self, messages: int, screen: PlainScreen, directory: Path) -> None:
        self._messages = messages
        self._screen = screen
        self.directory = directory
        self._account = Account(directory)
        self._running: dict[str, LocalProcess] = {}
        self._empty = False

    def go(self) -> Summary:
        """Run it all; returns what became of the events. Blocks.

        Raises:
            LocalServerError: a server or a program did not start, or ended by itself.

            StalledError: it did not come to its end.
        """
        with contextlib.ExitStack() as stack:
            self._start_all(stack)
            self._in_the_middle(self._messages // 3)
            self._kill("consumer 1")
            self._in_the_middle(self._messages * 2 // 3)
            nsqd = self._kill("nsqd 2")
            back = time.monotonic() + DOWN
            self._until(lambda: time.monotonic() >= back)
            self._run("nsqd 2", nsqd.start())
            self._say("nsqd 2 started again")
            self._until(lambda: self._publisher.status is not None and self._empty)
        return self._summary

    def _start_all(self, stack: contextlib.ExitStack) -> None:
        lookupd = stack.enter_context(Nsqlookupd(directory=self.directory / "nsqlookupd"))
        memcached = stack.enter_context(Memcached(directory=self.directory / "memcached"))
        nsqds = [Nsqd(*NSQD_FLAGS, lookupds=[lookupd], directory=self.directory / f"nsqd-{n}") for n in (1, 2)]
        for number, nsqd in enumerate(nsqds, start=1):
            self._run(f"nsqd {number}", stack.enter_context(nsqd))
            nsqd.create_channel(TOPIC, CHANNEL)
        store = f"memcached://{memcached.tcp_address}?window={self._messages}&recall={RECALL}&namespace=demo"
        common = "--topic", TOPIC, "--account", str(self.directory)
        for number in (1, 2):
            where = "--channel", CHANNEL, "--lookupd-http-address", lookupd.http_address, "--store", store
            name = f"consumer-{number}"
            consumer = Program("consumer", *common, *where, "--name", name, directory=self.directory / name)
            self._run(f"consumer {number}", stack.enter_context(consumer))
        addresses = [f"--nsqd-tcp-address={nsqd.tcp_address}" for nsqd in nsqds]
        pace = "--messages", str(self._messages), "--rate", str(max(1, round(self._messages / DURATION)))
        self._publisher = Program("publisher", *common, *addresses, *pace, directory=self.directory / "publisher")
        stack.enter_context(self._publisher)
        self._summary = Summary(self._account, [nsqd.http_address for nsqd in nsqds], TOPIC, CHANNEL)
        stack.callback(self._summary.close)
        self._start = self._said = time.monotonic()

    def _run(self, name: str, process: LocalProcess) -> None:
        self._running[name] = process

    def _in_the_middle(self, handled: int) -> None:
        """Return when so many are handled, and handlers are running."""
        account = self._account
        self._until(lambda: account.handled >= handled and (account.waiting or account.handled >= self._messages))

    def _kill(self, name: str) -> LocalProcess:
        process = self._running.pop(name)
        process.kill()
        self._say(f"{name} killed with SIGKILL")
        return process

    def _until(self, look: Callable[[], object]) -> None:
        """Return when something is so."""
        before: object = None
        moved = time.monotonic()
        while True:
            self._empty = self._summary.look()
            self._check()
            if look():
                return
            now = self._account.published, self._account.handled, self._account.duplicates
            if now != before:
                before, moved = now, time.monotonic()
            if time.monotonic() - moved > PATIENCE:
                raise StalledError(f"nothing has moved for {PATIENCE:g} s: {self._summary}")
            if time.monotonic() - self._said >= self._screen.every:
                self._said = time.monotonic()
                self._say(f"handled {self._account.handled:,} of {self._messages:,}; waiting {self._waiting()}")
            time.sleep(_LOOK)

    def _check(self) -> None:
        """All run that were not killed; the publisher may have done its work."""
        ended = [process for process in self._running.values() if process.status is not None]
        for process in [*ended, *([self._publisher] if self._publisher.status else [])]:
            raise process.failed(f"ended by itself with {process.status}")

    def _waiting(self) -> str:
        down = "".join(f"; {name} is down" for name in ("consumer 1", "nsqd 2") if name not in self._running)
        return f"{len(self._account.waiting):,}{down}"

    def _say(self, text: str) -> None:
        self._screen.say(f"{time.monotonic() - self._start:5.1f} s  {text}")
