"""What `dedupe` accepts, and what a decorated handler is when no reader calls it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import nsq
import pytest

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
    """A truth for a plain handler, None if it is not known yet, an awaitable for a coroutine function."""
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
        gate.set()
        assert (await first, await copy, await bad) == (True, True, False)

    asyncio.run(main())
