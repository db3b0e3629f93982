"""A pynsq connection that reads and answers in batches once it is ready.

Whatever was negotiated is one path here: bytes come decoded, as many as there are; all whole frames in them are
parsed in one go; answers are joined and written once.

What it touches of pynsq that is not documented (unchanged since 2022) is checked by `check_pynsq`.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable
from typing import Any

import nsq
import nsq.conn
import nsq.event
from tornado.iostream import StreamClosedError

from nsqdedupe.delivery import Source
from nsqdedupe.errors import MissingDependency
from nsqdedupe.transport import Transport

logger = logging.getLogger(__name__)

MAX_FRAME = 100 << 20
"""Bytes of the largest frame taken: what IOStream can buffer. A larger size is no frame of nsqd's."""

_HEAD = struct.Struct(">iiqH16s")  # size, frame type, timestamp, attempts (unsigned: pynsq errs here), id
HEAD_BYTES = _HEAD.size
_OK = b"\0\0\0\0OK"

Head = tuple[int, int, int, int, bytes]
"""Of a message: its frame's size and type, its timestamp, attempts and id."""

SUBSCRIBED = "subscribed"
"""The event that nsqd has agreed to the subscription."""

_SIZE = 4  # the size field does not count itself
_TYPE = 4
_MESSAGE = 2
_SHORTEST = HEAD_BYTES - _SIZE  # of a message: its body is empty

_USED = {
    nsq.AsyncConn: (
        *("connect", "send", "send_rdy", "close", "trigger", "upgrade_to_tls"),
        *("_connect_callback", "_on_connect", "_socket_close", "_start_read", "_on_data"),
        *("_on_message_finish", "_on_message_requeue", "_on_message_touch"),
    ),
    nsq.Reader: (
        *("_on_connection_identify", "_on_connection_identify_response", "_on_connection_auth"),
        *("_on_connection_auth_response", "_on_connection_error", "_on_connection_close", "_on_connection_ready"),
        *("_on_heartbeat", "_on_backoff_resume", "_maybe_update_rdy", "_send_rdy", "_redistribute_rdy_state"),
        "_check_last_recv_timestamps",
    ),
}


def check_pynsq() -> None:
    """Make sure that the installed pynsq has what this package builds on.

    Raises:
        MissingDependency: it has not; the text says what is missing.
    """
    used = [(owner, name) for owner, names in _USED.items() for name in names]
    missing = [f"{owner.__name__}.{name}" for owner, name in used if not hasattr(owner, name)]
    if missing:
        raise MissingDependency(f"this pynsq has no {', '.join(missing)}: pip install 'pynsq>=0.9,<0.10'")


