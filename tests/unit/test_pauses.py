"""Pauses between attempts to connect: back soon after a restart, no hammering of what stays away."""

from __future__ import annotations

import random

import pytest

from nsqdedupe.pauses import HURRY, LONGEST, SHORTEST, Pauses
from nsqdedupe.testing import ManualClock


def longest_first(low: float, high: float) -> float:
    return high


def series(count: int, *, hurry: bool = True) -> list[float]:
    """The pauses of one outage, each waited for."""
    clock = ManualClock()
    pauses = Pauses(clock)
    found = []
    for _ in range(count):
        found.append(pauses.next(hurry=hurry))
        clock.advance(found[-1])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_who_comes_back_after_a_restart_waits_for_less_than_two_seconds(seed: int) -> None:
    random.seed(seed)
    waited = 0.0
    for pause in series(200):
        assert pause < 2
        waited += pause
        if waited > HURRY:
            return
    pytest.fail("it never got as far")


def test_they_double_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", longest_first)
    assert series(12, hurry=False) == [min(LONGEST, SHORTEST * 2**n) for n in range(12)]
    away = series(40)
    late = away[away.index(max(pause for pause in away if pause < 2)) :]
    growing = [pause for pause in late if pause > 2]
    assert growing[:5] == [3.0, 6.0, 12.0, 24.0, 48.0]
    assert set(growing[5:]) == {LONGEST}


def test_chance_takes_half_of_a_pause_at_most() -> None:
    firsts = {series(1)[0] for _ in range(100)}
    assert len(firsts) > 50
    assert SHORTEST / 2 <= min(firsts) <= max(firsts) <= SHORTEST


def test_after_an_outage_it_begins_anew() -> None:
    clock = ManualClock()
    pauses = Pauses(clock)
    for _ in range(30):
        clock.advance(pauses.next())
    assert pauses.next() > SHORTEST
    pauses.reset()
    assert pauses.next() <= SHORTEST


def test_the_longest_pause_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", longest_first)
    pauses = Pauses(ManualClock(), longest=0.5)
    assert [pauses.next(hurry=False) for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
