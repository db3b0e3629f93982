"""All servers of a store: which of them has a message, and asking them side by side.

A message belongs to one of 1,024 partitions, by ten bits of its fingerprint, and a partition to one server, by
rendezvous hashing: each server has a score for the partition, and the highest wins. So claim and bucket of a message
lie on one server, as their order demands; all consumers that are given the same servers agree, in whatever order they
are given; and when a server is added or removed, only its own share moves. No server takes over for one that is away:
two consumers that disagree on who is away would both own a message.

Buckets are numbered within a partition. Tags come from the other half of the fingerprint.

What is done with the servers is written as *steps*: generators that yield an `Exchange`, or the seconds to let pass,
and go on when that is done. `Servers.drive` takes them one after the other, and blocks;
`nsqdedupe.memcached.on_loop` takes them as an event loop finds that answers have come.
"""

from __future__ import annotations

import contextlib
import time
from binascii import hexlify
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from struct import error as not_sixteen_bytes
from typing import NamedTuple, TypeVar

from mmh3 import mmh3_x64_128_digest

from nsqdedupe.errors import ConfigError, StoreUnavailable
from nsqdedupe.memcached.held import Held
from nsqdedupe.memcached.items import WAYS, split, tag_of
from nsqdedupe.memcached.link import Link, Terms
from nsqdedupe.memcached.meta import Reply
from nsqdedupe.memcached.wire import Talk, converse
from nsqdedupe.store import Claim

PARTITIONS = 1024

Spot = tuple[Link, bytes, bytes, bytes]
"""Where a message is: its server, the key of its claim, the key of its bucket, its tag."""

T = TypeVar("T")


class Exchange(NamedTuple):
    """A pipeline with each of some servers, all at once.

    Servers that fail are left out, and so is the rest of what comes from one when ``read`` stumbles over it.
    """

    pipelines: Mapping[Link, tuple[Sequence[bytes], bytes]]
    """Commands, and `meta.READS` or `meta.WRITES` for each."""

    read: Callable[[Link, list[Reply]], None]
    """Is called once for each server that has answered."""


Steps = Generator[Exchange | float, None, T]
"""What it takes to do something; the end has the result. A number is seconds to let pass."""


