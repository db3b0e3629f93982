"""One message, the deliveries of its copies, and the laws that hold in every order of their commands.

The numbers are those of the laws that the model of the claim protocol was explored for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from held import Command, HeldClient, Server

from nsqdedupe.memcached.items import TAIL
from nsqdedupe.store import Answer, Claim, Release, Store, Verdict


class Items(NamedTuple):
    """Where a store keeps a message."""

    claim: bytes
    bucket: bytes
    tag: bytes
    """What is in the bucket once the message is done."""


class Message:
    """What has become of a message so far, and what may therefore not come.

    Args:
        server: a connection that is not held.

        items: where it is kept.
    """

    def __init__(self, server: Server, items: Items) -> None:
        self._server = server
        self.items = items
        self.holder: Delivery | None = None
        """Who may believe that nobody else handles the message."""
        self.held_for: bytes | None = None
        """The copy that failed, while others must wait."""
        self._hold: bytes | None = None
        """What the claim item's token was when the hold began."""
        self.failures = 0
        self.confirming = False
        """Some success is on its way, or has arrived."""
        self.done = False
        """Some success was answered."""
        self.moved = False
        """Another message came into the bucket: the first write of a success may be in vain."""
        self.neighbours: list[bytes] = []
        """The tags of those that are in the bucket."""
        self.evicted = False
        """The server has forgotten the claim: two may be let in."""
        self.story: list[str] = []
        """When the first command of a verb went through, and its first write, and when it was over."""

    def told(self, delivery: Delivery, answer: Answer) -> None:
        """Judge the answer to a claim."""
        if answer.verdict is Verdict.DONE:
            assert self.confirming, "I1: DONE was answered, and nobody had succeeded"
        if answer.verdict is Verdict.NEW:
            assert not self.known(), "I5: a handler was let in though the bucket knows the message"
            assert not self.done, "I6: a handler was let in after a success was confirmed"
            if not self.evicted:
                assert self._may_follow(delivery), "I3: two were let in at once"
                assert not self.confirming or self.moved, "I3: a handler was let in though a success was on its way"
                assert self.held_for in {None, delivery.owner}, "another copy did not wait for the end of a hold"
                assert answer.tries == self.failures, "tries are the runs that failed"
            self.holder, self.held_for = delivery, None

    def passes(self, verb: str, command: Command) -> None:
        """Write down that a command is let through."""
        self._happens(f"{verb} begins")
        if command.name != b"mg":
            self._happens(f"{verb} writes")
            self.confirming |= verb == "confirm"

    def confirmed_by(self, delivery: Delivery) -> None:
        """A success was recorded, whoever had the claim."""
        self._happens("confirm ends")
        self.done = True
        assert self.known() or "forget begins" in self.story, "a success was confirmed, and the bucket does not know it"
        if self.holder is delivery:
            self.holder = None

    def released_by(self, delivery: Delivery, *, ours: bool, failed: bool, hold: float) -> None:
        """A claim was given back, or was somebody else's by then."""
        self._only_the_holder(delivery, ours=ours)
        if ours:
            self.holder = None
            self.held_for, self._hold = (delivery.owner, self._token()) if hold else (None, None)
            self.failures += failed

    def extended_by(self, delivery: Delivery, *, ours: bool) -> None:
        """A lease started anew, or was somebody else's by then."""
        self._only_the_holder(delivery, ours=ours)
        if ours:
            self.holder = delivery

    def forgotten(self) -> None:
        """It was never met."""
        self._happens("forget ends")
        self.holder = self.held_for = None
        self.done = self.confirming = False
        self.failures = 0

    def known(self, tag: bytes | None = None) -> bool:
        """Whether the bucket has it, or the other message that has this tag."""
        reply = self._server.ask(Command(b"mg %s v" % self.items.bucket))
        if not reply.startswith(b"VA "):
            return False
        value = reply.partition(b"\r\n")[2][:-2]
        size = len(self.items.tag)
        return (tag or self.items.tag) in [value[at : at + size] for at in range(0, len(value), size)]

    def claimed(self) -> bool:
        """Whether there is a claim, a hold, a count of tries or a marker."""
        return self._token() is not None

    def on_hold(self) -> bool:
        """Whether its last failure is still all that is known of it."""
        return self._hold is not None and self._token() == self._hold

    def end_lease(self) -> None:
        """Let the time of the claim, or of the hold, run into the tail: the item stays, with its CAS token."""
        self._server.ask(Command(b"mg %s T%d" % (self.items.claim, TAIL - 1)))
        self.holder = self.held_for = None

    def evict(self) -> None:
        """Take the claim item away, as a server does that needs room."""
        self._server.ask(Command(b"md %s" % self.items.claim))
        self.holder = self.held_for = None
        self.failures = 0

    def anything_goes(self) -> bool:
        """Whether a success and its being forgotten have crossed: then either may be so."""
        if "confirm writes" not in self.story or "forget begins" not in self.story:
            return False
        at = self.story.index
        return at("confirm writes") < at("forget ends") and at("forget begins") < at("confirm ends")

    def _token(self) -> bytes | None:
        """The CAS token of the claim item."""
        reply = self._server.ask(Command(b"mg %s c" % self.items.claim))
        return reply if reply.startswith(b"HD ") else None

    def _happens(self, what: str) -> None:
        if what not in self.story:
            self.story.append(what)

    def _may_follow(self, delivery: Delivery) -> bool:
        """Whether a delivery may be let in after the holder: its process knows that the older one does not run."""
        if self.holder is None:
            return True
        older, newer = self.holder.token, delivery.token
        same = older.owner == newer.owner and older.nonce[:8] == newer.nonce[:8]
        return same and older.nonce <= newer.nonce

    def _only_the_holder(self, delivery: Delivery, *, ours: bool) -> None:
        assert not ours or self.holder in {None, delivery}, "I4: a stale owner touched its successor's claim"
        assert ours or self.holder is not delivery, "the holder lost its claim to nobody"


