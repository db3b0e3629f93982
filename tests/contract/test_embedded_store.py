"""The laws of a store, held by the embedded ones, and what only these promise."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

from nsqdedupe.clock import monotonic
from nsqdedupe.errors import ConfigError, StoreError, StoreUnavailable
from nsqdedupe.fingerprint import hashing_of
from nsqdedupe.store import Answer, Claim, Release, Store, Traits, Verdict
from nsqdedupe.stores.embedded import SWEEP_EVERY, TAIL, EmbeddedStore, MemoryStore
from nsqdedupe.testing import Breakable, ManualClock, StoreContract

EMBEDDED = Traits(shared=False, durable=False, may_slip=True, may_false_drop=False, blocking=False)
NEVER_FORGETS = Traits(shared=True, durable=False, may_slip=False, may_false_drop=False, blocking=True)

Item = TypeVar("Item")
Result = TypeVar("Result")


class PlainTable:
    """The simplest table there can be: it never forgets, and takes any fingerprint."""

    durable = False

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def bind(self, hashing: str) -> None:
        pass

    def close(self) -> None:
        pass

    def contains_many(self, fingerprints: Sequence[bytes]) -> list[bool]:
        return [fingerprint in self.seen for fingerprint in fingerprints]

    def add_many(self, fingerprints: Sequence[bytes]) -> None:
        self.seen.update(fingerprints)

    def discard_many(self, fingerprints: Sequence[bytes]) -> None:
        self.seen.difference_update(fingerprints)


class Server:
    """Where the handles of a `RemoteStore` meet."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store = store
        self.lock = threading.Lock()
        self.reached = True


class RemoteStore(Store):
    """A shared store of somebody else's that never forgets and can be out of reach."""

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    def traits(self) -> Traits:
        return NEVER_FORGETS

    def claim(self, claims: Sequence[Claim]) -> Sequence[Answer]:
        # It cannot tell a hold from a claim.
        return [answer._replace(held=False) for answer in self._call(self.server.store.claim, claims)]

    def confirm(self, claims: Sequence[Claim]) -> Sequence[bool]:
        return self._call(self.server.store.confirm, claims)

    def release(self, releases: Sequence[Release]) -> Sequence[bool]:
        return self._call(self.server.store.release, releases)

    def extend(self, claims: Sequence[Claim]) -> Sequence[bool]:
        return self._call(self.server.store.extend, claims)

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        self._call(self.server.store.forget, fingerprints)

    def close(self) -> None:
        """What is shared stays."""

    def _call(self, verb: Callable[[Sequence[Item]], Result], items: Sequence[Item]) -> Result:
        if not self.server.reached:
            raise StoreUnavailable("cut off")
        with self.server.lock:
            return verb(items)


class TestEmbeddedStoreOverAPlainTable(StoreContract):
    traits = EMBEDDED

    def make_store(self) -> Store:
        return EmbeddedStore(PlainTable(), clock=self.clock)


class MemoryStoreContract(StoreContract):
    """A memory store of some shape."""

    traits = EMBEDDED
    shape: ClassVar[dict[str, int]]

    def make_store(self) -> Store:
        return MemoryStore(slots=1 << 17, **self.shape, clock=self.clock)

    def make_full_store(self) -> Store:
        return MemoryStore(slots=64, **self.shape, clock=self.clock)


class TestMemoryStoreOfTheDefaultShape(MemoryStoreContract):
    shape: ClassVar[dict[str, int]] = {}


class TestMemoryStoreOfWholeFingerprints(MemoryStoreContract):
    shape: ClassVar[dict[str, int]] = {"tag_bytes": 16}


class TestMemoryStoreOfTheWidestBuckets(MemoryStoreContract):
    shape: ClassVar[dict[str, int]] = {"ways": 64}


