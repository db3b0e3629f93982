"""The commands that publish: as nsqd reads them, and in the order in which it answers them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Generic, TypeVar

from nsqdedupe import checks
from nsqdedupe.errors import ConfigError

T = TypeVar("T")

_SIZE = Struct(">I")

ALONE = 1 << 20
"""Bytes from which a command is sent alone: below, no nsqd refuses it for its size unless it was told to."""

MAX_DEFER = 1e9
"""Seconds. What is longer may overflow in nsqd and come at once."""


def check_body(body: object) -> bytes:
    """The body of one message.

    Raises:
        ConfigError: it is not bytes, or is empty. The text does not show it.
    """
    return _body("body", body)


def check_bodies(bodies: object) -> Sequence[bytes]:
    """The bodies of many messages.

    Raises:
        ConfigError: it is no sequence of bodies, or there is none in it.
    """
    # Bytes are a sequence too, but of numbers.
    if not isinstance(bodies, Sequence) or isinstance(bodies, bytes | bytearray | memoryview | str):
        raise ConfigError(f"bodies: must be a list of bytes, not {type(bodies).__name__}; a single one goes to publish")
    if not bodies:
        raise ConfigError("bodies: must be one or more, not none; leave the call out when there is nothing to publish")
    for number, body in enumerate(bodies):
        if type(body) is not bytes or not body:
            _body(f"bodies[{number}]", body)
    return bodies


def check_defer(defer: object) -> int:
    """Seconds to defer a message, as whole milliseconds, rounded up.

    Raises:
        ConfigError: it is no number of 0 or more.
    """
    return math.ceil(checks.number("defer", defer, 0, MAX_DEFER) * 1000)


def _body(option: str, body: object) -> bytes:
    if not isinstance(body, bytes):
        raise ConfigError(f"{option}: must be bytes, not {type(body).__name__}; encode it, or make it bytes(...)")
    if not body:
        raise ConfigError(f"{option}: must be 1 byte or more, not empty; nsqd takes no empty message")
    return body


def pub(topic: str, body: bytes) -> bytes:
    """PUB: one message."""
    return b"".join((b"PUB ", topic.encode(), b"\n", _SIZE.pack(len(body)), body))


def mpub(topic: str, bodies: Sequence[bytes]) -> bytes:
    """MPUB: several messages, of which nsqd takes all or none."""
    pack = _SIZE.pack
    parts = [part for body in bodies for part in (pack(len(body)), body)]
    size = sum(map(len, parts)) + _SIZE.size
    return b"".join((b"MPUB ", topic.encode(), b"\n", pack(size), pack(len(bodies)), *parts))


def dpub(topic: str, defer_ms: int, body: bytes) -> bytes:
    """DPUB: one message, to be delivered so many milliseconds later."""
    return b"".join((b"DPUB ", topic.encode(), b" %d\n" % defer_ms, _SIZE.pack(len(body)), body))


def framed(body: bytes) -> int:
    """Bytes that a message adds to an MPUB."""
    return _SIZE.size + len(body)


def cut(bodies: Sequence[bytes], most: int, most_bytes: int) -> Iterator[Sequence[bytes]]:
    """Cut bodies, in order, into as few commands as hold ``most`` messages and ``most_bytes`` each.

    A body larger than that is one command.
    """
    start = size = 0
    for end, body in enumerate(bodies):
        if end > start and (end - start >= most or size + framed(body) > most_bytes):
            yield bodies[start:end]
            start, size = end, 0
        size += framed(body)
    yield bodies[start:]


class CommandQueue(Generic[T]):
    """Commands to one nsqd, and a ticket for each: who waits for its answer.

    A command that goes alone goes out when all before it are answered, and those behind it when it is. For nsqd
    closes the connection over one that it refuses, without reading on, and then TCP may drop what nsqd has said
    just before: the answers to other commands, and why it closes.

    Args:
        send: sends a command.
    """

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self.load = 0
        """Bytes of all commands that are not answered."""
        self._send = send
        self._sent: deque[tuple[int, T]] = deque()
        self._held: deque[tuple[bytes, bool, T]] = deque()
        self._alone = False

    @property
    def owed(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._sent)

    def put(self, command: bytes, ticket: T, *, alone: bool = False) -> None:
        """Send a command when its turn comes. A large one always goes ``alone``."""
        self.load += len(command)
        self._held.append((command, alone or len(command) >= ALONE, ticket))
        self._advance()

    def take(self) -> T:
        """An answer came: the ticket of its command.

        Raises:
            IndexError: no answer is owed.
        """
        size, ticket = self._sent.popleft()
        self.load -= size
        self._alone = False
        self._advance()
        return ticket

    def clear(self) -> tuple[list[T], list[T]]:
        """No answer will come any more: the tickets of what was sent, and of what was not."""
        left = [ticket for _, ticket in self._sent], [ticket for _, _, ticket in self._held]
        self._sent.clear()
        self._held.clear()
        self.load = 0
        return left

    def _advance(self) -> None:
        while self._held and not self._alone:
            command, alone, ticket = self._held[0]
            if alone and self._sent:
                return
            self._alone = alone
            self._held.popleft()
            self._sent.append((len(command), ticket))
            self._send(command)
