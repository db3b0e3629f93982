"""The verbs of a store in memcached, called by an event loop: side by side, in order, and never waited for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import socket
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from messages import DONE, NEW, Patient, deliveries, delivery, freeze, give_up_after, message, sibling
from relay import Relay, relay
from servers import MOMENT, Servers, eventually, eventually_async
from test_memcached_verbs import Handle

from nsqdedupe import MemoryStore
from nsqdedupe.calls import Verb
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.errors import StoreError, StoreUnavailable
from nsqdedupe.memcached import on_loop, wire
from nsqdedupe.memcached.link import LONGEST_PAUSE, Link
from nsqdedupe.memcached.on_loop import OnLoop
from nsqdedupe.memcached.streaming import call_weakly
from nsqdedupe.store import Answer, Claim, Release, Verdict
from nsqdedupe.testing import ManualClock

WINDOW = 10_000
Told = tuple[str, Sequence[Any], Exception | None]


class Caller:
    """Submits verbs of a store, and notes what comes of each."""

    def __init__(self, store: Handle) -> None:
        self.store = store
        self.told: list[Told] = []
        self.afters = 0
        calls = store.calls(self._after)
        assert isinstance(calls, OnLoop)
        self.calls = calls

    def _after(self) -> None:
        self.afters += 1

    @property
    def links(self) -> Sequence[Link]:
        return self.calls._servers.links

    def submit(self, verb: Verb, *items: Any) -> None:
        name = verb.__name__
        self.calls.submit(verb, items, lambda results, error: self.told.append((name, list(results), error)))

    async def answers(self, count: int) -> list[Told]:
        """All that was told, when it is so much."""
        await eventually_async(lambda: len(self.told) >= count)
        return self.told

    @property
    def under_way(self) -> int:
        """Pipelines that are not answered."""
        return sum(link.talking for link in self.links)

    async def sent(self, trips: int) -> None:
        """Return when so many are under way."""
        await eventually_async(lambda: self.under_way == trips)

    async def own(self, *claims: Claim) -> list[Claim]:
        """Have these messages, each claimed on the loop."""
        count = len(self.told) + 1
        self.submit(self.store.claim, *claims)
        await self.answers(count)
        name, results, error = self.told.pop()
        assert (name, verdicts(results), error) == ("claim", [NEW] * len(claims), None)
        return list(claims)


def verdicts(answers: Sequence[Answer | None]) -> list[Verdict | None]:
    return [None if answer is None else answer.verdict for answer in answers]


@pytest.fixture
def line(memcached: Memcached) -> Iterator[Relay]:
    with relay(memcached.tcp_port) as made:
        yield made


@pytest.fixture
def server(servers: Servers) -> Iterator[Memcached]:
    """One of this test's own."""
    server = servers.memcached()
    yield server
    server.kill()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def caller(server: Memcached, clock: ManualClock) -> Iterator[Caller]:
    with contextlib.closing(Handle(server.tcp_address, window=WINDOW, clock=clock)) as store:
        yield Caller(store)


class HeldUp(NamedTuple):
    """Connections that are being made, and wait."""

    dialling: threading.Event
    """One is being made."""

    gate: threading.Event
    """They are waited for no longer."""


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> HeldUp:
    held = HeldUp(threading.Event(), threading.Event())
    connect = on_loop._connect

    def gated(links: Sequence[Link]) -> None:
        held.dialling.set()
        assert held.gate.wait(MOMENT)
        connect(links)

    monkeypatch.setattr(on_loop, "_connect", gated)
    return held


def through(line: Relay) -> Handle:
    return Handle(line.address, window=WINDOW, namespace=uuid.uuid4().hex)


@contextlib.asynccontextmanager
async def frozen(server: Memcached) -> AsyncIterator[None]:
    """Nothing is answered; what was asked is, in the end."""
    process = freeze(server)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


# -- what is asked together, and in which order ---------------------------------------------------