class MemoryStoreInAFileContract(MemoryStoreContract):
    """The same in files, each in a directory of its own."""

    traits = EMBEDDED._replace(durable=True)

    def make_file_store(self, slots: int) -> Store:
        folder = tempfile.TemporaryDirectory()
        self.folders.append(folder)
        return MemoryStore(slots=slots, **self.shape, path=Path(folder.name) / "seen.table", clock=self.clock)

    def make_store(self) -> Store:
        return self.make_file_store(1 << 17)

    def make_full_store(self) -> Store:
        return self.make_file_store(64)

    def reopen(self, store: Store) -> Store:
        store.close()
        path = Path(self.folders[-1].name) / "seen.table"
        return MemoryStore(slots=1 << 17, **self.shape, path=path, clock=self.clock)

    def setup_method(self) -> None:
        self.folders: list[tempfile.TemporaryDirectory[str]] = []
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        for folder in self.folders:
            folder.cleanup()

    def test_claims_holds_and_tries_end_with_the_process(self) -> None:
        claimed, held = self.message(), self.message()
        self.own(claimed)
        self.fail(self.own(held), self.lease)
        reopened = self.keep(self.reopen(self.store))
        assert reopened.claim([self.sibling(claimed), self.sibling(held)]) == [Answer(Verdict.NEW)] * 2


class TestMemoryStoreInAFile(MemoryStoreInAFileContract):
    shape: ClassVar[dict[str, int]] = {}


class TestMemoryStoreOfWholeFingerprintsInAFile(MemoryStoreInAFileContract):
    shape: ClassVar[dict[str, int]] = {"tag_bytes": 16}


class TestMemoryStoreSizedByWindow(StoreContract):
    traits = EMBEDDED

    def make_store(self) -> Store:
        return MemoryStore(window=10_000, recall=0.999_999, clock=self.clock)


class TestAStoreOfSomebodyElses(StoreContract):
    traits = NEVER_FORGETS
    tells_held = False

    def make_store(self) -> Store:
        return RemoteStore(Server(EmbeddedStore(PlainTable(), clock=self.clock)))

    def make_peer(self, store: Store) -> Store:
        assert isinstance(store, RemoteStore)
        return RemoteStore(store.server)

    def make_full_store(self) -> Store:
        return self.make_store()

    def make_slow_store(self) -> Breakable:
        return self.make_dead_store()

    def make_dead_store(self) -> Breakable:
        store = self.make_store()
        assert isinstance(store, RemoteStore)
        server = store.server
        return Breakable(
            store, cut=lambda: setattr(server, "reached", False), mend=lambda: setattr(server, "reached", True)
        )


class TestAStoreThatTakesNewMessagesForDoneOnes(TestAStoreOfSomebodyElses):
    """As a full Bloom filter does: its author must say so, and then the law of the full store lets it pass."""

    traits = NEVER_FORGETS._replace(may_false_drop=True)

    def make_full_store(self) -> Store:
        store = self.make_store()
        assert isinstance(store, RemoteStore)
        table = store.server.store.table
        assert isinstance(table, PlainTable)
        table.contains_many = lambda fingerprints: [True] * len(fingerprints)  # type: ignore[method-assign]
        return store

    def test_traits_are_what_was_promised_and_stay(self) -> None:
        """The store says otherwise, and the law notices."""
        with pytest.raises(AssertionError):
            super().test_traits_are_what_was_promised_and_stay()

    def test_a_slow_store_is_given_up_in_time(self) -> None:
        """An author may put another test in a law's place."""
        store, cut, mend = self.make_slow_store()
        assert not self.is_unavailable(lambda: store.claim([]))
        cut()
        assert self.is_unavailable(lambda: store.claim([]))
        mend()


HARD_STATES = {
    "make_full_store": "test_a_full_store_may_forget_but_never_takes_a_new_message_for_a_done_one",
    "make_slow_store": "test_a_slow_store_is_given_up_in_time",
    "make_dead_store": "test_a_dead_store_says_so_and_loses_nothing",
    "reopen": "test_what_was_done_is_done_in_the_next_process",
}


@pytest.mark.parametrize(("maker", "law"), HARD_STATES.items())
def test_a_law_is_collected_where_its_hard_state_can_be_made(maker: str, law: str) -> None:
    can = TestMemoryStoreInAFile if maker == "reopen" else TestAStoreOfSomebodyElses
    assert getattr(TestEmbeddedStoreOverAPlainTable, law) is None
    assert callable(getattr(can, law))
    with pytest.raises(NotImplementedError, match=maker):
        getattr(TestEmbeddedStoreOverAPlainTable(), maker)(*[None] * (maker == "reopen"))


def test_a_contract_without_a_store_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="make_store"):
        StoreContract().make_store()


