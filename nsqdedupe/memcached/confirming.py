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
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nsqdedupe.memcached.damage import Damage
from nsqdedupe.memcached.held import Bucket, Holdings
from nsqdedupe.memcached.items import BUCKET_BYTES, CLAIMED, DONE, MARKER_SECONDS, parse, sound, with_tags, without_tags
from nsqdedupe.memcached.link import Link
from nsqdedupe.memcached.meta import READS, WRITES, Reply, flags_of
from nsqdedupe.memcached.servers import Servers, Spot
from nsqdedupe.store import Claim

ATTEMPTS = 50
"""How often a bucket that others write all the time is tried. One of them wins each time."""

_JITTER = 0.002
"""Seconds at most between one attempt and the next, so that they do not meet again."""


class Buckets:
    """The buckets of some messages, and what is known of them."""

    def __init__(self, servers: Servers, damage: Damage, spots: Sequence[Spot]) -> None:
        self._servers = servers
        self._damage = damage
        self._spots = spots
        self._known: dict[bytes, Bucket] = {}

    def note(self, position: int, bucket: Bucket) -> None:
        """What a bucket holds."""
        self._known[self._spots[position][2]] = bucket

    def shared(self, positions: Iterable[int]) -> dict[bytes, list[int]]:
        """Positions of one server, by their bucket's key."""
        found: dict[bytes, list[int]] = {}
        for position in positions:
            found.setdefault(self._spots[position][2], []).append(position)
        return found

    def known(self, key: bytes) -> Bucket:
        """What a bucket held when it was read."""
        return self._known[key]

    def tags(self, positions: Iterable[int]) -> list[bytes]:
        """The tags of these."""
        return [self._spots[position][3] for position in positions]

    def read(self, groups: dict[Link, list[int]]) -> None:
        """Read the buckets of these positions anew; see `known`."""
        keys = {link: list(self.shared(group)) for link, group in groups.items()}
        pipelines = {
            link: ([b"mg %b v c\r\n" % key for key in wanted], READS * len(wanted)) for link, wanted in keys.items()
        }

        def note(link: Link, replies: list[Reply]) -> None:
            for key, (line, value) in zip(keys[link], replies, strict=True):
                self._known[key] = self._read(link.epoch, key, line, value)

        self._servers.ask(pipelines, note)

    def _read(self, epoch: int, key: bytes, line: bytes, value: bytes | None) -> Bucket:
        if value is None:
            return Bucket(epoch, b"", b"")
        if not sound(value):
            self._damage.note(key)
            value = b""
        return Bucket(epoch, value, line.split(b" ")[2][1:])


def _write(key: bytes, value: bytes, token: bytes) -> bytes:
    """The command that writes a bucket if it is as it was read.

    In its full size from the start, so that all buckets take chunks of one size. If they grew, each would pass through
    smaller ones, and memcached keeps the pages of those: it would take twice as much.
    """
    how = b"C" + token if token else b"ME"
    return b"ms %b %d %b c\r\n%b\r\n" % (key, BUCKET_BYTES, how, value.ljust(BUCKET_BYTES, b"\0"))


