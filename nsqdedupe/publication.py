"""`Publication`: messages that go to nsqd in one command, and what came of it on each nsqd that was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from nsqdedupe import commands
from nsqdedupe.errors import PublishError
from nsqdedupe.pipeline import Pipeline

Future = asyncio.Future[tuple[str, ...]]

_OPEN = ""
_OK = "OK"
"""What an nsqd that was asked has answered, if it is not the reason why it failed."""

_ONE_SPOILS_ALL = ("E_BAD_MESSAGE", "E_BAD_BODY", "E_MPUB_FAILED")
"""How nsqd refuses a whole command when it may be about one of its messages."""


class Publication:
    """Messages of one topic, to be acknowledged by several nsqds. Each nsqd is asked once, in one command.

    nsqd takes all of them or none. When it refuses a command because of one message, those of other calls are
    not to suffer for it: then each call's messages become a publication of their own.

    Args:
        topic: where to.

        place: called when it needs other nsqds than those that were asked.

        settled: called once, when all of its futures are done.

        split: called with its parts, and nsqd's words, when it is divided; they take its place.

        defer_ms: milliseconds to defer its only message. 0: it is not deferred.

        alone: nsqd may well refuse it; so nothing else is to be on its way there meanwhile.
    """

    def __init__(
        self,
        topic: str,
        *,
        place: Callable[[Publication], None],
        settled: Callable[[Publication], None],
        split: Callable[[Publication, Sequence[Publication], str], None],
        defer_ms: int = 0,
        alone: bool = False,
    ) -> None:
        self.topic = topic
        self.size = 0
        """Bytes of its messages in an MPUB."""
        self.count = 0
        """How many messages it has."""
        self.done = False
        self.timer: asyncio.TimerHandle | None = None
        self._calls: dict[Future, Sequence[bytes]] = {}
        self._place, self._settled, self._split = place, settled, split
        self._defer_ms = defer_ms
        self._alone = alone
        self.copies = 0
        """How many nsqds must acknowledge it. 0: not known yet."""
        self.sent = False
        """It was sent, as far as there were nsqds."""
        self._command = b""
        self._answers: dict[Pipeline, str] = {}
        self._acknowledged = self._open = 0
        self._parts: Sequence[Publication] = ()

    def add(self, future: Future, bodies: Sequence[bytes]) -> None:
        """Take the messages of a call in, before anybody is asked; the future will get what becomes of them."""
        self._calls[future] = bodies
        self.count += len(bodies)
        self.size += sum(map(commands.framed, bodies))

    def drop(self, future: Future) -> int:
        """Leave the messages of a cancelled call out, unless they were sent; returns how many were left out."""
        if self._command or self.done or future not in self._calls:
            return 0
        bodies = self._calls.pop(future)
        self.count -= len(bodies)
        self.size -= sum(map(commands.framed, bodies))
        if not self._calls:
            self._settle()
        return len(bodies)

    # -- asking ----------------------------------------------------------------------------------

    @property
    def unplaced(self) -> int:
        """How many more nsqds must be asked."""
        return self.copies - self._acknowledged - self._open

    @property
    def hangs(self) -> bool:
        """Whether it waits for no answer at all."""
        return not self._open

    def aim(self, copies: int) -> None:
        """So many nsqds must acknowledge it. Once it was asked for, that may only become less."""
        if copies and (not self._answers or copies < self.copies):
            self.copies = copies
            if self._answers and self._acknowledged >= copies:
                self._succeed()

    def was_asked(self, pipeline: Pipeline) -> bool:
        """Whether this nsqd has been sent it, and has not made it certain that it must be sent again."""
        return pipeline in self._answers

    def ask(self, pipeline: Pipeline) -> None:
        """Send it to an nsqd, if that was not asked yet and takes it."""
        if pipeline in self._answers:
            return
        command = self._command or self._encode()
        if not command:
            return
        # First: if writing it fails at once, that is told before `send` returns.
        self._answers[pipeline] = _OPEN
        self._open += 1
        if not pipeline.send(command, self, alone=self._alone):
            del self._answers[pipeline]
            self._open -= 1

    def _encode(self) -> bytes:
        # A task that was cancelled just now has not said so yet. Its messages stay in the count, though not in the
        # command: their permits are given back with the others'.
        calls = self._calls.items()
        bodies = [body for future, bodies in calls if not future.done() for body in bodies]
        if not bodies:
            self._settle()
        elif self._defer_ms:
            self._command = commands.dpub(self.topic, self._defer_ms, bodies[0])
        elif len(bodies) == 1:
            self._command = commands.pub(self.topic, bodies[0])
        else:
            self._command = commands.mpub(self.topic, bodies)
        return self._command

    # -- answers ---------------------------------------------------------------------------------

    def acknowledged(self, pipeline: Pipeline) -> None:
        """As `nsqdedupe.pipeline.Ticket`."""
        for part in self._parts:
            part.acknowledged(pipeline)
        self._answers[pipeline] = _OK
        self._open -= 1
        self._acknowledged += 1
        if self.done:
            return
        if self._acknowledged >= self.copies:
            self._succeed()
        elif self.unplaced:
            self._place(self)

    def failed(self, pipeline: Pipeline, reason: str, *, again: bool) -> None:
        """As `nsqdedupe.pipeline.Ticket`."""
        for part in self._parts:
            part.failed(pipeline, reason, again=again)
        self._open -= 1
        if again:
            del self._answers[pipeline]
        else:
            self._answers[pipeline] = reason
        if self.done:
            return
        if not again and len(self._calls) > 1 and reason.startswith(_ONE_SPOILS_ALL):
            del self._answers[pipeline]
            self._divide(reason)
        else:
            self._place(self)

    def _divide(self, reason: str) -> None:
        """Let each call be a publication of its own, which goes on from what was answered so far."""
        parts = []
        for future, bodies in self._calls.items():
            part = Publication(self.topic, place=self._place, settled=self._settled, split=self._split, alone=True)
            part.add(future, bodies)
            part._answers = dict(self._answers)
            part.copies, part._acknowledged, part._open = self.copies, self._acknowledged, self._open
            parts.append(part)
        self._parts = parts
        self.done = True
        self._split(self, parts, reason)

    # -- the end ---------------------------------------------------------------------------------

    def _succeed(self) -> None:
        addresses = tuple(self._addresses())
        for future in self._calls:
            if not future.done():
                future.set_result(addresses)
        self._settle()

    def _settle(self) -> None:
        self.done = True
        self._settled(self)

    def give_up(self, pipelines: Iterable[Pipeline], unanswered: str, unasked: str = "", note: str = "") -> None:
        """Let its calls raise PublishError, unless it is done.

        Args:
            pipelines: all that it could have gone to.

            unanswered: why those that were asked and have not answered failed.

            unasked: why those that were needed and not asked failed. "": they are not connected.

            note: what else is to be told.
        """
        if self.done:
            return
        acknowledged = self._addresses()
        failed = {}
        for pipeline in dict.fromkeys([*self._answers, *pipelines]):
            answer = self._answers.get(pipeline)
            if answer is None and (self.unplaced or not self.copies):
                failed[pipeline.address] = unasked or f"not connected: {pipeline.trouble}"
            elif answer is not None and answer is not _OK:
                failed[pipeline.address] = answer or unanswered
        for future in self._calls:
            if not future.done():
                future.set_exception(publish_error(self.copies, acknowledged, failed, note))
        self._settle()

    def _addresses(self) -> list[str]:
        return [pipeline.address for pipeline, answer in self._answers.items() if answer is _OK]


def publish_error(copies: int, acknowledged: Sequence[str], failed: dict[str, str], note: str = "") -> PublishError:
    """The error of a publish: who acknowledged, who did not and why, and what to do.

    Args:
        copies: how many nsqds were to acknowledge it. 0: that was never known.

        acknowledged: addresses of those that did.

        failed: why others did not, by address.

        note: what else is to be told.
    """
    parts = [f"{', '.join(acknowledged)} acknowledged"] if acknowledged else []
    parts += [f"{address}: {reason}" for address, reason in failed.items()]
    parts += [note] if note else []
    reasons = " ".join(failed.values())
    if "too big" in reasons:
        parts.append("publish less at once, or raise nsqd's --max-msg-size or --max-body-size")
    elif "DPUB timeout" in reasons:
        parts.append("defer it for less, or raise nsqd's --max-req-timeout")
    else:
        parts.append("publish again, consumers de-duplicate")
    of = f" of {copies}" if copies else ""
    text = f"published to {len(acknowledged)}{of} nsqds: {'; '.join(parts)}"
    return PublishError(text, acknowledged=acknowledged, failed=failed)
