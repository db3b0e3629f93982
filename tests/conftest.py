"""Fixtures that every test may use. A server that cannot be had is an error, never a skip."""

from __future__ import annotations

import re
import signal
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from relay import Relay, relay
from servers import Servers

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

# What a run says must depend on the code alone: not on how fast the machine is, nor on luck.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("steady")

FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    # Whoever was started in the background by a shell script ignores SIGINT, and so do the programs under test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "nsqd_flags(*flags): command line flags for each nsqd that a fixture starts")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let fixtures see, when they end, whether their test failed."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    """For a test that needs other servers than the fixtures below: `servers.nsqd(...)`, `servers.memcached()`."""
    room = Servers(tmp_path / "servers")
    yield room
    room.close(failed=request.node.stash.get(FAILED, False))


@pytest.fixture
def lookupd(servers: Servers) -> Nsqlookupd:
    """An nsqlookupd."""
    return servers.lookupd()


@pytest.fixture
def nsqd(request: pytest.FixtureRequest, servers: Servers) -> Nsqd:
    """An nsqd that is registered nowhere."""
    return servers.nsqd(*_flags(request))


@pytest.fixture
def nsqd_pair(request: pytest.FixtureRequest, servers: Servers, lookupd: Nsqlookupd) -> tuple[Nsqd, Nsqd]:
    """Two nsqds, both registered with `lookupd`."""
    flags = _flags(request)
    return servers.nsqd(*flags, lookupds=[lookupd]), servers.nsqd(*flags, lookupds=[lookupd])


@pytest.fixture(scope="session")
def memcached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memcached]:
    """A memcached for all tests, each in its own namespace; `server` is one to kill."""
    with Memcached(directory=tmp_path_factory.mktemp("memcached")) as server:
        yield server


@pytest.fixture
def server(servers: Servers) -> Iterator[Memcached]:
    """A memcached of this test's own."""
    server = servers.memcached()
    yield server
    server.kill()  # it takes a second to end otherwise


@pytest.fixture
def line(memcached: Memcached) -> Iterator[Relay]:
    """To the memcached of all tests, through somebody who counts and can cut."""
    with relay(memcached.tcp_port) as made:
        yield made


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name of this test's own, in which the test can be recognised."""
    readable = re.sub(r"\W+", "-", request.node.name).removeprefix("test_")
    return f"{readable[:48]}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def channel(topic: str) -> str:
    """A channel name of this test's own."""
    return f"ch-{topic[-8:]}"


def _flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    marker = request.node.get_closest_marker("nsqd_flags")
    return marker.args if marker else ()
