"""Real servers for a test, and how to wait for what they and the code under test do."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd
from nsqdedupe.cli.local_server import LocalServer

T = TypeVar("T")
S = TypeVar("S", bound=LocalServer)

Pair = tuple[Nsqd, Nsqd]

NOT_YET = (AssertionError, LookupError, OSError)
"""What a look may raise while it is too early: a check that fails, a channel not there, a server down."""

PAUSE = 0.01

MOMENT = 30.0
"""Seconds for what takes a moment: on a machine that is ten times slower, or has a lot else to do."""


class _Patience:
    """Remembers what was seen last, and when to give up."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self.seen: object = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, NOT_YET):
            self.seen = error
        return isinstance(error, NOT_YET)

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            cause = self.seen if isinstance(self.seen, Exception) else None
            raise AssertionError(f"not within {self._timeout:g} s; last seen: {self.seen!r}") from cause


def eventually(look: Callable[[], T], timeout: float = MOMENT, until: Callable[[T], object] = bool) -> T:
    """Look again and again until what is seen satisfies ``until`` (by default: until it is truthy).

    Returns:
        What was seen then.

    Raises:
        AssertionError: it never was within ``timeout`` seconds; the text says what was seen last.
    """
    patience = _Patience(timeout)
    while True:
        with patience:
            patience.seen = seen = look()
            if until(seen):
                return seen
        patience.check()
        time.sleep(PAUSE)


async def eventually_async(
    look: Callable[[], Any],
    timeout: float = MOMENT,  # noqa: ASYNC109 - the name it has in the other form
    until: Callable[[Any], object] = bool,
) -> Any:
    """The same on an event loop, which runs in between; ``look`` may be a coroutine function."""
    patience = _Patience(timeout)
    while True:
        with patience:
            answer = look()
            patience.seen = seen = await answer if inspect.isawaitable(answer) else answer
            if until(seen):
                return seen
        patience.check()
        await asyncio.sleep(PAUSE)


class Servers:
    """The servers of one test: started by need, all gone with the test.

    Args:
        directory: where each server gets a directory of its own.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._all: list[LocalServer] = []

    def lookupd(self, *flags: str) -> Nsqlookupd:
        """Start an nsqlookupd."""
        return self._start(Nsqlookupd(*flags, directory=self._next("nsqlookupd")))

    def nsqd(self, *flags: str, lookupds: Sequence[Nsqlookupd] = ()) -> Nsqd:
        """Start an nsqd, and wait until it is registered with each lookupd."""
        nsqd = self._start(Nsqd(*flags, lookupds=lookupds, directory=self._next("nsqd")))
        for lookupd in lookupds:
            eventually(lookupd.nodes, until=lambda nodes: nsqd.tcp_address in nodes)
        return nsqd

    def memcached(self, *flags: str, memory: int = 64) -> Memcached:
        """Start a memcached."""
        return self._start(Memcached(*flags, memory=memory, directory=self._next("memcached")))

    def close(self, *, failed: bool) -> None:
        """End them all; report their logs and keep their files if the test failed, else remove them.

        Raises:
            AssertionError: a process is left.
        """
        for server in reversed(self._all):
            server.close()
        left = processes_in(self.directory)
        if failed or left:
            for server in self._all:
                print(f"-- {server.log_path}\n{server.log_tail()}")  # noqa: T201 - pytest shows it with the failure
        else:
            shutil.rmtree(self.directory, ignore_errors=True)
        assert not left, f"server processes left behind: {left}"

    def _next(self, name: str) -> Path:
        return self.directory / f"{name}-{len(self._all) + 1}"

    def _start(self, server: S) -> S:
        self._all.append(server)
        server.start()
        return server


@contextlib.contextmanager
def silent_ports() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ports, one after the other, that are nobody else's; nobody answers there until one listens.

    Bound without SO_REUSEADDR: else it would also get a port that another test's server keeps while it is down.
    """
    with contextlib.ExitStack() as found:
        for _ in range(1000):
            with contextlib.ExitStack() as tried, contextlib.suppress(OSError, OverflowError):
                first, second = (tried.enter_context(socket.socket()) for _ in range(2))
                first.bind(("127.0.0.1", 0))
                second.bind(("127.0.0.1", first.getsockname()[1] + 1))
                found.push(tried.pop_all())
                break
        else:
            raise AssertionError("no two free ports in a row")
        yield first, second


def processes_in(directory: Path) -> list[int]:
    """The processes that work in a directory or below it: each local server works in its own."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                where = (process / "cwd").readlink()
            except OSError:  # ended meanwhile, or a zombie, or not ours
                continue
            if where.is_relative_to(directory):
                found.append(int(process.name))
    return found
