"""CONFIRM and FORGET: what is written into buckets.

Confirming writes the bucket and then turns the claim into the marker, in one pipeline on one connection. The bucket is
what says for good that the message is done; without the claim's half nothing would be wrong, only its lease would have
to end first. The claim is not deleted: the bucket's half may be too late for a bucket that somebody else has written
meanwhile, and another copy would get in while it is tried again. The marker keeps it out, for some seconds.

A confirm is good whoever has the claim: handled is handled. It only leaves another's claim alone.

All messages of a batch that share a bucket go into it in one write.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from nsqdedupe.memcached.damage import Damage
from nsqdedupe.memcached.held import Bucket, Holdings
from nsqdedupe.memcached.items import BUCKET_BYTES, CLAIMED, DONE, MARKER_SECONDS, parse, sound, with_tags, without_tags
from nsqdedupe.memcached.link import Link
from nsqdedupe.memcached.meta import QUIET, READS, WRITES, Reply, flags_of
from nsqdedupe.memcached.servers import Exchange, Servers, Spot, Steps
from nsqdedupe.store import Claim

ATTEMPTS = 50
"""How often a bucket that others write all the time is tried. One of them wins each time."""

_MARKER = b"ms %%b 1 C%%b T%d q O%%d\r\n%b\r\n" % (MARKER_SECONDS, DONE)
"""The command that turns a claim of ours into the marker: its key, its token, and which of the quiet ones it is."""

_JITTER = 0.002
"""Seconds at most between one attempt and the next, so that they do not meet again."""


class Buckets:
    """The buckets of some messages, and what is known of them."""

    def __init__(self, damage: Damage, spots: Sequence[Spot]) -> None:
        self._damage = damage
        self._spots = spots
        self.known: dict[bytes, Bucket] = {}
        """What each bucket held when it was last read or written, by its key."""

    def shared(self, positions: Iterable[int]) -> dict[bytes, list[int]]:
        """Positions of one server, by their bucket's key."""
        found: dict[bytes, list[int]] = {}
        for position in positions:
            found.setdefault(self._spots[position][2], []).append(position)
        return found

    def tags(self, positions: Iterable[int]) -> list[bytes]:
        """The tags of these."""
        return [self._spots[position][3] for position in positions]

    def read(self, groups: dict[Link, list[int]]) -> Steps[None]:
        """Read the buckets of these positions anew; see `known`."""
        keys = {link: list(self.shared(group)) for link, group in groups.items()}
        pipelines = {
            link: ([b"mg %b v c\r\n" % key for key in wanted], READS * len(wanted)) for link, wanted in keys.items()
        }

        def note(link: Link, replies: list[Reply]) -> None:
            for key, (line, value) in zip(keys[link], replies, strict=True):
                self.known[key] = self._read(link.epoch, key, line, value)

        yield Exchange(pipelines, note)

    def _read(self, epoch: int, key: bytes, line: bytes, value: bytes | None) -> Bucket:
        if value is None:
            return Bucket(epoch, b"", b"")
        if not sound(value):
            self._damage.note(key)
            value = b""
        return Bucket(epoch, value, line.split(b" ")[2][1:])


def _write(key: bytes, value: bytes, token: bytes, flags: bytes) -> bytes:
    """The command that writes a bucket if it is as it was read.

    In its full size from the start, so that all buckets take chunks of one size. If they grew, each would pass through
    smaller ones, and memcached keeps the pages of those: it would take twice as much.
    """
    how = b"C" + token if token else b"ME"
    return b"ms %b %d %b %b\r\n%b\r\n" % (key, BUCKET_BYTES, how, flags, value.ljust(BUCKET_BYTES, b"\0"))


_Part = tuple[bytes, list[int], "bytes | None"]
"""What is done with one bucket: its key, whose it is, and what it is to hold; None if it is not written."""


