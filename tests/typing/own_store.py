"""The author of a store: the contract, and its laws as a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import nsqdedupe
from nsqdedupe import Answer, Claim, Release, Traits, Verdict
from nsqdedupe.testing import ManualClock, StoreContract


class Forgetful(nsqdedupe.Store):
    """Remembers nothing: every copy is handled."""

    @property
    def traits(self) -> Traits:
        return Traits(shared=False, durable=False, may_slip=True, may_false_drop=False, blocking=False)

    def claim(self, claims: Sequence[Claim]) -> list[Answer]:
        return [Answer(Verdict.NEW) for _ in claims]

    def confirm(self, claims: Sequence[Claim]) -> list[bool]:
        return [True for _ in claims]

    def release(self, releases: Sequence[Release]) -> list[bool]:
        return [release.claim.lease > 0 for release in releases]

    def extend(self, claims: Sequence[Claim]) -> list[bool]:
        return [True for _ in claims]

    def forget(self, fingerprints: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


class TestForgetful(StoreContract):
    def make_store(self) -> nsqdedupe.Store:
        return Forgetful()


def use_the_table() -> None:
    table = nsqdedupe.OppositeBloomFilter(slots=1 << 20, ways=32, tag_bytes=8, path=None)
    fingerprint = bytes(16)
    assert_type(table.check_and_set(fingerprint), bool)
    assert_type(table.contains(fingerprint), bool)
    assert_type(table.contains_many([fingerprint]), list[bool])
    table.add(fingerprint)
    table.discard(fingerprint)
    assert_type(table.slots, int)
    nsqdedupe.MemoryStore(slots=1024, clock=ManualClock())
