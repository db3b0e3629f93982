"""All that can go wrong with a memcached, on a real one."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest
from messages import (
    DONE,
    IN_PROGRESS,
    NEW,
    Patient,
    ask,
    deliveries,
    delivery,
    freeze,
    give_up_after,
    message,
    own,
    sibling,
    verdicts,
)
from relay import Relay
from servers import MOMENT, Servers
from test_memcached_verbs import Handle

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.errors import StoreUnavailable
from nsqdedupe.memcached.link import LONGEST_PAUSE
from nsqdedupe.store import Answer, Claim, Release, Store
from nsqdedupe.testing import ManualClock

WINDOW = 10_000


@pytest.fixture
def clock() -> ManualClock:
    """For how long the store leaves a server alone."""
    return ManualClock()


@pytest.fixture
def store(server: Memcached, clock: ManualClock) -> Iterator[Handle]:
    with contextlib.closing(Handle(server.tcp_address, window=WINDOW, clock=clock)) as made:
        yield made


@pytest.fixture
def peer(server: Memcached) -> Iterator[Handle]:
    with contextlib.closing(Handle(server.tcp_address, window=WINDOW)) as made:
        yield made


def every_verb(store: Store) -> list[Callable[[], object]]:
    claim = delivery(message())
    return [
        lambda: store.claim([claim]),
        lambda: store.confirm([claim]),
        lambda: store.release([Release(claim)]),
        lambda: store.extend([claim]),
        lambda: store.start([claim]),
        lambda: store.forget([claim.fingerprint]),
    ]


# -- killed, restarted, stopped ------------------------------------------------------------------


def test_a_killed_server_is_unavailable_and_back_as_soon_as_it_is_asked_again(
    server: Memcached, store: Handle, clock: ManualClock
) -> None:
    claim = own(store, message())
    server.kill()
    for verb in every_verb(store):
        with pytest.raises(StoreUnavailable, match=server.tcp_address) as away:
            verb()
        assert away.value.results is None
    assert store.unreachable() == [server.tcp_address]
    server.start()
    with pytest.raises(StoreUnavailable):
        store.claim([claim])  # it is left alone for a while
    clock.advance(LONGEST_PAUSE)
    assert verdicts(store.claim(deliveries(3))) == [NEW] * 3
    assert store.unreachable() == []


def test_an_empty_server_after_a_restart_is_used_at_once(server: Memcached, store: Handle) -> None:
    """Its connections have ended, which is seen before anything is sent: no batch is lost to it."""
    claim = own(store, message())
    store.confirm([claim])
    server.kill()
    server.start()
    assert ask(store, sibling(claim.fingerprint)) == Answer(NEW)


def test_who_is_handled_while_the_server_restarts_empty_keeps_its_claim(
    server: Memcached, store: Handle, peer: Handle
) -> None:
    extended, confirmed, released = (own(store, message()) for _ in range(3))
    server.kill()
    server.start()
    assert store.extend([extended]) == [True]
    assert store.confirm([confirmed]) == [False]
    assert store.release([Release(released, failed=True)]) == [False]
    answers = peer.claim([sibling(claim.fingerprint) for claim in (extended, confirmed, released)])
    assert [(answer.verdict, answer.tries) for answer in answers] == [(IN_PROGRESS, 0), (DONE, 0), (NEW, 0)]


def test_a_token_of_before_a_restart_does_not_fit_anothers_claim_though_it_is_the_same_number(
    server: Memcached, store: Handle, peer: Handle
) -> None:
    peer.close()
    fingerprint = message()

    def token(handle: Handle) -> bytes:
        return handle._servers.links[0].epoch and handle._session.held._held[fingerprint].token

    stale = own(store, fingerprint)
    number = int(token(store))
    server.kill()
    server.start()
    with contextlib.closing(Handle(server.tcp_address, window=WINDOW)) as successor:
        # Tokens count what is written: write until the next one is the one of before.
        own(successor, message())
        while int(next(reversed(successor._session.held._held.values())).token) < number - 1:
            own(successor, message())
        owner = own(successor, fingerprint)
        assert int(token(successor)) == number
        # The store has to connect for this, which takes tokens, but its own was of before.
        assert store.release([Release(stale, failed=True)]) == [False]
        assert store.extend([stale]) == [False]
        assert store.confirm([stale]) == [False]
        assert successor.extend([owner]) == [True]


def test_a_stopped_server_costs_one_timeout_and_its_late_replies_reach_nobody(servers: Servers) -> None:
    server, clock = servers.memcached(), ManualClock()
    with contextlib.closing(Handle(server.tcp_address, window=WINDOW, clock=clock)) as store:
        done = own(store, message())
        store.confirm([done])
        process = freeze(server)
        unanswered = deliveries(50)
        give_up_after(store, 0.2)
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.2 s"):
            store.claim(unanswered)
        os.kill(process, signal.SIGCONT)
        # It works off what it was sent, on the connection that was closed. Our next batch is as long as that one,
        # and must be told its own answers.
        clock.advance(LONGEST_PAUSE)
        give_up_after(store, MOMENT)
        others = [sibling(done.fingerprint), *deliveries(49)]
        assert verdicts(store.claim(others)) == [DONE, *[NEW] * 49]
        # The lost reply is no loss either: who asks again with the same nonce is its own winner.
        assert verdicts(store.claim(unanswered)) == [NEW] * 50


def test_flush_all_forgets_and_nothing_worse(server: Memcached, store: Handle, peer: Handle) -> None:
    done, handled = own(store, message()), own(store, message())
    store.confirm([done])
    server.command("flush_all")
    assert ask(peer, sibling(done.fingerprint)) == Answer(NEW)
    assert store.extend([handled]) == [True]
    assert ask(peer, sibling(handled.fingerprint)).verdict is IN_PROGRESS
    store.confirm([handled])
    assert ask(peer, sibling(handled.fingerprint)) == Answer(DONE)


def test_a_server_that_evicts_all_the_time_slips_and_drops_nothing(servers: Servers) -> None:
    server = servers.memcached(memory=2)
    with contextlib.closing(Patient(server.tcp_address, window=100_000)) as store:
        for _ in range(15):
            claims = deliveries(1000)
            assert verdicts(store.claim(claims)) == [NEW] * 1000
            assert all(store.start(claims))
            store.confirm(claims)
    assert int(server.stats()["evictions"]) > 0


# -- connections that break ----------------------------------------------------------------------


CUTS = [0, 1, 2, 4, 5, 6, 7, 10, 11, 20, 40, 60, 90, 120, 150, 200, 260, 300]


@pytest.mark.parametrize("cut", CUTS)
def test_a_connection_that_breaks_in_the_middle_of_a_reply_mixes_nothing_up(line: Relay, cut: int) -> None:
    clock = ManualClock()
    options = {"window": WINDOW, "namespace": uuid.uuid4().hex, "clock": clock}
    with contextlib.closing(Handle(line.address, **options)) as store:  # type: ignore[arg-type]
        done, busy = own(store, message()), own(store, message())
        store.confirm([done])

        def asking(*messages: bytes | None) -> list[Claim]:
            return [sibling(each or message()) for _ in range(5) for each in messages]

        asked = asking(done.fingerprint, None, busy.fingerprint, done.fingerprint)
        line.cut_after = cut
        with pytest.raises(StoreUnavailable) as broken:
            store.claim(asked)
        assert broken.value.results is None
        clock.advance(LONGEST_PAUSE)
        # What was asked first is asked last now: with answers of before, all would be wrong.
        other = asking(busy.fingerprint, done.fingerprint, None, busy.fingerprint)
        assert verdicts(store.claim(other)) == [IN_PROGRESS, DONE, NEW, IN_PROGRESS] * 5
        assert verdicts(store.claim(asked)) == [DONE, NEW, IN_PROGRESS, DONE] * 5


def test_each_verb_that_loses_its_reply_may_be_repeated(line: Relay) -> None:
    clock = ManualClock()
    namespace = uuid.uuid4().hex
    with contextlib.closing(Handle(line.address, window=WINDOW, namespace=namespace, clock=clock)) as store:

        def repeated(verb: Callable[[Claim], list[bool]]) -> list[bool]:
            claim = own(store, message())
            messages.append(claim.fingerprint)
            line.cut_after = 0
            with pytest.raises(StoreUnavailable):
                verb(claim)
            clock.advance(LONGEST_PAUSE)
            return verb(claim)

        messages: list[bytes] = []
        assert repeated(lambda claim: store.extend([claim])) == [True]
        assert repeated(lambda claim: store.start([claim])) == [True]
        assert repeated(lambda claim: store.release([Release(claim, failed=True)])) == [False]
        repeated(lambda claim: store.confirm([claim]))
        answers = store.claim([sibling(each) for each in messages])
        assert [(answer.verdict, answer.tries) for answer in answers] == [
            (IN_PROGRESS, 0),
            (IN_PROGRESS, 0),
            (NEW, 1),
            (DONE, 0),
        ]
        line.cut_after = 0
        with pytest.raises(StoreUnavailable, match="forget: 4 of 4 not forgotten"):
            store.forget(messages)
        clock.advance(LONGEST_PAUSE)
        store.forget(messages)
        assert store.claim([sibling(each) for each in messages]) == [Answer(NEW)] * 4


def test_replies_that_nobody_asked_for_are_not_read(line: Relay) -> None:
    """A proxy that repeats a reply: the second one would fit the next batch."""
    with contextlib.closing(Handle(line.address, window=WINDOW, namespace=uuid.uuid4().hex)) as store:
        done = own(store, message())
        store.confirm([done])
        line.lie = lambda reply: reply + reply
        repeated = False
        try:
            assert ask(store, sibling(done.fingerprint)) == Answer(DONE)
        except StoreUnavailable:
            repeated = True  # both came in one piece
        line.lie = lambda reply: reply
        if not repeated:
            assert ask(store, delivery(message())) == Answer(NEW)


def test_a_reply_that_lacks_what_was_asked_for_is_no_answer(line: Relay) -> None:
    clock = ManualClock()
    with contextlib.closing(Handle(line.address, window=WINDOW, namespace=uuid.uuid4().hex, clock=clock)) as store:
        busy = own(store, message())
        for told, instead in ((b" t", b" x"), (b" t3", b" tx"), (b" f0", b"")):
            line.lie = lambda reply, told=told, instead=instead: reply.replace(told, instead)  # type: ignore[misc]
            with pytest.raises(StoreUnavailable, match="a flag that was asked for is missing"):
                ask(store, sibling(busy.fingerprint))
            line.lie = lambda reply: reply
            clock.advance(LONGEST_PAUSE)
            assert ask(store, sibling(busy.fingerprint)).verdict is IN_PROGRESS


def test_a_program_that_is_interrupted_gets_its_own_answers_afterwards(
    line: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Handle(line.address, window=WINDOW, namespace=uuid.uuid4().hex)) as store:
        done = own(store, message())
        store.confirm([done])

        def interrupted(*args: object) -> None:
            for talk in args[0]:  # type: ignore[attr-defined]
                talk.write()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("nsqdedupe.memcached.servers.converse", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.claim([sibling(done.fingerprint)])
        assert ask(store, delivery(message())) == Answer(NEW)


FORKED = """
import os, sys
from nsqdedupe import Claim, MemcachedStore, Verdict

