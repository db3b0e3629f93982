"""The laws of a store, held by the one in memcached, against real ones.

memcached has its own clock, of whole seconds, so the laws of time are slept through: some 90 s in all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import uuid

import pytest
from looped import Looped
from messages import Patient, freeze, give_up_after
from servers import MOMENT, Servers, eventually

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.errors import StoreUnavailable
from nsqdedupe.store import Claim, Store, Traits
from nsqdedupe.testing import BatchLaws, Bench, Breakable, ClaimLaws, HoldLaws, OutcomeLaws, StoreContract

JUNK = b"x" * 4000


class MemcachedBench(Bench):
    """On the servers that a subclass has."""

    traits = Traits(shared=True, durable=False, may_slip=True, may_false_drop=False, blocking=True)
    lease = 3.0
    expiry_step = 1.5  # a tick of its clock, which may come late on a busy machine
    early = 2.0
    patience = MOMENT

    addresses: list[str]
    servers: Servers

    def setup_method(self) -> None:
        """Too early: a fixture has to find the servers first."""

    @pytest.fixture(autouse=True)
    def _begin(self, memcached: Memcached, servers: Servers) -> None:
        self.servers = servers
        self.addresses = self.choose(memcached)
        super().setup_method()

    def choose(self, memcached: Memcached) -> list[str]:
        return [memcached.tcp_address]

    def make_store(self) -> Store:
        self.namespace = uuid.uuid4().hex
        return self.make_peer(None)

    def make_peer(self, store: Store | None) -> Store:
        return Patient(self.addresses, window=10_000, namespace=self.namespace)

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)


class TestMemcachedStore(MemcachedBench, StoreContract):
    def make_full_store(self) -> Store:
        """In a memcached that was full before the first claim: whatever is written, something is evicted."""
        server = self.servers.memcached(memory=2)
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.tcp_port))) as line:
            for number in range(2000):
                line.sendall(b"set junk%d 0 0 %d noreply\r\n%b\r\n" % (number, len(JUNK), JUNK))
        eventually(server.stats, until=lambda stats: int(stats["total_items"]) == 2000 and int(stats["evictions"]))
        return Patient(server.tcp_address, window=10_000)

    def make_slow_store(self) -> Breakable:
        """On a server that is stopped, and goes on with all it had."""
        server = self.servers.memcached()
        store = Patient(server.tcp_address, window=10_000)

        def cut() -> None:
            freeze(server)
            give_up_after(store, 0.2)

        def mend() -> None:
            assert server.pid is not None
            os.kill(server.pid, signal.SIGCONT)
            give_up_after(store, MOMENT)
            eventually(lambda: self.answers(store))

        return Breakable(store, cut, mend)

    def make_dead_store(self) -> Breakable:
        self.lease = 600.0  # what it held is looked at after the outage, whenever that is over
        return self.make_slow_store()

    def answers(self, store: Store) -> bool:
        try:
            store.extend([Claim(self.message(), b"", bytes(16), 1.0)])
        except StoreUnavailable:
            return False
        return True


class TestOnAnEventLoop(MemcachedBench, ClaimLaws, OutcomeLaws, HoldLaws, BatchLaws):
    """As a reader calls it."""

    def make_peer(self, store: Store | None) -> Store:
        return Looped(Patient(self.addresses, window=10_000, namespace=self.namespace))


class TestBatchesOnThreeServers(MemcachedBench, BatchLaws):
    def choose(self, memcached: Memcached) -> list[str]:
        return [memcached.tcp_address, *(self.servers.memcached().tcp_address for _ in range(2))]
