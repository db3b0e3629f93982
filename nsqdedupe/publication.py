"""`Publication`: what came of one call of publish on each nsqd that was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from nsqdedupe.errors import PublishError
from nsqdedupe.pipeline import Pipeline

_OPEN = ""
_OK = "OK"
"""What an nsqd that was asked has answered, if it is not the reason why it failed."""


class Publication:
    """A command that is to be acknowledged by several nsqds. Each is asked once.

    Args:
        command: what is sent.

        copies: how many nsqds must acknowledge it.

        future: gets their addresses, or a PublishError.

        place: called when it needs other nsqds than those that were asked, unless the future is done.
    """

    __slots__ = ("_answers", "_copies", "_needed", "_place", "command", "future", "unplaced")

    def __init__(
        self,
        command: bytes,
        copies: int,
        future: asyncio.Future[tuple[str, ...]],
        place: Callable[[Publication], None],
    ) -> None:
        self.command = command
        self.future = future
        self.unplaced = copies
        """How many more must be asked."""
        self._copies = copies
        self._needed = copies
        self._answers: dict[Pipeline, str] = {}
        self._place = place

    @property
    def asked(self) -> int:
        """How many were asked."""
        return len(self._answers)

    @property
    def hangs(self) -> bool:
        """Whether it waits for no answer at all."""
        return self._needed == self.unplaced

    def ask(self, pipeline: Pipeline) -> None:
        """Send it to an nsqd, if that was not asked yet and takes it."""
        if pipeline not in self._answers and pipeline.send(self.command, self):
            self._answers[pipeline] = _OPEN
            self.unplaced -= 1

    def acknowledged(self, pipeline: Pipeline) -> None:
        """As `nsqdedupe.pipeline.Ticket`."""
        self._answers[pipeline] = _OK
        self._needed -= 1
        if self.future.done():
            return
        if not self._needed:
            self.future.set_result(tuple(self._addresses()))
        elif self.unplaced:
            self._place(self)

    def failed(self, pipeline: Pipeline, reason: str, *, again: bool) -> None:
        """As `nsqdedupe.pipeline.Ticket`."""
        self.unplaced += 1
        if again:
            del self._answers[pipeline]
        else:
            self._answers[pipeline] = reason
        if not self.future.done():
            self._place(self)

    def give_up(self, pipelines: Iterable[Pipeline], unanswered: str, unasked: str = "") -> None:
        """Let it raise PublishError, unless it is done.

        Args:
            pipelines: all that there are.

            unanswered: why those that were asked and have not answered failed.

            unasked: why those that were needed and not asked failed. "": they are not connected.
        """
        if self.future.done():
            return
        acknowledged = self._addresses()
        failed = {}
        for pipeline in pipelines:
            answer = self._answers.get(pipeline)
            if answer is None and self.unplaced:
                failed[pipeline.address] = unasked or f"not connected: {pipeline.trouble}"
            elif answer is not None and answer is not _OK:
                failed[pipeline.address] = answer or unanswered
        parts = [f"{', '.join(acknowledged)} acknowledged"] if acknowledged else []
        parts += [f"{address}: {reason}" for address, reason in failed.items()]
        if any("too big" in reason for reason in failed.values()):
            parts.append("publish less at once, or raise nsqd's --max-msg-size or --max-body-size")
        else:
            parts.append("publish again, consumers de-duplicate")
        text = f"published to {len(acknowledged)} of {self._copies} nsqds: {'; '.join(parts)}"
        self.future.set_exception(PublishError(text, acknowledged=acknowledged, failed=failed))

    def _addresses(self) -> list[str]:
        return [pipeline.address for pipeline, answer in self._answers.items() if answer is _OK]
