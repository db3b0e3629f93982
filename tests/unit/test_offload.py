"""A store that blocks is called on a thread of its own, and the event loop goes on."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from servers import eventually

from nsqdedupe import MemoryStore, calls
from nsqdedupe.calls import Inline, attempt
from nsqdedupe.errors import StoreError, StoreUnavailable
from nsqdedupe.offload import Offload, calls_for
from nsqdedupe.store import Traits

Results = tuple[list[Any], Exception | None]


class Blocking:
    """Verbs that answer when they are let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.called: list[tuple[str, list[Any]]] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None

    def claim(self, items: Sequence[Any]) -> list[Any]:
        return self._answer("claim", items)

    def confirm(self, items: Sequence[Any]) -> list[Any]:
        return self._answer("confirm", items)

    def release(self, items: Sequence[Any]) -> list[Any]:
        return self._answer("release", items)

    def _answer(self, verb: str, items: Sequence[Any]) -> list[Any]:
        self.called.append((verb, list(items)))
        self.threads.add(threading.get_ident())
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return [item * 10 for item in items]


class Caller:
    """Submits, and waits for what comes of it."""

    def __init__(self) -> None:
        self.store = Blocking()
        self.afters = 0
        self.given: list[Results] = []
        self.changed = asyncio.Event()
        self.offload = Offload(self._after)

    def _after(self) -> None:
        self.afters += 1
        self.changed.set()

    def submit(self, verb: str, *items: int) -> None:
        def then(results: Sequence[Any], error: Exception | None) -> None:
            assert threading.get_ident() not in self.store.threads
            self.given.append((list(results), error))

        self.offload.submit(getattr(self.store, verb), items, then)

    async def results(self, count: int) -> list[Results]:
        async with asyncio.timeout(30):
            while len(self.given) < count:
                await self.changed.wait()
                self.changed.clear()
        return self.given


async def _gathered() -> Caller:
    caller = Caller()
    caller.submit("claim", 1)
    caller.submit("confirm", 2)
    caller.submit("claim", 3, 4)
    caller.submit("claim", 5)
    caller.submit("confirm", 6)
    assert caller.given == []  # nothing blocks, nothing is answered before it can be
    caller.store.gate.set()
    await caller.results(5)
    return caller


def test_what_comes_while_a_call_is_under_way_is_one_call_of_each_verb() -> None:
    caller = asyncio.run(_gathered())
    assert caller.store.called == [("claim", [1]), ("confirm", [2, 6]), ("claim", [3, 4, 5])]


def test_everybody_gets_the_results_of_what_he_asked() -> None:
    caller = asyncio.run(_gathered())
    assert caller.given == [([10], None), ([20], None), ([60], None), ([30, 40], None), ([50], None)]
    assert caller.afters == 3
    assert len(caller.store.threads) == 1


def test_a_call_has_a_limit_but_no_submission_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LIMIT", 3)

    async def scene() -> Caller:
        caller = Caller()
        caller.submit("claim", 0)
        for items in ((1, 2), (3,), (4,), (5, 6, 7, 8)):
            caller.submit("claim", *items)
        caller.submit("confirm", 9)
        caller.store.gate.set()
        await caller.results(6)
        return caller

    called = asyncio.run(scene()).store.called
    assert called == [
        ("claim", [0]),
        ("claim", [1, 2, 3]),
        ("confirm", [9]),
        ("claim", [4]),
        ("claim", [5, 6, 7, 8]),
    ]


def test_an_error_comes_to_all_whose_items_were_in_the_call() -> None:
    async def scene() -> list[Results]:
        caller = Caller()
        caller.store.error = StoreUnavailable("cut", results=[1, None, 3])
        caller.submit("confirm", 0)
        caller.submit("claim", 1, 2)
        caller.submit("claim", 3)
        caller.store.gate.set()
        return await caller.results(3)

    (one, _), (two, error), (three, same) = asyncio.run(scene())
    assert one == [None]
    assert (two, three) == ([1, None], [3])
    assert isinstance(error, StoreUnavailable)
    assert same is error


