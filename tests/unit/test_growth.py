"""What one message costs does not depend on how many others wait: lines of Python are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

import pytest
from harness import Consumer

import nsqdedupe
from nsqdedupe.delivery import Delivery, Outcome
from nsqdedupe.stores.embedded import MemoryStore
from nsqdedupe.testing import ManualClock

FEW, MANY = 300, 3000
"""How many wait. What is quadratic takes ten times as many lines per message for the second as for the first."""

SOURCE = nsqdedupe.__path__[0]


class Lines:
    """Counts the lines of this package that run."""

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        self.count += event == "line"
        return self._trace

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


class Crowd(Consumer):
    """A consumer with room for all, and names for as many messages as it shall meet."""

    def __init__(self, count: int) -> None:
        clock = ManualClock()
        super().__init__(clock, MemoryStore(slots=1 << 14, clock=clock))
        self.count = count
        self.limit = 4 * count

    def names(self, copy: str) -> list[str]:
        return [f"{number}/{copy}" for number in range(self.count)]


def end(consumer: Consumer, names: Sequence[str], outcome: Outcome) -> None:
    """All these handlers answer, and what comes of it is carried out."""
    for name in names:
        consumer.deduper.answer(consumer.deliveries[name], outcome)
    consumer.work()


def handled(crowd: Crowd) -> None:
    """Each message's copy stands by; all succeed."""
    crowd.deliver(*crowd.names("a"), *crowd.names("b"))
    end(crowd, crowd.names("a"), Outcome.HANDLED)


def failed(crowd: Crowd) -> None:
    """Each message's copy stands by; all fail."""
    crowd.deliver(*crowd.names("a"), *crowd.names("b"))
    end(crowd, crowd.names("a"), Outcome.FAILED)


def one_message(crowd: Crowd) -> None:
    """All are copies of one message: equal bodies, published many times."""
    copies = [f"m/{nsqd}" for nsqd in map(chr, range(0x4E00, 0x4E00 + crowd.count))]
    crowd.deliver(*copies)
    end(crowd, copies[:1], Outcome.HANDLED)


def heirs(crowd: Crowd) -> None:
    """The connection of all owners is lost before their turn: every standby asks for its message."""
    crowd.take(*crowd.names("a"), *crowd.names("b"))
    crowd.lose("a")
    crowd.work()
    end(crowd, crowd.names("b"), Outcome.HANDLED)


def elsewhere(crowd: Crowd) -> None:
    """Another process has all messages; they come one by one, ask several times, and then it has handled them."""
    other = crowd.beside()
    other.deliver(*crowd.names("a"))
    for name in crowd.names("b"):
        crowd.deliver(name)
    for _ in range(4):
        crowd.clock.advance(1.0)
        crowd.work()
    end(other, crowd.names("a"), Outcome.HANDLED)
    crowd.clock.advance(20.0)
    crowd.work()


def aged(crowd: Crowd) -> None:
    """They wait for their turn until leases must be extended, and handlers take six seconds altogether."""

    def work(_: Delivery) -> bool:
        crowd.clock.advance(6.0 / crowd.count)
        return True

    crowd.on_run = work
    for start in range(0, crowd.count, 100):
        crowd.take(*crowd.names("a")[start : start + 100])
        crowd.clock.advance(3.0 / crowd.count)
    crowd.clock.advance(30.0)
    crowd.work()


@pytest.mark.parametrize("life", [handled, failed, one_message, heirs, elsewhere, aged])
def test_no_message_takes_longer_because_others_wait(life: Callable[[Crowd], None]) -> None:
    def lines(count: int) -> float:
        crowd = Crowd(count)
        with Lines() as run:
            life(crowd)
        assert crowd.is_idle()
        return run.count / count

    assert lines(MANY) < 1.5 * lines(FEW)
