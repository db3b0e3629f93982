"""A pynsq connection on its way to being ready: any address of its host, TLS, compression.

It can be closed at any moment, and says why it broke.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import nsq
import nsq.conn
import nsq.event
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, SSLIOStream

from nsqdedupe.streams import mend
from nsqdedupe.tls import client_context

_Address = tuple[int, tuple[Any, ...]]
"""Its family, and what a socket connects to."""


class Link(nsq.AsyncConn):
    """A connection to one nsqd, up to where it is ready.

    pynsq's own asks for the address of a name while the event loop waits, takes IPv4 only, and has no stream
    during the TLS handshake, so that it cannot be closed then.
    """

    socket: Any

    def __init__(self, host: str, port: int, **kwargs: Any) -> None:  # noqa: ANN401 - pynsq's options
        super().__init__(host, port, **kwargs)
        self._addresses: list[_Address] = []
        self._given_up = False
        self._error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """Why it broke, as far as is known. None: it has not, or was closed, here or by nsqd."""
        broke = getattr(self.stream, "error", None)
        return self._error or (broke if isinstance(broke, Exception) else None)

    @property
    def peer(self) -> object:
        """Whom it is connected to, as the system names it: the same for two names of one nsqd. None: nobody."""
        try:
            return self.stream.socket.getpeername()
        except (AttributeError, OSError):  # closed, here or there
            return None

    # -- connecting ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, unless that is done. Returns at once; the events ``ready`` and ``close`` tell what comes of it."""
        if not self.closed():
            return
        self.state = nsq.conn.CONNECTING
        self.on(nsq.event.CONNECT, self._on_connect)
        self.on(nsq.event.DATA, self._on_data)
        # Not the running loop: there may be none yet.
        self._loop = IOLoop.current().asyncio_loop  # type: ignore[attr-defined]
        wanted = (self.host, self.port, 0, socket.SOCK_STREAM)
        try:
            self._take_addresses(socket.getaddrinfo(*wanted, 0, socket.AI_NUMERICHOST))
        except (OSError, ValueError):
            # A name: whoever knows its addresses may be slow.
            asking = self._loop.run_in_executor(None, socket.getaddrinfo, *wanted)
            asking.add_done_callback(self._on_addresses)

    def _on_addresses(self, asking: asyncio.Future[Any]) -> None:
        if asking.cancelled():
            return
        error = asking.exception()  # looked at even when nobody wants it any more, or asyncio tells of it
        if self._given_up:
            return
        if error is None:
            self._take_addresses(asking.result())
        else:
            self._unreachable(error)

    def _take_addresses(self, found: list[Any]) -> None:
        self._addresses = [(family, address) for family, _, _, _, address in found]
        self._try_next()

    def _try_next(self) -> None:
        """Try the next address; when there is another one left, for `timeout` seconds at most."""
        family, address = self._addresses.pop(0)
        try:
            self.socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # no more sockets, or none of this family
            self._loop.call_soon(self._on_failed, error)
            return
        self.stream = stream = IOStream(self.socket)
        guard = self._loop.call_later(self.timeout, stream.close) if self._addresses else None

        def on_tried(connecting: asyncio.Future[IOStream]) -> None:
            if guard is not None:
                guard.cancel()
            error = connecting.exception()
            if error is not None or stream.closed():
                self._on_failed(stream.error or TimeoutError("no answer"))
                return
            stream.set_nodelay(True)
            stream.set_close_callback(self._socket_close)
            self._connect_callback(connecting)

        stream.connect(address).add_done_callback(on_tried)

    def _on_failed(self, error: BaseException) -> None:
        if self._given_up:
            return
        if self._addresses:
            self._try_next()
        else:
            self._unreachable(error)

    def _unreachable(self, error: BaseException) -> None:
        # Else it is the encoder's of host names, which says little by itself.
        self._error = error if isinstance(error, OSError) else OSError(f"the host cannot be a name: {error}")
        self._given_up = True  # whoever hears of the error and closes it does so in vain
        self.trigger(nsq.event.ERROR, conn=self, error=self._error)
        self._socket_close()

    # -- up to where it is ready -----------------------------------------------------------------

    def upgrade_to_tls(self, options: Mapping[str, Any] | None = None) -> None:
        """Begin TLS; pynsq calls this when nsqd has agreed. Reads the files that the options name, each time."""
        plain = self.stream
        # What start_tls does, but that hands out the new stream only after the handshake, and until then nobody
        # could close it. Here reading begins at once, and waits for the handshake.
        plain.io_loop.remove_handler(plain.socket)
        try:
            self.socket = client_context(options).wrap_socket(
                plain.socket, server_hostname=self.host, do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:  # a file that is gone, a host that cannot be a name, a lost connection
            self.fail(error)
            return
        plain.set_close_callback(None)
        self.stream = SSLIOStream(self.socket, ssl_options=self.socket.context)
        self.stream.set_close_callback(self._socket_close)

    def _start_read(self) -> None:
        """Read the next frame; pynsq calls this whenever it wants one."""
        mend(self.stream)
        super()._start_read()

    # -- the end ---------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Close because of an error, of which everybody is told."""
        self._error = self._error or error
        self.close()
        self.trigger(nsq.event.ERROR, conn=self, error=error)

    def closed(self) -> bool:
        """Whether nothing can be sent any more. pynsq's own says so only after the close event."""
        if super().closed() or self._given_up:
            return True
        return self.connected() and bool(self.stream.closed())

    def close(self) -> None:
        """Close, at whatever stage. Idempotent. The close event comes in a later turn of the loop."""
        if self.state == nsq.conn.CONNECTING and not self._given_up:
            self._given_up = True
            self._loop.call_soon(self._socket_close)
        if self.stream is not None:
            self.stream.close()
