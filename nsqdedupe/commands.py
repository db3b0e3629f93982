"""The commands that publish: as nsqd reads them, and in the order in which it answers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Generic, TypeVar

from nsqdedupe import checks
from nsqdedupe.errors import ConfigError

T = TypeVar("T")

_SIZE = Struct(">I")

ALONE = 1 << 20
"""Bytes from which a command is sent alone: below, no nsqd refuses it for its size unless it was told to."""


def pub(topic: object, body: object) -> bytes:
    """PUB: one message.

    Raises:
        ConfigError: not a topic's name; or the body is not bytes, or is empty. The text does not show it.
    """
    name = checks.nsq_name("topic", topic).encode()
    checked = _body("body", body)
    return b"".join((b"PUB ", name, b"\n", _SIZE.pack(len(checked)), checked))


def mpub(topic: object, bodies: object) -> bytes:
    """MPUB: a sequence of messages.

    Raises:
        ConfigError: as for `pub`; or there is no body.
    """
    name = checks.nsq_name("topic", topic).encode()
    # Bytes are a sequence too, but of numbers.
    if not isinstance(bodies, Sequence) or isinstance(bodies, bytes | bytearray | memoryview | str):
        raise ConfigError(f"bodies: must be a list of bytes, not {type(bodies).__name__}; a single one goes to publish")
    if not bodies:
        raise ConfigError("bodies: must be one or more, not none; leave the call out when there is nothing to publish")
    parts = [_SIZE.pack(len(bodies))]
    for number, body in enumerate(bodies):
        checked = body if type(body) is bytes and body else _body(f"bodies[{number}]", body)
        parts += _SIZE.pack(len(checked)), checked
    return b"".join((b"MPUB ", name, b"\n", _SIZE.pack(sum(map(len, parts))), *parts))


def _body(option: str, body: object) -> bytes:
    if not isinstance(body, bytes):
        raise ConfigError(f"{option}: must be bytes, not {type(body).__name__}; encode it, or make it bytes(...)")
    if not body:
        raise ConfigError(f"{option}: must be 1 byte or more, not empty; nsqd takes no empty message")
    return body


class CommandQueue(Generic[T]):
    """Commands to one nsqd, and a ticket for each: who waits for its answer.

    A large command goes out when all before it are answered, and those behind it when it is. For nsqd closes
    the connection over one that is too large, without reading it, and then TCP may drop what nsqd has said
    just before: the answers to other commands, and why it closes.

    Args:
        send: sends a command.
    """

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self._send = send
        self._sent: deque[T] = deque()
        self._held: deque[tuple[bytes, T]] = deque()
        self._alone = False

    @property
    def owed(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._sent)

    def put(self, command: bytes, ticket: T) -> None:
        """Send a command when its turn comes."""
        self._held.append((command, ticket))
        self._advance()

    def take(self) -> T:
        """An answer came: the ticket of its command.

        Raises:
            IndexError: no answer is owed.
        """
        ticket = self._sent.popleft()
        self._alone = False
        self._advance()
        return ticket

    def clear(self) -> tuple[list[T], list[T]]:
        """No answer will come any more: the tickets of what was sent, and of what was not."""
        left = list(self._sent), [ticket for _, ticket in self._held]
        self._sent.clear()
        self._held.clear()
        return left

    def _advance(self) -> None:
        while self._held and not self._alone:
            command, ticket = self._held[0]
            if len(command) >= ALONE:
                if self._sent:
                    return
                self._alone = True
            self._held.popleft()
            self._sent.append(ticket)
            self._send(command)