def test_what_is_submitted_in_one_turn_is_one_pipeline(line: Relay) -> None:
    async def scene(caller: Caller) -> None:
        (first,) = await caller.own(delivery(message()))
        before = line.trips
        claims = deliveries(3)
        caller.submit(caller.store.claim, claims[0])
        caller.submit(caller.store.claim, *claims[1:])
        assert caller.told == []
        await caller.answers(2)
        assert line.trips == before + 1
        caller.submit(caller.store.confirm, first)
        caller.submit(caller.store.confirm, *claims)
        assert (await caller.answers(4))[2:] == [("confirm", [True], None), ("confirm", [True] * 3, None)]
        assert line.trips == before + 2
        assert caller.afters == 3

    with contextlib.closing(through(line)) as store:
        asyncio.run(scene(Caller(store)))


def test_claims_and_changes_go_on_side_by_side_and_each_gets_its_own_answers(caller: Caller, server: Memcached) -> None:
    async def scene() -> None:
        first = await caller.own(*deliveries(3))
        async with frozen(server):
            caller.submit(caller.store.confirm, *first)
            await caller.sent(1)
            caller.submit(caller.store.claim, *deliveries(2), sibling(first[0].fingerprint))
            await caller.sent(2)
            caller.submit(caller.store.claim, delivery(message()))
            caller.submit(caller.store.confirm, *first)
            await asyncio.sleep(0)
            assert caller.under_way == 2
            assert caller.told == []
        told = await caller.answers(4)
        assert told[0] == ("confirm", [True] * 3, None)
        assert verdicts(told[1][1]) == [NEW, NEW, DONE]  # the claim came after the confirm there, too
        assert {(name, len(results), error) for name, results, error in told[2:]} == {
            ("claim", 1, None),
            ("confirm", 3, None),
        }

    asyncio.run(scene())


def test_claims_wait_for_a_release_that_was_submitted_before(caller: Caller, server: Memcached) -> None:
    async def scene() -> None:
        done, failed = await caller.own(*deliveries(2))
        async with frozen(server):
            caller.submit(caller.store.confirm, done)
            await caller.sent(1)
            caller.submit(caller.store.release, Release(failed, failed=True))
            caller.submit(caller.store.claim, sibling(failed.fingerprint))
            await asyncio.sleep(0)
            assert caller.under_way == 1
        told = await caller.answers(3)
        assert told[:2] == [("confirm", [True], None), ("release", [True], None)]
        assert told[2][1] == [Answer(NEW, tries=1)]

    asyncio.run(scene())


