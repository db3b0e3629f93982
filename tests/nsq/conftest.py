"""Fixtures for tests on real nsqds."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Certificates
from processes import Journal
from servers import processes_in
from several import store_url

from nsqdedupe.cli.local_memcached import Memcached


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """What consumer processes have done."""
    return Journal(tmp_path / "journal")


@pytest.fixture
def url(memcached: Memcached, topic: str) -> str:
    """Of a store of this test's own, for several consumers."""
    return store_url(memcached, topic)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The current event loop of this thread, not running, as in a program before it calls run()."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a demo makes its temporary directory. In the end nothing runs there."""
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setenv("TMPDIR", str(room))
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    yield room
    assert processes_in(room) == []


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For 127.0.0.1."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The longest that each pause might have been; they are not waited for, and no restart is likely."""
    asked: list[float] = []

    def none(low: float, high: float) -> float:
        asked.append(high)
        return 0.0

    monkeypatch.setattr("nsqdedupe.pauses.HURRY", -1.0)
    monkeypatch.setattr("nsqdedupe.pauses.random.uniform", none)
    return asked
