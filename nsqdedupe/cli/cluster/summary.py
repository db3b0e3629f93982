"""Says once a second what was published and handled, and whether anything is lost."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import urlencode

from nsqdedupe.cli.cluster.account import Account

LOOK_EVERY = 0.1
"""Seconds."""

SAY_EVERY = 1.0
"""Seconds."""

NSQD_TIMEOUT = 2.0
"""Seconds for an nsqd to answer."""


class Nsqd:
    """An nsqd that is asked what it has yet to give out.

    Args:
        address: ``host:port`` of its HTTP interface.

        topic: which messages count.

        channel: whose answers are awaited.
    """

    def __init__(self, address: str, topic: str, channel: str) -> None:
        self.address = address
        self._topic = topic
        self._channel = channel
        host, _, port = address.rpartition(":")
        # Not urllib.request: that would send a request for this network through a configured proxy. It connects when it
        # is asked for something, and again after it was closed; else its name would be looked up for each question.
        self._connection = http.client.HTTPConnection(host, int(port), timeout=NSQD_TIMEOUT)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._asked: Future[int | None] | None = None

    def owed(self) -> int | None:
        """How many messages it has yet to give out or to be answered for; None: it does not answer in time."""
        # The name of an nsqd that is down may take its resolver half a minute. Who still waits for that is not asked.
        if self._asked is None or self._asked.done():
            self._asked = self._thread.submit(self._ask)
            wait([self._asked], NSQD_TIMEOUT)
            return self._asked.result() if self._asked.done() else None
        return None

    def close(self) -> None:
        """Close the connection, when the last question is over; does not wait for that."""
        self._thread.submit(self._connection.close)
        self._thread.shutdown(wait=False)

    def _ask(self) -> int | None:
        try:
            # Not asked for the channel: a topic without such a channel would be left out, with all that it holds.
            self._connection.request("GET", "/stats?" + urlencode({"format": "json", "topic": self._topic}))
            stats = json.loads(self._connection.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException):
            self._connection.close()
            return None
        owed = 0
        for entry in stats["topics"] or ():  # null, if there is none
            owed += entry["depth"]
            for queue in entry["channels"]:
                if queue["channel_name"] == self._channel:
                    owed += queue["depth"] + queue["in_flight_count"] + queue["deferred_count"]
        return owed


class Summary:
    """What has become of the events so far.

    An event is *lost* when all nsqds have acknowledged it, nobody has handled it, and no nsqd that answers has
    anything left to give out. Until all of them are empty at the same time nobody can tell, and it is *waiting*.

    Args:
        account: of what was published and handled.

        nsqds: the HTTP address of each nsqd.

        topic: what is consumed.

        channel: by whom.
    """

    def __init__(self, account: Account, nsqds: Sequence[str], topic: str, channel: str) -> None:
        self.account = account
        self.lost: set[str] = set()
        """The events that are lost."""
        self.away: list[str] = []
        """The nsqds that do not answer."""
        self._nsqds = [Nsqd(address, topic, channel) for address in nsqds]

    def look(self) -> bool:
        """Look at everything once more. Blocks while an nsqd is slow, a few seconds at most, and not each time.

        Returns:
            Whether all nsqds answer, and are empty.
        """
        account = self.account
        account.read()
        before = set(account.waiting)
        # What is on its way from a topic to its channel is in neither for a moment: hence a second look.
        empty = self._all_empty() and self._all_empty()
        account.read()
        self.lost = (before if empty else self.lost) & account.waiting
        return empty and not self.away

    def close(self) -> None:
        """Ask no nsqd any more; what was seen stays."""
        for nsqd in self._nsqds:
            nsqd.close()

    def __str__(self) -> str:
        account = self.account
        return (
            f"published {account.published:,}, handled {account.handled:,}, "
            f"waiting {len(account.waiting - self.lost):,}, duplicates finished {account.duplicates:,}, "
            f"handled twice {account.twice:,}, lost {len(self.lost):,}"
            + "".join(f"; {nsqd} is down" for nsqd in self.away)
        )

    def _all_empty(self) -> bool:
        owed = {nsqd.address: nsqd.owed() for nsqd in self._nsqds}
        self.away = [address for address, count in owed.items() if count is None]
        return len(self.away) < len(owed) and not any(owed.values())


def main(argv: Sequence[str] | None = None) -> None:
    """Run it until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topic", default="events")
    parser.add_argument("--channel", default="demo")
    parser.add_argument("--nsqd-http-address", action="append", required=True)
    parser.add_argument("--account", type=Path, required=True, help="the directory of the journals")
    args = parser.parse_args(argv)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    summary = Summary(Account(args.account), args.nsqd_http_address, args.topic, args.channel)
    said = 0.0
    with contextlib.closing(summary):
        while not stopped.wait(LOOK_EVERY):
            summary.look()
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                print(summary, flush=True)


if __name__ == "__main__":
    main()
