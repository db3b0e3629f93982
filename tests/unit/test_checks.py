"""Option checks: what passes comes back, what does not is named with its value, what is accepted and a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from nsqdedupe import checks
from nsqdedupe.errors import ConfigError

Check = Callable[[Any], object]


def whole(value: object) -> int:
    return checks.integer("size", value, 1, 10, "take fewer")


def whole_unbounded(value: object) -> int:
    return checks.integer("size", value, 0)


def ratio(value: object) -> float:
    return checks.number("recall", value, 0, 1, open_low=True, remedy="take 0.99")


def seconds(value: object) -> float:
    return checks.number("lease", value, 0.5)


def address(value: object) -> tuple[str, int]:
    return checks.tcp_address("nsqd", value)


def topic(value: object) -> str:
    return checks.nsq_name("topic", value)


def switch(value: object) -> bool:
    return checks.flag("observe", value)


def addresses(value: object) -> list[str]:
    return checks.strings("addresses", value)


def mode(value: object) -> None:
    return checks.one_of("mode", value, iter(["process", "requeue"]), "see the manual")


@pytest.mark.parametrize(
    ("check", "value", "returned"),
    [
        (whole, 1, 1),
        (whole, 10, 10),
        (whole_unbounded, 0, 0),
        (whole_unbounded, 1 << 80, 1 << 80),
        (ratio, 1, 1.0),
        (ratio, 1e-9, 1e-9),
        (seconds, 0.5, 0.5),
        (seconds, 10**9, 1e9),
        (switch, True, True),
        (switch, False, False),
        (mode, "process", None),
        (mode, "requeue", None),
        (topic, "a", "a"),
        (topic, "aZ9._-", "aZ9._-"),
        (topic, "x" * 64, "x" * 64),
        (topic, "t#ephemeral", "t#ephemeral"),
        (topic, "x" * 54 + "#ephemeral", "x" * 54 + "#ephemeral"),
        (address, "127.0.0.1:4150", ("127.0.0.1", 4150)),
        (address, "nsqd.example:1", ("nsqd.example", 1)),
        (address, "[::1]:65535", ("::1", 65535)),
        (addresses, None, []),
        (addresses, "one:1", ["one:1"]),
        (addresses, "", [""]),
        (addresses, ["one:1", "two:2"], ["one:1", "two:2"]),
        (addresses, ("one:1",), ["one:1"]),
        (addresses, {"one:1"}, ["one:1"]),
        (addresses, frozenset({"one:1"}), ["one:1"]),
        (addresses, [], []),
    ],
)
def test_what_is_accepted_comes_back(check: Check, value: object, returned: object) -> None:
    result = check(value)
    assert result == returned
    assert type(result) is type(returned)


WHOLE = "must be a whole number from 1 to 10; take fewer"
RATIO = "must be a number greater than 0, 1 at most; take 0.99"
NAME = "must be 1 to 64 characters of a-z A-Z 0-9 . _ -, and may end in #ephemeral"
ADDRESS = "must be 'host:port' or '[ipv6]:port' with a port from 1 to 65535; for example '127.0.0.1:4150'"


@pytest.mark.parametrize(
    ("check", "value", "text"),
    [
        (whole, 0, f"size=0: {WHOLE}"),
        (whole, 11, f"size=11: {WHOLE}"),
        (whole, 5.0, f"size=5.0: {WHOLE}"),
        (whole, "5", f"size='5': {WHOLE}"),
        (whole, None, f"size=None: {WHOLE}"),
        (whole, True, f"size=True: {WHOLE}"),
        (whole_unbounded, -1, "size=-1: must be a whole number of 0 or more"),
        (ratio, 0, f"recall=0: {RATIO}"),
        (ratio, -0.1, f"recall=-0.1: {RATIO}"),
        (ratio, 1.1, f"recall=1.1: {RATIO}"),
        (ratio, math.nan, f"recall=nan: {RATIO}"),
        (ratio, math.inf, f"recall=inf: {RATIO}"),
        (ratio, True, f"recall=True: {RATIO}"),
        (ratio, "0.9", f"recall='0.9': {RATIO}"),
        (seconds, 0.4, "lease=0.4: must be a number of 0.5 or more"),
        (seconds, math.inf, "lease=inf: must be a number of 0.5 or more"),
        (seconds, -(10**400), f"lease={-(10**400)}: must be a number of 0.5 or more"),
        (seconds, 10**400, f"lease={10**400}: must be a number of 0.5 or more"),
        (address, "nsqd:" + "1" * 5000, f"nsqd='nsqd:{'1' * 5000}': {ADDRESS}"),
        (mode, "drop", "mode='drop': must be one of 'process', 'requeue'; see the manual"),
        (mode, None, "mode=None: must be one of 'process', 'requeue'; see the manual"),
        (topic, "", f"topic='': {NAME}"),
        (topic, "x" * 65, f"topic={'x' * 65!r}: {NAME}"),
        (topic, "x" * 55 + "#ephemeral", f"topic={'x' * 55 + '#ephemeral'!r}: {NAME}"),
        (topic, "a b", f"topic='a b': {NAME}"),
        (topic, "a\n", f"topic='a\\n': {NAME}"),
        (topic, "é", f"topic='é': {NAME}"),
        (topic, "#ephemeral", f"topic='#ephemeral': {NAME}"),
        (topic, b"a", f"topic=b'a': {NAME}"),
        (address, "localhost", f"nsqd='localhost': {ADDRESS}"),
        (address, "localhost:", f"nsqd='localhost:': {ADDRESS}"),
        (address, ":4150", f"nsqd=':4150': {ADDRESS}"),
        (address, "[]:4150", f"nsqd='[]:4150': {ADDRESS}"),
        (address, "[::1:4150", f"nsqd='[::1:4150': {ADDRESS.partition(';')[0]}; put brackets around an IPv6 address"),
        (address, "::1]:4150", f"nsqd='::1]:4150': {ADDRESS.partition(';')[0]}; put brackets around an IPv6 address"),
        (address, "localhost:0", f"nsqd='localhost:0': {ADDRESS}"),
        (address, "localhost:65536", f"nsqd='localhost:65536': {ADDRESS}"),
        (address, " localhost:1", f"nsqd=' localhost:1': {ADDRESS}"),
        (address, "local\nhost:1", f"nsqd='local\\nhost:1': {ADDRESS}"),
        (address, "\ud800:1", f"nsqd='\\ud800:1': {ADDRESS}"),
        (address, "localhost:+1", f"nsqd='localhost:+1': {ADDRESS}"),
        (address, "localhost:²", f"nsqd='localhost:²': {ADDRESS}"),
        (address, "localhost:http", f"nsqd='localhost:http': {ADDRESS}"),
        (address, "4150", f"nsqd='4150': {ADDRESS}"),
        (address, "::1:4150", f"nsqd='::1:4150': {ADDRESS.partition(';')[0]}; put brackets around an IPv6 address"),
        (address, 4150, f"nsqd=4150: {ADDRESS.partition(';')[0]}; give a string"),
        (switch, 1, "observe=1: must be True or False"),
        (switch, None, "observe=None: must be True or False"),
        (addresses, 5, "addresses=5: must be a string or a list of strings"),
        (addresses, ["one:1", 2], "addresses=['one:1', 2]: must be a string or a list of strings"),
        (addresses, b"one:1", "addresses=b'one:1': must be a string or a list of strings"),
        (addresses, {"one:1": 1}, "addresses={'one:1': 1}: must be a string or a list of strings"),
    ],
)
def test_what_is_not_accepted_is_refused_with_the_remedy(check: Check, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(value)
    assert str(caught.value) == text


def test_the_list_that_comes_back_is_a_new_one() -> None:
    given = ["one:1"]
    assert addresses(given) is not given


def test_a_refusal_is_returned_for_the_caller_to_raise() -> None:
    error = checks.refuse("copies", 0, "1 or more")
    assert isinstance(error, ConfigError)
    assert str(error) == "copies=0: must be 1 or more"


# -- scopes --------------------------------------------------------------------------------------


def test_a_scope_is_split_into_topic_and_channel() -> None:
    assert checks.scope("scope", "events/billing#ephemeral") == ("events", "billing#ephemeral")


@pytest.mark.parametrize("value", [None, 1, "events", "a/b/c"])
def test_what_is_no_scope_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.scope("scope", value)
    assert str(caught.value) == f"scope={value!r}: must be 'topic/channel'; for example 'events/billing'"


@pytest.mark.parametrize(
    ("value", "part"), [("/billing", ""), ("events/", ""), ("e vents/x", "e vents"), ("x/y z", "y z")]
)
def test_both_parts_of_a_scope_are_names(value: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"^scope={part!r}: must be 1 to 64 characters"):
        checks.scope("scope", value)
