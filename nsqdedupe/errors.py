"""Every error this package raises on purpose, in one tree under `DedupeError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class DedupeError(Exception):
    """Root of the tree: catching it catches all that nsqdedupe raises on purpose."""


class ConfigError(DedupeError, ValueError):
    """An option is of the wrong type, out of range or in conflict with another.

    Raised by constructors, before anything is started. The text names the option, the value,
    what is accepted and the remedy.
    """


class KeyExtractionError(DedupeError):
    """A message has no usable key: the field is absent, null, or of a type that is no key.

    It never reaches the application from a reader: the message is handled unprotected and counted
    in ``stats.key_errors``.
    """


class StoreError(DedupeError):
    """A store could not do what it was asked, and asking again will not help."""


class StoreUnavailable(StoreError):  # noqa: N818 - the name says the state, as in the design's error tree
    """A store did not answer (not reached, or too slow); asking later may help.

    What the call wanted and got no answer for may or may not have taken effect.

    Attributes:
        results: what was answered all the same, in the order that was asked in, None for each item that got no
            answer; None if nothing is known of any. A store of several servers loses the answers of one.
    """

    def __init__(self, message: str, *, results: Sequence[Any] | None = None) -> None:
        super().__init__(message)
        self.results = results


class PublishError(DedupeError):
    """A publish got fewer acknowledgements than it needed. Publishing the same body again is safe.

    Attributes:
        acknowledged: addresses (``host:port``) of the nsqds that answered OK.

        failed: why each other nsqd did not, by address.
    """

    def __init__(self, message: str, *, acknowledged: Sequence[str], failed: Mapping[str, str]) -> None:
        super().__init__(message)
        self.acknowledged = tuple(acknowledged)
        self.failed = dict(failed)


class FatalError(DedupeError):
    """An nsqd refuses this consumer, and will go on to until something is changed, here or there.

    Attributes:
        nsqd: its address, ``host:port``.

        code: the first word of its answer, for example ``"E_AUTH_FAILED"``; ``"TLS"`` if no agreement on TLS
            was reached.
    """

    def __init__(self, message: str, *, nsqd: str, code: str) -> None:
        super().__init__(message)
        self.nsqd = nsqd
        self.code = code


class MissingDependency(DedupeError, ImportError):  # noqa: N818 - the name users catch beside ImportError
    """An optional library is not installed; the text holds the pip extra that brings it."""
