"""Several servers: who has what, and what one of them costs that is away."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
from collections import Counter
from collections.abc import Iterator

import pytest
from messages import DONE, NEW, Patient, ask, deliveries, delivery, message, own, sibling, verdicts
from relay import relay
from servers import Servers as Room
from servers import eventually, silent_ports

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.clock import monotonic
from nsqdedupe.errors import StoreUnavailable
from nsqdedupe.memcached.link import LONGEST_PAUSE, Link, Terms
from nsqdedupe.memcached.servers import PARTITIONS, Servers
from nsqdedupe.store import Answer, Release
from nsqdedupe.stores.memcached import MemcachedStore
from nsqdedupe.testing import ManualClock

TERMS = Terms("n", 0.25, 1.0, None, monotonic, [])
WINDOW = 10_000


def placed(*ports: int, slots: int = 1) -> Servers:
    """Servers that nobody connects to."""
    return Servers([Link("10.0.0.1", port, TERMS) for port in ports], slots, TERMS)


def homes(servers: Servers, fingerprints: list[bytes]) -> list[str]:
    return [spot[0].name for spot in servers.spots(fingerprints)]


@pytest.fixture
def fingerprints() -> list[bytes]:
    return [random.randbytes(16) for _ in range(20_000)]


# -- placement -----------------------------------------------------------------------------------


def test_each_server_has_about_its_share(fingerprints: list[bytes]) -> None:
    for count in (2, 3, 5, 10):
        shares = Counter(homes(placed(*range(1, count + 1)), fingerprints))
        assert len(shares) == count
        assert max(shares.values()) < 1.35 * len(fingerprints) / count


def test_the_order_in_which_servers_are_given_does_not_matter(fingerprints: list[bytes]) -> None:
    assert homes(placed(1, 2, 3), fingerprints) == homes(placed(3, 1, 2), fingerprints)


def test_a_server_that_is_added_or_removed_moves_its_own_share_only(fingerprints: list[bytes]) -> None:
    before, after = (homes(placed(*ports), fingerprints) for ports in ((1, 2, 3), (1, 2, 3, 4)))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {"10.0.0.1:4"}
    assert 0.15 < len(moved) / len(fingerprints) < 0.35


def test_claim_and_bucket_of_a_message_are_the_same_wherever_they_lie(fingerprints: list[bytes]) -> None:
    """What stays on its server is found there."""
    one, other = (placed(*ports, slots=1_000_000).spots(fingerprints) for ports in ((1, 2), (1, 2, 3)))
    assert [spot[1:] for spot in one] == [spot[1:] for spot in other]


def test_messages_spread_evenly_over_partitions_and_buckets() -> None:
    servers = placed(1, slots=32 * PARTITIONS * 3)
    assert servers.slots == 32 * PARTITIONS * 3
    seeded = random.Random(1)
    load = Counter(spot[2] for spot in servers.spots(seeded.randbytes(16) for _ in range(30_000)))
    buckets = 3 * PARTITIONS
    assert len(load) == buckets
    mean = 30_000 / buckets
    # As Poisson has it: the variance is the mean.
    variance = sum((count - mean) ** 2 for count in load.values()) / buckets
    assert 0.8 * mean < variance < 1.2 * mean


def test_the_bucket_does_not_depend_on_the_half_that_the_tag_is_from() -> None:
    servers = placed(1, slots=1_000_000)
    first, second = servers.spots([bytes(8) + b"the same", b"\xff" * 8 + b"the same"])
    assert first[2] == second[2]
    assert first[1] != second[1]
    assert first[3] == second[3] == b"\xff" * 8  # zero is mapped to a constant


def test_slots_are_rounded_up_to_whole_buckets_in_each_partition() -> None:
    assert placed(1, slots=1).slots == 32 * PARTITIONS
    assert placed(1, slots=32 * PARTITIONS + 1).slots == 2 * 32 * PARTITIONS
    store = Patient("127.0.0.1:1", window=1_000_000, connect_timeout=0.1)
    assert 1_842_000 < store.slots < 1_842_000 * 1.02


# -- three real ones -----------------------------------------------------------------------------


@pytest.fixture
def trio(servers: Room, memcached: Memcached) -> Iterator[list[Memcached]]:
    started = [servers.memcached() for _ in range(3)]
    yield started
    for server in started:
        server.kill()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(trio: list[Memcached], clock: ManualClock) -> Iterator[MemcachedStore]:
    addresses = [server.tcp_address for server in trio]
    with contextlib.closing(Patient(addresses, window=WINDOW, clock=clock)) as made:
        yield made


def test_each_has_a_share_and_a_fourth_leaves_most_where_it_is(
    servers: Room, trio: list[Memcached], store: MemcachedStore
) -> None:
    claims = deliveries(1000)
    store.claim(claims)
    store.confirm(claims)
    for server in trio:
        assert 150 < int(server.stats()["curr_items"]) < 1700
    added = servers.memcached()
    addresses = [server.tcp_address for server in (added, *trio)]
    with contextlib.closing(Patient(addresses, window=WINDOW)) as grown:
        again = verdicts(grown.claim([sibling(claim.fingerprint) for claim in claims]))
    assert set(again) == {DONE, NEW}
    assert 600 < again.count(DONE) < 900
    added.kill()


def test_one_that_is_dead_costs_its_share_and_nothing_else(
    trio: list[Memcached], store: MemcachedStore, clock: ManualClock
) -> None:
    claims = deliveries(300)
    store.claim(claims)
    store.confirm(claims[:100])
    dead = trio[0]
    names = [spot[0].name for spot in store._servers.spots(claim.fingerprint for claim in claims)]
    dead.kill()

    def lost(verb: str, results: list[object] | None, count: int) -> None:
        assert results is not None
        assert [result is None for result in results] == [name == dead.tcp_address for name in names[:count]], verb

    siblings = [sibling(claim.fingerprint) for claim in claims]
    with pytest.raises(StoreUnavailable, match=f"claim: .* of 300 without an answer: {dead.tcp_address}") as away:
        store.claim(siblings)
    lost("claim", away.value.results, 300)  # type: ignore[arg-type]
    known = away.value.results or []
    assert set(verdicts(known[:100])) == {DONE, None}
    for verb in (store.extend, store.start, store.confirm):
        with pytest.raises(StoreUnavailable) as away:
            verb(claims)
        lost(verb.__name__, away.value.results, 300)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable) as away:
        store.release([Release(claim) for claim in claims])
    lost("release", away.value.results, 300)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable, match=f"forget: {names.count(dead.tcp_address)} of 300"):
        store.forget([claim.fingerprint for claim in claims])
    # By now it is forgotten where it could be; and all of it is back when the server is.
    dead.start()
    clock.advance(LONGEST_PAUSE)
    assert store.claim([sibling(claim.fingerprint) for claim in claims]) == [Answer(NEW)] * 300


def test_one_that_is_left_alone_is_not_even_asked(memcached: Memcached, servers: Room) -> None:
    clock, other = ManualClock(), servers.memcached()
    with relay(other.tcp_port) as line:
        addresses = [memcached.tcp_address, line.address]
        with contextlib.closing(Patient(addresses, window=WINDOW, namespace=message().hex(), clock=clock)) as store:
            claims = deliveries(50)
            line.cut_after = 0
            for _ in range(20):
                with pytest.raises(StoreUnavailable):
                    store.claim(claims)
            assert line.connections == 1
            pauses = []
            for _ in range(8):
                # Each time it is asked it fails, and is left alone for longer.
                before = line.connections
                began = clock()
                while line.connections == before:
                    line.cut_after = 0
                    clock.advance(0.05)
                    with pytest.raises(StoreUnavailable):
                        store.claim(claims)
                pauses.append(clock() - began)
            assert pauses[-1] > 4 * pauses[0]
            assert max(pauses) < LONGEST_PAUSE + 0.1
            line.cut_after = None
            clock.advance(LONGEST_PAUSE)
            assert verdicts(store.claim(claims)) == [NEW] * 50
    other.kill()


def test_a_server_that_is_away_at_the_start_is_told_of_and_used_when_it_comes(
    memcached: Memcached, servers: Room, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock, late = ManualClock(), servers.memcached()
    late.kill()
    addresses = [memcached.tcp_address, late.tcp_address]
    with contextlib.closing(Patient(addresses, window=WINDOW, namespace=message().hex(), clock=clock)) as store:
        (warning,) = caplog.records
        assert (warning.levelname, late.tcp_address in warning.getMessage()) == ("WARNING", True)
        assert memcached.tcp_address not in warning.getMessage()
        claims = deliveries(100)
        with pytest.raises(StoreUnavailable):
            store.claim(claims)
        late.start()
        clock.advance(LONGEST_PAUSE)
        assert verdicts(store.claim(claims)) == [NEW] * 100
        assert [(record.levelname, record.getMessage()) for record in caplog.records[1:]] == [
            ("INFO", f"memcached reached: {late.tcp_address}")
        ]
    late.kill()


def test_a_store_is_made_when_no_server_is_there(caplog: pytest.LogCaptureFixture) -> None:
    with silent_ports() as ports:
        addresses = [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]
        with contextlib.closing(Patient(addresses, window=WINDOW)) as store:
            assert len(caplog.records) == 1
            with pytest.raises(StoreUnavailable, match="claim: 1 of 1 without an answer") as away:
                store.claim([delivery(message())])
            assert away.value.results is None
            assert all(address in str(away.value) for address in addresses)


def test_a_name_that_is_none_is_a_server_that_is_away(caplog: pytest.LogCaptureFixture, nameless: None) -> None:
    with contextlib.closing(Patient([f"{'x' * 70}.invalid:1", "no.such.host.invalid:1"], window=1)) as store:
        assert not store.traits.durable
    assert "xxx" in caplog.text
    assert "no.such.host.invalid:1: [Errno -2] Name or service not known" in caplog.text


def test_a_name_with_an_address_that_nobody_answers_at_leads_to_the_next(memcached: Memcached) -> None:
    """As localhost does, where ::1 comes first and memcached listens on 127.0.0.1."""
    real = socket.getaddrinfo

    def two(host: str, port: int, *rest: object, **options: object) -> list[object]:
        if host != "a.name":
            return list(real(host, port, *rest, **options))  # type: ignore[call-overload]
        return [
            *real("127.0.0.2", port, type=socket.SOCK_STREAM),
            *real("127.0.0.1", port, type=socket.SOCK_STREAM),
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.getaddrinfo", two)
        with contextlib.closing(
            Patient(f"a.name:{memcached.tcp_port}", window=WINDOW, namespace=message().hex())
        ) as store:
            assert ask(store, delivery(message())) == Answer(NEW)


def test_the_others_are_asked_side_by_side(memcached: Memcached, trio: list[Memcached]) -> None:
    """All pipelines are sent before any reply is waited for: this one comes only when the other was sent."""
    with (
        relay(trio[0].tcp_port) as first,
        relay(trio[1].tcp_port) as second,
        contextlib.closing(Patient([first.address, second.address], window=WINDOW)) as store,
    ):
        claims = deliveries(100)

        def after(other: object, before: int) -> None:
            eventually(lambda: len(other.requests) > before)  # type: ignore[attr-defined]

        numbers = len(first.requests), len(second.requests)
        first.lie = lambda reply: after(second, numbers[1]) or reply  # type: ignore[func-returns-value]
        second.lie = lambda reply: after(first, numbers[0]) or reply  # type: ignore[func-returns-value]
        assert verdicts(store.claim(claims)) == [NEW] * 100
        assert own(store, message())
