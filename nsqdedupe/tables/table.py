"""What a store asks of an embedded table of seen fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Table(Protocol):
    """A set of fingerprints that may forget, in this process.

    Whoever holds a table calls it from one thread at a time. Only fingerprints of messages that are done
    are added: a table knows no claims. Fingerprints are 16 bytes.
    """

    @property
    def durable(self) -> bool:
        """Whether what is added outlives the process; the same for its whole life."""

    def contains_many(self, fingerprints: Sequence[bytes], /) -> Sequence[bool]:
        """Whether each was added and is still remembered, in order. Changes nothing."""

    def add_many(self, fingerprints: Sequence[bytes], /) -> None:
        """Remember each from now on. Idempotent; the same one twice in a call is remembered once."""

    def discard_many(self, fingerprints: Sequence[bytes], /) -> None:
        """Forget each, as if it had never been added. One that is not there is no error."""

    def bind(self, hashing: str, /) -> None:
        """Say how the fingerprints are made (see `Store.bind`). `ConfigError` if those in it were made otherwise."""

    def close(self) -> None:
        """Let go of memory and files. Idempotent; no other verb may be called afterwards."""