def test_what_fails_afterwards_is_logged_and_keeps_nobody_from_his_results(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> list[Results]:
        caller = Caller()
        caller.submit("claim", 0)

        def broken(results: Sequence[Any], error: Exception | None) -> None:
            raise ZeroDivisionError

        caller.offload.submit(caller.store.claim, [1], broken)
        caller.submit("claim", 2)
        caller.store.gate.set()
        return await caller.results(2)

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(scene()) == [([0], None), ([20], None)]
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_an_event_loop_that_ends_meanwhile_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> Caller:
        caller = Caller()
        caller.submit("claim", 1)
        return caller

    caller = asyncio.run(scene())
    caller.store.gate.set()
    caller.offload._thread.shutdown(wait=True)
    assert caller.given == []
    assert caplog.records == []


def test_when_the_event_loop_has_stopped_all_is_waited_for_and_nothing_is_told_twice() -> None:
    async def scene() -> Caller:
        caller = Caller()
        caller.submit("claim", 1)
        caller.submit("release", 2)
        return caller

    with asyncio.Runner() as runner:
        caller = runner.run(scene())
        caller.store.gate.set()
        assert caller.given == []
        caller.submit("confirm", 3)
        told = [([10], None), ([20], None), ([30], None)]
        assert caller.given == told
        assert [verb for verb, _ in caller.store.called] == ["claim", "release", "confirm"]
        # The first of them has left a message for the loop, which may go on.
        runner.run(asyncio.sleep(0))
        assert caller.given == told


def test_without_a_thread_it_calls_all_the_same() -> None:
    """No more threads can be had; or the interpreter is about to end, and closes a reader."""

    given: list[Results] = []

    async def scene() -> Caller:
        caller = Caller()
        caller.offload._thread.shutdown()
        caller.store.gate.set()
        submit(caller, 1)
        submit(caller, 2)
        async with asyncio.timeout(30):
            while caller.afters < 2:
                await caller.changed.wait()
                caller.changed.clear()
        return caller

    def submit(caller: Caller, item: int) -> None:
        caller.offload.submit(caller.store.confirm, [item], lambda results, error: given.append((list(results), error)))

    with asyncio.Runner() as runner:
        submit(runner.run(scene()), 3)
    assert given == [([10], None), ([20], None), ([30], None)]


def test_its_thread_ends_with_it() -> None:
    caller = asyncio.run(_gathered())
    (thread,) = [thread for thread in threading.enumerate() if thread.ident in caller.store.threads]
    del caller

    def ended() -> bool:
        gc.collect()  # not once: the thread itself may hold on to its last call for a moment
        return not thread.is_alive()

    eventually(ended)
    assert not thread.is_alive()


def test_a_store_is_called_as_it_can_be() -> None:
    """At once if it does not block; by what it brings along; else on a thread."""

    class OfSomebody(MemoryStore):
        brings: Any = None

        @property
        def traits(self) -> Traits:
            return super().traits._replace(blocking=True)

        def calls(self, after: Callable[[], None]) -> Any:
            return self.brings

    def after() -> None: ...

    assert isinstance(calls_for(MemoryStore(window=1), after), Inline)
    store = OfSomebody(window=1)
    assert isinstance(calls_for(store, after), Offload)
    store.brings = brought = Inline()
    assert calls_for(store, after) is brought


# -- a call, wherever it is made -----------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreError("nonsense"), StoreUnavailable("cut"), KeyError("a bug")])
def test_a_call_that_fails_has_no_result_for_anything(error: Exception) -> None:
    def verb(items: Sequence[Any]) -> list[Any]:
        raise error

    assert attempt(verb, [1, 2]) == ([None, None], error)


def test_a_wrong_number_of_results_is_no_result() -> None:
    results, error = attempt(lambda items: [1], [1, 2])
    assert results == [None, None]
    assert str(error) == "the store gave 1 answers for 2"
    partial = StoreUnavailable("cut", results=[1])
    assert attempt(lambda items: (_ for _ in ()).throw(partial), [1, 2]) == ([None, None], partial)


def test_inline_has_called_when_it_returns() -> None:
    given: list[Any] = []
    Inline().submit(lambda items: items, [1, 2], lambda results, error: given.append((results, error)))
    assert given == [([1, 2], None)]