class Servers:
    """The servers of a store, and a connection to each: for one thread at a time.

    Args:
        links: the connections, to servers in any order.

        slots: tags that fit in all buckets together; rounded up to whole buckets in each partition.

        terms: what all of them have in common.

        blocking: whether `reached` connects. If not, somebody else sees to it.
    """

    def __init__(self, links: Sequence[Link], slots: int, terms: Terms, *, blocking: bool = True) -> None:
        self.links = links
        self.timeout = terms.timeout
        self._terms = terms
        self._blocking = blocking
        self._placed = [max(self.links, key=lambda link: score(link.name, number)) for number in range(PARTITIONS)]
        self._depth = -(-slots // (WAYS * PARTITIONS))
        self._claims = terms.namespace.encode() + b":c:"
        self._buckets = terms.namespace.encode() + b":b:"

    @property
    def slots(self) -> int:
        """How many tags fit."""
        return self._depth * PARTITIONS * WAYS

    def twin(self) -> Servers:
        """The same servers over connections that are to be made by somebody else."""
        links = [link.twin() for link in self.links]
        return Servers(links, self.slots, self._terms, blocking=False)

    def greet(self) -> list[str]:
        """Connect to all for the first time; what kept those away that are not reached. Blocks.

        Raises:
            ConfigError: one of them is no memcached for us; none is connected then.
        """
        away: list[str] = []
        for link in self.links:
            try:
                link.connect()
            except StoreUnavailable as error:
                link.reach.missed = True
                away.append(str(error))
            except BaseException:
                self.hang_up()
                raise
        return away

    def prove(self) -> None:
        """Have those that are connected prove themselves again, with marks that have come since. Blocks.

        Raises:
            ConfigError: one of them has another mark.
        """
        for link in self.links:
            with contextlib.suppress(StoreUnavailable):
                link.prove()

    def spots(self, fingerprints: Iterable[bytes]) -> list[Spot]:
        """Where each message is.

        Raises:
            ConfigError: one of them is not 16 bytes.
        """
        placed, depth, claims, buckets = self._placed, self._depth, self._claims, self._buckets
        found: list[Spot] = []
        for fingerprint in fingerprints:
            try:
                tag, number = split(fingerprint)
            except (not_sixteen_bytes, TypeError):
                # The value stays out of the text: whoever passes a raw key by mistake must not find it logged.
                given: object = fingerprint
                what = f"{len(given)} bytes" if isinstance(given, bytes) else type(given).__name__
                raise ConfigError(
                    f"fingerprint: must be 16 bytes, not {what}; hash the key first, for example with "
                    "nsqdedupe.fingerprint"
                ) from None
            partition = number % PARTITIONS
            bucket = partition * depth + number // PARTITIONS % depth
            found.append((placed[partition], claims + hexlify(fingerprint), buckets + b"%d" % bucket, tag_of(tag)))
        return found

    def spots_of(self, claims: Sequence[Claim], noted: Sequence[Held | None]) -> list[Spot]:
        """Where the messages of claims are, of which some are noted.

        Raises:
            ConfigError: as `spots`.
        """
        if None not in noted:
            return [held[4] for held in noted if held is not None]
        others = iter(self.spots(claim[0] for claim, held in zip(claims, noted, strict=True) if held is None))
        return [next(others) if held is None else held[4] for held in noted]

    def reached(self, spots: Sequence[Spot], positions: Iterable[int]) -> dict[Link, list[int]]:
        """Those of these positions whose server is reached, by server. May connect where it is time to, and block.

        A verb begins with it, before it makes commands: a new connection makes older tokens worthless. So the verb's
        later rounds take `going`.
        """
        if not self._blocking:
            return self.going(spots, positions)
        return {link: group for link, group in _by_link(spots, positions).items() if link.ready()}

    def going(self, spots: Sequence[Spot], positions: Iterable[int]) -> dict[Link, list[int]]:
        """The same without connecting: a server that has failed since the verb began is left out."""
        return {link: group for link, group in _by_link(spots, positions).items() if link.connected}

    def drive(self, steps: Steps[T]) -> T:
        """Take these steps, one after the other; their result. Blocks."""
        try:
            while True:
                step = next(steps)
                if isinstance(step, Exchange):
                    self.ask(step)
                else:
                    time.sleep(step)
        except StopIteration as end:
            result: T = end.value
            return result

    def ask(self, exchange: Exchange) -> None:
        """Have an exchange. Blocks."""
        talks = begin(exchange)
        try:
            converse(talks.values(), self.timeout)
        except BaseException:
            for link in talks:
                link.hang_up()
            raise
        for link, talk in talks.items():
            end(exchange, link, talk)

    def unreachable(self) -> list[str]:
        """The names of those that are not reached."""
        return [link.name for link in self.links if link.reach.why]

    def troubles(self) -> str:
        """Why those that are not reached are not."""
        return "; ".join(dict.fromkeys(link.reach.why for link in self.links if link.reach.why))

    def hang_up(self) -> None:
        """Close all connections."""
        for link in self.links:
            link.hang_up()


def begin(exchange: Exchange) -> dict[Link, Talk]:
    """The talks that make up an exchange, nothing of them sent yet."""
    talks: dict[Link, Talk] = {}
    for link, (commands, kinds) in exchange.pipelines.items():
        talk = link.talk(commands, kinds) if kinds else None
        if talk is not None:
            talks[link] = talk
    return talks


def end(exchange: Exchange, link: Link, talk: Talk) -> None:
    """One of the talks is over, with replies or an error."""
    replies = link.replies(talk, len(exchange.pipelines[link][1]))
    if replies is not None:
        try:
            exchange.read(link, replies)
        except (LookupError, ValueError) as error:
            link.lose(f"{link.name}: a flag that was asked for is missing: {error!r}")


def _by_link(spots: Sequence[Spot], positions: Iterable[int]) -> dict[Link, list[int]]:
    groups: dict[Link, list[int]] = {}
    for position in positions:
        link = spots[position][0]
        if link in groups:
            groups[link].append(position)
        else:
            groups[link] = [position]
    return groups


def score(name: str, partition: int) -> bytes:
    """How well a server suits a partition: the highest wins. Servers that are told apart have no two alike."""
    return mmh3_x64_128_digest(f"{partition}@{name}".encode())