class Delivery:
    """One delivery of a copy, in a process whose commands are held.

    Args:
        message: the message.

        client: the thread that its verbs run in.

        store: a store that is connected through the client.

        token: what it claims with.
    """

    def __init__(self, message: Message, client: HeldClient, store: Store, token: Claim) -> None:
        self.message = message
        self.client = client
        self.token = token
        self.verdict: Verdict | None = None
        """What it was told last."""
        self.ours: bool | None = None
        """What its last verb but a claim said."""
        self.heard = True
        """Whether anybody hears what its claims are answered."""
        self._store = store

    @property
    def owner(self) -> bytes:
        """Which copy it is."""
        return self.token.owner

    def claim(self, *, poll: bool = False) -> Verdict:
        """Ask for the message."""
        self.client.verb = "claim"
        (answer,) = self._store.claim([self.token._replace(poll=poll)])
        self.verdict = answer.verdict
        if self.heard:
            self.message.told(self, answer)
        return answer.verdict

    def confirm(self) -> None:
        """Record that its handler has succeeded."""
        self.client.verb = "confirm"
        (self.ours,) = self._store.confirm([self.token])
        self.message.confirmed_by(self)

    def release(self, *, failed: bool = True, hold: float = 0.0) -> None:
        """Give its claim back."""
        self.client.verb = "release"
        (self.ours,) = self._store.release([Release(self.token, failed, hold)])
        self.message.released_by(self, ours=self.ours, failed=failed, hold=hold)

    def extend(self) -> None:
        """Let its lease start anew."""
        self.client.verb = "extend"
        (self.ours,) = self._store.extend([self.token])
        self.message.extended_by(self, ours=self.ours)

    def start(self) -> None:
        """Leave a trace that its handler runs."""
        self.client.verb = "start"
        (self.ours,) = self._store.start([self.token])
        self.message.extended_by(self, ours=self.ours)

    def forget(self) -> None:
        """Be the operator who wants the message forgotten."""
        self.client.verb = "forget"
        self._store.forget([self.token.fingerprint])
        self.message.forgotten()

    def look_elsewhere(self) -> None:
        """Extend a claim that it does not have, of another message."""
        self.client.verb = "elsewhere"
        self._store.extend([self.token._replace(fingerprint=bytes(16))])

    def doing(self, program: Callable[[Delivery], object]) -> Program:
        """Begin a program of verbs; it stands before its first command."""
        self.client.begin(lambda: program(self))
        return Program(self)

    def do(self, program: Callable[[Delivery], object]) -> None:
        """Run a program to its end at once."""
        running = self.doing(program)
        while running.ready():
            running.step()


class Program:
    """What a delivery does, one command a step."""

    def __init__(self, delivery: Delivery) -> None:
        self._message = delivery.message
        self._client = delivery.client

    def ready(self) -> bool:
        """While it has not ended."""
        return bool(self._client.pending)

    def coming(self) -> str:
        """The command that is held, without its data."""
        return f"{self._client.name} {self._client.verb}: {self._client.pending[0].line.decode()}"

    def step(self) -> str:
        """Let it through."""
        self._message.passes(self._client.verb, self._client.pending[0])
        return self._client.step().partition(b"\r\n")[0].decode() or "nothing: it is quiet"


class Event:
    """Something that happens once, at any time.

    Args:
        name: for the record.

        deed: what happens, in one step.

        when: None: at any time.
    """

    def __init__(self, name: str, deed: Callable[[], None], when: Callable[[], bool] | None = None) -> None:
        self._name = name
        self._deed = deed
        self._when = when
        self._over = False

    def ready(self) -> bool:
        """Until it has happened."""
        return not self._over and (self._when is None or self._when())

    def coming(self) -> str:
        """Its name."""
        return self._name

    def step(self) -> str:
        """It happens."""
        self._over = True
        self._deed()
        return "happened"
