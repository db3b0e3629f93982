"""What goes to nsqd on the wire, and when."""

from __future__ import annotations

import re

import pytest

from nsqdedupe import ConfigError
from nsqdedupe.commands import ALONE, CommandQueue, mpub, pub

LARGE = b"L" * ALONE
SECRET = "do not show"


def test_one_message_on_the_wire() -> None:
    assert pub("events", b"body") == b"PUB events\n\x00\x00\x00\x04body"


def test_many_messages_on_the_wire() -> None:
    one, three = b"\x00\x00\x00\x01a", b"\x00\x00\x00\x03bcd"
    expected = b"MPUB events#ephemeral\n" + b"\x00\x00\x00\x10" + b"\x00\x00\x00\x02" + one + three
    assert mpub("events#ephemeral", [b"a", b"bcd"]) == expected
    assert mpub("events#ephemeral", (b"a", b"bcd")) == expected


@pytest.mark.parametrize("topic", ["", "has space", "new\nline", "x" * 65, b"bytes", None, 7, "events#other", "ümlaut"])
def test_a_topic_that_nsqd_would_refuse_is_refused(topic: object) -> None:
    with pytest.raises(ConfigError, match=r"^topic="):
        pub(topic, b"body")
    with pytest.raises(ConfigError, match=r"^topic="):
        mpub(topic, [b"body"])


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
        pub("events", body)
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
        mpub("events", bodies)
    assert SECRET not in str(refused.value)


def test_a_subclass_of_bytes_is_bytes() -> None:
    class Body(bytes):
        __slots__ = ()

    assert pub("events", Body(b"body")) == pub("events", b"body")
    assert mpub("events", [Body(b"body")]) == mpub("events", [b"body"])


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


def test_clearing_tells_what_was_sent_from_what_was_not() -> None:
    wire = Wire()
    wire.put(first=b"1", large=LARGE, behind=b"2")
    assert wire.queue.clear() == (["first"], ["large", "behind"])
    assert wire.queue.clear() == ([], [])
    assert not wire.queue.owed
    with pytest.raises(IndexError):
        wire.queue.take()
