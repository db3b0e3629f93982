"""What a reader sends nsqd for everything that a handler can do, asked of `nsq.Reader` and of `DedupeReader`.

As a program it prints that as JSON: for each row and reader what was sent and what was logged. So it can be
run by ``python -O`` too, which takes pynsq's assert statements away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import nsq
from consumers import PATIENCE
from proxy import Line, recording
from servers import eventually_async
from tornado.iostream import StreamClosedError

from nsqdedupe import BODY, DedupeReader
from nsqdedupe.cli.local_nsq import Nsqd

READERS = ("stock", "ours")
SECRET = "never-logged"
TURNS = 50
"""More turns of the event loop than any handler here, and what its reader makes of it, takes."""


class BrokenError(Exception):
    """What handlers raise."""


def returning(result: Any) -> Callable[[Any], Any]:
    return lambda _: result


def raising(message: Any) -> None:
    raise BrokenError


def raising_with_the_body(message: Any) -> None:
    int(message.body)


def raising_after_finish(message: Any) -> None:
    message.finish()
    raise BrokenError


def raising_after_enable_async(message: Any) -> None:
    message.enable_async()
    raise BrokenError


def cancelled(message: Any) -> None:
    raise asyncio.CancelledError


def finishing(result: Any) -> Callable[[Any], Any]:
    def handle(message: Any) -> Any:
        message.finish()
        return result

    return handle


def finishing_twice(message: Any) -> bool:
    message.finish()
    message.finish()
    return True


def requeuing(**how: Any) -> Callable[[Any], Any]:
    return lambda message: message.requeue(**how)


def enabling_async(message: Any) -> bool:
    message.enable_async()
    return True


def answering_later(answer: str) -> Callable[[Any], Any]:
    def handle(message: Any) -> None:
        message.enable_async()
        asyncio.get_running_loop().call_soon(getattr(message, answer))

    return handle


def future(message: Any) -> asyncio.Future[bool]:
    made: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(made.set_result, True)
    return made


async def coroutine_raising_with_the_body(message: Any) -> None:
    await asyncio.sleep(0)
    int(message.body)


def coroutine(result: Any = None, error: type[BaseException] | None = None, answer: str = "") -> Callable[[Any], Any]:
    async def handle(message: Any) -> Any:
        await asyncio.sleep(0)
        if answer:
            getattr(message, answer)()
        if error is not None:
            raise error
        return result

    return handle


HANDLERS: dict[str, Callable[[Any], Any]] = {
    "returns True": returning(True),
    "returns 1": returning(1),
    "returns False": returning(False),
    "returns 0": returning(0),
    "returns None": returning(None),
    "returns a str": returning("ok"),
    "returns a number": returning(7),
    "returns an empty list": returning([]),
    "returns a future": future,
    "raises": raising,
    "raises with the body in its text": raising_with_the_body,
    "raises after finish()": raising_after_finish,
    "raises after enable_async()": raising_after_enable_async,
    "raises CancelledError": cancelled,
    "finish(), None": finishing(None),
    "finish(), False": finishing(False),
    "finish() twice": finishing_twice,
    "enable_async(), True": enabling_async,
    "enable_async(), finish() later": answering_later("finish"),
    "enable_async(), requeue() later": answering_later("requeue"),
    "requeue()": requeuing(),
    "requeue(delay=0)": requeuing(delay=0),
    "requeue(delay=2, time_ms=1)": requeuing(delay=2, time_ms=1),
    "requeue(delay=-1)": requeuing(delay=-1),
    "requeue(delay=1.5)": requeuing(delay=1.5),
    "requeue(time_ms=250)": requeuing(time_ms=250),
    "requeue(time_ms=250.5)": requeuing(time_ms=250.5),
    "requeue(backoff=False)": requeuing(backoff=False),
    "coroutine: True": coroutine(True),
    "coroutine: False": coroutine(False),
    "coroutine: None": coroutine(None),
    "coroutine: finish(), None": coroutine(None, answer="finish"),
    "coroutine: finish(), raises": coroutine(error=BrokenError, answer="finish"),
    "coroutine: requeue(), True": coroutine(True, answer="requeue"),
    "coroutine: raises": coroutine(error=BrokenError),
    "coroutine: raises with the body in its text": coroutine_raising_with_the_body,
    "coroutine: raises CancelledError": coroutine(error=asyncio.CancelledError),
}


class Logged(logging.Handler):
    """All that is logged, tracebacks included."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {self.format(record)}")


async def ask(nsqd: Nsqd, row: str, which: str, logged: Logged) -> dict[str, Any]:
    """Give one message to one handler of one reader."""
    number = list(HANDLERS).index(row)
    topic = f"{which}-{number}"
    nsqd.publish(topic, f"{SECRET}-{topic}".encode())
    conns: list[Any] = []

    def handle(message: Any) -> Any:
        conns.extend(reader.conns.values())
        return HANDLERS[row](message)

    async with recording(nsqd) as (proxy,):
        reader_class, key = (nsq.Reader, {}) if which == "stock" else (DedupeReader, {"key": BODY})
        reader: Any = reader_class(topic, "ch", handle, nsqd_tcp_addresses=proxy.address, max_in_flight=5, **key)
        (conn,) = await eventually_async(lambda: conns, PATIENCE)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        closed = conn.closed()
        with contextlib.suppress(StreamClosedError):
            # What was to be sent is on the wire when this is.
            conn.send(nsq.protocol.nop())
        await eventually_async(lambda: proxy.line.said(b"NOP") or conn.closed(), PATIENCE)
        sent = answers(proxy.line)
        if reader.backoff_timer.get_interval():
            sent.append("backoff")
        if closed:
            sent.append("closed")
        (message,) = proxy.line.messages()
        reader.close()
        await eventually_async(lambda: not reader.conns)
    # Topics count their ids each for itself: those of two may be equal.
    about = [line for line in logged.lines if message.id.decode() in line and f":{topic}:ch]" in line]
    return {"sent": ", ".join(sent) or "nothing", "logged": "\n".join(about)}


def answers(line: Line) -> list[str]:
    return [b" ".join((name, *args[1:])).decode() for _, name, args in line.said(b"FIN", b"REQ", b"TOUCH")]


async def ask_all(nsqd: Nsqd, logged: Logged) -> dict[str, dict[str, Any]]:
    """Each row and reader has a topic and a connection of its own."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # pynsq lets some get there
    pairs = [(row, which) for row in HANDLERS for which in READERS]
    results = await asyncio.gather(*(ask(nsqd, row, which, logged) for row, which in pairs))
    told: dict[str, dict[str, Any]] = {row: {} for row in HANDLERS}
    for (row, which), result in zip(pairs, results, strict=True):
        told[row][which] = result
    return told


def main() -> None:
    logged = Logged()
    logging.getLogger().addHandler(logged)
    with Nsqd() as nsqd:
        json.dump(asyncio.run(ask_all(nsqd, logged)), sys.stdout)


if __name__ == "__main__":
    main()
