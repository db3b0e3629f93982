"""`DedupeReader`: pynsq's Reader, handling each message once however many copies arrive."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import ssl
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import nsq
import nsq.event
from tornado.ioloop import PeriodicCallback

from nsqdedupe import checks
from nsqdedupe.client import Client
from nsqdedupe.connection import SUBSCRIBED, Connection, check_pynsq
from nsqdedupe.deduper import Deduper
from nsqdedupe.dialer import Dialer
from nsqdedupe.errors import ConfigError, FatalError
from nsqdedupe.fingerprint import bodies_fingerprinter, fingerprinter, hashing_of
from nsqdedupe.lookupd import Lookupds
from nsqdedupe.metrics import Events, Stats
from nsqdedupe.neighbours import Neighbours
from nsqdedupe.offload import calls_for
from nsqdedupe.options import check_options
from nsqdedupe.runner import Runner
from nsqdedupe.store import Store
from nsqdedupe.stores.embedded import MemoryStore
from nsqdedupe.unstarted import StartWatch
from nsqdedupe.version import USER_AGENT

logger = logging.getLogger(__name__)

WINDOW = 1_000_000
RECALL = 0.999

_CONNECT_PAUSE = 10.0
"""Seconds between two calls of `connect_to_nsqd` for one address, pynsq's own."""

_LATE = (b"E_FIN_FAILED", b"E_REQ_FAILED", b"E_TOUCH_FAILED")
"""Errors that do not end a connection: an answer came after nsqd's timeout, and the message comes again."""

FatalListener = Callable[["DedupeReader", FatalError], None]

fatal_listeners: list[FatalListener] = []
"""Called with each reader that an nsqd refuses."""

_readers: weakref.WeakSet[DedupeReader] = weakref.WeakSet()


class _OnRead:
    """``reader.stats``. Not a property, so that a subclass may have an attribute of that name."""

    def __init__(self, read: Callable[[DedupeReader], Stats]) -> None:
        self._read = read

    def __get__(self, reader: DedupeReader | None, _: type | None = None) -> Stats:
        if reader is None:
            raise AttributeError("stats")
        return self._read(reader)


