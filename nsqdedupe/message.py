"""A message as handlers get it: pynsq's own, except that its answers go through the state machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import nsq
from nsq.event import EventedMixin

from nsqdedupe.checks import number
from nsqdedupe.connection import Connection, Head
from nsqdedupe.delivery import Delivery
from nsqdedupe.errors import DedupeError


class AlreadyRespondedError(DedupeError, AssertionError):
    """A message was finished, requeued or touched after it had been responded to.

    Also an AssertionError, because that is what pynsq raises.
    """


class Responder(Protocol):
    """Carries a handler's answer to the state machine."""

    def finished(self, message: Message) -> None:
        """The handler finished it."""

    def requeued(self, message: Message, delay: float | None, backoff: bool) -> None:  # noqa: FBT001 - pynsq's words
        """The handler requeued it."""

    def touched(self, message: Message) -> None:
        """The handler needs more time."""


class Message(Delivery, nsq.Message):
    """A message received from nsqd; see `nsq.Message`.

    Beside pynsq's attributes it has ``tries``: how many handler runs of this message failed so far, all
    copies together. ``attempts`` counts how often nsqd gave out this copy, which deferrals raise too.

    Made by `messages_of`: pynsq's own constructor makes a table of listeners for each message, ours comes when it is
    asked for.
    """

    conn: Connection
    id: bytes
    body: bytes
    timestamp: int

    # Set on the class, so that making a message sets what arrived, and what is asked of every message: a default of
    # the class takes six times as long to read as an attribute (CPython 3.11).
    _async_enabled = False
    _has_responded = False
    backoff = True
    counted = False
    """It is part of its connection's ``in_flight``."""
    held = False
    """It is, although it only waits for another copy."""

    _EventedMixin__listeners: Any = None
    """pynsq's table of listeners, which is there only if somebody listens."""

    as_made: bool
    """Nobody has responded to it, made it asynchronous or listened to it: what its handler returns is all there is."""

    @property
    def owner(self) -> bytes:  # type: ignore[override] # few messages are asked for it
        """Which copy it is: nsqd address and message id."""
        return self.conn.owner_prefix + self.id

    @property
    def listened(self) -> bool:
        """Whether somebody listens to its events."""
        return self._EventedMixin__listeners is not None

    @property
    def _responder(self) -> Responder:
        responder: Responder = self.conn.responder
        return responder

    def enable_async(self) -> None:
        """See `nsq.Message.enable_async`."""
        self.as_made = False
        self._async_enabled = True

    def finish(self) -> None:
        """Respond that the message was processed, or shall be discarded. From any thread."""
        self._respond()
        self._responder.finished(self)
        self.trigger("finish", message=self)

    def requeue(self, *, backoff: bool = True, delay: float = -1, time_ms: float = -1, **kwargs: Any) -> None:  # noqa: ANN401
        """Respond that processing failed and the message shall come again. From any thread.

        Args:
            backoff: whether the reader backs off.

            delay: seconds until then, 0 or more; -1: ``requeue_delay`` times the message's tries.

            time_ms: the same in milliseconds; ``delay`` goes before it.

            kwargs: passed to the listeners, else ignored, as in pynsq.

        Raises:
            ConfigError: ``delay`` or ``time_ms`` is no finite number; nothing was answered.
        """
        number("requeue(delay)", delay, -math.inf, remedy="leave it out for the default delay")
        number("requeue(time_ms)", time_ms, -math.inf, remedy="leave it out for the default delay")
        seconds = delay if delay >= 0 else time_ms / 1000 if time_ms >= 0 else None
        self._respond()
        self._responder.requeued(self, seconds, backoff)
        self.trigger("requeue", message=self, backoff=backoff, delay=delay, time_ms=time_ms, **kwargs)

    def touch(self) -> None:
        """Respond that more time is needed: nsqd's timeout and the claim's lease start anew. From any thread."""
        if self._has_responded:
            raise AlreadyRespondedError(f"message {self.id!r} cannot be touched: it has been responded to")
        self._responder.touched(self)
        self.trigger("touch", message=self)

    def _respond(self) -> None:
        if self._has_responded:
            raise AlreadyRespondedError(f"message {self.id!r} has been responded to already")
        self.as_made = False
        self._has_responded = True

    def on(self, name: str, callback: Any) -> None:  # noqa: ANN401 - pynsq's signature
        """See `nsq.Message.on`."""
        self._be_listened_to()
        super().on(name, callback)

    def off(self, name: str, callback: Any) -> None:  # noqa: ANN401 - pynsq's signature
        """See `nsq.Message.off`."""
        self._be_listened_to()
        super().off(name, callback)

    def _be_listened_to(self) -> None:
        if not self.listened:
            self.as_made = False
            EventedMixin.__init__(self)

    def trigger(self, name: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - pynsq's signature
        """See `nsq.Message.trigger`."""
        if self.listened:
            super().trigger(name, *args, **kwargs)


def messages_of(
    conn: Connection,
    heads: Iterable[Head],
    bodies: Iterable[bytes],
    fingerprints: Iterable[bytes | None],
    places: Iterable[int],
) -> list[Message]:
    """Messages of one connection, in order, with all that is known of them on arrival.

    There is no constructor: a call of it would take as long as all the rest.
    """
    source, since, new = conn.source, conn.seen_empty, Message.__new__
    messages: list[Message] = []
    note = messages.append
    arrived = zip(heads, bodies, fingerprints, places, strict=False)
    for (_, _, timestamp, attempts, message_id), body, fingerprint, place in arrived:
        message = new(Message)
        message.conn = conn
        message.id = message_id
        message.body = body
        message.timestamp = timestamp
        message.attempts = attempts
        message.as_made = True
        message.source = source
        message.since = since
        message.fingerprint = fingerprint
        message.place = place
        note(message)
    return messages


def _introduce_attributes() -> None:
    """Set every attribute that a message may get once, before many messages are made.

    CPython keeps the attributes of an instance in an array whose layout belongs to the class, with room for 30 at
    most, and makes the room in it smaller with each new instance. Messages are made by the batch, with little set:
    what is set later would find no room, and each message would get a dict, at a quarter of all the time it takes.
    """
    first = Message.__new__(Message)
    inherited = [name for name in Delivery.__annotations__ if name != "owner"]
    for name in ("conn", "id", "body", "timestamp", "attempts", *inherited):
        setattr(first, name, None)
    for name in (
        "_async_enabled",
        "_has_responded",
        "backoff",
        "counted",
        "held",
        "as_made",
        "_EventedMixin__listeners",
    ):
        setattr(first, name, None)


_introduce_attributes()
