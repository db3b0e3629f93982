"""Which nsqds a reader is connected to: those given, those that an nsqlookupd lists; again when one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from tornado.ioloop import IOLoop

from nsqdedupe.clock import monotonic
from nsqdedupe.connection import Connection
from nsqdedupe.lookupd import Endpoint, Lookupds, lookup_url, read_producers
from nsqdedupe.pauses import STEADY, Pauses

logger = logging.getLogger(__name__)

NEGOTIATION = 10.0
"""Seconds that a connection has to become ready, at least; the option `timeout` may give it more."""


class ReaderLike(Protocol):
    """What is needed of a reader: pynsq's own names."""

    name: str
    topic: str
    io_loop: IOLoop
    conns: dict[str, Any]
    connection_attempts: dict[str, float]

    def connect_to_nsqd(self, host: str, port: int) -> Connection | None:
        """Begin a connection; None: not now."""
        ...


class _Nsqd:
    """An nsqd that is wanted."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.given = False
        """By address: it is never left."""
        self.pauses = Pauses()
        self.timer: object | None = None
        """Until the next attempt."""
        self.stands_since: float | None = None
        self.told = False
        """That it is lost was logged."""
        self.refusal = ""
        """For what it refused us last."""


class Dialer:
    """Keeps a reader connected.

    It connects through the reader's `connect_to_nsqd`, which may be overridden, and is told what becomes of it.

    Args:
        reader: whose connections these are.

        given: the nsqds to connect to.

        lookupds: the nsqlookupds that know more. If there are none, every nsqd that was ever connected to is
            connected to again, as in pynsq.
    """

    def __init__(self, reader: ReaderLike, given: Iterable[Endpoint], lookupds: Lookupds | None) -> None:
        self.connecting: dict[str, Connection] = {}
        """The connections that are not ready yet, by id."""
        self._reader = reader
        self._lookupds = lookupds
        self._given = list(given)
        self._nsqds: dict[Endpoint, _Nsqd] = {}
        self._said: dict[str, set[Endpoint]] = {}
        """What each nsqlookupd said last."""
        self._deadlines: dict[Connection, object] = {}
        self._twins: set[frozenset[str]] = set()
        self._looking: set[asyncio.Task[None]] = set()
        self._stopped = False

    def start(self) -> None:
        """Connect to the nsqds that were given."""
        for endpoint in self._given:
            self._want(endpoint).given = True

    def stop(self) -> None:
        """Connect to nothing more, and give up what is not ready yet. Idempotent."""
        self._stopped = True
        for nsqd in self._nsqds.values():
            self._cancel(nsqd)
        for looking in self._looking:
            looking.cancel()
        for conn in list(self.connecting.values()):
            conn.close()

    # -- what nsqlookupds say --------------------------------------------------------------------

    def look(self) -> asyncio.Future[None]:
        """Ask all nsqlookupds which nsqds have the topic, and connect to these. Done when all have answered.

        What one said counts until it says something else: while it does not answer, nobody is left for that.
        """
        loop: asyncio.AbstractEventLoop = self._reader.io_loop.asyncio_loop  # type: ignore[attr-defined]
        looking = loop.create_task(self._look())
        self._looking.add(looking)
        looking.add_done_callback(self._looking.discard)
        return looking

    async def _look(self) -> None:
        if self._lookupds is not None and not self._stopped:
            await self._lookupds.ask(lambda at: lookup_url(at, self._reader.topic), read_producers, self._found)

    def _found(self, lookupd: str, producers: set[Endpoint]) -> None:
        if self._stopped:
            return
        news = producers - self._listed()
        self._said[lookupd] = producers
        for endpoint in producers:
            self._want(endpoint, again=endpoint in news)
        listed = self._listed()
        for endpoint, nsqd in list(self._nsqds.items()):
            if not nsqd.given and endpoint not in listed and not self._is_known(endpoint):
                self._leave(nsqd)

    def _listed(self) -> set[Endpoint]:
        return set().union(*self._said.values())

    # -- connecting ------------------------------------------------------------------------------

    def _want(self, endpoint: Endpoint, *, again: bool = False) -> _Nsqd:
        """Connect to it, unless that is done, or an attempt is due anyway; ``again``: not even then."""
        nsqd = self._nsqds.setdefault(endpoint, _Nsqd(endpoint))
        if again:
            self._cancel(nsqd)  # it has registered, so it has come back
        if nsqd.timer is None:
            self._dial(nsqd)
        return nsqd

    def _is_known(self, endpoint: Endpoint) -> bool:
        """Whether there is a connection to it, ready or not."""
        known = [*self._reader.conns.values(), *self.connecting.values()]
        return any((conn.host, conn.port) == endpoint for conn in known)

    def _dial(self, nsqd: _Nsqd) -> None:
        nsqd.timer = None
        if self._stopped or self._is_known(nsqd.endpoint):
            return
        host, port = nsqd.endpoint
        # Who calls connect_to_nsqd is slowed down by these; the pauses here are as long as is right.
        self._reader.connection_attempts.pop(f"{host}:{port}", None)
        try:
            conn = self._reader.connect_to_nsqd(host, port)
        except Exception:
            logger.exception("[%s:%d:%s] cannot connect", host, port, self._reader.name)
            conn = None
        if conn is None and not self._is_known(nsqd.endpoint):
            self._pause(nsqd)

    def _pause(self, nsqd: _Nsqd, *, hurry: bool = True) -> None:
        nsqd.timer = self._reader.io_loop.call_later(nsqd.pauses.next(hurry=hurry), self._dial, nsqd)

    def _cancel(self, nsqd: _Nsqd) -> None:
        if nsqd.timer is not None:
            self._reader.io_loop.remove_timeout(nsqd.timer)
            nsqd.timer = None

    def _leave(self, nsqd: _Nsqd) -> None:
        self._cancel(nsqd)
        del self._nsqds[nsqd.endpoint]
        logger.info("[%s:%d:%s] no nsqlookupd lists it any more: left", *nsqd.endpoint, self._reader.name)

    # -- what becomes of connections -------------------------------------------------------------

    def dialed(self, conn: Connection) -> None:
        """A connection has begun. It is given up if it does not become ready in time."""
        self.connecting[conn.id] = conn
        patience = max(NEGOTIATION, conn.timeout)
        error = TimeoutError(f"not ready within {patience:g} s")
        self._deadlines[conn] = self._reader.io_loop.call_later(patience, conn.fail, error)

    def ready(self, conn: Connection) -> None:
        """It is ready, and the reader has subscribed."""
        self._settle(conn)

    def stands(self, conn: Connection) -> None:
        """Take note that nsqd has agreed to the subscription."""
        nsqd = self._nsqds.get((conn.host, conn.port))
        if nsqd is not None:
            nsqd.stands_since = monotonic()
            nsqd.refusal = ""
            if nsqd.told:
                nsqd.told = False
                logger.info("[%s:%s] connected again", conn.id, self._reader.name)
        for other in self._reader.conns.values():
            pair = frozenset((conn.id, other.id))
            if other is not conn and conn.peer is not None and conn.peer == other.peer and pair not in self._twins:
                self._twins.add(pair)
                logger.warning(
                    "[%s:%s] is the same nsqd as %s: nothing is handled twice, but it gets two shares of "
                    "max_in_flight; name each nsqd once, and as its --broadcast-address does",
                    *(conn.id, self._reader.name, other.id),
                )

    def refused(self, conn: Connection, code: str) -> bool:
        """Take note that nsqd refused it, for this cause. Returns whether that is news."""
        nsqd = self._nsqds.setdefault((conn.host, conn.port), _Nsqd((conn.host, conn.port)))
        news = nsqd.refusal != code
        nsqd.refusal, nsqd.told = code, True
        return news

    def lost(self, conn: Connection, why: str) -> None:
        """It is closed. Connect again, after a pause, if it is still wanted."""
        self._settle(conn)
        endpoint = (conn.host, conn.port)
        nsqd = self._nsqds.get(endpoint)
        if nsqd is None and self._lookupds is None:
            nsqd = self._nsqds[endpoint] = _Nsqd(endpoint)
        if nsqd is None or self._stopped or self._is_known(endpoint):
            return
        since, nsqd.stands_since = nsqd.stands_since, None
        if since is not None and monotonic() - since >= STEADY:
            nsqd.pauses.reset()
        level = logging.DEBUG if nsqd.told else logging.WARNING
        logger.log(level, "[%s:%s] no connection: %s", conn.id, self._reader.name, why)
        nsqd.told = True
        if nsqd.given or self._lookupds is None or endpoint in self._listed():
            if nsqd.timer is None:
                self._pause(nsqd, hurry=not nsqd.refusal)
        else:
            self._leave(nsqd)

    def _settle(self, conn: Connection) -> None:
        if self.connecting.get(conn.id) is conn:
            del self.connecting[conn.id]
        deadline = self._deadlines.pop(conn, None)
        if deadline is not None:
            self._reader.io_loop.remove_timeout(deadline)
