"""CLAIM: who gets a message. One round trip, a second one for those that meet another's claim, a third to take over.

Per message, on one connection and in this order: the claim item is added, then the bucket of seen messages is read.
Confirming writes the bucket first and turns the claim into the marker afterwards. So whoever's add wins reads the
bucket at a moment when nobody else has the claim, and

- had somebody confirmed before: the bucket says so, for it was written before the claim could be had;
- is somebody yet to confirm, whose claim was lost or ended: then this is the slip that a lease that ended costs.

The other way round, the bucket could be read before a confirm and the claim be had after it, and the message would be
handled twice with no fault at all. For the same reason one that takes over reads the bucket again: what was read with
the add that lost may be older than the last owner's success.

Neither a claim that is gone nor a reply that is lost is ever taken for a success: DONE needs the bucket or the marker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nsqdedupe.memcached.damage import Damage
from nsqdedupe.memcached.held import Bucket, Held, Holdings
from nsqdedupe.memcached.items import (
    BUCKET_BYTES,
    CLAIMED,
    DONE,
    FREE,
    ITEM_BYTES,
    TAIL,
    Item,
    holds,
    lease_ttl,
    owner_of,
    pack,
    parse,
    sound,
)
from nsqdedupe.memcached.link import Link
from nsqdedupe.memcached.meta import READS, WRITES, Reply, flags_of
from nsqdedupe.memcached.servers import Exchange, Servers, Steps
from nsqdedupe.store import Answer, Claim, Verdict

ATTEMPTS = 3
"""How often a message whose claim comes and goes is claimed before its copy stands by."""

_A_MOMENT = 1.0
"""Seconds that such a copy is told to wait."""

_INCARNATION = slice(0, 8)
_NEW = Answer(Verdict.NEW)
_DONE = Answer(Verdict.DONE)
_WON = b"HD c"

# As `Held(...)` does it, without a call in between: one of each is made for every claim.
_make_held: Callable[[type[Held], tuple[object, ...]], Held] = tuple.__new__
_make_bucket: Callable[[type[Bucket], tuple[object, ...]], Bucket] = tuple.__new__


class Claiming:
    """One batch of claims.

    Args:
        servers: where they go.

        held: is told of those that win.

        damage: is told of values that are not ours.

        claims: the batch.
    """

    def __init__(self, servers: Servers, held: Holdings, damage: Damage, claims: Sequence[Claim]) -> None:
        self._servers = servers
        self._held = held
        self._damage = damage
        self._claims = claims
        self._spots = servers.spots(claim[0] for claim in claims)
        ttls = {lease: lease_ttl("lease", lease) for lease in {claim[3] for claim in claims}}
        self._ttls = [ttls[claim[3]] for claim in claims]
        self.answers: list[Answer | None] = [None] * len(claims)

    def steps(self) -> Steps[list[Answer | None]]:
        """Ask until all are answered, or their servers fail; the answers, None where there is none."""
        try:
            self._held.coming = {spot[2] for spot in self._spots}
            return (yield from self._steps())
        finally:
            self._held.coming = ()

    def _steps(self) -> Steps[list[Answer | None]]:
        groups = self._servers.reached(self._spots, range(len(self._claims)))
        for _ in range(ATTEMPTS):
            met = yield from self._add(groups)
            if not met:
                return self.answers
            free, again = yield from self._look(met)
            if free:
                again += yield from self._take_over(free)
            groups = self._servers.going(self._spots, again)
            if not groups:
                return self.answers
        for group in groups.values():
            for position in group:
                self.answers[position] = Answer(Verdict.IN_PROGRESS, 0, _A_MOMENT)
        return self.answers

    def _add(self, groups: dict[Link, list[int]]) -> Steps[list[int]]:
        """Add claims, and read the buckets; those that met another's claim."""
        claims, spots, ttls, answers = self._claims, self._spots, self._ttls, self.answers
        values: dict[int, bytes] = {}
        pipelines = {}
        for link, group in groups.items():
            commands = []
            for position in group:
                _, key, bucket_key, _ = spots[position]
                claim = claims[position]
                values[position] = value = pack(CLAIMED, claim[2], owner_of(claim[1]), 0, 0, 0)
                commands.append(
                    b"ms %b %d ME T%b c\r\n%b\r\nmg %b v c\r\n" % (key, ITEM_BYTES, ttls[position], value, bucket_key)
                )
            pipelines[link] = commands, (WRITES + READS) * len(group)
        met: list[int] = []

        def read(link: Link, replies: list[Reply]) -> None:
            epoch, keep = link.epoch, self._held.keep
            nothing = Bucket(epoch, b"", b"")
            for position, (added, _), found in zip(groups[link], replies[::2], replies[1::2], strict=True):
                won = added[:4] == _WON
                spot = spots[position]
                bucket = nothing if found[1] is None else self._bucket(epoch, position, found)
                if spot[3] in bucket[1] and holds(bucket[1], spot[3]):
                    answers[position] = _DONE
                    if won:
                        self._leave(link, position, added)
                elif won:
                    answers[position] = _NEW
                    claim = claims[position]
                    keep(claim[0], _make_held(Held, (claim[2], epoch, added[4:], values[position], spot)), bucket)
                else:
                    met.append(position)

        yield Exchange(pipelines, read)
        return met

    def _look(self, met: Iterable[int]) -> Steps[tuple[dict[int, tuple[bytes, Item]], list[int]]]:
        """Read the claims that were met; those that may be taken over, with their tokens, and those that are gone."""
        free: dict[int, tuple[bytes, Item]] = {}
        gone: list[int] = []
        spots = self._spots
        groups = self._servers.going(spots, met)
        pipelines = {
            link: ([b"mg %b v c t f\r\n" % spots[position][1] for position in group], READS * len(group))
            for link, group in groups.items()
        }

        def read(link: Link, replies: list[Reply]) -> None:
            for position, (line, value) in zip(groups[link], replies, strict=True):
                if value is None:
                    gone.append(position)
                    continue
                flags = flags_of(line)
                foreign = flags[b"f"] != b"0"
                left = int(flags[b"t"]) - TAIL
                if value == DONE and not foreign:
                    self.answers[position] = _DONE
                    continue
                item, claim = None if foreign else parse(value), self._claims[position]
                if item is None:
                    self._damage.note(spots[position][1])
                    free[position] = flags[b"c"], Item(FREE, b"", b"", 0, 0, 0)
                elif left <= 0 or _yields(item, claim):
                    free[position] = flags[b"c"], item
                else:
                    self.answers[position] = Answer(Verdict.IN_PROGRESS, item.tries, left, item.kind == FREE)

        yield Exchange(pipelines, read)
        return free, gone

    def _take_over(self, free: dict[int, tuple[bytes, Item]]) -> Steps[list[int]]:
        """Swap in our claims, and read the buckets again; those that somebody else was quicker to take."""
        claims, spots, answers = self._claims, self._spots, self.answers
        groups = self._servers.going(spots, free)
        successors: dict[int, Item] = {}
        pipelines = {}
        for link, group in groups.items():
            commands = []
            for position in group:
                _, key, bucket_key, _ = spots[position]
                token, item = free[position]
                successors[position] = successor = _successor(item, claims[position])
                commands.append(
                    b"ms %b %d C%b T%b c\r\n%b\r\nmg %b v c\r\n"
                    % (key, ITEM_BYTES, token, self._ttls[position], successor.packed(), bucket_key)
                )
            pipelines[link] = commands, (WRITES + READS) * len(group)
        lost: list[int] = []

        def read(link: Link, replies: list[Reply]) -> None:
            epoch = link.epoch
            for position, (swapped, _), found in zip(groups[link], replies[::2], replies[1::2], strict=True):
                won = swapped[:4] == _WON
                bucket = self._bucket(epoch, position, found)
                if holds(bucket[1], spots[position][3]):
                    answers[position] = _DONE
                    if won:
                        self._leave(link, position, swapped)
                elif won:
                    item, claim = successors[position], claims[position]
                    answers[position] = Answer(Verdict.NEW, item.tries, starts=item.starts)
                    held = Held(claim.nonce, epoch, swapped[4:], item.packed(), spots[position])
                    self._held.keep(claim.fingerprint, held, bucket)
                else:
                    lost.append(position)

        yield Exchange(pipelines, read)
        return lost

    def _bucket(self, epoch: int, position: int, found: Reply) -> Bucket:
        """What was read of a bucket."""
        line, value = found
        if value is None:
            return _make_bucket(Bucket, (epoch, b"", b""))
        # A stranger's flags are not asked for: of bytes that are no tags of ours, none will be found.
        if len(value) != BUCKET_BYTES and not sound(value):
            self._damage.note(self._spots[position][2])
            value = b""
        return _make_bucket(Bucket, (epoch, value, line[line.index(b" c") + 2 :]))

    def _leave(self, link: Link, position: int, won: bytes) -> None:
        """A claim of a message that is done stands in nobody's way: it goes with the next pipeline."""
        link.leftovers.append(b"md %b C%b\r\n" % (self._spots[position][1], won[4:]))


def _yields(item: Item, claim: Claim) -> bool:
    """Whether a delivery may have a message although its owner's lease, or the hold it left, goes on."""
    if item.nonce == claim.nonce:  # ours: the reply was lost
        return True
    if item.owner != owner_of(claim.owner):
        return False
    if item.kind == FREE:
        return not claim.poll
    # The serial is the fence: a late command of an older delivery must not win.
    return item.nonce[_INCARNATION] == claim.nonce[_INCARNATION] and item.nonce < claim.nonce


def _successor(item: Item, claim: Claim) -> Item:
    """What stands in the claim item after a delivery took the message over."""
    owner = owner_of(claim.owner)
    if item.kind == CLAIMED and item.nonce == claim.nonce:
        return item._replace(owner=owner)
    # Who asks from the same incarnation proves that the process lives: then the end of the run was not heard of for
    # another reason, and must not count as a death.
    died = item.started and item.nonce[_INCARNATION] != claim.nonce[_INCARNATION]
    return Item(CLAIMED, claim.nonce, owner, item.tries, item.starts + bool(died), 0)
