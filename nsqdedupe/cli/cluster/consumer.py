"""Consumes the events, beside others that share its memcached, and writes down which ones it has handled."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tornado.ioloop import PeriodicCallback

import nsqdedupe
from nsqdedupe.cli.cluster.account import DUPLICATES, HANDLED, Journal, number_of

MAX_IN_FLIGHT = 200

WORK = 0.005
"""Seconds of work on a message: long enough for its other copy to arrive meanwhile, here or elsewhere."""

SLOW_EVERY = 20
"""One event in so many takes `SLOW` seconds: so most of the time there is something in hand to kill."""

SLOW = 0.25

REPORT_EVERY = 500
"""Milliseconds."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run it until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topic", default="events")
    parser.add_argument("--channel", default="demo")
    parser.add_argument("--lookupd-http-address", action="append", required=True)
    parser.add_argument("--store", required=True, help="as for open_store: memcached://HOST:PORT?window=N")
    parser.add_argument("--account", type=Path, required=True, help="the directory of the journals")
    parser.add_argument("--name", default=socket.gethostname(), help="in the account; by default the host's")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    journal = Journal(args.account, args.name)

    async def handle(message: nsqdedupe.Message) -> bool:
        event = json.loads(message.body)["id"]
        await asyncio.sleep(WORK if number_of(event) % SLOW_EVERY else SLOW)
        # The last thing it does: who is killed before has not handled it, who is killed after it has.
        journal.write(HANDLED, [event])
        return True

    reader = nsqdedupe.DedupeReader(
        topic=args.topic,
        channel=args.channel,
        message_handler=handle,
        lookupd_http_addresses=args.lookupd_http_address,
        lookupd_poll_interval=1,
        key=nsqdedupe.json_field("id"),
        store=nsqdedupe.open_store(args.store),
        max_in_flight=MAX_IN_FLIGHT,
        output_buffer_timeout=25,
    )
    PeriodicCallback(lambda: journal.write(DUPLICATES, [reader.stats.duplicates]), REPORT_EVERY).start()
    nsqdedupe.run(timeout=10)
    journal.write(DUPLICATES, [reader.stats.duplicates])


if __name__ == "__main__":
    main()