class Connection(Transport):
    """A connection to one nsqd.

    Args:
        host: name or address of the nsqd.

        port: its TCP port.

        receive: called with this connection, the heads and the bodies of each batch of messages, in order of arrival,
            and the bytes read. Once it returns False no more is read until `read_on`.

        responder: whom messages answer to.

        kwargs: options of `nsq.AsyncConn`.
    """

    source: Source
    """Counts its deliveries; set when it is ready."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        receive: Callable[[Connection, list[Head], list[bytes], int], bool],
        responder: Any = None,  # noqa: ANN401 - typed where it is used, a floor above
        **kwargs: Any,  # noqa: ANN401 - pynsq's options, checked before
    ) -> None:
        super().__init__(host, port, **kwargs)
        self.responder = responder
        self.owner_prefix = f"{host}:{port}/".encode()
        self.identity: dict[str, Any] = {}
        self.is_open = False
        """It is ready and subscribed, and not closed yet."""
        self.subscribed = False
        """nsqd has agreed to the subscription."""
        self._goodbye: asyncio.Future[None] | None = None
        self._receive = receive
        self._batching = False
        self._parts: list[bytes] = []
        """What has come of a frame that is not whole."""
        self.fins: list[bytes] = []
        """Ids of messages that the next `flush`, which the caller sees to, answers with FIN."""
        self._out: list[bytes] = []
        self._flushing = False
        # Before anybody else's listener: what they send when the connection is ready is batched already.
        self.on(nsq.event.READY, self._start_batching)
        self.on(nsq.event.IDENTIFY_RESPONSE, self._on_identified)

    # -- set-up ----------------------------------------------------------------------------------

    def _on_identified(self, data: dict[str, Any], **_: Any) -> None:  # noqa: ANN401 - an event's arguments
        self.identity = data

    def _start_batching(self, **_: Any) -> None:  # noqa: ANN401 - an event's arguments
        self._batching = True
        self._loop = asyncio.get_running_loop()

    # -- stopping --------------------------------------------------------------------------------

    def say_goodbye(self) -> asyncio.Future[None]:
        """Ask nsqd to send nothing more. Done when it has agreed, or the connection is closed."""
        if self._goodbye is None:
            self._goodbye = asyncio.get_running_loop().create_future()
            if self.closed():
                self._goodbye.set_result(None)
            else:
                # Not before: while pynsq tells of a response, who listens is a list that it walks through, and a
                # listener more would let those that the application adds meanwhile hear of a response too many.
                self.on(nsq.event.RESPONSE, self._on_agreed)
                self.on(nsq.event.CLOSE, self._on_agreed)
                self.send_rdy(0)
                self.send(b"CLS\n")
        return self._goodbye

    @property
    def said_goodbye(self) -> bool:
        """Whether nsqd has agreed to send nothing more."""
        return self._goodbye is not None and self._goodbye.done()

    def _on_agreed(self, data: bytes = b"CLOSE_WAIT", **_: Any) -> None:  # noqa: ANN401 - an event's arguments
        if data == b"CLOSE_WAIT" and self._goodbye is not None and not self._goodbye.done():
            self._goodbye.set_result(None)

    # -- reading ---------------------------------------------------------------------------------

    def _start_read(self) -> None:
        """Pynsq calls this when it wants the next frame; once ready, that is the first batch."""
        if self._batching:
            self.read_on()
        else:
            super()._start_read()

    def _take(self, chunk: bytes) -> bool:
        self.last_recv_timestamp = time.time()
        heads: list[Head] = []
        bodies: list[bytes] = []
        start = 0
        try:
            while self._parts:
                # A frame that began in an earlier chunk is put together for itself, so that this one is not copied.
                part = chunk[start : start + self._lacks]
                start += len(part)
                self._parts.append(part)
                self._lacks -= len(part)
                if self._lacks > 0:
                    return True
                frame = b"".join(self._parts)
                self._parts.clear()
                self._keep(frame, self._parse(frame, 0, heads, bodies))
                if self.closed():
                    return False
            self._keep(chunk, self._parse(chunk, start, heads, bodies))
        except ValueError as error:
            self.fail(nsq.protocol.IntegrityError(str(error)))
            return False
        if self.closed():
            return False
        self._suit(len(chunk), len(heads))
        return not heads or self._hand_over(heads, bodies, len(chunk))

    def _keep(self, data: bytes, end: int) -> None:
        if end < len(data):
            self._parts.append(data[end:])

    def _hand_over(self, heads: list[Head], bodies: list[bytes], size: int) -> bool:
        self.last_msg_timestamp = self.last_recv_timestamp
        try:
            return self._receive(self, heads, bodies, size)
        except Exception:
            # A hook of the application broke, as far as we know: that must not make this connection deaf.
            logger.exception("[%s] failed to take %d messages", self.id, len(heads))
            return True

    def _parse(self, data: bytes, start: int, heads: list[Head], bodies: list[bytes]) -> int:
        """Split all whole frames off; returns where they end, and sets how many bytes the next one lacks.

        Messages are appended to the lists, other frames are handled by pynsq at once.

        Raises:
            ValueError: a frame's size is out of range.
        """
        end = len(data)
        last = end - HEAD_BYTES
        unpack, note_head, note_body = _HEAD.unpack_from, heads.append, bodies.append
        length, shortest = HEAD_BYTES, _SHORTEST
        while True:
            while start <= last:
                head = unpack(data, start)
                size = head[0]
                after = start + size + 4
                if head[1] != 2 or after > end or size < shortest:  # noqa: PLR2004
                    break
                note_head(head)
                note_body(data[start + length : after])
                start = after
            # No message, or not a whole one, or nothing at all.
            if end - start < _SIZE:
                self._lacks = _SIZE - (end - start)
                return start
            size = int.from_bytes(data[start : start + _SIZE], "big", signed=True)
            if not _TYPE <= size <= MAX_FRAME:
                # What is no frame must not be waited for.
                raise ValueError(f"frame of {size} bytes: not from {_TYPE} to {MAX_FRAME}")
            after = start + _SIZE + size
            if after > end:
                self._lacks = after - end
                return start
            frame = data[start + _SIZE : after]
            if int.from_bytes(frame[:_TYPE], "big") == _MESSAGE:
                raise ValueError(f"message frame of {size} bytes: shorter than a message's head")
            self._tell(frame)
            if self.closed():
                return start
            start = after

    def _tell(self, frame: bytes) -> None:
        try:
            if not self.subscribed and frame == _OK:
                self.subscribed = True
                self.trigger(SUBSCRIBED, conn=self)
            self.trigger(nsq.event.DATA, conn=self, data=frame)
        except Exception:
            # As in pynsq: whoever listens, or hooks into the heartbeat, breaks no connection.
            logger.exception("[%s] a listener failed on a frame", self.id)

    # -- writing ---------------------------------------------------------------------------------

    def send(self, data: bytes) -> Any:  # noqa: ANN401 - pynsq's signature
        """Write a command; once ready, in one write with all others of this turn of the loop.

        Raises:
            StreamClosedError: the connection is closed.
        """
        if not self._batching:
            return super().send(data)
        if self.closed():
            raise StreamClosedError
        self._join_fins()
        self._out.append(data)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)
        return None

    def flush(self) -> None:
        """Write all that waits, in order."""
        self._flushing = False
        if self.fins:
            self._join_fins()
        if not self._out:
            return
        data = b"".join(self._out)
        self._out.clear()
        if self.closed():
            return
        try:
            self._write(self.encoder.encode(data))
        except Exception as error:  # noqa: BLE001
            # Not only a closed stream: a compressor may fail, and a connection that cannot answer is no use.
            self.fail(nsq.protocol.SendError("failed to write", error))

    async def drain(self) -> None:
        """Return when all that was sent has been handed to the system, or the connection is closed."""
        self.flush()
        await self._drained()

    def _join_fins(self) -> None:
        if self.fins:
            self._out.append(b"FIN " + b"\nFIN ".join(self.fins) + b"\n")
            self.fins.clear()

    def close(self) -> None:
        """Write what waits, as far as the system takes it at once, and close."""
        if self._batching:
            self.flush()
        try:
            super().close()
        except RuntimeError:
            # The event loop was closed before: nobody is left there who could be told.
            if not self.closed():
                raise
