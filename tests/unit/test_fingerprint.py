"""Fingerprints: what goes into them, what is refused as a key, and that nothing runs together."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mmh3 import mmh3_x64_128_digest

from nsqdedupe import sizing
from nsqdedupe.errors import ConfigError, KeyExtractionError
from nsqdedupe.fingerprint import (
    BODY,
    Message,
    bodies_fingerprinter,
    fingerprinter,
    hashing_of,
    json_field,
    key_hasher,
    kind_of,
)
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter

SECRET = b"k" * 32


def message(body: bytes) -> Message:
    return SimpleNamespace(body=body)


def of(key: Callable[[Message], bytes | str], body: bytes, secret: bytes | None = None) -> bytes:
    return fingerprinter("events", "billing", key, secret)(message(body))


@pytest.mark.parametrize(
    ("kind", "key", "secret", "expected"),
    [
        ("BODY", b"hello", None, "adf65ae227f47f9f6e5e51e937b504e7"),
        ("json:context.id", b"42", None, "acc3f934b7294198cef92c4ae5ac98e2"),
        ("callable", b"", None, "49d4a8573ab7c68a21edb5891c4aa553"),
        ("BODY", b"hello", SECRET, "f881722728a7c1aa44b655e4bfe7df4c"),
        ("json:context.id", b"42", SECRET, "5c8a484236de3060ebb78a4f3393a1a7"),
        ("callable", b"", SECRET, "e591fd35f4fa07480e2a55679836e270"),
    ],
)
def test_fingerprints_are_the_same_in_every_release(kind: str, key: bytes, secret: bytes | None, expected: str) -> None:
    """A change would make strangers of all messages that tables and servers remember."""
    assert key_hasher("events", "billing", kind, secret)(key).hex() == expected


def test_scope_and_kind_fill_whole_blocks_before_the_key() -> None:
    scope = b"\6\0\0\0events" + b"\7\0\0\0billing" + b"\4\0\0\0BODY"
    blocks = scope + bytes(3)
    assert len(blocks) == 32
    assert of(BODY, b"hello") == mmh3_x64_128_digest(blocks + b"hello")
    assert of(BODY, b"hello", SECRET) == blake2b(blocks + b"hello", key=SECRET, digest_size=16).digest()


scopes = st.tuples(*[st.text("ab.", min_size=1, max_size=6)] * 2, st.sampled_from(["BODY", "callable", "json:a"]))
keys = st.binary(max_size=40)


@given(one=st.tuples(scopes, keys), other=st.tuples(scopes, keys), secret=st.sampled_from([None, SECRET]))
def test_only_the_same_scope_kind_and_key_give_the_same_fingerprint(
    one: tuple[tuple[str, str, str], bytes], other: tuple[tuple[str, str, str], bytes], secret: bytes | None
) -> None:
    first, second = (key_hasher(*scope, secret)(key) for scope, key in (one, other))
    assert len(first) == 16
    assert (first == second) == (one == other)


def test_nothing_runs_together_where_names_and_keys_meet() -> None:
    meeting = [
        (("ab", "c", "BODY"), b"x"),
        (("a", "bc", "BODY"), b"x"),
        (("ab", "c", "json:x"), b"x"),
        (("ab", "c", "json:"), b"xx"),
        (("ab", "c", "BODY"), b"x\0"),
        (("ab", "c", "BODY"), b"\0x"),
        (("ab", "c", "BODY"), b"BODYx"),
        (("ab", "c#ephemeral", "BODY"), b"x"),
    ]
    assert len({key_hasher(*scope)(key) for scope, key in meeting}) == len(meeting)


def test_equal_bodies_are_one_message_per_topic_and_channel() -> None:
    one, again = (fingerprinter("events", "billing", BODY) for _ in range(2))
    assert one(message(b"paid")) == again(message(b"paid"))
    assert one(message(b"paid")) != one(message(b"paid "))
    assert one(message(b"paid")) != fingerprinter("events", "audit", BODY)(message(b"paid"))
    assert one(message(b"paid")) != fingerprinter("others", "billing", BODY)(message(b"paid"))


def test_a_secret_changes_every_fingerprint() -> None:
    assert len({of(BODY, b"paid"), of(BODY, b"paid", b"one"), of(BODY, b"paid", b"two")}) == 3
    assert of(BODY, b"paid", b"one") == of(BODY, b"paid", b"one")


def test_how_fingerprints_are_made_is_told_without_the_secret() -> None:
    """Kept in files: a change would have every release refuse those of the one before."""
    assert hashing_of(None) == "mmh3-x64-128"
    assert hashing_of(SECRET) == "blake2b-128 key bb24574b156b938b"
    assert len({hashing_of(None), hashing_of(b"one"), hashing_of(b"two")}) == 3
    assert max(len(hashing_of(secret)) for secret in (b"x", b"x" * 64)) <= 64


def test_keys_say_what_they_are() -> None:
    def by_size(message: Message) -> str:
        return str(len(message.body))

    assert repr(BODY) == "nsqdedupe.BODY"
    assert repr(json_field("context.id")) == "nsqdedupe.json_field('context.id')"
    assert [kind_of(key) for key in (BODY, json_field("context.id"), by_size)] == [
        "BODY",
        "json:context.id",
        "callable",
    ]
    assert BODY(message(b"paid")) == b"paid"
    assert of(BODY, b"paid") != of(lambda message: message.body, b"paid")


def asynchronous_key() -> object:
    async def asynchronous(message: Message) -> bytes:
        return message.body

    return asynchronous


@pytest.mark.parametrize("key", [None, "messageId", b"id", 5, json_field, asynchronous_key()])
def test_a_key_is_asked_for_and_the_three_choices_are_named(key: Callable[[Message], bytes] | None) -> None:
    with pytest.raises(ConfigError) as caught:
        fingerprinter("events", "billing", key)
    for choice in ("nsqdedupe.BODY", 'nsqdedupe.json_field("messageId")', "a function that is given the message"):
        assert choice in str(caught.value)


@pytest.mark.parametrize(
    ("secret", "what"), [(b"", "0"), (b"s" * 65, "65"), ("hush-hush", "str"), (bytearray(b"hush-hush"), "bytearray")]
)
def test_a_secret_of_the_wrong_form_is_refused_and_not_shown(secret: bytes, what: str) -> None:
    with pytest.raises(ConfigError, match=f"secret: must be 1 to 64 bytes, not {what}$") as caught:
        fingerprinter("events", "billing", BODY, secret)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(("topic", "channel", "text"), [("", "c", "topic=''"), ("t", "a b", "channel='a b'")])
def test_names_that_nsqd_would_refuse_are_refused(topic: str, channel: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fingerprinter(topic, channel, BODY)


def test_a_key_function_returns_bytes_or_str() -> None:
    by_prefix = fingerprinter("events", "billing", lambda message: message.body[:4])
    by_text = fingerprinter("events", "billing", lambda message: message.body[:2].decode())
    assert by_prefix(message(b"\xc3\xa9ab-1")) == by_prefix(message(b"\xc3\xa9ab-2"))
    assert by_prefix(message(b"\xc3\xa9cd-1")) != by_prefix(message(b"\xc3\xa9ab-1"))
    assert by_text(message(b"\xc3\xa9!")) == of(lambda message: message.body[:2], b"\xc3\xa9!")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "what the key function returned is of type NoneType; a key is bytes or str"),
        (17, "is of type int"),
        (bytearray(b"hush"), "is of type bytearray"),
        (b"", "what the key function returned is empty"),
        ("", "is empty"),
        ("hush\ud800", "has half a surrogate pair at character 4"),
    ],
)
def test_what_a_key_function_must_not_return(returned: bytes, text: str) -> None:
    with pytest.raises(KeyExtractionError, match=text) as caught:
        of(lambda _: returned, b"body")
    assert "hush" not in str(caught.value)


def test_a_failing_key_function_is_a_key_error_with_its_cause() -> None:
    cause = ValueError("hush")

    def failing(message: Message) -> bytes:
        raise cause

    with pytest.raises(KeyExtractionError, match=r"^the key function raised ValueError$") as caught:
        of(failing, b"body")
    assert caught.value.__cause__ is cause


def test_a_key_functions_own_key_error_and_an_interrupt_pass_as_they_are() -> None:
    refusal = KeyExtractionError("no id in version 1")

    def refusing(message: Message) -> bytes:
        raise refusal if message.body == b"1" else KeyboardInterrupt

    with pytest.raises(KeyExtractionError) as caught:
        of(refusing, b"1")
    assert caught.value is refusal
    with pytest.raises(KeyboardInterrupt):
        of(refusing, b"2")


def test_a_field_may_be_part_of_a_users_own_key() -> None:
    tenant, number = json_field("tenant"), json_field("n")
    both = fingerprinter("events", "billing", lambda m: tenant(m) + b"/" + number(m))
    assert both(message(b'{"tenant":"a","n":1}')) == of(lambda _: "a/1", b"x")
    with pytest.raises(KeyExtractionError, match="field 'n' is absent"):
        both(message(b'{"tenant":"a"}'))


def test_a_field_is_the_same_key_whatever_stands_around_it() -> None:
    field = json_field("id")
    assert of(field, b'{"id":"a","at":1}') == of(field, b'{"at":2, "id": "a"}')
    assert of(field, b'{"id":"a"}') != of(field, b'{"id":"b"}')
    assert of(field, b'{"id":"a"}') != of(json_field("id.id"), b'{"id":{"id":"a"}}')
    assert of(field, b'{"id":7}') == of(field, b'{"id":"7"}')
    assert of(field, b'{"id":"a"}', SECRET) == key_hasher("events", "billing", "json:id", SECRET)(b"a")


BODIES: dict[str, Callable[[int], bytes]] = {
    "counters in JSON": lambda n: b'{"id":%d}' % n,
    "bare counters": lambda n: b"%d" % n,
    "three bytes": lambda n: n.to_bytes(3, "big"),
    "front differs": lambda n: n.to_bytes(3, "little") + b"x" * 200,
    "end differs": lambda n: b"x" * 200 + n.to_bytes(3, "big"),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("secret", [None, SECRET], ids=["murmur3", "blake2b"])
def test_bodies_that_look_alike_are_remembered_as_well_as_random_ones(
    body: Callable[[int], bytes], secret: bytes | None
) -> None:
    """A checksum such as Adler-32 puts 100,000 counters on 2,791 values: recall would be next to nothing."""
    window, step = 20_000, 100
    digest = fingerprinter("events", "billing", BODY, secret)
    fingerprints = [digest(message(body(number))) for number in range(2 * window)]
    table = OppositeBloomFilter(sizing.slots_for(window, 0.9))
    assert not any(table.check_and_set_many(fingerprints))
    ages = range(0, 2 * window, step)
    expected = sum(sizing.recall_of(table.slots, table.ways, age) for age in ages) / len(ages)
    assert sum(table.contains_many(fingerprints)) / len(fingerprints) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("secret", [None, b"hush"])
@pytest.mark.parametrize("key", [BODY, json_field("id")])
def test_bodies_in_one_go_have_the_fingerprints_of_their_messages(key: Any, secret: bytes | None) -> None:
    bodies = [b'{"id": "%d"}' % number for number in range(3)]
    one = fingerprinter("events", "billing", key, secret)
    many = bodies_fingerprinter("events", "billing", key, secret)
    assert many is not None
    assert many(bodies) == [one(SimpleNamespace(body=body)) for body in bodies]


def test_one_body_without_a_key_keeps_the_others_from_going_in_one_go() -> None:
    many = bodies_fingerprinter("events", "billing", json_field("id"))
    assert many is not None
    with pytest.raises(KeyExtractionError):
        many([b'{"id": "1"}', b"no json"])


def test_a_key_function_is_asked_message_by_message() -> None:
    assert bodies_fingerprinter("events", "billing", lambda message: message.body) is None