store = MemcachedStore(sys.argv[1], window=10_000, namespace=sys.argv[2], connect_timeout=60, timeout=60)
store.claim([Claim(bytes(16), b"a", bytes(16), 60.0)])
child = os.fork()
for serial in range(50):
    nonce = os.urandom(16)
    claims = [Claim(os.urandom(16), b"a", os.urandom(16), 60.0) for _ in range(5)]
    assert [answer.verdict for answer in store.claim(claims)] == [Verdict.NEW] * 5
    assert store.confirm(claims) == [True] * 5
    assert [answer.verdict for answer in store.claim(claims)] == [Verdict.DONE] * 5
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_parent_and_child_after_a_fork_do_not_read_each_others_replies(memcached: Memcached) -> None:
    command = [sys.executable, "-c", FORKED, memcached.tcp_address, uuid.uuid4().hex]
    subprocess.run(command, check=True, timeout=120)


# -- who else is there ---------------------------------------------------------------------------


def test_two_namespaces_know_nothing_of_each_other(memcached: Memcached) -> None:
    with contextlib.ExitStack() as stack:
        one, other = (
            stack.enter_context(
                contextlib.closing(Handle(memcached.tcp_address, window=window, namespace=uuid.uuid4().hex))
            )
            for window in (10_000, 50_000)
        )
        claim = own(one, message())
        one.confirm([claim])
        assert ask(other, sibling(claim.fingerprint)) == Answer(NEW)


