"""One memcached server: connecting to it, leaving it alone while it is away, and coming back.

The connection is made by pymemcache; what is said on it is our own. A connection that failed is closed at once, for
nobody knows which replies are still on their way; nor is one used on which anything came unasked. After a failure the
server is asked again at growing intervals only, so that one that is away costs a batch nothing, and one that hangs
costs one timeout now and then. What is known of that is the same for all connections of a store to it.

A server that comes back may be another one, or an empty one whose tokens for compare-and-swap begin at 1 again. So it
proves itself anew, and `Link.epoch` tells tokens of earlier connections from those of this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nsqdedupe.clock import Clock
from nsqdedupe.errors import ConfigError, StoreUnavailable
from nsqdedupe.memcached.meta import WRITES, Reply
from nsqdedupe.memcached.proof import Mark, prove
from nsqdedupe.memcached.wire import Talk, silent
from nsqdedupe.pauses import Pauses

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 5.0
"""Seconds at most for which a server that failed is left alone."""


class Terms(NamedTuple):
    """What is the same for all servers of a store."""

    namespace: str
    connect_timeout: float
    timeout: float
    tls_context: ssl.SSLContext | None
    clock: Clock
    marks: list[Mark]
    """May grow: see `nsqdedupe.memcached.proof`."""


class Reach:
    """Whether a server is reached, as its connections find it."""

    def __init__(self, terms: Terms) -> None:
        self.why = ""
        """Why it is not reached."""
        self.missed = False
        """It was told of as not reached, and not yet of as reached."""
        self.refused = False
        """It is no memcached for us: it is not asked any more."""
        self._clock = terms.clock
        self._quiet_until: float | None = None
        self._pauses = Pauses(terms.clock, longest=LONGEST_PAUSE)

    @property
    def away(self) -> bool:
        """Whether it failed when it was last asked."""
        return self._quiet_until is not None

    def due(self) -> bool:
        """Whether it may be connected to now."""
        return not self.refused and (self._quiet_until is None or self._clock() >= self._quiet_until)

    def failed(self, why: str) -> None:
        """It gave no good answer: it is left alone for a while."""
        self.why = why
        self._quiet_until = self._clock() + self._pauses.next()

    def answered(self) -> None:
        """It gave a good answer."""
        self._quiet_until = None
        self.why = ""
        self._pauses.reset()


class Link:
    """A server and a connection to it, for one thread at a time.

    Args:
        host: name or address.

        port: its TCP port.

        terms: what it has in common with the others.

        reach: what it shares with other connections to this server; None: it is the first.
    """

    def __init__(self, host: str, port: int, terms: Terms, reach: Reach | None = None) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.reach = Reach(terms) if reach is None else reach
        self.epoch = 0
        """Goes up with each connection: older tokens are worth nothing."""
        self.leftovers: list[bytes] = []
        """Deletes that can wait for the next pipeline, each a whole ``md`` command."""
        self.talking = 0
        """Pipelines that are under way."""
        self.on_hang_up: Callable[[], None] | None = None
        """Called once, before the connection is closed."""
        self._address = host, port
        self._terms = terms
        self._connection: socket.socket | None = None
        self._process = 0

    def twin(self) -> Link:
        """Another connection to the same server, to be made yet."""
        return Link(*self._address, self._terms, self.reach)

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def good(self) -> bool:
        """Whether there is a connection that can be used; one that cannot is closed. Does not block."""
        if self._connection is None:
            return False
        # After a fork the connection is the parent's: two who read from it would get each other's replies.
        if self._process == os.getpid() and (self.talking or silent(self._connection)):
            return True
        self.hang_up()
        return False

    def ready(self) -> bool:
        """Whether there is a connection. Makes one if it is time to try; blocks for that."""
        if self.good():
            return True
        if not self.reach.due():
            return False
        try:
            self.connect()
        except StoreUnavailable:
            return False
        except ConfigError as error:
            self.reach.refused = True
            self.reach.why = str(error)
            logger.error("memcached server not used any more: %s", error)  # noqa: TRY400 - the text says it all
            return False
        if self.reach.missed:
            self.reach.missed = False
            logger.info("memcached reached: %s", self.name)
        return True

    def connect(self) -> None:
        """Make the connection, and have the server prove itself. Blocks: one connect and two round trips.

        Raises:
            StoreUnavailable: it is not reached.

            ConfigError: it does not behave, or was set up otherwise; see `nsqdedupe.memcached.proof`.
        """
        try:
            self._connection = _connect(*self._address, self._terms)
        except (OSError, UnicodeError) as error:
            self.lose(f"{self.name}: {_words(error)}")
            raise StoreUnavailable(self.reach.why) from error
        self.epoch += 1
        self._process = os.getpid()
        self.prove()

    def prove(self) -> None:
        """Have the server prove itself, unless it is left alone because it is away. Blocks for two round trips.

        Raises:
            StoreUnavailable: it gave no answer.

            ConfigError: as `connect`.
        """
        terms = self._terms
        if self._connection is None:
            if not self.reach.away:  # it was hung up on for what it showed
                self.connect()
            return
        try:
            prove(self._connection, self.name, terms.namespace, terms.marks, terms.timeout)
        except StoreUnavailable as error:
            self.lose(str(error))
            raise
        except BaseException:
            self.hang_up()
            raise

    def talk(self, commands: Sequence[bytes], kinds: bytes) -> Talk | None:
        """A pipeline to hold; None if there is no connection that is good for one."""
        # Where a loop listens, that notices what comes unasked.
        if self._connection is None or not (self.talking or self.on_hang_up or silent(self._connection)):
            self.lose(f"{self.name}: said more than it was asked")
            return None
        self.talking += 1
        first, self.leftovers = self.leftovers, []
        return Talk(self._connection, (*first, *commands), WRITES * len(first) + kinds)

    def replies(self, talk: Talk, count: int) -> list[Reply] | None:
        """What a talk brought for its own ``count`` commands; None if it failed, and the connection with it."""
        if talk.error is not None:
            if talk.connection is self._connection:
                self.lose(f"{self.name}: {_words(talk.error)}")
            return None
        self.talking -= 1
        if self.reach.away:
            self.reach.answered()
        return talk.replies[-count:]

    def lose(self, why: str) -> None:
        """Close the connection after a failure, and leave the server alone for a while."""
        self.reach.failed(why)  # first: who still talks is told
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        self.leftovers = []
        self.talking = 0
        told, self.on_hang_up = self.on_hang_up, None
        if told is not None:
            told()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _connect(host: str, port: int, terms: Terms) -> socket.socket:
    """A connection to the first address of a name that takes one: pymemcache itself tries the first alone.

    With TLS it is given the name, which is in the certificate.
    """
    from pymemcache.client.base import Client  # noqa: PLC0415 - optional

    hosts = [host]
    if terms.tls_context is None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        hosts = list(dict.fromkeys(str(address[4][0]) for address in found))
    while True:
        client = Client(
            (hosts.pop(0), port),
            connect_timeout=terms.connect_timeout,
            timeout=terms.timeout,
            no_delay=True,
            tls_context=terms.tls_context,
        )
        try:
            client._connect()  # noqa: SLF001 - every public way to connect is a command, and those misread replies
        except OSError:
            if not hosts:
                raise
        else:
            connection: socket.socket = client.sock
            connection.settimeout(0)
            return connection
