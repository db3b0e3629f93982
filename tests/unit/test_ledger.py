"""A store whose failures are answers: told once, counted always, and made up for when it is back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from harness import Gate, fingerprint_of

from nsqdedupe import ledger as ledger_module
from nsqdedupe.calls import Inline
from nsqdedupe.errors import StoreError
from nsqdedupe.ledger import UNCONFIRMED_SECONDS, Ledger
from nsqdedupe.metrics import Events
from nsqdedupe.store import Answer, Claim, Release, Verdict
from nsqdedupe.stores.embedded import MemoryStore
from nsqdedupe.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gate(clock: ManualClock) -> Gate:
    return Gate(MemoryStore(slots=1 << 12, clock=clock))


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def ledger(gate: Gate, events: Events, clock: ManualClock) -> Ledger:
    return Ledger(gate, calls=Inline(), events=events, clock=clock)


def results(verb: Callable[..., None], items: Sequence[Claim | Release]) -> list[Any]:
    """What a verb gives out."""
    given: list[Any] = []
    verb(items, given.extend)
    return given


def claim_of(message: str, serial: int = 1) -> Claim:
    return Claim(fingerprint_of(message), b"nsqd1/a", b"process1" + serial.to_bytes(8, "big"), 60.0)


def verdicts(gate: Gate, *messages: str) -> list[Verdict]:
    others = [Claim(fingerprint_of(message), b"nsqd2/b", b"process2" + bytes(8), 60.0) for message in messages]
    return [answer.verdict for answer in gate.store.claim(others)]


def test_a_store_that_answers_is_passed_through(ledger: Ledger, gate: Gate, events: Events) -> None:
    claims = [claim_of("m"), claim_of("n")]
    assert results(ledger.claim, claims) == [Answer(Verdict.NEW), Answer(Verdict.NEW)]
    assert results(ledger.extend, [*claims, claim_of("o")]) == [True, True, False]
    assert results(ledger.confirm, [claims[0], claim_of("n", serial=2)]) == [True, False]
    ledger.release([Release(claims[1])], lambda: None)
    assert gate.asked() == [("claim", 2), ("extend", 3), ("confirm", 2), ("release", 1)]
    assert (events.store_errors, events.outages) == (0, 0)


def test_a_store_that_does_not_answer_claims_nothing(ledger: Ledger, gate: Gate) -> None:
    gate.cut = "before"
    assert results(ledger.claim, [claim_of("m")]) == [None]


def test_whether_a_claim_that_cannot_be_extended_is_ours_is_not_known(ledger: Ledger, gate: Gate) -> None:
    gate.cut = "before"
    assert results(ledger.extend, [claim_of("m"), claim_of("n")]) == [None, None]


def test_every_item_of_a_call_that_fails_is_counted(ledger: Ledger, gate: Gate, events: Events) -> None:
    gate.cut = "before"
    results(ledger.claim, [claim_of("m"), claim_of("n")])
    ledger.release([Release(claim_of("m"))], lambda: None)
    results(ledger.extend, [claim_of("m")])
    assert events.store_errors == 4


# -- told once -----------------------------------------------------------------------------------


def test_an_outage_is_told_when_it_begins_and_when_it_ends(
    ledger: Ledger, gate: Gate, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        gate.cut = "before"
        for _ in range(3):
            results(ledger.claim, [claim_of("m")])
        gate.cut = None
        for _ in range(3):
            results(ledger.claim, [claim_of("m")])
    lost = (logging.WARNING, "store out of reach: StoreUnavailable: cut off")
    back = (logging.INFO, "store is back")
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [lost, back, lost, back]
    assert events.outages == 2


def test_an_outage_lasts_as_long_as_any_server_of_the_store_is_away(
    ledger: Ledger, gate: Gate, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    away = ["10.0.0.2:11211"]
    gate.unreachable = lambda: away  # type: ignore[method-assign]
    for message in "mno":
        gate.cut = "before"
        results(ledger.claim, [claim_of(message)])
        gate.cut = None
        results(ledger.claim, [claim_of(message)])  # of a server that is there
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    away.clear()
    results(ledger.claim, [claim_of("m")])
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert events.outages == 1


@pytest.mark.parametrize(("error", "traced"), [(StoreError("nonsense"), False), (KeyError("bug"), True)])
def test_whatever_a_store_raises_is_an_outage_and_only_a_surprise_has_a_traceback(
    ledger: Ledger, gate: Gate, caplog: pytest.LogCaptureFixture, error: Exception, traced: bool
) -> None:
    def listener(verb: str) -> None:
        raise error

    gate.listener = listener
    assert results(ledger.claim, [claim_of("m")]) == [None]
    (record,) = caplog.records
    assert bool(record.exc_info) is traced


def test_a_store_that_answers_too_little_or_too_much_has_not_answered(
    ledger: Ledger, gate: Gate, events: Events, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answers in ([], [Answer(Verdict.DONE)] * 3):
        monkeypatch.setattr(gate.store, "claim", lambda claims, answers=answers: answers)
        assert results(ledger.claim, [claim_of("m"), claim_of("n")]) == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "store out of reach: StoreError: the store gave 0 answers for 2"
    ]
    assert events.store_errors == 4


def test_what_stops_the_process_is_no_outage(ledger: Ledger, gate: Gate, events: Events) -> None:
    def listener(verb: str) -> None:
        raise KeyboardInterrupt

    gate.listener = listener
    with pytest.raises(KeyboardInterrupt):
        results(ledger.claim, [claim_of("m")])
    assert events.outages == 0


# -- what could not be confirmed -----------------------------------------------------------------


def test_what_could_not_be_confirmed_is_known_until_the_store_has_it(ledger: Ledger, gate: Gate) -> None:
    gate.cut = "before"
    assert results(ledger.confirm, [claim_of("m"), claim_of("n")]) == [True, True]
    assert ledger.knows(fingerprint_of("m"))
    assert ledger.knows(fingerprint_of("n"))
    assert not ledger.knows(fingerprint_of("o"))
    ledger.catch_up()
    assert ledger.knows(fingerprint_of("m"))
    gate.cut = None
    gate.asked()
    ledger.catch_up()
    assert gate.asked() == [("confirm", 2)]
    assert not ledger.knows(fingerprint_of("m"))
    assert verdicts(gate, "m", "n", "o") == [Verdict.DONE, Verdict.DONE, Verdict.NEW]


def test_what_could_not_be_confirmed_is_counted_once(ledger: Ledger, gate: Gate, events: Events) -> None:
    gate.cut = "before"
    results(ledger.confirm, [claim_of("m"), claim_of("n")])
    for _ in range(5):
        ledger.catch_up()
    assert events.store_errors == 2


def test_a_confirm_whose_reply_was_lost_is_confirmed_again(ledger: Ledger, gate: Gate) -> None:
    gate.cut = "after"
    results(ledger.confirm, [claim_of("m")])
    gate.cut = None
    ledger.catch_up()
    assert not ledger.knows(fingerprint_of("m"))
    assert verdicts(gate, "m") == [Verdict.DONE]


def test_with_nothing_to_catch_up_the_store_is_left_alone(ledger: Ledger, gate: Gate) -> None:
    ledger.catch_up()
    results(ledger.confirm, [claim_of("m")])
    gate.asked()
    ledger.catch_up()
    assert gate.asked() == []


def test_each_success_is_kept_for_ten_minutes(ledger: Ledger, gate: Gate, clock: ManualClock) -> None:
    gate.cut = "before"
    results(ledger.confirm, [claim_of("m")])
    clock.advance(1.0)
    results(ledger.confirm, [claim_of("n")])
    clock.advance(UNCONFIRMED_SECONDS - 1.0)
    ledger.catch_up()
    assert not ledger.knows(fingerprint_of("m"))
    assert ledger.knows(fingerprint_of("n"))
    clock.advance(1.0)
    ledger.catch_up()
    assert not ledger.knows(fingerprint_of("n"))


def test_the_oldest_go_first_when_there_are_too_many(
    ledger: Ledger, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "UNCONFIRMED_LIMIT", 3)
    gate.cut = "before"
    results(ledger.confirm, [claim_of(message) for message in "mn"])
    results(ledger.confirm, [claim_of(message) for message in "opq"])
    assert [ledger.knows(fingerprint_of(message)) for message in "mnopq"] == [False, False, True, True, True]


class Watched(float):
    """A time that counts how often others are compared with it."""

    looks = 0

    def __ge__(self, other: float) -> bool:
        Watched.looks += 1
        return float(self) >= other


def test_to_catch_up_does_not_look_at_all_that_is_kept(gate: Gate, events: Events, clock: ManualClock) -> None:
    """An outage under load leaves 100,000."""
    ledger = Ledger(gate, calls=Inline(), events=events, clock=lambda: Watched(clock()))
    gate.cut = "before"
    results(ledger.confirm, [claim_of(f"{number}") for number in range(1000)])
    Watched.looks = 0
    ledger.catch_up()
    assert Watched.looks == 1


def test_what_is_kept_anew_is_kept_for_ten_minutes_from_then(ledger: Ledger, gate: Gate, clock: ManualClock) -> None:
    gate.cut = "before"
    results(ledger.confirm, [claim_of("m"), claim_of("n")])
    clock.advance(UNCONFIRMED_SECONDS / 2)
    results(ledger.confirm, [claim_of("m", 2)])
    clock.advance(UNCONFIRMED_SECONDS / 2)
    ledger.catch_up()
    assert (ledger.knows(fingerprint_of("m")), ledger.knows(fingerprint_of("n"))) == (True, False)