def test_keys_of_another_program_are_left_alone(server: Memcached, store: Handle) -> None:
    strange = [b"nsqdedupe", b"nsqdedupe:", b"nsqdedupe:c", b"nsqdedupe:other", b"nsqdedupe2:c:x"]
    for key in strange:
        store.put(key, b"theirs")
    claims = deliveries(100)
    store.claim(claims)
    store.confirm(claims[:50])
    store.release([Release(claim) for claim in claims[50:]])
    store.forget([claim.fingerprint for claim in claims])
    assert [store.say(b"mg %b v\r\n" % key, b"r")[1] for key in strange] == [b"theirs"] * 5
    assert store.damaged == 0


DAMAGED_BUCKETS = [b"x", b"x" * 7, b"x" * 9, b"x" * 264, b"x" * 100_000, b"\r\nMN\r\n.", b""]


@pytest.mark.parametrize("value", DAMAGED_BUCKETS, ids=lambda value: str(len(value)))
def test_a_damaged_bucket_is_empty_and_replaced_by_the_next_success(
    store: Handle, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    fingerprint = message()
    store.put(store.bucket_key(fingerprint), value)
    claim = own(store, fingerprint)
    assert store.confirm([claim]) == [True]
    assert store.bucket(fingerprint) == store.tag(fingerprint) + (value if len(value) == 8 else b"")
    assert store.damaged == (0 if len(value) in (0, 8) else 1)
    assert len(caplog.records) == store.damaged


def test_a_bucket_that_is_damaged_while_its_message_is_handled_is_replaced_too(store: Handle) -> None:
    confirmed, unclaimed, forgotten = message(), message(), message()
    claim = own(store, confirmed)
    for fingerprint in (confirmed, unclaimed, forgotten):
        store.put(store.bucket_key(fingerprint), b"x" * 300)
    assert store.confirm([claim, sibling(unclaimed)]) == [True, False]
    store.forget([forgotten])
    assert store.bucket(confirmed) == store.tag(confirmed)
    assert verdicts(store.claim([sibling(confirmed), sibling(unclaimed), sibling(forgotten)])) == [DONE, DONE, NEW]


DAMAGED_CLAIMS = [b"", b"d", b"DD", b"C", b"C" * 33, b"X" * 34, b"C" * 35, b"\x80\x04N.", b"x" * 5000]


@pytest.mark.parametrize("value", DAMAGED_CLAIMS, ids=lambda value: str(value[:2]))
def test_a_damaged_claim_is_free_and_replaced(store: Handle, value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    fingerprint = message()
    store.put(store.claim_key(fingerprint), value)
    claim = delivery(fingerprint)
    assert ask(store, claim) == Answer(NEW)
    assert store.damaged == len(caplog.records) == 1
    assert store.extend([claim]) == [True]


def test_a_strangers_flags_make_no_marker_of_a_letter(store: Handle) -> None:
    fingerprint = message()
    assert store.say(b"ms %b 1 F2\r\nD\r\n" % store.claim_key(fingerprint))[0] == b"HD"
    assert ask(store, sibling(fingerprint)) == Answer(NEW)
    assert store.damaged == 1


def test_claims_that_are_damaged_while_they_are_held_are_not_ours_any_more(store: Handle) -> None:
    claims = [own(store, message()) for _ in range(3)]
    for claim in claims:
        store.put(store.claim_key(claim.fingerprint), b"nonsense")
    extended, released, confirmed = claims
    assert store.extend([extended]) == [False]
    assert store.release([Release(released)]) == [False]
    assert store.confirm([confirmed]) == [False]
    assert ask(store, sibling(confirmed.fingerprint)) == Answer(DONE)


def test_damage_is_told_once_and_counted_each_time(store: Handle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        fingerprint = message()
        store.put(store.claim_key(fingerprint), b"nonsense")
        ask(store, delivery(fingerprint))
    assert store.damaged == 3
    (record,) = caplog.records
    assert "is not ours and counts as nothing" in record.getMessage()


def test_a_bucket_that_others_write_all_the_time_is_given_up_for_now(
    store: Handle, peer: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqdedupe.memcached.confirming.ATTEMPTS", 3)
    contested, quiet = b"12345678" + b"the same", message()
    claims = [own(store, contested), own(store, quiet)]
    original = store._servers.ask

    def ask_after_another(*args: object) -> None:
        peer.put(peer.bucket_key(contested), os.urandom(8))
        original(*args)  # type: ignore[arg-type]

    store._servers.ask = ask_after_another  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="confirm: 1 of 2 without an answer") as away:
        store.confirm(claims)
    assert away.value.results == [None, True]

    def ask_after_it_is_back(*args: object) -> None:
        peer.put(peer.bucket_key(contested), b"12345678")
        original(*args)  # type: ignore[arg-type]

    store._servers.ask = ask_after_it_is_back  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="forget: 1 of 1 not forgotten"):
        store.forget([contested])
