"""The options of `DedupeReader`: each checked before anything is started, those of `nsq.Reader` as well.

pynsq checks with ``assert``, partly late and not at all under ``python -O``. Every option passes; what
pynsq would reject later, or nsqd would, is rejected here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import nsq.conn

from nsqdedupe import checks
from nsqdedupe.errors import ConfigError, MissingDependency
from nsqdedupe.tls import client_context

logger = logging.getLogger(__name__)

_WEEK = 7 * 24 * 3600
_MB = 1 << 20


def _whole(low: int, high: int | None = None) -> Callable[[str, object], object]:
    return lambda option, value: checks.integer(option, value, low, high)


def _real(low: float, high: float | None = None, *, open_low: bool = False) -> Callable[[str, object], object]:
    return lambda option, value: checks.number(option, value, low, high, open_low=open_low)


def _text(option: str, value: object) -> object:
    if not isinstance(value, str):
        raise checks.refuse(option, value, "a string")
    return value


def _secret(option: str, value: object) -> object:
    if value is not None and not isinstance(value, str | bytes):
        raise checks.refuse(option, "...", "a string or bytes")
    return value


def _name(option: str, value: object) -> object:
    return None if value is None else _text(option, value)


def _handler(option: str, value: object) -> object:
    if value is not None and not callable(value):
        raise checks.refuse(option, value, "callable with one argument, the message")
    return value


def _tls_options(option: str, value: object) -> object:
    if value is not None and not isinstance(value, dict):
        raise checks.refuse(option, value, "a dict", "for example {'ca_certs': '/etc/ssl/nsqd.pem'}")
    return value


def _buffer_size(option: str, value: object) -> object:
    checks.integer(option, value, 0, 64 * _MB)
    if 0 < value < 64:  # type: ignore[operator]  # noqa: PLR2004 - nsqd's own minimum
        raise checks.refuse(option, value, "0 (nsqd's default) or 64 bytes or more", "nsqd refuses less")
    return value


def _buffer_timeout(option: str, value: object) -> object:
    checks.integer(option, value, 0)
    if 0 < value < 25:  # type: ignore[operator]  # noqa: PLR2004 - nsqd's own minimum
        raise checks.refuse(option, value, "0 (nsqd's default) or 25 milliseconds or more", "nsqd refuses less")
    return value


def _timeout(option: str, value: object) -> object:
    return float(checks.number(option, value, 0, open_low=True))


def _msg_timeout(option: str, value: object) -> object:
    if value is None:
        return None
    return checks.number(option, value, 1, _WEEK, remedy="nsqd refuses less than a second; None: nsqd's default")


def _direct(option: str, value: object) -> object:
    addresses = checks.strings(option, value)
    for address in addresses:
        checks.tcp_address(option, address)
    return addresses


def _lookupds(option: str, value: object) -> object:
    addresses = checks.strings(option, value)
    for address in addresses:
        try:
            parts = urlsplit(address if "://" in address else f"http://{address}")
            named = bool(parts.hostname) and parts.port != 0 and parts.scheme in ("http", "https")
        except ValueError:  # brackets that match nothing, a port that is none
            named = False
        if not named:
            raise checks.refuse(option, address, "'host:port' or an http URL", "for example '127.0.0.1:4161'")
    return addresses


CHECKS: Mapping[str, Callable[[str, object], object]] = {
    "topic": checks.nsq_name,
    "channel": checks.nsq_name,
    "message_handler": _handler,
    "name": _name,
    "nsqd_tcp_addresses": _direct,
    "lookupd_http_addresses": _lookupds,
    "max_tries": _whole(0),
    "max_in_flight": _whole(1),
    "lookupd_poll_interval": _whole(1),
    "low_rdy_idle_timeout": _real(0),
    "max_backoff_duration": _real(0, open_low=True),
    "lookupd_poll_jitter": _real(0, 1),
    "lookupd_connect_timeout": _whole(1),
    "lookupd_request_timeout": _whole(1),
    # passed on to nsq.AsyncConn
    "timeout": _timeout,
    "heartbeat_interval": _whole(1),
    "requeue_delay": _whole(0),
    "tls_v1": checks.flag,
    "tls_options": _tls_options,
    "snappy": checks.flag,
    "deflate": checks.flag,
    "deflate_level": _whole(1, 9),
    "user_agent": _text,
    "output_buffer_size": _buffer_size,
    "output_buffer_timeout": _buffer_timeout,
    "sample_rate": _whole(0, 99),
    "auth_secret": _secret,
    "msg_timeout": _msg_timeout,
    "hostname": _name,
}


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check what `nsq.Reader` takes; returns the same options in the types that it wants.

    Raises:
        ConfigError: one is unknown, of the wrong type, out of range or in conflict with another.

        MissingDependency: ``snappy`` is asked for, and its library is not installed.
    """
    unknown = sorted(set(options) - set(CHECKS))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}: known are {', '.join(CHECKS)}")
    checked = {option: CHECKS[option](option, value) for option, value in options.items()}
    if not checked.get("nsqd_tcp_addresses") and not checked.get("lookupd_http_addresses"):
        raise ConfigError(
            "nsqd_tcp_addresses and lookupd_http_addresses are both empty: give one, "
            "for example lookupd_http_addresses=['127.0.0.1:4161']"
        )
    if checked.get("snappy") and checked.get("deflate"):
        raise ConfigError("snappy=True and deflate=True: nsqd compresses one way at a time; choose one")
    if checked.get("snappy") and nsq.conn.SnappySocket is None:
        raise MissingDependency("snappy=True: needs python-snappy; pip install python-snappy")
    if checked.get("tls_v1"):
        client_context(options.get("tls_options"))  # it is made anew for each connection, but errors are told now
    elif checked.get("tls_options"):
        # Not refused: pynsq takes them, and programs in production have them.
        logger.warning("tls_options without tls_v1=True have no effect: connections are not encrypted")
    return checked
