"""What the state machine wants done: the one way out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nsqdedupe.delivery import Delivery


class Port(Protocol):
    """What the state machine wants done. `run` and `give_up` may answer at once, the others call nothing back."""

    def run(self, delivery: Delivery, /) -> bool:
        """Call the handler. True: it has succeeded; else `Deduper.answer` says how it ended, now or later."""

    def give_up(self, delivery: Delivery, /) -> None:
        """Tell the application that its message failed too often; `Deduper.answer` follows."""

    def finish(self, deliveries: Sequence[Delivery], /, *, ran: bool) -> None:
        """Answer FIN, in this order. ``ran`` is False for duplicates: they say nothing about the handler."""

    def requeue(self, delivery: Delivery, delay: float, /, *, ran: bool) -> None:
        """Answer REQ. ``ran`` is False for a deferral: it says nothing about the handler."""

    def abandon(self, delivery: Delivery, /) -> None:
        """Answer nothing, ever."""

    def hold(self, delivery: Delivery, /) -> None:
        """It waits for another copy's outcome, and takes one of the places in flight meanwhile."""

    def looked_up(self, deliveries: Sequence[Delivery], /) -> None:
        """The store, which took a while, has answered for these, which came together."""

    def wake(self) -> None:
        """Call `Deduper.work` soon."""

    def waiting_limit(self) -> int:
        """How many copies may wait for owners elsewhere, now."""

    def paused(self) -> bool:
        """Whether no standby may become the owner of its message, now."""
