"""Option checks: each returns the value it was given, or raises `ConfigError` with the remedy.

Every text names the option, the value, what is accepted and what to do. Booleans are never taken for
numbers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from nsqdedupe.errors import ConfigError

_NAME = re.compile(r"[.a-zA-Z0-9_-]{1,64}(#ephemeral)?")
_LONGEST_NAME = 64
_PORT = re.compile(r"[0-9]{1,5}")


def refuse(option: str, value: object, accepted: str, remedy: str = "") -> ConfigError:
    """The error for an option: what it is, what came, what is accepted and what to do."""
    text = f"{option}={value!r}: must be {accepted}"
    return ConfigError(f"{text}; {remedy}" if remedy else text)


def integer(option: str, value: object, low: int, high: int | None = None, remedy: str = "") -> int:
    """A whole number from ``low`` to ``high`` (None: no upper bound)."""
    bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise refuse(option, value, f"a whole number {bounds}", remedy)
    return value


def number(
    option: str, value: object, low: float, high: float | None = None, *, open_low: bool = False, remedy: str = ""
) -> float:
    """A finite number from ``low`` (excluded if ``open_low``) to ``high`` (None: no upper bound)."""
    start = f"greater than {low:g}" if open_low else f"of {low:g} or more"
    bounds = start if high is None else f"{start}, {high:g} at most"
    # Compared, not converted: a whole number may be larger than any float.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise refuse(option, value, f"a number {bounds}", remedy)
    if value < low or (open_low and value == low) or (high is not None and value > high):
        raise refuse(option, value, f"a number {bounds}", remedy)
    return float(value)


def flag(option: str, value: object) -> bool:
    """True or False, and nothing that only counts as one."""
    if not isinstance(value, bool):
        raise refuse(option, value, "True or False")
    return value


def one_of(option: str, value: object, choices: Iterable[object], remedy: str = "") -> None:
    """One of the given values."""
    known = list(choices)
    if value not in known:
        raise refuse(option, value, "one of " + ", ".join(repr(choice) for choice in known), remedy)


def nsq_name(option: str, value: object) -> str:
    """A topic or channel name as nsqd takes it: 1 to 64 of ``.a-zA-Z0-9_-``, ``#ephemeral`` may follow."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or len(value) > _LONGEST_NAME:
        raise refuse(option, value, "1 to 64 characters of a-z A-Z 0-9 . _ -, and may end in #ephemeral")
    return value


def scope(option: str, value: object) -> tuple[str, str]:
    """``topic/channel``, split into the two."""
    topic, slash, channel = value.partition("/") if isinstance(value, str) else ("", "", "")
    if not slash or "/" in channel:
        raise refuse(option, value, "'topic/channel'", "for example 'events/billing'")
    return nsq_name(option, topic), nsq_name(option, channel)


def tcp_address(option: str, value: object) -> tuple[str, int]:
    """``host:port`` or ``[ipv6]:port``, split into host and port."""
    accepted = "'host:port' or '[ipv6]:port' with a port from 1 to 65535"
    if not isinstance(value, str):
        raise refuse(option, value, accepted, "give a string")
    host, colon, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise refuse(option, value, accepted, "put brackets around an IPv6 address")
    named = bool(host) and host.isprintable() and " " not in host
    if not colon or not named or not _PORT.fullmatch(port) or not 0 < int(port) < 1 << 16:
        raise refuse(option, value, accepted, "for example '127.0.0.1:4150'")
    return host, int(port)


def strings(option: str, value: object) -> list[str]:
    """A string, or a list, tuple or set of strings, as a new list. None is an empty one."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(item, str) for item in value):
        raise refuse(option, value, "a string or a list of strings")
    return list(value)
