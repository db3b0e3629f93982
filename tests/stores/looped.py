"""A store in memcached whose verbs are called by an event loop, as a reader calls them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from nsqdedupe.calls import Verb
from nsqdedupe.store import Answer, Claim, Release, Store, Traits
from nsqdedupe.stores.memcached import MemcachedStore


class Looped(Store):
    """Runs a loop of its own for each verb, until that is answered.

    Args:
        inner: whose verbs they are.
    """

    def __init__(self, inner: MemcachedStore) -> None:
        self.inner = inner
        self._loop = asyncio.new_event_loop()
        calls = inner.calls(lambda: None)
        assert calls is not None
        self._calls = calls
        self._lock = threading.Lock()

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def bind(self, hashing: str) -> None:
        self.inner.bind(hashing)

    def claim(self, claims: Sequence[Claim]) -> Sequence[Answer]:
        return self._ask(self.inner.claim, claims)

    def confirm(self, claims: Sequence[Claim]) -> Sequence[bool]:
        return self._ask(self.inner.confirm, claims)

    def release(self, releases: Sequence[Release]) -> Sequence[bool]:
        return self._ask(self.inner.release, releases)

    def extend(self, claims: Sequence[Claim]) -> Sequence[bool]:
        return self._ask(self.inner.extend, claims)

    def start(self, claims: Sequence[Claim]) -> Sequence[bool]:
        return self._ask(self.inner.start, claims)

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        self.inner.forget(fingerprints)

    def close(self) -> None:
        self.inner.close()
        self._loop.close()

    def _ask(self, verb: Verb, items: Sequence[Any]) -> Sequence[Any]:
        async def answer() -> tuple[Sequence[Any], Exception | None]:
            told = asyncio.get_running_loop().create_future()
            self._calls.submit(verb, items, lambda results, error: told.set_result((results, error)))
            async with asyncio.timeout(60):
                results: tuple[Sequence[Any], Exception | None] = await told
                return results

        with self._lock:
            results, error = self._loop.run_until_complete(answer())
        if error is not None:
            raise error
        return results
