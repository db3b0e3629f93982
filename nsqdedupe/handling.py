"""Calls a reader's hooks and handler for one message as pynsq does, and makes sense of what comes of it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import Any, Protocol, cast

import nsq
import nsq.event
import tornado.gen

from nsqdedupe.clock import monotonic
from nsqdedupe.delivery import Delivery, Outcome, State
from nsqdedupe.discretion import exc_info
from nsqdedupe.eager import starter
from nsqdedupe.message import Message
from nsqdedupe.places import Places

logger = logging.getLogger(__name__)

_RUNNING = State.RUNNING


class Hooks(Protocol):
    """What is needed of the reader: pynsq's own names."""

    name: str
    message_handler: Any

    def process_message(self, message: Any) -> Any:  # noqa: ANN401 - pynsq's signatures
        """Calls the handler."""

    def preprocess_message(self, message: Any) -> Any:  # noqa: ANN401
        """Hook of the application."""

    def validate_message(self, message: Any) -> Any:  # noqa: ANN401
        """Hook of the application."""

    def giving_up(self, message: Any) -> None:  # noqa: ANN401
        """Hook of the application."""


class Handling:
    """Runs the handler of one reader; what handlers answer later arrives here too (a `Responder`).

    Args:
        reader: whose hooks are called.

        places: told when a handler gets a message.

        answer: told how each run ended; from any thread.

        touch: told when a handler needs more time; from any thread.

        retry_delay: seconds after which a message comes again whose ``giving_up`` failed.
    """

    def __init__(
        self,
        reader: Hooks,
        places: Places,
        *,
        answer: Callable[[Message, Outcome, float | None], None],
        touch: Callable[[Message], None],
        retry_delay: float,
    ) -> None:
        self._reader = reader
        self._places = places
        self._answer = answer
        self.touched = touch
        """See `Responder`."""
        self._retry_delay = retry_delay
        self._giving_up: Message | None = None
        self._hooked = True
        self._process: Callable[[Any], Any] = reader.process_message
        self._begin = starter()

    def look_at_hooks(self) -> None:
        """Find out what is to be called for each message of this slice: a hook that does nothing costs nothing."""
        reader, own, stock = type(self._reader), vars(self._reader), nsq.Reader
        self._hooked = (
            reader.preprocess_message is not stock.preprocess_message
            or reader.validate_message is not stock.validate_message
            or "preprocess_message" in own
            or "validate_message" in own
        )
        plain = reader.process_message is stock.process_message and "process_message" not in own
        self._process = self._reader.message_handler if plain else self._reader.process_message

    def run(self, delivery: Delivery, /) -> bool:
        """Call the handler as pynsq does, and make sense of what it returns. True: it has succeeded."""
        message = cast("Message", delivery)
        self._places.enter(message)
        if not self._call(message):
            return False
        self._places.leave(message)
        return True

    def run_on(
        self, ready: deque[Delivery], count: int, record: Callable[[bytes, int], None], until: float
    ) -> Message | None:
        """Do the same for the first of those that are ready, and record and answer each success; see `Port.run_on`."""
        conn = cast("Message", ready[0]).conn
        source, note_fin = conn.source, conn.fins.append
        call, take = self._call, cast("deque[Message]", ready).popleft
        # The one in hand. It is the message's own as soon as its handler has not succeeded in one go.
        conn.in_flight += 1
        for _ in itertools.repeat(None, count):
            message = take()
            message.state = _RUNNING
            message.counted = True
            if not call(message):
                return message
            try:
                record(message.fingerprint, message.place)  # type: ignore[arg-type] # none: nothing is recorded
            except Exception:  # noqa: BLE001 - the long way meets it too, and makes up for it
                self._answer(message, Outcome.HANDLED, None)
                return message
            if not source.open:
                self._answer(message, Outcome.HANDLED, None)
                return message
            note_fin(message.id)
            if monotonic() >= until:
                break
        conn.in_flight -= 1
        return None

    def _call(self, message: Message) -> bool:
        try:
            if self._hooked and not self._reader.validate_message(self._reader.preprocess_message(message)):
                message._has_responded = True  # noqa: SLF001 - our own message
                self._answer(message, Outcome.INVALID, None)
                message.trigger(nsq.event.FINISH, message=message)
                return False
            result = self._process(message)
            if result is True and message.as_made:
                message._has_responded = True  # noqa: SLF001 - our own message
                return True
            # What nearly all of them return is known without asking tornado, which takes as long as a task does.
            if type(result) is CoroutineType:
                return self._on_coroutine(message, result)
            self._on_result(message, result)
        except Exception as error:  # noqa: BLE001 - whatever it is, the message failed
            self._report("handler", message, error)
            self._respond(message, message.requeue)
        except asyncio.CancelledError:
            self._on_cancelled(message)
        except BaseException:
            self._cancel(message)
            raise
        return False

    def _on_coroutine(self, message: Message, coroutine: Coroutine[Any, Any, Any]) -> bool:
        """True: it has succeeded in one go."""
        begun = self._begin(coroutine)
        if begun is True:
            if message.as_made:
                message._has_responded = True  # noqa: SLF001 - our own message
                return True
            self._respond(message, message.finish)
        elif begun.done():
            self._on_done(message, begun)
        else:
            message.enable_async()
            message.runs_since = monotonic()
            _running[begun] = message
            # Not a partial, which would be three objects more for the garbage collector to look at.
            begun.add_done_callback(self._on_ended)
        return False

    def _on_result(self, message: Message, result: Any) -> None:  # noqa: ANN401 - handlers return what they like
        if result not in (True, False, None):
            try:
                future = tornado.gen.convert_yielded(result)
            except tornado.gen.BadYieldError:
                self._complain(message, f"returned a {type(result).__name__}; return True, False or an awaitable")
                return
            message.enable_async()
            message.runs_since = monotonic()
            if future.done():
                self._on_done(message, future)
            else:
                future.add_done_callback(functools.partial(self._on_done, message))
        elif message._async_enabled or message.has_responded():  # noqa: SLF001 - our own message
            return
        elif result is None:
            self._complain(message, "returned None without responding; return True or False, or respond")
        elif result:
            message.finish()
        else:
            message.requeue()

    def _complain(self, message: Message, what: str) -> None:
        if message.has_responded():
            return
        logger.error("[%s:%s] handler %s: message %r is requeued", message.conn.id, self._reader.name, what, message.id)
        message.requeue()

    def _on_ended(self, task: asyncio.Future[Any]) -> None:
        """A coroutine handler ended."""
        self._on_done(_running.pop(task), task)

    def _on_done(self, message: Message, future: asyncio.Future[Any]) -> None:
        """What a handler has returned is done."""
        message.runs_since = None
        if future.cancelled():
            self._on_cancelled(message)
            return
        error = future.exception()
        good = False
        if error is None:
            try:
                good = bool(future.result())
            except Exception as no_truth_value:  # noqa: BLE001 - whatever it is, it is told below
                error = no_truth_value
        if error is not None:
            self._report("handler", message, error)
        self._respond(message, message.finish if good else message.requeue)

    def _on_cancelled(self, message: Message) -> None:
        logger.warning("[%s:%s] handler of message %r was cancelled", message.conn.id, self._reader.name, message.id)
        self._cancel(message)

    def _report(self, what: str, message: Message, error: BaseException) -> None:
        """Log that something failed: its class and the message's id, never the body."""
        logger.error(
            "[%s:%s] %s failed on message %r: %s",
            *(message.conn.id, self._reader.name, what, message.id, type(error).__name__),
            exc_info=exc_info(error, message.body),
        )

    def _respond(self, message: Message, respond: Callable[[], None]) -> None:
        """Respond in the handler's place, unless it has; a listener that breaks then has nobody else to hear of it."""
        if message.has_responded():
            return
        try:
            respond()
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is given
            self._report("listener", message, error)

    def _cancel(self, message: Message, delay: float | None = None) -> None:
        def requeue() -> None:
            message._has_responded = True  # noqa: SLF001 - our own message
            self._answer(message, Outcome.CANCELLED, delay)
            message.trigger(nsq.event.REQUEUE, message=message)

        self._respond(message, requeue)

    def give_up(self, delivery: Delivery, /) -> None:
        """Call the application's hook; when it raises, the message comes again."""
        message = cast("Message", delivery)
        self._places.enter(message)
        self._giving_up = message
        try:
            self._reader.giving_up(message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the message comes again
            self._report("giving_up", message, error)
            self._cancel(message, self._retry_delay)
        else:
            self._respond(message, message.finish)
        finally:
            self._giving_up = None

    def finished(self, message: Message) -> None:
        """See `Responder`."""
        self._answer(message, Outcome.GIVEN_UP if self._giving_up is message else Outcome.HANDLED, None)

    def requeued(self, message: Message, delay: float | None, backoff: bool) -> None:  # noqa: FBT001 - see Responder
        """See `Responder`."""
        message.backoff = backoff
        # Who requeues while giving up wants it again, and has not run the handler: that costs no try.
        self._answer(message, Outcome.CANCELLED if self._giving_up is message else Outcome.FAILED, delay)


_running: dict[asyncio.Future[Any], Message] = {}
"""Tasks of handlers: an event loop itself may lose those that wait for something that nobody else refers to."""
