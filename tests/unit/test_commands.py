"""What goes to nsqd on the wire, and when."""

from __future__ import annotations

import re

import pytest

from nsqdedupe import ConfigError
from nsqdedupe.commands import ALONE, CommandQueue, check_bodies, check_body, check_defer, cut, dpub, mpub, pub

LARGE = b"L" * ALONE
SECRET = "do not show"


def test_one_message_on_the_wire() -> None:
    assert pub("events", b"body") == b"PUB events\n\x00\x00\x00\x04body"


def test_many_messages_on_the_wire() -> None:
    one, three = b"\x00\x00\x00\x01a", b"\x00\x00\x00\x03bcd"
    expected = b"MPUB events#ephemeral\n" + b"\x00\x00\x00\x10" + b"\x00\x00\x00\x02" + one + three
    assert mpub("events#ephemeral", [b"a", b"bcd"]) == expected
    assert mpub("events#ephemeral", (b"a", b"bcd")) == expected


def test_a_deferred_message_on_the_wire() -> None:
    assert dpub("events", 1500, b"body") == b"DPUB events 1500\n\x00\x00\x00\x04body"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (SECRET, "body: must be bytes, not str; encode it"),
        (bytearray(b"do not show"), "body: must be bytes, not bytearray"),
        (memoryview(b"do not show"), "body: must be bytes, not memoryview"),
        (None, "body: must be bytes, not NoneType"),
        (7, "body: must be bytes, not int"),
        ([b"do not show"], "body: must be bytes, not list"),
        (b"", "body: must be 1 byte or more, not empty; nsqd takes no empty message"),
    ],
)
def test_a_body_that_nsqd_would_refuse_is_refused_and_not_shown(body: object, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        check_body(body)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("bodies", "says"),
    [
        (b"do not show", "bodies: must be a list of bytes, not bytes; a single one goes to publish"),
        (SECRET, "bodies: must be a list of bytes, not str"),
        (bytearray(b"do not show"), "bodies: must be a list of bytes, not bytearray"),
        (None, "bodies: must be a list of bytes, not NoneType"),
        (iter([b"do not show"]), "bodies: must be a list of bytes, not list_iterator"),
        ([], "bodies: must be one or more, not none; leave the call out"),
        ((), "bodies: must be one or more, not none; leave the call out"),
        ([b"good", b""], "bodies[1]: must be 1 byte or more"),
        ([b"good", b"good", SECRET], "bodies[2]: must be bytes, not str"),
        ([7], "bodies[0]: must be bytes, not int"),
    ],
)
def test_a_list_that_nsqd_would_refuse_is_refused_and_not_shown(bodies: object, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        check_bodies(bodies)
    assert SECRET not in str(refused.value)


def test_a_subclass_of_bytes_is_bytes() -> None:
    class Body(bytes):
        __slots__ = ()

    assert pub("events", check_body(Body(b"body"))) == pub("events", b"body")
    assert mpub("events", check_bodies([Body(b"body")])) == mpub("events", [b"body"])


@pytest.mark.parametrize(("defer", "defer_ms"), [(0, 0), (1, 1000), (0.25, 250), (0.0001, 1), (1.0001, 1001)])
def test_a_delay_is_rounded_up_to_milliseconds(defer: float, defer_ms: int) -> None:
    assert check_defer(defer) == defer_ms


@pytest.mark.parametrize("defer", [-1, -0.001, 1e9 + 1, float("nan"), float("inf"), True, False, "1", None, b"1"])
def test_a_delay_that_is_none_is_refused(defer: object) -> None:
    with pytest.raises(ConfigError, match=r"^defer="):
        check_defer(defer)


@pytest.mark.parametrize(
    ("most", "most_bytes", "cuts"),
    [
        (10, 1000, ["abcde"]),
        (2, 1000, ["ab", "cd", "e"]),
        (1, 1000, ["a", "b", "c", "d", "e"]),
        (5, 40, ["abcde"]),
        (5, 39, ["abcd", "e"]),
        (10, 16, ["ab", "cd", "e"]),
        (10, 15, ["a", "b", "c", "d", "e"]),
        (10, 1, ["a", "b", "c", "d", "e"]),
    ],
)
def test_bodies_are_cut_where_a_command_is_full(most: int, most_bytes: int, cuts: list[str]) -> None:
    """Four bytes each, and four more for the size."""
    bodies = [letter.encode() * 4 for letter in "abcde"]
    assert ["".join(chr(body[0]) for body in chunk) for chunk in cut(bodies, most, most_bytes)] == cuts


class Wire:
    """A queue, and what it has sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.queue: CommandQueue[str] = CommandQueue(self.sent.append)

    def put(self, **commands: bytes) -> None:
        for ticket, command in commands.items():
            self.queue.put(command, ticket)


def test_small_commands_are_sent_at_once_and_answered_in_order() -> None:
    wire = Wire()
    assert not wire.queue.owed
    wire.put(first=b"1", second=b"2", third=b"3")
    assert wire.sent == [b"1", b"2", b"3"]
    assert [wire.queue.take() for _ in range(2)] == ["first", "second"]
    assert wire.queue.owed
    assert wire.queue.take() == "third"
    assert not wire.queue.owed


def test_a_large_command_goes_alone() -> None:
    wire = Wire()
    wire.put(first=b"1", second=b"2", large=LARGE, behind=b"3", larger=LARGE + b"!", last=b"4")
    assert wire.sent == [b"1", b"2"]
    assert wire.queue.take() == "first"
    assert len(wire.sent) == 2, "the second is not answered yet"
    assert wire.queue.take() == "second"
    assert wire.sent[2:] == [LARGE]
    assert wire.queue.take() == "large"
    assert wire.sent[3:] == [b"3"]
    assert wire.queue.take() == "behind"
    assert wire.sent[4:] == [LARGE + b"!"]
    assert wire.queue.take() == "larger"
    assert wire.sent[5:] == [b"4"]
    assert wire.queue.take() == "last"


def test_a_command_just_below_the_limit_waits_for_nobody() -> None:
    wire = Wire()
    wire.put(first=b"1", almost=LARGE[1:])
    assert len(wire.sent) == 2


def test_a_small_command_may_be_sent_alone_too() -> None:
    wire = Wire()
    wire.put(first=b"1")
    wire.queue.put(b"2", "alone", alone=True)
    wire.put(behind=b"3")
    assert wire.sent == [b"1"]
    assert wire.queue.take() == "first"
    assert wire.sent == [b"1", b"2"]
    assert wire.queue.take() == "alone"
    assert wire.sent == [b"1", b"2", b"3"]


def test_the_load_is_what_is_not_answered() -> None:
    wire = Wire()
    wire.put(first=b"12345", large=LARGE)
    assert wire.queue.load == 5 + ALONE
    wire.queue.take()
    assert wire.queue.load == ALONE
    wire.queue.clear()
    assert wire.queue.load == 0


def test_clearing_tells_what_was_sent_from_what_was_not() -> None:
    wire = Wire()
    wire.put(first=b"1", large=LARGE, behind=b"2")
    assert wire.queue.clear() == (["first"], ["large", "behind"])
    assert wire.queue.clear() == ([], [])
    assert not wire.queue.owed
    with pytest.raises(IndexError):
        wire.queue.take()
