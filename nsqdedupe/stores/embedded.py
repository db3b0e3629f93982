"""Stores inside the process: claims in a dict, what is seen in a table.

Only confirmed fingerprints ever reach the table, so releasing is honest whatever the table is, and a table may
be a file that outlives a crash. Claims, holds and tries end with the process.
Every verb runs to its end without giving up the GIL's turn to another verb of the same event loop;
a store serves one thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from nsqdedupe.checks import refuse
from nsqdedupe.clock import Clock, monotonic
from nsqdedupe.sizing import slots_for
from nsqdedupe.store import Answer, Claim, Direct, Release, Store, Traits, Verdict
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter
from nsqdedupe.tables.table import Table

TAIL = 3600.0
"""Seconds that tries outlive their claim: nsqd's longest requeue delay."""

SWEEP_EVERY = 600.0
"""Seconds between looks for what nobody came back for."""

_NEW = Answer(Verdict.NEW)
_DONE = Answer(Verdict.DONE)
_INCARNATION = slice(0, 8)


class EmbeddedStore(Store):
    """Claims in a dict, seen fingerprints in a table of this process.

    Args:
        table: keeps what is seen.

        clock: for leases and holds.
    """

    def __init__(self, table: Table, *, clock: Clock = monotonic) -> None:
        self.table = table
        self._clock = clock
        # Who has each message, or had it last; until when; and of a few what else is known. Side by side, not one
        # record each: a further object per message would have the garbage collector look at every batch.
        self._holders: dict[bytes, Claim] = {}
        self._ends: dict[bytes, float] = {}
        self._tries: dict[bytes, int] = {}
        self._released: set[bytes] = set()
        """Given back: nobody's, though tries are kept and a hold may go on until it ends."""
        self._sweep_at = clock() + SWEEP_EVERY

    @property
    def traits(self) -> Traits:
        """One process, durable if its table is, may slip, never drops a new message."""
        return Traits(shared=False, durable=self.table.durable, may_slip=True, may_false_drop=False, blocking=False)

    def kept(self) -> int:
        """How many claims, holds and counts of tries there are. No ``len()``: an empty store is still a store."""
        return len(self._holders)

    def bind(self, hashing: str) -> None:
        """See `Store.bind`."""
        self.table.bind(hashing)

    def claim(self, claims: Sequence[Claim]) -> list[Answer]:
        """See `Store.claim`."""
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep(now)
        holders, ends = self._holders, self._ends
        answers: list[Answer] = []
        for claim, seen in zip(claims, self.table.contains_many([claim[0] for claim in claims]), strict=True):
            if seen:
                answers.append(_DONE)
                continue
            fingerprint = claim[0]
            holder = holders.get(fingerprint)
            if holder is None:
                holders[fingerprint] = claim
                ends[fingerprint] = now + claim[3]
                answers.append(_NEW)
                continue
            tries, left = self._tries.get(fingerprint, 0), ends[fingerprint] - now
            if left <= 0 or self._yields(holder, claim):
                holders[fingerprint] = claim
                ends[fingerprint] = now + claim[3]
                self._released.discard(fingerprint)
                answers.append(Answer(Verdict.NEW, tries))
            else:
                answers.append(Answer(Verdict.IN_PROGRESS, tries, left, fingerprint in self._released))
        return answers

    def confirm(self, claims: Sequence[Claim]) -> list[bool]:
        """See `Store.confirm`."""
        # The table first: a fingerprint is never in neither.
        self.table.add_many([claim[0] for claim in claims])
        holders, released = self._holders, self._released
        ours = []
        for claim in claims:
            fingerprint = claim[0]
            holder = holders.get(fingerprint)
            given_back = fingerprint in released
            mine = holder is not None and not given_back and holder[2] == claim[2]
            if mine or given_back:
                self._drop(fingerprint)
            ours.append(mine)
        return ours

    def release(self, releases: Sequence[Release]) -> list[bool]:
        """See `Store.release`."""
        now = self._clock()
        ours = []
        for claim, failed, hold in releases:
            mine = self._owns(claim)
            ours.append(mine)
            if not mine:
                continue
            fingerprint = claim.fingerprint
            tries = self._tries.get(fingerprint, 0) + failed
            if tries or hold:
                self._tries[fingerprint] = tries
                self._ends[fingerprint] = now + hold
                self._released.add(fingerprint)
            else:
                self._drop(fingerprint)
        return ours

    def extend(self, claims: Sequence[Claim]) -> list[bool]:
        """See `Store.extend`."""
        now = self._clock()
        ours = []
        for claim in claims:
            mine = self._owns(claim)
            ours.append(mine)
            if mine:
                self._ends[claim.fingerprint] = now + claim.lease
        return ours

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        """See `Store.forget`."""
        self.table.discard_many(fingerprints)
        for fingerprint in fingerprints:
            self._drop(fingerprint)

    def close(self) -> None:
        """See `Store.close`. The table is closed too."""
        self.table.close()
        for kept in (self._holders, self._ends, self._tries, self._released):
            kept.clear()

    def _owns(self, claim: Claim) -> bool:
        """Whether this claim still has its message."""
        holder = self._holders.get(claim.fingerprint)
        return holder is not None and holder.nonce == claim.nonce and claim.fingerprint not in self._released

    def _yields(self, holder: Claim, claim: Claim) -> bool:
        """Whether a delivery may have a message although its holder's lease, or the hold it left, goes on."""
        if holder.nonce == claim.nonce:
            return True
        if holder.owner != claim.owner:
            return False
        if claim.fingerprint in self._released:
            return not claim.poll
        # The serial is the fence: a late command of an older delivery must not win.
        return holder.nonce[_INCARNATION] == claim.nonce[_INCARNATION] and holder.nonce < claim.nonce

    def _drop(self, fingerprint: bytes) -> None:
        if self._holders.pop(fingerprint, None) is not None:
            del self._ends[fingerprint]
            self._tries.pop(fingerprint, None)
            self._released.discard(fingerprint)

    def _sweep(self, now: float) -> None:
        """Free what failed or vanished owners left behind, once nsqd can no longer be holding a copy back."""
        self._sweep_at = now + SWEEP_EVERY
        for fingerprint in [fingerprint for fingerprint, end in self._ends.items() if end + TAIL <= now]:
            self._drop(fingerprint)


