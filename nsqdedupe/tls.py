"""TLS to nsqds: pynsq's `tls_options`, with the defaults of today."""

from __future__ import annotations

import os
import ssl
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from nsqdedupe import checks
from nsqdedupe.errors import ConfigError

_KNOWN = ("ca_certs", "certfile", "keyfile", "cert_reqs", "check_hostname", "ciphers", "ssl_version")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # pynsq's users name these, because it has them in its docs
    _ANY, _ONLY_1_2 = ssl.PROTOCOL_TLS, ssl.PROTOCOL_TLSv1_2


def client_context(options: Mapping[str, Any] | None) -> ssl.SSLContext:
    """What a connection's TLS is made of. Reads the files that are named, so it blocks for a moment.

    TLS 1.2 and 1.3 are spoken. nsqd's certificate is verified, unless ``cert_reqs`` is ``ssl.CERT_NONE``.

    Args:
        options: ``ca_certs``, a file with the authorities to trust (by default the system's); ``certfile`` and
            ``keyfile``, with which this client proves who it is; ``cert_reqs``; ``check_hostname`` (False),
            whether the certificate must be for the address that was connected to; ``ciphers``, for TLS 1.2;
            ``ssl_version``: with ``ssl.PROTOCOL_TLSv1_2`` no other is spoken, with ``ssl.PROTOCOL_TLS_CLIENT``
            ``check_hostname`` is True by default.

    Raises:
        ConfigError: one is unknown or of the wrong type, in conflict with another, or names no file that
            will do.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    for name in given:
        checks.one_of("tls_options", name, _KNOWN)
    version = given.get("ssl_version", _ANY)
    if version not in (_ANY, _ONLY_1_2, ssl.PROTOCOL_TLS_CLIENT):
        raise _refuse("ssl_version", version, "ssl.PROTOCOL_TLS_CLIENT or ssl.PROTOCOL_TLSv1_2", "leave it out")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if version == _ONLY_1_2:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    _verify(context, given, by_default=version == ssl.PROTOCOL_TLS_CLIENT)
    if "keyfile" in given and "certfile" not in given:
        raise _refuse("keyfile", given["keyfile"], "with certfile", "name the file of its certificate")
    if "certfile" in given:
        certificate = _path("certfile", given["certfile"])
        key = _path("keyfile", given["keyfile"]) if "keyfile" in given else None
        what = f"certfile={certificate!r}" + (f", keyfile={key!r}" if key else "")
        accepted = "a certificate and its key, unencrypted, in PEM files that can be read"
        _load(what, accepted, lambda: context.load_cert_chain(certificate, key, password=_ask_nobody))
    if "ciphers" in given:
        _load(
            f"ciphers={given['ciphers']!r}", "a cipher list of OpenSSL", lambda: context.set_ciphers(given["ciphers"])
        )
    return context


def _verify(context: ssl.SSLContext, given: Mapping[str, Any], *, by_default: bool) -> None:
    """Set what is verified of nsqd's certificate."""
    needed = given.get("cert_reqs", ssl.CERT_REQUIRED)
    if isinstance(needed, bool) or needed not in list(ssl.VerifyMode):
        raise _refuse("cert_reqs", needed, "ssl.CERT_REQUIRED or ssl.CERT_NONE")
    trusting = needed == ssl.CERT_NONE
    by_name = checks.flag("tls_options: check_hostname", given.get("check_hostname", by_default and not trusting))
    if by_name and trusting:
        raise ConfigError(
            "tls_options: check_hostname=True and cert_reqs=ssl.CERT_NONE: a certificate that is not verified "
            "proves no name; leave one of them out"
        )
    context.check_hostname = by_name
    context.verify_mode = ssl.VerifyMode(needed)
    if "ca_certs" in given:
        path = _path("ca_certs", given["ca_certs"])
        accepted = "a PEM file of certificates that can be read"
        _load(f"ca_certs={path!r}", accepted, lambda: context.load_verify_locations(path))
    elif not trusting:
        context.load_default_certs()


def _path(name: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise _refuse(name, value, "the path of a file")
    return os.fsdecode(value)


def _load(what: str, accepted: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ValueError, TypeError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"tls_options: {what}: must be {accepted}; {why}") from error


def _ask_nobody() -> str:
    """Else OpenSSL would ask at the terminal, and wait."""
    raise ValueError("the key is encrypted")


def _refuse(name: str, value: object, accepted: str, remedy: str = "") -> ConfigError:
    return checks.refuse(f"tls_options: {name}", value, accepted, remedy)
