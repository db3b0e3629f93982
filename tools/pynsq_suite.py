# ruff: noqa: INP001 - a plugin that stands alone
"""A pytest plugin for pynsq's own tests: with ``--reader=ours`` they run with `DedupeReader` for `nsq.Reader`.

`tools/pynsq-tests` loads it. Not a line of those tests is changed; what is put in their modules is:

- `DedupeReader` for ``Reader``, keyed on the message's id: those tests publish equal bodies that are
  different messages, to one nsqd.
- `Connection` for ``AsyncConn`` in the tests on a real nsqd, handing over one message at a time.
- A running event loop around plain test functions, which our connections want.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import unittest.mock
from collections.abc import Sequence
from typing import Any

import nsq
import nsq.event
import pytest

from nsqdedupe import DedupeReader
from nsqdedupe.connection import Connection

NO_LOOP = "asks for the current event loop where there is none"
NO_TLS_WITH_SNAPPY = "TLS with snappy: pynsq's wrapper raises an error that tornado 6 takes for a broken connection"

KNOWN = {
    "stock": {
        "test_backoff_hard": NO_LOOP,
        "test_backoff_many_conns": NO_LOOP,
        "test_backoff_conns_disconnect": NO_LOOP,
        "ReaderIntegrationTest::test_conn_subscribe": NO_TLS_WITH_SNAPPY,
        "ReaderIntegrationTest::test_conn_messages": NO_TLS_WITH_SNAPPY,
        "ReaderIntegrationTest::test_reader_messages": NO_TLS_WITH_SNAPPY,
        "ReaderIntegrationTest::test_reader_coro": NO_TLS_WITH_SNAPPY,
    },
    "ours": {
        "ReaderIntegrationTest::test_bad_reader_arguments": "wants the AssertionError of an assert statement; "
        "ours is a ConfigError, which python -O does not remove",
    },
}
"""What fails with either reader, and why."""


class Reader(DedupeReader):
    """What the tests get for ``nsq.Reader``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - pynsq's options
        super().__init__(*args, key=lambda message: message.id, **kwargs)
        if isinstance(self.io_loop, unittest.mock.NonCallableMock):
            # Those tests turn the clock by hand, and expect no timer but pynsq's; there is nothing to dial there.
            self._DedupeReader__dialer = unittest.mock.MagicMock(connecting={})

    def connect_to_nsqd(self, host: str, port: int) -> Connection | None:
        """Connect; where a test has no nsqd, let it do its part.

        pynsq's unit tests put a mock in place of the stream, hand each message to the reader by an event that
        our connections do not send, and look at each command by itself.
        """
        conn = super().connect_to_nsqd(host, port)
        if conn is not None and isinstance(conn.stream, unittest.mock.NonCallableMock):
            conn.on(nsq.event.MESSAGE, self._on_message)
            _send_each_by_itself(conn)
        return conn


def _connect(conn: Connection) -> None:
    """Connect, or where a test has put a mock in the place of streams, take that for connected."""
    if not isinstance(nsq.conn.IOStream, unittest.mock.NonCallableMock):
        _really_connect(conn)
        return
    conn.stream = nsq.conn.IOStream(None)
    conn.stream.closed.return_value = False
    conn.state = nsq.conn.CONNECTED


_really_connect = Connection.connect


class Conn(Connection):
    """What the tests get for ``nsq.AsyncConn``."""

    def __init__(self, host: str, port: int, **kwargs: Any) -> None:  # noqa: ANN401 - pynsq's options
        super().__init__(host, port, make_message=_stock_message, receive=_hand_over, **kwargs)


def _send_each_by_itself(conn: Connection) -> None:
    send = conn.send

    def send_now(data: bytes) -> None:
        send(data)
        conn.flush()

    conn.send = send_now


def _stock_message(conn: Connection, id: bytes, body: bytes, timestamp: int, attempts: int) -> nsq.Message:  # noqa: A002, ARG001
    return nsq.Message(id, body, timestamp, attempts)


def _hand_over(conn: Connection, messages: Sequence[nsq.Message], size: int) -> bool:  # noqa: ARG001
    for message in messages:
        conn.in_flight += 1
        conn.trigger(nsq.event.MESSAGE, conn=conn, message=message)
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which reader."""
    parser.addoption("--reader", choices=tuple(KNOWN), default="ours")


def pytest_configure() -> None:
    """What is called mock there has long been part of the standard library."""
    sys.modules["mock"] = unittest.mock


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Put our classes where the tests look for pynsq's, and mark what is known to fail."""
    reader = config.getoption("--reader")
    if reader == "ours":
        nsq.Reader = Reader
        Connection.connect = _connect
    for item in items:
        module = inspect.getmodule(getattr(item, "obj", None))
        if reader == "ours" and module is not None and module.__name__.endswith("test_reader"):
            module.__dict__.update(Reader=Reader, AsyncConn=Conn)
        for name, reason in KNOWN[reader].items():
            if item.nodeid.endswith(f"::{name}"):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call plain test functions while an event loop runs."""
    if pyfuncitem.cls is not None or pyfuncitem.config.getoption("--reader") == "stock":
        return None
    names = inspect.signature(pyfuncitem.obj).parameters

    async def call() -> None:
        pyfuncitem.obj(**{name: value for name, value in pyfuncitem.funcargs.items() if name in names})

    asyncio.run(call())
    return True
