"""`dedupe`: a decorator for the handlers of a stock `nsq.Reader`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import nsq.conn

from nsqdedupe import checks
from nsqdedupe.adopted import KNOWN, adopt, connection_of
from nsqdedupe.connection import check_pynsq
from nsqdedupe.desk import Desk
from nsqdedupe.errors import ConfigError
from nsqdedupe.fingerprint import fingerprinter, hashing_of
from nsqdedupe.message import Message
from nsqdedupe.metrics import Events, Stats, Tally, snapshot
from nsqdedupe.store import Store

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]


def dedupe(
    store: Store,
    *,
    key: Callable[[Any], bytes | str],
    scope: str,
    secret: bytes | None = None,
) -> Callable[[Handler], DedupedHandler]:
    """Decorate a handler of a stock `nsq.Reader`, so that it handles every message once.

    The laws are those of `DedupeReader`, as far as a handler can keep them: docs/semantics.md says where they
    differ. Set the reader's ``max_tries=0``, and its ``max_in_flight`` to the handlers wanted times the copies:
    a copy that waits for another one is kept here, not sent back.

    Args:
        store: remembers what was handled. Several handlers may share it.

        key: what makes two messages the same message: `BODY`, ``json_field("a.b")`` or a function of the
            message that returns bytes or str. It sees the message as `nsq.Reader.preprocess_message` left it.

        scope: ``"topic/channel"`` of the reader. Equal keys of different scopes are different messages.

        secret: 1 to 64 bytes; makes fingerprints that a producer who is not trusted cannot forge.

    Returns:
        What makes a `DedupedHandler` of a plain, coroutine or ``enable_async()`` handler: a function, a method,
        a partial or any callable. It may be used by several readers of the same topic and channel.

    Raises:
        ConfigError: an argument is of the wrong type or out of range.

        MissingDependency: the installed pynsq is not one that this package knows.
    """
    check_pynsq()
    if not isinstance(store, Store):
        raise checks.refuse("store", store, "a Store", "for example MemoryStore(window=1_000_000)")
    fingerprint = fingerprinter(*checks.scope("scope", scope), key, secret)
    store.bind(hashing_of(secret))

    def decorate(handler: Handler) -> DedupedHandler:
        if not callable(handler):
            raise checks.refuse("handler", handler, "callable with one argument, the message")
        if isinstance(handler, DedupedHandler):
            raise ConfigError(f"handler {handler.__wrapped__!r} is decorated already; decorate it once")
        return DedupedHandler(handler, scope, store, fingerprint)

    return decorate


class DedupedHandler:
    """A handler that `dedupe` made. Call it as the handler; pass it to readers in its place.

    With anything but a message that a stock `nsq.Reader` received it just calls the handler, so that the handler
    can be tested as before.
    """

    def __init__(self, handler: Handler, scope: str, store: Store, fingerprint: Callable[[Message], bytes]) -> None:
        functools.update_wrapper(self, handler)
        self.__wrapped__ = handler
        self._scope = scope
        self._store = store
        self._fingerprint = fingerprint
        self._events = Events()
        self._tallies: dict[str, Tally] = {}
        self._desk: Desk | None = None
        call = getattr(handler, "__call__", None)  # noqa: B004 - of an object that is called
        self._returns_awaitables = any(map(inspect.iscoroutinefunction, (handler, call)))
        self._told = False

    @property
    def stats(self) -> Stats:
        """A frozen `Stats` of all deliveries so far. Not to be deferred by a REQ counts as ``deferred`` too."""
        return snapshot(self._events, self._tallies)

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        """Where a method was decorated: the handler of one instance."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - as the handler
        """Handle a message, the last argument.

        Returns:
            What pynsq makes sense of: whether the message was handled, an awaitable of that if the handler returns
            awaitables, or None if it is not known yet.

        Raises:
            ConfigError: it serves another event loop, in another thread; the message is not answered.
        """
        *before, message = args
        conn = connection_of(message)
        if conn is None:
            if isinstance(message, Message) and not self._told:
                self._told = True
                logger.warning("[%s] a DedupeReader de-duplicates already: give it the handler itself", self._scope)
            return self.__wrapped__(*args)
        if conn.state == nsq.conn.DISCONNECTED:
            return self._leave(message)
        desk = self._desk_here()
        handler = functools.partial(self.__wrapped__, *before) if before else self.__wrapped__
        ours = adopt(message, conn, desk.handling, handler)
        desk.take(ours)
        return ours.answered() if self._returns_awaitables else ours.outcome_so_far()

    def _leave(self, message: nsq.Message) -> Any:  # noqa: ANN401 - as the handler
        """Leave to nsqd what was read before its connection closed: nothing can be answered, and it comes again."""
        message._has_responded = True  # noqa: SLF001 - else pynsq would try to answer
        return KNOWN[False] if self._returns_awaitables else False

    def _desk_here(self) -> Desk:
        desk = self._desk
        loop = asyncio.get_running_loop()
        if desk is None or desk.loop is not loop:
            if desk is not None and desk.loop is not None and desk.loop.is_running():
                raise ConfigError(
                    f"the handler decorated for {self._scope} serves the event loop of another thread; "
                    "decorate it once for each"
                )
            desk = self._desk = Desk(self._scope, self._store, self._fingerprint, self._events, self._tallies)
        return desk