class MemoryStore(EmbeddedStore):
    """Remembers in this process, in a fixed amount of memory.

    Only right for one consumer per channel: copies that reach another process are not seen here. What is done
    is forgotten when the process ends, unless there is a ``path``: then it survives the process, however that
    ends, SIGKILL included. When the machine goes down, what the kernel had not written to the disk yet may be
    forgotten; no new message is taken for an old one. Claims, holds and tries end with the process.

    It is closed by `close`, or when the interpreter ends; a reader does not close a store that it was given.
    Opening and closing a file, `bind` and `forget` wait for the disk.

    Args:
        window: how many further messages a message must be remembered for; 1 or more.

        recall: share of duplicates recognised that come a whole window later (nearer ones fare
            better); greater than 0, less than 1.

        slots: size of the table in messages, in place of ``window`` and ``recall``.

        ways: slots of a bucket, 1 to 64.

        tag_bytes: 8 or 16 bytes of the fingerprint are kept.

        path: a file for the table, made if it is not there (its directory must be), for one process at a time.
            It cannot be resized: a file that is there must have the same slots, ways and tag_bytes, and its
            fingerprints must be made with the same secret. None: the table is in memory.

        clock: for leases and holds.

    Raises:
        ConfigError: an option is out of range; or ``slots`` is given beside ``window`` or ``recall``; or the
            file cannot be used, and the text says why and what to do.
    """

    table: OppositeBloomFilter

    def __init__(
        self,
        *,
        window: int | None = None,
        recall: float | None = None,
        slots: int | None = None,
        ways: int = 32,
        tag_bytes: int = 8,
        path: str | os.PathLike[str] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if slots is None:
            slots = slots_for(1_000_000 if window is None else window, 0.999 if recall is None else recall, ways)
        elif window is not None or recall is not None:
            raise refuse("slots", slots, "given alone", "give either slots, or window and recall")
        super().__init__(OppositeBloomFilter(slots=slots, ways=ways, tag_bytes=tag_bytes, path=path), clock=clock)

    @property
    def direct(self) -> Direct | None:
        """See `Store.direct`. A subclass with verbs of its own has none: they would not be called."""
        kind, verbs = type(self), ("claim", "confirm", "release", "extend", "start")
        if any(getattr(kind, verb) is not getattr(MemoryStore, verb) for verb in verbs):
            return None
        table = self.table
        return Direct(table.places, table.changes, self._holders.keys(), table.add_new, self._claim)

    def _claim(self, claim: Claim) -> None:
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep(now)
        self._holders[claim[0]] = claim
        self._ends[claim[0]] = now + claim[3]
