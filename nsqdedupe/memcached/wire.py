"""Pipelines on the wire: to several servers side by side, so that together they take one round trip.

Written and read in turns as the sockets allow, never one after the other: a server that cannot get rid of its replies
stops reading, and then a client that only writes waits for ever.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from nsqdedupe.memcached.meta import FINISH, MisreadError, Replies, Reply

READ_AT_MOST = 1 << 16
"""Bytes: more than a record of TLS, so that none is left where poll() does not see it; and so few that the C library
has them at hand (for 256 KiB it asks the kernel each time, which took longer than all the rest of a small pipeline)."""

RECORD = 1 << 14
"""Bytes in a record of TLS at most: as many as memcached reads at once."""

NOT_YET = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Talk:
    """One pipeline on one connection.

    When it ends, either `replies` or `error` is there. After an error the connection is good for nothing.

    Args:
        connection: a socket that does not block.

        commands: the pipeline, without the ``mn`` that ends it.

        kinds: for each of its commands `meta.READS` or `meta.WRITES`.
    """

    def __init__(self, connection: socket.socket, commands: Sequence[bytes], kinds: bytes) -> None:
        self.connection = connection
        self.replies: list[Reply] = []
        self.error: Exception | None = None
        self._reader = Replies(kinds)
        whole = (*commands, FINISH)
        self._pieces = _records(whole) if isinstance(connection, ssl.SSLSocket) else iter((b"".join(whole),))
        self._unsent = memoryview(next(self._pieces))

    @property
    def sent(self) -> bool:
        """Whether all of it is on its way."""
        return not self._unsent

    def write(self) -> None:
        """Send as much as the connection takes."""
        with contextlib.suppress(*NOT_YET):
            while self._unsent:
                rest = self._unsent[self.connection.send(self._unsent) :]
                self._unsent = rest or memoryview(next(self._pieces, b""))

    def read(self) -> bool:
        """Read what has come; whether it was all."""
        with contextlib.suppress(*NOT_YET):
            beyond = self.feed(receive(self.connection))
            if beyond:
                raise MisreadError(beyond)
            return beyond is not None
        return False

    def feed(self, data: bytes) -> bytes | None:
        """Take what has come; None if more is to come, else what came after the last reply.

        Raises:
            MisreadError: it is no reply, or one too many or too few.
        """
        replies = self._reader.feed(data)
        if replies is None:
            return None
        self.replies = replies
        return self._reader.beyond


def receive(connection: socket.socket) -> bytes:
    """What has come on a connection that does not block; some, not all.

    Raises:
        OSError: nothing has come yet, or the connection has ended.
    """
    data = connection.recv(READ_AT_MOST)
    if not data:
        raise ConnectionError("closed the connection")
    return data


def _records(commands: Iterable[bytes]) -> Iterator[bytes]:
    """A pipeline in records of TLS, each of whole commands.

    memcached 1.6.18 waits for ever for what it has decrypted already. It reads a record as a whole, but for a value
    that began in the one before it takes no more than the rest of that.
    """
    record: list[bytes] = []
    size = 0
    for command in commands:
        if record and size + len(command) > RECORD:
            yield b"".join(record)
            record, size = [], 0
        record.append(command)
        size += len(command)
    yield b"".join(record)


def silent(connection: socket.socket) -> bool:
    """Whether a connection stands, and nothing has come on it that nobody has asked for. Does not block."""
    try:
        connection.recv(1)
    except NOT_YET:
        return True
    except OSError:
        return False
    return False


def converse(talks: Collection[Talk], timeout: float) -> None:
    """Hold all these talks at once. Blocks until each has its replies or its error.

    Args:
        talks: each on a connection of its own.

        timeout: seconds for all of them together.
    """
    deadline = time.monotonic() + timeout
    poll = select.poll()
    going: dict[int, Talk] = {}
    for talk in talks:
        if _goes_on(talk, reading=False):
            number = talk.connection.fileno()
            going[number] = talk
            poll.register(number, _awaited(talk))
    while going:
        # What has come by the deadline is read even if this process was stopped, or had no turn, until after it.
        events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for number, event in events:
            talk = going[number]
            if not _goes_on(talk, reading=event & ~select.POLLOUT != 0):
                poll.unregister(number)
                del going[number]
            else:
                poll.modify(number, _awaited(talk))
        if not events:
            for talk in going.values():
                talk.error = TimeoutError(f"no answer within {timeout:g} s")
            return


def _goes_on(talk: Talk, *, reading: bool) -> bool:
    """Do what can be done now; whether anything is left to do."""
    try:
        if not talk.sent:
            talk.write()
        return not (reading and talk.read())
    except (OSError, MisreadError) as error:
        talk.error = error
        return False


def _awaited(talk: Talk) -> int:
    return select.POLLIN if talk.sent else select.POLLIN | select.POLLOUT
