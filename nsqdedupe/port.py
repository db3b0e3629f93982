"""What the state machine wants done: the one way out of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from nsqdedupe.delivery import Delivery


class Port(Protocol):
    """What the state machine wants done. `run` and `give_up` may answer at once, the others call nothing back."""

    def run(self, delivery: Delivery, /) -> bool:
        """Call the handler. True: it has succeeded; else `Deduper.answer` says how it ended, now or later."""

    def run_on(
        self, ready: deque[Delivery], count: int, record: Callable[[bytes, int], None], until: float, /
    ) -> Delivery | None:
        """Run the first of those that are ready, `record` each success by fingerprint and place, and answer it FIN.

        They are taken out of ``ready`` one by one, each before its handler is called. May take none: then each is to
        be given to `run`.

        Args:
            ready: deliveries of messages that are neither done nor known.

            count: so many at its head are of one source, and no copies of one another; 1 or more.

            record: may raise.

            until: the clock's time at which no further one is begun; the first is begun in any case.

        Returns:
            The last one, if it has not succeeded in one go, or cannot be recorded or answered: `Deduper.answer` says
            how it ended, now or later. None if there is no such.
        """

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
