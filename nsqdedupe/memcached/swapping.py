"""RELEASE, EXTEND and START: changes of a claim item by who has it. Buckets are not touched.

Each is a compare-and-swap with the token that the claim was last read with. A token that does not fit says only that
the item was written since, perhaps by us and the reply was lost: then the item is read, and the nonce decides. Never
is a time to live changed without looking: a lease that somebody else has by now would be made longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nsqdedupe.memcached.held import Held, Holdings
from nsqdedupe.memcached.items import CLAIMED, ITEM_BYTES, Item, parse
from nsqdedupe.memcached.link import Link
from nsqdedupe.memcached.meta import READS, WRITES, Reply, flags_of
from nsqdedupe.memcached.servers import Exchange, Servers, Steps
from nsqdedupe.store import Claim

ATTEMPTS = 4
"""Rounds: the swap, a look at who has it, the swap with a newer token or an add."""


class _Step(NamedTuple):
    """What is to be done with one item next."""

    item: Item | None
    """What to change; None: look first."""

    token: bytes
    """What it was read with; empty: it is gone, and is added again."""


_LOOK = _Step(None, b"")


class Swapping:
    """One batch of changes.

    Args:
        servers: where they go.

        held: what is known of the claims; is told of what changes.

        claims: whose items.

        change: the new item, from its position in the batch and the item as it is.

        ttls: the new times to live.

        lasting: the claims stay ours. One that was evicted is then added again, for its handler runs here.
    """

    def __init__(
        self,
        servers: Servers,
        held: Holdings,
        claims: Sequence[Claim],
        change: Callable[[int, Item], Item],
        ttls: Sequence[bytes],
        *,
        lasting: bool,
    ) -> None:
        self._servers = servers
        self._held = held
        self._claims = claims
        self._change = change
        self._ttls = ttls
        self._lasting = lasting
        self._spots = servers.spots(claim[0] for claim in claims)
        self._steps: dict[int, _Step] = {}
        self.results: list[bool | None] = [None] * len(claims)

    def steps(self) -> Steps[list[bool | None]]:
        """Change all that can be changed: whether each claim was still ours, None if its server did not answer."""
        groups = self._servers.reached(self._spots, range(len(self._claims)))
        for link, group in groups.items():
            for position in group:
                held = self._held.of(self._claims[position])
                item = None if held is None or held.epoch != link.epoch else parse(held.value)
                self._steps[position] = _LOOK if held is None or item is None else _Step(item, held.token)
        for _ in range(ATTEMPTS):
            yield from self._take(groups)
            groups = self._servers.going(self._spots, self._steps)
            if not groups:
                return self.results
        for position in [position for group in groups.values() for position in group]:
            self._not_ours(position)
        return self.results

    def _take(self, groups: dict[Link, list[int]]) -> Steps[None]:
        """One step of each."""
        pipelines = {}
        changed: dict[int, bytes] = {}
        for link, group in groups.items():
            commands: list[bytes] = []
            kinds: list[bytes] = []
            for position in group:
                item, token = self._steps[position]
                key = self._spots[position][1]
                if item is None:
                    commands.append(b"mg %b v c f\r\n" % key)
                    kinds.append(READS)
                else:
                    changed[position] = value = self._change(position, item).packed()
                    how = b"C" + token if token else b"ME"
                    commands.append(
                        b"ms %b %d %b T%b c\r\n%b\r\n" % (key, ITEM_BYTES, how, self._ttls[position], value)
                    )
                    kinds.append(WRITES)
            pipelines[link] = commands, b"".join(kinds)

        def read(link: Link, replies: list[Reply]) -> None:
            for position, (line, value) in zip(groups[link], replies, strict=True):
                step = self._steps.pop(position)
                if step.item is None:
                    self._looked(position, line, value)
                elif line[:4] == b"HD c":
                    self._ours(link, position, line[4:], changed[position])
                elif line[:2] == b"NF":
                    self._gone(position)
                elif step.token:
                    self._steps[position] = _LOOK
                else:
                    self._not_ours(position)

        yield Exchange(pipelines, read)

    def _looked(self, position: int, line: bytes, value: bytes | None) -> None:
        item = parse(value)
        if value is None:
            self._gone(position)
        elif item is None or item.kind != CLAIMED or item.nonce != self._claims[position].nonce:
            self._not_ours(position)
        else:
            self._steps[position] = _Step(item, flags_of(line)[b"c"])

    def _gone(self, position: int) -> None:
        """It was evicted, or it ended long ago."""
        held = self._held.of(self._claims[position]) if self._lasting else None
        item = parse(held.value) if held is not None else None
        if item is None:
            self._not_ours(position)
        else:
            self._steps[position] = _Step(item, b"")

    def _ours(self, link: Link, position: int, token: bytes, value: bytes) -> None:
        self.results[position] = True
        claim = self._claims[position]
        if not self._lasting:
            self._held.drop([claim])
        elif self._held.of(claim) is not None:
            held = Held(claim.nonce, link.epoch, token, value, self._spots[position])
            self._held.renew(claim.fingerprint, held)

    def _not_ours(self, position: int) -> None:
        self.results[position] = False
        self._steps.pop(position, None)
        self._held.drop([self._claims[position]])
