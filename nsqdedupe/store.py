"""The contract between the state machine and whatever remembers messages.

A store keeps two things per fingerprint. *Seen* says "this message is done": long-lived, and lossy by
design. A *claim* says "this copy is being handled": short-lived, with an owner, a nonce, a lease and
the number of handler runs that failed.

Every verb takes many claims, because copies arrive many at a time and a shared store must cost one
round trip per batch. Each verb is atomic per fingerprint and may be repeated without harm. All times
are seconds.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, KeysView, Sequence
from typing import NamedTuple

from nsqdedupe.calls import Calls


class Verdict(enum.Enum):
    """What a store says of a claim."""

    NEW = "new"
    """The claim is yours: handle the message."""

    IN_PROGRESS = "in progress"
    """Another copy is being handled, or a failed one is held: wait, never finish."""

    DONE = "done"
    """The message was handled (or given up): finish this copy unprocessed."""


class Claim(NamedTuple):
    """One copy asking to be the one that is handled.

    A tuple, not a dataclass: one is made for every delivery.
    """

    fingerprint: bytes
    """16 bytes: what makes two messages the same message."""

    owner: bytes
    """Which copy asks: nsqd address and message id. A redelivery has the same owner."""

    nonce: bytes
    """16 bytes, never used twice: which delivery asks. The first 8 are the incarnation of the asking
    Deduper, the last 8 its delivery serial, big-endian. It is the fence: `release` and `extend` act only
    on a claim that has the same nonce."""

    lease: float
    """Seconds that the claim holds unless it is extended. Greater than 0."""

    poll: bool = False
    """True if this delivery may have been waiting when its message last failed: then it does not end the
    hold that the failure left. A first claim of a fresh delivery has False."""


class Answer(NamedTuple):
    """A store's answer to one claim."""

    verdict: Verdict

    tries: int = 0
    """Handler runs of this message that failed so far, whichever copy or process ran them."""

    lease_left: float = 0.0
    """With IN_PROGRESS: seconds until the claim may be free. Otherwise 0."""

    held: bool = False
    """With IN_PROGRESS: nobody is handling the message; a failure's delay is being waited out. A store
    that cannot tell says False, and the copy polls instead of going back at once."""

    starts: int = 0
    """Handler runs of this message that were started by `Store.start` and never heard of again."""


class Release(NamedTuple):
    """Giving a claim back without success."""

    claim: Claim

    failed: bool = False
    """True if a handler ran and failed: one try is counted."""

    hold: float = 0.0
    """Seconds for which the message stays held: no other copy gets it; a fresh delivery of the copy that
    failed does."""


class Traits(NamedTuple):
    """What a store promises. Code and tests ask these, never the store's class."""

    shared: bool
    """Several processes see the same claims and the same seen."""

    durable: bool
    """What is seen survives the end of the process."""

    may_slip: bool
    """It may forget a message that was done, and let a duplicate through."""

    may_false_drop: bool
    """It may take a new message for one that was done. True only for Bloom filters."""

    blocking: bool
    """It does I/O: its verbs must not be called on an event loop."""


IS_DONE = -1
"""Among the places of `Direct`."""


class Direct(NamedTuple):
    """A store of this process without claims, for a handler that runs from look-up to success in one go.

    Nobody else can ask the store meanwhile, so the claim would be seen by nobody: it lives in the caller's variables.
    When the handler has not succeeded by the time it returns, `claim` makes up for it before anybody can.
    """

    places: Callable[[Sequence[bytes]], Sequence[int]]
    """Where the message with each fingerprint would be recorded; `IS_DONE` for one that is done."""

    changes: Callable[[], int]
    """Another number whenever a message was recorded since, by whomever."""

    known: KeysView[bytes]
    """Fingerprints of which there is more to know: somebody has a claim, or a hold or tries are kept."""

    record: Callable[[bytes, int], None]
    """Record that a message is done that was neither done nor known, at its place."""

    claim: Callable[[Claim], None]
    """Claim such a message."""


class Store(ABC):
    """Remembers which messages are done and which are being handled.

    Raises:
        StoreUnavailable: from any verb, when the store was not reached or not in time; the claims of
            that call may or may not have taken effect.
        StoreError: from any verb, when the store answered nonsense.
    """

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What this store promises; the same for its whole life."""

    def bind(self, hashing: str) -> None:  # noqa: B027 - most stores have nothing to check
        """Say how fingerprints are made from now on. A `DedupeReader` does so before it claims anything.

        Fingerprints of another hash or secret would never be found: each duplicate would slip, silently. A store
        that can tell refuses them. By default nothing is checked. Idempotent.

        Args:
            hashing: names hash and secret, without telling the secret (`nsqdedupe.fingerprint.hashing_of`).

        Raises:
            ConfigError: what is remembered was made otherwise.
        """

    def unreachable(self) -> Sequence[str]:
        """Which of its servers did not answer when they were last asked: an outage lasts as long as there are any.

        By default none, and an outage ends with the first call that succeeds. Never blocks; called on any thread.
        """
        return ()

    @property
    def direct(self) -> Direct | None:
        """A shortcut, if the store lies in this process and is used by one thread. By default there is none."""
        return None

    def calls(self, after: Callable[[], None]) -> Calls | None:  # noqa: ARG002 - for those that can
        """A way for an event loop to call the verbs of a store that does I/O, without a thread. By default, none.

        Args:
            after: to be called on the loop after results were given out.
        """
        return None

    @abstractmethod
    def claim(self, claims: Sequence[Claim]) -> Sequence[Answer]:
        """Ask to handle each message; one answer per claim, in order.

        Per fingerprint, atomically:

        - it is seen: DONE;
        - nobody has it, or its lease or hold is over: NEW, and the claim is yours;
        - you have it (same nonce): NEW, and the lease starts anew;
        - an older delivery of the same owner and the same incarnation has it: NEW, it is yours now
          (the asking process knows that nobody handles the older one);
        - it is held after a failure of the same owner, and `Claim.poll` is False: NEW;
        - else IN_PROGRESS, with the seconds that are left.

        The same fingerprint twice in a call is answered NEW, then IN_PROGRESS. Tries survive the change
        of hands.
        """

    @abstractmethod
    def confirm(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Record that these messages are done: seen from now on, whoever holds the claim.

        Returns, in order, whether the claim was still yours; only then is it ended. False never means
        "not recorded". Idempotent. On return the record is made.
        """

    @abstractmethod
    def release(self, releases: Sequence[Release]) -> Sequence[bool]:
        """Give claims back, each free at once or after its hold.

        Returns, in order, whether the claim was still yours; a claim that is not stays untouched, and no
        try is counted. What is seen stays seen.
        """

    @abstractmethod
    def extend(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Let the lease of each claim start anew.

        Returns, in order, whether the claim was still yours; a claim that is not stays untouched.
        """

    def start(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Leave a trace that a handler is about to run, one that outlives this process; the lease starts anew.

        The end of the run takes it back: `confirm`, or `release` by the same claim. If neither comes, because the
        process died, later answers for the message count it in `Answer.starts`. A store that ends with the process
        keeps no trace: by default this is `extend`.

        Returns, in order, whether the claim was still yours; a claim that is not stays untouched.
        """
        return self.extend(claims)

    @abstractmethod
    def forget(self, fingerprints: Sequence[bytes]) -> None:
        """Treat these messages as never met: seen, claim and tries are gone. For operators."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections. Idempotent; no verb may be called afterwards."""
