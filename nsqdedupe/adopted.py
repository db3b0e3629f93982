"""A message that stock pynsq received, made ours: its answers go through the state machine.

pynsq hands a handler nothing but the message. Which connection it came by is found at the message's listeners:
the connection's own methods, which pynsq adds to each message (checked by `check_pynsq`, like all that is touched
of pynsq). They are taken off, so that nothing reaches nsqd before the state machine has decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, cast

import nsq
import nsq.event

from nsqdedupe.delivery import Outcome, State
from nsqdedupe.message import Message, Responder

_LISTENERS = "_EventedMixin__listeners"


class Known(int):
    """True or False that can be awaited as well: pynsq takes it for what it equals, and makes no task of it."""

    def __await__(self) -> Generator[None, None, bool]:
        """At once."""
        return bool(self)
        yield


KNOWN = tuple(map(Known, (False, True)))
"""By what they equal."""


class AdoptedMessage(Message):
    """A message of a stock `nsq.Reader`, in the middle of its handler's call. Made by `adopt` only."""

    responder: Responder
    handler: Callable[[Any], Any]
    """What shall handle it."""

    owner: bytes = b""  # pynsq's connection knows no prefix
    told: bool | None = None
    """Whether it was handled; None: that is not known yet."""

    _wanted: asyncio.Future[bool] | None = None

    @property
    def _responder(self) -> Responder:
        return self.responder

    def is_async(self) -> bool:
        """True: what a handler returned is answered by the state machine, not by pynsq."""
        return True

    def outcome_so_far(self) -> bool | None:
        """Whether it was handled, or its message is done; None if that is not known yet."""
        return self.outcome in (None, Outcome.HANDLED) if self._has_responded else None

    def begin_anew(self) -> None:
        """It asks for its message again, as if it had just come."""
        self.state = State.ARRIVED
        self.claim = None
        self.standbys = None
        self.tries = 0
        self.superseded = False

    def close_unhandled(self) -> None:
        """It is answered without its handler."""
        self._has_responded = True

    def tell(self, *, handled: bool) -> None:
        """It is known whether it was handled."""
        if self.told is None:
            self.told = handled
            if self._wanted is not None and not self._wanted.done():
                self._wanted.set_result(handled)

    def answered(self) -> Awaitable[bool]:
        """Whether it was handled, to be awaited."""
        if self.told is not None:
            return KNOWN[self.told]
        self._wanted = asyncio.get_running_loop().create_future()
        return self._wanted


def connection_of(message: object) -> nsq.AsyncConn | None:
    """The connection that received a message of stock pynsq; None if it is nothing of the kind."""
    if type(message) is not nsq.Message:
        return None
    listeners = _listeners(message)[nsq.event.FINISH]
    conn = getattr(listeners[0], "__self__", None) if listeners else None
    return conn if isinstance(conn, nsq.AsyncConn) else None


def adopt(
    message: nsq.Message, conn: nsq.AsyncConn, responder: Responder, handler: Callable[[Any], Any]
) -> AdoptedMessage:
    """Make a message of stock pynsq ours. It stays the same object, with all that hooks put on it.

    Args:
        message: what the handler was called with.

        conn: its connection, see `connection_of`.

        responder: whom it answers to from now on.

        handler: what shall handle it.
    """
    listeners = _listeners(message)
    if all(len(calls) == 1 for calls in listeners.values()):
        del vars(message)[_LISTENERS]
    else:
        message.off(nsq.event.FINISH, conn._on_message_finish)  # noqa: SLF001 - checked at start
        message.off(nsq.event.REQUEUE, conn._on_message_requeue)  # noqa: SLF001 - checked at start
        message.off(nsq.event.TOUCH, conn._on_message_touch)  # noqa: SLF001 - checked at start
    message.__class__ = AdoptedMessage
    ours = cast("AdoptedMessage", message)
    ours.conn = cast("Any", conn)
    ours.responder = responder
    ours.handler = handler
    ours.as_made = not (ours.listened or ours._async_enabled or ours._has_responded)  # noqa: SLF001 - our own message
    ours.counted = True
    ours.held = False
    return ours


def reader_of(conn: nsq.AsyncConn) -> Any:  # noqa: ANN401 - whatever listens: a Reader, as far as we know
    """The reader that a connection of stock pynsq belongs to, or None."""
    owners = (getattr(call, "__self__", None) for call in _listeners(conn)[nsq.event.MESSAGE])
    return next((owner for owner in owners if isinstance(owner, nsq.Reader)), None)


def hear_first(conn: nsq.AsyncConn, event: str, call: Callable[..., None]) -> None:
    """Have an event of a connection told to us before others: a listener that breaks keeps it from all after it."""
    conn.on(event, call)
    calls = _listeners(conn)[event]
    calls.insert(0, calls.pop())


def _listeners(evented: object) -> dict[str, list[Any]]:
    listeners: dict[str, list[Any]] = vars(evented)[_LISTENERS]
    return listeners
