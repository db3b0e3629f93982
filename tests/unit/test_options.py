"""Every option of `DedupeReader` is checked before anything is started, and the error says what is wrong."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from pathlib import Path
from typing import Any

import nsq
import pytest

import nsqdedupe.connection
from nsqdedupe import BODY, ConfigError, DedupeReader, MemoryStore, MissingDependency, json_field
from nsqdedupe.fingerprint import hashing_of
from nsqdedupe.options import CHECKS, check_options
from nsqdedupe.reader import live_readers

GOOD: dict[str, Any] = {
    "topic": "events",
    "channel": "billing",
    "message_handler": bool,
    "nsqd_tcp_addresses": ["127.0.0.1:4150"],
    "key": BODY,
}

NOT_WHOLE = (None, True, 1.0, "1")
NOT_NUMBERS = (None, True, "1", math.nan, math.inf)
NOT_FLAGS = (None, 0, 1, "yes")
NOT_TEXT = (None, 1, b"text")
NOT_NAMES = (None, 1, b"name", "", "with space", "a" * 65, "x#ephemeral#ephemeral", "ünïcode")
NOT_LISTS = (1, b"127.0.0.1:4150", [1], {"127.0.0.1:4150": 1})

WRONG: dict[str, tuple[object, ...]] = {
    "topic": NOT_NAMES,
    "channel": NOT_NAMES,
    "message_handler": (1, "handle"),
    "name": (1, b"name"),
    "nsqd_tcp_addresses": (
        *NOT_LISTS,
        *("127.0.0.1", "127.0.0.1:", ":4150", "127.0.0.1:port", "127.0.0.1:0", "127.0.0.1:65536", "::1:4150"),
        ["127.0.0.1:4150", "nowhere"],
    ),
    "lookupd_http_addresses": (*NOT_LISTS, "", "127.0.0.1:port", "127.0.0.1:0", "[::1:4161", "ftp://a:4161", "http://"),
    "max_tries": (*NOT_WHOLE, -1),
    "max_in_flight": (*NOT_WHOLE, 0, -1),
    "lookupd_poll_interval": (*NOT_WHOLE, 0),
    "low_rdy_idle_timeout": (*NOT_NUMBERS, -0.1),
    "max_backoff_duration": (*NOT_NUMBERS, 0, -1),
    "lookupd_poll_jitter": (*NOT_NUMBERS, -0.1, 1.1),
    "lookupd_connect_timeout": (*NOT_WHOLE, 0),
    "lookupd_request_timeout": (*NOT_WHOLE, 0),
    "timeout": (*NOT_NUMBERS, 0, -1),
    "heartbeat_interval": (*NOT_WHOLE, 0),
    "requeue_delay": (*NOT_WHOLE, -1),
    "tls_v1": NOT_FLAGS,
    "tls_options": (1, "ca.pem", [("ca_certs", "ca.pem")]),
    "snappy": NOT_FLAGS,
    "deflate": NOT_FLAGS,
    "deflate_level": (*NOT_WHOLE, 0, 10),
    "user_agent": NOT_TEXT,
    "output_buffer_size": (*NOT_WHOLE, -1, 1, 63, (64 << 20) + 1),
    "output_buffer_timeout": (*NOT_WHOLE, -1, 1, 24),
    "sample_rate": (*NOT_WHOLE, -1, 100),
    "auth_secret": (31337, ["secret"]),
    "msg_timeout": (True, "60", math.nan, 0, 0.9, -1, 7 * 24 * 3600 + 1),
    "hostname": (1, b"host"),
    "key": (None, 1, "BODY", json_field),
    "store": (1, True, "memory://", MemoryStore),
    "secret": (31337, "secret text", b"", b"x" * 65),
    "on_store_error": (None, "ignore", ["process"]),
    "observe": NOT_FLAGS,
}

RIGHT: dict[str, tuple[object, ...]] = {
    "topic": ("a", "A.b-c_9", "x" * 64, "x#ephemeral"),
    "message_handler": (None, len),
    "name": (None, "a name"),
    "nsqd_tcp_addresses": (
        "127.0.0.1:4150",
        ("[::1]:4150", "localhost:1"),
        {"a:65535"},
        frozenset({"a:1"}),
    ),
    "lookupd_http_addresses": (None, "127.0.0.1:4161", ("http://a:4161/path",), {"b"}, "[::1]:4161", "https://a?x=y"),
    "max_tries": (0, 1, 10**6),
    "max_in_flight": (1, 10**6),
    "low_rdy_idle_timeout": (0, 0.5, 10),
    "max_backoff_duration": (0.1, 3600),
    "lookupd_poll_jitter": (0, 1, 0.5),
    "timeout": (1, 0.5),
    "requeue_delay": (0, 90),
    "tls_options": (None, {}),
    "deflate_level": (1, 9),
    "output_buffer_size": (0, 64, 64 << 20),
    "output_buffer_timeout": (0, 25, 250),
    "sample_rate": (0, 99),
    "auth_secret": (None, "secret", b"secret", ""),
    "msg_timeout": (None, 1, 1.5, 7 * 24 * 3600),
    "hostname": (None, "host"),
    "key": (BODY, json_field("a.b"), lambda message: message.body),
    "store": (None, False, MemoryStore(window=10)),
    "secret": (None, b"x", b"x" * 64),
    "on_store_error": ("process", "requeue"),
}


def cases(table: dict[str, tuple[object, ...]]) -> list[Any]:
    """Every value of every option, named alike in every process."""
    return [
        pytest.param(option, value, id=f"{option}-{number}-{type(value).__name__}")
        for option, values in table.items()
        for number, value in enumerate(values)
    ]


def build(**options: Any) -> None:
    """Construct a reader on a running loop, as applications do, and close it before it starts."""

    async def main() -> None:
        before = len(asyncio.all_tasks()), len(live_readers())
        try:
            DedupeReader(**{**GOOD, **options}).close()
        finally:
            assert (len(asyncio.all_tasks()), len(live_readers())) == before, "something was started"

    asyncio.run(main())


def refused(option: str, **options: Any) -> str:
    """The text with which it is refused."""
    with pytest.raises(ConfigError, match=re.escape(option)) as caught:
        build(**options)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(("option", "value"), cases(WRONG))
def test_a_wrong_value_is_refused_by_name(option: str, value: object) -> None:
    text = refused(option, **{option: value})
    if option in ("auth_secret", "secret"):
        assert repr(value) not in text, "a secret is not for logs"
    elif isinstance(value, list) and option == "nsqd_tcp_addresses":
        assert repr(value[-1]) in text
    else:
        assert repr(value) in text


@pytest.mark.parametrize(("option", "value"), cases(RIGHT))
def test_a_value_at_the_edge_is_taken(option: str, value: object) -> None:
    build(**{option: value})


CONTRADICTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no address": (
        {"nsqd_tcp_addresses": None},
        ["nsqd_tcp_addresses", "lookupd_http_addresses", "127.0.0.1:4161"],
    ),
    "empty addresses": ({"nsqd_tcp_addresses": [], "lookupd_http_addresses": ()}, ["nsqd_tcp_addresses"]),
    "two compressions": ({"snappy": True, "deflate": True}, ["snappy=True", "deflate=True"]),
    "nothing to look at": ({"observe": True, "store": False}, ["observe=True", "store=False"]),
}


@pytest.mark.parametrize(("options", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: list[str]) -> None:
    text = refused(words[0], **options)
    for word in words:
        assert word in text


def test_readers_of_one_store_need_one_secret(tmp_path: Path) -> None:
    """In a file, also the readers of the next process. Topics, channels and keys may differ."""
    for path in (None, tmp_path / "seen.table"):
        store = MemoryStore(window=10, path=path)
        build(store=store, secret=b"one")
        build(store=store, secret=b"one", topic="other", key=json_field("id"))
        for secret in (None, b"another"):
            text = refused("its fingerprints are made with blake2b-128 key ", store=store, secret=secret)
            assert f"not with {hashing_of(secret)}" in text
            assert "b'another'" not in text
        store.close()
    reopened = MemoryStore(window=10, path=tmp_path / "seen.table")
    build(store=reopened, secret=b"one")
    assert "mmh3-x64-128" in refused("seen.table", store=reopened)
    reopened.close()


@pytest.mark.parametrize("switch", [{}, {"tls_v1": False}], ids=["left out", "off"])
def test_options_of_tls_without_tls_are_told_of(switch: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    build(tls_options={"ca_certs": "ca.pem"}, **switch)
    assert "not encrypted" in caplog.text


def test_an_unknown_option_is_refused_and_the_known_ones_are_told() -> None:
    text = refused("max_inflight", max_inflight=5)
    assert "max_in_flight" in text
    assert "heartbeat_interval" in text


def test_a_required_option_is_not_forgotten() -> None:
    with pytest.raises(TypeError, match="channel"):
        build_without("channel")
    assert "key=None" in refused("key", key=None)


def build_without(option: str) -> None:
    async def main() -> None:
        DedupeReader(**{name: value for name, value in GOOD.items() if name != option})

    asyncio.run(main())


def test_without_a_store_no_key_is_needed() -> None:
    build(key=None, store=False)


def test_every_option_of_pynsq_is_known() -> None:
    """Those of the Reader by name and place, those of the connection that it passes on."""
    stock = list(inspect.signature(nsq.Reader.__init__).parameters.values())
    ours = inspect.signature(DedupeReader.__init__).parameters
    positional = [parameter for parameter in stock if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == [parameter.name for parameter in positional]
    for parameter in positional:
        assert ours[parameter.name].default == parameter.default, parameter.name
    connection = set(inspect.signature(nsq.AsyncConn.__init__).parameters) - {"self", "host", "port"}
    assert set(CHECKS) == {parameter.name for parameter in positional} - {"self"} | connection


def test_every_check_has_a_wrong_value_here() -> None:
    own = {"key", "store", "secret", "on_store_error", "observe"}
    assert set(WRONG) == set(CHECKS) | own


def test_types_are_those_that_pynsq_insists_on() -> None:
    """It asserts them, partly for each connection only; the caller's list is left as it is."""
    addresses = [f"127.0.0.1:{port}" for port in range(4161, 4191)]
    before = list(addresses)
    checked = check_options({"lookupd_http_addresses": addresses, "timeout": 1, "lookupd_poll_jitter": 0})
    assert checked["lookupd_http_addresses"] == before
    assert checked["lookupd_http_addresses"] is not addresses
    assert isinstance(checked["timeout"], float)
    assert isinstance(checked["lookupd_poll_jitter"], float)
    build(lookupd_http_addresses=addresses)
    assert addresses == before


def test_a_pynsq_that_lacks_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {nsq.AsyncConn: ("send", "no_such_thing"), nsq.Reader: ("_gone",)}
    monkeypatch.setattr(nsqdedupe.connection, "_USED", used)
    with pytest.raises(MissingDependency, match=r"AsyncConn\.no_such_thing, Reader\._gone.*pynsq>=0\.9,<0\.10"):
        build()


def test_snappy_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each connection would break in the middle of its negotiation."""
    monkeypatch.setattr("nsq.conn.SnappySocket", None)
    with pytest.raises(MissingDependency, match="snappy=True: needs python-snappy; pip install python-snappy"):
        build(snappy=True)
    build(snappy=False, deflate=True)
