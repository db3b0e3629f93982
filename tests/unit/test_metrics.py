"""Counters whose sum always holds, and one snapshot for whoever reads them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqdedupe.metrics import Events, Stats, Tally, snapshot

ANSWERS = ("handled", "duplicates", "failed", "deferred", "given_up", "invalid", "unanswered")
BESIDE = (
    "unprotected",
    "standbys",
    "takeovers",
    "late_confirms",
    "fin_failed",
    "key_errors",
    "store_errors",
    "outages",
    "observed",
    "fatal_errors",
)


def tally_of(received: int, **answers: int) -> Tally:
    tally = Tally()
    tally.received = received
    for name, count in answers.items():
        setattr(tally, name, count)
    return tally


def test_counters_begin_at_0() -> None:
    stats = snapshot(Events(), {})
    assert stats.as_dict() == {**dict.fromkeys(("received", *ANSWERS, "in_flight", *BESIDE), 0), "nsqds": {}}


@pytest.mark.parametrize("answer", ANSWERS)
def test_every_answer_closes_one_delivery(answer: str) -> None:
    assert tally_of(3).in_flight == 3
    assert tally_of(3, **{answer: 2}).in_flight == 1


@given(st.lists(st.tuples(*[st.integers(0, 1 << 40)] * 8), max_size=4))
def test_the_sum_holds_for_each_nsqd_and_for_all(counts: list[tuple[int, ...]]) -> None:
    tallies = {
        f"nsqd{number}:4150": tally_of(open_ + sum(answers), **dict(zip(ANSWERS, answers, strict=True)))
        for number, (open_, *answers) in enumerate(counts)
    }
    stats = snapshot(Events(), tallies)
    for tally in (stats.as_dict(), *stats.nsqds.values()):
        total = sum(int(str(tally[name])) for name in (*ANSWERS, "in_flight"))
        assert tally["received"] == total
    assert stats.in_flight == sum(open_ for open_, *_ in counts)


def test_a_snapshot_adds_up_all_nsqds_and_keeps_each() -> None:
    tallies = {"nsqd1:4150": tally_of(7, handled=4, failed=1), "nsqd2:4150": tally_of(5, duplicates=5)}
    stats = snapshot(Events(), tallies)
    assert (stats.received, stats.handled, stats.failed, stats.duplicates, stats.in_flight) == (12, 4, 1, 5, 2)
    assert stats.nsqds == {
        "nsqd1:4150": {**dict.fromkeys(ANSWERS, 0), "received": 7, "handled": 4, "failed": 1, "in_flight": 2},
        "nsqd2:4150": {**dict.fromkeys(ANSWERS, 0), "received": 5, "duplicates": 5, "in_flight": 0},
    }


def test_a_snapshot_carries_what_else_happened() -> None:
    events = Events()
    for number, name in enumerate(BESIDE):
        setattr(events, name, number + 1)
    stats = snapshot(events, {})
    assert [getattr(stats, name) for name in BESIDE] == list(range(1, len(BESIDE) + 1))


def test_a_snapshot_does_not_change_when_the_counters_do() -> None:
    events, tally = Events(), tally_of(1)
    stats = snapshot(events, {"nsqd1:4150": tally})
    before = stats.as_dict()
    tally.received = tally.handled = events.outages = 9
    assert stats.as_dict() == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.handled = 1  # type: ignore[misc]


def test_as_dict_is_ready_for_json_and_names_every_counter() -> None:
    stats = snapshot(Events(), {"nsqd1:4150": tally_of(2, handled=1)})
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()
    assert list(stats.as_dict()) == [field.name for field in dataclasses.fields(Stats)]


def test_a_dict_that_is_changed_changes_no_snapshot() -> None:
    stats = snapshot(Events(), {"nsqd1:4150": tally_of(2)})
    copied = stats.as_dict()["nsqds"]
    assert isinstance(copied, dict)
    copied["nsqd1:4150"]["received"] = 99
    copied.clear()
    assert stats.nsqds["nsqd1:4150"]["received"] == 2
