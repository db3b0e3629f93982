"""One arrival of a copy, as the state machine sees it: what it is, whose it is, how far it got."""

from __future__ import annotations

import enum

from nsqdedupe.metrics import Tally
from nsqdedupe.store import Claim

LEASE_MARGIN = 2.0
"""Seconds by which a lease outlives nsqd's message timeout: clock ticks and rounding of stores."""


class State(enum.Enum):
    """How far a delivery got."""

    ARRIVED = enum.auto()
    """It came; nobody has asked the store yet."""

    ASKED = enum.auto()
    """The store was asked, and has not answered yet."""

    READY = enum.auto()
    """It may be handled and waits for its turn."""

    RUNNING = enum.auto()
    """Its handler was called and has not answered."""

    STANDBY = enum.auto()
    """Another copy is being handled in this process: it shares that one's outcome."""

    WAITING = enum.auto()
    """Another copy is being handled elsewhere: it asks the store again from time to time."""

    ANSWERED = enum.auto()
    """Nothing more is to come of it."""


class Care(enum.IntEnum):
    """What is to be seen to before a delivery is started, besides its age."""

    NONE = 0

    TRIES = enum.auto()
    """Its message has failed before, perhaps too often."""

    TRACE = enum.auto()
    """Its run is to leave a trace in the store first."""

    DOOMED = enum.auto()
    """Too many runs of its message ended with their process: it is given up."""


class Outcome(enum.Enum):
    """How a handler run ended."""

    HANDLED = enum.auto()
    """It succeeded: confirm, then FIN."""

    GIVEN_UP = enum.auto()
    """Its message had failed often enough: confirm, then FIN."""

    FAILED = enum.auto()
    """It failed: release with a try and a hold, then REQ."""

    CANCELLED = enum.auto()
    """It was stopped from outside: release, then REQ. Costs no try."""

    INVALID = enum.auto()
    """The application does not want the message: release, then FIN. Nothing is remembered."""


CONFIRMS = (Outcome.HANDLED, Outcome.GIVEN_UP)
"""After these a message is done."""


class Source:
    """Where deliveries come from: one connection to one nsqd.

    Args:
        tally: counts the deliveries of this nsqd.

        msg_timeout: seconds after which nsqd gives an unanswered message out again.
    """

    __slots__ = ("fresh_for", "lease", "msg_timeout", "open", "ours_for", "tally")

    def __init__(self, tally: Tally, msg_timeout: float) -> None:
        self.tally = tally
        self.msg_timeout = msg_timeout
        self.lease = msg_timeout + LEASE_MARGIN
        self.ours_for = msg_timeout - min(0.5, msg_timeout / 10)
        """How long after its arrival a delivery may still be started: soon after, nsqd gives it out again."""
        self.fresh_for = min(self.ours_for, self.lease / 2)
        """How long it may be started without a look at its lease."""
        self.open = True


class Delivery:
    """One arrival of a copy.

    Everything has a default on the class, so that making one sets only what is known on arrival.
    """

    source: Source

    attempts: int = 1
    """How often nsqd has given this copy out, deferrals included."""

    fingerprint: bytes | None = None
    """What makes its message the same message; None: handled unprotected."""

    place: int = 0
    """Where the store would record its message, as `Direct.places` found; only where there is such a store."""

    owner: bytes = b""
    """Which copy it is: nsqd address and message id."""

    since: float = 0.0
    """It cannot have arrived before this moment (it may have waited unseen in the kernel's buffer)."""

    tries: int = 0
    """Handler runs of its message that had failed when it was claimed."""

    care: Care = Care.NONE
    """What is to be seen to before it is started."""

    claim: Claim | None = None
    """With what it asked for its message; None: nothing is de-duplicated, or it has no fingerprint."""

    observed: Claim | None = None
    """With what an observer looks its message up, until it is known to be done."""

    claimed_at: float = 0.0
    """When its lease began; while WAITING: so that ``claimed_at`` + lease is when the owner's ends."""

    protected: bool = True
    """Its claim was taken by the store; False: handled without, because the store was away."""

    state: State = State.ARRIVED
    outcome: Outcome | None = None
    delay: float | None = None
    """Seconds that the handler asked for when it failed; None: a multiple of the requeue delay."""

    runs_since: float | None = None
    """Since when its handler is known to be running (a coroutine), so that its lease is extended."""

    superseded: bool = False
    """A newer delivery of the same copy is here: that one answers nsqd."""

    standbys: dict[bytes, Delivery] | None = None
    """Copies of the same message that share its outcome, by `owner`."""

    poll_at: float = 0.0
    poll_after: float = 0.0
    """While WAITING: when to ask the store again, and the pause after that."""

    def may_run(self) -> bool:
        """Whether a handler had it, has it, or may get it without having to wait for another copy."""
        return self.outcome is not None or self.state in _ON_ITS_WAY


_ON_ITS_WAY = (State.ARRIVED, State.ASKED, State.READY, State.RUNNING)