# -- the manual clock ----------------------------------------------------------------------------


def test_a_manual_clock_stands_still_until_it_is_told_to_go_on() -> None:
    clock = ManualClock(start=7.0)
    assert clock() == clock() == 7.0
    clock.advance(0.5)
    clock.advance(0)
    assert clock() == 7.5


def test_a_manual_clock_does_not_start_at_zero() -> None:
    assert ManualClock()() > 0


@pytest.mark.parametrize("seconds", [-0.001, float("nan"), float("inf"), "1"])
def test_a_manual_clock_never_goes_back(seconds: float) -> None:
    clock = ManualClock()
    before = clock()
    with pytest.raises(ConfigError, match="never goes back"):
        clock.advance(seconds)
    assert clock() == before


# -- what only embedded stores promise -----------------------------------------------------------


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> EmbeddedStore:
    return EmbeddedStore(PlainTable(), clock=clock)


def claim_of(number: int, owner: bytes = b"nsqd1/a", serial: int = 1) -> Claim:
    return Claim(number.to_bytes(16, "big"), owner, b"process1" + serial.to_bytes(8, "big"), 60.0)


def test_only_confirmed_fingerprints_reach_the_table(store: EmbeddedStore) -> None:
    claims = [claim_of(number) for number in range(5)]
    store.claim(claims)
    store.release([Release(claims[0], failed=True, hold=9.0), Release(claims[1])])
    store.extend(claims[2:])
    assert isinstance(store.table, PlainTable)
    assert store.table.seen == set()
    store.confirm(claims[4:])
    assert store.table.seen == {claims[4].fingerprint}


def test_a_claim_that_ended_well_leaves_nothing(store: EmbeddedStore) -> None:
    confirmed, released = claim_of(1), claim_of(2)
    store.claim([confirmed, released])
    assert store.kept() == 2
    store.confirm([confirmed])
    store.release([Release(released)])
    assert store.kept() == 0


@pytest.mark.parametrize("hold", [0.0, 90.0])
def test_what_a_failure_left_is_kept_for_the_tail_and_then_freed(
    store: EmbeddedStore, clock: ManualClock, hold: float
) -> None:
    claims = [claim_of(number) for number in range(3)]
    store.claim(claims)
    store.release([Release(claim, failed=True, hold=hold) for claim in claims])
    clock.advance(hold + TAIL - 1)
    store.claim([])
    assert store.kept() == 3
    clock.advance(SWEEP_EVERY - 1)
    store.claim([])
    assert store.kept() == 3, "it looks at all there is too often"
    clock.advance(1)
    store.claim([])
    assert store.kept() == 0


def test_a_hold_without_a_failure_is_freed_after_the_tail_as_well(store: EmbeddedStore, clock: ManualClock) -> None:
    store.claim([claim_of(1)])
    store.release([Release(claim_of(1), hold=90.0)])
    assert store.kept() == 1
    clock.advance(90.0 + TAIL)
    store.claim([])
    assert store.kept() == 0


def test_a_message_claimed_again_outlives_what_its_failure_left(store: EmbeddedStore, clock: ManualClock) -> None:
    store.claim([claim_of(1)])
    store.release([Release(claim_of(1), failed=True)])
    clock.advance(TAIL - 1)
    again = claim_of(1, serial=2)
    assert store.claim([again]) == [Answer(Verdict.NEW, tries=1)]
    clock.advance(SWEEP_EVERY)
    store.claim([])
    assert store.kept() == 1
    assert store.extend([again]) == [True]


def test_forgotten_and_confirmed_messages_leave_nothing_of_their_failures(store: EmbeddedStore) -> None:
    claims = [claim_of(1), claim_of(2)]
    store.claim(claims)
    store.release([Release(claim, failed=True) for claim in claims])
    store.forget([claims[0].fingerprint])
    store.claim([claim_of(2, serial=2)])
    store.confirm([claim_of(2, serial=2)])
    assert store.kept() == 0


def test_a_stale_success_frees_what_its_successors_failure_left(store: EmbeddedStore, clock: ManualClock) -> None:
    stale, successor = claim_of(1), claim_of(1, b"nsqd2/b", serial=2)
    store.claim([stale])
    clock.advance(60.0)
    store.claim([successor])
    store.release([Release(successor, failed=True, hold=90.0)])
    assert store.confirm([stale]) == [False]
    assert store.kept() == 0