def test_no_limit_of_a_call_is_passed_and_none_is_lost(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqdedupe.calls.LIMIT", 3)

    async def scene() -> None:
        for _ in range(5):
            caller.submit(caller.store.claim, *deliveries(2))
        told = await caller.answers(5)
        assert [(verdicts(results), error) for _, results, error in told] == [([NEW, NEW], None)] * 5

    asyncio.run(scene())


def test_what_follows_results_may_submit_more_and_fail(caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    claim = delivery(message())

    def follow(results: Sequence[Any], error: Exception | None) -> None:
        caller.submit(caller.store.confirm, claim)
        raise ZeroDivisionError

    async def scene() -> None:
        caller.calls.submit(caller.store.claim, [claim], follow)
        assert await caller.answers(1) == [("confirm", [True], None)]

    asyncio.run(scene())
    assert [record.message for record in caplog.records] == ["what was to follow a call of the store failed"]
    # And when no loop runs any more.
    caller.calls.submit(caller.store.claim, [claim], follow)
    assert caller.told[1:] == [("confirm", [False], None)]


def test_a_bad_lease_is_an_error_of_its_call_alone(caller: Caller) -> None:
    async def scene() -> None:
        caller.submit(caller.store.claim, delivery(message(), lease=0.0))
        ((_, results, error),) = await caller.answers(1)
        assert results == [None]
        assert "lease" in str(error)
        await caller.own(delivery(message()))

    asyncio.run(scene())


# -- servers that are slow, away, or talk nonsense ------------------------------------------------


def test_a_server_that_hangs_costs_all_that_is_under_way_and_its_late_replies_reach_nobody(
    caller: Caller, server: Memcached, clock: ManualClock
) -> None:
    async def scene() -> None:
        done, busy = await caller.own(*deliveries(2))
        claims = deliveries(5)
        async with frozen(server):
            give_up_after(caller.store, 0.1)
            caller.submit(caller.store.confirm, done)
            await caller.sent(1)
            caller.submit(caller.store.claim, *claims)
            told = await caller.answers(2)
            assert sorted(len(results) for _, results, _ in told if set(results) == {None}) == [1, 5]
            assert all("no answer within 0.1 s" in str(error) for _, _, error in told)
            assert caller.store.unreachable() == [server.tcp_address]
            # It is left alone for a while, and costs nothing then.
            caller.submit(caller.store.extend, busy)
            assert (await caller.answers(3))[2][1] == [None]
        give_up_after(caller.store, MOMENT)
        clock.advance(LONGEST_PAUSE)
        caller.submit(caller.store.claim, sibling(done.fingerprint), *claims)
        assert verdicts((await caller.answers(4))[3][1]) == [DONE, *[NEW] * 5]
        assert caller.store.unreachable() == []

    asyncio.run(scene())


def test_a_server_that_dies_is_connected_to_when_it_is_back_and_not_by_the_loop(
    caller: Caller, server: Memcached, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: set[int] = set()
    converse = wire.converse

    def noted(talks: Any, timeout: float) -> None:
        waited.add(threading.get_ident())
        converse(talks, timeout)

    for module in "servers", "proof":
        monkeypatch.setattr(f"nsqdedupe.memcached.{module}.converse", noted)

    async def scene() -> None:
        (claim,) = await caller.own(delivery(message()))
        async with frozen(server):
            caller.submit(caller.store.confirm, claim)
            await caller.sent(1)
            caller.submit(caller.store.claim, delivery(message()))
            await caller.sent(2)
            await asyncio.to_thread(server.kill)
        assert [results for _, results, _ in await caller.answers(2)] == [[None], [None]]
        caller.submit(caller.store.claim, claim)
        assert (await caller.answers(3))[2][1] == [None]
        await asyncio.to_thread(server.start)
        clock.advance(LONGEST_PAUSE)
        caller.submit(caller.store.claim, claim)
        caller.submit(caller.store.confirm, claim)
        told = await caller.answers(5)
        assert told[3:] == [("claim", [Answer(NEW)], None), ("confirm", [True], None)]

    asyncio.run(scene())
    assert waited
    assert threading.get_ident() not in waited, "the event loop waited"


def test_a_connection_that_ends_between_two_calls_is_made_again(line: Relay) -> None:
    async def scene(caller: Caller) -> None:
        await caller.own(delivery(message()))
        for client in list(line._open):
            with contextlib.suppress(OSError):  # those of before
                client.shutdown(socket.SHUT_RDWR)
        await eventually_async(lambda: not caller.links[0].connected)
        await caller.own(delivery(message()))

    with contextlib.closing(through(line)) as store:
        asyncio.run(scene(Caller(store)))


def test_a_connection_on_which_anything_comes_unasked_is_not_used_any_more(line: Relay, clock: ManualClock) -> None:
    async def scene(caller: Caller) -> None:
        await caller.own(delivery(message()))
        line.lie = lambda reply: reply + b"HD\r\n"
        caller.submit(caller.store.claim, delivery(message()))
        await caller.answers(1)
        await eventually_async(lambda: not caller.links[0].connected)
        assert "said more than it was asked" in caller.links[0].reach.why
        line.lie = lambda reply: reply
        clock.advance(LONGEST_PAUSE)
        await caller.own(delivery(message()))

    with contextlib.closing(Handle(line.address, window=WINDOW, namespace=uuid.uuid4().hex, clock=clock)) as store:
        asyncio.run(scene(Caller(store)))


@pytest.mark.parametrize("instead", [b"ERROR\r\nMN\r\n", b"HD\r\nMN\r\n"])
def test_an_answer_that_makes_no_sense_ends_the_call_and_the_connection(
    line: Relay, clock: ManualClock, instead: bytes
) -> None:
    """One that is none of memcached's, and one that lacks what was asked for."""

    async def scene(caller: Caller) -> None:
        (claim,) = await caller.own(delivery(message()))
        line.lie = lambda reply: instead if reply.startswith(b"VA ") else reply
        caller.submit(caller.store.claim, sibling(claim.fingerprint))
        line.lie = lambda reply: instead
        ((_, results, error),) = await caller.answers(1)
        assert results == [None]
        assert isinstance(error, StoreUnavailable)
        assert not caller.links[0].connected

    with contextlib.closing(Handle(line.address, window=WINDOW, namespace=uuid.uuid4().hex, clock=clock)) as store:
        asyncio.run(scene(Caller(store)))


@pytest.mark.parametrize("stops", [False, True])
def test_a_pipeline_that_the_connection_does_not_take_at_once_is_sent_as_it_does(
    caller: Caller, server: Memcached, *, stops: bool
) -> None:
    """With the loop, and when it has stopped meanwhile."""

    async def scene() -> None:
        await caller.own(delivery(message()))
        connection = caller.links[0]._connection
        assert connection is not None
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        async with frozen(server):
            caller.submit(caller.store.claim, *deliveries(20_000))
            await caller.sent(1)
            (stream,) = caller.calls._streams.values()
            await eventually_async(lambda: not stream.sent)
            if stops:
                return
        await caller.answers(1)

    asyncio.run(scene())
    caller.submit(caller.store.claim, delivery(message()))
    assert [(set(verdicts(results)), error) for _, results, error in caller.told] == [({NEW}, None)] * 2


def test_a_connection_that_takes_no_more_ends_the_call_without_a_loop(caller: Caller, server: Memcached) -> None:
    async def scene() -> int:
        await caller.own(delivery(message()))
        connection = caller.links[0]._connection
        assert connection is not None
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        process = freeze(server)
        caller.submit(caller.store.claim, *deliveries(20_000))
        await caller.sent(1)
        connection.shutdown(socket.SHUT_WR)
        return process

    process = asyncio.run(scene())
    caller.submit(caller.store.claim, delivery(message()))
    os.kill(process, signal.SIGCONT)
    assert [set(results) for _, results, _ in caller.told] == [{None}] * 2


def test_a_failure_of_our_own_ends_its_call_alone(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        (claim,) = await caller.own(delivery(message()))

        def broken(*_: object) -> None:
            raise AssertionError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(caller.calls._session.held, "keep", broken)
            caller.submit(caller.store.claim, delivery(message()))
            caller.submit(caller.store.extend, claim)
            told = sorted(await caller.answers(2), key=lambda one: one[0])
        assert [(name, results, str(error)) for name, results, error in told] == [
            ("claim", [None], "a bug"),
            ("extend", [True], "None"),
        ]
        await caller.own(delivery(message()))

    asyncio.run(scene())


def test_a_failure_to_connect_that_nobody_thought_of_is_logged_and_tried_again(
    caller: Caller, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        def broken(_: Link) -> bool:
            raise AssertionError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(Link, "ready", broken)
            caller.submit(caller.store.claim, delivery(message()))
            assert (await caller.answers(1))[0][1] == [None]
        clock.advance(LONGEST_PAUSE)
        await caller.own(delivery(message()))

    asyncio.run(scene())
    assert [record.message for record in caplog.records] == ["memcached could not be connected to"]


def test_two_servers_are_asked_at_once_and_one_that_is_away_costs_its_share(
    servers: Servers, server: Memcached, clock: ManualClock
) -> None:
    other = servers.memcached()

    async def scene(caller: Caller) -> None:
        await caller.own(*deliveries(20))
        async with frozen(other):
            give_up_after(caller.store, 0.1)
            caller.submit(caller.store.claim, *deliveries(50))
            ((_, results, error),) = await caller.answers(1)
            assert {answer if answer is None else answer.verdict for answer in results} == {None, NEW}
            assert other.tcp_address in str(error)

    addresses = [server.tcp_address, other.tcp_address]
    with contextlib.closing(Handle(addresses, window=WINDOW, clock=clock)) as store:
        asyncio.run(scene(Caller(store)))
    other.kill()


def test_who_wants_to_connect_waits_for_what_is_under_way(
    servers: Servers, server: Memcached, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a call would find a new connection halfway, to which its tokens mean something else."""
    other = servers.memcached()

    async def scene(caller: Caller) -> None:
        claims = await caller.own(*deliveries(50))
        here, there = caller.links
        ours = [claim for claim in claims if caller.calls._servers.spots([claim[0]])[0][0] is here]
        dial, dialled = caller.calls._dial, []

        def noted(links: Sequence[Link]) -> None:
            dialled.append((list(links), list(caller.calls._runs)))
            dial(links)

        monkeypatch.setattr(caller.calls, "_dial", noted)
        async with frozen(server):
            caller.submit(caller.store.confirm, *ours)
            await caller.sent(1)
            there.hang_up()
            caller.submit(caller.store.claim, *deliveries(20))
            await asyncio.sleep(0)
            assert caller.under_way == 1
        told = await caller.answers(2)
        assert [(name, set(map(str, results))) for name, results, _ in told] == [
            ("confirm", {"True"}),
            ("claim", {str(Answer(NEW))}),
        ]
        assert dialled == [([there], [])]

    addresses = [server.tcp_address, other.tcp_address]
    with contextlib.closing(Handle(addresses, window=WINDOW, clock=clock)) as store:
        asyncio.run(scene(Caller(store)))
    other.kill()


def test_many_calls_that_cannot_be_made_are_over_at_once(
    caller: Caller, server: Memcached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are: none of them begins within another."""
    monkeypatch.setattr("nsqdedupe.calls.LIMIT", 1)

    async def scene() -> None:
        await caller.own(delivery(message()))
        await asyncio.to_thread(server.kill)
        caller.submit(caller.store.claim, delivery(message()))
        await caller.answers(1)
        for _ in range(1000):
            caller.submit(caller.store.claim, delivery(message()))
        assert [results for _, results, _ in await caller.answers(1001)] == [[None]] * 1001

    asyncio.run(scene())


def test_what_has_come_in_time_counts_though_it_is_read_late(caller: Caller) -> None:
    """This process was stopped, or had no turn."""

    async def scene() -> None:
        await caller.own(delivery(message()))
        caller.submit(caller.store.claim, delivery(message()))
        caller.calls._wake()
        connection = caller.links[0]._connection
        assert select.select([connection], [], [], MOMENT)[0]
        caller.calls._runs[True].deadline = 0.0
        caller.calls._look()
        assert caller.told == [("claim", [Answer(NEW)], None)]

    asyncio.run(scene())


def test_who_is_not_late_yet_is_looked_at_again(caller: Caller, server: Memcached) -> None:
    async def scene() -> None:
        await caller.own(delivery(message()))
        async with frozen(server):
            caller.submit(caller.store.claim, delivery(message()))
            await caller.sent(1)
            caller.calls._look()
            assert caller.calls._timer is not None
            assert caller.told == []
        assert await caller.answers(1) == [("claim", [Answer(NEW)], None)]

    asyncio.run(scene())


def test_without_a_loop_a_server_that_hangs_costs_its_time_and_no_more(caller: Caller, server: Memcached) -> None:
    asyncio.run(caller.own(delivery(message())))
    process = freeze(server)
    give_up_after(caller.store, 0.1)
    caller.submit(caller.store.claim, delivery(message()))
    os.kill(process, signal.SIGCONT)
    ((_, results, error),) = caller.told
    assert results == [None]
    assert "no answer within 0.1 s" in str(error)


def test_a_loop_calls_nothing_of_what_is_gone() -> None:
    class Gone:
        pass

    called: list[object] = []
    some = Gone()
    whose = weakref.ref(some)
    call_weakly(whose, called.append)
    assert called == [some]
    called.clear()
    del some
    call_weakly(whose, called.append)
    assert called == []


# -- a loop that stops, and a store that is closed ------------------------------------------------


def test_when_the_loop_has_stopped_all_is_waited_for(caller: Caller, server: Memcached) -> None:
    claims = deliveries(4)

    async def scene() -> int:
        await caller.own(*claims[:2])
        process = freeze(server)
        caller.submit(caller.store.confirm, claims[0])
        caller.submit(caller.store.claim, *claims[2:])
        await caller.sent(2)
        caller.submit(caller.store.release, Release(claims[1]))
        return process

    with asyncio.Runner() as runner:
        os.kill(runner.run(scene()), signal.SIGCONT)
        caller.submit(caller.store.confirm, *claims[2:])
        assert sorted(caller.told, key=str) == sorted(
            [
                ("confirm", [True], None),
                ("claim", [Answer(NEW)] * 2, None),
                ("release", [True], None),
                ("confirm", [True, True], None),
            ],
            key=str,
        )
        runner.run(asyncio.sleep(0))
        assert len(caller.told) == 4
    # Another loop may go on.
    asyncio.run(caller.own(delivery(message())))


def test_another_loop_goes_on_with_what_is_under_way(caller: Caller, server: Memcached) -> None:
    async def begin() -> int:
        await caller.own(delivery(message()))
        process = freeze(server)
        caller.submit(caller.store.claim, delivery(message()))
        await caller.sent(1)
        return process

    async def go_on(process: int) -> None:
        caller.submit(caller.store.claim, delivery(message()))
        os.kill(process, signal.SIGCONT)
        assert [results for _, results, _ in await caller.answers(2)] == [[Answer(NEW)]] * 2

    asyncio.run(go_on(asyncio.run(begin())))


@pytest.mark.parametrize("goes_on", ["by none", "by another"])
def test_a_loop_that_stops_while_a_connection_is_made_is_no_obstacle(
    caller: Caller, goes_on: str, held_up: HeldUp
) -> None:
    async def begin() -> None:
        caller.submit(caller.store.claim, delivery(message()))
        await asyncio.to_thread(held_up.dialling.wait, MOMENT)

    async def go_on() -> None:
        caller.submit(caller.store.claim, delivery(message()))
        held_up.gate.set()
        await caller.answers(2)

    with asyncio.Runner() as runner:
        runner.run(begin())
        if goes_on == "by none":
            held_up.gate.set()
            caller.submit(caller.store.claim, delivery(message()))
            runner.run(asyncio.sleep(0))  # the loop is told, too
        else:
            asyncio.run(go_on())
    assert [(results, error) for _, results, error in caller.told] == [([Answer(NEW)], None)] * 2


def test_a_store_that_is_closed_while_a_connection_is_made_keeps_none(caller: Caller, held_up: HeldUp) -> None:
    async def scene() -> None:
        caller.submit(caller.store.claim, delivery(message()))
        await asyncio.to_thread(held_up.dialling.wait, MOMENT)
        caller.store.close()
        held_up.gate.set()
        ((_, results, error),) = await caller.answers(1)
        assert results == [None]
        assert "the store is closed" in str(error)
        assert not caller.links[0].connected

    asyncio.run(scene())


def test_a_child_leaves_its_parents_loop_alone(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fork both have the same list of sockets in the kernel."""

    async def scene() -> None:
        await caller.own(delivery(message()))
        (stream,) = caller.calls._streams.values()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 0)
            stream.listen(None)
        assert asyncio.get_running_loop().remove_reader(stream.number), "it is not listened to any more"

    asyncio.run(scene())


def test_without_a_thread_it_connects_all_the_same(caller: Caller) -> None:
    """No more can be had; or the interpreter is about to end, and closes a reader."""
    caller.calls._dialler.shutdown()
    asyncio.run(caller.own(delivery(message())))


def test_a_contested_bucket_is_tried_again_after_a_moment_with_and_without_a_loop(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write is lost twice, then it comes through; the loop stops in the pause before the third attempt."""
    monkeypatch.setattr("nsqdedupe.memcached.confirming._JITTER", 0.0)
    store = caller.store
    begin, seen = on_loop.begin, []

    def contested(exchange: Any) -> Any:
        commands = b"".join(b"".join(commands) for commands, _ in exchange.pipelines.values())
        if commands.startswith(b"ms %b " % store.bucket_key(claim.fingerprint)):
            seen.append(commands)
            if len(seen) % 3:
                store.put(store.bucket_key(claim.fingerprint), os.urandom(8))
        return begin(exchange)

    claim = delivery(message())

    async def scene() -> None:
        nonlocal claim
        (claim,) = await caller.own(claim)
        monkeypatch.setattr(on_loop, "begin", contested)
        caller.submit(store.confirm, claim)
        assert await caller.answers(1) == [("confirm", [True], None)]
        assert len(seen) == 3
        (claim,) = await caller.own(delivery(message()))
        monkeypatch.setattr("nsqdedupe.memcached.confirming._JITTER", 0.2)
        monkeypatch.setattr("random.uniform", lambda low, high: high)
        caller.submit(store.confirm, claim)
        await eventually_async(lambda: any(run.resting for run in caller.calls._runs.values()))

    asyncio.run(scene())
    caller.submit(store.claim, sibling(claim.fingerprint))
    assert caller.told[1] == ("confirm", [True], None)
    assert verdicts(caller.told[2][1]) == [DONE]


@pytest.mark.parametrize("where", ["on the loop", "in another thread"])
def test_a_store_that_is_closed_answers_nothing_any_more(caller: Caller, server: Memcached, where: str) -> None:
    async def scene() -> None:
        await caller.own(delivery(message()))
        async with frozen(server):
            caller.submit(caller.store.claim, delivery(message()))
            await caller.sent(1)
            if where == "on the loop":
                caller.store.close()
            else:
                await asyncio.to_thread(caller.store.close)
            ((_, results, error),) = await caller.answers(1)
            assert results == [None]
            assert isinstance(error, StoreUnavailable)
        caller.submit(caller.store.claim, delivery(message()))
        (_, (_, results, error)) = await caller.answers(2)
        assert results == [None]
        assert "the store is closed" in str(error)
        assert isinstance(error, StoreError)

    asyncio.run(scene())
    late = caller.store.calls(caller._after)
    assert late is not None
    late.submit(caller.store.claim, [delivery(message())], lambda *told: caller.told.append(("late", *told)))
    assert "the store is closed" in str(caller.told[2][2])


def test_what_results_lead_to_may_close_the_store_under_a_call_that_begins(
    server: Memcached, servers: Servers, clock: ManualClock
) -> None:
    """One server's part of it fails, somebody else who is told so closes the store, the other part is not sent."""
    other = servers.memcached()

    async def scene(caller: Caller) -> None:
        await caller.own(*deliveries(20))
        here, there = caller.links

        def on(link: Link) -> Claim:
            return next(claim for claim in deliveries(100) if caller.calls._servers.spots([claim[0]])[0][0] is link)

        (claim,) = await caller.own(on(here))
        async with frozen(server):
            caller.calls.submit(caller.store.confirm, [claim], lambda *_: caller.store.close())
            await caller.sent(1)
            assert here._connection is not None
            here._connection.shutdown(socket.SHUT_WR)
            caller.submit(caller.store.claim, on(here), on(there))
            ((_, results, error),) = await caller.answers(1)
        assert results == [None, None]
        assert isinstance(error, StoreUnavailable)

    addresses = [server.tcp_address, other.tcp_address]
    with contextlib.closing(Handle(addresses, window=WINDOW, clock=clock)) as store:
        asyncio.run(scene(Caller(store)))
    other.kill()


def test_its_connections_end_with_it(line: Relay) -> None:
    with contextlib.closing(through(line)) as store:
        caller: Caller | None = Caller(store)
        assert caller is not None
        with asyncio.Runner() as runner:
            runner.run(caller.own(delivery(message())))
            (ours,) = caller.links
            caller = None
            eventually(lambda: gc.collect() is None or not ours.connected)
            assert not ours.connected
            runner.run(asyncio.sleep(0))  # the loop does not listen to it any more


def test_what_is_forgotten_by_the_store_is_not_held_on_the_loop(caller: Caller) -> None:
    async def scene() -> None:
        here, elsewhere = await caller.own(*deliveries(2))
        caller.store.forget([here.fingerprint])
        await asyncio.to_thread(caller.store.forget, [elsewhere.fingerprint])
        await asyncio.sleep(0)
        caller.submit(caller.store.extend, here, elsewhere)
        assert await caller.answers(1) == [("extend", [False, False], None)]

    asyncio.run(scene())


def test_a_connection_that_was_closed_is_not_read_any_more(caller: Caller) -> None:
    async def scene() -> None:
        await caller.own(delivery(message()))
        (stream,) = caller.calls._streams.values()
        caller.store.close()
        assert stream.ended
        assert not stream.read()

    asyncio.run(scene())


# -- which stores ---------------------------------------------------------------------------------


class Counting(Patient):
    """With a verb of its own."""

    def claim(self, claims: Sequence[Claim]) -> Sequence[Answer]:
        return super().claim(claims)


def test_a_store_with_verbs_of_its_own_is_called_by_those(memcached: Memcached) -> None:
    with contextlib.closing(Counting(memcached.tcp_address, namespace=uuid.uuid4().hex)) as store:
        assert store.calls(lambda: None) is None
    with contextlib.closing(Patient(memcached.tcp_address, namespace=uuid.uuid4().hex)) as other:
        other.confirm = lambda claims: [True] * len(claims)  # type: ignore[method-assign]
        assert other.calls(lambda: None) is None


def test_a_store_in_memory_is_called_by_nobody_else() -> None:
    assert MemoryStore(window=1).calls(lambda: None) is None
