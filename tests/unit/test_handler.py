"""What `dedupe` accepts, and what a decorated handler is when no reader calls it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import nsq
import pytest
from beginning import in_a_callback

from nsqdedupe import BODY, ConfigError, MemoryStore, dedupe
from nsqdedupe.adopted import connection_of


def good(**options: Any) -> dict[str, Any]:
    return {"store": MemoryStore(window=10), "key": BODY, "scope": "events/billing", **options}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("store", value) for value in (None, False, "memory://", MemoryStore)),
        *(("key", value) for value in (None, "BODY", 1)),
        *(("scope", value) for value in (None, 1, "", "events", "events/", "/billing", "a/b/c", "e vents/x", "a" * 65)),
        *(("secret", value) for value in ("text", b"", b"x" * 65)),
    ],
)
def test_a_wrong_argument_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        dedupe(**good(**{option: value}))


@pytest.mark.parametrize("handler", [None, 1, "handle"])
def test_what_cannot_be_called_is_refused(handler: Any) -> None:
    with pytest.raises(ConfigError, match="handler="):
        dedupe(**good())(handler)


def test_a_handler_is_decorated_once() -> None:
    decorate = dedupe(**good())
    with pytest.raises(ConfigError, match="decorated already"):
        decorate(decorate(len))


def test_a_store_filled_by_another_secret_is_refused() -> None:
    options = good()
    dedupe(**{**options, "secret": b"one"})
    with pytest.raises(ConfigError, match="blake2b"):
        dedupe(**{**options, "secret": b"other"})


def test_a_test_of_the_handler_calls_it_as_before() -> None:
    """With a message that no connection received, in or out of an event loop."""

    @dedupe(**good())
    def handle(message: Any) -> str:
        """What it does."""
        return f"handled {message.body}"

    assert handle(SimpleNamespace(body=1)) == "handled 1"
    message = nsq.Message(b"id", b"body", 0, 1)
    assert handle(message) == handle(message) == "handled b'body'"
    assert type(message) is nsq.Message
    assert (handle.__name__, handle.__doc__) == ("handle", "What it does.")
    assert handle.stats.received == 0


def test_only_a_received_message_has_a_connection() -> None:
    message = nsq.Message(b"id", b"body", 0, 1)
    message.on("finish", print)
    assert connection_of(message) is None
    assert connection_of(None) is None


def received(conn: nsq.AsyncConn, body: bytes) -> nsq.Message:
    """A message as pynsq makes it."""
    made: list[nsq.Message] = []
    conn.on("message", lambda message, **_: made.append(message))
    conn._on_data(b"\0\0\0\2" + bytes(8) + b"\0\1" + b"%016d" % len(body) + body)
    return made[0]


def test_a_handler_serves_one_running_loop_at_a_time() -> None:
    handler = dedupe(**good())(lambda _: True)
    errors: list[Exception] = []

    async def elsewhere() -> None:
        try:
            handler(received(nsq.AsyncConn("127.0.0.1", 1), b"body"))
        except ConfigError as error:
            errors.append(error)

    async def here() -> None:
        assert handler(received(nsq.AsyncConn("127.0.0.1", 2), b"body")) is True
        thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
        thread.start()
        thread.join()

    asyncio.run(here())
    assert [str(error) for error in errors if "events/billing" in str(error)] != []
    asyncio.run(elsewhere())
    assert len(errors) == 1, "the first loop has ended"


def test_what_a_decorated_handler_returns() -> None:
    """A truth for a plain handler, None if it is not known yet, an awaitable for a coroutine function.

    An awaitable of what is known is a truth as well: then pynsq makes no task.
    """
    gate = asyncio.Event()

    async def handle(message: Any) -> bool:
        await gate.wait()
        return bool(message.body == b"good")

    async def main() -> None:
        plain = dedupe(**good())(lambda message: message.body == b"good")
        conn = nsq.AsyncConn("127.0.0.1", 1)
        assert plain(received(conn, b"good")) is True
        assert plain(received(conn, b"bad")) is False
        later = dedupe(**good())(lambda message: message.enable_async())
        assert later(received(conn, b"good")) is None
        waiting = dedupe(**good())(handle)
        first, copy, bad = (waiting(received(conn, body)) for body in (b"good", b"good", b"bad"))
        assert not any(result in {True, False, None} for result in (first, copy, bad))
        gate.set()
        assert (await first, await copy, await bad) == (True, True, False)
        again, bad_again = (waiting(received(conn, body)) for body in (b"good", b"bad"))
        assert again == True  # noqa: E712 - as pynsq compares
        assert (await again, await asyncio.wait_for(again, 1)) == (True, True)
        assert await bad_again is False

    asyncio.run(main())


def test_a_coroutine_that_ends_at_once_needs_no_task() -> None:
    async def main() -> None:
        @dedupe(**good())
        async def handle(message: Any) -> bool:
            return True

        conn = nsq.AsyncConn("127.0.0.1", 1)
        messages = [received(conn, b"body %d" % (number // 2)) for number in range(10)]
        assert await in_a_callback(lambda: [handle(message) for message in messages]) == [True] * 10
        assert not any(message._async_enabled for message in messages)
        stats = handle.stats
        assert (stats.received, stats.handled, stats.duplicates) == (10, 5, 5)
        assert len(asyncio.all_tasks()) <= 2, "this one, and one that ends"

    asyncio.run(main())


def test_a_connection_that_was_closed_before_its_message_comes_leaves_nothing_behind() -> None:
    async def main() -> None:
        async def handle(message: Any) -> bool:
            raise AssertionError

        handler = dedupe(**good())(handle)
        conn = nsq.AsyncConn("127.0.0.1", 1)
        message = received(conn, b"body")
        conn._socket_close()
        assert await handler(message) is False
        assert message.has_responded(), "pynsq does not try to answer"
        known = weakref.ref(conn)
        del conn, message
        gc.collect()
        assert known() is None

    asyncio.run(main())


def test_a_connection_whose_end_is_too_much_for_a_listener_leaves_nothing_behind() -> None:
    class BrokenError(Exception):
        pass

    def breaks(**_: Any) -> None:
        raise BrokenError

    async def main() -> None:
        waits = dedupe(**good())(lambda message: message.enable_async())
        conns = [nsq.AsyncConn("127.0.0.1", port) for port in (1, 2)]
        conns[1].on("close", breaks)
        for conn in conns:
            assert waits(received(conn, b"body")) is None
        with pytest.raises(BrokenError):
            conns[1]._socket_close()
        assert waits.stats.unanswered == 1, "the copy that stood by"
        known = weakref.ref(conns.pop())
        del conn
        gc.collect()
        assert known() is None

    asyncio.run(main())


def test_what_succeeds_when_its_connection_is_gone_is_recorded() -> None:
    async def main() -> None:
        conns = [nsq.AsyncConn("127.0.0.1", port) for port in (1, 2)]

        def handle(_: Any) -> bool:
            conns[0]._socket_close()
            return True

        handler = dedupe(**good())(handle)
        first, copy = (received(conn, b"body") for conn in conns)
        await in_a_callback(lambda: handler(first))
        assert handler.stats.unanswered == 1
        assert handler(copy) is True
        assert (handler.stats.handled, handler.stats.duplicates) == (0, 1)

    asyncio.run(main())


def test_what_succeeds_and_cannot_be_recorded_is_answered_all_the_same() -> None:
    async def main() -> None:
        options = good()

        def handle(_: Any) -> bool:
            options["store"].close()
            return True

        handler = dedupe(**options)(handle)
        first, copy = (received(nsq.AsyncConn("127.0.0.1", port), b"body") for port in (1, 2))
        assert handler(first) is True
        assert handler.stats.handled == 1
        assert handler.stats.store_errors > 0
        assert handler(copy) is True
        assert handler.stats.duplicates == 1, "it is known until the store can be told"

    asyncio.run(main())
