"""Where `interleaving` and `one_message` meet memcached: two stores that are held, and a third that sees the end."""

from __future__ import annotations

import functools
import random
import uuid
from collections.abc import Callable, Sequence

from held import STUCK, Command, HeldClient, Server
from interleaving import Actor, explore
from one_message import Delivery, Items, Message

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.cli.local_server import HOST
from nsqdedupe.store import Claim, Verdict
from nsqdedupe.stores.memcached import MemcachedStore

LEASE = 60.0

Ends = set[tuple[Verdict | None, ...]]
"""What the deliveries of a scene were told last, in the order in which they were made."""


class Stage:
    """Two stores whose commands are held, and one whose commands are not."""

    def __init__(self, memcached: Memcached) -> None:
        address = HOST, memcached.tcp_port
        self.namespace = uuid.uuid4().hex
        self.server = Server(address)
        self.clients = HeldClient("P0", address), HeldClient("P1", address)
        self.stores: list[MemcachedStore] = []
        for client in self.clients:
            client.run(functools.partial(self._open, client.address))
        self.witness = self._store(memcached.tcp_address)
        self.ends: Ends = set()
        self._random = random.Random(0)

    def explore(self, cast: Callable[[Scene], Sequence[Actor]], least: int) -> Ends:
        """Run every schedule of a scene, and see that there are as many as it takes to say anything."""
        schedules = explore(lambda: Scene(self, cast, self._random.randbytes(16)))
        print(f"{schedules} schedules")  # noqa: T201 - shown with -rP
        assert schedules >= least
        return self.ends

    def items_of(self, fingerprint: bytes) -> Items:
        """Where a message is kept."""
        ((_, claim, bucket, tag),) = self.witness._servers.spots([fingerprint])
        return Items(claim, bucket, tag)

    def tidy(self, fingerprint: bytes) -> None:
        """Have the stores send what they would send with their next pipeline, and forget that they had a message.

        Else the next schedule would not begin like the one before.
        """
        for client, store in zip(self.clients, self.stores, strict=True):
            store._session.held.forget(fingerprint)
            if any(link.leftovers for link in store._servers.links):
                client.run(functools.partial(store.extend, [Claim(bytes(16), b"", bytes(16), LEASE)]))

    def close(self) -> None:
        """Close everything."""
        for client in self.clients:
            client.close()
        self.server.close()
        for store in *self.stores, self.witness:
            store.close()

    def _open(self, address: str) -> None:
        self.stores.append(self._store(address))

    def _store(self, address: str) -> MemcachedStore:
        return MemcachedStore(address, window=1, namespace=self.namespace, connect_timeout=STUCK, timeout=STUCK)


class Scene:
    """The world of one schedule: a message never met before, whose bucket is not there yet.

    Args:
        stage: where it plays.

        cast: makes the deliveries and the events.

        fingerprint: the message.
    """

    def __init__(self, stage: Stage, cast: Callable[[Scene], Sequence[Actor]], fingerprint: bytes) -> None:
        self.message = Message(stage.server, stage.items_of(fingerprint))
        self.deliveries: list[Delivery] = []
        self._stage = stage
        self._cast = cast
        self._fingerprint = fingerprint
        self._serial = 0

    def delivery(self, client: int, copy: str = "", process: str = "") -> Delivery:
        """Make one; by default each client is a process, and has a copy of its own."""
        token = self._token(self._fingerprint, copy or f"nsqd{client}/a", process or f"process{client}")
        self.deliveries.append(Delivery(self.message, self._stage.clients[client], self._stage.stores[client], token))
        return self.deliveries[-1]

    def crowd(self, tag: bytes = b"\1") -> None:
        """Have another message confirmed that is kept in the same bucket."""
        other = tag * 8 + self._fingerprint[8:]
        self.message.neighbours.append(tag * 8)
        assert self._stage.items_of(other).bucket == self.message.items.bucket
        self._stage.witness.confirm([self._token(other, "nsqd9/z", "process9")])

    def actors(self) -> Sequence[Actor]:
        """See `interleaving.World`."""
        for key in self.message.items.claim, self.message.items.bucket:
            self._stage.server.ask(Command(b"md %s" % key))
        return self._cast(self)

    def judge(self) -> None:
        """Nothing is stuck: who comes later is told what is so, and is let in when the claim ends undone."""
        self._stage.tidy(self._fingerprint)
        self._stage.ends.add(tuple(delivery.verdict for delivery in self.deliveries))
        message = self.message
        assert all(map(message.known, message.neighbours)), "a write into the bucket undid another"
        if message.anything_goes():
            return
        if message.done:
            assert self._ask() is Verdict.DONE
            return
        if message.holder is not None or message.held_for is not None:
            assert self._ask() is Verdict.IN_PROGRESS
            message.end_lease()
        assert self._ask() is Verdict.NEW, "I2: the message cannot be handled any more"

    def _ask(self) -> Verdict:
        (answer,) = self._stage.witness.claim([self._token(self._fingerprint, "nsqd2/a", "process2")])
        assert answer.verdict is not Verdict.NEW or answer.tries == self.message.failures
        return answer.verdict

    def _token(self, fingerprint: bytes, copy: str, process: str) -> Claim:
        self._serial += 1
        return Claim(fingerprint, copy.encode(), process.encode() + self._serial.to_bytes(8, "big"), LEASE)
