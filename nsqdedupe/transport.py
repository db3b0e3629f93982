"""How the bytes of a connection that is ready come and go: by its IOStream, or where nothing is encoded by the socket.

The bare socket takes half the time of the stream or less, most of all where batches are small. Its stream stays
the one who opens and closes it: whoever closes the stream ends the connection, its close callback tells everybody.
"""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections import deque
from typing import Any

from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, StreamClosedError

from nsqdedupe.clock import monotonic
from nsqdedupe.link import Link

CHUNK = 65536
"""Bytes asked for at a time: what IOStream takes from the socket in one call, and the least asked of the bare one."""

LARGEST = 4 * CHUNK
"""The most asked of the bare socket."""

WORTH_A_TURN = 128
"""Messages: where a full read brings fewer, what each turn of the loop costs is felt, and the next asks for more."""

ON_THE_WAY = 16 << 20
"""Bytes sent and not read yet, at most: what Linux keeps on both ends of a connection by default, and some."""

MARKS = 4
"""How finely those are counted."""


class Transport(Link):
    """A connection to one nsqd that is read and written to many frames at a time once it is ready."""

    def __init__(self, host: str, port: int, **kwargs: Any) -> None:  # noqa: ANN401 - pynsq's options
        super().__init__(host, port, **kwargs)
        self.seen_empty = monotonic()
        """All that is read now arrived after this moment."""
        self._marks = deque([self.seen_empty] * MARKS, MARKS)
        """Moments, each so many bytes after the one before that all of them are worth `ON_THE_WAY`."""
        self._since_mark = 0
        """Bytes read since the last of them."""
        self._lacks = 0
        """Bytes without which nothing can be made of what comes next, as far as is known."""
        self._pending: asyncio.Future[bytes] | None = None
        self._bare: socket.socket | None = None
        """Its socket, once that is read from and written to without the stream."""
        self._wanted = CHUNK
        """Bytes asked of the bare socket at a time."""
        self._paused = False
        self._emptied = True
        """The last read of the bare socket took all that was there."""
        self._unsent = bytearray()
        """What the system has not taken yet of what was written to the bare socket."""
        self._written: asyncio.Future[None] | None = None

    @abstractmethod
    def _take(self, chunk: bytes) -> bool:
        """Bytes came. False: no more is read until `read_on`."""

    # -- reading ---------------------------------------------------------------------------------

    def read_on(self) -> None:
        """Read when there is something."""
        if self._bare is not None:
            self._paused = self._emptied = False
            self._watch(self._bare)
            return
        # A frame larger than a chunk is gathered by the stream: no byte of it is copied twice.
        whole = self._lacks > CHUNK
        try:
            pending = asyncio.ensure_future(self.stream.read_bytes(self._lacks if whole else CHUNK, partial=not whole))
        except StreamClosedError:
            return
        if not pending.done():
            self.seen_empty = monotonic()
            if not whole and self._is_plain():
                # This read is never served: the stream holds no byte, and sees none from now on.
                self._lay_bare()
                return
        self._pending = pending
        pending.add_done_callback(self._on_read)

    def look(self, moment: float) -> None:
        """Nothing that is still unread had arrived at that moment: the loop has polled the socket since."""
        if self._bare is not None:
            waits = self._emptied and not self._paused
        else:
            waits = self._pending is not None and not self._pending.done()
        if waits and moment > self.seen_empty:
            self.seen_empty = moment

    def _count(self, size: int) -> None:
        """So many bytes were read. Where that never empties the socket, messages would else seem ever older."""
        self._since_mark += size
        if self._since_mark >= ON_THE_WAY // MARKS:
            self._since_mark = 0
            self.seen_empty = max(self.seen_empty, self._marks[0])
            self._marks.append(monotonic())

    def _on_read(self, pending: asyncio.Future[bytes]) -> None:
        self._pending = None
        if pending.cancelled() or pending.exception() is not None or self.closed():
            return  # closed: the stream's close callback tells everybody, and nothing can be answered
        chunk = pending.result()
        go_on = self._take(chunk)
        if isinstance(self.stream.socket, socket.socket):  # else it was compressed, and less than that on the wire
            self._count(len(chunk))
        if go_on and not self.closed():
            self.read_on()

    # -- the bare socket -------------------------------------------------------------------------

    def _is_plain(self) -> bool:
        """Whether what is on the wire is what was said, and nothing of it is left in the stream."""
        stream = self.stream
        return type(stream) is IOStream and type(stream.socket) is socket.socket and not stream.writing()

    def _lay_bare(self) -> None:
        self._bare = self.stream.socket
        loop = self.stream.io_loop
        # The stream believes that this is its own handler, and takes it away when it closes.
        loop.remove_handler(self._bare)
        loop.add_handler(self._bare, self._on_events, IOLoop.READ)

    def _watch(self, sock: socket.socket) -> None:
        """Hear of what is to be read, unless that is paused, and of when the system takes more, if more is left."""
        if not self.stream.closed():
            events = (0 if self._paused else IOLoop.READ) | (IOLoop.WRITE if self._unsent else 0)
            self.stream.io_loop.update_handler(sock, events)

    def _on_events(self, sock: socket.socket, events: int) -> None:
        if events & IOLoop.READ:
            self._on_readable(sock)
        elif events & IOLoop.WRITE:
            self._on_writable(sock)

    def _on_readable(self, sock: socket.socket) -> None:
        now = monotonic()  # before the call: what comes during it may be left for the next
        try:
            chunk = sock.recv(self._wanted)
        except BlockingIOError:
            return
        except OSError as error:
            self.stream.close(exc_info=error)
            return
        if not chunk:
            self.stream.close()
            return
        # What is read short has been read to its end: what comes next arrived later.
        self._emptied = len(chunk) < self._wanted
        go_on = self._take(chunk)
        self._count(len(chunk))
        if self._emptied:
            self.seen_empty = now
        if not go_on:
            self._paused = True
            self._watch(sock)

    def _suit(self, size: int, messages: int) -> None:
        """A read brought so many messages: ask for more at a time where they are large, for less where small."""
        if size >= self._wanted:
            if messages < WORTH_A_TURN:
                self._wanted = min(LARGEST, 2 * self._wanted)
            elif messages > LARGEST // CHUNK * WORTH_A_TURN:
                self._wanted = max(CHUNK, self._wanted // 2)

    def _send(self, sock: socket.socket, data: bytes | bytearray) -> int:
        """How many bytes the system has taken, or what has to be done with was done."""
        try:
            return sock.send(data)
        except BlockingIOError:
            return 0
        except ConnectionError:
            # nsqd has hung up. Why it did is still to be read, and so is the end, which closes the stream.
            return len(data)
        except OSError as error:
            self.stream.close(exc_info=error)
            return len(data)

    def _on_writable(self, sock: socket.socket) -> None:
        del self._unsent[: self._send(sock, self._unsent)]
        if not self._unsent:
            self._watch(sock)
            self._all_written()

    # -- writing ---------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        """Hand bytes to the system, in order, and those that it does not take as soon as it does."""
        sock = self._bare
        if sock is None:
            self._written = self.stream.write(data)
            return
        sent = 0 if self._unsent else self._send(sock, data)
        if sent < len(data):
            idle = not self._unsent
            self._unsent += data[sent:]
            if idle:
                self._written = self._loop.create_future()
                self._watch(sock)

    async def _drained(self) -> None:
        """Return when the system has taken all that was written, or the connection is closed."""
        if self._written is not None:
            await asyncio.wait([self._written])

    def _all_written(self) -> None:
        if self._written is not None and not self._written.done():
            self._written.set_result(None)

    def _socket_close(self) -> None:
        if self._bare is not None:
            self._all_written()
        super()._socket_close()
