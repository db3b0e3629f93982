"""Talks on one connection, read and written as an event loop finds that they can be.

A talk may begin before the replies of the one before it are there: they come in the order of the commands.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from nsqdedupe.memcached.link import Link
from nsqdedupe.memcached.meta import MisreadError
from nsqdedupe.memcached.wire import NOT_YET, Talk, receive

T = TypeVar("T")


class Hearer(Protocol):
    """Who waits for a talk."""

    deadline: float
    """When it must be over, on the monotonic clock."""

    def heard(self, link: Link, talk: Talk, /) -> None:
        """It is over, with replies or an error."""


class Stream:
    """What is said on one connection: talks, one behind the other.

    Args:
        link: whose connection it is.

        talk: the first of them.
    """

    def __init__(self, link: Link, talk: Talk) -> None:
        self.ended = False
        self.number = talk.connection.fileno()
        self._link = link
        self._connection = talk.connection
        self._talks: deque[tuple[Talk, Hearer]] = deque()
        self._unsent: deque[Talk] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waits_to_write = False
        self._process = os.getpid()
        link.on_hang_up = self._end

    @property
    def sent(self) -> bool:
        """Whether all of it is on its way."""
        return not self._unsent

    def listen(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Be called by this loop, or by none."""
        # After a fork the loop's list of sockets is the parent's, too.
        if self._loop is not None and not self._loop.is_closed() and self._process == os.getpid():
            self._loop.remove_reader(self.number)
            self._loop.remove_writer(self.number)
        self._loop = loop
        self._waits_to_write = False
        if loop is not None and not self.ended:
            loop.add_reader(self.number, call_weakly, weakref.ref(self), Stream.read)
            self._wait_to_write()

    def send(self, talk: Talk, hearer: Hearer) -> None:
        """Begin a talk."""
        self._talks.append((talk, hearer))
        self._unsent.append(talk)
        self.write()

    def write(self) -> None:
        """Send as much as the connection takes."""
        unsent = self._unsent
        try:
            while unsent:
                unsent[0].write()
                if not unsent[0].sent:
                    break
                unsent.popleft()
        except OSError as error:
            self._fail(error)
        self._wait_to_write()

    def _wait_to_write(self) -> None:
        loop, wanted = self._loop, bool(self._unsent)
        if loop is None or wanted is self._waits_to_write:
            return
        self._waits_to_write = wanted
        if wanted:
            loop.add_writer(self.number, call_weakly, weakref.ref(self), Stream.write)
        else:
            loop.remove_writer(self.number)

    def read(self) -> bool:
        """Take what has come; whether anything has."""
        if self.ended:
            return False
        try:
            data = receive(self._connection)
        except NOT_YET:
            return False
        except OSError as error:
            self._fail(error)
            return False
        while data and not self.ended:
            if not self._talks:
                self._link.lose(f"{self._link.name}: said more than it was asked")
                return False
            talk, hearer = self._talks[0]
            try:
                beyond = talk.feed(data)
            except MisreadError as error:
                self._fail(error)
                return False
            if beyond is None:
                return True
            self._talks.popleft()
            data = beyond
            hearer.heard(self._link, talk)
        return True

    def give_up(self, now: float, timeout: float) -> None:
        """End the talks if the first of them should have been answered by now."""
        if self._is_late(now):
            while self.read():
                pass
            if self._is_late(now):
                self._fail(TimeoutError(f"no answer within {timeout:g} s"))

    def _is_late(self, now: float) -> bool:
        return bool(self._talks) and self._talks[0][1].deadline <= now

    def _fail(self, error: Exception) -> None:
        """The connection is good for nothing any more."""
        if self._talks:
            talk, hearer = self._talks.popleft()
            talk.error = error
            hearer.heard(self._link, talk)  # it hangs up
        else:
            self._link.hang_up()

    def _end(self) -> None:
        """The connection is about to be closed: who still talks hears no more."""
        self.ended = True
        self.listen(None)
        self._unsent.clear()
        talks, self._talks = self._talks, deque()
        for talk, hearer in talks:
            talk.error = ConnectionError("closed the connection")
            hearer.heard(self._link, talk)


def call_weakly(whose: weakref.ref[T], method: Callable[[T], object]) -> None:
    """Call a method, if anybody has its object still: a loop that is to call it shall not keep that alive."""
    found = whose()
    if found is not None:
        method(found)
