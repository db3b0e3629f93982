"""A reader that was made before its event loop runs, and is never started, is told of."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from servers import eventually

from nsqdedupe.unstarted import PATIENCE, StartWatch


def timers() -> set[threading.Timer]:
    return {thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)}


def test_one_made_inside_a_running_loop_is_not_watched() -> None:
    async def main() -> None:
        before = timers()
        StartWatch("name")
        assert timers() <= before

    asyncio.run(main())


def test_one_that_is_started_in_time_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    before = timers()
    watch = StartWatch("name")
    (timer,) = timers() - before
    assert timer.daemon, "it would keep the program from ending"
    assert timer.interval == PATIENCE == 10
    watch.stop()
    watch.stop()
    timer.join(30)
    assert not timer.is_alive()
    assert caplog.records == []


def test_one_that_is_not_started_is_told_of_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsqdedupe.unstarted.PATIENCE", 0.01)
    StartWatch("name")
    eventually(lambda: caplog.records)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("[name] made 0.01 s ago and not started: the event loop that was current")
    assert "asyncio.run()" in record.getMessage()