class Confirming:
    """One batch of successes.

    Args:
        servers: where they go.

        held: what is known of the claims; is told of those that ended.

        damage: is told of values that are not ours.

        claims: the batch.
    """

    def __init__(self, servers: Servers, held: Holdings, damage: Damage, claims: Sequence[Claim]) -> None:
        self._servers = servers
        self._held = held
        self._claims = claims
        self._noted = held.all_of(claims)
        self._spots = servers.spots_of(claims, self._noted)
        self._buckets = Buckets(damage, self._spots)
        self._tokens: dict[int, bytes] = {}
        self._ours: set[int] = set()
        self.results: list[bool | None] = [None] * len(claims)

    def steps(self) -> Steps[list[bool | None]]:
        """Record all that can be recorded: whether each claim was still ours, None for those that could not be."""
        groups = self._servers.reached(self._spots, range(len(self._claims)))
        strange: list[int] = []
        noted, bucket_of, known, tokens = self._noted, self._held.bucket, self._buckets.known, self._tokens
        for link, group in groups.items():
            epoch = link.epoch
            for position in group:
                held = noted[position]
                bucket = None if held is None or held[1] != epoch else bucket_of(held[4][2], epoch)
                if held is None or bucket is None:
                    strange.append(position)
                else:
                    tokens[position] = held[2]
                    known[held[4][2]] = bucket
        if strange:
            again = self._servers.going(self._spots, strange)
            yield from self._buckets.read(again)
            yield from self._find_claims(self._servers.going(self._spots, strange))
        groups = self._servers.going(self._spots, range(len(self._claims)))
        for attempt in range(ATTEMPTS):
            moved = yield from self._write(groups, marking=not attempt)
            if not moved:
                break
            if attempt:
                yield random.uniform(0, _JITTER)
            yield from self._buckets.read(self._servers.going(self._spots, moved))
            groups = self._servers.going(self._spots, moved)
        return self.results

    def _find_claims(self, groups: dict[Link, list[int]]) -> Steps[None]:
        """The tokens of claims that nothing is known of, where they are ours."""
        spots = self._spots
        pipelines = {
            link: ([b"mg %b v c f\r\n" % spots[position][1] for position in group], READS * len(group))
            for link, group in groups.items()
        }

        def read(link: Link, replies: list[Reply]) -> None:
            for position, (line, value) in zip(groups[link], replies, strict=True):
                item = parse(value)
                if item is not None and item.kind == CLAIMED and item.nonce == self._claims[position].nonce:
                    self._tokens[position] = flags_of(line)[b"c"]

        yield Exchange(pipelines, read)

    def _write(self, groups: dict[Link, list[int]], *, marking: bool) -> Steps[list[int]]:
        """Write the buckets, then turn our claims into markers; those whose bucket has moved."""
        plans: dict[Link, list[_Part]] = {}
        pipelines = {}
        moved: list[int] = []
        for link, group in groups.items():
            commands, kinds, plans[link] = self._plan(group, marking=marking)
            pipelines[link] = commands, kinds
            if not commands:
                self._record([position for _, members, _ in plans[link] for position in members])

        def read(link: Link, replies: list[Reply]) -> None:
            tokens, ours = self._tokens, self._ours
            recorded: list[int] = []
            said = iter(replies)
            for key, members, written in plans[link]:
                line = b"HD" if written is None else next(said)[0]
                for position in members if marking else ():
                    if position in tokens and next(said)[0][:2] == b"HD":
                        ours.add(position)
                if line[:2] == b"HD":
                    recorded += members
                    if written is not None and line[2:4] == b" c":
                        self._held.wrote(key, Bucket(link.epoch, written, line[4:]))
                else:
                    moved.extend(members)
            self._record(recorded)

        yield Exchange(pipelines, read)
        return moved

    def _plan(self, group: list[int], *, marking: bool) -> tuple[list[bytes], bytes, list[_Part]]:
        """Commands for one server, their kinds, and what they do, bucket by bucket."""
        spots, tokens, known = self._spots, self._tokens, self._buckets.known
        sharers, coming = self._held.sharers, self._held.coming
        commands: list[bytes] = []
        kinds = bytearray()
        plan: list[_Part] = []
        quiet = 0
        for key, members in self._buckets.shared(group).items():
            _, value, token = known[key]
            tag = spots[members[0]][3]
            if len(members) == 1 and tag not in value:
                written = (tag + value)[:BUCKET_BYTES]
            else:
                written = with_tags(value, [spots[position][3] for position in members])
            if written == value:
                plan.append((key, members, None))
            else:
                plan.append((key, members, written))
                if key in coming or sharers.get(key, 0) > len(members):  # its token is wanted, for the next write
                    commands.append(_write(key, written, token, b"c"))
                    kinds += WRITES
                else:
                    commands.append(_write(key, written, token, b"q O%d" % quiet))
                    kinds += QUIET
                    quiet += 1
            if marking:
                for position in members:
                    if position in tokens:
                        commands.append(_MARKER % (spots[position][1], tokens[position], quiet))
                        kinds += QUIET
                        quiet += 1
        return commands, bytes(kinds), plan

    def _record(self, positions: Sequence[int]) -> None:
        claims, results, ours = self._claims, self.results, self._ours
        for position in positions:
            results[position] = position in ours
        self._held.drop([claims[position] for position in positions])


class Forgetting:
    """One batch of messages to treat as never met.

    Args:
        servers: where they are.

        held: is told to forget them.

        damage: is told of values that are not ours.

        fingerprints: the batch.
    """

    def __init__(self, servers: Servers, held: Holdings, damage: Damage, fingerprints: Sequence[bytes]) -> None:
        self._servers = servers
        self._spots = servers.spots(fingerprints)
        self._buckets = Buckets(damage, self._spots)
        self._left = set(range(len(fingerprints)))
        for fingerprint in fingerprints:
            held.forget(fingerprint)

    def steps(self) -> Steps[int]:
        """Forget all that can be forgotten; how many are left."""
        groups = self._servers.reached(self._spots, self._left)
        for attempt in range(ATTEMPTS):
            if attempt:
                yield random.uniform(0, _JITTER)
            yield from self._buckets.read(groups)
            yield from self._erase(self._servers.going(self._spots, self._left))
            groups = self._servers.going(self._spots, self._left)
            if not groups:
                break
        return len(self._left)

    def _erase(self, groups: dict[Link, list[int]]) -> Steps[None]:
        """Take the tags out of the buckets, and the claims away, with tries and markers."""
        plans: dict[Link, list[_Part]] = {}
        pipelines = {}
        for link, group in groups.items():
            plan = plans[link] = []
            commands: list[bytes] = []
            for key, members in self._buckets.shared(group).items():
                _, value, token = self._buckets.known[key]
                rest = without_tags(value, self._buckets.tags(members))
                plan.append((key, members, None if rest == value else rest))
                if rest != value:
                    commands.append(_write(key, rest, token, b"c"))
                commands += [b"md %b\r\n" % self._spots[position][1] for position in members]
            pipelines[link] = commands, WRITES * len(commands)

        def read(link: Link, replies: list[Reply]) -> None:
            said = iter(replies)
            for _, members, written in plans[link]:
                erased = written is None or next(said)[0][:2] == b"HD"
                for _ in members:
                    next(said)
                if erased:
                    self._left.difference_update(members)

        yield Exchange(pipelines, read)
