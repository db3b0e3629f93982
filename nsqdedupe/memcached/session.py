"""The verbs of a store in memcached as steps, over connections of their own: see `Servers.drive` for steps.

A session is used by one thread, or one event loop. The sessions of a store have their connections and their claims to
themselves, and have in common what the process knows: which servers are away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from nsqdedupe.errors import StoreUnavailable
from nsqdedupe.memcached.claiming import Claiming
from nsqdedupe.memcached.confirming import Confirming, Forgetting
from nsqdedupe.memcached.damage import Damage
from nsqdedupe.memcached.held import Holdings
from nsqdedupe.memcached.items import FREE, Item, hold_ttl, lease_ttl
from nsqdedupe.memcached.servers import Servers, Steps
from nsqdedupe.memcached.swapping import Swapping
from nsqdedupe.store import Answer, Claim, Release

PIPELINE = 1000
"""Claims in one pipeline at most."""

TLS_PIPELINE = 20
"""The same over TLS. memcached reads 16 kB at a time, and if that ends within a record of TLS, it does not look at the
rest before more comes (seen with 1.6.18): a longer pipeline waits for its timeout now and then."""

T = TypeVar("T")
U = TypeVar("U")


class Session:
    """One thread's, or one event loop's, way to ask.

    Every verb ends with its results, or with `StoreUnavailable`, which has those that there are.

    Args:
        servers: whom to ask.

        damage: is told of values that are not ours.

        tls: whether the connections are made by TLS.
    """

    def __init__(self, servers: Servers, damage: Damage, *, tls: bool) -> None:
        self.servers = servers
        self.held = Holdings()
        self._damage = damage
        self._pipeline = TLS_PIPELINE if tls else PIPELINE

    def claim(self, claims: Sequence[Claim]) -> Steps[Sequence[Answer]]:
        """See `Store.claim`."""

        def ask(batch: Sequence[Claim]) -> Steps[list[Answer | None]]:
            return Claiming(self.servers, self.held, self._damage, batch).steps()

        results = yield from self._parts(ask, claims)
        return self._known("claim", results)

    def confirm(self, claims: Sequence[Claim]) -> Steps[Sequence[bool]]:
        """See `Store.confirm`."""

        def ask(batch: Sequence[Claim]) -> Steps[list[bool | None]]:
            return Confirming(self.servers, self.held, self._damage, batch).steps()

        results = yield from self._parts(ask, claims)
        return self._known("confirm", results)

    def release(self, releases: Sequence[Release]) -> Steps[Sequence[bool]]:
        """See `Store.release`."""

        def ask(batch: Sequence[Release]) -> Steps[list[bool | None]]:
            def given_back(position: int, item: Item) -> Item:
                return item._replace(kind=FREE, tries=item.tries + batch[position].failed, started=0)

            ttls = [hold_ttl(release.hold) for release in batch]
            return self._swap([release.claim for release in batch], given_back, ttls, lasting=False)

        results = yield from self._parts(ask, releases)
        return self._known("release", results)

    def extend(self, claims: Sequence[Claim]) -> Steps[Sequence[bool]]:
        """See `Store.extend`."""

        def ask(batch: Sequence[Claim]) -> Steps[list[bool | None]]:
            ttls = [lease_ttl("lease", claim.lease) for claim in batch]
            return self._swap(batch, lambda _, item: item, ttls, lasting=True)

        results = yield from self._parts(ask, claims)
        return self._known("extend", results)

    def start(self, claims: Sequence[Claim]) -> Steps[Sequence[bool]]:
        """See `Store.start`."""

        def ask(batch: Sequence[Claim]) -> Steps[list[bool | None]]:
            ttls = [lease_ttl("lease", claim.lease) for claim in batch]
            return self._swap(batch, lambda _, item: item._replace(started=1), ttls, lasting=True)

        results = yield from self._parts(ask, claims)
        return self._known("start", results)

    def forget(self, fingerprints: Sequence[bytes]) -> Steps[None]:
        """See `Store.forget`."""
        left = 0
        for start in range(0, len(fingerprints), self._pipeline):
            batch = fingerprints[start : start + self._pipeline]
            left += yield from Forgetting(self.servers, self.held, self._damage, batch).steps()
        if left:
            troubles = self.servers.troubles()
            raise StoreUnavailable(f"forget: {left} of {len(fingerprints)} not forgotten: {troubles}")

    def forgotten(self, fingerprints: Iterable[bytes]) -> None:
        """Another session forgets these: nothing is held of them any more."""
        for fingerprint in fingerprints:
            self.held.forget(fingerprint)

    def _swap(
        self, claims: Sequence[Claim], change: Callable[[int, Item], Item], ttls: Sequence[bytes], *, lasting: bool
    ) -> Steps[list[bool | None]]:
        return Swapping(self.servers, self.held, claims, change, ttls, lasting=lasting).steps()

    def _parts(self, ask: Callable[[Sequence[U]], Steps[list[T | None]]], items: Sequence[U]) -> Steps[list[T | None]]:
        """The answers to all items, asked in pipelines of bounded length."""
        results: list[T | None] = []
        for start in range(0, len(items), self._pipeline):
            results += yield from ask(items[start : start + self._pipeline])
        self.held.trim()
        return results

    def _known(self, verb: str, results: list[T | None]) -> list[T]:
        """The same, if all are there."""
        known = [result for result in results if result is not None]
        if len(known) == len(results):
            return known
        raise StoreUnavailable(
            f"{verb}: {len(results) - len(known)} of {len(results)} without an answer: {self.servers.troubles()}",
            results=results if known else None,
        )