class _Part(NamedTuple):
    """What is done with one bucket."""

    key: bytes
    members: list[int]
    written: bytes | None
    """What it is to hold; None if it is not written."""


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
        self._spots = servers.spots(claim[0] for claim in claims)
        self._buckets = Buckets(servers, damage, self._spots)
        self._tokens: dict[int, bytes] = {}
        self._ours: set[int] = set()
        self.results: list[bool | None] = [None] * len(claims)
        """Whether the claim was still ours; None for those that could not be recorded."""

    def run(self) -> None:
        """Record all that can be recorded. Blocks."""
        groups = self._servers.reached(self._spots, range(len(self._claims)))
        strange: list[int] = []
        for link, group in groups.items():
            for position in group:
                held = self._held.of(self._claims[position])
                bucket = self._held.bucket(self._spots[position][2], link.epoch)
                if held is None or held.epoch != link.epoch or bucket is None:
                    strange.append(position)
                else:
                    self._tokens[position] = held.token
                    self._buckets.note(position, bucket)
        if strange:
            again = self._servers.going(self._spots, strange)
            self._buckets.read(again)
            self._find_claims(self._servers.going(self._spots, strange))
        groups = self._servers.going(self._spots, range(len(self._claims)))
        for attempt in range(ATTEMPTS):
            moved = self._write(groups, marking=not attempt)
            if not moved:
                return
            if attempt:
                time.sleep(random.uniform(0, _JITTER))
            self._buckets.read(self._servers.going(self._spots, moved))
            groups = self._servers.going(self._spots, moved)

    def _find_claims(self, groups: dict[Link, list[int]]) -> None:
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

        self._servers.ask(pipelines, read)

    def _write(self, groups: dict[Link, list[int]], *, marking: bool) -> list[int]:
        """Write the buckets, then turn our claims into markers; those whose bucket has moved."""
        plans: dict[Link, list[_Part]] = {}
        pipelines = {}
        moved: list[int] = []
        for link, group in groups.items():
            commands, plans[link] = self._plan(group, marking=marking)
            pipelines[link] = commands, WRITES * len(commands)
            if not commands:
                self._record(position for part in plans[link] for position in part.members)

        def read(link: Link, replies: list[Reply]) -> None:
            said = iter(replies)
            for key, members, written in plans[link]:
                line = b"" if written is None else next(said)[0]
                for position in members if marking else ():
                    if position in self._tokens and next(said)[0][:2] == b"HD":
                        self._ours.add(position)
                if written is None or line[:4] == b"HD c":
                    self._record(members)
                    if written is not None:
                        self._held.wrote(key, Bucket(link.epoch, written, line[4:]))
                else:
                    moved.extend(members)

        self._servers.ask(pipelines, read)
        return moved

    def _plan(self, group: list[int], *, marking: bool) -> tuple[list[bytes], list[_Part]]:
        """Commands for one server, and what they do, bucket by bucket."""
        commands: list[bytes] = []
        plan: list[_Part] = []
        for key, members in self._buckets.shared(group).items():
            _, value, token = self._buckets.known(key)
            written = with_tags(value, self._buckets.tags(members))
            plan.append(_Part(key, members, None if written == value else written))
            if written != value:
                commands.append(_write(key, written, token))
            if marking:
                commands += [self._marker(position) for position in members if position in self._tokens]
        return commands, plan

    def _marker(self, position: int) -> bytes:
        """The command that turns a claim of ours into the marker."""
        return b"ms %b 1 C%b T%d\r\n%b\r\n" % (self._spots[position][1], self._tokens[position], MARKER_SECONDS, DONE)

    def _record(self, positions: Iterable[int]) -> None:
        for position in positions:
            self.results[position] = position in self._ours
            self._held.drop(self._claims[position])


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
        self._buckets = Buckets(servers, damage, self._spots)
        self.left = set(range(len(fingerprints)))
        """Those that are not forgotten."""
        for fingerprint in fingerprints:
            held.forget(fingerprint)

    def run(self) -> None:
        """Forget all that can be forgotten. Blocks."""
        groups = self._servers.reached(self._spots, self.left)
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(random.uniform(0, _JITTER))
            self._buckets.read(groups)
            self._erase(self._servers.going(self._spots, self.left))
            groups = self._servers.going(self._spots, self.left)
            if not groups:
                return

    def _erase(self, groups: dict[Link, list[int]]) -> None:
        """Take the tags out of the buckets, and the claims away, with tries and markers."""
        plans: dict[Link, list[_Part]] = {}
        pipelines = {}
        for link, group in groups.items():
            plan = plans[link] = []
            commands: list[bytes] = []
            for key, members in self._buckets.shared(group).items():
                _, value, token = self._buckets.known(key)
                rest = without_tags(value, self._buckets.tags(members))
                plan.append(_Part(key, members, None if rest == value else rest))
                if rest != value:
                    commands.append(_write(key, rest, token))
                commands += [b"md %b\r\n" % self._spots[position][1] for position in members]
            pipelines[link] = commands, WRITES * len(commands)

        def read(link: Link, replies: list[Reply]) -> None:
            said = iter(replies)
            for _, members, written in plans[link]:
                erased = written is None or next(said)[0][:2] == b"HD"
                for _ in members:
                    next(said)
                if erased:
                    self.left.difference_update(members)

        self._servers.ask(pipelines, read)