def test_a_claim_whose_owner_vanished_is_freed_after_the_tail(store: EmbeddedStore, clock: ManualClock) -> None:
    stale, vanished = claim_of(1), claim_of(1, b"nsqd2/b", serial=2)
    store.claim([stale])
    clock.advance(60.0)
    store.claim([vanished])
    store.confirm([stale])
    assert store.kept() == 1
    clock.advance(60.0 + TAIL)
    store.claim([])
    assert store.kept() == 0


def test_closing_frees_the_claims(store: EmbeddedStore) -> None:
    store.claim([claim_of(1), claim_of(2)])
    store.release([Release(claim_of(2), failed=True)])
    store.close()
    assert store.kept() == 0


@pytest.mark.parametrize("name", [None, "seen.table"])
def test_readers_that_share_a_store_make_their_fingerprints_alike(name: str | None, tmp_path: Path) -> None:
    store = MemoryStore(slots=64, path=name and tmp_path / name)
    store.bind(hashing_of(b"one"))
    store.bind(hashing_of(b"one"))
    for other in (None, b"another"):
        with pytest.raises(ConfigError) as refused:
            store.bind(hashing_of(other))
        assert f"made with {hashing_of(b'one')}, not with {hashing_of(other)}" in str(refused.value)
        assert "give the secret that was given before" in str(refused.value)
        assert (name or "this table") in str(refused.value)
    store.close()


@pytest.mark.parametrize("name", [None, "seen.table"])
def test_a_closed_store_says_so(name: str | None, tmp_path: Path) -> None:
    store = MemoryStore(slots=64, path=name and tmp_path / name)
    store.confirm([claim_of(1)])
    assert store.table.nbytes > 0
    store.close()
    assert store.table.nbytes == 0
    verbs: list[Callable[[], object]] = [
        lambda: store.claim([claim_of(1)]),
        lambda: store.confirm([claim_of(1)]),
        lambda: store.forget([claim_of(1).fingerprint]),
        lambda: store.bind("another"),
    ]
    for verb in verbs:
        with pytest.raises(StoreError, match="the table is closed"):
            verb()


def test_the_clock_is_monotonic_time_unless_another_is_given() -> None:
    store = MemoryStore(slots=32)
    store.claim([claim_of(1)])
    (answer,) = store.claim([claim_of(1, b"nsqd2/b", serial=2)])
    assert 0 < answer.lease_left <= 60.0
    assert monotonic() <= monotonic()


def test_the_default_table_holds_a_million_messages() -> None:
    assert MemoryStore().table.slots == MemoryStore(window=1_000_000, recall=0.999).table.slots


def test_window_and_recall_may_each_be_left_out() -> None:
    assert MemoryStore(window=1_000_000).table.slots == MemoryStore(recall=0.999).table.slots
    assert MemoryStore(window=1000).table.slots < MemoryStore(window=1000, recall=0.999_99).table.slots


def test_slots_are_rounded_up_to_whole_buckets() -> None:
    assert MemoryStore(slots=100).table.slots == 128
    assert MemoryStore(slots=100, ways=8).table.slots == 104


@pytest.mark.parametrize("beside", [{"window": 10}, {"recall": 0.9}, {"window": 10, "recall": 0.9}])
def test_slots_stand_alone(beside: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"slots=64: must be given alone; give either slots, or window and recall"):
        MemoryStore(slots=64, **beside)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 1.5}, "window=1.5"),
        ({"window": True}, "window=True"),
        ({"recall": 0}, "recall=0"),
        ({"recall": 1}, "recall=1"),
        ({"recall": "0.9"}, "recall='0.9'"),
        ({"slots": 0}, "slots=0"),
        ({"slots": 1.0}, "slots=1.0"),
        ({"ways": 0}, "ways=0"),
        ({"ways": 65}, "ways=65"),
        ({"slots": 64, "ways": 65}, "ways=65"),
        ({"tag_bytes": 4}, "tag_bytes=4"),
        ({"tag_bytes": None}, "tag_bytes=None"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(options: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        MemoryStore(**options)
    assert str(refused.value).startswith(f"{named}: must be ")