class DedupeReader(nsq.Reader, Client):
    """Consumes a channel like `nsq.Reader`, and handles every message once.

    A producer publishes each message to two or more nsqds; every copy arrives here. The handler runs for
    one of them. The others are finished when it succeeds, and stand by until then: when it fails, or its
    owner is gone, another copy takes its place. Nothing here blocks.

    Args:
        topic: as for `nsq.Reader`, and so are all that follow up to ``lookupd_request_timeout``.

        max_tries: handler runs of a message (all copies together) after which it is given up; 0: never.
            ``message.tries`` counts them; ``message.attempts`` stays nsqd's.

        key: what makes two messages the same message: `BODY`, ``json_field("a.b")`` or a function of the
            message that returns bytes or str. Required: a default would lose messages where equal bodies
            are different messages.

        store: remembers what was handled. None: ``MemoryStore(window=1_000_000, recall=0.999)``, right
            for one consumer per channel. False: nothing is de-duplicated, messages are only batched.

        secret: 1 to 64 bytes; makes fingerprints that a producer who is not trusted cannot forge.

        on_store_error: what becomes of messages while the store is out of reach: ``"process"`` handles
            them, maybe twice; ``"requeue"`` sends them back.

        max_crashes: handler runs of a message that ended with their process, as far as can be told, after which it is
            given up; 0: never. Counted from each copy's second delivery on, for which it costs a round trip to the
            store; what ran beside the message in the same process may be counted too. Needs a store that
            outlives the process.

        observe: look on. Every delivery is handled as `nsq.Reader` would, and ``stats.observed`` counts those
            that would have been finished unprocessed; nothing is dropped, held or deferred.

        kwargs: options of `nsq.AsyncConn`, as for `nsq.Reader`.

    Raises:
        ConfigError: an option is unknown, of the wrong type, out of range or in conflict with another;
            nothing was started.

        MissingDependency: the installed pynsq is not one that this package knows.
    """

    def __read_stats(self) -> Stats:
        return self.__runner.stats()

    stats = _OnRead(__read_stats)
    """A frozen `Stats` of all deliveries so far."""

    def __init__(
        self,
        topic: str,
        channel: str,
        message_handler: Callable[[Any], Any] | None = None,
        name: str | None = None,
        nsqd_tcp_addresses: str | list[str] | tuple[str, ...] | set[str] | None = None,
        lookupd_http_addresses: str | list[str] | tuple[str, ...] | set[str] | None = None,
        max_tries: int = 5,
        max_in_flight: int = 1,
        lookupd_poll_interval: int = 60,
        low_rdy_idle_timeout: float = 10,
        max_backoff_duration: float = 128,
        lookupd_poll_jitter: float = 0.3,
        lookupd_connect_timeout: int = 1,
        lookupd_request_timeout: int = 2,
        *,
        key: Callable[[Any], bytes | str] | None = None,
        store: Store | Literal[False] | None = None,
        secret: bytes | None = None,
        on_store_error: Literal["process", "requeue"] = "process",
        max_crashes: int = 0,
        observe: bool = False,
        **kwargs: Any,  # noqa: ANN401 - pynsq's options, checked below
    ) -> None:
        check_pynsq()
        options = check_options(
            {
                "topic": topic,
                "channel": channel,
                "message_handler": message_handler,
                "name": name,
                "nsqd_tcp_addresses": nsqd_tcp_addresses,
                "lookupd_http_addresses": lookupd_http_addresses,
                "max_tries": max_tries,
                "max_in_flight": max_in_flight,
                "lookupd_poll_interval": lookupd_poll_interval,
                "low_rdy_idle_timeout": low_rdy_idle_timeout,
                "max_backoff_duration": max_backoff_duration,
                "lookupd_poll_jitter": lookupd_poll_jitter,
                "lookupd_connect_timeout": lookupd_connect_timeout,
                "lookupd_request_timeout": lookupd_request_timeout,
                "user_agent": USER_AGENT,
                **kwargs,
            }
        )
        checks.one_of("on_store_error", on_store_error, ("process", "requeue"))
        checks.flag("observe", observe)
        if observe and store is False:
            raise ConfigError(
                "observe=True and store=False: without a store nothing is looked up; leave one of them out"
            )
        if store is None:
            store = MemoryStore(window=WINDOW, recall=RECALL)
        elif store is not False and not isinstance(store, Store):
            raise checks.refuse("store", store, "a Store, None or False", "for example MemoryStore(window=1_000_000)")
        checks.integer("max_crashes", max_crashes, 0)
        if max_crashes and (store is False or not store.traits.shared):
            raise ConfigError(
                f"max_crashes={max_crashes}: a store in this process forgets with it what crashed; "
                "leave it out, or use a shared store"
            )
        fingerprint = fingerprints = None
        if store is not False:
            fingerprint = fingerprinter(topic, channel, key, secret)
            fingerprints = bodies_fingerprinter(topic, channel, key, secret)
            store.bind(hashing_of(secret))
        # Subclasses have attributes of all names: what this one goes by has two underscores.
        self.store = self.__store = store
        self.__stopping: asyncio.Future[int] | None = None
        self.__closed = False
        self.__poll_start: object | None = None

        def make_deduper(port: Runner, events: Events) -> Deduper:
            return Deduper(
                None if store is False else store,
                port,
                events=events,
                calls=None if store is False else calls_for(store, port.wake),
                max_tries=max_tries,
                max_crashes=max_crashes,
                requeue_delay=options.get("requeue_delay", 90),
                on_store_error=on_store_error,
                observe=observe,
            )

        super().__init__(**options)
        self.__runner = Runner(self, fingerprint, fingerprints, make_deduper)
        lookupds = self.lookupd_http_addresses and Lookupds(
            self.lookupd_http_addresses,
            connect_timeout=lookupd_connect_timeout,
            request_timeout=lookupd_request_timeout,
        )
        given = [checks.tcp_address("nsqd_tcp_addresses", address) for address in self.nsqd_tcp_addresses]
        self.__dialer = Dialer(self, given, lookupds or None)
        _readers.add(self)
        self.__neighbours: Neighbours | None = None
        if store is not False and not store.traits.shared:
            self.__neighbours = Neighbours(self, self.__family)
        self.__watch = StartWatch(self.name)

    def __family(self) -> list[DedupeReader]:
        return [reader for reader in _readers if reader.__store is self.__store]  # noqa: SLF001 - its own class

    # -- connecting ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Start, on the loop. pynsq's own cannot be stopped again, and takes no IPv6 address."""
        self.__watch.stop()
        if self.__closed:
            return
        if self.message_handler is None:
            raise ConfigError("message_handler is missing: give one to the constructor or to set_message_handler")
        self.__runner.start()
        logger.info("[%s] starting reader for %s/%s...", self.name, self.topic, self.channel)
        self.__dialer.start()
        self.redist_periodic = PeriodicCallback(self._redistribute_rdy_state, 5 * 1000)
        self.redist_periodic.start()
        if self.lookupd_http_addresses:
            self.io_loop.spawn_callback(self.query_lookupd)
            self.query_periodic = PeriodicCallback(self.query_lookupd, self.lookupd_poll_interval * 1000)
            # At a random time, so that many consumers that start together do not ask together.
            delay = random.random() * self.lookupd_poll_interval * self.lookupd_poll_jitter
            self.__poll_start = self.io_loop.call_later(delay, self.query_periodic.start)

    def connect_to_nsqd(self, host: str, port: int) -> Connection | None:
        """Connect to an nsqd, unless that is done or was tried less than 10 s ago (then None)."""
        if self.__closed or self.__stopping is not None:
            return None
        conn = Connection(
            host,
            port,
            receive=self.__runner.receive,
            responder=self.__runner.handling,
            **self.conn_kwargs,
        )
        last = self.connection_attempts.get(conn.id)
        if conn.id in self.conns or conn.id in self.__dialer.connecting:
            return None
        if last is not None and last > time.time() - _CONNECT_PAUSE:
            return None
        self.connection_attempts[conn.id] = time.time()
        conn.on(nsq.event.IDENTIFY, self._on_connection_identify)
        conn.on(nsq.event.IDENTIFY_RESPONSE, self._on_connection_identify_response)
        conn.on(nsq.event.AUTH, self._on_connection_auth)
        conn.on(nsq.event.AUTH_RESPONSE, self._on_connection_auth_response)
        conn.on(nsq.event.ERROR, self._on_connection_error)
        conn.on(nsq.event.CLOSE, self._on_connection_close)
        conn.on(nsq.event.READY, self._on_connection_ready)
        conn.on(SUBSCRIBED, self.__dialer.stands)
        conn.on(nsq.event.HEARTBEAT, self._on_heartbeat)
        conn.on(nsq.event.BACKOFF, functools.partial(self._on_backoff_resume, success=False))
        conn.on(nsq.event.RESUME, functools.partial(self._on_backoff_resume, success=True))
        conn.on(nsq.event.CONTINUE, functools.partial(self._on_backoff_resume, success=None))
        logger.debug("[%s:%s] connecting to nsqd", conn.id, self.name)
        self.__dialer.dialed(conn)
        conn.connect()
        return conn

    def query_lookupd(self) -> asyncio.Future[None]:
        """Ask all nsqlookupds now, and connect to what they list. Done when each has answered or failed."""
        return self.__dialer.look()

    def _on_connection_ready(self, conn: Connection, **kwargs: Any) -> None:  # noqa: ANN401 - an event's arguments
        if self.__closed or self.__stopping is not None:
            conn.close()
            return
        if conn.id not in self.conns:
            self.__runner.opened(conn)
            conn.is_open = True
        super()._on_connection_ready(conn, **kwargs)
        self.__dialer.ready(conn)
        if self.__neighbours is not None:
            self.__neighbours.start()

    def _on_connection_close(self, conn: Connection, **_: Any) -> None:  # noqa: ANN401 - an event's arguments
        """All that pynsq's own does, but that one forgets a living connection, and has its own ways to reconnect."""
        self.__lose(conn)
        if self.conns.get(conn.id) is conn:
            del self.conns[conn.id]
        self.total_rdy = max(self.total_rdy - conn.rdy, 0)
        scarce = len(self.conns) == self.max_in_flight or self.backoff_timer.get_interval()
        if scarce and (conn.rdy or conn.rdy_timeout):
            self.need_rdy_redistributed = True
        if conn.rdy_timeout is not None:
            self.io_loop.remove_timeout(conn.rdy_timeout)
            conn.rdy_timeout = None
        error = conn.error
        broke = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if isinstance(error, ConfigError | ssl.SSLError) and not broke and not conn.subscribed:
            self.__refuse(conn, FatalError(f"[{conn.id}] TLS: {error}", nsqd=conn.id, code="TLS"))
        self.__dialer.lost(conn, getattr(error, "strerror", None) or str(error or "closed"))

    def __lose(self, conn: Connection) -> None:
        if conn.is_open:
            conn.is_open = False
            self.__runner.lost(conn)

    def _on_connection_error(self, conn: Any, error: Exception, **kwargs: Any) -> None:  # noqa: ANN401
        said = error.args[0] if error.args else None
        if isinstance(said, bytes):
            text = said.decode("utf-8", "replace")
            if said.startswith(_LATE):
                if said.startswith(b"E_FIN_FAILED"):
                    self.__runner.fin_failed()
                logger.info("[%s:%s] %s", conn.id, self.name, text)
            else:
                self.__refuse(conn, FatalError(f"[{conn.id}] {text}", nsqd=conn.id, code=text.split(" ", 1)[0]))
        elif not (said == "failed to unpack size" or _is_end(error) or _is_end(getattr(error, "error", None))):
            super()._on_connection_error(conn, error, **kwargs)
        # Else its close event comes, and tells why.

    def __refuse(self, conn: Connection, error: FatalError) -> None:
        self.__runner.refused()
        if self.__dialer.refused(conn, error.code):
            logger.error("[%s] refused by nsqd: %s; trying again, ever more rarely", self.name, error)
        try:
            self.fatal_error(error)
        except Exception:
            logger.exception("[%s:%s] fatal_error() failed", conn.id, self.name)
        for listener in fatal_listeners:
            listener(self, error)

    def fatal_error(self, error: FatalError) -> None:
        """Called each time an nsqd refuses this reader, at IDENTIFY, TLS, AUTH or SUB. Does nothing: override it.

        The reader goes on trying, ever more rarely. The first refusal of a kind is logged, each is counted in
        ``stats.fatal_errors``, and `nsqdedupe.run` can end on one.
        """

    if TYPE_CHECKING:
        # pynsq has no types: what checkers guess of its hooks does not fit those who override them.
        def process_message(self, message: Any) -> Any: ...  # noqa: ANN401, D102
        def preprocess_message(self, message: Any) -> Any: ...  # noqa: ANN401, D102
        def validate_message(self, message: Any) -> Any: ...  # noqa: ANN401, D102

    def giving_up(self, message: Any) -> None:  # noqa: ANN401 - pynsq's signature
        """Called once per message, when it failed ``max_tries`` times; see `nsq.Reader.giving_up`."""
        logger.warning("[%s] giving up on message %r after %d tries", self.name, message.id, self.max_tries)

    def set_max_in_flight(self, max_in_flight: int) -> None:
        """Change ``max_in_flight`` from now on; 0 pauses the reader. See `nsq.Reader.set_max_in_flight`."""
        super().set_max_in_flight(max_in_flight)
        if self.backoff_block:
            return
        # pynsq gives no RDY to a connection that has messages in flight, and does not come back to it: after a
        # short pause it would stay without for ever.
        testing = self.backoff_timer.get_interval()
        limit = min(max_in_flight, 1) if testing else max_in_flight
        for conn in self.conns.values():
            if conn.rdy == 0 and self.total_rdy < limit:
                self._send_rdy(conn, max(1, limit // len(self.conns)))

    def is_starved(self) -> bool:
        """Whether messages that a handler collects should be answered now; see `nsq.Reader.is_starved`.

        Also if their other copies, which wait for that answer, may keep all others from coming.
        """
        return super().is_starved() or self.__runner.starved()

    # -- stopping --------------------------------------------------------------------------------

    async def stop(self, timeout: float = 30) -> int:  # noqa: ASYNC109 - what is left is counted, not cancelled
        """Stop gracefully: take no more messages, wait until those in flight are answered, close.

        Args:
            timeout: seconds to wait, 0 or more.

        Returns:
            Number of deliveries left unanswered: 0 if all were answered in time.
        """
        checks.number("timeout", timeout, 0)
        if self.__stopping is None:
            self.__stopping = asyncio.ensure_future(self.__drain(timeout))
        return await asyncio.shield(self.__stopping)

    async def __drain(self, timeout: float) -> int:  # noqa: ASYNC109 - see stop
        self.__stop_timers()
        conns = list(self.conns.values())
        agreed = [conn.say_goodbye() for conn in conns]
        self.__runner.drain()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*agreed)
                await self.__runner.idle()
                await asyncio.gather(*(conn.drain() for conn in conns))
        except TimeoutError:
            logger.warning("[%s] stopped with %d messages unanswered", self.name, self.__runner.in_flight())
        left = self.__runner.in_flight()
        self.close()
        return left

    def close(self) -> None:
        """Close at once: what is in flight stays unanswered, and nsqd gives it out again. Idempotent."""
        if self.__closed:
            return
        self.__closed = True
        _readers.discard(self)
        self.__stop_timers()
        self._stop_looking()
        self.__runner.close()
        for conn in list(self.conns.values()):
            if conn.rdy_timeout is not None:
                self.io_loop.remove_timeout(conn.rdy_timeout)
                conn.rdy_timeout = None
            conn.close()
            # Its close event comes in the next turn of the loop; until then no handler may start.
            self.__lose(conn)

    def __stop_timers(self) -> None:
        self.__watch.stop()
        self.__dialer.stop()
        for periodic in (self.redist_periodic, self.query_periodic):
            if periodic is not None:
                periodic.stop()
        if self.__poll_start is not None:
            self.io_loop.remove_timeout(self.__poll_start)
            self.__poll_start = None
        if self.__neighbours is not None:
            self.__neighbours.stop()


def _is_end(error: Exception | None) -> bool:
    """Whether all that it says is that the connection broke, or could not be made."""
    return isinstance(error, OSError | ConfigError | nsq.protocol.ConnectionClosedError)


def live_readers() -> list[DedupeReader]:
    """All readers of this process that were not closed."""
    return list(_readers)
